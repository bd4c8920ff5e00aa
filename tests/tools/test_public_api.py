"""Names, signatures and defaults of the public API are those of public_api.txt: only a change on purpose changes it.

`RINGLET_WRITE_API=1` writes the listing anew; CONTRIBUTING.md says what may change.
"""

import inspect
import os
import pathlib
from collections.abc import Iterator

import ringlet

LISTING = pathlib.Path(__file__).with_name("public_api.txt")


def described(what: object) -> str:
    if not callable(what):
        return type(what).__name__
    try:
        return str(inspect.signature(what))
    except (ValueError, TypeError):
        return "(...)"


def listing() -> Iterator[str]:
    for name in sorted(dir(ringlet)):
        what = getattr(ringlet, name)
        yield name if inspect.isclass(what) and issubclass(what, Exception) else f"{name} {described(what)}"
        if inspect.isclass(what):
            members = ((member, value) for member, value in sorted(vars(what).items()) if not member.startswith("_"))
            yield from (f"{name}.{member} {described(value)}" for member, value in members)


def test_the_public_api_is_the_one_that_is_listed():
    now = "\n".join(line.rstrip() for line in listing()) + "\n"
    if os.environ.get("RINGLET_WRITE_API"):
        LISTING.write_text(now, encoding="utf-8")
    assert now.splitlines() == LISTING.read_text(encoding="utf-8").splitlines()
