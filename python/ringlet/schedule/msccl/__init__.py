"""MSCCL-XML, which msccl-tools writes and the MSCCL executor for NCCL runs: import, check and export.

`from_xml` and `to_xml` change between a file and a Schedule. `check` asks the prover's question of the file itself,
because a schedule that is made of it may sum in another order.
"""

from __future__ import annotations

from ringlet.schedule.data import Schedule
from ringlet.schedule.msccl.check import check
from ringlet.schedule.msccl.export import to_xml
from ringlet.schedule.msccl.program import MscclError, NotMscclError, read
from ringlet.schedule.msccl.translate import translated

__all__ = ["MscclError", "NotMscclError", "check", "from_xml", "read", "to_xml"]


def from_xml(text: str, name: str = "msccl") -> Schedule:
    """The schedule of an MSCCL-XML file, not yet proved. Raises NotMscclError if the text is none, MscclError if its
    program is wrong, or needs something that schedules do not have."""
    return translated(read(text), name)
