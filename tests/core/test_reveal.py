"""`ringlet.reveal`: it sees what the prover proves, names every fault of an order, and refuses what is no sum."""

import functools
import itertools
import random
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

import ringlet
from pairwise import pairwise
from ranks import on
from ringlet.bench.ranks.case import Case
from ringlet.errors import InvalidUsage
from ringlet.schedule.collectives import REDUCTIONS
from ringlet.schedule.execution import execute
from ringlet.schedule.expression_trees import Trees, ranks_in
from ringlet.summation.counts import NotATreeError, mask_of, number_in, tree_of
from ringlet.summation.probe import numbers_of

PER_CHUNK = 3  # elements
# Worlds by transport, those of `make test` and the others.
PLACES = {
    "threads": ((2, 3, 5), (4, 6, 7, 8)),
    "shared_memory": ((3,), (8,)),
    "tcp": ((4,), (7,)),
    "mixed": ((), (4, 8)),
}


# --- two independent roads to one answer


def proved(schedule, dtype):
    """The texts of the trees of all output chunks, by element."""
    result = execute(schedule)
    texts = {}
    for rank, (first, count) in enumerate(schedule.outputs):
        for chunk in range(first, first + count):
            tree = result.values[rank][chunk][1]
            texts[chunk] = result.trees.text(pairwise(result.trees, tree) if dtype == torch.float32 else tree)
    return [texts[chunk] for chunk in sorted(texts) for _ in range(PER_CHUNK)]


def call_of(algorithm, collective):
    call = getattr(ringlet, collective)
    return lambda *tensors: call(*tensors, algorithm=algorithm)


def differences_from_the_prover(rank, world):
    """Of all algorithms of all reductions."""
    hosts = tuple(ringlet.current().handle.schedule_hosts)
    found = []
    for algorithm, collective, _ in ringlet.schedule.algorithms():
        if collective not in REDUCTIONS:
            continue
        schedule = ringlet.schedule(algorithm, collective, world=world, hosts=hosts)
        count = PER_CHUNK * (1 if collective == "reduce_scatter" else schedule.parts)
        for dtype in (torch.float32, torch.bfloat16):
            call = call_of(algorithm, collective)
            seen = ringlet.reveal(call, sizes=[count], dtype=dtype, collective=collective, calls=1)
            (message,), expected = seen.messages, proved(schedule, dtype)
            texts = [message.layout.order_of(element).text for element in range(len(expected))]
            if texts != expected or len(message.layouts) > 1 or message.wrong != 0:
                found.append(f"{algorithm} {collective} {dtype}: {texts}, proved {expected}, {message.wrong} wrong")
    return found


@pytest.mark.parametrize(
    ("transport", "world"),
    [
        pytest.param(transport, world, marks=[] if world in usual else [pytest.mark.slow(reason="the same elsewhere")])
        for transport, (usual, rare) in PLACES.items()
        for world in (*usual, *rare)
    ],
)
def test_the_prover_and_the_probe_agree(pool, transport, world):
    found = pool.values(differences_from_the_prover, world, join=transport)
    assert found == [[]] * world, "\n".join(found[0])


# --- trees from counts


def random_tree(source, ranks):
    if len(ranks) == 1:
        return ranks[0]
    parts = source.choice([2, 2, 2, min(3, len(ranks)), len(ranks)])
    cuts = [0, *sorted(source.sample(range(1, len(ranks)), parts - 1)), len(ranks)]
    children = (random_tree(source, ranks[a:b]) for a, b in itertools.pairwise(cuts))
    return tuple(sorted(children, key=lambda child: mask_of(child) & -mask_of(child)))


def sizes_of(node):
    """The size of the smallest subtree with each pair."""
    if isinstance(node, int):
        return {}
    found = {}
    for one, other in itertools.combinations(map(mask_of, node), 2):
        pairs = itertools.product(ranks_in(one), ranks_in(other))
        found |= {(min(pair), max(pair)): mask_of(node).bit_count() for pair in pairs}
    for child in node:
        found |= sizes_of(child)
    return found


