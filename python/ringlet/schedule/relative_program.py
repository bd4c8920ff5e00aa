"""The one program that all ranks follow, if there is one: ranks and chunks counted from the rank itself.

A ring's rank r sends chunk r-1 to r+1 in round 0 whatever r is; a butterfly's ranks differ.
"""

from __future__ import annotations

from ringlet.schedule.data import Round, Schedule

Action = tuple[str, int, tuple[int, ...]]  # (verb, peer - r, chunks - r), modulo world


def program_of_any_rank(schedule: Schedule) -> list[list[Action]]:
    """The actions of each round; ValueError if two ranks do different things."""
    programs = []
    for rank, rounds in enumerate(schedule.ranks):
        programs.append([_relative_round(schedule, rank, round) for round in rounds])
    for rank, program in enumerate(programs):
        if program != programs[0]:
            raise ValueError(
                f"{schedule.name}: ranks 0 and {rank} take different steps, counted from themselves, so the schedule "
                "has no relative form"
            )
    return programs[0]


def relative(offset: int, world: int) -> str:
    """ "r", "r+1", "r-1": the nearer way round."""
    offset %= world
    if offset == 0:
        return "r"
    return f"r+{offset}" if 2 * offset <= world else f"r-{world - offset}"


def _relative_round(schedule: Schedule, rank: int, round: Round) -> list[Action]:
    world = schedule.world
    chunks: dict[tuple[str, int], set[int]] = {}
    for step in round.steps:
        # A copy's peer is a chunk, not a rank; where it goes follows from where it comes from.
        peer = 0 if step.verb == "copy" else (step.peer - rank) % world
        # Blocks in and blocks out (all_to_all) both count from the rank; a single chunk belongs to all ranks.
        found = {0} if schedule.parts == 1 else {(chunk - rank) % world for chunk in step.chunks}
        chunks.setdefault((step.verb, peer), set()).update(found if step.count else ())
    # Sends first, as the algorithms write them.
    in_order = sorted(chunks.items(), key=lambda item: (item[0][0] != "send", item[0]))
    return [(verb, peer, tuple(sorted(found))) for (verb, peer), found in in_order]
