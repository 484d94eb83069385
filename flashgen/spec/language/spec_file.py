"""Loading the spec that a Python file defines."""

from __future__ import annotations

import copy
import os
import shlex
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from flashgen.shared.errors import FlashgenError, SpecError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_options import as_name
from flashgen.spec.language.user_source import in_specs, shown_path


@in_specs
def load(path: str | Path) -> AttentionSpec:
    """Loads a spec from a file: ``specs/causal.py``, or ``path.py:name`` for another variable.

    A spec without a name is named after its variable, or after the file if that is ``spec``.

    Args:
        path: path of a Python file that defines an AttentionSpec at module level.

    Raises:
        SpecError: the file or the variable does not exist, or running the file fails.
    """
    file, variable = file_and_variable(path)
    if not os.path.isfile(file):
        raise SpecError(
            "there is no such spec file",
            where=str(path),
            numbers=_files_near(Path(file)),
            way_out="the path of a Python file that defines spec, or path.py:name",
        )
    module = run_file(file)
    spec = module.get(variable)
    if not isinstance(spec, AttentionSpec):
        specs = [name for name, value in module.items() if isinstance(value, AttentionSpec)]
        raise SpecError(
            f"the file defines no AttentionSpec named {variable!r}",
            where=shown_path(file),
            numbers=f"specs in it: {', '.join(specs) or 'none'}",
            way_out=f"{file}:{specs[0]}" if specs else f"{variable} = fg.AttentionSpec(...)",
        )
    loaded = copy.copy(spec)  # the file may have imported it
    object.__setattr__(loaded, "file", shown_path(str(path)))
    if not spec.named:
        name = as_name(Path(file).stem if variable == "spec" else variable)
        object.__setattr__(loaded, "name", name)
    return loaded


def file_and_variable(path: str | Path) -> tuple[str, str]:
    """The two parts of ``path.py:name``; without a name, the variable is ``spec``."""
    file, colon, variable = str(path).rpartition(":")
    # os.path.isfile is False for paths that no file can have: names that are too long, null bytes.
    if colon and not os.path.isfile(path) and (os.path.isfile(file) or file.endswith(".py")):
        return file, variable
    return str(path), "spec"


def _files_near(source: Path) -> str:
    if not os.path.isdir(source.parent):
        return f"no folder {source.parent.as_posix()}"
    near = sorted(file.name for file in source.parent.glob("*.py"))
    return f"Python files there: {', '.join(near[:20]) or 'none'}"


def run_file(file: str) -> dict[str, Any]:
    """The variables of a Python file after it has run; nothing is written into its folder.

    Raises:
        SpecError: the file cannot be read, raises an exception, or ends the program.
    """
    source = Path(file)
    name = f"flashgen_spec_{source.stem}"
    loader = SourceFileLoader(name, file)  # for every name, also without .py
    module_spec = spec_from_loader(name, loader)
    assert module_spec is not None, "the loader is given"
    module = module_from_spec(module_spec)
    keep = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        loader.exec_module(module)
    except (FlashgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, which would end the program without an error
        line = _line_in(error, source)
        raise SpecError(
            f"running the spec file raised {type(error).__name__}: {error}",
            where=f"{shown_path(file)}:{line}",
            numbers=f"file {source.name}; it must define an AttentionSpec",
            way_out=f"a file that runs on its own: python {shlex.quote(file)}",
        ) from error
    finally:
        sys.dont_write_bytecode = keep
    return vars(module)


def _line_in(error: BaseException, source: Path) -> int:
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).name == source.name
    ]
    return lines[-1] if lines else 0
