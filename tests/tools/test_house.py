"""The house's rules that a machine can check (HOUSE.md): who includes whom, names, and what must not be there.

Each test collects every violation before it fails.
"""

import ast
import functools
import itertools
import os
import pathlib
import re
import subprocess

import pytest

import ringlet

ROOT = pathlib.Path(__file__).parents[2]
THIS = pathlib.Path(__file__).relative_to(ROOT)

# Each room with the rooms that it may include; base stands below all.
ROOMS = {
    "base": {"base"},
    "schedule": {"base", "schedule"},
    "reduce": {"base", "reduce"},
    "memory": {"base", "memory"},
    "transport": {"base", "reduce", "memory", "transport"},
    "plan": {"base", "schedule", "plan"},
    "engine": {"base", "schedule", "reduce", "memory", "transport", "plan", "engine"},
    "cuda": {"base", "reduce", "cuda"},
    "gpu": {"base", "schedule", "reduce", "memory", "transport", "plan", "engine", "cuda", "gpu"},
    "comm": {"base", "schedule", "reduce", "memory", "transport", "plan", "engine", "cuda", "gpu", "comm"},
    "bindings": {
        *("base", "schedule", "reduce", "memory", "transport", "plan", "engine", "cuda", "gpu", "comm", "bindings"),
    },
}
TORCH = re.compile(r"(torch|ATen|c10|pybind11)/|Python\.h")
# The schedules are pure functions of (rank, world).
NOT_IN_SCHEDULE = re.compile(r"sys/|cuda|pthread|unistd|thread|mutex|atomic|condition_variable|chrono|future")
WITHOUT_TORCH = ("python/ringlet/schedule/", "python/ringlet/simulate/")
WITHOUT_TORCH += tuple(f"python/ringlet/training/reducer/{name}.py" for name in ("buckets", "merging"))
PUBLIC_NAMES_ONLY = ("python/ringlet/bench/", "python/ringlet/training/", "examples/")
EMPTY_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "manager"}

CONTRACT_LINES = 12
TRACKED_BYTES = 1 << 20


