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
    section: str = "",
    wrong: Callable[[Sequence[str]], bool] | None = None,
) -> None:
    """Prints a table: with rules on a terminal, and elsewhere in columns, however wide they are.

    words: the columns of words; the others are of numbers. less_telling: columns to leave out, in this order, until the
    table fits the terminal. section: a column, between different values of which a rule stands. wrong: a row in red.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    left, shown, dropped = set(words), list(range(len(columns))), list(less_telling)
    console = Console(highlight=False)
    cells = [max((len(row[index]) for row in rows), default=0) for index in shown]
    whole = [max(width, len(name)) for width, name in zip(cells, columns, strict=True)]
    broken = [max(width, *map(len, name.split(" "))) for width, name in zip(cells, columns, strict=True)]

    def total(widths: Sequence[int]) -> int:
        return 1 + sum(3 + widths[index] for index in shown)

    while console.is_terminal and dropped and total(broken) > console.width:
        name = dropped.pop(0)
        shown = [index for index in shown if columns[index] != name]
    # Headers are broken at spaces if that makes the table fit. A table that is cut loses figures: if it does not fit,
    # the terminal breaks its lines.
    widths = whole if not console.is_terminal or total(whole) <= console.width else broken
    console.width = max(console.width, total(widths))
    table = Table(box=box.HEAVY_HEAD if console.is_terminal else None, pad_edge=console.is_terminal)
    for index in shown:
        table.add_column(columns[index], justify="left" if index in left else "right", width=widths[index])
    of = columns.index(section) if section else 0
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = bool(section) and following is not None and row[of] != following[of]
        style = "red" if wrong and wrong(row) else None
        table.add_row(*(row[index].replace(" ", _KEPT) for index in shown), style=style, end_section=ends)
    if title:
        print(f"\n# {title}")
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.replace(_KEPT, " ").rstrip())


@contextlib.contextmanager
def progress(what: str, *, lines: bool = False) -> Iterator[Progress]:
    """A bar on a terminal, gone at the end; a plain one without rich. lines: elsewhere, a line for each tenth."""
    if not sys.stderr.isatty():
        yield _in_lines(what) if lines else lambda done, total, told: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield lambda done, total, told: None
        return
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
