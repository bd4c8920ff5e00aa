"""One digest of every reduction of awkward numbers, wherever it runs.

Eight ranks' numbers cancel, overflow, underflow, are zeros of both signs, infinities and NaNs. numpy adds them along
the prover's trees: that is the digest. Fewer ranks hold sums of several of them, along the aligned tree
((0+1)+(2+3))+..., so that `butterfly` gives one digest in all worlds.
"""

import functools
import hashlib
import itertools

import numpy as np
import pytest
import torch

import emulated_gpu
import ringlet
from cases import ALGORITHMS
from pairwise import pairwise
from ranks import with_kernels
from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.execution import execute
from ringlet.schedule.expression_trees import Trees

ADDENDS = 8
WORLDS = (1, 2, 4, 8)
# Odd; two fill no vector. The last leaves the limit behind up to which ranks copy registered memory.
COUNTS = (1, 5, 997, 140_001)
DTYPES = ("float32", "float16", "bfloat16")
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
ROOT = 5
CALLS = [(collective, algorithm) for collective in REDUCTIONS for algorithm in ALGORITHMS[collective]]
ALIGNED = {1: "0", 2: "(0+1)", 4: "((0+1)+(2+3))", 8: "(((0+1)+(2+3))+((4+5)+(6+7)))"}


# --- the reference: numpy, and the prover's trees


def widened(bits, dtype):
    """As float32, exactly."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16 if dtype == "bfloat16" else bits).view(np.float32)


def rounded(values, dtype):
    """The bits in `dtype` of float32 values, to nearest even; a NaN is the positive quiet one."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        found = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        found = values.astype(dtype).view(BITS[dtype])
    quiet = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}[dtype]
    return np.where(np.isnan(values), BITS[dtype](quiet), found)


def added(trees, tree, inputs, dtype):
    """The bits of a tree of the ranks' inputs: a node adds in float32 from left to right, and is rounded once."""
    if not trees.terms(tree):
        return inputs[int(trees.text(tree))]
    terms = [widened(added(trees, term, inputs, dtype), dtype) for term in trees.terms(tree)]
    with np.errstate(all="ignore"):
        return rounded(functools.reduce(np.add, terms), dtype)


@functools.cache
def addends(dtype):
    """Bits, (ADDENDS, the largest count). Two of seven columns have any bits: infinities, NaNs and denormals, too."""
    count = COUNTS[-1]
    source = np.random.default_rng(40)
    info = {"float32": (-126, 127), "float16": (-14, 15), "bfloat16": (-126, 127)}[dtype]
    shape = (ADDENDS, count)
    signs = np.where(source.random(shape) < 0.5, np.float32(-1), np.float32(1))
    everyday = source.standard_normal(shape).astype(np.float32)
    huge = signs * np.float32(2.0 ** info[1]) * source.choice([1, 1.25, 1.5], shape).astype(np.float32)
    denormal = signs * source.random(shape, np.float32) * np.float32(2.0 ** (info[0] + 1))
    zeros = signs * np.float32(0) + np.where(source.random(shape) < 0.05, everyday, np.float32(0))
    zeros[:, ::14] = -0.0  # and nothing else
    cancelling = everyday * np.float32(2.0**11)
    partners = source.permuted(np.tile(np.arange(ADDENDS)[:, None], count), axis=0)
    for one, other in ((0, 1), (2, 3), (4, 5)):
        columns = np.arange(count)
        cancelling[partners[one], columns] = -cancelling[partners[other], columns]
    cancelling[partners[6], np.arange(count)] = everyday[6] / 8
    any_bits = source.integers(0, 1 << 8 * BITS[dtype](0).itemsize, shape, dtype=BITS[dtype])
    with np.errstate(all="ignore"):
        kinds = [rounded(kind, dtype) for kind in (everyday, huge, denormal, zeros, cancelling)] + [any_bits, any_bits]
    return np.choose(np.arange(count) % len(kinds), kinds)