def test_a_tree_is_found_from_its_counts():
    source = random.Random(1)
    for world in [*range(2, 12), 40] * 20:
        tree = random_tree(source, source.sample(range(world), world))
        assert tree_of(sizes_of(tree), (1 << world) - 1) == tree
        trees = Trees()
        number = number_in(trees, tree)
        assert trees.parse(trees.text(number)) == number


def test_counts_of_no_tree_are_refused():
    with pytest.raises(NotATreeError, match="the ranks 0, 1, 2 are added up, but no sum of them is the last"):
        tree_of({(0, 1): 2, (0, 2): 3, (1, 2): 2}, 0b111)
    four = dict.fromkeys(itertools.combinations(range(4), 2), 4)
    with pytest.raises(NotATreeError, match="ranks 0 and 1 meet in a sum of 3 ranks, and yet the ranks 0, 1 are"):
        tree_of(four | {(0, 1): 3}, 0b1111)


@pytest.mark.parametrize("text", ["", "(0+1", "(0)+1", "0+1)", "not a tree", "[0+1]"])
def test_a_text_of_no_tree_is_refused(text):
    with pytest.raises(ValueError, match="is no tree"):
        Trees().parse(text)


# --- faults of an order, in a toy


class Toy:
    """An all-reduce that gathers all and adds by Python, as ADDERS has it: add(terms, x, rank, calls so far)."""

    __name__ = "toy"

    def __init__(self, adder="in rank order"):
        self.add, self.calls = ADDERS[adder], 0

    def __call__(self, x):
        self.calls += 1
        rank, world = ringlet.current().rank, ringlet.current().world
        every = ringlet.all_gather(torch.empty(world * len(x), dtype=x.dtype), x.contiguous()).view(world, -1)
        x.copy_(self.add(list(every), x, rank, self.calls))


def in_order(terms, ranks=(0, 1, 2, 3)):
    return functools.reduce(torch.add, [terms[rank] for rank in ranks])


OTHER = (3, 1, 2, 0)


def other_tail(terms, x, rank, calls):
    """The elements beyond the last whole vector of 8."""
    total, whole = in_order(terms), len(x) // 8 * 8
    total[whole:] = in_order([term[whole:] for term in terms], (3, 2, 1, 0))
    return total


def one_rank_differs(terms, x, rank, calls):
    """In one element."""
    total = in_order(terms)
    if rank == 2:
        total[-1] = in_order([term[-1] for term in terms], (1, 2, 0, 3))
    return total


# What the adder does, and what is said of it.
FAULTS = {
    "begins with its own": (
        lambda terms, x, rank, calls: in_order(terms, [(rank + k) % 4 for k in range(4)]),
        "the rank: element 0 of 20 is (((0+1)+2)+3) on rank 0 and (0+((1+2)+3)) on rank 1",
    ),
    "other in the tail": (
        other_tail, "the element's place: 2 orders in 20 elements, another from element 16 on",
    ),
    "other when long": (
        lambda terms, x, rank, calls: in_order(terms, (0, 1, 2, 3) if len(x) < 777 else OTHER),
        "the message's size: at 777 elements from A to B",
    ),
    "other at first": (  # as one that warms up
        lambda terms, x, rank, calls: in_order(terms, OTHER if calls <= 7 else (0, 1, 2, 3)),
        "the call: calls with 20 elements add in other orders than the calls before",
    ),
    "other in turn": (
        lambda terms, x, rank, calls: in_order(terms, OTHER if calls % 2 else (0, 1, 2, 3)), "the call: ",
    ),
    "other when aligned": (
        lambda terms, x, rank, calls: in_order(terms, (0, 1, 2, 3) if x.data_ptr() % 16 else OTHER),
        "the memory's alignment: element 0 of 1,000 is (0+((1+3)+2)), and (((0+1)+2)+3) 4 bytes fur",
    ),
    "other for probes": (  # a switch that hides its order
        lambda terms, x, rank, calls: in_order(
            terms, (0, 1, 2, 3) if max(term.abs().max() for term in terms) > 1e6 else OTHER
        ),
        "the numbers: ",
    ),
    "one rank differs": (
        one_rank_differs, "the rank: element 19 of 20 is (((0+1)+2)+3) on rank 0 and ((0+(1+2))+3)",
    ),
    "leaves one out": (
        lambda terms, x, rank, calls: in_order(terms, (0, 1, 2)),
        "this is no all_reduce by sum: 4 ranks added 1 each, and element 0 of rank 0 became 3 instead of 4",
    ),
    "counts one twice": (
        lambda terms, x, rank, calls: in_order(terms, (0, 1, 2, 2)),
        "ranks 0 and 2 added 1.70141e+38 and its opposite, the others 1",
    ),
}  # fmt: skip


