"""The search for a schedule: compositions and segments are proved, predictions follow the model."""

import functools
from pathlib import Path

import pytest

import ringlet
from ringlet import _C
from ringlet.cli.main import main
from ringlet.errors import InvalidUsage
from ringlet.schedule.collectives import COLLECTIVES
from ringlet.schedule.compose import Composition, compositions, segmented
from ringlet.schedule.cost import ETHERNET, Predictor, Times, uplink_load, uplink_totals
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.machine_file import Machine, read_machine
from ringlet.schedule.prove import prove
from ringlet.schedule.search import best, composed, schedules_of, search

MACHINES = sorted((Path(ringlet.__file__).parent / "schedule" / "machines").glob("*.toml"))
HOSTS = parse_hosts("4x2")
# Nothing but latency, or nothing but one kind of link, each in units of one.
FREE = {"inside_alpha": 0, "inside_beta": 0, "across_alpha": 0, "uplink_beta": 0, "message": 0, "gamma": 0}


def machine(**numbers):
    return Machine(name="made up", **{**FREE, **numbers})


@pytest.mark.parametrize("words", ["4x2", "2x3:cyclic", "3x4"])
def test_every_composition_is_proved(words):
    hosts = parse_hosts(words)
    assert len({composition.name for composition in compositions()}) > 100
    for composition in compositions():
        schedule = composition.schedule(hosts)
        assert prove(schedule).world == len(hosts), composition.name


def test_hierarchical_is_a_composition():
    for words in ("4x2", "4x2:cyclic", "3x3"):
        hosts = parse_hosts(words)
        made, known = (
            Composition("two_shot", "circulant").schedule(hosts),
            ringlet.schedule("hierarchical", hosts=hosts),
        )
        assert (made.ranks, made.parts, made.hosts) == (known.ranks, known.parts, known.hosts)


def test_shards_cross_the_uplink_once_and_leaders_the_whole_message():
    for composition, load in ((Composition("ring", "ring"), 1.5), (Composition("tree", "ring", leaders=True), 1.5)):
        assert uplink_load(composition.schedule(HOSTS)) == load
    with pytest.raises(ValueError, match="the same number of ranks on every host"):
        Composition("ring", "ring").schedule(parse_hosts("3,1"))


@pytest.mark.parametrize("name, collective", [("chain", "broadcast"), ("tree", "reduce"), ("ring", "all_reduce")])
def test_segments_follow_each_other_a_moment_apart(name, collective):
    for world in (2, 3, 5, 8):
        whole = ringlet.schedule(name, collective, world=world)
        cut = segmented(whole, 4)
        assert (cut.algorithm, cut.parts) == (f"{name}.4", 4 * whole.parts)
        proof, before = prove(cut), prove(whole)
        assert (proof.sent, proof.depth) == (before.sent, before.depth)
    # A link of the chain takes a segment in while it passes the one before on: p-1 + m-1 moments in all.
    chain = Predictor(segmented(ringlet.schedule("chain", "broadcast", world=5), 4))
    assert chain.seconds(0, machine(inside_alpha=1)) == 4 + 3


def test_what_has_no_common_moment_or_has_blocks_is_not_cut():
    with pytest.raises(ValueError, match="at different moments of its round"):
        segmented(ringlet.schedule("double_binary_tree", world=8), 2)
    with pytest.raises(ValueError, match="has blocks"):
        segmented(ringlet.schedule("ring", "all_gather", world=4), 2)


@pytest.mark.parametrize("name", ["ring", "butterfly", "circulant", "two_shot", "swing", "star"])
def test_on_one_host_a_prediction_is_the_cost(name):
    for world in (2, 5, 8):
        schedule = ringlet.schedule(name, world=world)
        assert Predictor(schedule).seconds(1 << 20, ETHERNET) == pytest.approx(schedule.cost(1 << 20).seconds)


@pytest.mark.parametrize("name", ["ring", "butterfly", "circulant", "two_shot", "hierarchical", "one_shot"])
def test_uplinks_alone_take_what_they_carry(name):
    """A figure that uplink_load counts another way; and segments share them without gaps."""
    schedule = ringlet.schedule(name, hosts=HOSTS)
    predictor, slow = Predictor(schedule), machine(uplink_beta=1)
    assert predictor.seconds(800, slow) == pytest.approx(800 * float(uplink_load(schedule)))
    assert predictor.seconds(800, slow, segments=4) <= predictor.seconds(800, slow)


