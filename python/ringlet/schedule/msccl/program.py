"""A file of MSCCL-XML, read into plain data.

Each GPU has threadblocks, each with one peer to send to and one to receive from, and steps in order: s, r (send,
receive), rcs (receive, copy, send), rrc (receive, reduce, copy), rrs, rrcs, cpy, re (local copy and reduce) and nop. A
step may wait for one step of another threadblock (depid, deps). Buffers: i(nput), o(utput), s(cratch). Source: the
executor's src/misc/msccl/msccl_parser.cc and src/device/msccl_kernel.cu (Azure/msccl-executor-nccl).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from ringlet.schedule.collectives import DIVIDED

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
KINDS = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
SENDS = ("s", "rcs", "rrs", "rrcs")
RECEIVES = ("r", "rcs", "rrs", "rrc", "rrcs")
READS = ("s", "rrs", "rrc", "rrcs", "cpy", "re")  # the source
WRITES = ("r", "rcs", "rrc", "rrcs", "cpy", "re")  # the target
LARGEST_BYTES = 64 << 20

Location = tuple[str, int]  # buffer, chunk


class MscclError(ValueError):
    """A program that does not do what its collective promises, or has no schedule. Names GPU, threadblock and step."""


class NotMscclError(MscclError):
    """A text that is not MSCCL-XML."""


@dataclass(frozen=True)
class XmlStep:
    """A step as the file has it. `waits` is (threadblock, step), None if it waits for none."""

    kind: str
    source: Location
    target: Location
    count: int
    waits: tuple[int, int] | None


@dataclass(frozen=True)
class Block:
    """A threadblock: the ranks it sends to and receives from (-1: none), on which channel, and its steps."""

    id: int
    send: int
    recv: int
    channel: int
    steps: tuple[XmlStep, ...]


@dataclass(frozen=True)
class Program:
    """A file. `chunks`: of the input of a divided collective, of all blocks together otherwise (nchunksperloop)."""

    collective: str
    world: int
    chunks: int
    in_place: bool
    gpus: tuple[tuple[Block, ...], ...]

    @property
    def per_block(self) -> int:
        """Chunks of a rank's block, in the collectives that have blocks; else 1."""
        return 1 if self.collective in DIVIDED else self.chunks // self.world


def read(text: str) -> Program:
    """The program of a file. NotMscclError if it is not MSCCL-XML, MscclError if the program cannot be one."""
    if len(text) > LARGEST_BYTES or "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise NotMscclError(f"a file of MSCCL-XML has at most {LARGEST_BYTES >> 20} MiB, and no entities")
    try:
        algo = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise NotMscclError(f"not XML: {error}") from error
    if algo.tag != "algo":
        raise NotMscclError(f"not MSCCL-XML: it begins with <{algo.tag}>, not <algo>")
    collective = COLLECTIVES.get(algo.get("coll", ""))
    if collective is None:
        raise MscclError(f"there is no collective for coll={algo.get('coll', '')!r}; known: {', '.join(COLLECTIVES)}")
    world, chunks = _number(algo, "ngpus", 1), _number(algo, "nchunksperloop", 1)
    by_id = {_number(gpu, "id"): gpu for gpu in algo.findall("gpu")}
    if sorted(by_id) != list(range(world)):
        raise MscclError(f"ngpus is {world}, but the GPUs are {', '.join(map(str, sorted(by_id)))}")
    gpus = tuple(_blocks(by_id[rank], rank, world) for rank in range(world))
    program = Program(collective, world, chunks, algo.get("inplace", "0") == "1", gpus)
    if program.per_block * world != chunks and collective not in DIVIDED:
        raise MscclError(f"nchunksperloop is {chunks}, which is no multiple of the {world} GPUs")
    return program


def _blocks(gpu: ElementTree.Element, rank: int, world: int) -> tuple[Block, ...]:
    sizes = {buffer: _number(gpu, f"{buffer}_chunks", 0, "0") for buffer in "ios"}
    blocks: list[Block] = []
    for tb in sorted(gpu.findall("tb"), key=lambda tb: _number(tb, "id")):
        where = f"GPU {rank}, threadblock {_number(tb, 'id')}"
        peers = _number(tb, "send"), _number(tb, "recv")
        for peer in peers:
            if not -1 <= peer < world or peer == rank:
                raise MscclError(f"{where}: its peer {peer} is no other GPU")
        steps = tuple(_step(step, where, sizes, peers) for step in tb.findall("step"))
        blocks.append(Block(_number(tb, "id"), *peers, _number(tb, "chan"), steps))
    if len({block.id for block in blocks}) != len(blocks):
        raise MscclError(f"GPU {rank}: two threadblocks have the same id")
    return tuple(blocks)


def _step(step: ElementTree.Element, where: str, sizes: dict[str, int], peers: tuple[int, int]) -> XmlStep:
    kind, where = step.get("type", ""), f"{where}, step {step.get('s')}"
    if kind not in KINDS:
        raise MscclError(f"{where}: there is no step {kind!r}; known: {', '.join(KINDS)}")
    if (kind in SENDS and peers[0] < 0) or (kind in RECEIVES and peers[1] < 0):
        raise MscclError(f"{where}: the threadblock has no peer for {kind!r}")
    source = step.get("srcbuf", "i"), _number(step, "srcoff")
    target = step.get("dstbuf", "o"), _number(step, "dstoff")
    count = _number(step, "cnt", 0 if kind == "nop" else 1)
    own = [source] * (kind in READS) + [target] * (kind in WRITES)
    for buffer, offset in own:
        # What has no size of its own is as large as the other: in place there is one buffer.
        size = sizes.get(buffer, 0) or (max(sizes["i"], sizes["o"]) if buffer != "s" else 0)
        if offset < 0 or offset + count > size:
            raise MscclError(f"{where}: {buffer}[{offset}:{offset + count}] lies outside the {size} chunks")
    waits = _number(step, "depid"), _number(step, "deps")
    return XmlStep(kind, source, target, count, waits if waits[0] >= 0 else None)


def _number(element: ElementTree.Element, name: str, least: int = -1, default: str = "") -> int:
    text = element.get(name, default)
    if not re.fullmatch(r"-?\d{1,9}", text) or int(text) < least:
        raise MscclError(f"<{element.tag}> has {name}={text!r}, which should be a number from {least} on")
    return int(text)
