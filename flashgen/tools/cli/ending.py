"""The end of the program: its exit status, and every failure as four lines on stderr.

This is the one place where exceptions of commands are caught.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TextIO, cast

import typer

from flashgen.shared.errors import FlashgenError, InputError
from flashgen.tools.cli.console import debugging, print_error

MISMATCH = 1
REFUSED = 2
INTERRUPTED = 130
UNREAD = 141
"""Exit statuses: the result is wrong or a file differs; the command could not be carried out;
Ctrl-C, 128 + SIGINT; the output is closed by its reader, 128 + SIGPIPE as in a shell."""

EXIT_CODES = (
    f"0 done, {MISMATCH} a result is wrong or a file differs, {REFUSED} refused, "
    f"{INTERRUPTED} interrupted, {UNREAD} the output was closed by its reader."
)

# The base class of the errors of command lines; typer exports only classes derived from it.
_CommandLineError = cast(type[Exception], typer.BadParameter.__mro__[2])

_OUT_OF_MEMORY = ("allocate memory", "out of memory", "Storage size calculation overflowed")
"""Parts of the messages of torch's RuntimeErrors for tensors that no memory can hold."""


def finish(program: Callable[[], object], line: Sequence[str]) -> NoReturn:
    """Runs the program and exits with its status.

    Args:
        program: returns its exit status, or None for 0; typer's ``main`` without standalone mode.
        line: the words of the command line, for messages about it.
    """
    try:
        if sys.stdout is None:  # closed by the caller, as by >&-
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        for stream in (sys.stdout, sys.stderr):
            _encode(stream)
        returned = program()
        sys.stdout.flush()
        status = returned if isinstance(returned, int) else 0
    except (SystemExit, OSError) as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error
        status = _file_error_status(cause) if isinstance(cause, OSError) else REFUSED
    except typer.Abort:
        status = INTERRUPTED
    except _CommandLineError as error:
        # Without arguments, typer has printed the help.
        helped = type(error).__name__ == "NoArgsIsHelpError"
        status = REFUSED if helped else _reported(_command_line_error(error, line))
    except Exception as error:
        status = _reported(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # after an error, of which the status tells
            _discard(stream)
    sys.exit(status)


def _encode(stream: TextIO) -> None:
    """A pipe or a file gets UTF-8, whatever the code page; a terminal "?" for what it lacks."""
    if isinstance(stream, io.TextIOWrapper):
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="replace")


def _file_error_status(error: OSError) -> int:
    """The status after an error of a file; one without a name is the standard output."""
    if error.filename is not None:
        return _reported(error)
    _discard(sys.stdout)
    return UNREAD if isinstance(error, BrokenPipeError) else _reported(error)


def _discard(stream: TextIO) -> None:
    """Directs the rest of the output to nowhere: Python writes it once more when it exits."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
    except (OSError, ValueError, AttributeError):
        return  # no file is behind the stream
    os.close(nowhere)


def _reported(error: Exception) -> int:
    """Prints an error as four lines. FLASHGEN_DEBUG of 1 or more adds the traceback."""
    with suppress(OSError, AttributeError):  # where stderr is closed, the status remains
        print_error(four_lines(error), error if debugging() else None)
    return REFUSED


def four_lines(error: Exception) -> FlashgenError:
    """The error itself, or for an error of another family one of ours that explains it."""
    if isinstance(error, FlashgenError):
        return error
    if isinstance(error, OSError):
        return InputError(
            "a file cannot be read or written",
            where=str(error.filename or "the standard output"),
            numbers=error.strerror or str(error),
            way_out="another path, or an output that is open and has space",
        )
    if isinstance(error, MemoryError) or any(part in str(error) for part in _OUT_OF_MEMORY):
        return InputError(
            "there is not enough memory for this call",
            where="option --shape",
            numbers=str(error).splitlines()[0] if str(error) else type(error).__name__,
            way_out="a smaller --shape",
        )
    if isinstance(error, ModuleNotFoundError) and _is_package(error.name):
        return InputError(
            "a package that this command needs is not installed",
            where=f"the environment of {sys.executable}",
            numbers=str(error),
            way_out=f"pip install {error.name}",
        )
    return _unexpected_error(error)


def _is_package(module: str | None) -> bool:
    """Whether a module that is missing is a whole package, and none of flashgen's own."""
    return module is not None and "." not in module and module not in ("flashgen", "ptx_emulator")


def _command_line_error(error: Exception, line: Sequence[str]) -> FlashgenError:
    """A wrong option or argument, as typer finds it."""
    command = getattr(getattr(error, "ctx", None), "command_path", "flashgen")
    text = getattr(error, "format_message", error.__str__)()
    return InputError(
        " ".join(text.split()).removesuffix("."),
        where=f"the command line of {command}",
        numbers=f"given {shlex.join(line)[:400]}",
        way_out=f"{command} --help",
    )


def _unexpected_error(error: Exception) -> FlashgenError:
    """An error that no part of flashgen expects."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1] if frames else None
    return FlashgenError(
        f"flashgen has a bug: {type(error).__name__}",
        where="unknown" if inner is None else f"{os.path.basename(inner.filename)}:{inner.lineno}",
        numbers=" ".join(str(error).split())[:400] or "no message",
        way_out="FLASHGEN_DEBUG=1 shows the traceback; please report it with `flashgen doctor`",
    )
