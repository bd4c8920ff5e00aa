"""What a call must refuse, in one line, and what it says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ringlet


def refused(said: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """The call, with these arguments, raises InvalidUsage with a text in which `said` is found."""
    with pytest.raises(ringlet.InvalidUsage, match=said):
        call(*arguments, **options)


@contextlib.contextmanager
def stopped_at(tensor: torch.Tensor) -> Iterator[None]:
    """A backward in it stops where the tensor's gradient arrives."""

    def stop(_gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError), tensor.register_hook(stop):
        yield


def error_of(call: Callable[[], object], otherwise: str = "nothing") -> str:
    """What the call raises, as "Kind: message"; or else the text that it returns, or `otherwise`."""
    try:
        value = call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, str) else otherwise
