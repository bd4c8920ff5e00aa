"""python/ringlet/_C.pyi says of the extension what is there: the same names, members and parameters."""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import pytest

from ringlet import _C

STUB = pathlib.Path(__file__).resolve().parents[2] / "python" / "ringlet" / "_C.pyi"
TREE = ast.parse(STUB.read_text(encoding="utf-8"))
FUNCTIONS = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def assigned(body: list[ast.stmt]) -> set[str]:
    """Names that are bound without def or class: `timeout: timedelta`, `gather = all_reduce`."""
    names = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return names | {one.id for node in body if isinstance(node, ast.Assign) for one in node.targets}


def parameters(node: ast.FunctionDef) -> list[tuple[str, bool]]:
    """(name, whether it has a default), without self."""
    given = [*node.args.posonlyargs, *node.args.args]
    first_default = len(given) - len(node.args.defaults)
    return [(one.arg, place >= first_default) for place, one in enumerate(given) if one.arg != "self"]


def in_the_module(function: Any) -> list[tuple[str, bool]] | None:
    """The same of pybind11's own text; None where it has none. Parameters without a name there are arg0 and so on."""
    found = re.match(r"\w+\((.*)\) -> ", (function.__doc__ or "").split("\n")[0])
    if not found:
        return None
    text = found[1]
    while (shorter := re.sub(r"\[[^\[\]]*\]|\([^()]*\)", "", text)) != text:  # commas within types
        text = shorter
    parts = [re.match(r"(\w+)[^=]*(=)?", part) for part in text.split(", ") if part]
    return [(part[1], part[2] is not None) for part in parts if part and part[1] != "self"]


def differ(node: ast.FunctionDef, function: Any) -> bool:
    stub, module = parameters(node), in_the_module(function)
    if module is None:
        return False
    named = [
        (name if not re.fullmatch(r"arg\d", there) else there, has)
        for (name, has), (there, _) in zip(stub, module, strict=False)
    ]
    return len(stub) != len(module) or named != module


def test_names_are_those_of_the_module():
    assert public(FUNCTIONS.keys() | CLASSES.keys() | assigned(TREE.body)) == public(vars(_C))


def test_functions_take_what_they_take():
    wrong = [name for name, node in FUNCTIONS.items() if differ(node, getattr(_C, name))]
    assert not wrong
    described = [name for name in FUNCTIONS if in_the_module(getattr(_C, name)) is not None]
    assert len(described) > 30, "pybind11 does not tell of parameters any more"


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_those_of_the_class(name):
    of_class, members = (
        vars(getattr(_C, name)),
        {n.name: n for n in CLASSES[name].body if isinstance(n, ast.FunctionDef)},
    )
    assert public(members.keys() | assigned(CLASSES[name].body)) == public(of_class)
    for member, node in members.items():
        decorators = {one.id for one in node.decorator_list if isinstance(one, ast.Name)}
        assert ("property" in decorators) == isinstance(of_class[member], property), member
        if isinstance(of_class[member], property):
            assert of_class[member].fset is None, f"{member} can be set"
        else:
            assert not differ(node, getattr(getattr(_C, name), member)), member


def test_what_programs_use_of_the_extension_is_there():
    """Also programs that no test runs."""
    root = STUB.parents[2]
    files = [path for folder in ("python", "benchmarks", "examples", "docs") for path in (root / folder).rglob("*.py")]
    used = {(path.name, name) for path in files for name in re.findall(r"(?<![\w.])_C\.(\w+)", path.read_text("utf-8"))}
    assert len(used) > 50
    assert {(path, name) for path, name in used if not hasattr(_C, name)} <= {("extension.py", "so")}
