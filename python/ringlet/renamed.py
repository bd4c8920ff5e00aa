"""Old names, which work for one release and give a FutureWarning that has the new name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def warn_of(old: str, new: str) -> None:
    """The warning names the line that called the function with the old name."""
    warnings.warn(f"{old} is now {new}; the next release drops the old name", FutureWarning, stacklevel=3)


def renamed(old: str, function: Function) -> Function:
    """`function` under its name `old`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        warn_of(old, function.__qualname__)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def renamed_argument(old: str, new: str) -> Callable[[Function], Function]:
    """Takes the keyword argument `old` of a constructor as `new`."""

    def decorate(function: Function) -> Function:
        owner = function.__qualname__.rpartition(".")[0]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{owner}: {old}= is now {new}=, and both were passed")
                warn_of(f"{owner}({old}=)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
