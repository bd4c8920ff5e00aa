"""The order in which the parts of a backward (a reducer's buckets, a Zero's units) are sent: one on all ranks."""

from __future__ import annotations


class Launches:
    """Of one backward: part i of the launch order lacks `waiting[i]` gradients, and the first `sent` are under way.

    All ranks send the parts in this order, whatever the order in which their gradients arrive.
    """

    def __init__(self, waiting: list[int]) -> None:
        self.waiting = waiting
        self.sent = 0

    def is_full(self, part: int) -> bool:
        """Whether the part may be sent as far as gradients are concerned: those before it are full, too."""
        return all(missing <= 0 for missing in self.waiting[: part + 1])

    def next(self) -> int | None:
        """The part that is to be sent now, if there is one. It counts as sent."""
        if self.sent == len(self.waiting) or self.waiting[self.sent] > 0:
            return None
        self.sent += 1
        return self.sent - 1

    def fill(self) -> None:
        """The backward has ended: what has not arrived will not."""
        self.waiting = [0] * len(self.waiting)
