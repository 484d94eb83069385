"""``flashgen export``: the kernels of specs as files, for `flashgen.load_export` and for C."""

from __future__ import annotations

import shlex
from itertools import chain
from pathlib import Path

from flashgen.calls.export import ExportRequest
from flashgen.calls.export import export as export_spec
from flashgen.calls.export.c_source import c_name, why_no_sources
from flashgen.calls.exported.manifest import PathRecord
from flashgen.shared.arch import facts
from flashgen.shared.dtypes import number_of_digits
from flashgen.shared.errors import InputError
from flashgen.tools.cli.arguments import ExportArguments
from flashgen.tools.cli.console import busy, plural, say
from flashgen.tools.cli.inputs import arch_of, changed_spec, check_folder, options_of


def export(arguments: ExportArguments) -> None:
    """Writes one spec to the folder, or each of several to a folder of its name in it."""
    archs = _archs(arguments)
    paths = tuple(dict.fromkeys(arguments.specs))
    specs = [changed_spec(path, arguments) for path in paths]
    names = [str(spec.name) for spec in specs]
    if len(set(names)) < len(names):
        raise InputError(
            "two specs would be exported to the same folder",
            where="arguments SPECS",
            numbers=f"names {', '.join(names)}",
            way_out='fg.AttentionSpec(..., name="another_name"), or two commands with -o',
        )
    for path, spec in zip(paths, specs, strict=True):
        folder = arguments.output if len(specs) == 1 else arguments.output / str(spec.name)
        check_folder(next(p for p in (folder, *folder.absolute().parents) if p.exists()), "-o")
        request = ExportRequest(
            spec=spec,
            archs=archs,
            backward=arguments.backward,
            calls=arguments.calls,
            heads_per_tile=_numbers(arguments.heads_per_tile),
            positions=arguments.positions,
            command=_command(arguments, path, folder, archs),
        )
        with busy(f"exporting {path}"):
            manifest = export_spec(request, folder)
        record = manifest.programs[0]
        reason = why_no_sources(record)
        for_c = (
            f"no C sources: {reason}" if reason else f"{c_name(record)}.h and {c_name(record)}.c"
        )
        kernels = plural(len(manifest.kernels), "kernel")
        say(f"{folder.as_posix()}: {kernels} for {', '.join(archs)}; {for_c}")
        if arguments.backward and record.no_backward:
            say(f"no backward kernels: {record.no_backward[0]}")
        for line in dict.fromkeys(map(_shown, record.paths)):
            say(line)


def _shown(choice: PathRecord) -> str:
    """Which kernels compute a pass of some calls."""
    calls = "that name no architecture" if choice.is_open else f"on {choice.arch}"
    columns = f"{choice.of.name}, {choice.columns} columns of v in each launch"
    return f"calls {calls}: {choice.why or columns}"


def _archs(arguments: ExportArguments) -> tuple[str, ...]:
    """The architectures of ``--arch A,B``, which may be repeated."""
    names = ",".join(arguments.archs) or arch_of(None)
    archs = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for arch in archs:
        facts(arch)
    return archs


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [number_of_digits(part.strip()) or 0 for part in text.split(",")]
    if not all(0 < number <= 128 for number in numbers):
        raise InputError(
            "this is not a list of numbers of heads",
            where="option --heads-per-tile",
            numbers=f"given {text[:80]!r}",
            way_out="numbers up to 128, as in --heads-per-tile 1,4",
        )
    return tuple(numbers)


def _command(arguments: ExportArguments, path: str, folder: Path, archs: tuple[str, ...]) -> str:
    """The command that makes an export again, with the options that were given."""
    shown = [Path(x).name if Path(x).is_absolute() else str(x) for x in (path, folder)]
    parts = ["flashgen", "export", shown[0], "-o", shown[1], "--arch", ",".join(archs)]
    parts += chain.from_iterable(options_of(arguments))
    parts += ["--backward"] if arguments.backward else []
    parts += ["--dropout"] if arguments.dropout else []
    for call in arguments.calls:
        parts += ["--call", call]
    parts += ["--heads-per-tile", arguments.heads_per_tile] * (arguments.heads_per_tile != "1")
    parts += ["--positions", str(arguments.positions)] * (arguments.positions != 16_384)
    return " ".join(map(shell_word, parts))


def shell_word(text: str) -> str:
    """A word of a command in one line, with the escapes of bash."""
    if text.isprintable():
        return shlex.quote(text)
    names = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    shown = [names.get(c) or (c if c.isprintable() else _escape(c)) for c in text]
    return f"$'{''.join(shown)}'"


def _escape(letter: str) -> str:
    number = ord(letter)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
