"""What is released works where no checkout is: a wheel and a source distribution, installed."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

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
    """A virtual environment, and an empty folder in which its programs run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run_python("-m", "venv", "--without-pip", folder / "venv")
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "elsewhere"
        self.work.mkdir()
        (self.work / "window.py").write_text(SPEC)

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "venv").glob("[lL]ib/**/site-packages")
        return found

    def install(self, *what: object) -> None:
        """Installs with the pip of the environment that runs the tests."""
        pytest.importorskip("pip", reason="environments of uv have none")
        run_python("-m", "pip", "--python", self.bin / "python", "install", "--quiet", *what)

    def run(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints, without any variable that names a checkout."""
        hidden = ("PYTHONPATH", "FLASHGEN_CACHE_DIR")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env |= {"FLASHGEN_CACHE_DIR": str(self.folder / "cache"), "VIRTUAL_ENV": ""}
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            capture_output=True,
            text=True,
            cwd=self.work,
            env=env,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def check(self) -> None:
        """Runs what a new user runs first, and looks at what was installed."""
        facts, _, source = self.run("python", "-c", FACTS).partition("\n")
        place, *versions = facts.split()
        assert Path(place).is_relative_to(self.site_packages)
        assert versions == [__version__] * 2
        assert source == fg.emit(fg.AttentionSpec(head_dim=64), arch="sm_80").forward.text
        out = self.run("flashgen", "run", "window.py", "--shape", "1,1,64", "--backend", "emulator")
        assert out.splitlines()[-1].split() == ["result", "pass"]
        assert str(ROOT) not in out


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment with links to the packages of this one, except for flashgen.

    Without the .pth files the editable installation of flashgen has no effect.
    """
    made = Environment(tmp_path)
    for folder in map(Path, site.getsitepackages()):
        for path in folder.iterdir() if folder.is_dir() else ():
            link = made.site_packages / path.name
            own = path.suffix == ".pth" or path.name.startswith(("flashgen", "__pycache__"))
            if not own and not link.exists():
                link.symlink_to(path)
    return made


@pytest.mark.slow
def test_an_installed_wheel_runs_a_spec_where_no_checkout_is(
    wheel_file: Path, environment: Environment
) -> None:
    environment.install("--no-deps", "--no-index", "--no-compile", wheel_file)
    environment.check()


@pytest.mark.slow
def test_the_wheel_of_the_source_distribution_is_that_of_the_checkout(
    wheel: zipfile.ZipFile, sdist_file: Path, tmp_path: Path
) -> None:
    root = unpacked(sdist_file, tmp_path)
    built = tmp_path / "built"
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", built, cwd=root, path=tmp_path)
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as found:
        assert set(found.namelist()) == set(wheel.namelist())
        for name in found.namelist():
            assert found.read(name) == wheel.read(name), name


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_and_pages_need(
    sdist_file: Path, tmp_path: Path
) -> None:
    root = unpacked(sdist_file, tmp_path)
    assert root.name == f"flashgen-{__version__}"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout")
    missing = [
        name
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file() and not (root / name).is_file()
    ]
    assert missing == []


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (root,) = folder.glob("flashgen-*")
    return root


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_empty_environment_gets_all_that_flashgen_needs(
    kind: str, wheel_file: Path, sdist_file: Path, tmp_path: Path
) -> None:
    made = Environment(tmp_path)
    made.install("torch==2.13.0")  # as the Makefile: the exact version first
    file = wheel_file if kind == "wheel" else sdist_file
    made.install(f"flashgen[cuda] @ {file.as_uri()}")
    made.check()
