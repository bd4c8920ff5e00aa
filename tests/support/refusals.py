"""What a call must refuse, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ringlet


def refused(said: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """The call, with these arguments, raises InvalidUsage with a text in which `said` is found."""
    with pytest.raises(ringlet.InvalidUsage, match=said):
        call(*arguments, **options)
