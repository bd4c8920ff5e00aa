"""MSCCL-XML: what is read, what the check says of a program in its own order, which schedule it becomes, and back."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ringlet.schedule import Schedule, ScheduleError, algorithms, schedule
from ringlet.schedule.hosts import parse_hosts
from ringlet.schedule.msccl import MscclError, check, from_xml, read, to_xml
from ringlet.schedule.prove import prove

DOCS = Path(__file__).parents[2] / "docs" / "authoring.md"


def step(kind, source=("i", 0), target=("i", 0), count=1, waits=(-1, -1), posts=None):
    """`posts` is hasdep; None: whether a step of the GPU waits for this one."""
    return {
        "type": kind, "srcbuf": source[0], "srcoff": source[1], "dstbuf": target[0], "dstoff": target[1],
        "cnt": count, "depid": waits[0], "deps": waits[1], "hasdep": posts,
    }  # fmt: skip


def tb(number, send, recv, steps, channel, awaited):
    rows = []
    for index, attributes in enumerate(steps):
        posts = attributes["hasdep"] if attributes["hasdep"] is not None else int((number, index) in awaited)
        written = {"s": index, **attributes, "hasdep": posts}
        rows.append("<step " + " ".join(f'{name}="{value}"' for name, value in written.items()) + "/>")
    return f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">{"".join(rows)}</tb>'


def xml(*gpus, coll="allreduce", chunks=1, sizes=(1, 0, 4), inplace=1):
    """A program: of each GPU its threadblocks, each (send, recv, steps) or (send, recv, steps, channel)."""
    rows = []
    for rank, blocks in enumerate(gpus):
        awaited = {(one["depid"], one["deps"]) for _, _, steps, *_ in blocks for one in steps}
        tbs = "".join(
            tb(number, send, recv, steps, more[0] if more else 0, awaited)
            for number, (send, recv, steps, *more) in enumerate(blocks)
        )
        rows.append(f'<gpu id="{rank}" i_chunks="{sizes[0]}" o_chunks="{sizes[1]}" s_chunks="{sizes[2]}">{tbs}</gpu>')
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
    assert check(read(SWAP)) == (1, 1)
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
    assert check(read(text)) == (2, 1)
    assert rounds_of(from_xml(text)) == [
        ["send [0] to 1", "recv [0] from 1"],
        ["reduce [0] from 0", "send [0] to 2", "recv [0] from 2", "send [0] to 0"],
        ["reduce [0] from 1", "send [0] to 1"],
    ]


def pairs(order):
    """Each of three GPUs gets the others' chunks in scratch, and adds them in an order of its own."""
    gpus = []
    for rank in range(3):
        others = [peer for peer in range(3) if peer != rank]
        blocks = [
            (peer, peer, [step("s"), step("r", target=("s", place))]) for place, peer in enumerate(others)
        ]  # fmt: skip
        first, second = (step("re", source=("s", place)) for place in order(rank))
        wait = step("nop", waits=(0, 1), count=0)
        blocks.append((-1, -1, [wait, {**first, "depid": 1, "deps": 1}, second]))
        gpus.append(blocks)
    return xml(*gpus)


def test_local_additions_are_one_reduction():
    text = pairs(lambda rank: (0, 1))
    made = from_xml(text)
    assert rounds_of(made)[1] == ["send [0] to 0, send [0] to 2, reduce [0] from 0, reduce [0] from 2"]
    assert (prove(made).depth, prove(made).trees) == (1, 1)
    # As written, each begins with its own: the schedule is right, the file is not.
    with pytest.raises(MscclError, match=r"chunk 0: different bits: GPU 2 sums \(\(0\+2\)\+1\), GPU 0 \(\(0\+1\)\+2\)"):
        check(read(text))


def test_blocks_of_several_chunks_that_go_the_same_way():
    def gpu(peer, first):
        return [(peer, peer, [step("s", ("i", 0), count=2), step("r", target=("o", first), count=2)])]

    def own(first):
        return [(-1, -1, [step("cpy", ("i", 0), ("o", first), count=2)])]

    text = xml(gpu(1, 2) + own(0), gpu(0, 0) + own(2), coll="allgather", chunks=4, sizes=(2, 4, 0), inplace=0)
    assert check(read(text)) == (0, 0)
    assert rounds_of(from_xml(text)) == [["send [0] to 1, recv [1] from 1"], ["send [1] to 0, recv [0] from 0"]]


