"""Opens the gates of torch's suite: conditions that name backends, and so would skip a test whatever a backend can do.

There are three sorts: lists that the suite asks (`DistTestCases`), literal conditions in decorators, and names in the
bodies. The literal ones are found in the module's syntax tree, so that a test's own lines and conditions stay as they
are. A decorator that named a backend becomes `open_gate(condition, reason)`: it skips nothing, and notes on the test
what would have kept the backend out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

SKIP = "skip_but_pass_in_sandcastle_if"
REQUIRE = "require_backend_is_available({'gloo'})"
# Conditions that no list can open. Those with a list of CUDA backends stay: such tests need GPUs.
CONDITIONS = {
    "BACKEND != 'gloo'",
    "BACKEND != 'mpi'",
    "BACKEND != 'mpi' and BACKEND != 'nccl' and (BACKEND != 'gloo')",
    "BACKEND != 'nccl' and BACKEND != 'gloo'",
    "BACKEND != 'gloo' and BACKEND != 'nccl'",
}
# DDP logs the name that c10d has for a backend's type, and has one for all backends that are not torch's own.
LOGGED_NAME = ["ddp_logging_data.get('backend_name')", "dist.get_backend(group_id)"]
TYPED = ("gloo", "nccl", "mpi", "ucc")
FEATURES = ("plugin", "ddp", "gpu", "cuda", "subgroup")
PROFILED = ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS")
NOTE = "opened_gate"

Function = Callable[..., Any]


def open_gate(kept_out: bool, reason: str) -> Callable[[Function], Function]:
    """Stands where the suite would skip; `functools.wraps` of further decorators carries the note on."""

    def note(function: Function) -> Function:
        if kept_out:
            setattr(function, NOTE, reason)
        return function

    return note


def open_name(backend: str) -> str:
    return backend if backend in TYPED else "custom"


class Gates(ast.NodeTransformer):
    """Rewrites the module's tree; `opened` counts the decorators, for a suite that has changed would have fewer."""

    def __init__(self) -> None:
        self.opened = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if [ast.unparse(argument) for argument in node.args] == LOGGED_NAME:
            node.args[1] = ast.copy_location(ast.parse("open_name(dist.get_backend(group_id))", mode="eval").body, node)
            return node
        if ast.unparse(node) == REQUIRE:
            self.opened += 1
            return _call(
                "open_gate",
                [ast.parse("BACKEND != 'gloo'", mode="eval").body, ast.Constant("Test requires gloo")],
                node,
            )
        if ast.unparse(node.func) == SKIP and ast.unparse(node.args[0]) in CONDITIONS:
            self.opened += 1
            return _call("open_gate", node.args, node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        """A branch for MPI and gloo is the branch for CPU tensors."""
        self.generic_visit(node)
        if ast.unparse(node.test) == "BACKEND == 'mpi' or BACKEND == 'gloo'":
            node.test = ast.copy_location(ast.parse("BACKEND != 'nccl'", mode="eval").body, node.test)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """The lists of backends whose calls must show in a profile."""
        if ast.unparse(node.targets[0]) in PROFILED and isinstance(node.value, ast.List):
            node.value.elts.append(ast.parse("os.environ['BACKEND']", mode="eval").body)
        return node


def _call(name: str, arguments: list[ast.expr], place: ast.Call) -> ast.Call:
    call = ast.Call(ast.Name(name, ast.Load()), arguments, [])
    return ast.copy_location(call, place)


def opened(source: str, filename: str) -> Any:
    """The module's code with its gates open. ValueError where none is found: then torch's suite has changed."""
    gates = Gates()
    tree = ast.fix_missing_locations(gates.visit(ast.parse(source, filename)))
    if gates.opened == 0:
        raise ValueError(f"{filename} has none of the gates that gates.py knows")
    return compile(tree, filename, "exec", dont_inherit=True)  # this file's __future__
