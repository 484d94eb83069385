"""The output of commands: plain and complete when piped, coloured on a terminal."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashgen.shared import config
from flashgen.shared.errors import FlashgenError

_PIPED_WIDTH = 4000  # in a pipe no line is broken or cut
_SLOW_SECONDS = 1.0


def console(*, stderr: bool = False) -> Console:
    """A console on the present stdout or stderr, which tests and redirections replace."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(text: str | Text = "", *, style: str | None = None) -> None:
    """One line or paragraph on stdout."""
    console().print(text, style=style, soft_wrap=True)


def write(text: str) -> None:
    """Text without any change, for output that another program may read."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_rows(rows: Sequence[tuple[str, str | Text]]) -> None:
    """A table of names and values, one row a line; long values are folded, never cut."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    _print_table(table)


def listing(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ("bytes",)
) -> None:
    """A table with titled columns; columns named in ``right`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title in right else "left")
    for row in rows:
        table.add_row(*row)
    _print_table(table)


def _print_table(table: Table) -> None:
    out = console()
    with out.capture() as captured:
        out.print(table)
    # Tables pad every row to its full width, which pipes and copies should not carry.
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    out.file.write(text + "\n")


@contextmanager
def busy(message: str) -> Iterator[Callable[[], None]]:
    """Prints on stderr the step that runs, when it takes longer than a second.

    Yields:
        A function that removes the spinner from a terminal, for a report that follows it.
    """
    err = console(stderr=True)
    status = err.status(message) if err.is_terminal else None

    def show() -> None:
        if status is not None:
            status.start()
        else:
            err.print(f"{message} ...")

    timer = threading.Timer(_SLOW_SECONDS, show)
    timer.daemon = True
    timer.start()

    def stop() -> None:
        timer.cancel()
        timer.join()
        if status is not None:
            status.stop()

    try:
        yield stop
    finally:
        stop()


def print_error(error: FlashgenError, cause: BaseException | None) -> None:
    """Prints the four lines of an error on stderr, below the traceback of ``cause``."""
    err = console(stderr=True)
    if cause is not None:
        err.print("".join(traceback.format_exception(cause)), style="dim", soft_wrap=True)
    kind = Text(f"{type(error).__name__}: ", style="bold red")
    first, *rest = str(error).splitlines()
    err.print(kind + Text(first, style="bold"), soft_wrap=True)
    for line in rest:
        label = line[:11]
        text = Text(label, style="green" if label.strip() == "try" else "cyan") + Text(line[11:])
        err.print(text, soft_wrap=True)


def debugging() -> bool:
    """Whether FLASHGEN_DEBUG is 1 or more."""
    try:
        return config.debug_level() > 0
    except FlashgenError:
        return False


def seconds(value: float) -> str:
    """A time with three figures and a unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError("the last unit has no lower limit")


def plural(count: int, word: str, many: str | None = None) -> str:
    return f"{count:,} {word if count == 1 else many or word + 's'}"
