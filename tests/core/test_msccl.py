"""MSCCL-XML: what is read, which schedule it becomes, and back."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringlet.schedule import Schedule, ScheduleError, algorithms, schedule
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.msccl import MscclError, from_xml, to_xml
from ringlet.schedule.prove import prove

DOCS = Path(__file__).parents[2] / "docs" / "authoring.md"


def step(kind, source=("i", 0), target=("i", 0), count=1, waits=(-1, -1)):
    return {
        "type": kind, "srcbuf": source[0], "srcoff": source[1], "dstbuf": target[0], "dstoff": target[1],
        "cnt": count, "depid": waits[0], "deps": waits[1], "hasdep": 0,
    }  # fmt: skip


def tb(number, send, recv, steps, channel=0):
    rows = [
        "<step " + " ".join(f'{name}="{value}"' for name, value in {"s": index, **one}.items()) + "/>"
        for index, one in enumerate(steps)
    ]
    return f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">{"".join(rows)}</tb>'


def xml(*gpus, coll="allreduce", chunks=1, inplace=1):
    """A program: of each GPU its threadblocks, each (send, recv, steps) or (send, recv, steps, channel)."""
    rows = []
    for rank, blocks in enumerate(gpus):
        tbs = "".join(tb(number, *block) for number, block in enumerate(blocks))
        rows.append(f'<gpu id="{rank}" i_chunks="1" o_chunks="0" s_chunks="4">{tbs}</gpu>')
    attributes = f'ngpus="{len(gpus)}" nchunksperloop="{chunks}" coll="{coll}" inplace="{inplace}"'
    return f'<algo name="test" proto="LL" {attributes}>{"".join(rows)}</algo>'


def exchange(peer):
    return [(peer, peer, [step("s"), step("rrc")])]


SWAP = xml(exchange(1), exchange(0))
HELD = ("s", 0)  # a chunk of scratch


def rounds_of(made: Schedule) -> list[list[str]]:
    return [[str(round) for round in rounds] for rounds in made.ranks]


# ---- a program becomes a schedule


def test_an_exchange():
    made = from_xml(SWAP, "swap")
    assert made.name == "swap all_reduce, world 2"
    assert rounds_of(made) == [["send [0] to 1, reduce [0] from 1"], ["send [0] to 0, reduce [0] from 0"]]
    assert prove(made).sent == 1


def test_all_steps_of_a_chain():
    """0 sends, 1 adds and passes it on (rrs), 2 keeps and returns the sum (rrcs), 1 passes it on (rcs)."""
    text = xml(
        [(1, -1, [step("s")]), (-1, 1, [step("r", waits=(0, 0))])],
        [(2, 0, [step("rrs")]), (0, 2, [step("rcs", waits=(0, 0))])],
        [(1, 1, [step("rrcs")])],
    )
    assert rounds_of(from_xml(text)) == [
        ["send [0] to 1", "recv [0] from 1"],
        ["reduce [0] from 0", "send [0] to 2", "recv [0] from 2", "send [0] to 0"],
        ["reduce [0] from 1", "send [0] to 1"],
    ]


def test_local_additions_are_one_reduction():
    """Each of three GPUs gets the others' chunks in scratch, and adds them."""
    gpus = []
    for rank in range(3):
        others = [peer for peer in range(3) if peer != rank]
        blocks = [(peer, peer, [step("s"), step("r", target=("s", place))]) for place, peer in enumerate(others)]
        wait = step("nop", waits=(0, 1), count=0)
        blocks.append((-1, -1, [wait, step("re", ("s", 0), waits=(1, 1)), step("re", ("s", 1))]))
        gpus.append(blocks)
    made = from_xml(xml(*gpus))
    assert rounds_of(made)[1] == ["send [0] to 0, send [0] to 2, reduce [0] from 0, reduce [0] from 2"]
    assert (prove(made).depth, prove(made).trees) == (1, 1)


def test_blocks_of_several_chunks_that_go_the_same_way():
    def gpu(peer, first):
        return [(peer, peer, [step("s", ("i", 0), count=2), step("r", target=("o", first), count=2)])]

    def own(first):
        return [(-1, -1, [step("cpy", ("i", 0), ("o", first), count=2)])]

    text = xml(gpu(1, 2) + own(0), gpu(0, 0) + own(2), coll="allgather", chunks=4, inplace=0)
    assert rounds_of(from_xml(text)) == [["send [0] to 1, recv [1] from 1"], ["send [1] to 0, recv [0] from 0"]]


