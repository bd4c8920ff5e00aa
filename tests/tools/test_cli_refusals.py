"""Bad input to every command: refused in one line that says what is wrong, exit code 2, before any work begins."""

import re

import pytest
from benchmarks.__main__ import main as benchmarks_main

from ringlet.cli import bench as bench_cli
from ringlet.cli import doctor, reveal, tune
from ringlet.cli.main import main
from ringlet.schedule import Schedule, prove_all


class WorkBegan(BaseException):
    """Not an Exception: no command may catch it."""


@pytest.fixture
def idle(monkeypatch, tmp_path):
    """In an empty folder, with what each command does in the end replaced by a raise."""

    def begin(*args, **kwargs):
        raise WorkBegan

    for module, name in (
        (bench_cli, "measure"),
        (tune.bench, "measure"),
        (prove_all, "prove"),
        (Schedule, "svg"),
        (Schedule, "text"),
        (reveal, "Jobs"),
    ):
        monkeypatch.setattr(module, name, begin)
    monkeypatch.setattr(doctor, "examine", begin)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *words):
    """What is said on stderr, one line."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr()
    assert code == 2, (words, told.err)
    assert told.out == "" and told.err.count("\n") == 1 and told.err.startswith("ringlet"), (words, told)
    return told.err


WORLDS = ("", ",", "0", "-1", "two", "2,,x", "1.5", "nan", "4-2", "1-", "99999999999", "1-999999999", "9" * 5000)
SIZES = ("", "1Q", "-5", "0", "nan", "inf", "4 apples", "1e3", "0x10", "9" * 5000, "999999999G")
WHOLES = ("", "x", "-1", "1.5", "nan", "9" * 5000)
NUMBERS = ("", "x", "nan", "inf", "-inf", "1e999")
NAMES = ("", ",", "foo", "ring,foo", "Ring")
FILES = ("", ".", "missing/x.svg", "/dev/null/x.svg", "x" * 300 + ".svg")

SIMULATED = ("simulate", "--machine", "slow-uplinks", "--world", "4")

FUZZ = [
    *[("bench", flag, value) for flag in ("--world", "--nproc", "--worlds") for value in WORLDS],
    *[("bench", flag, value) for flag in ("-b", "-e") for value in SIZES],
    *[("bench", flag, value) for flag in ("-f", "--iters", "-w", "--rounds") for value in WHOLES],
    *[("bench", flag, value) for flag in ("--ms", "--timeout") for value in (*NUMBERS, "0", "-1")],
    *[("bench", flag, value) for flag in ("--algorithm", "--collective", "--memory", "--via") for value in NAMES],
    *[("bench", flag, value) for flag in ("--dtype", "-d", "--op", "-o") for value in ("", "foo", "all", "float,half")],
    *[("bench", flag, value) for flag in ("--device", "--transport", "--peers") for value in ("", "x")],
    ("bench", "-c", ""), ("bench", "-c", "2"),
    *[("bench", flag) for flag in ("-b", "--json", "--world", "--nonsense", "-g", "surplus")],
    *[("bench", "--plot", value) for value in ("", ".", "/dev/null/x.svg", "x.foo", "x", ".svg")],
    *[("bench", "--json", value) for value in ("", ".", "/dev/null/x")],
    *[("bench", value) for value in ("@", "@missing.args", "@.")],
    ("bench", "-b", "2K", "-e", "1K"), ("bench", "-f", "1"), ("bench", "-w", "0"), ("bench", "--rounds", "0"),
    ("bench", "--peers", "foo"), ("bench", "--peers", "nccl"), ("bench", "--json", "same.svg", "--plot", "same.svg"),
    ("bench", "--collective", "broadcast", "--algorithm", "ring"),
    ("bench", "--collective", "all_reduce,reduce", "--algorithm", "auto,two_shot"),
    *[("tune", flag, value) for flag in ("--world", "--nproc") for value in (*WORLDS, "1")],
    *[("tune", flag, value) for flag in ("-b", "-e") for value in SIZES],
    *[("tune", flag, value) for flag in ("-f", "--rounds") for value in (*WHOLES, "0")],
    *[("tune", "--ms", value) for value in (*NUMBERS, "0", "-1")],
    *[("tune", "--margin", value) for value in (*NUMBERS, "-100")],
    *[("tune", flag, value) for flag in ("--collective", "--collectives") for value in (*NAMES, "gather")],
    *[("tune", "-o", value) for value in ("", ".", "/dev/null/table")],
    *[("prove", flag, value) for flag in ("--world", "--worlds", "--nproc") for value in WORLDS],
    *[("prove", flag, value) for flag in ("--algorithm", "--collective") for value in NAMES],
    *[("prove", "--hosts", value) for value in ("", "x", "4x", "0x3", "-1", "2x3:round", "99999999x99999999")],
    *[("prove", "--json", value) for value in FILES],
    ("prove", "--hosts", "2x2", "--world", "4"), ("prove", "--algorithm", "star", "--collective", "all_to_all"),
    *[("draw", "ring", "--world", value) for value in WORLDS],
    *[("draw", "ring", "--root", value) for value in WHOLES],
    *[("draw", "ring", "-o", value) for value in (*FILES, "x.png", "x")],
    *[("draw", value) for value in ("", "rong")],
    ("draw",), ("draw", "ring", "--collective", "foo"), ("draw", "ring", "--root", "4"),
    ("draw", "ring", "--world", "257"),
    ("draw", "star", "--collective", "all_to_all"), ("draw", "ring", "butterfly"), ("draw", "ring", "--hosts", "200x2"),
    *[(*SIMULATED[:-1], value) for value in (*WORLDS, "1", "257")],
    *[(*SIMULATED[:-2], "--hosts", value) for value in ("", "x", "4x", "0x3", "1x1", "2x3:round", "200x2")],
    *[(*SIMULATED, flag, value) for flag in ("-b", "-e", "--sizes", "--explain") for value in SIZES],
    *[(*SIMULATED, "--segments", value) for value in (*WHOLES, "0")],
    *[(*SIMULATED, "--root", value) for value in (*WHOLES, "1")],
    *[(*SIMULATED, flag, value) for flag in ("--json", "--plot") for value in FILES],
    *[(*SIMULATED, value) for value in (*NAMES, "ring.x", "ring.0", "ring+foo", "double_binary_tree.2", "missing.py")],
    (*SIMULATED, "ring", "--collective", "foo"), (*SIMULATED, "ring", "--collective", "barrier"),
    (*SIMULATED, "two_shot+ring", "--collective", "broadcast"), (*SIMULATED, "--collective", "reduce", "--root", "4"),
    (*SIMULATED, "--hosts", "2x2"), (*SIMULATED, "-b", "2K", "-e", "1K"), (*SIMULATED, "--json", "x", "--plot", "x"),
    SIMULATED[:3], ("simulate", "--world", "4"), ("simulate", "--world", "4", "--machine", "missing.toml"),
    *[("reveal", "gloo", "-n", value) for value in (*WORLDS, "1", "1024-1025")],
    *[("reveal", "gloo", "--sizes", value) for value in (*SIZES, "4..1", "1..", "..4", "1..2..3")],
    *[("reveal", "gloo", "--calls", value) for value in (*WHOLES, "0")],
    *[("reveal", "gloo", flag, value) for flag in ("--dtype", "--collective") for value in ("", "int32", "barrier")],
    *[("reveal", "gloo", flag, value) for flag in ("--memory", "--transport", "--device") for value in ("", "x")],
    *[("reveal", "gloo", "-o", value) for value in (*FILES, "x.png", "x")],
    *[("reveal", "gloo", "--json", value) for value in FILES],
    *[("reveal", value) for value in ("", "foo", "ringlet:", "ringlet:rong", "a b:c", "a:b:c", ":f", "m:")],
    ("reveal",), ("reveal", "gloo", "-n", "19", "--dtype", "float16"),
    ("reveal", "ringlet:tree"), ("reveal", "ringlet:ring", "--collective", "reduce"),
    *[("doctor", "--json", value) for value in FILES], ("doctor", "surplus"), ("doctor", "--jsom", "x"),
    ("sing",), ("benhc",), ("--nonsense",), ("Bench",), ("--world", "4"), ("",),
]  # fmt: skip


@pytest.mark.parametrize("words", FUZZ, ids=lambda words: " ".join(words)[:60])
def test_bad_input_is_one_line_before_any_work(words, idle, capsys):
    told = refusal(capsys, *words)
    assert len(told) < 700, "what is wrong, not all that was given"
    assert list(idle.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("benhc",), "'benhc' is not a command; did you mean bench?"),
        (("bench", "--algoritm", "ring"), "--algoritm: no such option; did you mean --algorithm?"),
        (("bench", "-b", "1Q"), "argument -b: '1Q' is not a size from 1 to 1024G: write 4, 64K, 256M or 1GiB"),
        (("bench", "--worlds", "0"), "argument --world: '0' is not a list of worlds"),
        (("bench", "@mian.args"), "No such file or directory: 'mian.args'"),
        (("bench", "--plot", "x.foo"), "'x.foo' must end in .svg or .png or .pdf"),
        (("bench", "--algorithm", "foo"), "--algorithm: 'foo' is not one of all_reduce's: auto, ring"),
        (("bench", "-g", "8"), "one process for each rank, on a GPU of its own where --device is cuda: give --world N"),
        (("draw",), "give one algorithm, for example: ringlet draw ring"),
        (("draw", "rign"), "; did you mean ring?"),
        (("draw", "ring", "-o", "x.png"), "'x.png' must end in .svg or .txt"),
        (("draw", "ring", "--world", "256"), "33488896 boxes would be too large to read"),
        (("prove", "--json", "missing/x"), "missing/x: No such file or directory (is the folder missing there?)"),
        ((*SIMULATED, "rung"), "did you mean ring?"),
        ((*SIMULATED, "chain"), "'chain': all_reduce: algorithm must be one of ring, butterfly"),
        ((*SIMULATED, "--root", "1"), "all_reduce has no root: root must be 0, got 1\n"),
        (SIMULATED[:3], "one of the arguments --world --hosts is required"),
        (("reveal", "ringlet:rong"), "ringlet:rong: 'rong' is not one of all_reduce's: auto, ring"),
        (("reveal", "gloo", "--world", "1"), "takes 2 to 1024 ranks, got 1: one rank adds nothing"),
        (("run", "-n", "0", "program.py"), "not a whole number from 1"),
        (("run", "program.py"), "give the number of ranks before the program: ringlet run -n 2 program.py"),
        (("simulate", "--hosts", "2x2", "--machine", "x.toml"), "x.toml: No such file or directory\n"),
        (("tune", "--sizes", "4K"), "--sizes: no such option"),
        (("tune", "--world", "1"), "a single rank has no algorithm to choose"),
    ],
)
def test_a_refusal_says_what_to_do(words, told, idle, capsys):
    assert told in refusal(capsys, *words)


def test_what_the_machine_cannot_hold_is_not_tried(idle, capsys, monkeypatch):
    monkeypatch.setattr(bench_cli, "machine_bytes", lambda: 16 << 30)
    needs = r"1000 ranks with buffers of 4 KiB need \d+ GiB, more than this machine's 16 GiB: lower --world or -e"
    assert re.search(needs, refusal(capsys, "bench", "--world", "1000", "-e", "4K"))
    assert "2 ranks with buffers of 9 GiB need 18 GiB" in refusal(capsys, "bench", "-e", "9G")
    with pytest.raises(WorkBegan):
        main(("bench", "-e", "8G"))


def test_what_the_environment_says_of_transports_is_checked_too(idle, capsys, monkeypatch):
    monkeypatch.setenv("RINGLET_TRANSPORT", "pigeon")
    for words in (("bench",), ("tune", "-o", "table")):
        assert "RINGLET_TRANSPORT must be one of auto" in refusal(capsys, *words)


@pytest.mark.parametrize("text", ["--rounds -1", "--world", "-b 1K\n-e 1", "x", "--nonsense 1", "\x00", "\x80", '"'])
def test_files_of_options_are_checked_as_options_are(text, idle, capsys):
    (idle / "mine.args").write_bytes(text.encode("latin-1"))
    refusal(capsys, "bench", "@mine.args")


@pytest.mark.parametrize(
    "text", ["", "hosts = 0", "hosts = 1e9", 'hosts = "4"', "hosts = 2\nuplink_mbit = inf", "\x80"]
)
def test_cluster_files_are_checked(text, idle, capsys):
    (idle / "mine.toml").write_bytes(text.encode("latin-1"))
    for command in ("bench", "tune"):
        assert benchmarks_main((command, "--cluster", "mine.toml")) == 2
        assert capsys.readouterr().err.startswith(f"ringlet {command}: mine.toml: ")
