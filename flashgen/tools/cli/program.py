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

from flashgen.shared.errors import FlashgenError, InputError
from flashgen.tools.cli import arguments as declared
from flashgen.tools.cli.console import say
from flashgen.tools.cli.ending import EXIT_CODES, finish
from flashgen.version import __version__


class CommandGroup(TyperGroup):
    """The group of all commands; every way to start the program ends in `finish`."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        line = sys.argv[1:] if args is None else args
        options["standalone_mode"] = False
        finish(partial(super().main, line, *rest, **options), line)


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A compiler for attention kernels: a few lines of Python become a verified CUDA kernel.",
    epilog="Environment: FLASHGEN_ARCH, FLASHGEN_BACKEND, FLASHGEN_BATCH_INVARIANT, "
    "FLASHGEN_CACHE_DIR, FLASHGEN_CHECK_READS, FLASHGEN_DEBUG, FLASHGEN_EMULATOR_ORDER, "
    "FLASHGEN_EMULATOR_SUMS, FLASHGEN_NATIVE, FLASHGEN_OVERRIDE, FLASHGEN_TRUST. "
    f"Exit status: {EXIT_CODES}",
)
groups: dict[str, typer.Typer] = {}
"""The commands of two words, such as ``cache list``, by their first word."""


def command(arguments_type: type[Any]) -> None:
    """Registers the command of a dataclass: its fields are the options, its docstring is the help.

    ``CacheListArguments`` is the command ``cache list``, which is the function ``cache_list`` of
    the module ``cache``; ``BuildNativeArguments`` is ``build-native``, because no group has the
    name ``build``. The module is imported when the command runs, so that --help and `plan` do
    not load torch.
    """
    words = re.findall("[a-z]+", re.sub("([A-Z])", r" \1", arguments_type.__name__).lower())[:-1]
    module, function = f"flashgen.tools.cli.{words[0]}", "_".join(words)

    def run(**options: Any) -> None:
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        try:
            _check_companions(values, arguments_type)
            getattr(import_module(module), function)(arguments_type(**values))
        except FlashgenError as error:
            _name_options(error, values, arguments_type)
            raise

    run.__signature__ = signature_of(arguments_type)  # type: ignore[attr-defined]
    if words[0] in declared.GROUPS:
        if words[0] not in groups:
            groups[words[0]] = typer.Typer(no_args_is_help=True)
            app.add_typer(groups[words[0]], name=words[0], help=declared.GROUPS[words[0]])
        groups[words[0]].command(words[-1], help=arguments_type.__doc__)(run)
    else:
        app.command("-".join(words), help=arguments_type.__doc__)(run)


def _check_companions(values: dict[str, Any], arguments_type: type[Any]) -> None:
    """Checks that options whose help begins with "With --a and --b:" are given with these.

    Raises:
        InputError: one would have no effect.
    """
    changed_flags = _changed_flags(values, arguments_type)
    for field, _, option in _options(arguments_type):
        flag = _flag(field.name, option)
        named = re.match(r"With (--\S+(?:(?: and | or )--\S+)*):", option.help or "")
        if field.name not in changed_flags or named is None:
            continue
        needed = named[1].split(" or ")
        if not any(set(x.split(" and ")) <= set(changed_flags.values()) for x in needed):
            value = values[field.name]
            words = value if isinstance(value, tuple) else () if value is True else (value,)
            raise InputError(
                f"the option {flag} has no effect without {named[1]}",
                where=f"option {flag}",
                numbers=" ".join([flag, *map(str, words)]),
                way_out=f"{declared.EXAMPLES[needed[0]]} beside it, or leave {flag} out",
            )


def _name_options(error: FlashgenError, values: dict[str, Any], arguments_type: type[Any]) -> None:
    """Words an error about an argument of a function as one about the option that gives it.

    Arguments that a line of a spec file gives keep their names in Python, and so do arguments
    without an option on this command line, and arguments whose options keep their defaults.
    """
    if re.search(r"\.py:\d+$", error.where):
        return
    changed_flags = _changed_flags(values, arguments_type)
    open_ones = {
        field.name: _flag(field.name, option)
        for field, _, option in _options(arguments_type)
        if isinstance(option, OptionInfo) and field.default is None
    }
    flags = {declared.ARGUMENTS.get(x, x): flag for x, flag in (open_ones | changed_flags).items()}
    names = (text.partition("=")[0].strip() for text in values.get("scalars", ()))
    flags |= {name: f"--scalar {name}" for name in names}
    argument = re.match(r"argument (\w+)(?: of flashgen\S+)?$|(?:plan\()?(\w+)=", error.where)
    flag = flags.get(argument[1] or argument[2]) if argument else None
    if argument and argument[1] and flag is None and "scalars" in values:
        from flashgen.tools.cli.inputs import example_of

        location, is_scalar = example_of(values["path"], argument[1])
        error.where = location or error.where
        flags |= {argument[1]: f"--scalar {argument[1]}"} if is_scalar else {}
    if argument and flag and (argument[1] or flag in changed_flags.values()):
        error.where = f"option {flag}"

    def option_of(match: re.Match[str]) -> str:
        name, _, text, rows, keys = match.groups()
        flag = flags.get(name)
        if flag is None:
            return match[0]
        return f"{flag}{'=' if ' ' in flag else ' '}{text or f'{rows}x{keys}'}"

    value = r"(\"?)([\w.+-]+)\2|\((\d+), (\d+)\)"
    error.way_out = re.sub(rf"(?<!-)(?<!--scalar )\b(\w+)=(?:{value})", option_of, error.way_out)
    if flag and error.where == f"option {flag}" and "fg." in error.way_out:
        helps = {_flag(x.name, option): option.help for x, _, option in _options(arguments_type)}
        error.way_out = f"{flag}: {helps[flag]}" if flag in helps else error.way_out


def _changed_flags(values: dict[str, Any], arguments_type: type[Any]) -> dict[str, str]:
    """The options that have another value than their default, by name, as they are typed."""
    return {
        field.name: _flag(field.name, option)
        for field, _, option in _options(arguments_type)
        if isinstance(option, OptionInfo) and values[field.name] not in (field.default, ())
    }


def signature_of(arguments_type: type[Any]) -> Signature:
    """The signature from which typer makes a command: a parameter for each field."""
    parameters = []
    for field, value, option in _options(arguments_type):
        default: Any = Parameter.empty if field.default is MISSING else field.default
        if get_origin(value) is tuple:  # typer's type of an option that may be repeated is a list
            value = list[get_args(value)[0]]  # type: ignore[misc]
            default = [] if default == () else default
        hint: Any = Annotated[value, option]
        parameters.append(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    return Signature(parameters)


def _options(
    arguments_type: type[Any],
) -> Iterator[tuple[Field[Any], Any, OptionInfo | ArgumentInfo]]:
    """Each field of a command's arguments, the type of its value and its declaration for typer."""
    hints = get_type_hints(arguments_type, include_extras=True)
    for field in fields(arguments_type):
        value, *declared = get_args(hints[field.name])
        limits = declared.pop() if isinstance(declared[-1], dict) else {}
        if isinstance(declared[0], str):
            *metavar, text = declared
            flags = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
            declared = [Option(*flags, metavar=(metavar or [None])[0], help=text, **limits)]
        yield field, value, declared[0]


def _flag(field: str, option: OptionInfo | ArgumentInfo) -> str:
    """The long name of an option; typer takes the first one that is given for a default."""
    declarations = (option.default, *(option.param_decls or ()))
    named = [x for x in declarations if isinstance(x, str) and x.startswith("--")]
    return named[0] if named else f"--{field.replace('_', '-')}"


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


for arguments_type in declared.COMMANDS:
    command(arguments_type)


def main() -> None:
    """Entry of the program."""
    app()