@functools.cache
def inputs_of(dtype, world):
    """Bits, (world, the largest count): the sums of ADDENDS / world neighbours each."""
    each, trees = ADDENDS // world, Trees()
    if each == 1:
        return addends(dtype)
    tree = trees.parse(ALIGNED[each])
    return np.stack([added(trees, tree, addends(dtype)[r * each : (r + 1) * each], dtype) for r in range(world)])


def digest_of(messages):
    return hashlib.sha256(b"".join(message.tobytes() for message in messages)).hexdigest()[:16]


@functools.cache
def the_digest(dtype):
    """Of the sum along the aligned tree of all addends."""
    trees = Trees()
    total = added(trees, trees.parse(ALIGNED[ADDENDS]), addends(dtype), dtype)
    return digest_of([total[:count] for count in COUNTS])


def elements(collective, world):
    """Of a rank's inputs: of reduce_scatter whole blocks. The engines move a long message in one way for all."""
    if collective == "reduce_scatter":
        return [-(-count // world) * world for count in COUNTS[:-1]]
    return COUNTS if collective == "all_reduce" else COUNTS[:-1]


@functools.cache
def reference(collective, algorithm, dtype, world, hosts, rank):
    """The digest of what the algorithm's schedule leaves on a rank, where that is a result."""
    root = ROOT % world if collective == "reduce" else 0
    schedule = ringlet.schedule(algorithm, collective, world=world, root=root, hosts=hosts)
    found = execute(schedule)
    first, outputs = schedule.outputs[rank]
    results = []
    for count in elements(collective, world):
        whole = inputs_of(dtype, world)[:, :count]
        parts = np.array_split(whole, schedule.parts, axis=1)
        for chunk in range(first, first + outputs):
            results.append(added(found.trees, found.values[rank][chunk][1], parts[chunk], dtype))
    return digest_of(results) if outputs else None


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers_tell_orders_apart(dtype):
    """Else a digest says nothing of an order."""
    digests_of = {}
    for algorithm in ALGORITHMS["all_reduce"]:
        schedule = ringlet.schedule(algorithm, world=8)
        found = execute(schedule)
        trees = [pairwise(found.trees, tree) if dtype == "float32" else tree for _, tree in found.values[0]]
        order = (schedule.parts if len(set(trees)) > 1 else 1, *dict.fromkeys(map(found.trees.text, trees)))
        digests_of.setdefault(order, set()).add(reference("all_reduce", algorithm, dtype, 8, None, 0))
    assert all(len(digests) == 1 for digests in digests_of.values()), digests_of
    assert len(set.union(*digests_of.values())) == len(digests_of) >= 8, digests_of
    assert digests_of[1, ALIGNED[8]] == {the_digest(dtype)}


# --- what ranks get


def tensor_of(bits, dtype, memory):
    found = torch.from_numpy(bits.copy()).view(getattr(torch, dtype))
    if memory == "registered":
        return ringlet.empty(len(found), dtype=found.dtype).copy_(found)
    return found.to(emulated_gpu.DEVICE) if memory == "gpu" else found


def start(collective, tensor, world, **options):
    """The call, and the tensor that has its result afterwards."""
    if collective == "all_reduce":
        return ringlet.all_reduce(tensor, **options), tensor
    if collective == "reduce":
        return ringlet.reduce(tensor, ROOT % world, **options), tensor
    block = torch.empty_like(tensor[: len(tensor) // world])
    return ringlet.reduce_scatter(block, tensor, **options), block


def digests(rank, world, memories):
    """(collective, algorithm, dtype) -> digest -> where it came out."""
    found = {}
    for (collective, algorithm), dtype, memory, later in itertools.product(CALLS, DTYPES, memories, (False, True)):
        inputs = [inputs_of(dtype, world)[rank, :count] for count in elements(collective, world)]
        tensors = [tensor_of(bits, dtype, memory) for bits in inputs]
        started = [start(collective, tensor, world, algorithm=algorithm, async_op=later) for tensor in tensors]
        for work, _ in started if later else ():
            work.wait()
        digest = digest_of([result.cpu().view(torch.uint8).numpy() for _, result in started])
        found.setdefault((collective, algorithm, dtype), {}).setdefault(digest, []).append((memory, later))
    return found


def check(pool, world, join, hosts=None, memories=("ordinary", "registered")):
    for rank, found in enumerate(pool.values(digests, world, memories, join=join)):
        for (collective, algorithm, dtype), seen in found.items():
            expected = reference(collective, algorithm, dtype, world, hosts, rank)
            if expected is not None:
                assert set(seen) == {expected}, f"{collective} {algorithm} {dtype}, rank {rank}: {seen}"
        for algorithm, dtype in itertools.product(("butterfly", "halving_doubling"), DTYPES):
            assert set(found["all_reduce", algorithm, dtype]) == {the_digest(dtype)}, "the aligned tree's"


def places():
    everyday = {"threads": (1, 4), "shared_memory": (2, 4, 8), "tcp": (2, 4), "blocks": (2, 4)}
    for (join, worlds), world in itertools.product(everyday.items(), WORLDS):
        marks = [] if world in worlds else [pytest.mark.slow(reason="the same in another world")]
        yield pytest.param(join, world, marks=marks, id=f"{join}-{world}")


@pytest.mark.parametrize(("join", "world"), list(places()))
def test_every_place_gives_one_digest(pool, join, world):
    """`blocks`: ranks on two hosts, the first half on one."""
    on_hosts = tuple(2 * rank // world for rank in range(world))
    check(pool, world, join, on_hosts if join == "blocks" and world > 1 else None)


@pytest.mark.parametrize("level", ["avx512", "avx2", "portable"])
def test_every_processor_level_gives_one_digest(own_pool, level):
    (kernels,) = own_pool.values(with_kernels, 1, level, join="nothing")
    if level not in kernels["available"]:
        pytest.skip(f"this processor has no {level}")
    assert kernels["chosen"] == level
    check(own_pool, 4, "threads", memories=("ordinary",))


@emulated_gpu.needs_build
@pytest.mark.parametrize(
    "way",
    ["both", *(pytest.param(way, marks=pytest.mark.slow(reason="as both")) for way in ("NCCL", "peer memory"))],
    indirect=True,
)
@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow(reason="as four"))])
def test_a_gpu_gives_one_digest(device_pool, world, way):
    check(device_pool, world, "gpu", memories=("gpu",))


SCALE = 1 / 3  # no power of two: what it multiplies is rounded


def sums_of_products(rank, world, memory):
    """(collective, algorithm, dtype): the results of premul_sum, and of sum of the products that numpy has rounded."""
    found = {}
    for (collective, algorithm), dtype in itertools.product(CALLS, DTYPES):
        bits = inputs_of(dtype, world)[rank, : elements(collective, world)[2]]
        with np.errstate(all="ignore"):
            products = rounded(widened(bits, dtype) * np.float32(SCALE), dtype)
        premultiplied = tensor_of(bits, dtype, memory), {"op": "premul_sum", "scale": SCALE}
        for tensor, options in (premultiplied, (tensor_of(products, dtype, memory), {})):
            _, result = start(collective, tensor, world, algorithm=algorithm, **options)
            digest = digest_of([result.cpu().view(torch.uint8).numpy()])
            found.setdefault((collective, algorithm, dtype), []).append(digest)
    return found


def check_products(pool, world, join, memory="ordinary"):
    for rank, found in enumerate(pool.values(sums_of_products, world, memory, join=join)):
        for (collective, algorithm, dtype), digests in found.items():
            if collective != "reduce" or rank == ROOT % world:
                assert len(set(digests)) == 1, f"{collective} {algorithm} {dtype}, rank {rank}"


@pytest.mark.parametrize("join", ["threads", "tcp", "blocks"])
def test_each_product_is_rounded_before_it_is_added(pool, join):
    """Whoever adds it, so that premul_sum has the bits of its algorithm's sum."""
    check_products(pool, 4, join)


@emulated_gpu.needs_build
@pytest.mark.parametrize("way", ["NCCL", "peer memory"], indirect=True)
def test_a_gpu_rounds_each_product_before_it_is_added(device_pool, way):
    check_products(device_pool, 4, "gpu", "gpu")