@pytest.mark.parametrize("words", ["2x4", "3x3", "2x5"])
def test_no_uplink_carries_more_than_it_can(words):
    """Also where ranks that run ahead use an uplink again while the others still use it."""
    slow = machine(inside_beta=1e-3, uplink_beta=1)
    for schedule, _ in schedules_of("all_reduce", parse_hosts(words)):
        predictor = Predictor(schedule)
        needed = 800 * float(max(uplink_totals(schedule).values()))
        for segments in (1, 4):
            seconds = predictor.seconds(800, slow, segments)
            assert seconds >= needed * (1 - 1e-9), schedule.algorithm


USUAL = {"inside_alpha": 7e-6, "inside_beta": 1e-9, "across_alpha": 5e-5, "uplink_beta": 4e-8, "message": 1e-6,
         "gamma": 2e-10}  # fmt: skip


@functools.cache
def schedules(collective="all_reduce"):
    return list(schedules_of(collective, HOSTS))


def every_schedule():
    for collective in COLLECTIVES:
        for schedule, _ in schedules(collective):
            yield schedule


def test_a_ring_spends_what_one_computes_by_hand():
    n, nbytes, usual = 5, 3000, machine(**USUAL)
    alpha, beta, message, gamma = usual.inside_alpha, usual.inside_beta, usual.message, usual.gamma
    ring = Predictor(ringlet.schedule("ring", world=n))
    for segments in (1, 4):
        chunk = nbytes / n / segments
        by_hand = Times(
            latency=2 * (n - 1) * alpha,  # of the first segment; the others follow it
            messages=segments * 2 * (n - 1) * 2 * message,
            inside=segments * 2 * (n - 1) * beta * chunk,
            combining=segments * (n - 1) * gamma * chunk,
        )
        assert ring.times(nbytes, usual, segments) == pytest.approx(by_hand)
        assert ring.seconds(nbytes, usual, segments) == pytest.approx(sum(by_hand))


def test_what_time_is_spent_on_adds_up_to_it():
    for schedule in every_schedule():
        predictor = Predictor(schedule)
        for nbytes, segments in ((8, 1), (1 << 20, 1), (1 << 20, 4)):
            spent = predictor.times(nbytes, machine(**USUAL), segments)
            assert sum(spent) == pytest.approx(predictor.seconds(nbytes, machine(**USUAL), segments)), schedule.name
            assert min(spent) >= 0


def test_a_better_machine_is_never_slower():
    for schedule in every_schedule():
        predictor = Predictor(schedule)
        for nbytes, segments in ((8, 1), (1 << 20, 1), (1 << 20, 4)):
            usual = predictor.seconds(nbytes, machine(**USUAL), segments)
            assert predictor.seconds(2 * nbytes, machine(**USUAL), segments) >= usual
            for number, value in USUAL.items():
                better = predictor.seconds(nbytes, machine(**{**USUAL, number: value / 2}), segments)
                assert usual / 2 <= better <= usual, (schedule.name, number)


def test_names_of_candidates_lead_back_to_their_schedules():
    for candidate in search(schedules(), machine(), []):
        assert composed(candidate.name, "all_reduce", HOSTS).ranks == candidate.schedule.ranks
    for name in ("ring+nothing", "ring.x", ".2", "ring.0", "leader.ring+ring"):
        with pytest.raises(ValueError):
            composed(name, "all_reduce", HOSTS)


def test_slow_uplinks_want_what_loads_them_least():
    slow = machine(inside_alpha=1e-5, inside_beta=1e-9, across_alpha=5e-5, uplink_beta=4e-8)
    found = search(schedules(), slow, [1 << 20, 16 << 20], _C.message_segments)
    by_name = {candidate.name: candidate for candidate in found}
    assert len({candidate.schedule.ranks for candidate in found}) == len(found) > 100
    for size in (1 << 20, 16 << 20):
        chosen = best(found, size, 5)[0]
        assert uplink_load(chosen.schedule) == 1.5  # 2(n-1)/n, the least possible
        assert chosen.seconds[size] <= by_name["hierarchical"].seconds[size] < by_name["butterfly"].seconds[size]
        prove(chosen.schedule)


