"""The commands: each is one stage of the pipeline, or all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer
from typer import Option
from typer.core import TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from flashgen.shared.errors import InputError
from flashgen.tools.cli import arguments as declared
from flashgen.tools.cli.console import say
from flashgen.tools.cli.ending import EXIT_CODES, finish
from flashgen.version import __version__


class Program(TyperGroup):
    """The group of all commands; every way to start the program ends in `finish`."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        line = sys.argv[1:] if args is None else args
        options["standalone_mode"] = False
        finish(partial(super().main, line, *rest, **options), line)


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A compiler for attention kernels: a few lines of Python become a verified CUDA kernel.",
    epilog="Environment: FLASHGEN_ARCH, FLASHGEN_BACKEND, FLASHGEN_CACHE_DIR, FLASHGEN_DEBUG, "
    "FLASHGEN_EMULATOR_ORDER, FLASHGEN_EMULATOR_SUMS, FLASHGEN_NATIVE, FLASHGEN_OVERRIDE, "
    "FLASHGEN_TRUST. "
    f"Exit status: {EXIT_CODES}",
)
groups: dict[str, typer.Typer] = {}
"""The commands of two words, such as ``cache list``, by their first word."""


def command(made_of: type[Any]) -> None:
    """Registers the command of a dataclass: its fields are the options, its docstring is the help.

    ``CacheListArguments`` is the command ``cache list``, which is the function ``cache_list`` of
    the module ``cache``; ``BuildNativeArguments`` is ``build-native``, because no group has the
    name ``build``. The module is imported when the command runs, so that --help and `plan` do
    not load torch.
    """
    words = re.findall("[a-z]+", re.sub("([A-Z])", r" \1", made_of.__name__).lower())[:-1]
    module, function = f"flashgen.tools.cli.{words[0]}", "_".join(words)

    def run(**options: Any) -> None:
        given = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        try:
            getattr(import_module(module), function)(made_of(**given))
        except InputError as error:
            raise _of_options(error, made_of) from None

    run.__signature__ = signature_of(made_of)  # type: ignore[attr-defined]
    if words[0] in declared.GROUPS:
        if words[0] not in groups:
            groups[words[0]] = typer.Typer(no_args_is_help=True)
            app.add_typer(groups[words[0]], name=words[0], help=declared.GROUPS[words[0]])
        groups[words[0]].command(words[-1], help=made_of.__doc__)(run)
    else:
        app.command("-".join(words), help=made_of.__doc__)(run)


def _of_options(error: InputError, made_of: type[Any]) -> InputError:
    """An error about an argument of a function, where the argument is an option of the command."""
    name = error.where.removeprefix("argument ")
    option = {field.name: option for field, _, option in _options(made_of)}.get(name)
    if error.where == name or not isinstance(option, OptionInfo):
        return error
    flag, way_out = _flag(name), error.way_out
    if re.search(r"\bfg\.|\w=", way_out):  # it is written in Python
        way_out = f"{flag}: {option.help}"
    return type(error)(error.what, where=f"option {flag}", numbers=error.numbers, way_out=way_out)


def signature_of(made_of: type[Any]) -> Signature:
    """The signature from which typer makes a command: a parameter for each field."""
    parameters = []
    for field, value, option in _options(made_of):
        default: Any = Parameter.empty if field.default is MISSING else field.default
        if get_origin(value) is tuple:  # typer's type of an option that may be repeated is a list
            value, default = list[get_args(value)[0]], []  # type: ignore[misc]
        hint: Any = Annotated[value, option]
        parameters.append(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    return Signature(parameters)


def _options(made_of: type[Any]) -> Iterator[tuple[Field[Any], Any, OptionInfo | ArgumentInfo]]:
    """Each field of a command's arguments with the type of its value and what it is for typer."""
    hints = get_type_hints(made_of, include_extras=True)
    for field in fields(made_of):
        value, *declared = get_args(hints[field.name])
        limits = declared.pop() if isinstance(declared[-1], dict) else {}
        if isinstance(declared[0], str):
            *metavar, text = declared
            flags = [_flag(field.name)] if field.default is False else []
            declared = [Option(*flags, metavar=(metavar or [None])[0], help=text, **limits)]
        yield field, value, declared[0]


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options that do not belong to a command: --version."""


for made_of in declared.COMMANDS:
    command(made_of)


def main() -> None:
    """Entry of the program."""
    app()
