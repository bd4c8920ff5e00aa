"""Algorithms that tests write: right ones, which have a built-in twin or none, and a wrong one of each kind."""

from __future__ import annotations

import ringlet
from ringlet.schedule import copy, recv, reduce, send


@ringlet.algorithm("all_reduce", name="own_ring", order="along")
def own_ring(rank, world):
    """The built-in ring, written again."""
    following, before = (rank + 1) % world, (rank - 1) % world
    for i in range(world - 1):
        yield send(following, (rank - 1 - i) % world), reduce(before, (rank - 2 - i) % world)
    for i in range(world - 1):
        yield send(following, (rank - i) % world), recv(before, (rank - 1 - i) % world)


@ringlet.algorithm("broadcast", name="own_star", parts=1)
def own_star(rank, world, root):
    """The built-in star, written again."""
    if rank == root:
        yield [send(peer, 0) for peer in range(world) if peer != root]
    else:
        yield recv(root, 0)


@ringlet.algorithm("all_reduce", name="own_of_hosts", parts=1)
def own_of_hosts(rank, world, hosts):
    """Every host's first rank collects from its own, rank 0 from those, and all goes back: it depends on hosts."""
    first = [hosts.index(host) for host in hosts]
    own = [r for r in range(world) if first[r] == rank and r != rank]
    heads = [r for r in range(world) if first[r] == r and r != 0]
    if first[rank] != rank:
        yield send(first[rank], 0)
        yield recv(first[rank], 0)
        return
    yield [reduce(r, 0) for r in own]
    if rank == 0:
        yield [reduce(r, 0) for r in heads]
        yield [send(r, 0) for r in heads]
    else:
        yield send(0, 0)
        yield recv(0, 0)
    yield [send(r, 0) for r in own]


@ringlet.algorithm("all_gather", name="own_gather")
def own_gather(rank, world):
    """Every rank sends its block to all."""
    others = [peer for peer in range(world) if peer != rank]
    yield [*(send(peer, rank) for peer in others), *(recv(peer, peer) for peer in others)]


@ringlet.algorithm("all_to_all", name="own_relay")
def own_relay(rank, world):
    """Rank 0's block for rank 2 goes through rank 1, which keeps it where rank 2's block will be."""
    if world != 3:
        raise NotImplementedError("three ranks")
    if rank == 0:
        yield copy(0, 3), send(1, 1), send(1, 2), recv(1, 4), recv(2, 5)
    elif rank == 1:
        yield copy(1, 4), send(0, 0), send(2, 2), recv(0, 3), recv(0, 5)
        yield send(2, 5)
        yield recv(2, 5)
    else:
        yield copy(2, 5), send(0, 0), recv(1, 4)
        yield recv(1, 3)
        yield send(1, 1)


def circle(rank, world, turns):
    """Ranks 0 and 2 give chunk 0 to and fro. Then rank 0 sends what rank 1 takes while it reads chunk 0."""
    if world != 3:
        raise NotImplementedError("three ranks")
    if rank == 0:
        yield send(1, 0), send(2, 0), reduce(1, 1), reduce(2, 1)
        for turn in range(turns):
            yield send(2, 0) if turn % 2 else recv(2, 0)
        yield send(1, 1), send(2, 1)
    elif rank == 1:
        yield send(0, 1), send(2, 0)
        yield reduce(0, 0), reduce(2, 0), recv(0, 1)
    else:
        yield send(0, 1), send(1, 0), reduce(0, 0), reduce(1, 0)
        for turn in range(turns):
            yield recv(0, 0) if turn % 2 else send(0, 0)
        yield recv(0, 1)


@ringlet.algorithm("all_reduce", name="own_circle", parts=2)
def own_circle(rank, world):
    """In place rank 0 may not take chunk 0 before rank 1 has ended the round that waits for rank 0."""
    yield from circle(rank, world, turns=1)


@ringlet.algorithm("all_reduce", name="own_staged_circle", parts=2)
def own_staged_circle(rank, world):
    """The same, until no staging buffer is left."""
    yield from circle(rank, world, turns=4)


def swing_peer(rank, world, step):
    """Swing (De Sensi et al., NSDI 2024): even ranks go one way by rho(step), odd ones the other."""
    rho = (1 - (-2) ** (step + 1)) // 3
    return (rank + rho) % world if rank % 2 == 0 else (rank - rho) % world


def swing_blocks(rank, world, step):
    """The chunks that `rank` and whoever it reaches from `step` on finish."""
    blocks = {rank}
    for later in range(step, world.bit_length() - 1):
        blocks |= swing_blocks(swing_peer(rank, world, later), world, later + 1)
    return blocks


def spans(chunks):
    """[0, 1, 2, 5] -> [(0, 3), (5, 1)]: neighbours go in one message."""
    found = []
    for chunk in sorted(chunks):
        if found and sum(found[-1]) == chunk:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((chunk, 1))
    return found


@ringlet.algorithm("all_reduce", name="own_swing", order="along")
def own_swing(rank, world):
    """Swing with few bytes, for powers of two."""
    if world & (world - 1):
        raise NotImplementedError("a power of two")
    steps = world.bit_length() - 1
    for step in range(steps):
        peer = swing_peer(rank, world, step)
        given, kept = swing_blocks(peer, world, step + 1), swing_blocks(rank, world, step + 1)
        yield [*(send(peer, *span) for span in spans(given)), *(reduce(peer, *span) for span in spans(kept))]
    for step in reversed(range(steps)):
        peer = swing_peer(rank, world, step)
        given, taken = swing_blocks(rank, world, step + 1), swing_blocks(peer, world, step + 1)
        yield [*(send(peer, *span) for span in spans(given)), *(recv(peer, *span) for span in spans(taken))]


# Each is wrong for three ranks, with what the prover says of it; test_prove.py has every kind.
WRONG = {}


def wrong(words):
    def keep(function):
        WRONG[function.__name__] = words
        return ringlet.algorithm("all_reduce", name=function.__name__, parts=2)(function)

    return keep


@wrong("ends without the contribution of rank 1")
def lost_contribution(rank, world):
    if rank == 0:
        yield reduce(world - 1, 0, 2)
        yield [send(r, 0, 2) for r in range(1, world)]
    else:
        yield [send(0, 0, 2)] if rank == world - 1 else []
        yield recv(0, 0, 2)


@wrong("deadlock")
def deadlock(rank, world):
    if rank < 2:
        yield reduce(1 - rank, rank)
        yield send(1 - rank, 1 - rank)


@wrong("different bits")
def differing_trees(rank, world):
    """Of three ranks: 0 sums (0+1)+2, 1 sums (1+2)+0, and 2 gets the sum of 0."""
    if rank == 0:
        yield send(1, 0, 2), reduce(1, 0, 2)
        yield reduce(2, 0, 2)
        yield send(2, 0, 2)
    elif rank == 1:
        yield send(0, 0, 2), reduce(2, 0, 2)
        yield reduce(0, 0, 2)
    else:
        yield send(1, 0, 2)
        yield send(0, 0, 2)
        yield recv(0, 0, 2)