def test_fast_uplinks_want_few_rounds():
    near = machine(inside_alpha=1, across_alpha=1)
    assert best(search(schedules(), near, [8]), 8, 1)[0].schedule.rounds == 1


def test_committed_machines_can_be_read():
    assert len(MACHINES) >= 2
    for path in MACHINES:
        assert read_machine(path).uplink_beta > 0


WHOLE = """\
[inside]
gbyte_per_s = { value = 1, source = "here" }
alpha_us = { value = 2, source = "here" }
[across]
alpha_us = { value = 2, source = "here" }
uplink_gbit_per_s = { value = 2, source = "here" }
[rank]
message_us = { value = 0, source = "here" }
combine_gbyte_per_s = { value = 2, source = "here" }
"""


@pytest.mark.parametrize(
    "change, said",
    [
        (("value = 1", "value = 0"), "inside.gbyte_per_s must be a number above 0 with its source: write gbyte_per_s"),
        (("value = 1", "value = true"), "inside.gbyte_per_s must be a number above 0"),
        (("value = 1", "value = nan"), "inside.gbyte_per_s must be a number above 0"),
        ((', source = "here"', ""), "inside.gbyte_per_s must be a number above 0 with its source: write gbyte_per_s"),
        (
            ('source = "here"', 'source = " "'),
            "inside.gbyte_per_s must be a number above 0 with its source: write gbyte_per_s",
        ),
        (("gbyte_per_s", "gbytes"), "unknown inside.gbytes: a machine has name, inside.alpha_us"),
        (("[inside]", "[inside"), "machine.toml: "),
        (
            ("[inside]", "inside = 3\n[more]"),
            "unknown inside, more.alpha_us, more.gbyte_per_s: a machine has name, inside.alpha_us",
        ),
        (("alpha_us", "alpha"), "unknown inside.alpha: a machine has name, inside.alpha_us"),
        (('alpha_us = { value = 2, source = "here" }\n', ""), "inside.alpha_us must be a number of at least 0"),
    ],
)
def test_a_wrong_machine_is_refused(tmp_path, change, said):
    path = tmp_path / "machine.toml"
    path.write_text(WHOLE.replace(*change, 1))
    with pytest.raises(InvalidUsage) as caught:
        read_machine(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.fixture
def searched(monkeypatch):
    """The exit code of the command where uplinks are slow, at one size."""
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    return lambda *words, size="64K": main(("search", *words, "--machine", "slow-uplinks", "-b", size, "-e", size))


def test_the_command_prints_the_best_and_writes_a_table_that_groups_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    table = tmp_path / "racks"
    words = ("--collective", "all_reduce", "--hosts", "2x2", "--machine", str(MACHINES[0]), "-b", "1K", "-e", "1M")
    assert main(("search", *words, "-k", "3", "-o", str(table))) == 0
    out = capsys.readouterr().out
    assert "proved the 3 fastest at each size" in out and "auto" in out
    text = table.read_text()
    assert text.startswith("# ringlet search --collective all_reduce, 2 hosts") and "predicted" in text
    for line in text.splitlines():
        if not line.startswith("#"):  # a rule: its algorithm is what a group then takes
            size, algorithm = line.split("up to ")[1].split()[0], line.split("#")[0].split()[-1]
            nbytes = int(size.rstrip("KiMB")) << {"K": 10, "M": 20}.get(size[-3:-2], 0)
            assert _C.chosen("all_reduce", nbytes, 4, "hosts", text) == algorithm


@pytest.mark.parametrize("collective, hosts", [("all_gather", "1x4"), ("all_reduce", "1x5")])
def test_a_file_that_has_nothing_to_search_among_is_refused(searched, tmp_path, capsys, collective, hosts):
    """It is of another collective, or of another number of ranks."""
    (tmp_path / "mine.json").write_text(ringlet.schedule("ring", "all_reduce", world=4).json())
    assert searched(str(tmp_path / "mine.json"), "--collective", collective, "--hosts", hosts) == 2
    assert f"mine.json: has no {collective} for {hosts[2:]} ranks" in capsys.readouterr().err


def test_a_file_for_the_hosts_alone_has_a_use_in_compositions(searched, tmp_path):
    (tmp_path / "across.json").write_text(ringlet.schedule("ring", "all_reduce", world=4).json())
    assert searched(str(tmp_path / "across.json"), "--hosts", "4x2") == 0


def test_schedules_without_a_name_become_files_that_rules_name(searched, tmp_path, capsys):
    table = tmp_path / "racks"
    assert searched("--hosts", "4x2", "-k", "2", "--margin", "1", "-o", str(table)) == 0
    best_first, second = (line.split()[2] for line in capsys.readouterr().out.splitlines()[2:4])
    folder = tmp_path / "racks.schedules"
    assert {path.stem for path in folder.iterdir()} == {best_first, second} and "+" in best_first
    (made,) = ringlet.schedule.load(folder / f"{best_first}.json")
    assert prove(made.schedule(8)).world == 8
    text = table.read_text()
    assert f"RINGLET_ALGORITHMS={folder}/{best_first}.json\n" in text
    assert _C.chosen("all_reduce", 64 << 10, 8, "hosts", text) == best_first


def test_what_a_rule_names_serves_every_root(searched, tmp_path):
    words = ("--collective", "broadcast", "--hosts", "4x1", "-k", "2", "-o", str(tmp_path / "racks"))
    assert searched(*words, size="1M") == 0
    files = list((tmp_path / "racks.schedules").iterdir())
    assert files
    for file in files:
        (made,) = ringlet.schedule.load(file)
        assert [prove(made.schedule(4, root)).root for root in range(4)] == [0, 1, 2, 3]


ONE_ROOT = """
import ringlet
from ringlet.schedule import recv, send

@ringlet.algorithm("broadcast", name="of_one_root", parts=1)
def of_one_root(rank, world, root):
    if root:
        raise NotImplementedError("only root 0")
    order = [0, 7, 1, 6, 2, 5, 3, 4]
    at = order.index(rank)
    if at:
        yield recv(order[at - 1], 0)
    if at + 1 < world:
        yield send(order[at + 1], 0)
"""


def test_no_rule_names_what_lacks_a_root(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    (tmp_path / "mine.py").write_text(ONE_ROOT)
    words = ("--collective", "broadcast", "--hosts", "4x2", "--machine", "slow-uplinks", "-b", "1M", "-e", "16M")
    table = tmp_path / "racks"
    assert main(("search", str(tmp_path / "mine.py"), *words, "-k", "60", "-o", str(table))) == 0
    assert "of_one_root" in capsys.readouterr().out and "of_one_root" not in table.read_text()


FAN = """
import ringlet
from ringlet.schedule import recv, send

@ringlet.algorithm("broadcast", name="fan.2", parts=1)
def fan(rank, world, root):
    yield recv(root, 0) if rank != root else [send(peer, 0) for peer in range(world) if peer != root]
"""


def test_a_name_may_look_like_segments(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    (tmp_path / "mine.py").write_text(FAN)
    words = ("--collective", "broadcast", "--hosts", "1x8", "--machine", "slow-uplinks")
    assert main(("search", str(tmp_path / "mine.py"), *words, "-b", "1M", "-e", "1M", "-o", str(tmp_path / "t"))) == 0
    assert main(("simulate", "fan.2", *words, "--sizes", "1M")) == 0


def test_a_file_where_schedules_must_go_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "racks.schedules").write_text("")
    words = ("--hosts", "4x2", "--machine", "slow-uplinks", "-b", "64K", "-e", "64K")
    assert main(("search", *words, "-o", str(tmp_path / "racks"))) == 2
    said = capsys.readouterr()
    assert "racks.schedules, for the schedules of the rules, is no folder" in said.err and said.out == ""


def test_wrong_words_are_refused(tmp_path, capsys):
    assert main(("search", "--hosts", "4x2", "--machine", str(tmp_path / "none.toml"))) == 2
    assert "none.toml" in capsys.readouterr().err
    assert main(("search", "--hosts", "1x1", "--machine", str(MACHINES[0]))) == 2
    assert "the search needs 2 to 128 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(("search", "--hosts", "4x", "--machine", "x"))
    assert "does not describe hosts" in capsys.readouterr().err
