"""The command line: what it says, what it writes, and its exit codes. Few processes, for each imports torch."""

import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import ringlet
from programs import ended
from ringlet.cli import doctor, options, outputs, terminal, tune, variables
from ringlet.cli.main import main, make_parser

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = ("bench", "tune", "search", "simulate", "prove", "draw", "explore", "reveal", "doctor", "version")


def printed(capsys, *words):
    """What a command that must succeed prints."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as ended:  # argparse's way to end a help
        code = ended.code
    told = capsys.readouterr()
    assert code == 0, told.err
    return told.out


def ringlet_process(*arguments, **environment):
    done = ended(sys.executable, "-m", "ringlet", *arguments, env=os.environ | environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_help_has_a_line_for_each_command_and_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    told = printed(capsys, "--help")
    lines = [line.split() for line in told.splitlines()]
    for command in COMMANDS:
        found = [words for words in lines if words[:1] == [command]]
        assert len(found) == 1 and len(found[0]) > 3, told
    assert "Exit codes: 0 success, 1 check failed, 2 bad arguments or failure, 130 interrupted." in told
    assert printed(capsys) == told, "without arguments"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_and_one_name_an_option(command, capsys):
    told = printed(capsys, command, "--help")
    assert command == "version" or re.search(r"examples:\n  (ringlet|torchrun)", told)
    for other in ("--worlds", "--nproc", "--algorithms", "--collectives", "--minbytes", "-g"):
        assert not re.search(rf"(?<!\S){other}(?![\w-])", told)


def test_versions(capsys):
    told = printed(capsys, "version")
    assert told == printed(capsys, "--version")
    assert told.startswith(f"ringlet {ringlet.__version__}, torch {sys.modules['torch'].__version__}, built by ")


def parsed(*words):
    parser, _ = make_parser()
    return parser.parse_args(words)


def test_options_have_one_meaning_in_all_commands():
    for world in ("--world", "--worlds", "--nproc"):
        for command in ("bench", "tune", "prove"):
            assert parsed(command, world, "2,4-5,4").worlds == (2, 4, 5)
        assert parsed("draw", "ring", world, "3").world == 3
        assert parsed("reveal", "gloo", world, "3").world == 3
        assert parsed("run", world, "3", "x.py").world == 3
    for name in ("--algorithm", "--algorithms"):
        assert parsed("bench", name, "ring,butterfly,ring").algorithms == ("ring", "butterfly")
        assert parsed("prove", name, "ring,butterfly").algorithms == ("ring", "butterfly")
    for name in ("--collective", "--collectives"):
        assert parsed("bench", name, "all_reduce,broadcast").collectives == ("all_reduce", "broadcast")
        assert parsed("tune", name, "all_reduce").collectives == ("all_reduce",)
        assert parsed("prove", name, "all_reduce").collectives == ("all_reduce",)
    assert parsed("bench", "--algorithm", "none").algorithms == ()


def test_flags_of_nccl_tests():
    args = parsed(
        "bench", "-b", "8", "-e", "128M", "-f2", "--iters", "20", "-w", "3", "-c1", "-d", "half", "--op", "prod"
    )
    assert (args.begin_bytes, args.end_bytes, args.factor, args.iterations) == (8, 128 << 20, 2, 20)
    assert (args.warmup, args.check, args.dtype, args.op) == (3, True, "float16", "product")
    assert [options.size(text) for text in ("4", "1K", "64k", "256M", "1G", "1MiB", "1 GB")] == [
        4, 1 << 10, 64 << 10, 256 << 20, 1 << 30, 1 << 20, 1 << 30,
    ]  # fmt: skip


@pytest.mark.parametrize(("flag", "instead"), [("-n", "--iters"), ("-o", "--op"), ("--hosts", "--world")])
def test_bench_refuses_a_flag_that_means_something_else_in_other_commands(flag, instead, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(("bench", flag, "2"))
    assert re.fullmatch(rf"ringlet bench: {flag}: .*give {instead}.*\n", capsys.readouterr().err)


def test_tables_have_rules_on_a_terminal_and_are_plain_elsewhere(monkeypatch, capsys):
    rows = [("ring", "1.5 ", "2"), ("butterfly", "10.0*", "33")]
    terminal.print_table(("what", "time", "number"), rows, title="some")
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == "# some"
    assert lines == ["what        time  number", "ring        1.5        2", "butterfly  10.0*      33"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "24")
    terminal.print_table(("what", "time", "number"), rows, less_telling=("number",))
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "│ butterfly │ 10.0* │\n" in drawn and "33" not in drawn
    words = ("dissemination", "ceil(log2 p)", "all_to_all")
    terminal.print_table(("what", "rounds", "closed form"), [words])
    drawn = capsys.readouterr().out
    assert "…" not in drawn and all(word in drawn for word in words), "too narrow a terminal cuts nothing"


def test_commands_with_tables_say_that_they_need_rich_and_the_others_work(monkeypatch, capsys, untried):
    monkeypatch.setitem(sys.modules, "rich", None)
    for command in ("prove", "bench", "search --hosts 2x2 --machine x", "simulate --world 2 --machine x"):
        assert main(command.split()) == 2
        assert "pip install 'ringlet[cli]'" in capsys.readouterr().err
    assert "prove" in printed(capsys, "--help") and printed(capsys, "draw", "ring")
    assert main(("doctor",)) == 1 and "rich" not in capsys.readouterr().err


def test_a_file_is_tried_without_a_trace(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("text")
    outputs.check({"--json": kept, "--plot": tmp_path / "new", "--report": None})
    assert kept.read_text() == "text" and list(tmp_path.iterdir()) == [kept]
    outputs.check({"--json": tmp_path / "a" / "b" / "new"}, make_folders=True)
    assert list((tmp_path / "a" / "b").iterdir()) == []
    os.mkfifo(tmp_path / "pipe")
    outputs.check({"--json": tmp_path / "pipe"})  # does not wait for a reader


@pytest.mark.parametrize(
    "words",
    [
        "draw ring -o /dev/full.svg",
        "prove --world 2 --algorithm ring --json /dev/full",
        "simulate ring --hosts 2x1 --machine slow-uplinks --sizes 4K --json /dev/full",
        "tune -o /dev/full",
    ],
)
def test_a_full_disk_is_told_with_the_file(words, tmp_path, monkeypatch, capsys):
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")
    monkeypatch.setattr(tune, "_measure", lambda sweeps, sizes: ([], {}))
    monkeypatch.setattr(tune, "_heading", lambda meta, margin: "# measured\n")
    assert main(words.replace("/dev/full.svg", str(full)).split()) == 2
    assert re.fullmatch(r"ringlet \w+: cannot write \S+/full\S*: No space left on device\n", capsys.readouterr().err)


def test_prove_proves_the_collectives_that_are_asked_for(capsys):
    head, *rows = printed(capsys, "prove", "--world", "4", "--collective", "broadcast,gather").splitlines()
    column = head.split().index("collective")
    assert {row.split()[column] for row in rows} == {"broadcast", "gather"}


# --- doctor


def test_doctor_finds_what_the_suite_needs(tmp_path):
    done = ringlet_process("doctor", "--json", tmp_path / "doctor.json")
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert done.returncode == 0 and written["ok"] is True, done.stdout
    states = {(finding["part"], finding["name"]): finding["state"] for finding in written["findings"]}
    for needed in (("build", "torch"), ("transport", "threads"), ("transport", "shared_memory")):
        assert states[needed] == "ok", done.stdout
    for finding in written["findings"]:
        assert finding["state"] in ("ok", "absent", "poor", "fails") and finding["told"]
        if finding["state"] in ("poor", "fails"):
            assert finding["advice"] in done.stdout
    assert done.stderr == ""  # progress is for terminals


@pytest.fixture
def untried(monkeypatch):
    """Transports that are not tried: what they raise is what a rank raises."""

    def fails(name):
        raise RuntimeError("-- Process 0 terminated\nTraceback ...\nringlet.errors.InvalidUsage: it does not work")

    monkeypatch.setattr(doctor, "_try", fails)


WRONG = {
    "RINGLET_ALGORITHMS": ("/missing/mine.py", "cannot read the file"),
    "RINGLET_HEAP_MIB": ("lots", "a number of MiB from 32 up"),
    "RINGLET_CPU_KERNELS": ("none-such", "one of the kernels"),
    "RINGLET_TABLE": ("/missing/table", "No such file"),
    "RINGLET_TRANSPORT": ("pigeon", "one of auto, shared_memory, tcp, threads"),
    "RINGLET_INTERFACE": ("none0", "there are: "),
    "RINGLET_TCP_CONGESTION": ("none-such", "tcp_allowed_congestion_control"),
    "RINGLET_TOPOLOGY": ("round", "ignore"),
    "RINGLET_GPU_HEAP_MIB": ("-1", "a number of MiB"),
    "RINGLET_PEER_MEMORY_BYTES": ("1K", "a number of bytes"),
    "RINGLET_CUDA_LIBRARY": ("/missing.so", "the path of a CUDA library"),
    "RINGLET_LOG": ("loud", "one of off, warning, info, debug"),
    "RINGLET_LOG_FILE": ("/missing/log", "a folder that is there"),
    "RINGLET_NCCL_LIBRARY": ("/missing.so", "the path of an NCCL library"),
}


def test_doctor_names_each_variable_that_is_wrong_and_what_it_takes(untried, monkeypatch, capsys):
    for name, (value, _) in WRONG.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RINGLET_HAEP_MIB", "64")
    assert main(("doctor",)) == 1
    told = capsys.readouterr().out
    for name, (_, takes) in WRONG.items():
        line = next(line for line in told.splitlines() if line.split()[:2] == ["variables", name])
        assert " fails " in line and takes in line, line
        assert f"  {name}: set {name} to " in told
    assert re.search(r"RINGLET_HAEP_MIB +poor +is no variable of ringlet", told)
    assert "did you mean RINGLET_HEAP_MIB?" in told
    assert (
        f"threads, shared_memory, tcp: first correct the variables that fail above: {', '.join(sorted(WRONG))}" in told
    )
    assert "build ringlet again" not in told


def test_variables_that_are_right_are_no_problem():
    assert set(WRONG) | {"RINGLET_HOST_ID"} == set(variables.VARIABLES)
    right = {
        "RINGLET_HEAP_MIB": "32",
        "RINGLET_CPU_KERNELS": "portable",
        "RINGLET_TOPOLOGY": "ignore",
        "RINGLET_TABLE": "",
    }
    assert (
        list(variables.problems(right | {"RINGLET_GPU_HEAP_MIB": "0", "RINGLET_TRANSPORT": "tcp", "HOME": "/x"})) == []
    )


def test_the_page_and_doctor_know_the_same_variables():
    page = (ROOT / "docs" / "start.md").read_text()
    table = page[page.index("## Environment variables") :]
    assert set(re.findall(r"RINGLET_[A-Z_]+", table)) == set(variables.VARIABLES)


def test_doctor_goes_on_whatever_a_part_raises(untried, monkeypatch, capsys, tmp_path):
    def broken(*arguments):
        raise FileNotFoundError(2, "No such file or directory", "/proc/self")

    for owner, name in ((doctor.os, "sched_getaffinity"), (doctor._C, "kernels")):
        monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(doctor, "congestion_controls", broken)
    assert main(("doctor",)) == 1
    told = capsys.readouterr().out
    for part in ("host", "kernels", "transport"):
        assert re.search(rf"^{part} +\(rest\) +fails +the check raised: .*/proc/self", told, re.MULTILINE), told
    assert "gpu        CUDA" in told, "the parts after it are examined"


# --- exit codes


def test_a_reader_that_leaves_is_no_failure():
    command = f"{sys.executable} -m ringlet draw ring --world 32 | head -n 1"
    done = ended("bash", "-o", "pipefail", "-c", command)
    # What the pipe holds is written before the reader leaves, or not.
    assert done.returncode in (0, 128 + signal.SIGPIPE) and done.stderr == ""
    assert "ring all_reduce" in done.stdout


def test_an_interrupt_is_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert main(("doctor",)) == 130
    assert capsys.readouterr().err == "ringlet doctor: interrupted\n"


class ReaderLeft(io.StringIO):
    """stdout whose reader has left, which a write or, if it is buffered, a flush notices."""

    def __init__(self, *, buffered):
        super().__init__()
        self.buffered, self.pipe = buffered, os.open(os.devnull, os.O_WRONLY)

    def write(self, text):
        if not self.buffered:
            raise BrokenPipeError
        return len(text)

    def flush(self):
        raise BrokenPipeError

    def fileno(self):
        return self.pipe


def test_a_reader_that_leaves_changes_no_exit_code(monkeypatch):
    monkeypatch.setattr(doctor, "doctor_command", lambda args: print("told") or 1)
    for buffered, code in ((True, 1), (False, 141)):
        monkeypatch.setattr(sys, "stdout", ReaderLeft(buffered=buffered))
        assert main(("doctor",)) == code


def test_drawings_are_printed_in_any_encoding():
    drawn = {}
    for encoding in ("utf-8", "ascii", "latin-1", "ascii:surrogateescape"):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "ringlet", "draw", "swing", "--world", "4"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
        drawn[encoding] = done.stdout.decode(encoding.partition(":")[0]).splitlines()
    assert "".join(drawn["ascii"]).isascii() and not "".join(drawn["utf-8"]).isascii()
    for lines in drawn.values():
        assert [len(line) for line in lines] == [len(line) for line in drawn["utf-8"]]


def test_a_closed_stdout_is_no_failure():
    command = f"{sys.executable} -m ringlet draw ring >&-"
    done = ended("bash", "-c", command)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_a_file_runs_is_130(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("raise KeyboardInterrupt\n")
    try:
        assert main(("draw", str(tmp_path / "mine.py"))) == 130
    except KeyboardInterrupt:  # it would end the test run
        pytest.fail("the interrupt came through")
    assert capsys.readouterr().err == "ringlet: interrupted\n"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGRTMIN + 6, "signal 40")])
def test_a_rank_that_a_signal_ended_is_told(number, name, tmp_path, capsys):
    program = tmp_path / "ends.py"
    program.write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    assert main(("run", "-n", "1", str(program))) == 128 + number
    assert f"ringlet run: rank 0 was ended by {name}" in capsys.readouterr().err
