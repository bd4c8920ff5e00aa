"""What ZeRO refuses, by name and before anything moves; and calls in the wrong order."""

import dataclasses
import inspect
from unittest import mock

import pytest
import torch
from torch import nn

import ringlet
from ranks import on
from refusals import refused
from ringlet.training import agree
from ringlet.training.zero.options import Options
from zero_checks import STAGES, batch, loss_of, make, train_zero, zero_of


class Rows(torch.optim.Adam):
    pass


class Lamb(torch.optim.Optimizer):
    pass


Lamb.__name__ = "LAMB"


@on("two")
def test_optimizers_that_are_not_elementwise(rank, world):
    model = make()
    for cls, reason in (
        (torch.optim.LBFGS, "LBFGS cannot run on flat shards: it needs all parameters at once"),
        (torch.optim.Muon, "Muon cannot run on flat shards: it orthogonalises whole matrices"),
        (torch.optim.Adafactor, "Adafactor cannot run on flat shards: it keeps statistics of whole rows"),
        (torch.optim.SparseAdam, "SparseAdam cannot run on flat shards: it takes sparse gradients"),
        (Lamb, "LAMB cannot run on flat shards: it takes norms of whole layers"),
        (Rows, r"Rows is not known to update each element independently.*known: ASGD, Ada.*elementwise=True"),
        ("Adam", "optimizer_class must be a class of torch.optim.Optimizer, got 'Adam'"),
    ):
        refused(reason, zero_of, model, cls, 1, lr=0.1)
    refused("LBFGS", zero_of, model, torch.optim.LBFGS, 1, elementwise=True)
    zero = zero_of(model, Rows, 2, elementwise=True, lr=1e-2)
    train_zero(zero, rank, 1)


