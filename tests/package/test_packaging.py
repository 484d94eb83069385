"""Packaging: the wheel holds what runs, a bare checkout runs too, the Makefile sets itself up."""

from __future__ import annotations

import configparser
import email
import os
import re
import subprocess
import zipfile

import pytest

from flashgen.version import __version__
from tests.support.paths import ROOT


def test_the_wheel_holds_every_module_and_every_template(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for path in sorted((ROOT / "flashgen").rglob("*.py")):
        assert path.relative_to(ROOT).as_posix() in names
    assert {"flashgen/py.typed", "flashgen/calls/trust/proven.json"} <= names
    assert "flashgen/calls/native/native.cpp" in names
    templates = sorted(path for path in (ROOT / "templates").glob("*/*") if path.is_file())
    assert {".j2", ".html", ".css", ".js"} <= {path.suffix for path in templates}
    for path in templates:
        name = f"flashgen/{path.relative_to(ROOT).as_posix()}"
        assert name in names
        assert wheel.read(name) == path.read_bytes()


def test_the_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    others = {
        name
        for name in wheel.namelist()
        if not re.fullmatch(
            r"ptx_emulator/.*\.py|flashgen/(.*\.py|py\.typed|templates/\w+/[^/]+)"
            r"|flashgen/calls/trust/proven\.json|flashgen/calls/native/native\.cpp",
            name,
        )
        and not re.fullmatch(r"flashgen-[^/]+\.dist-info/.*", name)
    }
    assert others == set()
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_wheel_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (info,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(info))
    assert metadata["Name"] == "flashgen"
    assert metadata["Version"] == __version__
    assert metadata["Summary"].startswith("A compiler for attention kernels")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    (name,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in wheel.read(name)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# flashgen")
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"cuda", "sass", "examples", "docs", "dev"} <= set(metadata.get_all("Provides-Extra"))
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    names = {re.split(r"[<>=\[; ]", need)[0] for need in needs}
    assert {"jinja2", "cuda-python", "numpy", "torch", "sympy"} <= names
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(info.replace("METADATA", "entry_points.txt")).decode())
    assert scripts["console_scripts"]["flashgen"] == "flashgen.tools.cli:main"


def test_make_installs_the_exact_torch_before_anything_that_needs_one() -> None:
    # A bare requirement of torch would bring the newest GPU build and gigabytes with it.
    if not (ROOT / "Makefile").exists():
        pytest.skip("not a checkout")
    done = subprocess.run(
        ["make", "-n", "-B", "demo", "test", "PYTHON=python3", "VENV=fresh_environment"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
    )
    installs = re.findall(r"pip\b.* install (.*)", done.stdout)
    assert installs == ['"torch==2.13.0"', '-e ".[cuda]"', '-e ".[dev,examples]"']
    commands = done.stdout.splitlines()
    assert any(line.endswith("flashgen run specs/causal.py") for line in commands)
    assert any("-m pytest" in line for line in commands)


def test_ci_runs_make_test() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    commands = [line for line in script.splitlines() if line.startswith("make ")]
    assert [line.split()[1] for line in commands] == ["test", "lint", "docs", "versions", "share"]


def test_no_file_of_the_package_names_a_place_of_this_machine() -> None:
    home = re.compile(r"/(?:home|root|Users)/|/tmp/|[A-Z]:\\\\")
    for folder in ("flashgen", "templates", "specs", "generated"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in {".py", ".cu", ".cuh", ".j2", ".toml"}:
                assert not home.search(path.read_text(encoding="utf-8")), path


def test_issue_forms_ask_for_the_screen_of_doctor_and_name_no_host() -> None:
    yaml = pytest.importorskip("yaml")
    forms = {path.stem: path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    for name, path in forms.items():
        text = path.read_text(encoding="utf-8")
        form = yaml.safe_load(text)
        assert form.keys() >= {"name", "description", "body"}, name
        assert not re.search(r"https?://|\bwww\.", text), name
        asks = any(
            "`flashgen doctor --json`" in each["attributes"]["label"] for each in form["body"]
        )
        assert asks == (name != "variant"), name


def test_hooks_of_pre_commit_are_programs_of_the_environment() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [each["repo"] for each in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    commands = {" ".join(hook["entry"].split()[:2]) for hook in hooks}
    assert commands == {"ruff check", "ruff format", "mypy", "python -m"}


def test_the_first_change_of_contributing_is_there_to_be_made() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = text[text.index("## Your first change") : text.index("## Tests")]
    template, line, comment = re.findall(r"`(templates/[^`]+|MAX_LAG = [^`]+|P <= [^`]+)`", steps)
    assert re.search(f"{re.escape(line)}.*{re.escape(comment)}", (ROOT / template).read_text())
    (test,) = re.findall(r"`python -m pytest (tests/\S+\.py)", steps)
    assert (ROOT / test).exists()