def test_a_wait_is_for_the_next_step_that_posts_a_flag():
    """Step 0 posts none: the copy comes after step 1, which writes what it reads."""
    both = [step("s"), step("rrc", posts=1)]
    text = xml([(1, 1, both), (-1, -1, [step("cpy", target=HELD, waits=(0, 0))])], exchange(0))
    assert check(read(text.replace('hasdep="1"', 'hasdep="0"', 1))) == (1, 1)


def test_a_nop_that_does_not_wait_is_not_counted():
    def waiting_for(index):
        both = [step("nop", count=0), step("s", posts=1)]  # the executor posts 0 after the send
        return xml([(1, -1, both), (-1, 1, [step("rrc", waits=(0, index), posts=0)])], exchange(0))

    assert check(read(waiting_for(0))) == (1, 1)
    with pytest.raises(MscclError, match=r"a deadlock: GPU 0, threadblock 1, step 0 \(rrc\) waits for"):
        check(read(waiting_for(1)))


def test_in_place_the_input_and_the_output_are_one_memory():
    def gpu(rank, *steps):
        return [(1 - rank, 1 - rank, list(steps))]

    programs = {
        "allreduce": (
            [gpu(r, step("s", ("o", 0)), step("rrc", ("i", 0), ("o", 0)), step("s", ("i", 1)),
                 step("rrc", ("o", 1), ("i", 1))) for r in (0, 1)],
            (1, 1),
        ),
        "allgather": ([gpu(r, step("s", ("i", 0)), step("r", target=("o", 1 - r))) for r in (0, 1)], (0, 0)),
        "reducescatter": (
            [gpu(r, step("s", ("i", 1 - r)), step("rrc", ("o", 0), ("o", 0))) for r in (0, 1)],
            (1, 1),
        ),
    }  # fmt: skip
    for coll, (gpus, result) in programs.items():
        text = xml(*gpus, coll=coll, chunks=2, sizes=(0, 0, 0))
        assert check(read(text)) == result
        assert prove(from_xml(text)).collective.replace("_", "") == coll


@pytest.mark.parametrize("coll, place", [("allreduce", ("i", 2)), ("allgather", ("i", 1)), ("reducescatter", ("o", 1))])
def test_a_place_outside_the_callers_buffers_is_refused(coll, place):
    text = xml([(1, 1, [step("r", target=place)])], [], coll=coll, chunks=2, sizes=(9, 9, 0))
    with pytest.raises(
        MscclError, match=rf"{place[0]}\[{place[1]}:{place[1] + 1}\] lies outside the {place[1]} chunks"
    ):
        read(text)


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
    whole = {"coll": "allgather", "chunks": 6, "sizes": (0, 6, 0)}
    direct, different = (
        xml(*(gathered(rank, second=second) for rank in range(3)), **whole) for second in ("directly", "round the ring")
    )
    assert check(read(direct)) == check(read(different)) == (0, 0)
    assert prove(from_xml(direct)).rounds == 1
    with pytest.raises(MscclError, match="cuts each block into 2 chunks that go 2 different ways"):
        from_xml(different)


@pytest.mark.parametrize(
    "text, words",
    [
        (
            xml([(1, 1, [step("rrc", ("i", 0), ("s", 0)), step("s")]), (-1, -1, [step("cpy", HELD, waits=(0, 1))])],
                [(0, 0, [step("s"), step("rrc")])]),
            "needs chunk 0 both with and without what it adds",
        ),
        (
            xml([(1, 1, [step("cpy", ("i", 0), HELD), step("re", HELD), step("s"), step("rrc")])], exchange(0)),
            "adds two values of chunk 0 that the GPU both has",
        ),
    ],
)  # fmt: skip
def test_what_has_no_schedule_is_refused(text, words):
    with pytest.raises(MscclError, match=words):
        from_xml(text)


# ---- what is wrong


