"""``flashgen emit``: CUDA files of given specs, or the folder that holds those of all specs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import typer

from flashgen.kernels.codegen import Source
from flashgen.kernels.pipeline import emit as emit_kernels
from flashgen.kernels.visits.layout_path import paths_of_layout
from flashgen.shared.errors import InputError, RenderError, SpecError
from flashgen.spec.language.chosen_specs import spec_of_kernels
from flashgen.spec.language.signature import split
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_file import load
from flashgen.tools.cli import generated
from flashgen.tools.cli.arguments import EmitArguments
from flashgen.tools.cli.console import busy, plural, say, write
from flashgen.tools.cli.ending import MISMATCH
from flashgen.tools.cli.inputs import arch_of, check_folder

SPECS = Path("specs")


def emit(arguments: EmitArguments) -> None:
    """Writes whole files of the given specs, or the three parts of `flashgen.tools.cli.generated`.

    With ``--check`` it compares them with the files of the folder instead.
    """
    folder = arguments.output
    if not arguments.check:  # folders that are missing are made
        check_folder(next(filter(os.path.lexists, (folder, *folder.absolute().parents))), "-o")
    left_over: list[Path] = []
    if arguments.specs:
        archs = arguments.archs or (arch_of(None),)
        sources = _sources(arguments.specs, archs, arguments.sram)
        files = {source.filename: source.text for source in chain(*sources.values())}
        for path in sources:
            for arch in archs:
                for chosen in paths_of_layout(load(path), arch):
                    say(f"{path}, {arch}: {chosen}")
    else:
        _refuse_options_of_specs(arguments)
        files = generated.contents(folder, _sources(all_specs(), generated.ARCHS))
        left_over = generated.left_over(folder, files)
    if arguments.check:
        _check(folder, files, left_over)
    else:
        _write(folder, files, left_over)


def _refuse_options_of_specs(arguments: EmitArguments) -> None:
    options = [f"--arch {arch}" for arch in arguments.archs]
    options += [] if arguments.sram is None else [f"--sram {arguments.sram}"]
    if options:
        raise InputError(
            "this option needs the specs to emit",
            where=f"option {', '.join(options)}",
            numbers=f"without specs, kernels are emitted for {' and '.join(generated.ARCHS)}",
            way_out=f"flashgen emit {SPECS.as_posix()}/*.py {' '.join(options)}",
        )


def all_specs() -> list[str]:
    """Every file in ``specs/`` below the working directory.

    Raises:
        SpecError: there is no such folder, or no spec in it.
    """
    paths = sorted(path.as_posix() for path in SPECS.glob("*.py"))
    if not paths:
        raise SpecError(
            "there are no specs to emit",
            where=SPECS.as_posix(),
            numbers=f"no .py file in {SPECS.as_posix()}/ below the working directory",
            way_out="flashgen emit path/to/spec.py, or run the command where specs/ is",
        )
    return paths


def _sources(
    paths: Sequence[str], archs: Sequence[str], sram: int | None = None
) -> dict[str, list[Source]]:
    """The emitted files of each spec file.

    Raises:
        RenderError: two specs would be written to the same file.
    """
    sources: dict[str, list[Source]] = {}
    first: dict[str, tuple[str, Source]] = {}
    for path in dict.fromkeys(paths):
        with busy(f"emitting {path}"):
            spec = load(path)
            sources[path] = [kernel for arch in archs for kernel in kernels_of(spec, arch, sram)]
        for source in sources[path]:
            other, written = first.setdefault(source.filename, (path, source))
            if written.text != source.text:
                raise RenderError(
                    "two specs would be emitted into the same file",
                    where=f"{other} and {path}",
                    numbers=f"both emit {source.filename}, with different text",
                    way_out='fg.AttentionSpec(..., name="another_name"), or two commands with -o',
                )
    return sources


def kernels_of(spec: AttentionSpec, arch: str, sram: int | None = None) -> Iterator[Source]:
    """Min/max tables, forward; backward with free and with fixed order of sums; tangents.

    With a paged cache there are no derivatives, and a forward kernel for split keys. With lists of
    blocks these are the kernels of O, and derivatives are those of other specs.
    """
    free = emit_kernels(spec, arch, sram=sram)
    yield from free.minmax_tables
    yield free.forward
    computed = spec_of_kernels(spec)
    if computed.paged:
        yield emit_kernels(split(computed), arch, sram=sram).forward
        return
    yield from free.backward
    files = {source.filename for source in free.backward}
    for source in emit_kernels(spec, arch, sram=sram, deterministic=True).backward:
        if source.filename not in files:
            yield source
    yield free.tangent()


def _write(folder: Path, files: Mapping[str, str], left_over: Sequence[Path]) -> None:
    for name, text in files.items():
        path, data = folder / name, text.encode()
        if path.is_file() and path.read_bytes() == data:
            # The file keeps its time stamp, so that build tools do not rebuild from it.
            say(f"unchanged  {path.as_posix()}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        say(f"written    {path.as_posix()}  {len(data):,} B")
    for path in left_over:
        say(f"left over  {path.as_posix()}  {_why_left_over(path)}: delete it", style="yellow")


def _check(folder: Path, files: Mapping[str, str], left_over: Sequence[Path]) -> None:
    differences = [
        difference for name in files for difference in _differences(folder / name, files[name])
    ]
    differences += [f"left over: {path.as_posix()}, {_why_left_over(path)}\n" for path in left_over]
    if not differences:
        say(f"{plural(len(files), 'file')} in {folder.as_posix()}/ as they would be emitted")
        return
    for text in differences:
        write(text)
    say(
        f"{plural(len(differences), 'difference')} between {folder.as_posix()}/ and what would be "
        f"emitted; the command without --check writes the files",
        style="bold red",
    )
    raise typer.Exit(MISMATCH)


def _why_left_over(path: Path) -> str:
    if path.parent.name == "gallery":
        return f"to which {generated.README} does not link"
    return "which no spec emits"


def _differences(path: Path, text: str) -> Iterator[str]:
    """A unified diff from the file to the emitted text; for digests, a sentence per kernel."""
    if not path.is_file():
        yield f"missing: {path.as_posix()}\n"
        return
    data = path.read_bytes()
    if data == text.encode():
        return
    if path.name == generated.DIGESTS:
        differences = list(generated.digest_differences(path, text))
    else:
        before = data.decode(errors="replace").splitlines(keepends=True)
        names = (path.as_posix(), f"{path.as_posix()} (emitted)")
        diff = difflib.unified_diff(before, text.splitlines(keepends=True), *names)
        differences = ["".join(line if line.endswith("\n") else line + "\n" for line in diff)]
    yield from filter(None, differences)
    if not any(differences):
        yield f"order of lines or line endings differ: {path.as_posix()}\n"
