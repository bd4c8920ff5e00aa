"""What happens to a module and its gradients after the reducer was made: followed, or refused by name on all ranks."""

import contextlib
import copy
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel

import ringlet
from ranks import on
from reducer_checks import SMALL, Branches, Fails, assert_gradients, assert_step, data, expected_average, loss_of, mlp
from refusals import refused
from ringlet import GradientReducer, InvalidUsage
from ringlet.training import agree


@pytest.fixture(params=[("gloo", 2), ("ringlet", 2), ("ringlet", 3)], ids="{0[0]}-{0[1]}".format)
def ranks(request, pool):
    """Other worlds than elsewhere: these checks are many."""
    backend, world = request.param
    return lambda function: pool.values(function, world, join=f"dist:{backend}")


# --- other memory under a gradient or a parameter


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 2))


def loss_of_images(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(3, 2, 6, 6, generator=generator)).square().mean()


@on("ranks")
def test_memory_exchanged_on_one_rank_is_that_ranks_own_business(rank, world):
    model = convolutions()
    GradientReducer(model, **SMALL)
    if rank == 1:
        model.to(memory_format=torch.channels_last)  # before buckets are laid out anew
    for step in range(3):
        assert_step(model, rank, world, step, loss_of_images)


@on("ranks")
def test_a_stopped_backward_counts_for_no_gradient(rank, world):
    """A gradient that arrived in it only is missing from the next backward, and does not keep flush() from its work."""
    model = Branches()
    GradientReducer(model)  # one bucket: nothing is sent before the error
    model(data(rank), "ab").backward()
    with pytest.raises(ArithmeticError):
        (Fails.apply(model.b(data(rank))).sum() + model(data(rank), "a")).backward()
    model.zero_grad(set_to_none=False)
    refused(r"2 of 4 parameters got no gradient .*: a\.weight, a\.bias", lambda: model(data(rank), "b").backward())
    late = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    reducer = GradientReducer(late, delay=1)
    loss_of(late, rank, 0).backward()
    with pytest.raises(ArithmeticError):
        late[1](Fails.apply(late[0](data(rank)))).sum().backward()
    assert reducer.flush()
    assert_gradients(late, expected_average(late, world))


# --- other parameters


def unfreeze(model):
    model[0].weight.requires_grad_()