def test_what_nobody_needs_is_not_sent():
    needless = [(1, 1, [step("s"), step("rrc"), step("s")])]
    assert from_xml(xml(needless, exchange(0))) == from_xml(SWAP)


def test_in_place_the_input_and_the_output_are_one_memory():
    def gpu(rank, *steps):
        return [(1 - rank, 1 - rank, list(steps))]

    programs = {
        "allreduce": [gpu(r, step("s", ("o", 0)), step("rrc", ("i", 0), ("o", 0)), step("s", ("i", 1)),
                          step("rrc", ("o", 1), ("i", 1))) for r in (0, 1)],
        "allgather": [gpu(r, step("s", ("i", 0)), step("r", target=("o", 1 - r))) for r in (0, 1)],
        "reducescatter": [gpu(r, step("s", ("i", 1 - r)), step("rrc", ("o", 0), ("o", 0))) for r in (0, 1)],
    }  # fmt: skip
    for coll, gpus in programs.items():
        assert prove(from_xml(xml(*gpus, coll=coll, chunks=2))).collective.replace("_", "") == coll


def gathered(rank, *, second):
    """An all-gather among three GPUs in blocks of two chunks: the first chunk directly, the second as `second` says."""
    before, after = (rank - 1) % 3, (rank + 1) % 3

    def direct(part):
        return [
            (peer, peer, [step("s", ("o", 2 * rank + part)), step("r", target=("o", 2 * peer + part))], part)
            for peer in (before, after)
        ]

    def round_the_ring(part):
        steps = [step("s", ("o", 2 * rank + part)), step("rcs", target=("o", 2 * before + part))]
        return [(after, before, [*steps, step("r", target=("o", 2 * after + part))], part)]

    return direct(0) + (round_the_ring(1) if second == "round the ring" else direct(1))


def test_chunks_that_go_different_ways_have_no_schedule():
    direct, different = (
        xml(*(gathered(rank, second=second) for rank in range(3)), coll="allgather", chunks=6)
        for second in ("directly", "round the ring")
    )
    assert prove(from_xml(direct)).rounds == 1
    with pytest.raises(MscclError, match="cuts each block into 2 chunks that go 2 different ways"):
        from_xml(different)


# ---- what is wrong

