"""`ringlet simulate`: its tables, its files, and times that one can compute by hand."""

import json
import re
import shlex
import xml.etree.ElementTree
from pathlib import Path

import pytest

from ringlet import _C
from ringlet.cli.main import main

# Of a round inside a host and between hosts 5 and 50 us; 1 GB/s of a rank, 0.1 GB/s of an uplink; 2 us a message.
MACHINE = """\
name = "made up"
[inside]
alpha_us = { value = 5, source = "made up" }
gbyte_per_s = { value = 1, source = "made up" }
[across]
alpha_us = { value = 50, source = "made up" }
uplink_gbit_per_s = { value = 0.8, source = "made up" }
[rank]
message_us = { value = 2, source = "made up" }
combine_gbyte_per_s = { value = 2, source = "made up" }
"""


@pytest.fixture
def simulate(tmp_path, monkeypatch, capsys):
    """Runs the command on this machine, and returns what it prints and what it writes as JSON."""
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    (tmp_path / "machine.toml").write_text(MACHINE)

    def run(*words):
        files = ["--machine", str(tmp_path / "machine.toml"), "--json", str(tmp_path / "out.json")]
        assert main(["simulate", *words, *files]) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())

    return run


def micros(row):
    return {key: pytest.approx(seconds * 1e6) for key, seconds in row["spent"].items()}


def test_a_ring_by_hand(simulate):
    told, out = simulate("ring", "--world", "4", "--sizes", "4000,8000", "--segments", "1", "--explain", "4000")
    first, second = out["rows"]
    # Six rounds of 5 us; in each, two messages of 2 us and 1 KB at 1 GB/s; in three of them 1 KB of sums at 2 GB/s.
    assert micros(first) == {"latency": 30, "messages": 24, "inside": 6, "uplinks": 0, "combining": 1.5}
    assert (first["seconds"], second["seconds"]) == (pytest.approx(61.5e-6), pytest.approx(69e-6))
    assert re.search(r"^ring +61\.5\* +69\.0\* +6 +0$", told, re.MULTILINE), told
    assert re.search(r"^ring +61\.5 +30\.0 +24\.0 +6\.0 +0\.0 +1\.5$", told, re.MULTILINE), told


def test_uplinks_by_hand(simulate):
    _, out = simulate("hierarchical", "--hosts", "2x2", "--sizes", "4000", "--segments", "1")
    (row,) = out["rows"]
    # Halves scatter and gather inside the hosts; two rounds between hosts, in which an uplink carries a quarter of each
    # half: 2 KB at 0.1 GB/s.
    assert micros(row) == {"latency": 5 + 50 + 50 + 5, "messages": 16, "inside": 4, "uplinks": 40, "combining": 1.5}
    assert (row["rounds"], row["uplink"]) == (4, "1")


def test_the_tables_tell_what_the_file_has(simulate):
    told, out = simulate("--hosts", "2x3", "-b", "1K", "-e", "64M", "-f", "256")
    rows = {(row["algorithm"], row["bytes"]): row for row in out["rows"]}
    sizes, names = sorted({size for _, size in rows}), {name for name, _ in rows}
    assert sizes == [1 << 10, 1 << 18, 1 << 26] and {"ring", "butterfly", "hierarchical"} < names
    first, second = told.split("\n\n")
    assert first.startswith("all_reduce of 6 ranks, hosts 2x3, on 'made up': predicted time in us")
    shown = {line.split()[0]: line.split()[1:] for line in first.splitlines()[2:]}
    for place, size in enumerate(sizes):
        best = min(rows[name, size]["seconds"] for name in names)
        for name in names:
            row = rows[name, size]
            assert shown[name][place] == f"{row['seconds'] * 1e6:.1f}" + "*" * (row["seconds"] == best)
            assert row["segments"] == _C.message_segments(size)
        assert shown["(segments)"][place] == str(_C.message_segments(size))
    assert second.startswith("where the time goes at 256 KiB, in us")
    order = [line.split()[0] for line in second.splitlines()[2:] if line.split()[0] in names]
    assert order == sorted(order, key=lambda name: rows[name, 1 << 18]["seconds"]) and set(order) == names


def test_segments_and_compositions_by_their_names(simulate):
    names = ["two_shot+ring", "leader.tree+ring", "ring.4"]
    _, out = simulate(*names, "--hosts", "2x2", "--sizes", "1M")
    assert [row["algorithm"] for row in out["rows"]] == names
    _, out = simulate("tree,chain.8", "--collective", "broadcast", "--world", "8", "--root", "3")
    assert {row["algorithm"] for row in out["rows"]} == {"tree", "chain.8"} and out["root"] == 3


def test_the_picture_has_a_line_for_each(simulate, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "times.svg"
    simulate("ring", "butterfly", "--world", "8", "--plot", str(picture))
    text = picture.read_text()
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    assert "<!-- ring -->" in text and "<!-- butterfly -->" in text
    assert "<!-- all_reduce of 8 ranks, one host, made up: predicted time -->" in text


def test_a_machine_may_have_any_name(simulate, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    named = tmp_path / "named.toml"
    named.write_text(MACHINE.replace('"made up"', '"a $x_{$ b"', 1))
    words = ["simulate", "ring", "--world", "4", "--sizes", "4K", "--machine", str(named), "--plot"]
    assert main([*words, str(tmp_path / "times.svg")]) == 0
    assert "a $x_{$ b: predicted time" in (tmp_path / "times.svg").read_text().replace(r"\$", "$")
    (tmp_path / "full.svg").symlink_to("/dev/full")
    assert main([*words, str(tmp_path / "full.svg")]) == 2
    assert "full.svg: No space left on device" in capsys.readouterr().err


def test_the_page_shows_what_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("RINGLET_ALGORITHMS", "")
    page = (Path(__file__).parents[2] / "docs" / "selection.md").read_text(encoding="utf-8")
    command, output = re.search(r"```\nringlet (simulate [^\n]*)\n```\n\n```\n(.*?)```\n", page, re.DOTALL).groups()
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == output
