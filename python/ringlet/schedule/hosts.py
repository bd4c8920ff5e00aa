"""Hosts of ranks, as words on a command line and as data: hosts[r] is the number of rank r's host."""

from __future__ import annotations

from collections.abc import Sequence

Hosts = tuple[int, ...]

MOST_RANKS = 1 << 16  # of a schedule (csrc/bindings/schedule.cc)
SYNTAX = "4x2 (four hosts of two ranks, numbered host after host), 4x2:cyclic (round robin over the hosts) or 3,1,2"


def parse_hosts(words: str) -> Hosts:
    """ "2x3" -> 0 0 0 1 1 1; "2x3:cyclic" -> 0 1 0 1 0 1; "3,1:cyclic" -> 0 1 0 0. ValueError with the syntax."""
    sizes_text, _, order = words.partition(":")
    try:
        if "x" in sizes_text:
            count, size = map(int, sizes_text.split("x"))
            sizes = [size] * count if 0 < count * size <= MOST_RANKS else []
        else:
            sizes = [int(size) for size in sizes_text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or sum(sizes) > MOST_RANKS or order not in ("", "cyclic"):
        raise ValueError(f"{words[:60]!r} does not describe hosts: write {SYNTAX}")
    if not order:
        return tuple(host for host, size in enumerate(sizes) for _ in range(size))
    return tuple(host for index in range(max(sizes)) for host, size in enumerate(sizes) if index < size)


def numbered(hosts: Sequence[int]) -> Hosts:
    """The same hosts, numbered by their first rank."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks on each host, ascending."""
    ranks: list[list[int]] = [[] for _ in set(hosts)]
    for rank, host in enumerate(numbered(hosts)):
        ranks[host].append(rank)
    return ranks


def described(hosts: Sequence[int]) -> str:
    """ "hosts 4x2:cyclic", as parse_hosts() reads it; "hosts 0 1 1 0" for what it cannot say; "" for one host."""
    ranks = ranks_by_host(hosts)
    if len(ranks) < 2:
        return ""
    sizes = [len(on_host) for on_host in ranks]
    text = f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else ",".join(map(str, sizes))
    for order in ("", ":cyclic"):
        if parse_hosts(text + order) == numbered(hosts):
            return f"hosts {text}{order}"
    return f"hosts {' '.join(map(str, numbered(hosts)))}"