WRONG = {
    "a race": (
        xml([(1, -1, [step("s")]), (-1, 1, [step("rrc")])], exchange(0)),
        r"a race: GPU 0, threadblock 0, step 0 and threadblock 1, step 0 both touch i\[0\]",
    ),
    "a deadlock": (
        xml([(1, 1, [step("r"), step("s")])], [(0, 0, [step("r"), step("s")])]),
        "a deadlock: GPU 0, threadblock 0, step 0 .r. waits for a message of GPU 1 on channel 0; GPU 1, threadblock 0",
    ),
    "a wait for a step that there is not": (
        xml([(1, 1, [step("s", waits=(7, 0)), step("rrc")])], exchange(0)),
        "a deadlock: GPU 0, threadblock 0, step 0 .s. waits for threadblock 7's step 0",
    ),
    "a wait for a step that posts no flag": (
        xml([(1, -1, [step("s", posts=0)]), (-1, 1, [step("rrc", waits=(0, 0))])], exchange(0)),
        "a deadlock: GPU 0, threadblock 1, step 0 .rrc. waits for threadblock 0's step 0, but no step with hasdep=",
    ),
    "a wait for a nop, which posts no flag": (
        xml([(1, -1, [step("s"), step("nop", count=0)]), (-1, 1, [step("rrc", waits=(0, 1))])], exchange(0)),
        "a deadlock: GPU 0, threadblock 1, step 0 .rrc. waits for threadblock 0's step 1, but no step with hasdep=",
    ),
    "a wait for a step that only a later one ends, which waits itself": (
        xml([(1, 1, [step("s", posts=0), step("rrc", waits=(1, 0), posts=1)]),
             (-1, -1, [step("cpy", target=HELD, waits=(0, 0))])], exchange(0)),
        "a deadlock: GPU 0, threadblock 0, step 1 .rrc. waits for threadblock 1's step 0; GPU 0, threadblock 1, step 0",
    ),
    "a race for one memory with two names": (
        xml(*[[(peer, -1, [step("s")]), (-1, peer, [step("r", target=("o", 0)), step("re", ("o", 0))])]
              for peer in (1, 0)], sizes=(1, 1, 0)),
        r"a race: GPU \d, threadblock 0, step 0 and threadblock 1, step 0 both touch i\[0\]",
    ),
    "messages that do not match": (
        xml([(1, 1, [step("s"), step("s"), step("rrc")])], exchange(0)),
        "GPU 0 sends 1 more to GPU 1 on channel 0 than it receives",
    ),
    "other counts": (
        xml([(1, 1, [step("s", count=2), step("rrc", count=1)])], exchange(0), chunks=2, sizes=(2, 0, 0)),
        "GPU 1, threadblock 0, step 1: receives 1 chunks where GPU 0 sends 2",
    ),
    "a value that nobody wrote": (
        xml([(1, 1, [step("s", HELD), step("rrc")])], exchange(0)),
        r"GPU 0, threadblock 0, step 0: reads s\[0\], which nobody wrote",
    ),
    "a lost contribution": (
        xml([(1, -1, [step("s")])], [(-1, 0, [step("rrc")])]),
        r"GPU 0: i\[0\] ends without the contribution of GPU 1",
    ),
    "a contribution twice": (
        xml([(1, 1, [step("s"), step("rrc")] * 2)], [(0, 0, [step("s"), step("rrc")] * 2)]),
        "threadblock 0, step 3, chunk 0: adds the contribution of GPU 0 twice",
    ),
    "another chunk": (
        xml([(1, 1, [step("s", ("i", 1)), step("rrc")])], exchange(0), chunks=2, sizes=(2, 0, 0)),
        "adds what belongs to chunks 0 and 1",
    ),
    "the wrong block": (
        xml([(1, 1, [step("s", ("i", 0)), step("r", target=("o", 0))])],
            [(0, 0, [step("s", ("i", 1)), step("r", target=("o", 1))])],
            coll="alltoall", chunks=2, sizes=(2, 2, 0), inplace=0),
        r"GPU 0: o\[0\] ends with",
    ),
    "a result that nobody writes": (
        xml([(-1, -1, [])], [(-1, -1, [])], coll="alltoall", chunks=2, sizes=(2, 2, 0), inplace=0),
        r"GPU 0: no step writes o\[0\], which is in the result",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_told_with_its_place(name):
    text, words = WRONG[name]
    with pytest.raises(MscclError, match=words):
        check(read(text))
    with pytest.raises(ValueError):
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
        (('send="1"', 'send="5"'), "GPU 0, threadblock 0: its peer 5 is no other GPU"),
        (('type="s"', 'type="t"'), "GPU 0, threadblock 0, step 0: there is no step 't'"),
        (('send="1"', 'send="-1"'), "the threadblock has no peer for 's'"),
        (('srcoff="0"', 'srcoff="3"'), r"i\[3:4\] lies outside the 1 chunks"),
        (('cnt="1"', 'cnt="-1"'), "<step> has cnt='-1', which should be a number from 1 to 16384"),
        (('cnt="1"', 'cnt="999999999"'), "<step> has cnt='999999999', which should be a number from 1 to 16384"),
        (('hasdep="0"', 'hasdep="2"'), "<step> has hasdep='2', which should be a number from 0 to 1"),
        (('depid="-1"', 'depid="0"'), "GPU 0, threadblock 0, step 0: waits for step -1 of threadblock 0"),
        (('s="0"', 's="1"'), "GPU 0, threadblock 0: step 1 stands where step 0 should be"),
        (('gpu id="1"', 'gpu id="0"'), "ngpus is 2, but the GPUs are 0, 0"),
        (("</algo>", '<gpu id="1"/></algo>'), "ngpus is 2, but the GPUs are 0, 1, 1"),
        (('ngpus="2"', 'ngpus="999999999"'), "ngpus is 999999999, but the GPUs are 0, 1"),
        (('nchunksperloop="1"', 'nchunksperloop="999999999"'), "nchunksperloop='999999999', which .* from 1 to 16384"),
        (('s_chunks="4"', 's_chunks="999999999"'), "s_chunks='999999999', which should be a number from 0 to 16384"),
        (('coll="allreduce"', 'coll="allgather"'), "nchunksperloop is 1, which is no multiple of the 2 GPUs"),
    ],
)
def test_what_is_no_such_file_is_refused(change, words):
    with pytest.raises(MscclError, match=words):
        read(SWAP.replace(*change))