WRONG = {
    "two values of one chunk": (
        xml([(1, 1, [step("rrc", ("i", 0), HELD), step("s")])], [(0, 0, [step("s"), step("rrc")])]),
        "GPU 0, threadblock 0, step 1: needs a value of chunk 0 that another one has replaced",
    ),
    "two values that one GPU has": (
        xml([(1, 1, [step("cpy", ("i", 0), HELD), step("re", HELD), step("s"), step("rrc")])], exchange(0)),
        "adds two values of chunk 0 that the GPU both has",
    ),
    "a deadlock": (
        xml([(1, 1, [step("r"), step("s")])], [(0, 0, [step("r"), step("s")])]),
        "a deadlock: GPU 0, threadblock 0, step 0 .r. waits for a message of GPU 1 on channel 0; GPU 1, threadblock 0",
    ),
    "a wait for a step that there is not": (
        xml([(1, 1, [step("s", waits=(7, 0)), step("rrc")])], exchange(0)),
        "a deadlock: GPU 0, threadblock 0, step 0 .s. waits for threadblock 7's step 0",
    ),
    "other counts": (
        xml([(1, 1, [step("s", count=2), step("rrc", count=1)])], exchange(0), chunks=2),
        "GPU 1, threadblock 0, step 1: receives 1 chunks where GPU 0 sends 2",
    ),
    "a value that nobody wrote": (
        xml([(1, 1, [step("s", HELD), step("rrc")])], exchange(0)),
        r"GPU 0, threadblock 0, step 0: no step before writes s\[0\]",
    ),
    "a place outside the caller's buffers": (
        xml([(1, 1, [step("s", ("i", 3))])], exchange(0)),
        r"no step before writes i\[3\]",
    ),
    "a result kept beyond the output": (
        xml([(1, 1, [step("s"), step("rrc", ("i", 0), ("o", 1)), step("cpy", ("o", 1), ("i", 0))])], exchange(0)),
        r"GPU 0, threadblock 0, step 1: writes o\[1\], which is beyond the buffer",
    ),
    "a value kept beyond the scratch": (
        xml([(1, 1, [step("s"), step("r", target=("s", 4)), step("re", ("s", 4))])], exchange(0)),
        r"GPU 0, threadblock 0, step 1: writes s\[4\], which is beyond the buffer",
    ),
    "a result that nobody writes": (
        xml([(-1, -1, [])], [(-1, -1, [])], coll="alltoall", chunks=2, inplace=0),
        r"GPU 0, the result: no step before writes o\[0\]",
    ),
    "an all-to-all through scratch": (
        xml([(1, 1, [step("s"), step("r", target=HELD)])], [(0, 0, [step("s"), step("r", target=HELD)])],
            coll="alltoall", chunks=2, inplace=0),
        "passes through scratch or other GPUs has no schedule",
    ),
    "two threadblocks of one number": (
        xml([(1, -1, [step("s")]), (-1, 1, [step("rrc")])], exchange(0)).replace('tb id="1"', 'tb id="0"', 1),
        "two threadblocks of a GPU have the same id",
    ),
    "a lost contribution": (
        xml([(1, -1, [step("s")])], [(-1, 0, [step("rrc")])]), "without the contribution of rank 1"
    ),
    "a contribution twice": (
        xml([(1, 1, [step("s"), step("rrc")] * 2)], [(0, 0, [step("s"), step("rrc")] * 2)]),
        "adds the contribution of rank 0 twice",
    ),
    "another chunk": (
        xml([(1, 1, [step("s", ("i", 1)), step("rrc")])], exchange(0), chunks=2), "a chunk of all_reduce keeps its"
    ),
    "the wrong block": (
        xml([(1, 1, [step("s", ("i", 0)), step("r", target=("o", 0))])],
            [(0, 0, [step("s", ("i", 1)), step("r", target=("o", 1))])], coll="alltoall", chunks=2, inplace=0),
        r"no step before writes o\[1\]",
    ),
    "results that lie in each other's places": (
        xml(*([(1 - rank, 1 - rank, [step("s", ("i", 0)), step("r", target=("o", rank)),
                                     step("cpy", ("i", 0), ("o", 1 - rank))])] for rank in (0, 1)),
            coll="allgather", chunks=2, inplace=0),
        r"GPU 0, the result: o\[0\] holds chunk 1, and should hold 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_told_with_its_place(name):
    text, words = WRONG[name]
    with pytest.raises(ValueError, match=words):  # of the translation or of the prover
        prove(from_xml(text))


@pytest.mark.parametrize(
    "change, words",
    [
        (("</algo>", ""), "not XML"),
        (("algo", "graph"), "not MSCCL-XML: it begins with <graph>"),
        (("<algo", "<!DOCTYPE x><algo"), "no entities"),
        (("allreduce", "allsum"), "there is no collective for coll='allsum'; known: allreduce"),
        (('ngpus="2"', 'ngpus="3"'), "ngpus is 3, but the GPUs are 0, 1"),
        (('ngpus="2"', 'ngpus="two"'), "<algo> has ngpus='two', which should be a number from 1 on"),
        (('srcbuf="i"', 'srcbuf="x"'), "GPU 0, threadblock 0, step 0: there is no buffer 'x'; known: i, o, s"),
        (('send="1"', 'send="5"'), "GPU 0, threadblock 0: its peer 5 is no other GPU"),
        (('type="s"', 'type="t"'), "GPU 0, threadblock 0, step 0: there is no step 't'"),
        (('send="1"', 'send="-1"'), "the threadblock has no peer for 's'"),
        (('cnt="1"', 'cnt="999999999"'), "<step> has cnt='999999999', which should be a number from 1 to 16384"),
        (("</algo>", '<gpu id="1"/></algo>'), "ngpus is 2, but the GPUs are 0, 1, 1"),
        (('nchunksperloop="1"', 'nchunksperloop="999999999"'), "nchunksperloop='999999999', which .* from 1 to 16384"),
        (('coll="allreduce"', 'coll="allgather"'), "nchunksperloop is 1, which is no multiple of the 2 GPUs"),
    ],
)
def test_what_is_no_such_file_is_refused(change, words):
    with pytest.raises(MscclError, match=words):
        from_xml(SWAP.replace(*change))


# ---- and back

EXPORTED = [(a, c) for a, c, _ in algorithms() if c not in ("gather", "scatter", "barrier")]


def from_last_to_first(text: str) -> str:
    """The program whose threadblocks and GPUs the reader follows in the reverse order."""
    algo = ElementTree.fromstring(text)
    for gpu in algo:
        gpu[:] = reversed(gpu)
    return ElementTree.tostring(algo, encoding="unicode")


@pytest.mark.parametrize("algorithm, collective", EXPORTED)
def test_what_is_exported_is_right_and_comes_back(algorithm, collective):
    for hosts in (None, "3x2:cyclic"):
        for world in (1, 2, 3, 4, 5, 8, 13) if hosts is None else (6,):
            made = schedule(algorithm, collective, world=world, hosts=parse_hosts(hosts) if hosts else None)
            text = to_xml(made)
            found, proof = from_xml(text), prove(made)
            back = prove(found)
            assert (back.depth, back.trees, back.sent) == (proof.depth, proof.trees, proof.sent), made.name
            assert from_xml(from_last_to_first(text)) == found, "the waits leave no choice"


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "one_shot", "butterfly", "star"])
def test_some_come_back_step_by_step(algorithm):
    made = schedule(algorithm, world=4)
    back = from_xml(to_xml(made))
    assert [list(map(steps_of, rounds)) for rounds in back.ranks] == [list(map(steps_of, r)) for r in made.ranks]