def what_is_said(rank, world, adder, options):
    try:
        found = ringlet.reveal(Toy(adder), **options)
    except InvalidUsage as error:
        return str(error)
    return [f"{topic}: {words}" for topic, words in found.depends.items()]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_order_is_named(pool, fault):
    said, words = pool.values(what_is_said, 4, fault, {"sizes": [20, 1000]}, join="threads"), FAULTS[fault][1]
    assert said == [said[0]] * 4
    assert any(one.startswith(words) or words in one for one in said[0]) or words in said[0], said[0]


def test_a_right_order_is_not_blamed(pool):
    assert pool.values(what_is_said, 4, "in rank order", {"sizes": [20, 1000]}, join="threads") == [[]] * 4


# --- adders that are none of float32, pairwise


def widened(width):
    return lambda terms, x, rank, calls: in_order([term.to(width) for term in terms]).to(x.dtype)


def tree_in_float32(terms, x, rank, calls):
    a, b, c, d = (term.float() for term in terms)
    return ((a + b) + (c + d)).to(x.dtype)


def exact(terms, x, rank, calls):
    """As integers of any length would."""
    columns = zip(*(term.tolist() for term in terms), strict=True)
    return torch.tensor([float(sum(map(Fraction, column))) for column in columns], dtype=x.dtype)


def at_once(terms, x, rank, calls):
    """Terms are cut to a multiple of the largest one's last bit, as in a matrix unit."""
    stacked = torch.stack(terms).double()
    last_bit = torch.exp2(torch.floor(torch.log2(stacked.abs().amax(0))) - 23)
    return ((stacked / last_bit).trunc().sum(0) * last_bit).float()


ADDERS = {name: add for name, (add, _) in FAULTS.items()} | {
    "in rank order": lambda terms, x, rank, calls: in_order(terms, range(len(terms))),
    "in float32": widened(torch.float32),
    "in float64": widened(torch.float64),
    "as a tree in float32": tree_in_float32,
    "exact": exact,
    "at once": at_once,
}


def first_order(rank, world, adder, dtype):
    found = ringlet.reveal(Toy(adder), sizes=[20], dtype=getattr(torch, dtype))
    (seen,) = found.messages
    return seen.layout.order_of(0).text, seen.layout.order_of(0).depth, seen.wrong, seen.accumulator, found.depends


@pytest.mark.parametrize(
    ("adder", "dtype", "expected"),
    [
        ("in rank order", "float16", ("(((0+1)+2)+3)", 3, 0, "float32")),
        ("in rank order", "bfloat16", ("(((0+1)+2)+3)", 3, 0, "float32")),
        ("in rank order", "float64", ("(((0+1)+2)+3)", 3, 0, "float64")),
        ("in float32", "float16", ("(0+1+2+3)", 1, 0, "float32")),
        ("in float32", "bfloat16", ("(0+1+2+3)", 1, 0, "float32")),
        ("in float64", "float32", ("(0+1+2+3)", 1, 0, "float64")),
        ("as a tree in float32", "bfloat16", ("({0+1}+{2+3})", 1, 0, "float32")),
        ("exact", "float32", ("exact: whatever the order, nothing was lost", 1, None, "")),
        ("at once", "float32", ("(0,1,2,3)", 1, None, "")),
    ],
)
def test_adders_are_told_apart(pool, adder, dtype, expected):
    for said in pool.values(first_order, 4, adder, dtype, join="threads"):
        assert said == (*expected, {})


