"""`ringlet reveal`: libraries side by side, a user's own function, and what MPI libraries do."""

import json
import xml.etree.ElementTree

import pytest
from benchmarks.__main__ import main as benchmarks_main
from benchmarks.peers import mpi

from ringlet.cli.main import main
from ringlet.schedule import draw_trees


def revealed(tmp_path, *words):
    """What the command writes for programs, of each target."""
    file = tmp_path / "found.json"
    assert benchmarks_main(["reveal", *words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_two_libraries_side_by_side(tmp_path, capsys):
    picture = tmp_path / "trees.svg"
    gloo, ring = revealed(tmp_path, "gloo", "ringlet:ring", "-n", "3", "--sizes", "1..1K", "-o", str(picture))
    said = capsys.readouterr().out
    assert {order["text"] for order in ring["orders"]} == {"((0+1)+2)", "(0+(1+2))", "((0+2)+1)"}
    assert len(gloo["orders"]) == 3 and gloo["messages"][-1]["ranks_equal"]
    assert "depends on the element's place: 3 orders in 1,024 elements, another from element 342, 683 on" in said
    assert "gloo and ringlet:ring add in the same order at" in said
    texts = [element.text for element in xml.etree.ElementTree.parse(picture).iter() if element.tag.endswith("text")]
    assert "gloo, 3 ranks" in texts and "ringlet:ring, 3 ranks" in texts and "A  (0+(1+2))" in texts


def test_a_function_of_a_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(
        "import torch.distributed as dist\n"
        "def shares(x):\n"
        "    every = [x.clone() for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(every, x)\n"
        "    return sum(every[::-1])\n"
        "calls = []\n"
        "def changes(x):\n"
        "    calls.append(x)\n"
        "    every = [x.clone() for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(every, x)\n"
        "    return sum(every[:: 1 if len(calls) % 2 else -1])\n"
    )
    monkeypatch.chdir(tmp_path)
    (found,) = revealed(tmp_path, "own:shares", "-n", "3", "--sizes", "7", "--dtype", "bfloat16")
    assert [order["text"] for order in found["orders"]] == ["(0+(1+2))"]
    assert found["error_bound"] == "error: at most 2 x 2^-8 of the sum of the magnitudes, to first order"
    (found,) = revealed(tmp_path, "own:changes", "-n", "4", "--sizes", "7")
    assert [order["is_tree"] for order in found["orders"]] == [False]
    assert found["error_bound"] == "error: no bound is known, because an order is no tree"
    assert main(["reveal", "own:missing", "-n", "2"]) == 2
    assert "own:missing cannot be imported: module 'own' has no attribute 'missing'" in capsys.readouterr().err


@pytest.mark.skipif("openmpi" not in mpi.installed(), reason="needs Open MPI, which `make peers` installs")
def test_the_size_at_which_open_mpi_changes_its_order_is_found(tmp_path):
    (found,) = revealed(tmp_path, "openmpi", "-n", "3", "--sizes", "2000,2500,4096")
    orders = {seen["elements"]: len(set(seen["layouts"][0]["orders"])) for seen in found["messages"]}
    assert orders == {2000: 3, 2500: 1, 4096: 3}
    changes = [change["elements"] for change in found["changes"]]
    assert len(changes) == 2 and 2000 < changes[0] <= 2500 < changes[1] <= 4096
    around = ",".join(str(size) for change in changes for size in (change - 1, change))
    (close,) = revealed(tmp_path, "openmpi", "-n", "3", "--sizes", around)
    assert [len(set(seen["layouts"][0]["orders"])) for seen in close["messages"]] == [3, 1, 1, 3]


def test_a_picture_shows_every_kind_of_node():
    def found(elements, texts, starts):
        layout = {"starts": starts, "orders": list(range(len(texts)))}
        return {
            "target": "a", "version": "b", "world": 4, "collective": "all_reduce", "dtype": "float32",
            "orders": [{"text": text} for text in texts], "messages": [{"elements": elements, "layouts": [layout]}],
        }  # fmt: skip

    one = found(10, ["({0+1}+{2+3})", "(0,1,(2+3))"], [0, 4])
    drawn = draw_trees.svg([one])
    assert drawn.count("<circle") == 8 + 3 + 1 and drawn.count('width="10" height="10"') == 1
    assert draw_trees.svg([one]) == drawn
    assert "exact" in draw_trees.svg([found(1, ["exact: nothing"], [0])])
