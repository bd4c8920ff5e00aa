"""A file of MSCCL-XML, read into plain data.

Each GPU has threadblocks, each with one peer to send to and one to receive from, and steps in order: s, r (send,
receive), rcs (receive, copy, send), rrc (receive, reduce, copy), rrs, rrcs, cpy, re (local copy and reduce) and nop. A
step may wait for one step of another threadblock (depid, deps), which must post its flag (hasdep). Buffers: i(nput),
o(utput), s(cratch). Source: the executor's src/misc/msccl/msccl_parser.cc and src/device/msccl_kernel.cu
(Azure/msccl-executor-nccl).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from ringlet.schedule.collectives import DIVIDED
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
    """A step as the file has it. `waits` is (threadblock, step), None if it waits for none. `posts`: hasdep is 1."""

    kind: str
    source: Location
    target: Location
    count: int
    waits: tuple[int, int] | None
    posts: bool


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

    def size(self, buffer: str) -> int:
        """Chunks of the caller's input or output."""
        one_block = {"all_gather": "i", "reduce_scatter": "o"}.get(self.collective)
        return self.per_block if buffer == one_block else self.chunks

    def memory(self, rank: int, place: Location) -> Location:
        """One name for each place: in place, the input and the output are one memory."""
        buffer, chunk = place
        other = "i" if self.collective == "all_gather" else "o"
        if not self.in_place or buffer != other:
            return place
        own = rank * self.per_block if self.collective in ("all_gather", "reduce_scatter") else 0
        return "o" if other == "i" else "i", own + chunk


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
    world, chunks = _number(algo, "ngpus", 1), _number(algo, "nchunksperloop", 1, most=MOST_PARTS)
    gpus = sorted(algo.findall("gpu"), key=lambda gpu: _number(gpu, "id"))
    ids = [_number(gpu, "id") for gpu in gpus]
    if len(ids) != world or ids != list(range(world)):
        raise MscclError(f"ngpus is {world}, but the GPUs are {', '.join(map(str, ids))}")
    program = Program(collective, world, chunks, algo.get("inplace", "0") == "1", ())
    if program.per_block * world != chunks and collective not in DIVIDED:
        raise MscclError(f"nchunksperloop is {chunks}, which is no multiple of the {world} GPUs")
    return replace(program, gpus=tuple(_blocks(gpu, rank, program) for rank, gpu in enumerate(gpus)))


def _blocks(gpu: ElementTree.Element, rank: int, program: Program) -> tuple[Block, ...]:
    sizes = {buffer: _number(gpu, f"{buffer}_chunks", 0, "0", MOST_PARTS) for buffer in "ios"}
    for buffer in "io":
        # A file in place may give one of the two no size.
        sizes[buffer] = min(sizes[buffer] or program.size(buffer), program.size(buffer))
    blocks: list[Block] = []
    for tb in sorted(gpu.findall("tb"), key=lambda tb: _number(tb, "id")):
        where = f"GPU {rank}, threadblock {_number(tb, 'id')}"
        peers = _number(tb, "send"), _number(tb, "recv")
        for peer in peers:
            if not -1 <= peer < program.world or peer == rank:
                raise MscclError(f"{where}: its peer {peer} is no other GPU")
        steps = [_step(step, i, where, sizes, peers) for i, step in enumerate(tb.findall("step"))]
        _require_chains_end(steps, where)
        blocks.append(Block(_number(tb, "id"), *peers, _number(tb, "chan"), tuple(steps)))
    if len({block.id for block in blocks}) != len(blocks):
        raise MscclError(f"GPU {rank}: two threadblocks have the same id")
    _require_own_connections(blocks, rank)
    return tuple(blocks)


def _require_chains_end(steps: Sequence[XmlStep], where: str) -> None:
    """The executor runs no nops: the next other step waits for what they wait for, and must itself wait."""
    chain = -1
    for index, step in enumerate(steps):
        if step.kind == "nop":
            chain = index if step.waits else chain
            continue
        if chain >= 0 and not step.waits:
            raise MscclError(
                f"{where}, step {index}: follows the waiting nop of step {chain}, but waits for no step itself; the "
                "executor refuses that"
            )
        chain = -1


def _require_own_connections(blocks: Sequence[Block], rank: int) -> None:
    """Each connection belongs to one threadblock, because nothing orders the messages of two."""
    for verb, which in (("send to", "send"), ("receive from", "recv")):
        seen: dict[tuple[int, int], int] = {}
        for block in blocks:
            peer = getattr(block, which)
            first = seen.setdefault((peer, block.channel), block.id)
            if peer >= 0 and first != block.id:
                raise MscclError(
                    f"GPU {rank}: threadblocks {first} and {block.id} both {verb} GPU {peer} on channel "
                    f"{block.channel}, and nothing says whose message is first"
                )


def _step(step: ElementTree.Element, index: int, where: str, sizes: dict[str, int], peers: tuple[int, int]) -> XmlStep:
    if _number(step, "s", default=str(index)) != index:
        raise MscclError(f"{where}: step {step.get('s')} stands where step {index} should be")
    kind, where = step.get("type", ""), f"{where}, step {index}"
    if kind not in KINDS:
        raise MscclError(f"{where}: there is no step {kind!r}; known: {', '.join(KINDS)}")
    if (kind in SENDS and peers[0] < 0) or (kind in RECEIVES and peers[1] < 0):
        raise MscclError(f"{where}: the threadblock has no peer for {kind!r}")
    source = step.get("srcbuf", "i"), _number(step, "srcoff")
    target = step.get("dstbuf", "o"), _number(step, "dstoff")
    count = _number(step, "cnt", 0 if kind == "nop" else 1, most=MOST_PARTS)
    own = [source] * (kind in READS) + [target] * (kind in WRITES)
    for buffer, offset in own:
        size = sizes.get(buffer, 0)
        if offset < 0 or offset + count > size:
            raise MscclError(f"{where}: {buffer}[{offset}:{offset + count}] lies outside the {size} chunks")
    waits, posts = (_number(step, "depid"), _number(step, "deps")), _number(step, "hasdep", 0, "0", most=1)
    if waits[1] < 0 <= waits[0]:
        raise MscclError(f"{where}: waits for step {waits[1]} of threadblock {waits[0]}, which is no step")
    return XmlStep(kind, source, target, count, waits if waits[0] >= 0 else None, bool(posts))


def _number(
    element: ElementTree.Element, name: str, least: int = -1, default: str = "", most: int | None = None
) -> int:
    text = element.get(name, default)
    if not re.fullmatch(r"-?\d{1,9}", text) or int(text) < least or (most is not None and int(text) > most):
        until = "on" if most is None else f"to {most}"
        raise MscclError(f"<{element.tag}> has {name}={text!r}, which should be a number from {least} {until}")
    return int(text)
