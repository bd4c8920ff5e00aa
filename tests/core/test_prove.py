"""The prover proves what is registered, and refuses every kind of wrong schedule with its rank, round and chunk."""

import dataclasses
from fractions import Fraction

import pytest
import torch

import ringlet
from ranks import on
from ringlet.schedule import Round, Schedule, ScheduleError, Step, recv, reduce, send
from ringlet.schedule.prove import prove
from ringlet.schedule.prove_all import prove_all

REGISTERED = [(algorithm, collective) for algorithm, collective, _ in ringlet.schedule.algorithms()]
SMALL, LARGE = [*range(1, 18)], [*range(18, 34), 48, 64]


@pytest.mark.parametrize("algorithm, collective", REGISTERED)
@pytest.mark.parametrize(
    "worlds", [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large", marks=pytest.mark.slow)]
)
def test_registered_schedules_are_proved(algorithm, collective, worlds):
    proofs = prove_all(worlds, algorithms=[algorithm], collectives=[collective])
    assert {proof.world for proof in proofs} == set(worlds)
    assert all(proof.closed_form for proof in proofs)


@pytest.mark.parametrize(
    "algorithm, world, rounds, sent, depth, trees",
    [  # the table that an independent checker made before this one was written
        ("ring", 5, 8, "8/5", 4, 5),
        ("ring", 64, 126, "63/32", 63, 64),
        ("butterfly", 5, 4, "3", 3, 1),
        ("butterfly", 8, 3, "3", 3, 1),
        ("halving_doubling", 8, 6, "7/4", 3, 1),
        ("halving_doubling", 5, 6, "5/2", 3, 1),
        ("halving_doubling", 12, 8, "11/4", 4, 1),
        ("halving_doubling", 24, 10, "23/8", 5, 1),
        ("circulant", 5, 6, "8/5", 3, 5),
        ("circulant", 6, 6, "5/3", 3, 3),
        ("circulant", 8, 6, "7/4", 3, 1),
        ("circulant", 12, 8, "11/6", 4, 3),
        ("circulant", 24, 10, "23/12", 5, 3),
        ("swing", 6, 6, "5/3", 3, 3),
        ("swing", 9, 6, "16/9", 3, 9),
        ("swing", 16, 8, "15/8", 4, 4),
        ("recursive_multiplying", 8, 2, "4", 2, 1),
        ("double_binary_tree", 6, 4, "2", 2, 2),
        ("torus", 12, 10, "11/6", 5, 12),
        ("two_shot", 5, 2, "8/5", 1, 1),
        ("one_shot", 5, 1, "4", 1, 1),
        ("star", 5, 2, "4", 1, 1),
    ],
)
def test_golden_numbers(algorithm, world, rounds, sent, depth, trees):
    proof = ringlet.schedule(algorithm, world=world).prove()
    assert (proof.rounds, proof.sent, proof.depth, proof.trees) == (rounds, Fraction(sent), depth, trees)


@ringlet.algorithm("all_reduce", name="two_from_one", parts=1)
def two_from_one(rank, world):
    """Rank 2 sends rank 0 its own contribution, then rank 1's."""
    if world != 3:
        raise NotImplementedError("for three ranks")
    if rank == 0:
        yield reduce(2, 0), reduce(2, 0)
        yield send(1, 0), send(2, 0)
    elif rank == 1:
        yield send(2, 0)
        yield recv(0, 0)
    else:
        yield send(0, 0)
        yield recv(1, 0)
        yield send(0, 0)
        yield recv(0, 0)


@on(3, "shared_memory", "threads", "tcp")
def test_what_one_rank_sends_is_reduced_in_the_order_of_its_messages(rank: int, world: int) -> None:
    total = ringlet.all_reduce(torch.tensor([[1e8, -1e8, 1.0][rank]]), algorithm=two_from_one)
    assert float(total) == 0.0  # 1e8 + 1 - 1e8, not 1e8 - 1e8 + 1


def test_the_order_of_a_ranks_messages_counts():
    """Ranks 0 and 1 both add what rank 2 has, and what it passes on, but in another order."""
    ranks = [
        [[("reduce", 2, 0, 1), ("reduce", 2, 0, 1), ("send", 1, 0, 1)]],
        [[("send", 2, 0, 1), ("reduce", 0, 0, 1), ("reduce", 2, 0, 1)], [("send", 2, 0, 1)]],
        [
            [("send", 0, 0, 1), ("send", 1, 0, 1)],
            [("recv", 1, 0, 1)],
            [("send", 0, 0, 1)],
            [("recv", 1, 0, 1)],
        ],
    ]
    with pytest.raises(ScheduleError, match="different bits"):
        Schedule.from_steps("all_reduce", 1, ranks).prove()


def test_progress_is_told():
    calls = []
    prove_all([2, 3], lambda *call: calls.append(call), algorithms=["ring"], collectives=["all_gather"])
    assert calls == [(0, 2, "ring all_gather"), (1, 2, "ring all_gather"), (2, 2, "")]


def test_messages_are_matched_by_order_not_by_round():
    # Rank 0 copies in a round of its own first, so its round 1 meets rank 1's round 0.
    ranks = [
        [[("copy", 2, 0, 1)], [("send", 1, 1, 1), ("recv", 1, 3, 1)]],
        [[("send", 0, 0, 1), ("recv", 0, 2, 1)], [("copy", 3, 1, 1)]],
    ]
    assert prove(Schedule.from_steps("all_to_all", 4, ranks)).rounds == 2


def test_an_unregistered_algorithm_needs_no_closed_form():
    exchange = [[[("reduce", 1 - rank, 0, 1), ("send", 1 - rank, 0, 1)]] for rank in range(2)]
    assert not prove(Schedule.from_steps("all_reduce", 1, exchange)).closed_form


# --- what is wrong


def made(ranks, collective="all_reduce", parts=1, root=0) -> Schedule:
    return Schedule.from_steps(collective, parts, ranks, root)


def replaced(schedule: Schedule, rank: int, round: int, *steps: tuple[str, int, int, int]) -> Schedule:
    """The schedule with other steps in one rank's round."""
    rounds = [list(of_rank) for of_rank in schedule.ranks]
    rounds[rank][round] = Round(tuple(Step(*step) for step in steps))
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, rounds)))


