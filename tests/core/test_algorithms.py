"""What sets one algorithm apart from another: who talks to whom. That all are right is the prover's (test_prove.py)."""

import pytest

import ringlet


def partners(schedule, rank):
    """The peers that a rank sends to, round by round."""
    return [{step.peer for step in round.steps if step.verb == "send"} for round in schedule.ranks[rank]]


def sends(schedule):
    """(rank, round, peer, chunks) of every message."""
    for rank, rounds in enumerate(schedule.ranks):
        for index, round in enumerate(rounds):
            for step in round.steps:
                if step.verb == "send":
                    yield rank, index, step.peer, step.count


def distance(a, b, world):
    return min((a - b) % world, (b - a) % world)


@pytest.mark.parametrize("world", [4, 6, 16, 22, 32])
def test_swing_goes_1_1_3_5_11_to_either_side(world):
    swing = ringlet.schedule("swing", "reduce_scatter", world=world)
    rho = [1, -1, 3, -5, 11]
    for rank in range(world):
        side = 1 if rank % 2 == 0 else -1
        assert partners(swing, rank) == [{(rank + side * rho[s]) % world} for s in range(len(swing.ranks[rank]))]


def test_the_odd_rank_of_swing_gives_as_much_in_each_round_as_the_others():
    for world in (5, 9, 13, 33):
        swing = ringlet.schedule("swing", "reduce_scatter", world=world)
        given = [[sum(s.count for s in r.steps if s.verb == "send") for r in rounds] for rounds in swing.ranks]
        odd, first = given[world - 1], given[0]
        assert sum(odd) == sum(first) == world - 1
        assert all(abs(a - b) <= 1 for a, b in zip(odd, first, strict=True))


@pytest.mark.parametrize("world", [2, 3, 5, 8, 13, 16, 64])
def test_in_two_trees_nobody_has_children_twice(world):
    for collective, root in (("broadcast", 0), ("broadcast", world - 1), ("all_reduce", 0)):
        found = ringlet.schedule("double_binary_tree", collective, world=world, root=root)
        for rank, rounds in enumerate(found.ranks):
            inside = {step.first for step in rounds[-1].steps if step.verb == "send"}  # in the last round, downwards
            assert len(inside) <= 1 or (rank == root and collective == "broadcast")
    halves = [count for *_, count in sends(ringlet.schedule("double_binary_tree", "broadcast", world=world))]
    assert halves == [1] * 2 * (world - 1)


def test_bine_edges_are_shorter_than_the_binomial_trees():
    for world in (8, 16, 32, 64):
        lengths = {}
        for name in ("bine", "tree"):
            found = ringlet.schedule(name, "broadcast", world=world)
            lengths[name] = sum(distance(rank, peer, world) for rank, _, peer, _ in sends(found))
        assert lengths["bine"] < lengths["tree"]


def test_pat_sends_most_between_neighbours_and_bruck_far_away():
    for name, near in (("pat", True), ("bruck", False)):
        found = ringlet.schedule(name, "all_gather", world=16)
        most = max(sum(s.count for s in round.steps if s.verb == "send") for round in found.ranks[0])
        far = [sum(s.count for s in r.steps if s.verb == "send") for r in found.ranks[0]]
        peers = [distance(0, peer.pop(), 16) for peer in partners(found, 0)]
        assert peers[far.index(most)] == (1 if near else 8)


@pytest.mark.parametrize("world, rows, columns", [(6, 3, 2), (12, 4, 3), (16, 4, 4), (7, 7, 1)])
def test_the_torus_has_rings_along_rows_and_columns(world, rows, columns):
    torus = ringlet.schedule("torus", world=world)
    for rank in range(world):
        row, column = divmod(rank, columns)
        right = row * columns + (column + 1) % columns
        below = (row + 1) % rows * columns + column
        expected = [right] * (columns - 1) + [below] * 2 * (rows - 1) + [right] * (columns - 1)
        assert partners(torus, rank) == [{peer} for peer in expected]
