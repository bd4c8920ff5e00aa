"""Schedules along a topology: proved, ordered as the hosts lie, and what they ask of the links between hosts."""

import itertools
import random
import xml.etree.ElementTree
from fractions import Fraction

import pytest

import ringlet
from ringlet.cli.main import main
from ringlet.schedule.cost import uplink_load, uplink_totals
from ringlet.schedule.hosts import described, numbered, parse_hosts, ranks_by_host
from ringlet.schedule.prove_all import prove_all

REGULAR = [
    "1x5",
    "5x1",
    "4x2",
    "4x2:cyclic",
    "3x4",
    "3x4:cyclic",
    "2x8",
    "8x2:cyclic",
    "4x4",
    "4x4:cyclic",
    "5x3:cyclic",
]
UNEVEN = ["3,1,2", "3,1,2:cyclic", "1,7", "5,4:cyclic", "2,3,4,5", "1,1,6,2:cyclic"]


def scattered(world: int, hosts: int) -> tuple[int, ...]:
    """Every rank on a host drawn by lot, with names that are no numbers from 0 on."""
    lot = random.Random(world * 100 + hosts)
    return tuple(7 * lot.randrange(hosts) - 3 for _ in range(world))


IRREGULAR = [
    *(scattered(9, 3), scattered(12, 5), scattered(16, 4)),
    (7, 7, 7, -2, -2, 7, 4),
    (0, 1, 1, 2, 2, 2, 0, 1, 1, 2, 1, 2, 2),
    (1, 1, 1, 1, 1, 0),
]


@pytest.mark.parametrize("words", REGULAR)
def test_everything_is_proved_along_regular_hosts_with_its_closed_form(words):
    hosts = parse_hosts(words)
    proofs = prove_all([len(hosts)], hosts=hosts)
    assert {(p.algorithm, p.collective) for p in proofs} == {(a, c) for a, c, _ in ringlet.schedule.algorithms()}
    assert all(proof.closed_form for proof in proofs)


@pytest.mark.parametrize("hosts", [*map(parse_hosts, UNEVEN), *IRREGULAR], ids=str)
def test_everything_is_proved_along_uneven_hosts(hosts):
    for proof in prove_all([len(hosts)], hosts=hosts):
        assert proof.hosts == numbered(hosts)
        assert proof.closed_form == (proof.algorithm != "hierarchical")
        made = ringlet.schedule(proof.algorithm, proof.collective, hosts=hosts, root=proof.root)
        assert all(round.steps for rounds in made.ranks for round in rounds)


def test_swing_of_five_ranks_has_a_closed_form_only_in_order():
    """Its rounds add two terms, in an order that the ranks' numbers decide: three trees, or four."""
    for hosts in itertools.product(range(3), repeat=5):
        for collective in ("reduce_scatter", "all_gather"):
            proof = ringlet.schedule("swing", collective, hosts=hosts).prove()
            assert proof.closed_form == (list(numbered(hosts)) == sorted(numbered(hosts))), hosts


@pytest.mark.parametrize(
    "collective, words, rounds, sent, depth, trees",
    [
        ("all_reduce", "4x2", 6, "7/4", 3, 1),
        ("all_reduce", "3x4", 6, "11/6", 3, 3),
        ("all_reduce", "3,1,2", 6, "10/3", 3, 3),  # one shard: a star inside each host, the circulant across
        ("reduce_scatter", "4x2", 2, "7/8", 2, 1),
        ("reduce_scatter", "3,1,2", 2, "5/6", 2, 1),
        ("all_gather", "4x2", 2, "7/8", 0, 0),
        ("broadcast", "4x4", 4, "2", 0, 0),
    ],
)
def test_golden_numbers_of_hierarchical(collective, words, rounds, sent, depth, trees):
    proof = ringlet.schedule("hierarchical", collective, hosts=parse_hosts(words)).prove()
    assert (proof.rounds, proof.sent, proof.depth, proof.trees) == (rounds, Fraction(sent), depth, trees)


