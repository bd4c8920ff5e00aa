"""MSCCL-XML, which msccl-tools writes and the MSCCL executor for NCCL runs: programs become schedules, and back."""

from __future__ import annotations

from ringlet.schedule.msccl.program import MscclError
from ringlet.schedule.msccl.read import from_xml
from ringlet.schedule.msccl.write import to_xml

__all__ = ["MscclError", "from_xml", "to_xml"]
