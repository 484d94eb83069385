"""The commands: each is one stage of the pipeline, or all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

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
    "FLASHGEN_OVERRIDE. Exit status: 0 done, 1 a result is wrong or a file differs, 2 refused.",
)

A = TypeVar("A")


def command(function: Callable[[A], None]) -> Callable[[A], None]:
    """Registers a function of one dataclass as a command, whose options are the fields.

    A FlashgenError is printed as its four lines and ends the program with `REFUSED`.
    """
    made_of: type[Any] = get_type_hints(function)["arguments"]

    def run(**options: Any) -> None:
        given = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        try:
            function(made_of(**given))
        except FlashgenError as error:
            refuse(error)

    run.__signature__ = signature_of(made_of)  # type: ignore[attr-defined]
    app.command(function.__name__, help=function.__doc__)(run)
    return function


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


# Each command imports its module only when it runs, so that --help and `plan` do not load torch.


@command
def run(arguments: declared.RunArguments) -> None:
    """Analyse, plan, emit, compile, execute and compare with the float64 oracle."""
    from flashgen.cli.run import run

    run(arguments)


@command
def profile(arguments: declared.ProfileArguments) -> None:
    """Count the work of kernels in the emulator, beside the plan's predictions and the roofline."""
    from flashgen.cli.profile import profile

    profile(arguments)


@command
def plan(arguments: declared.PlanArguments) -> None:
    """Print the tiles, warps and shared memory, and how they are derived."""
    from flashgen.cli.plan import plan

    plan(arguments)


@command
def tune(arguments: declared.TuneArguments) -> None:
    """Rank the tiles for a shape; on a GPU measure the best and remember the winner."""
    from flashgen.cli.tune import tune

    tune(arguments)


@command
def emit(arguments: declared.EmitArguments) -> None:
    """Write the CUDA files of specs, or check that they are up to date.

    With SPECS, every kernel of these specs is a file of the folder.

    Without SPECS, the folder gets three parts, made from every file in specs/ for sm_80 and sm_90a:
    gallery/, the whole files that its README.md links to; specs/, the functions made from each
    spec; and DIGESTS, a digest of each kernel.
    """
    from flashgen.cli.emit import emit

    emit(arguments)


@command
def inspect(arguments: declared.InspectArguments) -> None:
    """Compile a spec and look at the result."""
    from flashgen.cli.inspect import inspect

    inspect(arguments)


@command
def cache(arguments: declared.CacheArguments) -> None:
    """List or remove compiled kernels."""
    from flashgen.cli.cache import cache

    cache(arguments)


def main() -> None:
    """Entry of the program."""
    app()
