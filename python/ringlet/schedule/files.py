"""Schedules in files: JSON, and MSCCL-XML (ringlet.schedule.msccl). A file is an algorithm for the worlds in it.

A JSON file has one object for a schedule, or a list of objects for several worlds or roots:

    {"collective": "all_reduce", "algorithm": "swap", "world": 2, "root": 0, "parts": 1, "hosts": [],
     "ranks": [[[["send", 1, 0, 1], ["reduce", 1, 0, 1]]], [[["send", 0, 0, 1], ["reduce", 0, 0, 1]]]]}

`ranks` has a list of rounds for each rank, a round has steps, and a step has verb, peer, first and count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ringlet.schedule.collectives import COLLECTIVES, ROOTED
from ringlet.schedule.data import Schedule


def to_json(schedule: Schedule) -> str:
    """The schedule as the text of a JSON file, a line for each rank."""
    head = {name: getattr(schedule, name) for name in ("collective", "algorithm", "world", "root", "parts", "hosts")}
    ranks = [
        json.dumps([[[step.verb, step.peer, step.first, step.count] for step in round.steps] for round in rounds])
        for rounds in schedule.ranks
    ]
    return json.dumps(head)[:-1] + ',\n "ranks": [\n  ' + ",\n  ".join(ranks) + "\n ]}\n"


def from_json(text: str) -> list[Schedule]:
    """The schedules of a JSON file, not yet proved. Raises ValueError with the place of what is wrong."""
    data = json.loads(text)
    return [_schedule(one, f"[{i}]") for i, one in enumerate(data)] if isinstance(data, list) else [_schedule(data, "")]


def _schedule(data: Any, where: str) -> Schedule:
    if not isinstance(data, dict):
        raise ValueError(f"a schedule is an object with collective, world, parts and ranks, got {data!r:.60} {where}")
    collective = data.get("collective")
    if collective not in COLLECTIVES:
        raise ValueError(f"{where}.collective must be one of {', '.join(COLLECTIVES)}, got {collective!r:.60}")
    world = _number(data.get("world"), f"{where}.world", 1)
    root = _number(data.get("root", 0), f"{where}.root", 0)
    parts = _number(data.get("parts"), f"{where}.parts", 1)
    ranks = _list(data.get("ranks"), f"{where}.ranks")
    hosts = _list(data.get("hosts", []), f"{where}.hosts")
    if len(ranks) != world or root >= world or len(hosts) not in (0, world):
        raise ValueError(f"world {world}, root {root}, {len(ranks)} ranks and {len(hosts)} hosts do not go together")
    if root and collective not in ROOTED:
        raise ValueError(f"{where}.root must be 0, because {collective} has no root, got {root}")
    steps = [
        [
            [_step(step, f"{where}.ranks[{rank}][{index}]") for step in _list(round, f"{where}.ranks[{rank}][{index}]")]
            for index, round in enumerate(_list(rounds, f"{where}.ranks[{rank}]"))
        ]
        for rank, rounds in enumerate(ranks)
    ]
    on_hosts = tuple(_number(host, f"{where}.hosts", 0) for host in hosts)
    return Schedule.from_steps(collective, parts, steps, root, str(data.get("algorithm", "hand-made")), on_hosts)


def _step(data: Any, where: str) -> tuple[str, int, int, int]:
    if not isinstance(data, list) or len(data) != 4 or not isinstance(data[0], str):
        raise ValueError(f"{where}: a step is [verb, peer, first, count], got {data!r:.60}")
    peer, first, count = (_number(number, where, 0) for number in data[1:])
    return data[0], peer, first, count


def _list(data: Any, where: str) -> Sequence[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{where} must be a list, got {data!r:.60}")
    return data


def _number(data: Any, where: str, least: int) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not least <= data < 1 << 31:
        raise ValueError(f"{where} must be a whole number from {least} on, got {data!r:.60}")
    return data
