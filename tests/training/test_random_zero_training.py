"""Random trainings by a Zero: modules, settings, optimizers and what people do between two steps, mixed.
RINGLET_TEST_PROGRAMS asks for more of them.

All ranks draw the same program from the seed, and delays of their own. Each also trains a twin by itself, plain torch
on the batches of all ranks, and compares with it after every step.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

import ringlet
from random_blocks import tensor_of
from random_zero_modules import EDITS, OPTIMIZERS, OPTIONS, Deed, Drawn, as_deepspeed, batch, settings_of
from ringlet.training.zero.released import Released
from ringlet.training.zero.sharded_gradient import ShardedGradient

CLOSE = {"rtol": 1e-7, "atol": 1e-9}
ROUGH = {"rtol": 0.05, "atol": 0.02}  # bfloat16 that rounds in another order

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "4"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 25  # so that every kind of step comes


class Training:
    """A Zero and its twin, and what may be done with both."""

    def __init__(self, seed: int, lot: random.Random, rank: int, world: int, folder: pathlib.Path) -> None:
        self.seed, self.lot, self.rank, self.world, self.folder = seed, lot, rank, world, folder
        self.low = lot.random() < 0.2  # bfloat16 with masters; else float64, or float32 under autocast
        self.cast = not self.low and lot.random() < 0.1
        self.name = "SGD" if self.low or self.cast else lot.choice(list(OPTIMIZERS))
        self.defaults = {"lr": 1e-2, **lot.choice(OPTIMIZERS[self.name])}
        torch.manual_seed(seed)
        self.twin = Drawn(lot).to(torch.float32 if self.low or self.cast else torch.float64)
        self.options = {n: lot.choice(OPTIONS) for n, _ in self.twin.named_parameters()} if lot.random() < 0.5 else {}
        self.window = {"accumulate": lot.choice((1, 1, 2, 3)), "average": lot.random() < 0.8}
        self.window["max_norm"] = lot.choice((None, None, 0.3))
        self.hooked = lot.random() < 0.3
        self.numbers = self.saves = self.steps = 0
        self.wrote = False  # since the last forward of the root, which takes what was written
        self.close = ROUGH if self.low or self.cast else CLOSE
        self.watch(self.twin)
        self.begin(self.equal_on_rank_0())

    def equal_on_rank_0(self) -> nn.Module:
        """A copy of the twin, with other values on the others."""
        module = copy.deepcopy(self.twin)
        self.watch(module)
        if self.rank != 0:
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.mul_(0)
        return module

    def begin(self, module: nn.Module) -> None:
        self.zero = self.zero_of(module)
        groups: dict[str, dict[str, Any]] = {}
        for name, p in self.twin.named_parameters():
            if p.requires_grad:
                given = self.options.get(name, {})
                groups.setdefault(repr(sorted(given.items())), {"params": [], **given})["params"].append(p)
        self.optimizer = getattr(torch.optim, self.name)(list(groups.values()), **self.defaults)
        self.steps = 0

    def zero_of(self, module: nn.Module) -> ringlet.Zero:
        self.settings = settings_of(self.lot, str(self.folder))
        given = {**self.settings, **self.window, "dtype": torch.bfloat16 if self.low else None}
        if self.window["average"] and self.lot.random() < 0.3:
            given = ringlet.settings.from_deepspeed(as_deepspeed(given)).zero()
        cls, options = getattr(torch.optim, self.name), self.options
        return ringlet.Zero(module, cls, options_of=lambda name, _: options.get(name, {}), **given, **self.defaults)

    def watch(self, module: nn.Module) -> None:
        """Hooks of a user's on gradients."""
        if self.hooked:
            module.embedding.weight.register_hook(lambda g: 0.5 * g)

    # -- one micro-batch --

    def draw_plan(self) -> dict[str, Any]:
        count = len(self.twin.parts)
        plan = {"without": self.lot.sample(range(count), self.lot.choice((0, 0, 1)) % count), "count": True}
        plan["directly"] = self.lot.random() < 0.1 and not self.wrote
        if self.lot.random() < 0.2:
            plan["order"] = self.lot.sample(range(count), count)
        plan["penalty"] = self.lot.random() < 0.15 and self.twin.has_second_derivatives and not self.low
        return plan

    def loss(self, module: nn.Module, number: int, rank: int, plan: dict[str, Any]) -> torch.Tensor:
        tokens, targets = batch(self.seed, number, rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            if plan.get("directly"):  # not through the root
                logits = module.head(torch.tanh(module.embedding(tokens)))
            else:
                logits = tensor_of(module(tokens, plan))
                self.wrote = self.wrote and module is not self.zero.module
        loss = functional.cross_entropy(logits.double(), targets)
        if plan.get("penalty") and "entered" in plan and torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(logits.sum(), plan["entered"], create_graph=True)
            loss = loss + slope.square().mean()
        return loss

    def micro_batch(self) -> None:
        plans = [self.draw_plan()] * self.world
        if self.settings["stage"] < 3 and self.lot.random() < 0.2:
            directly = plans[0]["directly"]  # all ranks call the root, which takes what was written, or none does
            plans = [{**self.draw_plan(), "count": False, "directly": directly} for _ in plans]  # buffers of its own
        self.numbers += 1
        times = 2 if self.window["accumulate"] == 1 and self.lot.random() < 0.2 else 1
        loss = self.loss(self.zero.module, self.numbers, self.rank, plans[self.rank])
        if self.lot.random() < 0.3:
            self.evaluate()  # between a forward and its backward
        for time_ in range(times):
            loss.backward(retain_graph=time_ + 1 < times)
        for p in self.zero.module.parameters():
            assert isinstance(p.grad, ShardedGradient) if p.requires_grad else p.grad is None
        for rank in range(self.world):
            there = self.loss(self.twin, self.numbers, rank, {**plans[rank], "count": rank == 0 and plans[0]["count"]})
            (there * times / self.world).backward()
            if rank == self.rank:
                torch.testing.assert_close(loss.detach(), there.detach(), **self.close)

    def train(self) -> None:
        full = self.window["accumulate"]
        micros = self.lot.randint(1, full)
        self.optimizer.zero_grad()
        for micro in range(micros):
            self.micro_batch()
            if self.lot.random() < 0.3:
                self.between()
            if micro + 1 < full:
                assert not self.zero.step()
                if self.lot.random() < 0.1:
                    self.fail_in_backward()
                    self.zero.zero_grad()
                    return self.train()
        self.zeros_for_none()
        for p in self.trained():
            p.grad /= micros if self.window["average"] else 1
        if micros == full and self.lot.random() < 0.5:
            self.edit_gradients()
            if full == 1 and self.lot.random() < 0.3:
                self.add_a_backward()
        if self.window["max_norm"] is not None:
            nn.utils.clip_grad_norm_(self.trained(), self.window["max_norm"])
        if self.lot.random() < 0.2:
            self.write()
        self.optimizer.step()
        if micros == full and self.lot.random() < 0.3:
            self.zero.optimizer.step()
            self.zero.optimizer.zero_grad()
        else:
            assert self.zero.step(partial=micros < full or self.lot.random() < 0.2)
        self.steps += 1
        self.compare()

    def add_a_backward(self) -> None:
        """Of a second loss, to gradients that were changed."""
        plan = self.draw_plan()
        self.numbers += 1
        self.loss(self.zero.module, self.numbers, self.rank, plan).backward()
        for rank in range(self.world):
            there = self.loss(self.twin, self.numbers, rank, {**plan, "count": rank == 0})
            (there / self.world).backward()

    def zeros_for_none(self) -> None:
        """A Zero takes None for zeros."""
        for p in self.trained():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    def edit_gradients(self) -> None:
        for name in self.lot.sample(list(EDITS), self.lot.choice((1, 1, 2))):
            found, expected = EDITS[name](self.zero.module), EDITS[name](self.twin)
            if expected is not None:
                torch.testing.assert_close(found.double(), expected.double(), **self.close)
        self.zeros_for_none()
        if self.lot.random() < 0.5:
            most = self.lot.choice((0.1, 5.0, float("inf")))
            expected = nn.utils.clip_grad_norm_(self.trained(), most)
            torch.testing.assert_close(self.zero.clip_grad_norm_(most).double(), expected.double(), **self.close)

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.twin.parameters() if p.requires_grad]

    # -- what else is done --

    def between(self) -> None:
        """In the middle of a window: none of it changes anything."""
        kinds = (self.evaluate, self.too_early, self.forget_loss, self.write_gathered, self.write, self.copy_aside)
        self.lot.choice(kinds)()

    def evaluate(self) -> None:
        """Each mode, also with all parameters gathered."""
        mode = self.lot.choice((torch.no_grad, torch.inference_mode))
        gathered = self.zero.gathered() if self.lot.random() < 0.3 else contextlib.nullcontext()
        plan = {**self.draw_plan(), "count": False}
        with mode(), gathered:
            mine = self.loss(self.zero.module, 0, 0, plan)
            torch.testing.assert_close(mine, self.loss(self.twin, 0, 0, plan), **self.close)

    def forget_loss(self) -> None:
        self.loss(self.zero.module, 0, self.rank, {**self.draw_plan(), "count": False})

    def write_gathered(self) -> None:
        """By rank 0 alone, or by all."""
        pairs = list(zip(self.zero.module.parameters(), self.twin.parameters(), strict=True))
        chosen = self.lot.sample(pairs, self.lot.randint(0, len(pairs)))
        alone = self.lot.random() < 0.5
        with self.zero.gathered(), torch.no_grad():
            for p, twin in chosen:
                values = p.data if self.lot.random() < 0.5 else p
                if self.rank == 0 or not alone:
                    values.mul_(0.5) if p.is_floating_point() else values.add_(1)
                twin.mul_(0.5) if twin.is_floating_point() else twin.add_(1)
        self.compare_gathered()

    def write(self) -> None:
        """Outside of gathered(), by all ranks, into parameters that are whole."""
        pairs = list(zip(self.zero.module.parameters(), self.twin.parameters(), strict=True))
        pairs = [(p, twin) for p, twin in pairs if not isinstance(p, Released) and p.is_floating_point()]
        self.wrote = True
        for both in self.lot.sample(pairs, self.lot.randint(0, len(pairs))):
            way = self.lot.choice(("in place", "data in place", "clipped", "other memory", "turned"))
            for p in both:
                if way == "in place":
                    with torch.no_grad():
                        p.mul_(0.5)
                elif way == "data in place":
                    p.data.mul_(0.5)
                elif way == "clipped":  # some of its elements
                    p.data.clamp_(-0.3, 0.3)
                elif way == "turned":  # the same memory, for a square in the same shape; not the twin's states
                    square = p.dim() == 2 and p.shape[0] == p.shape[1] and "fused" not in self.defaults
                    p.data = p.data.t() if square else p.data
                else:
                    p.data = p.data * 0.5

    def load(self) -> None:
        """By the module itself, of values that the twin takes too."""
        if self.settings["stage"] == 3:
            with (
                pytest.raises(ringlet.InvalidUsage, match="gathered")
                if any(isinstance(p, Released) for p in self.zero.module.parameters())
                else contextlib.nullcontext()
            ):
                self.zero.module.load_state_dict(self.twin.state_dict())
            return
        with torch.no_grad():
            for twin in self.twin.parameters():
                if twin.is_floating_point():
                    twin.mul_(0.75)
        self.zero.module.load_state_dict(self.twin.state_dict())
        if self.lot.random() < 0.5:
            self.compare()

    def refused(self) -> None:
        """Changes that cannot be followed, undone again."""
        module, kind = self.zero.module, self.lot.choice(("added", "unfrozen", "frozen", "other optimizer"))
        if kind == "added":
            module.added = nn.Parameter(torch.ones(3))
            with pytest.raises(ringlet.InvalidUsage, match="parameter added was not there"):
                self.loss(module, 0, 0, {"without": [], "count": False})
            del module.added
        elif kind == "unfrozen":
            for p in [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()][:1]:
                if not isinstance(p, Released):
                    p.requires_grad_(True)
                    with pytest.raises(ringlet.InvalidUsage, match="was frozen and requires a gradient"):
                        self.loss(module, 0, 0, {"without": [], "count": False})
                    p.requires_grad_(False)
        elif kind == "frozen":  # for a while
            if not isinstance(module.scale, Released):
                module.scale.requires_grad_(False)
                self.forget_loss()
                module.scale.requires_grad_(True)
        else:
            with pytest.raises(ringlet.InvalidUsage, match=r"Call zero.step\(\)"):
                torch.optim.SGD(module.parameters(), lr=0.1).step()

    def copy_aside(self) -> None:
        if self.settings["stage"] < 3:
            aside = copy.deepcopy(self.zero.module)
            self.loss(aside, 0, 0, {"without": [], "count": False}).backward()
            assert aside.scale.grad is not None

    def fail_in_forward(self) -> None:
        with pytest.raises(Deed):
            self.loss(self.zero.module, 0, 0, {"without": [], "count": False, "fails": len(self.twin.parts) - 1})

    def fail_in_backward(self) -> None:
        """At its very beginning or where some parameter's gradient arrives."""
        loss = self.loss(self.zero.module, 0, self.rank, {"without": [], "count": False})

        def fail(*_: Any) -> None:
            raise Deed("in backward")

        trained = [p for p in self.zero.module.parameters() if p.requires_grad]
        hook = self.lot.choice([loss, *trained]).register_hook(fail)
        with pytest.raises(Deed):
            loss.backward(retain_graph=True)
        hook.remove()
        if self.zero._record is not None and self.zero._record.launches.sent:
            with pytest.raises(ringlet.InvalidUsage, match="units had been sent"):
                self.fail_in_forward()
        elif self.lot.random() < 0.5:
            self.zero.zero_grad()

    def drop_a_window(self) -> None:
        self.loss(self.zero.module, 0, self.rank, {"without": [], "count": False}).backward()
        self.zero.zero_grad()

    def too_early(self) -> None:
        """Misuse; this is called in windows and between them."""
        with pytest.raises(ringlet.InvalidUsage):
            self.zero.clip_grad_norm_(-1.0)
        if self.settings["stage"] == 3:
            with self.zero.gathered(), pytest.raises(ringlet.InvalidUsage), self.zero.gathered():
                pass

    def too_late(self) -> None:
        with pytest.raises(ringlet.InvalidUsage, match="without a backward"):
            self.zero.step()
        assert not self.zero.step(partial=True)
        self.zero.module.zero_grad()

    def through_gathered(self) -> None:
        """A loss on the parameters themselves, whose backward comes when they are gone again."""
        if self.window["accumulate"] > 1:
            return
        with self.zero.gathered():
            loss = sum(p.square().sum() for p in self.zero.module.parameters() if p.requires_grad)
        loss.backward()
        self.optimizer.zero_grad()
        sum(p.square().sum() for p in self.trained()).backward()
        if self.window["max_norm"] is not None:
            nn.utils.clip_grad_norm_(self.trained(), self.window["max_norm"])
        self.optimizer.step()
        assert self.zero.step()
        self.steps += 1
        self.compare()

    def change_rates(self) -> None:
        number, factor = self.lot.randrange(len(self.optimizer.param_groups)), self.lot.choice((0.5, 1.5))
        for optimizer in (self.zero.optimizer, self.optimizer):
            optimizer.param_groups[number]["lr"] *= factor

    def schedule(self) -> None:
        for optimizer in (self.zero.optimizer, self.optimizer):
            rates = [(lambda _, n=n: 1.0 - 0.1 * (n % 3)) for n in range(len(optimizer.param_groups))]
            torch.optim.lr_scheduler.MultiplicativeLR(optimizer, rates).step()

    def save(self, name: str) -> str:
        folder = str(self.folder / name)
        dcp.save({"zero": self.zero}, checkpoint_id=folder)
        return folder

    def reload(self) -> None:
        """Into another Zero, of other values, stage and limits; or into itself."""
        self.saves += 1
        folder = self.save(f"saved-{self.seed}-{self.world}-{self.saves}")
        if self.lot.random() < 0.3:
            if self.lot.random() < 0.5:
                self.zero.load_state_dict(self.zero.state_dict())
        else:
            self.zero = self.zero_of(self.equal_on_rank_0())
        dcp.load({"zero": self.zero}, checkpoint_id=folder)
        self.compare()

    def keep(self) -> None:
        """For another world."""
        self.save(f"kept-{self.seed}")
        state = {"twin": self.twin.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.rank == 0:
            torch.save({**state, "numbers": self.numbers, "steps": self.steps}, self.folder / f"twin-{self.seed}")

    def resume(self) -> None:
        kept = torch.load(self.folder / f"twin-{self.seed}")
        self.twin.load_state_dict(kept["twin"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.numbers, self.steps = kept["numbers"], kept["steps"]
        dcp.load({"zero": self.zero}, checkpoint_id=str(self.folder / f"kept-{self.seed}"))
        self.compare()

    def replace(self) -> None:
        """Taken off, and another one made of the same module."""
        self.zero.remove()
        if not self.low:
            for (name, mine), p in zip(self.zero.module.named_parameters(), self.twin.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), p.detach(), msg=name, **self.close)
            self.loss(copy.deepcopy(self.zero.module), 0, 0, {"without": [], "count": False}).backward()
            self.begin(self.zero.module)
        else:  # its masters went with it
            self.begin(self.equal_on_rank_0())

    # -- comparison --

    def compare(self) -> None:
        self.compare_gathered()
        zero, stage = self.zero, self.settings["stage"]
        assert zero.steps == zero.stats()["steps"] == self.steps
        assert [g["lr"] for g in zero.optimizer.param_groups] == [g["lr"] for g in self.optimizer.param_groups]
        for name, p in zero.module.named_parameters():
            in_shards = stage == 3 and p.numel() > self.settings["persistence_elements"]
            assert isinstance(p, Released) == in_shards, name
            assert p.grad is None
        pools = [*zero._pools.values(), *(zero._residency.pools.values() if zero._residency else ())]
        if zero._record is None:  # else a backward has stopped
            assert not any(pool._borrowed for pool in pools[: len(zero._pools)])
        told = zero.stats()["memory"]
        held = 0
        for flat in zero._flats:
            unit = flat.unit
            count = unit.shard_count if stage == 3 and not unit.small else unit.count
            held += 0 if zero._files[1] and not unit.small else count * unit.dtype.itemsize
        assert told["parameters"] == held and told["total"] == sum(told[k] for k in told if k not in ("total", "file"))
        grads = 0
        for unit in zero._units:
            flat, wide = unit.flat.unit, zero.options.sum_dtype(unit.flat.unit.dtype).itemsize
            own = wide if stage == 1 and zero.options.accumulate > 1 else flat.dtype.itemsize
            grads += own * (flat.count if stage == 1 else flat.shard_count)
            grads += wide * flat.shard_count if len(unit.tensors()) > 1 else 0  # after a window of several reductions
        assert told["gradients"] == grads

    def compare_gathered(self) -> None:
        with self.zero.gathered():
            state, expected = self.zero.module.state_dict(), self.twin.state_dict()
            assert list(state) == list(expected)
            for name, value in expected.items():
                mine = state[name].to(value.dtype)
                torch.testing.assert_close(mine, value, msg=lambda text, n=name: f"{n}: {text}", **self.close)


class Program:
    """One rank's part of the program of a seed: one or two trainings, side by side."""

    def __init__(self, seed: int, rank: int, world: int, folder: str) -> None:
        self.lot = random.Random(seed)
        self.own = random.Random(1000 * seed + rank)
        count = self.lot.choice((1, 1, 2))
        self.trainings = [
            Training(10 * seed + n, random.Random(10 * seed + n), rank, world, pathlib.Path(folder))
            for n in range(count)
        ]

    def run(self, steps: int, resumes: bool) -> None:
        kinds = ["train"] * 7 + ["evaluate", "forget_loss", "fail_in_forward", "fail_in_backward", "drop_a_window"]
        kinds += ["too_early", "too_late", "through_gathered", "change_rates", "schedule", "replace", "load"]
        kinds += ["reload", "write", "refused"] * 2  # each at least once: `make test` has few programs
        deck: list[str] = []
        self.done: list[str] = []
        if resumes:
            for training in self.trainings:
                training.resume()
        for _ in range(steps):
            if self.own.random() < 0.05:
                time.sleep(0.01 * self.own.random())
            training = self.lot.choice(self.trainings)
            deck = deck or self.lot.sample(kinds, len(kinds))
            self.done.append(deck.pop())
            getattr(training, self.done[-1])()
        if not resumes:  # a folder is written once
            for training in self.trainings:
                training.keep()


def run_trainings(rank: int, world: int, seeds: range, steps: int, folder: str, resumes: bool) -> None:
    """resumes: what as many ranks or others have kept in the folder."""
    for seed in seeds:
        program = None
        try:
            program = Program(seed, rank, world, folder)
            program.run(steps, resumes)
        except Exception as error:
            done = [(t.settings, t.window, t.name, t.low) for t in program.trainings] if program else []
            said = f"training {seed} at rank {rank} of {world}, {program and program.done}, {done}: {error}"
            raise AssertionError(said) from error
        dist.barrier()


@pytest.mark.parametrize("worlds", [(2, 3), (3, 4), (4, 2)], ids="{0[0]} and then {0[1]}".format)
def test_trainings(pool, tmp_path, worlds):
    """Part of each by some ranks, the rest by another number of them; other programs in each pair of worlds."""
    first = FIRST + PROGRAMS * (worlds[0] - 2)
    seeds = range(first, first + PROGRAMS)
    for world in worlds:
        resumes = world == worlds[1]
        pool.values(run_trainings, world, seeds, STEPS, str(tmp_path), resumes, join="dist:ringlet")