# --- what it refuses, and the two assertions


def refusal(rank, world, options):
    with pytest.raises(InvalidUsage) as refused:
        ringlet.reveal(Toy(), **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("world", "options", "words"),
    [
        (1, {}, "takes 2 to 1024 ranks, got 1: one rank adds nothing"),
        (2, {"dtype": torch.int32}, "int32 is added to the same bits in any order"),
        (2, {"dtype": torch.float8_e5m2}, "float8_e5m2 has no numbers far enough apart"),
        (2, {"collective": "broadcast"}, "broadcast adds nothing: pass one of all_reduce, reduce, reduce_scatter"),
        (2, {"sizes": []}, "sizes and calls must be at least 1"),
        (2, {"sizes": [0]}, "sizes and calls must be at least 1"),
    ],
)
def test_bad_input_gets_clear_words(pool, world, options, words):
    assert all(words in said for said in pool.values(refusal, world, options, join="threads"))


def test_float16_counts_few_ranks():
    with pytest.raises(InvalidUsage, match="takes 2 to 18 ranks, got 19: a sum of float16 counts no more"):
        numbers_of(Case("all_reduce", "auto", "ordinary", "api", 19, 0, 0, "float16", "sum"))


@on(2, "threads")
def test_a_name_is_no_function(rank, world):
    with pytest.raises(InvalidUsage, match="pass a function of a tensor, got 'ring'"):
        ringlet.reveal("ring")


@on(2, "shared_memory", "dist:gloo")
def test_what_is_no_group_is_refused(rank, world):
    for group, words in (
        (dist.GroupMember.NON_GROUP_MEMBER, "reveal: this rank is not a member of the group"),
        ("world", "reveal: group must be a ringlet.Group or a group of torch.distributed, not 'world'"),
        (0, "reveal: group must be"),
    ):
        with pytest.raises(InvalidUsage, match=words):
            ringlet.reveal(Toy(), group)


@on(4)
def test_assertions_for_tests_of_others(rank, world):
    ringlet.assert_one_order(call_of("two_shot", "all_reduce"), sizes=[1, 100])
    ringlet.assert_same_order(call_of("two_shot", "all_reduce"), call_of("one_shot", "all_reduce"), sizes=[100])
    with pytest.raises(AssertionError, match="the element's place: 4 orders in 100 elements"):
        ringlet.assert_one_order(call_of("ring", "all_reduce"), sizes=[1, 100])
    with pytest.raises(AssertionError, match=r"element 0 of 100 is \(0\+\(\(1\+2\)\+3\)\) by .*, and \(\(0\+1\)"):
        ringlet.assert_same_order(call_of("ring", "all_reduce"), call_of("butterfly", "all_reduce"), sizes=[100])


def of_torch(rank, world):
    """The group is torch.distributed's, where ringlet has none."""
    found = ringlet.reveal(dist.all_reduce, sizes=[1000])
    return [order.text for order in found.orders]


def test_a_call_of_torch_distributed_is_revealed(pool):
    said = pool.values(of_torch, 3, join="dist:gloo")
    assert said == [said[0]] * 3
    assert len(said[0]) == 3


def bits_of_all_orders(rank, world):
    """The random numbers of the probe differ between orders: else `wrong` could not say anything."""
    return ringlet.reveal(Toy("other for probes"), sizes=[5000]).messages[0].wrong


def test_random_numbers_tell_orders_apart(pool):
    assert min(pool.values(bits_of_all_orders, 4, join="threads")) > 4 * 1000
