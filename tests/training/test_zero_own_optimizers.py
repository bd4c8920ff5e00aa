"""ZeRO with optimizers of the user's own, which keep and count what torch's do not."""

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ranks import on
from refusals import refused
from zero_checks import ROUNDING, STAGES, assert_same, make, train_alone, train_zero, zero_of


class Own(torch.optim.Optimizer):
    """Gradient descent, with a rate that `rate` gives for each parameter."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group["lr"] * self.rate(p, group))

    def begin(self, group):
        pass

    def move(self, p, rate):
        p.sub_(rate * p.grad)

    def rate(self, p, group):
        return 1.0


class GivesMemory(Own):
    def move(self, p, rate):
        p.data = p.data - rate * p.grad


class CountsItself(Own):
    def rate(self, p, group):
        return 1 / self.calls


class CountsForAll(Own):
    def begin(self, group):
        counts = self.state.setdefault("all", {"steps": torch.zeros(())})
        counts["steps"] += 1

    def rate(self, p, group):
        return 1 / self.state["all"]["steps"]


class CountsInGroup(Own):
    def begin(self, group):
        group["steps"] = group.get("steps", 0) + 1

    def rate(self, p, group):
        return 1 / group["steps"]


class Keeps(Own):
    """state[p]["kept"] is what `kept` returns, from the step `first` on."""

    first = 1

    def rate(self, p, group):
        if self.calls >= self.first:
            self.state[p]["kept"] = self.kept(p)
        return 1.0


class KeepsList(Keeps):
    def kept(self, p):
        return [p.grad.clone()]


class KeepsTwo(Keeps):
    def kept(self, p):
        return torch.stack([p.grad, p.grad])


class KeepsLate(Keeps):
    first = 2

    def kept(self, p):
        return p.grad.clone()


class ScheduleFree(Own):
    def train(self):
        pass

    def eval(self):
        pass


@on("two")
@pytest.mark.parametrize("cls", [GivesMemory, CountsItself, CountsForAll, CountsInGroup])
def test_they_train_as_alone(rank, world, cls):
    alone = make()
    train_alone(alone, world, 3, cls)
    for stage, limits in itertools.product(STAGES, ({}, {"sub_group_elements": 100})):
        zero = zero_of(make(), cls, stage, elementwise=True, **limits)
        train_zero(zero, rank, 3)
        assert_same(alone, zero, **ROUNDING)
        assert cls is not CountsInGroup or [group["steps"] for group in zero.optimizer.param_groups] == [3]


@on("two")
def test_what_their_groups_count_is_loaded(rank, world, folder):
    alone = make()
    train_alone(alone, world, 4, CountsInGroup)
    zero = zero_of(make(), CountsInGroup, 2, elementwise=True)
    zero.state_dict()  # makes places to load into, which the first step does not count from
    train_zero(zero, rank, 2)
    dcp.save({"zero": zero}, checkpoint_id=folder)
    other = zero_of(make(seed=99), CountsInGroup, 3, elementwise=True)
    dcp.load({"zero": other}, checkpoint_id=folder)
    train_zero(other, rank, 2, first=2)
    assert_same(alone, other, **ROUNDING)


@on("two")
def test_what_a_checkpoint_cannot_have_is_refused(rank, world):
    for cls, what in (
        (KeepsList, r"'kept' of .*, a list: a checkpoint has"),
        (KeepsTwo, r"'kept' of .*, a tensor of shape \[2, \d+\] for a part of \d+ elements"),
        (KeepsLate, r"'kept' of .*, which its first step does not make"),
        (CountsForAll, r"'all', of no parameter"),
    ):
        zero = zero_of(make(), cls, 1, elementwise=True)
        train_zero(zero, rank, 2)
        refused(f"(?s)state_dict\\(\\): the optimizer keeps .*{what}", zero.state_dict)
        train_zero(zero, rank, 1)
    refused("ScheduleFree changes parameters also outside of step", zero_of, make(), ScheduleFree, 1, elementwise=True)


@on("two")
def test_what_one_rank_alone_keeps_is_refused_on_both(rank, world):
    zero = zero_of(make(), Own, 1, elementwise=True)
    train_zero(zero, rank, 1)
    if rank == 0:
        zero.optimizer.state[zero.optimizer.param_groups[0]["params"][0]]["kept"] = [1]
    refused("keeps 'kept' of .*, a list" if rank == 0 else "keeps what rank 0 names", zero.state_dict)
    train_zero(zero, rank, 1)


@on("two")
def test_a_checkpoint_of_the_beginning_counts_from_the_beginning(rank, world, folder):
    zero = zero_of(make(), CountsInGroup, 1, elementwise=True)
    dcp.save({"zero": zero}, checkpoint_id=folder)
    train_zero(zero, rank, 2)
    dcp.load({"zero": zero}, checkpoint_id=folder)
    train_zero(zero, rank, 1)
    assert zero.optimizer.param_groups[0]["steps"] == 1


@on("two")
def test_an_option_that_changes_is_no_reason_to_refuse(rank, world):
    zero = zero_of(make(), torch.optim.SGD, 1, lr=0.1, momentum=0.9)
    train_zero(zero, rank, 2)
    zero.optimizer.param_groups[0]["momentum"] = 0.0
    train_zero(zero, rank, 1)
    zero.state_dict()


@on("two")
@pytest.mark.filterwarnings("ignore:state_dict.*no states after 1 steps:UserWarning")
def test_saving_after_the_states_were_removed_changes_nothing(rank, world):
    """As a reset of the moments does."""
    alone, zero = make(), zero_of(make(), stage=2, lr=1e-2)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    train_alone(alone, world, 1, optimizer=optimizer)
    train_zero(zero, rank, 1)
    optimizer.state.clear()
    zero.optimizer.state.clear()
    zero.state_dict()
    train_alone(alone, world, 2, optimizer=optimizer, first=1)
    train_zero(zero, rank, 2, first=1)
    assert_same(alone, zero, **ROUNDING)


@on("two")
def test_groups_are_the_same_in_any_order_of_names(rank, world):
    """torch's own checkpoints name a group's parameters in the module's order."""
    zero = zero_of(make(), stage=1, lr=1e-2)
    train_zero(zero, rank, 1)
    state = zero.state_dict()
    (group,) = state["optimizer"]["param_groups"]
    group["params"] = group["params"][::-1]
    group["lr"] = 0.25
    zero.load_state_dict(state)
    assert zero.optimizer.param_groups[0]["lr"] == 0.25
