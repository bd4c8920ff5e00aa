"""What commands show: tables and progress, drawn by rich, and near names.

rich comes with the extra `cli`. Commands that print tables need it, and say so before their work begins.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ringlet.errors import InvalidUsage

_KEPT = "\ue000"  # rich breaks lines at a space, and cuts it off at the end of a cell

Progress = Callable[[int, int, str], None]  # done, of how many, what is being done


def require_rich() -> None:
    """InvalidUsage if rich is not installed."""
    if importlib.util.find_spec("rich") is None:
        raise InvalidUsage("this command prints tables with rich, which is not installed: pip install 'ringlet[cli]'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing if nothing known is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Iterable[int] = (0,),
    title: str = "",
    less_telling: Sequence[str] = (),
) -> None:
    """Prints a table, however wide it is: with rules on a terminal, and in plain columns elsewhere.

    words: the columns of words; the others are of numbers. less_telling: columns to leave out, in this order, until the
    table fits the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, left = Console(highlight=False), set(words)

    def drawn(names: Sequence[str]) -> Table:
        table = Table(box=box.HEAVY_HEAD if console.is_terminal else None, pad_edge=console.is_terminal)
        shown = [index for index, name in enumerate(columns) if name in names]
        for index in shown:
            header = columns[index].replace(" ", "\n") if console.is_terminal else columns[index]
            table.add_column(header, justify="left" if index in left else "right")
        for row in rows:
            table.add_row(*(row[index].replace(" ", _KEPT) for index in shown))
        return table

    names, dropped = list(columns), list(less_telling)
    anything = console.options.update(width=1 << 16)
    while console.is_terminal and dropped and console.measure(drawn(names), options=anything).maximum > console.width:
        names.remove(dropped.pop(0))
    table = drawn(names)
    # A table that is cut loses figures: if it does not fit, the terminal breaks its lines.
    console.width = max(console.width, console.measure(table, options=anything).maximum)
    if title:
        print(f"\n# {title}")
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.replace(_KEPT, " ").rstrip())


@contextlib.contextmanager
def progress(what: str, *, lines: bool = False) -> Iterator[Progress]:
    """A bar on a terminal, gone at the end; none without rich. lines: elsewhere, a line for each tenth."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _in_lines(what) if lines else lambda done, total, told: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, told: bar.update(task, total=total, completed=done, description=told)


def _in_lines(what: str) -> Progress:
    started, tenths = time.monotonic(), 0
    print(what, file=sys.stderr, flush=True)

    def update(done: int, total: int, told: str) -> None:
        nonlocal tenths
        if done * 10 // total > tenths:
            tenths = done * 10 // total
            print(f"{done}/{total}, {time.monotonic() - started:.0f} s: {told}", file=sys.stderr, flush=True)

    return update