def assign(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


REFUSED = {
    "0.weight was frozen and requires a gradient": unfreeze,
    "0.bias is another object": assign,
    "2.extra was not there before": lambda model: model[2].register_parameter("extra", nn.Parameter(torch.ones(2))),
    "2.weight is another object": lambda model: model.__setitem__(2, nn.Linear(10, 9)),
    "2.bias is no longer there": lambda model: setattr(model[2], "bias", None),
    "5.weight was not there before": lambda model: model.append(nn.Linear(3, 3)),
    "1.0.weight was not there before": lambda model: model.__setitem__(1, nn.Sequential(nn.Linear(10, 10))),
    "0.bias was torch.float32 .* and is torch.float64": lambda model: model.double(),
    r"2.weight was torch.float32 \[9, 10\] on cpu and is torch.float32 \[9, 5\] on cpu": lambda model: setattr(
        model[2].weight, "data", torch.zeros(9, 10)[:, :5]
    ),
}


def half_frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


@on("ranks")
def test_a_backward_for_some_parameters_only_is_refused(rank, world):
    model = mlp()
    GradientReducer(model, group=dist.new_group(), **SMALL)
    refused(
        r"4 of 6 parameters got no gradient .*: 0\.weight, 0\.bias, 2\.weight, 2\.bias",
        lambda: loss_of(model, rank).backward(inputs=list(model[4].parameters())),
    )


@on("ranks")
def test_a_gradient_lies_in_memory_of_its_own(rank, world):
    """So that a file of it has nothing else, and torch.multiprocessing may move it."""
    for options in ({}, {"static_graph": True}):
        model = mlp()
        GradientReducer(model, **SMALL, **options)
        for step in range(3):  # the buckets are laid out anew in between
            loss_of(model, rank, step).backward()
        for p in model.parameters():
            assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
            p.grad.share_memory_()
        before = [p.grad.clone() for p in model.parameters()]
        loss_of(model, rank, 4).backward()
        expected = expected_average(model, world, (4,))
        assert_gradients(model, [a + b for a, b in zip(before, expected, strict=True)])


@on("ranks")
def test_changes_are_refused_alike_and_a_new_reducer_goes_on(rank, world):
    for words, change in REFUSED.items():
        model = half_frozen()
        reducer = GradientReducer(model, **SMALL)
        loss_of(model, rank).backward()
        model.zero_grad()
        change(model)
        for _ in range(2):
            refused(f"parameter {words}.*make a new GradientReducer", model, data(rank))
        reducer.remove()
        if change in (unfreeze, assign):
            reducer = GradientReducer(model, **SMALL)
            loss_of(model, rank).backward()
            assert reducer.stats()["backwards"] == 1
            own = copy.deepcopy(model)
            if change is unfreeze:
                assert_gradients(model, expected_average(own, world))


@on("ranks")
def test_a_change_is_refused_in_a_backward_without_the_modules_forward(rank, world):
    model = half_frozen()
    GradientReducer(model, **SMALL)
    unfreeze(model)
    with pytest.raises(InvalidUsage, match=r"0\.weight was frozen and requires a gradient"):
        model[2](model[1](model[0](data(rank)))).sum().backward()


@on("ranks")
def test_gradients_of_another_shape_are_refused_by_name(rank, world):
    """Whoever says it: torch where it knows the parameter."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    GradientReducer(model, group=dist.new_group())
    output = model(torch.ones(2, 4))
    model[0].weight.grad = torch.ones(4, 4)
    model[0].weight.grad.data = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises((InvalidUsage, RuntimeError), match=r"0\.weight|dtype|type"):
        output.sum().backward()


@on("ranks")
def test_what_changes_no_gradient_is_followed(rank, world):
    model = half_frozen()
    reducer = GradientReducer(model, **SMALL)
    model[0].weight.data = model[0].weight.data.clone()
    model[0].register_buffer("extra", torch.full((3,), float(rank)))
    model.append(nn.Identity())
    model[2].register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    loss_of(model, rank).backward()
    assert torch.equal(model[0].extra, torch.zeros(3))  # rank 0's
    assert reducer.stats()["backwards"] == 1
    torch.func.functional_call(model, {"2.bias": torch.zeros(9)}, data(rank))
    scaled = {name: 2 * p for name, p in model.named_parameters()}
    torch.func.functional_call(model, scaled, data(rank)).sum().backward()
    assert reducer.stats()["backwards"] == 2


@on("ranks")
def test_frozen_parameters_are_named_and_all_frozen_ones_are_left_alone(rank, world):
    model = mlp()
    reducer = GradientReducer(model, **SMALL)
    model[0].weight.requires_grad_(False)
    with pytest.raises(InvalidUsage, match=r"1 of 6 parameters were frozen after the reducer was made.*: 0\.weight\."):
        loss_of(model, rank).backward()
    model.requires_grad_(False)  # as for the discriminator in a step of the generator
    inputs = data(rank).requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None and reducer.stats()["backwards"] == 1
    model.requires_grad_(True)
    assert_step(model, rank, world)
    allowed = mlp()
    GradientReducer(allowed, find_unused_parameters=True, **SMALL)
    allowed[0].requires_grad_(False)
    loss_of(allowed, rank).backward()
    assert allowed[0].weight.grad is None and allowed[2].weight.grad is not None


# --- two that reduce one gradient


@on("ranks")
def test_two_that_reduce_one_gradient_are_refused(rank, world):
    model = mlp()
    reducer = GradientReducer(model)
    refused(r"another GradientReducer or Zero reduces the gradient of 0\.weight", GradientReducer, model)
    refused(r"reduces the gradient of 0\.0\.weight", GradientReducer, nn.Sequential(model))
    refused(r"reduces the gradient of weight", GradientReducer, model[2])
    reducer.remove()
    GradientReducer(model)
    with pytest.raises(InvalidUsage, match="the module is a DistributedDataParallel, which reduces gradients"):
        GradientReducer(DistributedDataParallel(mlp()))
    refused("0 is a DistributedDataParallel", GradientReducer, nn.Sequential(DistributedDataParallel(mlp())))
    separate = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    GradientReducer(separate[0])
    GradientReducer(separate[1])


@on("ranks")
def test_ddp_around_a_reducer_is_refused_at_its_first_forward(rank, world):
    for reducer_first in (True, False):
        model = mlp()
        if reducer_first:
            reducer = GradientReducer(model)
            wrapped = DistributedDataParallel(nn.Sequential(model))
        else:
            wrapped = DistributedDataParallel(model)
            reducer = GradientReducer(model)
        refused("DistributedDataParallel around this module averages the gradient of", wrapped, data(rank))
        loss_of(model, rank).backward()  # without DDP's forward its hooks do nothing
        assert_gradients(model, expected_average(model, world))
        reducer.remove()


@on("ranks")
def test_ddp_whose_forward_calls_another_module_with_a_reducer(rank, world):
    teacher = mlp()
    GradientReducer(teacher)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) - teacher(x)

    student = DistributedDataParallel(Student())
    student(data(rank)).square().mean().backward()
    everyone = [torch.empty_like(teacher[0].weight) for _ in range(world)]
    dist.all_gather(everyone, teacher[0].weight.grad)
    assert all(torch.equal(other, everyone[0]) for other in everyone)


@on("ranks")
def test_fully_shard_and_tensor_parallel_parameters_are_refused(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh))
    refused("weight is a DTensor: each rank must have the whole tensor", GradientReducer, model)


# --- arguments and buffers


@on("ranks")
def test_arguments_of_wrong_kinds_are_refused(rank, world):
    wrong = {
        "bucket_mb": (float("nan"), float("inf"), -1, 0, "x", None, [1], 1j),
        "first_bucket_mb": (float("nan"), float("inf"), -1, 0, "measured", None),
        "delay": ("x", 2, 1.0, None, -1),
        "algorithm": (5, b"ring"),
        "group": ("world", dist.GroupMember.NON_GROUP_MEMBER),
        "optimizer_in_backward": (torch.optim.SGD([torch.ones(1)], lr=1.0),),
    }
    for name, values in wrong.items():
        for value in values:
            refused(name, GradientReducer, mlp(), **{name: value})
    refused("module is a list", GradientReducer, [mlp()])


@on("ranks")
def test_classes_of_torch_distributed_that_reduce_nothing(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    expected = expected_average(model, world)
    apply_activation_checkpointing(model)
    assert type(model[0]).__module__.startswith("torch.distributed.")
    GradientReducer(model)
    loss_of(model, rank).backward()
    assert_gradients(model, expected)
    replicate(model)
    refused("the module is a DDPSequential, which reduces gradients itself", loss_of, model, rank)


@on("ranks")
def test_a_part_that_a_zero_trains_is_left_to_it(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    expected = expected_average(model, world)
    model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    GradientReducer(model)
    zero = ringlet.Zero(model[1], torch.optim.SGD, 3, lr=1.0, persistence_elements=0)
    with zero.gathered():
        before = [p.detach().clone() for p in model[1].parameters()]
    loss_of(model, rank).backward()
    assert_gradients(model[0], expected[:2])
    zero.step()
    with zero.gathered():
        for old, p, gradient in zip(before, model[1].parameters(), expected[2:], strict=True):
            torch.testing.assert_close(p.detach(), old - gradient)


@on("ranks")
def test_modules_without_values_are_refused_by_name(rank, world):
    refused(r"0\.weight is on the meta device", GradientReducer, mlp().to("meta"))
    mixed = mlp()
    mixed[4] = nn.Linear(9, 3, device="meta")
    refused(r"4\.weight is on the meta device", GradientReducer, mixed)
    refused(r"weight has no shape yet", GradientReducer, nn.LazyLinear(3))
    with pytest.raises(InvalidUsage, match=r"rank 0 has 'parameter 0\.weight .* on cpu .*rank 1 has .* on meta"):
        GradientReducer(mlp().to("meta") if rank == 1 else mlp())
    odd = nn.Linear(2, 2)
    odd.register_buffer("table", torch.eye(3).to_sparse())
    refused(r"table is torch\.float32 of layout torch\.sparse_coo", GradientReducer, odd)
    odd.table = torch.ones(1).expand(3)
    refused("table has elements that share memory", GradientReducer, odd)


@on("ranks")
def test_buffers_of_every_dtype_are_rank_0s(rank, world):
    dtypes = [
        torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.bfloat16,
        torch.float64, torch.complex64, torch.complex128,
    ]  # fmt: skip
    model = nn.Linear(3, 2)
    for dtype in dtypes:
        for place, shape in enumerate([(), (0,), (3,), (2, 5)]):
            model.register_buffer(f"{str(dtype)[6:]}_{place}", torch.zeros(shape).to(dtype))
    model.register_buffer("conjugate", torch.zeros(3, dtype=torch.complex64).conj())
    model.register_buffer("strided", torch.zeros(4, 6, dtype=torch.uint32)[:, ::2].t())
    twin = copy.deepcopy(model)

    def fill(module, value):
        for buffer in module.buffers():
            buffer.copy_(torch.full(buffer.shape, value).to(buffer.dtype))

    fill(model, rank + 1)
    reducer = GradientReducer(model)
    for value in (1, 0):
        fill(twin, value)
        for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128)), name
        fill(model, rank)
        model(torch.ones(1, 3)).sum().backward()
    assert reducer.stats()["backwards"] == 2


@on("ranks")
def test_a_flat_buffer_of_the_users_gets_the_averages(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
        for options in ({}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}):
            for window in (1, 2):
                model = mlp(dtype)
                reducer = GradientReducer(model, **options, **SMALL)
                flat, start = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=dtype), 0
                for p in model.parameters():
                    p.grad = flat[start : start + p.numel()].view(p.shape)
                    start += p.numel()
                for step in range(3):
                    flat.zero_()
                    expected = expected_average(model, world, range(step, step + window))
                    for micro in range(step, step + window):
                        with reducer.no_sync() if micro + 1 < step + window else contextlib.nullcontext():
                            loss_of(model, rank, micro).backward()
                    torch.testing.assert_close(flat, torch.cat([e.flatten() for e in expected]), **close)
                    assert all(p.grad.untyped_storage().data_ptr() == flat.data_ptr() for p in model.parameters())
                    torch.optim.SGD(model.parameters(), lr=0.1).step()


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(mlp())
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.inner(x))


@on("ranks")
def test_script_modules_are_averaged(rank, world):
    model = Scripted()
    alone = nn.Sequential(mlp(), nn.Linear(3, 2))
    GradientReducer(model, **SMALL)
    alone[0].load_state_dict(model.inner.state_dict()), alone[1].load_state_dict(model.last.state_dict())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        assert_gradients(model, expected_average(alone, world))
    refused(r"needs hooks on the forward.*Sequential\(module\)", GradientReducer, torch.jit.script(mlp()))


def drop(parameter):
    parameter.grad = None


@on("ranks")
def test_a_hook_that_drops_a_gradient_is_told_and_averaged(rank, world):
    model = mlp()
    reducer = GradientReducer(model, group=dist.new_group(), **SMALL)
    hook = model[0].weight.register_post_accumulate_grad_hook(drop)
    refused(r"1 of 6 parameters got no gradient.*0\.weight.*a hook has set", lambda: loss_of(model, rank).backward())
    hook.remove()
    reducer.remove()
    expected = expected_average(model, world)
    GradientReducer(model, find_unused_parameters=True, **SMALL)
    model[0].weight.register_post_accumulate_grad_hook(drop)
    model.zero_grad()
    loss_of(model, rank).backward()
    assert model[0].weight.grad is None
    for p, gradient in list(zip(model.parameters(), expected, strict=True))[1:]:
        torch.testing.assert_close(p.grad, gradient)


@on("ranks")
def test_another_grad_dtype_is_refused(rank, world):
    model = mlp()
    if not hasattr(model[0].weight, "grad_dtype"):
        return
    model[0].weight.grad_dtype = torch.float64
    refused(r"grad_dtype of 0\.weight is torch\.float64.*set grad_dtype = torch\.float32", GradientReducer, model)


# --- a change on one rank alone


@on(3, "dist:ringlet", "dist:ringlet@mixed")
@pytest.mark.parametrize("changing", [0, 2])
@mock.patch.object(agree, "ALIKE_SECONDS", 0.5)
def test_a_change_on_one_rank_is_named_on_all(rank, world, changing):
    model = half_frozen()
    reducer = GradientReducer(model, **SMALL)
    loss_of(model, rank).backward()
    if rank == changing:
        unfreeze(model)
    with pytest.raises(ringlet.InvalidUsage, match=r"parameter 0\.weight was frozen and requires a gradient"):
        for _ in range(3):
            loss_of(model, rank).backward()
    with pytest.raises(ringlet.Error, match="this group failed before"):
        dist.all_reduce(torch.ones(3))
    del reducer


# --- ranks that do not reduce the same


def fails_with(call, *patterns):
    with pytest.raises(ringlet.InvalidUsage) as told:
        call()
    for pattern in patterns:
        assert re.search(pattern, str(told.value)), told.value


def group_of(world, transport):
    options = ringlet.BackendOptions(transport=transport)
    return dist.new_group(timeout=timedelta(seconds=30), pg_options=options)


@on((2, 3), "dist:ringlet")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_that_use_different_heads(rank, world, transport):
    group = group_of(world, transport)
    heads = [nn.Linear(6, 30), nn.Linear(6, 30)]
    reducers = [GradientReducer(head, group=group) for head in heads]
    fails_with(
        lambda: heads[min(rank, 1)](torch.ones(4, 6)).sum().backward(),
        r"rank 0 is in all_reduce .*, bucket 0 of GradientReducer 0 \(Linear\), 0 optimizer steps \(modulo 16\)\)",
        r"rank [12] is in all_reduce .*, bucket 0 of GradientReducer 1 \(Linear\), 0 optimizer steps \(modulo 16\)\)",
    )
    del reducers


@on("two")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("how", ["no backward", "no parameter"])
def test_a_backward_that_one_rank_leaves_out(rank, world, transport, how):
    group = group_of(world, transport)
    model = nn.Linear(6, 1)
    reducer = GradientReducer(model, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        for step in range(40):
            optimizer.zero_grad()
            inputs = torch.ones(4, 6, requires_grad=True)
            here = rank == 1 and step == 20
            loss = (inputs if here and how == "no parameter" else model(inputs)).sum()
            if not here or how == "no parameter":
                loss.backward()
            optimizer.step()

    fails_with(
        train,
        r"rank 0 is in all_reduce .*, bucket 0 of GradientReducer 0 \(Linear\), 4 optimizer steps",
        r"rank 1 is in all_reduce .*, bucket 0 of GradientReducer 0 \(Linear\), 5 optimizer steps",
    )
    assert reducer.stats()["backwards"] == 20