def test_a_ring_goes_from_host_to_host_once():
    hosts = scattered(16, 4)
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        ring = ringlet.schedule("ring", collective, hosts=hosts)
        neighbours = {rank: ring.ranks[rank][0].steps[0].peer for rank in range(16)}
        assert sum(hosts[rank] != hosts[peer] for rank, peer in neighbours.items()) == len(set(hosts))


def test_only_the_numbering_matters_where_ranks_are_in_order():
    for algorithm, collective, _ in ringlet.schedule.algorithms():
        if algorithm in ("hierarchical", "circulant", "halving_doubling_far"):
            continue
        along, plain = (ringlet.schedule(algorithm, collective, world=8, hosts=h) for h in (parse_hosts("4x2"), None))
        assert along.ranks == plain.ranks


# The busiest uplink, summed over rounds, in S: nodes x ranks on each. Made by an independent checker before this one.
SHAPES = ["4x2", "2x4", "4x4", "8x2", "8x4", "4x8"]
BOUND = [1.5, 1.0, 1.5, 1.75, 1.75, 1.5]  # 2(n-1)/n
FAR = [3.0, 4.0, 6.0, 3.5, 7.0, 12.0]
BY_NUMBER = {
    ("ring", "block"): [1.75, 1.75, 1.875, 1.875, 1.938, 1.938],
    ("ring", "cyclic"): [3.5, 7.0, 7.5, 3.75, 7.75, 15.5],
    ("butterfly", "block"): [4, 4, 8, 6, 12, 16],
    ("butterfly", "cyclic"): [4, 4, 8, 6, 12, 16],
    ("halving_doubling", "block"): BOUND,
    ("halving_doubling", "cyclic"): FAR,
    ("halving_doubling_far", "block"): FAR,
    ("halving_doubling_far", "cyclic"): BOUND,
    ("circulant", "block"): [3.25, 5.25, 6.63, 3.63, 7.31, 13.3],
    ("circulant", "cyclic"): BOUND,
    ("two_shot", "block"): FAR,
    ("two_shot", "cyclic"): FAR,
}
ALONG_HOSTS = {
    "ring": BY_NUMBER["ring", "block"],
    "butterfly": BY_NUMBER["butterfly", "block"],
    "halving_doubling": BOUND,
    "halving_doubling_far": BOUND,
    "circulant": BOUND,
    "two_shot": FAR,
    "hierarchical": BOUND,
}


def numberings(shape: str) -> dict[str, tuple[int, ...]]:
    return {"block": parse_hosts(shape), "cyclic": parse_hosts(f"{shape}:cyclic")}


@pytest.mark.parametrize("algorithm, numbering", BY_NUMBER)
def test_load_of_the_uplinks_where_ranks_keep_their_numbers(algorithm, numbering):
    for shape, expected in zip(SHAPES, BY_NUMBER[algorithm, numbering], strict=True):
        hosts = numberings(shape)[numbering]
        load = uplink_load(ringlet.schedule(algorithm, world=len(hosts)), hosts)
        assert float(load) == pytest.approx(expected, rel=0.004), shape


@pytest.mark.parametrize("algorithm", ALONG_HOSTS)
def test_load_of_the_uplinks_along_the_hosts_whatever_the_numbers(algorithm):
    for shape, expected in zip(SHAPES, ALONG_HOSTS[algorithm], strict=True):
        for hosts in numberings(shape).values():
            load = uplink_load(ringlet.schedule(algorithm, hosts=hosts))
            assert float(load) == pytest.approx(expected, rel=0.004), shape


