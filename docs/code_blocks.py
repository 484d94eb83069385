"""Executes the code blocks of README.md, CONTRIBUTING.md and docs/, and compares their output.

    python docs/code_blocks.py [PAGE]...             exit status 1 when a block is wrong
    python docs/code_blocks.py --update [PAGE]...    writes the present output into the pages
    python docs/code_blocks.py --installed ...       with flashgen as it is installed

Without PAGE, such as docs/serving.md, every page is checked.

The language of a fenced block says how it is checked:

===========  =====================================================================================
python       executed; the blocks of a page share one namespace
text         what the python block before it prints; a diagram where ``<!-- diagram -->`` precedes;
             a screen of docs/doctor_screens.py where ``<!-- doctor: NAME -->`` precedes
console      each line that starts with ``$ `` is a command, followed by what it prints
sh           commands: `flashgen` commands are executed, the others need what they name to exist
c++          an excerpt of an emitted file, found by the comment that precedes the block:
             ``<!-- emitted SPEC KERNEL ARCH /first line/ /last line/ -->``
other        an error: every block is checked
===========  =====================================================================================
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "variants.md"),
)

BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n\n?)?^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S
)
EMITTED = re.compile(r"emitted (\S+) (\S+) (\S+) /(.+)/ /(.+)/")

# Commands of sh blocks that are not executed, and why.
NOT_EXECUTED = {
    "python examples/": "embeds sentences or trains for minutes; tests of their own run them",
    "python benchmarks/": "measures for minutes or needs a GPU; smoke tests run them",
    "python -m pytest": "would run tests inside of a test",
    "python docs/": "would run this program inside of itself",
    "flashgen emit specs": "writes files; its tests run it in an empty folder",
    "flashgen report specs": "writes a page; its tests run it in an empty folder",
    "flashgen build-native": "compiles for half a minute; its tests compile once",
    "flashgen export specs": "writes files; its tests run it in an empty folder",
    "cmake": "needs a C compiler; its test runs it where there is one",
}


class WrongBlock(Exception):
    """A block cannot be executed, or the page shows another output."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its place in the page's text and the comment that precedes it."""

    page: str
    line: int
    start: int
    end: int
    language: str
    note: str
    body: str

    def wrong(self, message: str) -> WrongBlock:
        return WrongBlock(f"{self.page}:{self.line}: {message}")


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, match.start("body")) + 1,
            match.start("body"),
            match.end("body"),
            match["language"].strip(),
            match["note"] or "",
            match["body"],
        )
        for match in BLOCK.finditer(text)
    ]


def check(page: str, *, update: bool = False) -> None:
    """Executes the blocks of a page.

    Raises:
        WrongBlock: a block fails, or its output differs from the page's and ``update`` is false.
    """
    module = ModuleType("flashgen_page")  # torch.compile looks functions up in their module
    sys.modules[module.__name__] = module
    printed: str | None = None
    changes: list[tuple[Block, str]] = []
    for block in blocks(page):
        now = block.body
        if block.language == "python":
            printed = execute(block, module.__dict__)
            continue
        if block.language == "text":
            now = block.body if block.note == "diagram" else printed
            if block.note.startswith("doctor: "):
                now = doctor_screen(block.note.removeprefix("doctor: "))
            if now is None:
                raise block.wrong("a text block follows a python block that prints")
        elif block.language == "console":
            now = "".join(session(block))
        elif block.language == "sh":
            for command in block.body.splitlines():
                run_or_check(block, command.split("  #")[0].strip())
        elif block.language == "c++":
            now = excerpt(block)
        else:
            raise block.wrong(f"no way to check a block of the language {block.language!r}")
        printed = None
        if comparable(now) != comparable(block.body):
            if not update:
                raise block.wrong(f"the output is now\n{now}")
            changes.append((block, now))
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    for block, now in reversed(changes):
        text = text[: block.start] + now + text[block.end :]
    if changes:
        path.write_text(text, encoding="utf-8")


def doctor_screen(name: str) -> str:
    """A screen of docs/doctor_screens.py by its name."""
    text: str = runpy.run_path(str(ROOT / "docs/doctor_screens.py"))["screen"](name)
    return text


