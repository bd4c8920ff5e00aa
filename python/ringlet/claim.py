"""What a rank says of itself in a rendezvous, and how others read it in the store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from dataclasses import asdict, dataclass, field

from torch.distributed import Store

from ringlet import errors
from ringlet.errors import Error, InvalidUsage
from ringlet.store import this_process

_KIND = "\x1f"  # after the kind of an error


def _version() -> str:
    import ringlet

    return ringlet.__version__


def _origin() -> list[str]:
    """What ranks of a job often share, and ranks of two jobs often do not."""
    here = socket.gethostname()
    folder = ""
    with contextlib.suppress(OSError):  # it may be deleted
        folder = os.getcwd()
    return [here, f"{os.getsid(0)} on {here}", f"{os.getppid()} on {here}", folder, " ".join(sys.argv)]


@dataclass(frozen=True)
class Claim:
    """A rank's claim about itself and its group. Claims may differ in rank and process only; job: None if unknown.
    nameless: of a rank 0 that serves the store of a job that nothing names. wrong: why it cannot join any group, as
    `refusal_of` writes it."""

    rank: int
    world: int
    transport: str
    job: str | None = None
    nameless: bool = False
    wrong: str = ""
    version: str = field(default_factory=_version)
    process: str = field(default_factory=this_process)
    number: str = field(default_factory=lambda: secrets.token_hex(16))
    origin: list[str] = field(default_factory=lambda: _origin())

    def text(self) -> str:
        return json.dumps(asdict(self))


def refusal_of(rank: int, error: Error) -> str:
    """The error of a rank as the store carries it to the others: after its kind."""
    return f"{type(error).__name__}{_KIND}rank {rank} reported: {error}"


def error_of(refusal: str) -> Error:
    """What a rank raises that is refused for that reason: the error that another rank reported, or InvalidUsage."""
    kind, separator, text = refusal.partition(_KIND)
    if not separator or kind not in vars(errors):
        return InvalidUsage(refusal)
    error: Error = getattr(errors, kind)(text)
    error.reported = True
    return error


def peek(store: Store, key: str) -> str | None:
    """What is there now; None: nothing.

    A get() waits for a key that has gone since the check. So a key at which others look is emptied, not deleted.
    """
    return store.get(key).decode() or None if store.check([key]) else None


def claim_from(text: str | None) -> Claim | None:
    """None if there is no text, or if another version has written it."""
    try:
        return None if text is None else Claim(**json.loads(text))
    except (ValueError, TypeError):
        return None
