"""``flashgen emit``: the CUDA files of specs, written or compared."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from flashgen import config
from flashgen.cli.console import MISMATCH, busy, plural, say, write
from flashgen.errors import RenderError, SpecError
from flashgen.pipeline import emit as emit_kernels
from flashgen.render import Source
from flashgen.spec import AttentionSpec, load

DEFAULT_ARCH = "sm_80"
SPECS = Path("specs")


def emit(
    paths: Sequence[str],
    folder: Path,
    archs: Sequence[str],
    *,
    sram: int | None = None,
    check: bool,
) -> None:
    """Writes a file per kernel, spec and architecture, or with ``check`` compares them.

    Raises:
        typer.Exit: with status 1 when a comparison finds any difference.
        FlashgenError: a spec cannot be loaded, planned or rendered.
    """
    archs = archs or [config.arch() or DEFAULT_ARCH]
    wanted = sources(paths or default_specs(), archs, sram)
    # Only the complete set can say which files are left over, and only for its own architectures.
    stale = [] if paths else _left_over(folder, archs, wanted)
    if check:
        _check(folder, wanted, stale)
    else:
        _write(folder, wanted, stale)


def default_specs() -> list[str]:
    """Every file in ``specs/``.

    Raises:
        SpecError: there is no such folder here, or nothing in it.
    """
    found = sorted(path.as_posix() for path in SPECS.glob("*.py"))
    if not found:
        raise SpecError(
            "there are no specs to emit",
            where=SPECS.as_posix(),
            numbers=f"no .py file in {SPECS.as_posix()}/ below the working directory",
            way_out="flashgen emit path/to/spec.py, or run it where specs/ is",
        )
    return found


def sources(
    paths: Sequence[str], archs: Sequence[str], sram: int | None = None
) -> dict[str, Source]:
    """The emitted files by name.

    Raises:
        RenderError: two specs would write the same file.
    """
    found: dict[str, Source] = {}
    origin: dict[str, str] = {}
    for path in paths:
        with busy(f"emitting {path}"):
            spec = load(path)
            for source in (kernel for arch in archs for kernel in kernels_of(spec, arch, sram)):
                if origin.setdefault(source.filename, path) != path:
                    raise RenderError(
                        "two specs would be emitted into the same file",
                        where=f"{origin[source.filename]} and {path}",
                        numbers=f"both are named {spec.name!r}: {source.filename}",
                        way_out='fg.AttentionSpec(..., name="another_name")',
                    )
                found[source.filename] = source
    return found


def kernels_of(spec: AttentionSpec, arch: str, sram: int | None = None) -> Iterator[Source]:
    """Tables, forward, and the backward kernels of both modes, free and deterministic."""
    free = emit_kernels(spec, arch, sram=sram)
    yield from free.summaries
    yield free.forward
    yield from free.backward
    files = {source.filename for source in free.backward}
    for source in emit_kernels(spec, arch, sram=sram, deterministic=True).backward:
        if source.filename not in files:
            yield source


def _left_over(folder: Path, archs: Sequence[str], wanted: dict[str, Source]) -> list[Path]:
    there = (path for arch in archs for path in folder.glob(f"*_{arch}.cu"))
    return sorted(path for path in there if path.name not in wanted)


def _write(folder: Path, wanted: dict[str, Source], stale: Sequence[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in wanted.items():
        path = folder / name
        data = source.text.encode()
        if path.is_file() and path.read_bytes() == data:
            # Left alone, time stamp included, so that nothing rebuilds.
            say(f"unchanged  {path.as_posix()}")
            continue
        path.write_bytes(data)
        say(f"written    {path.as_posix()}  {len(data):,} B")
    for path in stale:
        say(f"left over  {path.as_posix()}  no spec emits it: delete it", style="yellow")


def _check(folder: Path, wanted: dict[str, Source], stale: Sequence[Path]) -> None:
    differences = [_difference(folder / name, source) for name, source in wanted.items()]
    differences += [f"left over: {path.as_posix()}, which no spec emits\n" for path in stale]
    differences = [text for text in differences if text]
    if not differences:
        say(f"{plural(len(wanted), 'file')} in {folder.as_posix()}/ as they would be emitted")
        return
    for text in differences:
        write(text)
    say(
        f"{plural(len(differences), 'difference')} between {folder.as_posix()}/ and what would be "
        f"emitted; `flashgen emit -o {folder.as_posix()}` writes the files",
        style="bold red",
    )
    raise typer.Exit(MISMATCH)


def _difference(path: Path, source: Source) -> str:
    """A unified diff from the file to what would be emitted; empty when they are the same bytes."""
    if not path.is_file():
        return f"missing: {path.as_posix()}\n"
    data = path.read_bytes()
    if data == source.text.encode():
        return ""
    before = data.decode(errors="replace").splitlines(keepends=True)
    after = source.text.splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, path.as_posix(), f"{path.as_posix()} (emitted)")
    text = "".join(line if line.endswith("\n") else line + "\n" for line in lines)
    return text or f"line endings differ: {path.as_posix()}\n"
