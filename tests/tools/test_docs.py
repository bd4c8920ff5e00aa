"""The pages are true: pictures, tables and figures are of their sources, examples run, links lead somewhere."""

import os
import pathlib
import re
import runpy
import shlex
import sys

import pytest

import ringlet
from programs import module_at, printed
from ranks import free_ports
from ringlet.cli.main import parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")})
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# In this process; as a program of its own; as a program whose beginning is in PREPARED.
RUN, RUN_FILE, RUN_PREPARED = "python run", "python run file", "python run prepared"
# What a block may be. Other text, such as a file or a drawing, has no mark; lines in it that are commands are checked.
KINDS = re.compile(rf"|{RUN}|{RUN_FILE}|{RUN_PREPARED}|python not run: .+|text output|text map|text error .+")
# What the fragments of a page use and do not make themselves.
BEGINNING = """
import pathlib, torch, ringlet
import torch.distributed as dist
from torch import nn
"""
GROUP = (
    BEGINNING
    + """
dist.init_process_group("ringlet", store=dist.HashStore(), rank=0, world_size=1)
ringlet.init(rank=0, world=1)
x, mine, sizes = torch.ones(4), torch.ones(3), [3]
model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
PREPARED = {
    "start.md": GROUP + "loss = torch.sum",
    "logging.md": GROUP,
    "launching.md": BEGINNING + "model, checkpoint, steps = nn.Linear(2, 2), pathlib.Path('last'), 3\n"
    "host, rank, world = 'localhost', 0, 1",
    "gradients.md": GROUP
    + """
reducer = ringlet.GradientReducer(model)
batches = [(torch.ones(3, 4), torch.ones(3, 2))] * 6
loss_of = lambda model, inputs, targets: (model(inputs) - targets).square().mean()
""",
    "zero.md": GROUP
    + """
import torch.distributed.checkpoint as dcp
pathlib.Path("ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
folder = "checkpoint"
held = nn.Linear(3, 3)
zero = ringlet.Zero(held, torch.optim.SGD, lr=0.1)
dcp.save({"zero": zero}, checkpoint_id=folder)
"""
    + "model = model if 'settings' in CODE else nn.Linear(3, 3)",
}
# A measured figure in a sentence: times as fast, a share. The others are of the source, with what says so.
MEASURED = re.compile(r"\d[\d.,]*x\b(?!\d)|\d[\d.,]* ?%|\d[\d.,]* times\b|\d GB/s")
NOT_MEASURED = {
    "docs/performance.md": {"0.4%": "loop.py's tolerance", "10%": "the limit of a count that is generated"},
    "docs/gradients.md": {"2%": "WORTH_IT of measured.py", "5%": "LATER of merging.py"},
    "docs/selection.md": {"5 %": "the default of --margin"},
    "docs/zero.md": {"1.5 times": "3S over 2S, as the table says"},
}


def blocks(kind):
    """(page and number, code, what the block after it says the output is) of every fenced block of a kind."""
    found = []
    for page in PAGES:
        fenced = FENCE.findall(page.read_text(encoding="utf-8"))
        for number, (info, code) in enumerate(fenced):
            following = fenced[number + 1] if number + 1 < len(fenced) else ("", "")
            output = following[1] if following[0] == "text output" else None
            if info == kind:
                found.append(pytest.param(code, output, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def test_pictures_are_those_of_the_schedules():
    drawn = module_at(ROOT / "docs" / "generate.py").pictures()
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    stale = [name for name in drawn.keys() | committed.keys() if drawn.get(name) != committed.get(name)]
    assert not stale, f"run `python docs/generate.py`: {sorted(stale)}"


def test_tables_are_those_of_the_prover_and_the_source():
    generate = module_at(ROOT / "docs" / "generate.py")
    for name, tables in generate.tables().items():
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert generate.with_tables(page, tables) == page, "run `python docs/generate.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    generate = module_at(ROOT / "docs" / "generate.py")
    assert generate.with_figures(text) == text, "run `python docs/generate.py`"
    if page.parent.name == "decisions":  # they say what was measured when it was decided
        return
    prose = re.sub(r"<!-- table ([\w /]+):.*?<!-- end of table \1 -->", "", FENCE.sub("", text), flags=re.DOTALL)
    found = MEASURED.findall(generate.FIGURE.sub("", prose))
    named = NOT_MEASURED.get(str(page.relative_to(ROOT)), {})
    assert not set(found) - named.keys(), "put it between marks, and its source into docs/figures.py"
    assert not named.keys() - set(found), "not in the page any more"


def test_every_block_is_of_a_known_kind():
    unknown = [
        f"{page.relative_to(ROOT)}: ```{info}"
        for page in PAGES
        for info, _ in FENCE.findall(page.read_text(encoding="utf-8"))
        if not KINDS.fullmatch(info)
    ]
    assert not unknown, "let it run, or say why not"


def commands():
    """(page, line) of every line of an unmarked block that starts a program of this repository."""
    for page in PAGES:
        for info, text in FENCE.findall(page.read_text(encoding="utf-8")):
            for line in text.replace("\\\n", "").splitlines() if info == "" else ():
                line = re.split(r"\s{3,}|\s+#\s", re.sub(r"^(?:[A-Z_]+=\S* )+", "", line))[0]
                if re.match(r"(?:ringlet|make|python|benchmarks/\S+) (?!\w+:)", line) and "..." not in line:
                    yield page.relative_to(ROOT), line


@pytest.mark.parametrize("page, line", list(commands()), ids=str)
def test_commands_are_known(page, line):
    first, second, *words = [*shlex.split(line), ""]
    if first == "ringlet":
        parse([second, *words][:-1])
    elif first == "make":
        assert re.search(rf"^[\w -]*\b{second}\b[\w -]*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        program = first if first != "python" else second
        if second == "-m":
            module = words[0].replace(".", "/")
            program = module if module == "benchmarks" else f"{module}.py"
        assert (ROOT / program).exists() or "/" not in program


def test_every_algorithm_has_its_picture_in_the_page():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for algorithm, collective, _ in ringlet.schedule.algorithms():
        assert f"(pictures/{collective}-{algorithm}.svg)" in page


@pytest.mark.parametrize("code, output", blocks(RUN))
def test_example_runs_here(code, output, capsys):
    try:
        exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
    finally:
        ringlet.finalize()
    if output is not None:
        assert sorted(capsys.readouterr().out.splitlines()) == sorted(output.splitlines())


def prepared():
    return [
        pytest.param(PREPARED[pathlib.Path(block.id.rpartition("-")[0]).name], *block.values, id=block.id)
        for block in blocks(RUN_PREPARED)
    ]


def alone_in_the_world():
    """What torchrun sets."""
    usual = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return usual | {"MASTER_PORT": str(free_ports(1)[0])}


def run_fragment(program, said, environment):
    """In a process of its own."""
    os.environ.update(environment)
    os.chdir(program.parent)
    with said.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path(str(program), run_name="__main__")
    sys.stdout.flush()


@pytest.mark.parametrize("beginning, code, output", prepared())
def test_fragment_runs_after_its_beginning(beginning, code, output, tmp_path, pool):
    program, said = tmp_path / "example.py", tmp_path / "said"
    program.write_text(f"CODE = {code!r}\n{beginning}\n{code}", encoding="utf-8")
    process = pool.fork(run_fragment, program, said, alone_in_the_world())
    process.join(120)
    process.kill()
    process.join()
    assert process.exitcode == 0, said.read_text(encoding="utf-8")
    if output is not None:
        assert sorted(said.read_text(encoding="utf-8").splitlines()) == sorted(output.splitlines())


@pytest.mark.parametrize("code, output", blocks(RUN_FILE))
def test_example_runs_as_a_program(code, output, tmp_path):
    program = tmp_path / "example.py"
    program.write_text(code, encoding="utf-8")
    environment = {**os.environ, **alone_in_the_world(), "PYTHONUNBUFFERED": ""}
    told = printed(sys.executable, program, env=environment, cwd=tmp_path)
    if output is not None:  # ranks print in any order
        assert sorted(told.splitlines()) == sorted(output.splitlines())


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    broken = []
    for target in targets:
        path, _, heading = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (heading and heading not in headings(there)):
            broken.append(target)
    assert not broken


def headings(page):
    """The anchors that a page's headings get."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_readmes_map_is_of_this_tree():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (tree,) = [code for info, code in FENCE.findall(page) if info == "text map"]
    folder, missing = ROOT, []
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name if name.endswith("/") else ROOT
            path = ROOT / name
        else:
            path = folder / name
        if not path.exists():
            missing.append(line)
    assert not missing