def steps_of(round):
    return sorted(map(str, round.steps))


def test_what_msccl_lacks_is_not_exported():
    for made in (schedule("linear", "gather", world=3), schedule("tree", "broadcast", world=3, root=1)):
        with pytest.raises(MscclError, match=r"MSCCL-XML has .*all_reduce.*, with root 0"):
            to_xml(made)
    impossible = Schedule.from_steps("all_reduce", 2, [[[("send", 1, 3, 1)]], [[("recv", 0, 3, 1)]]])
    with pytest.raises(
        ScheduleError, match=r"^hand-made all_reduce, world 2: rank 0, round 0, chunk 3: .* lies outside"
    ):
        to_xml(impossible)


def test_steps_of_no_chunks_are_not_exported():
    rounds = [[[("send", peer, 0, 1), ("reduce", peer, 0, 1)], [("send", peer, 0, 0), ("recv", peer, 0, 0),
               ("copy", 0, 0, 0)]] for peer in (1, 0)]  # fmt: skip
    made = Schedule.from_steps("all_reduce", 1, rounds)
    made.prove()
    assert prove(from_xml(to_xml(made))).rounds == 1


def test_more_scratch_than_a_program_has_is_not_exported():
    ranks = [[[(verb, peer, 0, 8192) for peer in range(4) if peer != rank for verb in ("send", "reduce")]]
             for rank in range(4)]  # fmt: skip
    with pytest.raises(MscclError, match="needs 24576 chunks of scratch; a program has at most 16384"):
        to_xml(Schedule.from_steps("all_reduce", 8192, ranks))


# ---- published files

PUBLISHED = re.findall(
    r"^\| `([\w/.-]+\.xml)` \| (\w+) \| (\d+) \| (\d+) \| (\S+)S \| (\d+|-) \| (\d+|-) \|$",
    DOCS.read_text(), re.MULTILINE,
)  # fmt: skip


def test_the_page_has_the_published_files():
    assert len(PUBLISHED) >= 15


@pytest.mark.skipif("MSCCL_ALGORITHMS" not in os.environ, reason="set MSCCL_ALGORITHMS to the folder of the files")
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_a_published_file_is_what_the_page_says(row):
    name, collective, world, rounds, sent, depth, trees = row
    proof = prove(from_xml((Path(os.environ["MSCCL_ALGORITHMS"]) / name).read_text()))
    summed = [str(value) if depth != "-" else "-" for value in (proof.depth, proof.trees)]
    found = [proof.collective, str(proof.world), str(proof.rounds), str(proof.sent), *summed]
    assert found == [collective, world, rounds, sent, depth, trees]
