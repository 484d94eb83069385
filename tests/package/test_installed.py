"""What is released works where no checkout is: a wheel and a source distribution, installed."""

from __future__ import annotations

import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from flashgen.version import __version__
from tests.support import release
from tests.support.installed import Environment
from tests.support.paths import ROOT
from tests.support.processes import run_python


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment with links to the packages of this one, except for flashgen.

    Without the .pth files the editable installation of flashgen has no effect.
    """
    pytest.importorskip("pip", reason="environments of uv have none")
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
    pytest.importorskip("pip", reason="environments of uv have none")
    made = Environment(tmp_path)
    made.install("torch==2.13.0")  # as the Makefile: the exact version first
    file = wheel_file if kind == "wheel" else sdist_file
    made.install(f"flashgen[cuda] @ {file.as_uri()}")
    made.check()


@pytest.mark.slow
def test_make_release_says_that_a_python_without_a_torch_only_emits(
    wheel_file: Path, sdist_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pip", reason="environments of uv have none")
    said = release.checked(sys.executable, wheel_file, sdist_file, "torch==0.0.0", tmp_path)
    assert said.startswith("NOT RUN, since torch==0.0.0 cannot be installed (")


def test_make_release_finds_pythons_by_the_version_that_they_say(wheel_file: Path) -> None:
    named = release.versions(release.metadata_of(wheel_file))
    assert named == ["3.10", "3.11", "3.12", "3.13"]
    here = "{}.{}".format(*sys.version_info)
    assert here in named, "the tests run on a Python that pyproject.toml does not name as tested"
    assert release.interpreter(here) == sys.executable
    assert release.interpreter("3.99") is None


@pytest.mark.parametrize(
    ("first", "partial", "status"),
    [
        ("passed", False, 0),
        ("NOT TESTED: this machine has no such Python", False, 2),
        ("NOT RUN, since torch==0.0.0 cannot be installed", False, 2),
        ("NOT TESTED: this machine has no such Python", True, 0),
        ("FAILED: no", True, 1),
    ],
)
def test_make_release_fails_where_a_python_was_not_tried(
    first: str, partial: bool, status: int
) -> None:
    lines, found = release.summary({"3.10": first, "3.13": "passed"}, partial)
    assert found == status
    assert "Python 3.14 UNTESTED" in lines[2]
    assert any("NOT COMPLETE: Python 3.10 has" in line for line in lines) == ("NOT" in first)
