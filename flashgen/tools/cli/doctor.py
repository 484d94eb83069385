"""``flashgen doctor``: the state of flashgen on this machine, on one screen."""

from __future__ import annotations

import json

import typer

from flashgen.tools.cli.arguments import DoctorArguments
from flashgen.tools.cli.console import busy, console, write


def doctor(arguments: DoctorArguments) -> None:
    """Prints a diagnosis and exits with its status; progress goes to stderr."""
    with busy("loading torch"):
        from flashgen.tools.doctor.diagnosis import diagnose

    err = console(stderr=True)
    status = err.status("looking at versions") if err.is_terminal else None
    if status is not None:
        status.start()
    try:
        diagnosis = diagnose(arguments.device, tell=status.update if status else lambda text: None)
    finally:
        if status is not None:
            status.stop()
    write(json.dumps(diagnosis.as_dict(), indent=1) if arguments.json else str(diagnosis))
    raise typer.Exit(diagnosis.exit_code)
