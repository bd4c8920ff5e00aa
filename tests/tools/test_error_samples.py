"""The errors that docs/errors.md shows are those that programs get (tests/support/error_samples.py)."""

from __future__ import annotations

import itertools
import os
import pathlib
import re

import pytest

from error_samples import NEEDS_ROOT, SAMPLES

ROOT = pathlib.Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = "InvalidUsage|PeerLost|Timeout|ResourceError|DeviceError|RuntimeError"
# What is another in every run, and what it may be instead. In the page "..." stands for any text.
VARIES = {
    r"\.\.\.": r".*",
    r"\d+(?:\.\d+)? s\b": r"\d+(?:\.\d+)? s",
    r"\d+ of \d+ bytes done(?:, at its start|, round \d+)?": r"\d+ of \d+ bytes done(?:, at its start|, round \d+)?",
    r"process \d+(?: on \w+)?": r"process \d+(?: on \S+)?",
    r"\d+\.\d+\.\d+\.\d+:\d+": r"\S+:\d+",
}


def samples() -> dict[str, list[str]]:
    """Mark of a block in the page -> the errors in it, each on one line."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    found = {}
    for info, text in FENCE.findall(page):
        words = re.sub(r"\s+", " ", text).strip()
        found[info.removeprefix("text error ")] = re.split(rf" (?=(?:{KINDS}): )(?<!reported: )", words)
    return found


def pattern(sample: str) -> re.Pattern[str]:
    """What a real error must match: the sample, but for what varies; last calls may follow."""
    parts = re.split(f"({'|'.join(VARIES)})", sample)
    fixed = [re.escape(part) for part in parts[::2]]
    varying = [next(stands for varies, stands in VARIES.items() if re.fullmatch(varies, part)) for part in parts[1::2]]
    words = "".join(word for pair in itertools.zip_longest(fixed, varying, fillvalue="") for word in pair)
    return re.compile(rf"{words}(; last calls: .*)?", re.DOTALL)


def test_every_block_of_the_page_has_a_program():
    assert set(samples()) == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_shows_what_programs_get(pool, name):
    if name in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root")
    real = [re.sub(r"\s+", " ", text) for text in SAMPLES[name](pool)]
    wrong = [sample for sample in samples()[name] if not any(pattern(sample).fullmatch(text) for text in real)]
    assert not wrong, "\n".join(["the page says", *wrong, "programs got", *real])