@functools.cache
def tracked():
    """Every file that git has or would take, relative to the root."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = {pathlib.Path(name) for name in listed.stdout.decode().split("\0") if name}
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))


@functools.cache
def text_of(path):
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def sources(*suffixes, under=""):
    return [path for path in tracked() if path.suffix in suffixes and path.as_posix().startswith(under)]


def report(violations):
    assert not violations, "\n" + "\n".join(violations)


# --- C++


def includes(path):
    """(line number, what is included, whether in quotes)"""
    for number, line in enumerate(text_of(path).splitlines(), 1):
        found = re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line)
        if found:
            yield number, found[2], found[1] == '"'


def test_cpp_includes_point_downwards():
    violations = []
    for path in sources(".h", ".cc", ".cu", under="csrc/"):
        room = path.parts[1]
        assert room in ROOMS, f"{path}: no such room"
        for line, name, quoted in includes(path):
            if quoted and name.split("/")[0] not in ROOMS[room]:
                violations.append(f"{path}:{line}: {room} must not include {name}")
    report(violations)


def test_only_bindings_include_torch():
    violations = []
    for path in sources(".h", ".cc", ".cu"):
        if path.parts[:2] not in (("csrc", "bindings"), ("tests", "emulated_gpu")):
            violations += [f"{path}:{line}: {name}" for line, name, _ in includes(path) if TORCH.match(name)]
    report(violations)


def test_schedules_and_transports_know_only_their_own_matter():
    violations = []
    for path in sources(".h", ".cc", under="csrc/schedule/"):
        violations += [f"{path}:{line}: {name}" for line, name, _ in includes(path) if NOT_IN_SCHEDULE.match(name)]
    for path in sources(".h", ".cc", under="csrc/transport/"):
        violations += [f"{path}:{line}: {name}" for line, name, _ in includes(path) if name == "base/dtype.h"]
    report(violations)


def test_headers_open_with_a_contract_and_pragma_once():
    violations = []
    for path in sources(".h"):
        lines = text_of(path).splitlines()
        contract = list(itertools.takewhile(lambda line: line.startswith("//"), lines))
        if not 1 <= len(contract) <= CONTRACT_LINES:
            violations.append(f"{path}: opens with {len(contract)} lines of contract, not 1 to {CONTRACT_LINES}")
        if "#pragma once" not in lines:
            violations.append(f"{path}: no #pragma once")
    report(violations)


def test_nothing_of_python_is_touched_without_its_lock():
    """From a `GilReleased` to the end of its block, the value of a return statement included. pybind11's own guards end
    the process where a thread comes back while Python ends."""
    wrong = []
    for path in sources(".cc", ".h", under="csrc/bindings"):
        block = re.compile(r"^( *)[^\n]*GilReleased \w+;[^\n]*\n((?:\1[^\n]*\n|\n)*)", re.MULTILINE)
        for found in block.finditer(text_of(path)):
            wrong += [f"{path}: {line.strip()}" for line in found[2].splitlines() if re.search(r"\bPy_|\bpy::", line)]
        wrong += [f"{path}: {own}" for own in re.findall(r"gil_scoped_\w+", text_of(path))]
    report(wrong)


# Those that a signal can end. The last are sleeps: their callers look again, whatever ended them. connect() goes on.
ENDED_BY_SIGNALS = re.compile(
    r"(?<![\w>])::(p?poll|select|epoll_wait|readv?|writev?|pread|pwrite|recv(?:from|msg)?|send(?:to|msg)?|accept4?|connect|open|openat"
    r"|dup[23]|ftruncate|fallocate|getrandom|waitid|waitpid|flock|nanosleep|clock_nanosleep|syscall)\("
)
ENDS_EARLY = {
    "csrc/transport/address.cc": {"connect"},  # of a datagram socket
    "csrc/transport/connector.cc": {"connect"},  # goes on
    "csrc/transport/control.cc": {"syscall"},
    "csrc/transport/handshake.cc": {"syscall"},  # pidfd_open
    "csrc/transport/listener.cc": {"poll"},
    "csrc/transport/mesh.cc": {"ppoll"},
    "csrc/transport/socket.cc": {"open"},  # /dev/null, in a forked child
}


def test_no_signal_ends_a_system_call_unseen():
    """Calls that a signal can end go through repeated() of base/system_call.h, or uninterrupted() in the handshake."""
    wrong = []
    for path in sources(".cc", ".h", under="csrc/"):
        code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text_of(path))
        for found in ENDED_BY_SIGNALS.finditer(code):
            before = code[: found.start()]
            opened = max(before.rfind("repeated("), before.rfind("uninterrupted("))
            inside = opened >= 0 and before[opened:].count("(") > before[opened:].count(")")
            named = re.search(r"const auto (\w+) = \[&\] \{ return [^;]*$", before)
            inside = inside or (
                named and re.search(rf"(?:repeated|uninterrupted)\({named[1]}\)", code[found.start() :])
            )
            if not inside and found[1] not in ENDS_EARLY.get(path.as_posix(), ()):
                wrong.append(f"{path}:{before.count(chr(10)) + 1}: ::{found[1]}")
        if "this_thread::sleep" in code:
            wrong.append(f"{path}: this_thread::sleep, not sleep_for of base/system_call.h")
    report(wrong)


def test_no_lock_of_the_process_outlives_a_fork():
    """A forked child has its parent's locks, and not the threads that hold them: OfProcess of base/process.h makes new
    ones there."""
    lock = re.compile(
        r"^(?:static |constinit )*std::\w*mutex \w+\W|\bstatic (?:constinit |auto\* const \w+ = new )?std::\w*mutex\b"
    )
    wrong = []
    for path in sources(".cc", ".h", under="csrc/"):
        lines = text_of(path).splitlines()
        wrong += [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if lock.search(line)]
    report(wrong)


def test_cmake_lists_every_source():
    cmake = text_of(pathlib.Path("CMakeLists.txt"))
    alternatives = {"csrc/gpu/gpu.cc", "csrc/gpu/no_gpu.cc"}  # RINGLET_GPU chooses one
    listed = set(re.findall(r"csrc/[\w/]+\.(?:cc|cu)", cmake)) | alternatives
    here = {path.as_posix() for path in sources(".cc", ".cu", under="csrc/")}
    report([f"not in CMakeLists.txt: {name}" for name in sorted(here - listed)])
    tests = re.search(r"set\(RINGLET_TESTS ([^)]*)\)", cmake)[1].split()
    suites = {
        path.stem.removesuffix("_test") for path in sources(".cc", under="tests/cpp/") if path.stem.endswith("_test")
    }
    assert set(tests) == suites


# --- Python


@functools.cache
def tree_of(path):
    return ast.parse(text_of(path), str(path))


def imports(tree):
    """(line, module, name or None); not what stands under `if TYPE_CHECKING:`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, "." * node.level + (node.module or ""), alias.name) for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def test_pure_python_imports_no_torch():
    violations = []
    for path in sources(".py", under="python/"):
        if path.as_posix().startswith(WITHOUT_TORCH):
            found = [(line, module) for line, module, _ in imports(tree_of(path)) if module.split(".")[0] == "torch"]
            violations += [f"{path}:{line}: imports {module}" for line, module in found]
    report(violations)


