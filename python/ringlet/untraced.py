"""Keeps torch.compile from tracing this package: it calls it between two graphs."""

from __future__ import annotations

import functools
import sys


@functools.cache
def keep_untraced() -> None:
    """Imports torch's compiler, which takes a second, as the first optimizer of torch's does."""
    from torch._dynamo import trace_rules

    trace_rules.add("ringlet")


def keep_untraced_if_loaded() -> None:
    """Call it where a group is made: a program that compiles calls of ringlet's has often loaded the compiler."""
    if "torch._dynamo.trace_rules" in sys.modules:
        keep_untraced()
