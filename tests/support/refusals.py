"""What a call must refuse, in one line, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ringlet


def refused(said: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """The call, with these arguments, raises InvalidUsage with a text in which `said` is found."""
    with pytest.raises(ringlet.InvalidUsage, match=said):
        call(*arguments, **options)


def error_of(call: Callable[[], object], otherwise: str = "nothing") -> str:
    """What the call raises, as "Kind: message"; or else the text that it returns, or `otherwise`."""
    try:
        value = call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, str) else otherwise
