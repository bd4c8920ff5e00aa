"""A file of MSCCL-XML as plain data.

Each GPU has threadblocks, each with one peer to send to and one to receive from, and steps in order: s, r (send,
receive), rcs (receive, copy, send), rrc (receive, reduce, copy), rrs, rrcs, cpy, re (local copy and reduce) and nop. A
step may wait for one step of another threadblock (depid, deps). Buffers: i(nput), o(utput), s(cratch). Source: the
executor's src/misc/msccl/msccl_parser.cc and src/device/msccl_kernel.cu (Azure/msccl-executor-nccl).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from ringlet.schedule.collectives import DIVIDED, input_chunks, output_chunks, required_parts
from ringlet.schedule.data import MOST_PARTS

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
SENDS = ("s", "rcs", "rrs", "rrcs")
RECEIVES = ("r", "rcs", "rrs", "rrc", "rrcs")
KINDS = ("s", *RECEIVES, "cpy", "re", "nop")
BUFFERS = ("i", "o", "s")
LARGEST_BYTES = 64 << 20

Location = tuple[str, int]  # buffer, chunk


class MscclError(ValueError):
    """A text that is no program of MSCCL, or one that has no schedule. Names GPU, threadblock and step."""


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
    """A file. `chunks`: of the input of a divided collective, of all blocks together otherwise (nchunksperloop).
    `scratch`: of each GPU, in chunks; None where the file does not say."""

    collective: str
    chunks: int
    in_place: bool
    gpus: tuple[tuple[Block, ...], ...]
    scratch: tuple[int | None, ...]

    @property
    def world(self) -> int:
        return len(self.gpus)

    @property
    def parts(self) -> int:
        """Of its schedule."""
        return required_parts(self.collective, self.world) or self.chunks

    @property
    def per_block(self) -> int:
        """Chunks of a rank's block, in the collectives that have blocks; else 1."""
        return 1 if self.collective in DIVIDED else self.chunks // self.world

    def holds(self, rank: int, place: Location) -> bool:
        """Whether the buffer has that chunk."""
        buffer, chunk = place
        block = {"all_gather": "i", "reduce_scatter": "o"}.get(self.collective)
        size = self.scratch[rank] if buffer == "s" else self.per_block if buffer == block else self.chunks
        return chunk >= 0 and (size is None or chunk < size)

    def memory(self, rank: int, place: Location) -> Location:
        """One name for each place: in place, the input and the output are one memory."""
        buffer, chunk = place
        other = "i" if self.collective == "all_gather" else "o"
        if not self.in_place or buffer != other:
            return place
        own = rank * self.per_block if self.collective in ("all_gather", "reduce_scatter") else 0
        return "o" if other == "i" else "i", own + chunk

    def inputs(self) -> Iterator[tuple[int, Location, int]]:
        """(GPU, place, chunk) of what the GPUs bring."""
        k = self.per_block
        for rank in range(self.world):
            first, count = input_chunks(self.collective, rank, self.world, 0, self.parts)
            start = first * k if self.collective == "all_gather" else 0
            for chunk in range(first * k, (first + count) * k):
                yield rank, self.memory(rank, ("i", chunk - start)), chunk

    def outputs(self) -> Iterator[tuple[int, Location, int]]:
        """(GPU, place, chunk) of the results."""
        k = self.per_block
        for rank in range(self.world):
            first, count = output_chunks(self.collective, rank, self.world, 0, self.parts)
            start = first * k if self.collective in ("all_to_all", "reduce_scatter") else 0
            for chunk in range(first * k, (first + count) * k):
                yield rank, self.memory(rank, ("o", chunk - start)), chunk


def parse(text: str) -> Program:
    """The program of a file. MscclError if it is none."""
    if len(text) > LARGEST_BYTES or "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise MscclError(f"a file of MSCCL-XML has at most {LARGEST_BYTES >> 20} MiB, and no entities")
    try:
        algo = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise MscclError(f"not XML: {error}") from error
    if algo.tag != "algo":
        raise MscclError(f"not MSCCL-XML: it begins with <{algo.tag}>, not <algo>")
    collective = COLLECTIVES.get(algo.get("coll", ""))
    if collective is None:
        raise MscclError(f"there is no collective for coll={algo.get('coll', '')!r}; known: {', '.join(COLLECTIVES)}")
    world, chunks = _number(algo, "ngpus", 1), _number(algo, "nchunksperloop", 1, most=MOST_PARTS)
    gpus = sorted(algo.findall("gpu"), key=lambda gpu: _number(gpu, "id"))
    ids = [_number(gpu, "id") for gpu in gpus]
    if len(ids) != world or ids != list(range(world)):
        raise MscclError(f"ngpus is {world}, but the GPUs are {', '.join(map(str, ids))}")
    if chunks % world and collective not in DIVIDED:
        raise MscclError(f"nchunksperloop is {chunks}, which is no multiple of the {world} GPUs")
    blocks = tuple(tuple(_block(tb, rank, world) for tb in gpu.findall("tb")) for rank, gpu in enumerate(gpus))
    scratch = tuple(None if gpu.get("s_chunks") is None else _number(gpu, "s_chunks", 0) for gpu in gpus)
    return Program(collective, chunks, algo.get("inplace", "0") == "1", blocks, scratch)


def _block(tb: ElementTree.Element, rank: int, world: int) -> Block:
    peers = _number(tb, "send"), _number(tb, "recv")
    where = f"GPU {rank}, threadblock {_number(tb, 'id')}"
    for peer in peers:
        if not -1 <= peer < world or peer == rank:
            raise MscclError(f"{where}: its peer {peer} is no other GPU")
    steps = tuple(_step(step, f"{where}, step {i}", peers) for i, step in enumerate(tb.findall("step")))
    return Block(_number(tb, "id"), *peers, _number(tb, "chan"), steps)


def _step(step: ElementTree.Element, where: str, peers: tuple[int, int]) -> XmlStep:
    kind = step.get("type", "")
    if kind not in KINDS:
        raise MscclError(f"{where}: there is no step {kind!r}; known: {', '.join(KINDS)}")
    if (kind in SENDS and peers[0] < 0) or (kind in RECEIVES and peers[1] < 0):
        raise MscclError(f"{where}: the threadblock has no peer for {kind!r}")
    waits = _number(step, "depid"), _number(step, "deps")
    source, target = step.get("srcbuf", "i"), step.get("dstbuf", "o")
    for buffer in (source, target):
        if buffer not in BUFFERS:
            raise MscclError(f"{where}: there is no buffer {buffer!r}; known: {', '.join(BUFFERS)}")
    return XmlStep(
        kind,
        (source, _number(step, "srcoff")),
        (target, _number(step, "dstoff")),
        _number(step, "cnt", 0 if kind == "nop" else 1, most=MOST_PARTS),
        waits if waits[0] >= 0 else None,
    )


def _number(element: ElementTree.Element, name: str, least: int = -1, most: int | None = None) -> int:
    text = element.get(name, "")
    if not re.fullmatch(r"-?\d{1,9}", text) or int(text) < least or (most is not None and int(text) > most):
        until = "on" if most is None else f"to {most}"
        raise MscclError(f"<{element.tag}> has {name}={text!r}, which should be a number from {least} {until}")
    return int(text)