def exchanges(world: int, peers) -> Schedule:
    """Whole-buffer exchanges with peers(rank), round by round."""
    return made([[[("send", p, 0, 1), ("reduce", p, 0, 1)] for p in peers(rank)] for rank in range(world)])


def swing_peers(world: int, distances: tuple[int, ...]):
    return lambda rank: [(rank + d if rank % 2 == 0 else rank - d) % world for d in distances]


def late_ring(world: int) -> Schedule:
    """Sends in one round and receives in the next: nobody comes to the receive."""
    ranks = [[[("send", (r + 1) % world, r, 1)], [("recv", (r - 1) % world, (r - 1) % world, 1)]] for r in range(world)]
    return made(ranks, "all_gather", parts=world)


RING, PAIRWISE = ringlet.schedule("ring", world=3), ringlet.schedule("pairwise", "all_to_all", world=2)
SENT, RECEIVED = [[("send", 1, 0, 1)]], [[("recv", 0, 0, 1)]]
OWN_ORDERS = [
    [[("send", 2, 0, 1), ("reduce", 2, 0, 1)], [("reduce", 1, 0, 1)], [("send", 1, 0, 1)]],
    [[("send", 2, 0, 1)], [("send", 0, 0, 1)], RECEIVED[0]],
    [[("send", 0, 0, 1), ("reduce", 1, 0, 1)], [("reduce", 0, 0, 1)]],
]
# What is wrong: the schedule; rank, round and chunk that are named; words.
WRONG = {
    # Rank 1 overwrites chunk 2 where it should have combined it: its own contribution is lost on the way to rank 2.
    "a missing contribution": (
        replaced(RING, 1, 0, ("send", 2, 0, 1), ("recv", 0, 2, 1)), 0, 2, 2, "without the contribution of rank 1",
    ),
    "an output that nobody writes": (made([[], []], "broadcast"), 1, None, 0, "no step writes"),
    "an addition twice": (exchanges(2, lambda rank: [rank ^ 1] * 2), 1, 1, 0, "contribution of rank 0 twice"),
    "swing of six": (exchanges(6, swing_peers(6, (1, -1, 3))), None, None, None, "twice"),
    "a write under a read": (
        made([[[("send", 1 - rank, 0, 1), ("recv", 1 - rank, 0, 1)]] for rank in range(2)]),
        0, 0, 0, "write under a read", "recv [0] from 1", "send [0] to 1",
    ),
    "a copy under a read": (
        replaced(PAIRWISE, 1, 0, ("send", 0, 0, 1), ("copy", 0, 1, 1), ("recv", 0, 2, 1)),
        1, 0, 0, "write under a read", "copy [1] to [0]",
    ),
    "two writes to one chunk": (
        made([[[("recv", 1, 0, 1), ("reduce", 2, 0, 1)]], [[("send", 0, 0, 1)]], [[("send", 0, 0, 1)]]], "reduce"),
        0, 0, 0, "two writes to one chunk", "recv [0] from 1", "reduce [0] from 2",
    ),
    "receives in another order": (
        made([[[("send", 1, 0, 1)], [("send", 1, 1, 1)]], [[("recv", 0, 1, 1)], RECEIVED[0]]], "broadcast", parts=2),
        0, 0, 0, "recv [1] from 0", "rank 1 in its round 0", "keeps its index",
    ),
    "a receive of another size": (
        made([[[("send", 1, 0, 2)]], RECEIVED], "broadcast", parts=2), 0, 0, 0, "has 2 chunks", "takes 1",
    ),
    **{
        f"a deadlock of {world}": (late_ring(world), 0, 0, 0, "deadlock", "rank 0 in round 0 waits to send to rank 1")
        for world in (2, 3, 4)
    },
    "other trees on other ranks": (
        exchanges(8, swing_peers(8, (1, -1, 3))), 1, 2, 0, "different bits", "on rank 0 as",
    ),
    "an order of its own on each rank": (
        made(OWN_ORDERS), 2, 1, 0, "different bits: summed as (0+(1+2)), on rank 0 as ((0+2)+1)",
    ),
    "a peer that does not exist": (made([[[("send", 2, 0, 1)]], []]), 0, 0, 0, "no rank 2 in a world of 2"),
    "itself as a peer": (made([[], [[("recv", 1, 0, 1)]]]), 1, 0, 0, "no messages with itself"),
    "a send that is not received": (made([SENT, []]), 0, 0, 0, "never received", "rank 1"),
    "a receive that is not sent": (made([[], [[("reduce", 0, 0, 1)]]]), 1, 0, 0, "never gets anything", "rank 0"),
    "a send from outside": (made([[[("send", 1, 1, 2)]], []], parts=2), 0, 0, 1, "outside the 2 parts"),
    "a copy to outside": (made([[[("copy", 2, 0, 1)]], []], parts=2), 0, 0, 2, "outside the 2 parts"),
    "an unknown verb": (
        made([[[("swap", 1, 0, 1)]], []]), 0, 0, 0, "the verb must be one of send, recv, reduce, copy, got 'swap'",
    ),
    "a chunk to receive that its sender lacks": (
        made([[[("recv", 1, 0, 1)]], [[("send", 0, 0, 1)]]], "broadcast"), 1, 0, 0, "does not have",
    ),
    "a chunk to add to that is not there": (
        made([SENT, [[("reduce", 0, 0, 1)]]], "broadcast"), 1, 0, 0, "does not have",
    ),
    "a chunk in the wrong place": (
        made([[[("send", 1, 0, 1), ("recv", 1, 1, 1)]], [[("send", 0, 1, 1), ("recv", 0, 0, 1)], [("copy", 1, 0, 1)]]],
             "all_gather", parts=2),
        1, 1, 1, "ends with what was chunk 0",
    ),
    "contributions to two chunks combined": (
        made([[[("send", 1, 0, 1), ("reduce", 1, 0, 1)]], [[("send", 0, 1, 1), ("reduce", 0, 1, 1)]]],
             "reduce_scatter", parts=2),
        1, 0, 1, "combines contributions to chunk 0", "to chunk 1",
    ),
    # Rank 1 adds rank 0's block to its own where the block alone belongs.
    "a contribution that is not asked for": (
        made([[[("copy", 2, 0, 1), ("send", 1, 1, 1), ("recv", 1, 3, 1)]],
              [[("copy", 3, 1, 1)], [("copy", 2, 1, 1)], [("send", 0, 0, 1), ("reduce", 0, 2, 1)]]],
             "all_to_all", parts=4),
        1, 2, 2, "contribution that does not belong there, of rank 1",
    ),
    "a barrier that lets a rank through": (
        made([[[("send", (r + 1) % 3, 0, 0), ("recv", (r + 2) % 3, 0, 0)]] for r in range(3)], "barrier"),
        0, 0, None, "without having heard of rank 1",
    ),
    "a barrier that carries chunks": (
        made([[[("send", (r + 1) % 2, 0, 1), ("recv", (r + 1) % 2, 0, 1)]] for r in range(2)], "barrier"),
        0, 0, 0, "the messages of a barrier carry no chunks",
    ),
    "more rounds than the closed form": (
        dataclasses.replace(RING, ranks=(RING.ranks[0] + (Round(()),), *RING.ranks[1:])),
        0, 4, None, "5 rounds", "closed form says 4",
    ),
    "fewer rounds than the closed form": (
        dataclasses.replace(ringlet.schedule("one_shot", world=2), algorithm="two_shot"),
        0, 0, None, "1 rounds", "closed form says 2",
    ),
    "no such collective": (
        dataclasses.replace(RING, collective="all_sum"), 0, None, None, "no collective 'all_sum'", "all_reduce",
    ),
    "an input of another size": (
        dataclasses.replace(RING, inputs=((0, 3), (0, 2), (0, 3))), 1, None, 0, "should be (0, 3)",
    ),
    "parts of another collective": (
        dataclasses.replace(RING, collective="all_to_all"), 0, None, None, "has 6 parts, not 3",
    ),
    "another world": (dataclasses.replace(RING, world=4), 0, None, None, "do not go together"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_refused_with_its_place(name):
    schedule, rank, round, chunk, *words = WRONG[name]
    with pytest.raises(ScheduleError) as caught:
        prove(schedule)
    error = caught.value
    assert rank is None or (error.rank, error.round, error.chunk) == (rank, round, chunk), str(error)
    assert str(error).startswith(f"{schedule.name}: rank {error.rank}, ")
    assert round is None or f"round {round}" in str(error)
    assert chunk is None or f"chunk {chunk}" in str(error)
    assert all(word in str(error) for word in words), str(error)


def test_chunks_in_the_right_places_are_proved():
    """Else the wrong schedules could all be wrong in another way."""
    ranks = [[[("send", 1, 0, 1), ("recv", 1, 1, 1)]], [[("send", 0, 1, 1), ("recv", 0, 0, 1)]]]
    assert prove(made(ranks, "all_gather", parts=2)).rounds == 1


def test_steps_that_change_later_are_not_the_schedules():
    steps = [reduce(1, 0)]
    made = Schedule.of_rounds(
        "all_reduce", 1, [[Round(steps), Round([send(1, 0)])], [Round([send(0, 0)]), Round([recv(0, 0)])]]
    )
    steps[0] = recv(1, 0)  # would lose a contribution
    assert made.ranks[0][0].steps == (reduce(1, 0),) and prove(made).depth == 1


@pytest.mark.parametrize("step", [("send", 1, 7, 1), ("send", 1, -1, 1), ("send", 1, 0, -1), ("send", 5, 0, 1)])
def test_what_cannot_run_is_neither_drawn_nor_costed(step):
    made = Schedule.from_steps("all_reduce", 1, [[[step]], [[("recv", 0, *step[2:])]]])
    for use in (Schedule.svg, Schedule.text, lambda one: one.cost(1000), Schedule.prove, Schedule.xml):
        with pytest.raises(ScheduleError, match=r"^hand-made all_reduce, world 2: rank 0, round 0"):
            use(made)
    assert made._repr_svg_() is None


def test_the_place_of_a_schedule_is_whole():
    rounds = [[[("send", 1, 0, 1), ("reduce", 1, 0, 1)]], [[("send", 0, 0, 1), ("reduce", 0, 0, 1)]]]
    for place, words in (({"root": 1}, "all_reduce has no root"), ({"hosts": (0, 1, 2)}, "the hosts of 3 ranks, of 2")):
        with pytest.raises(ScheduleError, match=words):
            prove(Schedule.from_steps("all_reduce", 1, rounds, **place))
    assert repr(Schedule.from_steps("all_reduce", 1, [])).startswith("hand-made all_reduce, world 0")