# Each room of python/ringlet with the rooms that it may import; "" is what lies in none. __init__ and cli/ see all.
PYTHON_ROOMS = {
    "errors": set(),
    "schedule": {"errors", "schedule"},
    "simulate": {"errors", "schedule", "simulate"},
    "": {"errors", "schedule", ""},
    "training": {"errors", "schedule", "", "training"},
    "settings": {"errors", "", "training", "settings"},
    "bench": {"errors", "", "schedule", "bench"},
    "summation": {"errors", "", "schedule", "bench", "summation"},
}


@functools.cache
def modules():
    """Every module of the package: name -> file."""
    found = {}
    for path in sources(".py", under="python/ringlet/"):
        name = ".".join(path.with_suffix("").parts[1:])
        found[name.removesuffix(".__init__")] = path
    return found


def resolved(importer, module, name):
    """The module of the package that an import names; None: of another package, or the extension."""
    if module.startswith("."):
        dots = len(module) - len(module.lstrip("."))
        parts = importer.split(".")
        base = parts[: len(parts) - dots + (modules()[importer].name == "__init__.py")]
        module = ".".join([*base, *filter(None, [module.lstrip(".")])])
    if name == "_C" or module == "ringlet._C":
        return None
    return next((found for found in (f"{module}.{name}", module) if found in modules()), None)


def room_of(name):
    parts = modules()[name].parts
    return parts[2] if len(parts) > 3 else "errors" if name == "ringlet.errors" else ""


def test_python_imports_point_downwards():
    violations = []
    for name, path in modules().items():
        room = room_of(name)
        if room == "cli" or name in ("ringlet", "ringlet.__main__"):
            continue
        assert room in PYTHON_ROOMS, f"{path}: no such room"
        for line, module, what in imports(tree_of(path)):
            target = resolved(name, module, what)
            if target is not None and room_of(target) not in PYTHON_ROOMS[room]:
                violations.append(f"{path}:{line}: {room or 'the package'} must not import {target}")
    report(violations)


def test_python_imports_go_in_no_circle():
    """Of what is imported when a module is; a function may import later."""
    graph = {}
    for name, path in modules().items():
        tree = tree_of(path)
        top = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])
        graph[name] = {resolved(name, module, what) for _, module, what in imports(top)} - {None, name}
    done, under_way, violations = set(), [], []

    def visit(name):
        if name in under_way:
            violations.append(" -> ".join([*under_way[under_way.index(name) :], name]))
        elif name not in done:
            under_way.append(name)
            for other in sorted(graph[name]):
                visit(other)
            under_way.pop()
            done.add(name)

    for name in sorted(graph):
        visit(name)
    report(violations)


def test_schedules_stand_in_layers():
    """Only the package itself binds a schedule's methods to what stands above it: no module asks it for anything, and
    none imports late to hide a circle."""
    violations = []
    for path in sources(".py", under="python/ringlet/schedule/"):
        if path.parts[-2:] == ("schedule", "__init__.py"):
            continue
        for line, module, name in imports(tree_of(path)):
            if module == "ringlet.schedule" and f"{module}.{name}" not in modules():
                violations.append(f"{path}:{line}: imports {name} of the package, not of the module that has it")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                late = [module for _, module, _ in imports(node) if module.startswith("ringlet")]
                violations += [f"{path}:{node.lineno}: {node.name} imports {module} late" for module in late]
    report(violations)


def private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_bench_reducer_and_examples_use_public_names():
    """Two files have hooks and labels from the extension: the others of training take them from there."""
    violations = []
    for path in sources(".py"):
        if not path.as_posix().startswith(PUBLIC_NAMES_ONLY) or path.name in ("gradient_hooks.py", "call_labels.py"):
            continue
        for line, module, name in imports(tree_of(path)):
            ours = module.startswith((".", "ringlet"))
            if ours and (private(module.lstrip(".")) or private(name or "")):
                violations.append(f"{path}:{line}: {module} {name or ''}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value).startswith("ringlet"):
                violations.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    report(violations)


# --- names, words, documents


def test_files_are_called_what_they_hold():
    violations = []
    for path in tracked():
        words = {part.split(".")[0].lower() for part in path.parts}
        if words & EMPTY_NAMES:
            violations.append(f"{path}: says nothing of what it holds")
        if path.suffix in (".py", ".h", ".cc", ".cu") and not re.fullmatch(r"[a-z0-9_]+", path.stem):
            violations.append(f"{path}: not snake_case")
    report(violations)


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("unfinished work", re.compile(r"\b(TODO|FIXME|XXX)\b")),
        ("a path of one machine", re.compile(r"(?<![\w.}/])/(work|root|home)/\w")),
    ],
)
def test_no_file_has(what, pattern):
    violations = []
    for path in tracked():
        if path == THIS or path.suffix in (".svg", ".png", ".jsonl"):
            continue
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if pattern.search(line):
                violations.append(f"{path}:{number}: {what}: {line.strip()[:100]}")
    report(violations)