@on("two")
def test_settings_that_cannot_be(rank, world):
    model = make()
    for given, reason in (
        ({"stage": 4}, "stage must be 1, 2 or 3, got 4"),
        ({"stage": 0}, "stage must be 1, 2 or 3, got 0; for stage 0 use GradientReducer"),
        ({"dtype": torch.float16}, "dtype must be .* got torch.float16; it needs loss scaling"),
        ({"accumulate": 0}, "accumulate must be a whole number from 1 on, got 0"),
        ({"sub_group_elements": -1}, "sub_group_elements must be"),
        ({"max_norm": 0.0}, "max_norm must be positive"),
        ({"average": 1}, "average must be True or False, got 1"),
        ({"persistence_elements": -1}, "persistence_elements must be a whole number from 0 on, got -1"),
        ({"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage 3: at stage 2"),
        ({"offload_optimizer": "nvme"}, "Offload: device must be 'cpu' or 'file', got 'nvme'"),
        ({"bucket_elements": 1.5}, "bucket_elements must be a whole number from 1 on, got 1.5"),
        ({"accumulate": True}, "accumulate must be a whole number from 1 on, got True"),
        ({"stage": True}, "stage must be 1, 2 or 3, got True"),
        ({"dtype": "bfloat16"}, "dtype must be bfloat16, float32 or float64, got bfloat16"),
        ({"max_norm": float("nan")}, "max_norm must be positive, got nan"),
        ({"max_norm": float("inf")}, "max_norm must be positive and finite, got inf; None does not clip"),
        ({"print_every": float("nan")}, "print_every must be a whole number from 0 on, got nan"),
        ({"overlap": "no"}, "overlap must be True or False, got 'no'"),
        ({"offload_optimizer": 3}, "offload_optimizer must be 'cpu', an Offload or None, got 3"),
        ({"group": "world"}, "group is a str, not a group of torch.distributed"),
        ({"options_of": {}}, r"options_of must be a function of \(name, parameter\), got a dict"),
        (
            {"options_of": lambda name, p: 0.1},
            "options_of must return a dict of optimizer options, got 0.1 for positions",
        ),
        (
            {"options_of": lambda name, p: {"lr": object()}},
            "options_of: lr is a object, which ranks cannot compare: give numbers, strings or tensors",
        ),
        ({"options_of": lambda name, p: {"params": [p]}}, "options_of: the dict for positions has 'params': leave"),
        ({"eps": -1}, "the optimizer refuses its arguments: Invalid epsilon value: -1"),
        ({"print_times": True}, "print_times=True needs print_every"),
    ):
        refused(reason, zero_of, model, lr=0.1, **given)
    refused(r"the optimizer refuses its arguments.*learning_rate", zero_of, model, learning_rate=0.1)


def test_offloads_that_cannot_be():
    refused("is not a folder", ringlet.Offload, "file", "/nowhere/at/all")
    for path in (3, b"/tmp", "", "/tmp\0"):
        refused("is not a folder", ringlet.Offload, "file", path)
    refused("pin_memory must be True or False, got 'yes'", ringlet.Offload, "cpu", pin_memory="yes")
    refused("Offload: device must be 'cpu' or 'file', got nan", ringlet.Offload, float("nan"))
    refused("leave it out with 'cpu'", ringlet.Offload, "cpu", "/tmp")
    if not torch.accelerator.is_available():
        refused(r"pin_memory=True needs .* an accelerator", ringlet.Offload, "cpu", pin_memory=True)


class Special(nn.Parameter):
    pass


@on("two")
def test_modules_that_cannot_be(rank, world):
    frozen = make().requires_grad_(False)
    special = nn.Linear(3, 3)
    special.weight = Special(torch.ones(3, 3))
    with torch.device("meta"):
        empty = nn.Linear(3, 3)
    empty_buffer, sparse = nn.BatchNorm1d(3), nn.Linear(3, 3)
    empty_buffer.running_mean = torch.zeros(3, device="meta")
    sparse.register_buffer("few", torch.eye(3).to_sparse())
    for module, reason in (
        (empty_buffer, "buffer running_mean is on the meta device"),
        (sparse, "buffer few is torch.float32 of layout torch.sparse_coo"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "parameter 0.weight has no shape yet"),
        (None, "module is a NoneType, not a torch.nn.Module"),
        (frozen, "no parameter of Model requires a gradient"),
        (special, "parameter weight is a Special: only a plain nn.Parameter"),
        (empty, "parameter weight is on the meta device"),
        (nn.Linear(3, 3).half(), r"parameter weight is torch\.float16: Zero trains bfloat16"),
        (nn.Linear(3, 3, dtype=torch.complex64), r"parameter weight is torch\.complex64"),
        (nn.Sequential(nn.Embedding(4, 4, sparse=True)), "0 makes sparse gradients"),
    ):
        refused(reason, ringlet.Zero, module, torch.optim.SGD, 1, lr=0.1)


@on("two")
@mock.patch.object(agree, "ALIKE_SECONDS", 0.5)
def test_what_is_wrong_on_one_rank_is_refused_on_all(rank, world):
    wrong = {"max_norm": float("nan")} if rank == 1 else {}
    reason = "max_norm must be positive, got nan"
    refused(reason if rank == 1 else f"rank 1 refused .*{reason}", zero_of, make(), lr=0.1, **wrong)


def test_no_process_group():
    with pytest.raises(ringlet.InvalidUsage, match=r"no process group yet: call torch.distributed.init_process_group"):
        ringlet.Zero(nn.Linear(2, 2), torch.optim.SGD, lr=0.1)


def test_settings_have_the_defaults_of_options():
    given = inspect.signature(ringlet.Zero.__init__).parameters
    for field in dataclasses.fields(Options):
        assert field.name == "optimizer" or given[field.name].default == field.default, field.name


@on("two")
def test_ranks_that_differ(rank, world):
    refused("rank 0 has 'setting stage=1', rank 1 has 'setting stage=2'", zero_of, make(), stage=1 + rank, lr=0.1)
    with pytest.raises(ringlet.InvalidUsage, match="rank 0 has 'setting accumulate=1', rank 1 has 'setting accum"):
        zero_of(make(), accumulate=1 + rank, lr=0.1)
    refused(r"rank 0 has 'setting optimizer=AdamW \{'lr': 0.5\}', rank 1 has", zero_of, make(), lr=0.5 + rank)
    with pytest.raises(ringlet.InvalidUsage, match=r"ranks hold different models: rank 0 has .*blocks\.3"):
        ringlet.Zero(make(layers=4 - rank), torch.optim.SGD, 1, lr=0.1)


class Scheduled(torch.optim.SGD):
    """A user's own optimizer, with an argument of any kind."""

    def __init__(self, params, schedule, **defaults):
        super().__init__(params, **defaults)


@on("two")
def test_arguments_of_the_optimizer_are_compared(rank, world):
    """To the last bit. The type counts of those whose repr has an address, which differs between ranks."""
    for schedule, other, alike in (
        (lambda step: 0.1, lambda step: 0.2, True),
        ([object()], [object()], True),
        ([object()], [len], False),
        ({"warmup": 10}, {"warmup": 20}, False),
        (torch.tensor(0.1).double(), torch.tensor(0.1).double() + 1e-9, False),
    ):
        given = {"lr": 0.1, "schedule": other if rank else schedule, "elementwise": True}
        if alike:
            zero_of(make(), Scheduled, **given).remove()
        else:
            refused("rank 0 has 'setting optimizer=Scheduled .*rank 1 has", zero_of, make(), Scheduled, **given)


@on("two")
def test_calls_in_the_wrong_order(rank, world):
    model = make()
    for stage in (1, 2, 3):
        zero = zero_of(model, stage=stage, accumulate=2, lr=0.1)
        refused(r"step\(\) without a backward since the last step\(\)", zero.step)
        refused(r"partial must be True .*zero\.optimizer\.step\(closure\)", zero.step, lambda: None)
        with pytest.raises(ringlet.InvalidUsage, match=r"zero\.optimizer\.add_param_group: .*options_of="):
            zero.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        loss_of(zero.module, *batch(0, rank)).backward()
        refused("clip_grad_norm_ after 1 of 2 micro-batches", zero.clip_grad_norm_, 1.0)
        refused(r"load_state_dict\(\) between a backward and its step\(\)", zero.load_state_dict, {})
        for wrong in (-1.0, 0, float("nan"), "1", None, True):
            refused("max_norm must be positive", zero.clip_grad_norm_, wrong)
        loss_of(zero.module, *batch(1, rank)).backward()
        loss = loss_of(zero.module, *batch(2, rank))
        refused(r"3 backwards in a window of 2: call step\(\)", loss.backward)
        assert zero.step()  # the window was left as it was
        loss_of(zero.module, *batch(3, rank)).backward()
        zero.zero_grad()
        refused("without a backward", zero.step)
        train_zero(zero, rank, 2, micro=2)


class SparseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.shape = weight.shape
        return weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(ctx.shape).to_sparse()


@on("two")
def test_a_sparse_gradient(rank, world):
    for stage in (1, 2):
        zero = zero_of(nn.Linear(3, 3), torch.optim.SGD, stage, lr=0.1)
        with pytest.raises(ringlet.InvalidUsage, match=r"gradient of weight has layout torch.sparse_coo: only dense"):
            SparseGradient.apply(zero.module.weight).backward()


@on("two")
def test_parameters_in_one_memory(rank, world):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    refused(r"0\.weight and 1\.weight lie in the same memory", ringlet.Zero, model, torch.optim.SGD, lr=0.1)
    seen = nn.Linear(8, 8)  # a buffer that shows a part of a parameter, and would show it no more
    seen.register_buffer("row", seen.weight.detach()[2])
    for stage in STAGES:
        refused("weight and row lie in the same memory", ringlet.Zero, seen, torch.optim.SGD, stage, lr=0.1)
    model.requires_grad_(False)
    model.append(nn.Linear(8, 8))
    flat = torch.zeros(20)  # neighbours
    model[2].bias.data = flat[:8]
    model.append(nn.Linear(12, 1, bias=False))
    model[3].weight.data = flat[8:].view(1, 12)
    ringlet.Zero(model, torch.optim.SGD, lr=0.1).remove()
    halves = nn.Module()
    halves.q, halves.k = (nn.Parameter(half) for half in torch.zeros(4, 8).chunk(2, dim=1))
    ringlet.Zero(halves, torch.optim.SGD, lr=0.1).remove()


@on("two")
def test_fused_kernels_are_not_reproducible(rank, world):
    reason = "fused=True with reproducible=True"
    given = {"lr": 1e-2, "reproducible": True}
    refused(reason, zero_of, make(), fused=True, **given)
    fused = {"fused": True}
    refused(reason, zero_of, make(), options_of=lambda name, p: fused if p.ndim > 1 else {}, **given)
    zero = zero_of(make(), **given)
    loss_of(zero.module, *batch(0, rank)).backward()
    zero.optimizer.param_groups[0]["fused"] = True
    refused(reason, zero.step)


@on("two")
def test_a_removed_zero_refuses(rank, world):
    for stage in (1, 2, 3):
        zero = zero_of(make(), stage=stage, lr=1e-2)
        train_zero(zero, rank, 1)
        kept = zero.state_dict()
        zero.remove()
        loss_of(zero.module, *batch(0, rank)).backward()
        for act in (
            zero.step,
            lambda: zero.step(partial=True),  # noqa: B023
            zero.optimizer.step,
            zero.state_dict,
            lambda: zero.clip_grad_norm_(1.0),  # noqa: B023
            lambda: zero.gathered().__enter__(),  # noqa: B023
            lambda: zero.load_state_dict(kept),  # noqa: B023
        ):
            refused("the Zero was removed: make a new one", act)


@on("two")
def test_parameters_that_ranks_do_not_share(rank, world):
    for stage, trained in ((1, True), (3, False)):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
        model._ddp_params_and_buffers_to_ignore = ["0.weight"]
        model[0].requires_grad_(trained)
        with pytest.raises(ringlet.InvalidUsage, match=r"parameter 0\.weight is in _ddp_params_and_buffers_to_ignore"):
            ringlet.Zero(model, torch.optim.SGD, stage, lr=0.1)
    model[0].weight.data.fill_(rank)
    ringlet.Zero(model, torch.optim.SGD, 1, lr=0.1)
    assert model[0].weight.unique().tolist() == [rank]