@pytest.mark.parametrize("hosts", [*map(parse_hosts, UNEVEN), scattered(12, 5)], ids=str)
def test_hierarchical_meets_the_bound_on_uneven_hosts_too(hosts):
    """In all that an uplink carries; in what moment it does depends on how long a host is busy inside."""
    n, world = len(set(hosts)), len(hosts)
    totals = uplink_totals(ringlet.schedule("hierarchical", hosts=hosts))
    assert set(totals.values()) == {Fraction(2 * (n - 1), n)} and len(totals) == 2 * n
    sizes = dict(enumerate(map(len, ranks_by_host(hosts))))
    out = {("out of", host): Fraction(world - size, world) for host, size in sizes.items()}  # a sum for each rank there
    into = {("into", host): Fraction(size * (n - 1), world) for host, size in sizes.items()}  # one from each host
    assert uplink_totals(ringlet.schedule("hierarchical", "reduce_scatter", hosts=hosts)) == out | into
    mirrored = {("into" if way == "out of" else "out of", host): load for (way, host), load in (out | into).items()}
    assert uplink_totals(ringlet.schedule("hierarchical", "all_gather", hosts=hosts)) == mirrored


def test_broadcast_crosses_the_roots_uplink_once_a_round_of_the_tree():
    for words in ("4x4", "4x4:cyclic"):
        for root in range(16):
            schedule = ringlet.schedule("hierarchical", "broadcast", hosts=parse_hosts(words), root=root)
            assert uplink_load(schedule) == 2


def test_pictures_name_the_hosts():
    drawn = xml.etree.ElementTree.fromstring(ringlet.schedule("ring", hosts=(4, 9, 4)).svg())
    words = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in words if word and word.startswith("host ")] == ["host 0", "host 1", "host 0"]


def test_hosts_are_parsed_and_described():
    assert parse_hosts("2x3") == (0, 0, 0, 1, 1, 1) and parse_hosts("2x3:cyclic") == (0, 1, 0, 1, 0, 1)
    assert parse_hosts("3,1") == (0, 0, 0, 1) and parse_hosts("3,1,2:cyclic") == (0, 1, 2, 0, 2, 0)
    for words in ("2x3", "2x3:cyclic", "3,1", "3,1,2:cyclic"):
        assert described(parse_hosts(words)) == f"hosts {words}"
    assert described((5, 2, 2, 5)) == "hosts 0 1 1 0"
    assert described((4, 4)) == ""
    assert ringlet.schedule("ring", hosts=(5, 5, 2)).name == "ring all_reduce, world 3, hosts 2,1"
    for wrong in ("", "x2", "0x3", "2x3x4", "2,0", "2x3:round", "a", "99999x99999", "99999"):
        with pytest.raises(ValueError, match="does not describe hosts: write 4x2"):
            parse_hosts(wrong)


def test_hosts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="the host of each of 3 ranks, got 2 hosts"):
        ringlet.schedule("ring", world=3, hosts=(0, 1))
    with pytest.raises(ValueError, match="pass world="):
        ringlet.schedule("ring")
    with pytest.raises(ValueError, match="hosts has 2 ranks"):
        uplink_load(ringlet.schedule("ring", world=3), (0, 1))


def test_commands_take_hosts(capsys):
    assert main(("draw", "hierarchical", "--hosts", "2x2:cyclic")) == 0
    caption, _, hosts, ranks = capsys.readouterr().out.splitlines()[:4]
    assert caption == "hierarchical all_reduce, world 4, hosts 2x2:cyclic: 4 rounds, 3/2 S sent per rank"
    assert [int(word) for word in hosts.split() if word != "host"] == [0, 1, 0, 1]
    assert [int(word) for word in ranks.split() if word != "rank"] == [0, 1, 2, 3]
    assert main(("prove", "--hosts", "3,1", "--collective", "all_reduce")) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["hierarchical"].endswith("none on file") and rows["ring"].endswith("agree")
    with pytest.raises(SystemExit):
        main(("draw", "ring", "--hosts", "2x2", "--world", "4"))
    assert "not allowed with argument --hosts" in capsys.readouterr().err
