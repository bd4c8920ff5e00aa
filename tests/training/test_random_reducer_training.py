"""Random trainings under the gradient reducer: modules, options and steps of all kinds, as no list has them.
RINGLET_TEST_PROGRAMS asks for more of them.

All ranks draw the same program from the seed. Every rank also trains a plain copy of each rank's module, its twins,
averages their gradients by hand, and compares its own module with its own twin after every step: gradients, None or
not, parameters and buffers.
"""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from expected_training import Twins, same
from random_blocks import tensor_of
from random_modules import Drawn, build
from random_training_steps import Pieces
from refusals import refused
from ringlet import GradientReducer, InvalidUsage

PROGRAMS = int(os.environ.get("RINGLET_TEST_PROGRAMS", "6"))
FIRST = int(os.environ.get("RINGLET_TEST_FIRST_PROGRAM", "0"))
STEPS = 28  # so that every kind of step comes


class Training(Pieces):
    """One rank's part of the program of a seed."""

    def run(self, steps: int) -> None:
        kinds: list[str] = []
        for _ in range(steps):
            kinds = kinds or self.shuffled_kinds()
            self.did.append(kinds.pop())
            getattr(self, self.did[-1])()
        self.close_window()

    def shuffled_kinds(self) -> list[str]:
        """Each at least once: `make test` has few programs."""
        found = ["train", "train", "accumulate", "without_sync", "evaluate", "edit_gradients", "save_and_load"]
        found += ["copy_module", "renew", "renew", "drop_a_loss", "misuse", "uneven", "many", "miss", "flush"]
        found += ["exchange_memory", "exchange_memory", "assign", "freeze_or_unfreeze", "freeze_or_unfreeze"]
        if not self.reentrant:
            found += ["two_forwards", "twice", "grad_of_grad", "fail", "fail", "with_autocast", "beside"]
        self.lot.shuffle(found)
        return found

    def train(self) -> None:
        self.zero_grad()
        reduced = self.closes
        self.backward(self.forward())
        if reduced:
            self.compare_views()
        self.step()

    def without_sync(self) -> None:
        """Some backwards that communicate nothing, then one that averages their sum."""
        self.close_window()
        self.zero_grad()
        if self.merge is None:
            with self.reducer.no_sync():
                self.no_sync = True
                for _ in range(self.lot.randint(1, 3)):
                    self.backward(self.forward())
                    if self.lot.random() < 0.4:
                        self.zero_grad()
                self.no_sync = False
        self.backward(self.forward())
        self.step()

    def accumulate(self) -> None:
        """Windows of gradient merge, the last of them perhaps short."""
        self.close_window()
        k = self.lot.randint(1, 4)
        self.merge = self.reducer.accumulate(k, average=self.lot.random() < 0.7)
        for _ in range(self.lot.randint(1, 3)):
            self.zero_grad()
            for _ in range(k):
                self.backward(self.forward())
            self.step()
        self.zero_grad("none")
        for _ in range(self.lot.randint(0, k - 1)):
            self.backward(self.forward())
            self.maybe_misuse_window()

    def close_window(self) -> None:
        if self.merge is None:
            return
        seen = self.merge.seen
        if seen:
            before = self.merge.average
            self.twins.reduce(1 / seen if before else 1.0)
        assert self.merge.finish() is bool(seen)
        self.compare()
        if seen:
            self.step()

    def maybe_misuse_window(self) -> None:
        if self.lot.random() > 0.3:
            return
        wrong = [lambda: self.reducer.accumulate(2), self.reducer.remove]
        if self.optimizer is not None:
            wrong.append(self.optimizer.step)
        for call in wrong:
            refused("micro-batches: their gradients are not reduced yet", call)
        self.compare()

    def evaluate(self) -> None:
        """Without gradients, perhaps on one rank alone, whose buffers may change."""
        alone = self.lot.choice((None, *range(self.world)))
        training = self.lot.random() < 0.5
        self.inputs += 1
        for model, rank in self.models:
            if alone in (None, rank):
                model.train(training)
                with torch.no_grad():
                    model(self.data(rank))
                model.train()
        self.compare()

    def edit_gradients(self) -> None:
        """The user's own values in .grad: they count, as what was there before a backward."""
        self.close_window()
        how = self.lot.choice(("scale", "replace", "drop", "fill"))
        for name in self.lot.sample(self.twins.names, min(3, len(self.twins.names))):
            for model, rank in self.models:
                parameter = dict(model.named_parameters())[name]
                if how == "replace":
                    parameter.grad = torch.full_like(parameter, rank + 1.0)
                elif parameter.grad is None:
                    continue
                elif how == "drop":
                    parameter.grad = None
                else:
                    parameter.grad = parameter.grad.mul_(2) if how == "scale" else parameter.grad.fill_(rank - 1.0)
        self.compare()
        self.backward(self.forward())
        self.step()

    def two_forwards(self) -> None:
        self.zero_grad()
        skips = self.draw_skips()
        first, second = self.forward(skips), self.forward(skips)
        if self.lot.random() < 0.5 or self.in_backward:
            self.backward([a + b for a, b in zip(first, second, strict=True)])
        else:
            self.backward(first)
            self.backward(second)
        self.step()

    def twice(self) -> None:
        self.zero_grad()
        losses = self.forward()
        if self.in_backward:  # the first backward may change what the second needs
            self.backward(losses)
            return
        self.backward(losses, retain_graph=True)
        self.backward(losses)
        self.step()

    def drop_a_loss(self) -> None:
        self.forward()

    def grad_of_grad(self) -> None:
        """torch.autograd.grad leaves .grad alone; its result may be a part of the loss."""
        complete = self.merge is not None and self.merge.complete
        wanted = self.lot.random() < 0.5
        losses = self.forward()
        found = [
            torch.autograd.grad(loss, [model.blocks[0].weight], create_graph=wanted)[0]
            for loss, (model, _) in zip(losses, self.models, strict=True)
        ]
        same("autograd.grad", found[0].detach(), found[1 + self.rank].detach(), self.twins.coarse)
        assert self.merge is None or self.merge.complete is complete
        self.compare()
        if wanted:
            losses = self.forward(self.latest_skips)
            self.backward([loss + f.square().sum() for loss, f in zip(losses, found, strict=True)])

    def with_autocast(self) -> None:
        self.autocast = True
        self.train()
        self.autocast = False

    def fail(self) -> None:
        """In the middle of a forward or of a backward, on all ranks; then training goes on."""
        if self.options["static_graph"] or self.comm_hook:  # ranks might have sent different numbers of buckets
            return
        where = self.lot.choice(("forward", "backward"))
        later = self.forward([set()] * self.world) if self.lot.random() < 0.3 else None
        for model, _ in self.models:
            model.fails = where
        self.twins.before_forward(self.closes)
        self.inputs += 1
        for model, rank in self.models:
            try:
                tensor_of(model(self.data(rank))).sum().backward()
                raise AssertionError("it did not fail")
            except ArithmeticError:
                pass
            model.fails = ""
        self.recover(later)

    def recover(self, later: list[torch.Tensor] | None) -> None:
        """The next forward, or a backward of an earlier one, says whether the ranks still match."""
        try:
            if later is not None:
                self.backward(later)
            else:
                self.model(self.data(self.rank))
        except InvalidUsage as error:
            if "stopped in micro-batch" in str(error):
                assert self.merge is not None
                self.zero_grad("none")
                self.compare()
            else:
                assert "make a new process group and train on it" in str(error), error
                self.zero_grad("none")
                if self.in_backward:  # some parameters may have been updated
                    self.model.load_state_dict(self.twins.models[self.rank].state_dict())
                self.renew(dist.new_group())
        else:
            if later is None:
                self.twins.before_forward(self.closes)
                self.inputs_of_twins()

    def inputs_of_twins(self) -> None:
        for rank, model in enumerate(self.twins.models):
            model(self.data(rank))

    def save_and_load(self) -> None:
        for model, _ in self.models:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        for optimizer in (self.optimizer, *self.twins.optimizers):
            if optimizer is not None:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.compare()

    def copy_module(self) -> None:
        """A copy is nobody's: it trains alone."""
        copied = copy.deepcopy(self.model)
        for (name, ours), theirs in zip(self.model.named_parameters(), copied.parameters(), strict=True):
            same(f"copied {name}", theirs.detach(), ours.detach())
        tensor_of(copied(self.data(self.rank))).sum().backward()
        self.compare()

    def renew(self, group: dist.ProcessGroup | None = None) -> None:
        """Another reducer in place of this one, with other options."""
        if group is None:
            self.close_window()
        self.reducer.remove()
        self.group = group or self.group
        if not self.reentrant:
            self.options = self.draw_options()
        keeps = self.options["gradient_as_bucket_view"] and self.lot.random() < 0.5
        if not keeps:
            self.zero_grad("none")
        self.make_reducer()
        self.elsewhere = keeps
        self.compare()

    def exchange_memory(self) -> None:
        """Other memory, perhaps in another layout, under gradients or parameters: nothing changes."""
        how = self.lot.choice(("gradients", "transposed", "parameters", "channels_last", "contiguous", "shared"))
        for name in self.lot.sample(self.twins.names, min(3, len(self.twins.names))):
            for model, _ in self.models:
                parameter = dict(model.named_parameters())[name]
                if how == "parameters":
                    parameter.data = parameter.data.clone()
                elif how in ("gradients", "transposed") and parameter.grad is not None:
                    gradient = parameter.grad.detach().clone()
                    if how == "transposed" and gradient.dim() == 2:
                        gradient = gradient.t().contiguous().t()
                        self.transposed.add(name)
                    parameter.grad.data = gradient
        self.elsewhere |= how in ("channels_last", "contiguous", "shared")
        if how in ("channels_last", "contiguous"):
            for model, _ in self.models:
                model.to(memory_format=torch.channels_last if how == "channels_last" else torch.contiguous_format)
        elif how == "shared":
            for model, _ in self.models:
                model.share_memory()
        self.compare()
        self.backward(self.forward())
        self.step()

    def assign(self) -> None:
        """Other parameters with the same values."""
        self.close_window()
        for model, _ in self.models:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        self.refuse_and_renew("is another object")

    def freeze_or_unfreeze(self) -> None:
        self.close_window()
        named = dict(self.model.named_parameters())
        frozen = [name for name in self.twins.copied if not named[name].requires_grad]
        chosen = self.lot.choice(frozen or self.twins.names)
        if not frozen and (chosen == "blocks.0.weight" or self.reentrant):
            return
        for model, _ in self.models:
            dict(model.named_parameters())[chosen].requires_grad_(bool(frozen))
        if frozen:
            self.refuse_and_renew(f"parameter {chosen} was frozen and requires a gradient now")
        else:
            self.twins.follow()
            self.renew()

    def refuse_and_renew(self, words: str) -> None:
        refused(re.escape(words), self.model, self.data(self.rank))
        self.compare()
        self.twins.follow()
        self.renew()

    def flush(self) -> None:
        self.close_window()
        assert self.reducer.flush() is self.twins.flush()
        self.compare()

    def many(self) -> None:
        """As many as measured merging looks at."""
        for _ in range(30 if self.options["bucket_mb"] == "measured" else 2):
            self.train()

    def miss(self) -> None:
        """Parameters that get no gradient: refused where some may not, or a backward of a few of them."""
        self.close_window()
        self.zero_grad("none")
        if self.options["static_graph"] or (self.merge is not None and self.merge.k > 1):
            return
        if self.strict and self.in_backward:  # those that are not refused have stepped, so ranks differ from then on
            return
        skips: list[set[int]] = [set()] * self.world
        if self.strict:
            missing = self.lot.sample(range(self.world), self.lot.randint(1, self.world))
            skips = [{self.lot.randint(1, len(self.model.blocks) - 1)} if r in missing else set() for r in missing]
            skips = [skips[missing.index(r)] if r in missing else set() for r in range(self.world)]
        losses = self.forward(skips)
        chosen = ["blocks.0.weight", *self.lot.sample(self.twins.names, min(2, len(self.twins.names)))]
        inputs: Any = None
        for loss, (model, _) in list(zip(losses, self.models, strict=True))[1:]:
            if not self.strict:
                inputs = [dict(model.named_parameters())[name] for name in chosen]
            loss.backward(inputs=inputs)
        twin = dict(self.twins.models[self.rank].named_parameters())
        if self.strict and any(twin[name].grad is None for name in self.twins.names):
            refused("got no gradient in this backward", losses[0].backward)
        else:
            inputs = None if self.strict else [dict(self.model.named_parameters())[name] for name in chosen]
            losses[0].backward(inputs=inputs)
        self.twins.reduce()
        self.compare()

    def uneven(self) -> None:
        """Ranks with different numbers of inputs."""
        self.close_window()
        measured = self.options["bucket_mb"] == "measured"
        if self.merge is not None or self.options["delay"] or measured or self.in_backward:
            refused(r"join\(\) cannot be combined", self.reducer.join)
            return
        counts = [self.lot.randint(1, 4) for _ in range(self.world)]
        initial = self.lot.random() < 0.5
        plan = [(self.lot.choice(("none", "zero")), self.draw_skips(), self.inputs + t) for t in range(max(counts))]
        before = self.twins.reductions
        with self.reducer.join(divide_by_initial_world_size=initial):
            for step in range(counts[self.rank]):
                self.uneven_step([r for r, count in enumerate(counts) if count > step], initial, *plan[step])
                self.compare()
        for step in range(counts[self.rank], max(counts)):
            self.uneven_step([r for r, count in enumerate(counts) if count > step], initial, *plan[step])
        self.twins.state_of(max(r for r, count in enumerate(counts) if count == max(counts)))
        self.twins.reductions = before + counts[self.rank]
        self.inputs += max(counts)
        self.compare()

    def uneven_step(self, active: list[int], initial: bool, how: str, skips: list[set[int]], inputs: int) -> None:
        self.pause()
        self.inputs, before = inputs, self.inputs
        own = [(self.model, self.optimizer)] if self.rank in active else []
        twins = [(self.twins.models[rank], self.twins.optimizers[rank]) for rank in active]
        self.twins.before_forward(True, max(active))
        for place, (model, _) in enumerate(own + twins):
            rank = (len(own) * [self.rank] + active)[place]
            model.zero_grad(set_to_none=how == "none")
            tensor_of(model(self.data(rank), skips[rank])).square().mean().backward()
        self.twins.reduce(1.0 if initial else self.world / len(active), active)
        for _, optimizer in own + twins:
            optimizer.step()
        self.inputs = before

    def beside(self) -> None:
        """A second module with a reducer of its own, in the same backwards."""
        models = [build(self.seed + 5000, rank) for rank in range(self.world)]
        own, twins = copy.deepcopy(models[self.rank]), Twins(models)
        options = self.options | {"delay": 0, "bucket_mb": 0.0005, "static_graph": False}
        shared = not (self.comm_hook or self.twins.may_be_unused) and self.lot.random() < 0.5
        group = self.group if shared else dist.new_group()
        reducer = GradientReducer(own, group=group, **options)
        twins.begin(options, None)
        for _ in range(3):
            self.zero_grad()
            losses = self.forward()
            twins.before_forward(True)
            more = [tensor_of(model(self.data(rank))).sum() for model, rank in [(own, self.rank), *enumerated(models)]]
            self.backward([a * b for a, b in zip(losses, more, strict=True)])
            twins.reduce()
            for (name, ours), theirs in zip(own.named_parameters(), models[self.rank].parameters(), strict=True):
                same(f"gradient of the other's {name}", ours.grad, theirs.grad, twins.coarse or self.twins.coarse)
        reducer.remove()

    def misuse(self) -> None:
        if self.merge is not None:
            refused(r"no_sync\(\) after accumulate\(\)", lambda: self.reducer.no_sync().__enter__())
        else:
            with self.reducer.no_sync():
                refused(r"accumulate\(\) inside no_sync\(\)", self.reducer.accumulate, 2)
        for k in (0, -1, 2.0):
            refused("from 1 on", self.reducer.accumulate, k)
        self.compare()


def enumerated(models: list[Drawn]) -> list[tuple[Drawn, int]]:
    return [(model, rank) for rank, model in enumerate(models)]


def run_trainings(rank: int, world: int, seeds: range, steps: int) -> None:
    for seed in seeds:
        training = None
        try:
            training = Training(rank, world, seed)
            training.run(steps)
        except Exception as error:
            did, options = (training.did, training.options) if training else ([], {})
            raise AssertionError(f"training {seed} at rank {rank} of {world}, {options}, {did}: {error}") from error


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", "ringlet"])
def test_trainings(pool, backend, world):
    """Other programs in each group: the first options of a program go by its number."""
    first = FIRST + PROGRAMS * (world - 2 + 3 * (backend == "gloo"))
    pool.values(run_trainings, world, range(first, first + PROGRAMS), STEPS, join=f"dist:{backend}")
