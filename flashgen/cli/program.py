"""The commands: each is one stage of the pipeline, or all of them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from flashgen.cli import arguments as declared
from flashgen.cli.console import refuse, say
from flashgen.errors import FlashgenError
from flashgen.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A compiler for attention kernels: a few lines of Python become a verified CUDA kernel.",
    epilog="Environment: FLASHGEN_ARCH, FLASHGEN_BACKEND, FLASHGEN_CACHE_DIR, FLASHGEN_DEBUG, "
    "FLASHGEN_EMULATOR_SUMS, FLASHGEN_OVERRIDE, FLASHGEN_TRUST. Exit status: 0 done, 1 a result is "
    "wrong or a file differs, 2 refused.",
)


def command(made_of: type[Any]) -> None:
    """Registers the command of a dataclass: its fields are the options, its docstring is the help.

    The function and the module have the name of the command. The module is imported when the
    command runs, so that --help and `plan` do not load torch. A FlashgenError is printed as its
    four lines and ends the program with `REFUSED`.
    """
    name = made_of.__name__.removesuffix("Arguments").lower()

    def run(**options: Any) -> None:
        given = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        try:
            getattr(import_module(f"flashgen.cli.{name}"), name)(made_of(**given))
        except FlashgenError as error:
            refuse(error)

    run.__signature__ = signature_of(made_of)  # type: ignore[attr-defined]
    app.command(name, help=made_of.__doc__)(run)


def signature_of(made_of: type[Any]) -> Signature:
    """The signature from which typer makes a command: a parameter for each field."""
    hints = get_type_hints(made_of, include_extras=True)
    parameters = []
    for field in fields(made_of):
        hint, default = hints[field.name], field.default
        value, option = get_args(hint)
        if get_origin(value) is tuple:  # typer's type of an option that may be repeated is a list
            hint, default = Annotated[list[str], option], []
        default = Parameter.empty if default is MISSING else default
        parameters.append(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    return Signature(parameters)


def _version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options that do not belong to a command: --version."""


for made_of in declared.COMMANDS:
    command(made_of)


def main() -> None:
    """Entry of the program."""
    app()