def test_tracked_files_are_small():
    report(
        [
            f"{path}: {(ROOT / path).stat().st_size} bytes"
            for path in tracked()
            if (ROOT / path).stat().st_size > TRACKED_BYTES
        ]
    )


def test_scripts_can_be_run():
    violations = []
    for path in tracked():
        script, executable = text_of(path).startswith("#!"), os.access(ROOT / path, os.X_OK)
        if script != executable:
            violations.append(f"{path}: begins with #!, and is not executable" if script else f"{path}: no script")
    report(violations)


def test_readme_names_the_two_commands():
    readme = text_of(pathlib.Path("README.md"))
    assert "make demo" in readme and "make test" in readme


def test_decisions_are_numbered_and_those_cited_exist():
    folder = pathlib.Path("docs", "decisions")
    decisions = [path for path in tracked() if path.parent == folder and path.name != "README.md"]
    violations = [f"{p}: not NNNN-title.md" for p in decisions if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", p.name)]
    violations += [
        f"{p}: does not open with '# {p.name[:4]}: '"
        for p in decisions
        if not text_of(p).startswith(f"# {p.name[:4]}: ")
    ]
    index = text_of(folder / "README.md")
    violations += [f"{p}: not in docs/decisions/README.md" for p in decisions if f"]({p.name})" not in index]
    numbers = [path.name[:4] for path in decisions]
    violations += [
        f"two decisions are numbered {number}" for number in sorted({n for n in numbers if numbers.count(n) > 1})
    ]
    for path in sources(".py", ".h", ".cc", ".cu", ".md", ".txt", ".toml", ".yaml"):
        cited = set(re.findall(r"docs/decisions/(\d{4})", text_of(path))) - set(numbers)
        violations += [f"{path}: cites docs/decisions/{number}, which is not there" for number in sorted(cited)]
    report(violations)


def test_the_page_of_promises_has_every_algorithm_and_names_tests():
    page = text_of(pathlib.Path("docs", "numerics.md"))
    table = page.partition("<!-- table promises: ")[2].partition("<!-- end of table")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line][2:]
    promised = {(name, row[0].strip("`")) for row in rows[:-1] for name in re.findall(r"`(\w+)`", row[1])}
    known = {(algorithm, collective) for algorithm, collective, _ in ringlet.schedule.algorithms()}
    assert promised == known, f"docs/orders.py: promises {promised ^ known} are not those of the registry"
    assert all(cell for row in rows[:-1] for cell in row)
    shown = [re.fullmatch(r"\[(test_\w+)\]\(\.\./(tests/\S+)\)", cell) for cell in rows[-1][2:]]
    assert shown and all(f"def {one[1]}(" in text_of(pathlib.Path(one[2])) for one in shown)


# --- words

# What the glossary replaced (docs/glossary.md). A word that means something else in arithmetic or torch is not here.
RETIRED = re.compile(
    r"\b(Doors?|doors?|Visitors?|visitors?|Dials?|dials?|dialled|diallers?|strangers?|wires|Wires|greetings?|bells?"
    r"|farewells?|see_off|bye|last_words|[Aa]nnouncements?|slabs?|patient|story|courtesy|ToldFirst|look_around"
    r"|take_word|heed_end|hear_others|say_suspicion|film|rank_free|[Ww]hereabouts|live_gpu|fake_nccl|inbox|[Tt]icket"
    r"|Spot|MessageTitle|AddressableEngine|Lanes?|meeting_key)\b|Slab(?=[A-Z_]|\b)"
)


def test_no_retired_word():
    violations = []
    for path in sources(".h", ".cc", ".cu", ".cuh", ".py", ".md", ".txt", ".toml", ".yml", ".yaml", ".sh"):
        # This list, and the page that tells what was decided.
        if path in (THIS, pathlib.Path("docs/decisions/0043-the-fields-words.md")):
            continue
        for number, line in enumerate(text_of(path).splitlines(), 1):
            violations += [f"{path}:{number}: {found[0]} (docs/glossary.md)" for found in RETIRED.finditer(line)]
    report(violations)


def test_a_type_name_has_one_meaning():
    places = {}
    for path in sources(".h", ".cc", ".cu", under="csrc/"):
        if path == pathlib.Path("csrc/cuda/elements.h"):
            continue  # the same element types and operations as csrc/reduce/elements.h, for nvcc
        for found in re.finditer(
            r"^(?:class|struct|enum class|enum) (?:alignas\S+ )?(\w+)\b(?!::)[^;\n]*\{", text_of(path), re.MULTILINE
        ):
            places.setdefault(found[1], []).append(str(path))
    report([f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1])


def test_the_glossary_has_every_term_once():
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \|$", text_of(pathlib.Path("docs/glossary.md")), re.MULTILINE)
    terms = [term for term in rows if term not in ("term", "---")]
    assert len(terms) == len(set(terms)) >= 40