def test_two_threadblocks_of_one_number_are_refused():
    two = xml([(1, -1, [step("s")]), (-1, 1, [step("rrc", waits=(0, 0))])], exchange(0))
    with pytest.raises(MscclError, match="GPU 0: two threadblocks have the same id"):
        read(two.replace('tb id="1"', 'tb id="0"', 1))


@pytest.mark.parametrize(
    "sides, words",
    [
        (((1, -1), (1, -1)), "GPU 0: threadblocks 0 and 1 both send to GPU 1 on channel 0"),
        (((1, 1), (-1, 1)), "GPU 0: threadblocks 0 and 1 both receive from GPU 1 on channel 0"),
    ],
)
def test_two_threadblocks_of_one_connection_are_refused(sides, words):
    with pytest.raises(MscclError, match=words):
        read(xml([(*peers, []) for peers in sides], []))
    read(xml([(*peers, [], channel) for channel, peers in enumerate(sides)], []))


def test_a_nop_before_a_step_that_does_not_wait_is_refused():
    def after_nops(*steps):
        waiting = step("nop", waits=(0, 0), count=0)
        return xml([(1, 1, [step("s"), step("rrc")]), (-1, -1, [waiting, *steps])], exchange(0))

    with pytest.raises(MscclError, match="GPU 0, threadblock 1, step 2: follows the waiting nop of step 0"):
        read(after_nops(step("nop", count=0), step("cpy", target=HELD)))
    assert check(read(after_nops(step("cpy", target=HELD, waits=(0, 1))))) == (1, 1)
    assert check(read(after_nops())) == (1, 1)
    with pytest.raises(MscclError, match="<step> has cnt='999999999'"):
        read(after_nops(step("nop", count=999999999)))


# ---- and back

EXPORTED = [(a, c) for a, c, _ in algorithms() if c not in ("gather", "scatter", "barrier")]