def execute(block: Block, namespace: dict[str, Any]) -> str:
    """What a python block prints. Its lines have the numbers of the page in tracebacks."""
    source = "\n" * (block.line - 1) + block.body
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, str(ROOT / block.page), "exec"), namespace)
    except Exception as error:
        raise block.wrong(f"{type(error).__name__}: {error}") from error
    return out.getvalue()


def session(block: Block) -> Iterator[str]:
    """The commands of a console block, each followed by its present output."""
    for line in block.body.splitlines(keepends=True):
        if line.startswith("$ "):
            yield line
            yield output(block, line[2:].strip())


def run_or_check(block: Block, command: str) -> None:
    """Executes a command of an sh block, or checks that what it names exists."""
    words = shlex.split(command, comments=True)
    if not words:
        return
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in words[1:] if "=" not in word):
            if not re.search(rf"^{re.escape(target)}:", makefile, re.M):
                raise block.wrong(f"the Makefile has no target {target}")
    elif "pip" in words and "install" in words:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra in re.findall(r"\[([\w,]+)\]", command):
            for name in extra.split(","):
                if not re.search(rf"^{name} = \[", project, re.M):
                    raise block.wrong(f"pyproject.toml has no extra {name}")
    elif any(command.startswith(start) for start in NOT_EXECUTED):
        paths = [word for word in words if word.endswith(".py")]
        missing = [path for path in paths if not (ROOT / path).is_file()]
        if missing:
            raise block.wrong(f"there is no file {missing[0]}")
    elif words[0] == "flashgen":
        output(block, command)
    else:
        raise block.wrong(f"no way to check the command {command!r}")


def output(block: Block, command: str) -> str:
    """What ``[NAME=VALUE] flashgen ... [| filter]`` prints on stdout."""
    from typer.testing import CliRunner

    from flashgen.tools.cli import app

    flashgen, _, rest = command.partition(" | ")
    words = shlex.split(flashgen)
    if words[0] != "flashgen":
        raise block.wrong(f"a command of a console block is one of flashgen's, not {command!r}")
    with contextlib.chdir(ROOT) if sys.version_info >= (3, 11) else moved(ROOT):
        done = CliRunner().invoke(app, words[1:], prog_name="flashgen")
    if done.exit_code != 0:
        raise block.wrong(f"{command}: exit status {done.exit_code}\n{done.output}")
    if not rest:
        return done.stdout
    return subprocess.run(
        rest, shell=True, input=done.stdout, capture_output=True, text=True, check=True
    ).stdout


@contextlib.contextmanager
def moved(folder: Path) -> Iterator[None]:
    """`contextlib.chdir` for Python 3.10."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def excerpt(block: Block) -> str:
    """The lines of an emitted file that a c++ block shows."""
    import flashgen as fg

    match = EMITTED.fullmatch(block.note)
    if match is None:
        raise block.wrong("a c++ block follows <!-- emitted SPEC KERNEL ARCH /first/ /last/ -->")
    spec, kernel, arch, first, last = match.groups()
    kernels = fg.emit(fg.load(ROOT / spec), arch=arch)
    source = (
        kernels.forward
        if kernel == "forward"
        else next(source for source in kernels.backward if source.role == kernel)
    )
    lines = source.text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if re.search(first, line)), None)
    if start is None:
        raise block.wrong(f"no line of {source.filename} matches /{first}/")
    end = next((i for i in range(start, len(lines)) if re.search(last, lines[i])), None)
    if end is None:
        raise block.wrong(f"no line of {source.filename} after {start + 1} matches /{last}/")
    return "".join(lines[start : end + 1])


def comparable(text: str) -> str:
    """Output without what depends on the machine: times, rounding errors, the choice of backend."""
    text = re.sub(r"^(build|run|backend) .*$", r"\1", text, flags=re.M)
    text = re.sub(r"^(out|lse|d\w+)( +pass), max .*$", r"\1\2", text, flags=re.M)
    return text.rstrip()


def main() -> None:
    # The blocks import flashgen from this checkout, wherever the program is started.
    if "--installed" not in sys.argv:
        sys.path.insert(0, str(ROOT))
    wrong = 0
    for page in [each for each in sys.argv[1:] if not each.startswith("--")] or PAGES:
        try:
            check(page, update="--update" in sys.argv)
        except WrongBlock as error:
            print(error)
            wrong += 1
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
