"""flashgen where no checkout is: an environment that has only what was installed into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flashgen as fg
from flashgen.version import __version__
from tests.support.paths import ROOT
from tests.support.processes import run_python

SPEC = '''"""A window, in a file outside of every project."""

import flashgen as fg


def window(b, h, q, k):
    return (k <= q) & (q - k < 40)


spec = fg.AttentionSpec(mask_mod=window, head_dim=16, dtype="float16")
'''
FACTS = """
from importlib.metadata import version
import flashgen as fg
kernels = fg.emit(fg.AttentionSpec(head_dim=64), arch="sm_80")
print(fg.__file__, fg.__version__, version("flashgen"))
print(kernels.forward.text, end="")
"""


class Environment:
    """A virtual environment of ``python``, and an empty folder in which its programs run."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        made = [python, "-m", "venv", "--without-pip", str(folder / "venv")]
        subprocess.run(made, check=True, env=self._variables())
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "elsewhere"
        self.work.mkdir()
        (self.work / "window.py").write_text(SPEC, encoding="utf-8")

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "venv").glob("[lL]ib/**/site-packages")
        return found

    def install(self, *what: object) -> None:
        """Installs with the pip of the Python that runs this."""
        run_python("-m", "pip", "--python", self.bin / "python", "install", "--quiet", *what)

    def run(self, program: str, *arguments: object) -> str:
        """What a program of the environment prints."""
        done = subprocess.run(
            [str(self.bin / program), *map(str, arguments)],
            capture_output=True,
            encoding="utf-8",
            cwd=self.work,
            env=self._variables(),
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def _variables(self) -> dict[str, str]:
        """The environment variables, without any that names a checkout."""
        hidden = ("PYTHONPATH", "FLASHGEN_CACHE_DIR", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        return kept | {"FLASHGEN_CACHE_DIR": str(self.folder / "cache")}

    def check_emit(self) -> None:
        """Imports what was installed, which needs no torch, and emits a kernel."""
        facts, _, source = self.run("python", "-c", FACTS).partition("\n")
        place, *versions = facts.split()
        assert Path(place).is_relative_to(self.site_packages)
        assert versions == [__version__] * 2
        assert source == fg.emit(fg.AttentionSpec(head_dim=64), arch="sm_80").forward.text

    def check(self) -> None:
        """Runs what a new user runs first."""
        self.check_emit()
        out = self.run("flashgen", "run", "window.py", "--shape", "1,1,64", "--backend", "emulator")
        assert out.splitlines()[-1].split() == ["result", "pass"]
        assert str(ROOT) not in out

    def check_page(self, page: str) -> None:
        """Types what a page shows."""
        self.run("python", ROOT / "docs" / "code_blocks.py", "--installed", page)
