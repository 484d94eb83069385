"""Installs the files of a release into an empty environment of each Python that it is for.

    python -m tests.support.release DIST TORCH [--partial]

DIST has the wheel and the source distribution, TORCH is the requirement of torch that is installed
first. The wheel's classifiers name the Pythons. In each of them the pages that new users type from
are executed, and the end says how many seconds each step took. A Python that this machine does not
have is named there, and so is one without a torch, where only an import and an emitted kernel are
checked. The exit status is 0 if all is right, 1 if something is wrong, and 2 if something was not
tried; with --partial that is 0 too.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from functools import partial
from pathlib import Path

from tests.support.installed import Environment

PLACES = ("~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin")
"""Where pyenv and uv have Pythons that are not on PATH."""
PAGES = ("README.md", "docs/quickstart.md", "docs/torch.md")
"""Pages that need no further extra."""
NOT_TRIED = ("NOT TESTED", "NOT RUN")
"""How the results of Pythons begin that have not run the pages."""
WHICH = "import ensurepip, sys, venv; print('{}.{}'.format(*sys.version_info))"


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def versions(metadata: Message) -> list[str]:
    """The Pythons of the classifiers, such as "3.10"."""
    found = (re.search(r":: Python :: (3\.\d+)$", x) for x in metadata.get_all("Classifier", []))
    return [each[1] for each in found if each]


def interpreter(version: str) -> str | None:
    """A Python of this version that starts and makes environments, or None."""
    for path in candidates(version):
        done = subprocess.run([path, "-c", WHICH], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return path
    return None


def candidates(version: str) -> Iterator[str]:
    name = f"python{version}"
    yield sys.executable
    yield from filter(None, [shutil.which(name)])
    for place in PLACES:
        folder, _, rest = place.partition("/*")
        yield from map(str, sorted(Path(folder).expanduser().glob(f"*{rest}/{name}")))


def checked(python: str, wheel: Path, sdist: Path, torch: str, folder: Path) -> str:
    """Checks an installed wheel; says what was checked, with the seconds of each step."""
    start = time.monotonic()
    made = Environment(folder, python)
    try:
        made.install("--no-compile", torch)
    except AssertionError as error:
        needed = metadata_of(wheel).get_all("Requires-Dist", [])
        made.install(*(x for x in needed if "extra ==" not in x and not x.startswith("torch")))
        made.install("--no-deps", wheel)
        made.check_emit()
        reason = str(error).strip().splitlines()[-1]
        return (
            f"{NOT_TRIED[1]}, since {torch} cannot be installed ({reason}): import and emit alone"
        )
    own = made.run("python", "-c", "from importlib.metadata import version as v; print(v('torch'))")
    steps: list[tuple[str, Callable[[], None]]] = [
        ("flashgen[cuda]", lambda: made.install(f"flashgen[cuda] @ {wheel.as_uri()}")),
        ("a spec", made.check),
        *((page, partial(made.check_page, page)) for page in PAGES),
        ("flashgen[transformers]", lambda: made.install("flashgen[transformers]")),
        ("trl and peft", lambda: made.install("trl>=1.14", "peft>=0.21")),
        ("docs/transformers.md", lambda: made.check_page("docs/transformers.md")),
        ("sdist", lambda: made.install("--no-deps", "--force-reinstall", sdist)),
        ("a spec", made.check),
    ]
    found = [f"torch {own.strip()} {time.monotonic() - start:.0f}"]
    for name, step in steps:
        start = time.monotonic()
        step()
        found.append(f"{name} {time.monotonic() - start:.0f}")
    return f"passed, seconds: {', '.join(found)}"


def main() -> None:
    dist, torch, *options = Path(sys.argv[1]).resolve(), *sys.argv[2:]
    ((wheel,), (sdist,)) = (list(dist.glob(each)) for each in ("*.whl", "*.tar.gz"))
    results: dict[str, str] = {}
    for version in versions(metadata_of(wheel)):
        python = interpreter(version)
        if python is None:
            results[version] = f"{NOT_TRIED[0]}: this machine has no such Python"
            continue
        print(f"Python {version}: {python}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[version] = checked(python, wheel, sdist, torch, Path(folder))
            except AssertionError as error:
                results[version] = f"FAILED: {error}"
    print(f"{wheel.name} and {sdist.name}")
    lines, status = summary(results, "--partial" in options)
    print("\n".join(lines))
    sys.exit(status)


def summary(results: dict[str, str], partial: bool = False) -> tuple[list[str], int]:
    """What is said of each Python in the end, and the exit status."""
    lines = [f"  Python {version:5}{what}" for version, what in results.items()]
    next_one = max(int(version.partition(".")[2]) for version in results) + 1
    lines.append(f"  Python 3.{next_one:<3}UNTESTED, as all others: no classifier names it")
    if any(what.startswith("FAILED") for what in results.values()):
        return lines, 1
    left_out = [version for version, what in results.items() if what.startswith(NOT_TRIED)]
    if left_out:
        lines.append(f"NOT COMPLETE: Python {', '.join(left_out)} has not run the pages")
        if not partial:
            lines.append("make release PARTIAL=1 takes what this machine has for enough")
    return lines, 2 if left_out and not partial else 0


if __name__ == "__main__":
    main()