@pytest.mark.parametrize("algorithm, collective", EXPORTED)
def test_what_is_exported_is_right_and_comes_back(algorithm, collective):
    for hosts in (None, "3x2:cyclic"):
        for world in (1, 2, 3, 4, 5, 8, 13) if hosts is None else (6,):
            made = schedule(algorithm, collective, world=world, hosts=parse_hosts(hosts) if hosts else None)
            text = to_xml(made)
            depth, trees = check(read(text))
            back, proof = prove(from_xml(text)), prove(made)
            assert (back.depth, back.trees, back.sent) == (proof.depth, proof.trees, proof.sent), made.name
            assert trees <= proof.trees and depth >= proof.depth  # there, an n-ary addition is a chain of binary ones


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


def test_steps_of_no_chunks_are_not_exported():
    rounds = [[[("send", peer, 0, 1), ("reduce", peer, 0, 1)], [("send", peer, 0, 0), ("recv", peer, 0, 0),
               ("copy", 0, 0, 0)]] for peer in (1, 0)]  # fmt: skip
    made = Schedule.from_steps("all_reduce", 1, rounds)
    made.prove()
    assert check(read(to_xml(made))) == (1, 1)


IMPOSSIBLE = {
    "a chunk outside": ([[[("send", 1, 3, 1)]], [[("recv", 0, 3, 1)]]], "rank 0, round 0, chunk 3: .* lies outside"),
    "a copy to outside": ([[[("copy", 2, 1, 1)]], []], "rank 0, round 0, chunk 1: .* lies outside the 2 parts"),
    "no such peer": ([[], [[("recv", 2, 0, 1)]]], "rank 1, round 0, chunk 0: .*: its peer 2 is no other rank"),
    "itself": ([[[("send", 0, 0, 1)]], []], "rank 0, round 0, chunk 0: .*: its peer 0 is no other rank"),
    "no such verb": ([[[("add", 1, 0, 1)]], []], "there is no verb 'add'"),
    "other counts": ([[[("send", 1, 0, 2)]], [[("recv", 0, 0, 1)]]], "the counts differ"),
    "never received": ([[[("send", 1, 0, 1)]], []], "send 0 to rank 1 is never received"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_schedule_is_not_exported(name):
    ranks, words = IMPOSSIBLE[name]
    with pytest.raises(ScheduleError, match=f"^hand-made all_reduce, world 2: .*{words}"):
        to_xml(Schedule.from_steps("all_reduce", 2, ranks))


def test_parts_that_the_collective_does_not_have_are_not_exported():
    for collective, parts in (("all_gather", 5), ("all_reduce", 0), ("all_reduce", 16385)):
        with pytest.raises(ScheduleError, match=f"{parts} parts and 2 ranks are no {collective} in a world of 2"):
            to_xml(Schedule.from_steps(collective, parts, [[], []]))


def test_more_scratch_than_a_program_has_is_not_exported():
    ranks = [[[(verb, peer, 0, 8192) for peer in range(4) if peer != rank for verb in ("send", "reduce")]]
             for rank in range(4)]  # fmt: skip
    with pytest.raises(MscclError, match="needs 24576 chunks of scratch; a program has at most 16384"):
        to_xml(Schedule.from_steps("all_reduce", 8192, ranks))


# ---- published files

PUBLISHED = re.findall(
    r"^\| `([\w/.-]+\.xml)` \| (\w+) \| (\d+) \| (\d+) \| (\S+) \| (\d+|-) \| (\d+|-) \| (.*?) \|$",
    DOCS.read_text(), re.MULTILINE,
)  # fmt: skip


def test_the_page_has_the_published_files():
    assert len(PUBLISHED) >= 15


@pytest.mark.skipif("MSCCL_ALGORITHMS" not in os.environ, reason="set MSCCL_ALGORITHMS to the folder of the files")
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_a_published_file_is_what_the_page_says(row):
    name, collective, world, rounds, sent, depth, trees, verdict = row
    text = (Path(os.environ["MSCCL_ALGORITHMS"]) / name).read_text()
    proof = prove(from_xml(text))
    summed = [str(value) if depth != "-" else "-" for value in (proof.depth, proof.trees)]
    assert (proof.collective, str(proof.world), str(proof.rounds), f"{proof.sent}S") == (
        collective,
        world,
        rounds,
        sent,
    )
    assert summed == [depth, trees]
    if verdict == "right":
        check(read(text))
    else:
        with pytest.raises(MscclError, match=re.escape(verdict.removeprefix("wrong: "))):
            check(read(text))
