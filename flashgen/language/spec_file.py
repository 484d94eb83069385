"""Loading the spec that a Python file defines."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, SpecError
from flashgen.language.spec import AttentionSpec, as_name
from flashgen.language.user_source import shown_path


def load(path: str | Path) -> AttentionSpec:
    """Loads a spec from a file: ``specs/causal.py``, or ``path.py:name`` for another variable.

    A spec without a name is named after its variable, or after the file if that is ``spec``.

    Args:
        path: path of a Python file that defines an AttentionSpec at module level.

    Raises:
        SpecError: the file or the variable does not exist, or running the file fails.
    """
    text, variable = str(path), "spec"
    file, colon, after = text.rpartition(":")
    if colon and file.endswith(".py"):
        text, variable = file, after
    source = Path(text)
    if not source.is_file():
        raise SpecError(
            "there is no such spec file",
            where=text,
            numbers=_files_near(source),
            way_out="the path of a Python file that defines spec, or path.py:name",
        )
    module = _run_file(source)
    spec = module.get(variable)
    if not isinstance(spec, AttentionSpec):
        specs = [name for name, value in module.items() if isinstance(value, AttentionSpec)]
        raise SpecError(
            f"the file defines no AttentionSpec named {variable!r}",
            where=shown_path(text),
            numbers=f"specs in it: {', '.join(specs) or 'none'}",
            way_out=f"{text}:{specs[0]}" if specs else f"{variable} = fg.AttentionSpec(...)",
        )
    loaded = spec.replace()
    object.__setattr__(loaded, "file", shown_path(str(path)))
    if not spec.named:
        name = as_name(source.stem if variable == "spec" else variable)
        object.__setattr__(loaded, "name", name)
    return loaded


def _files_near(source: Path) -> str:
    if not source.parent.is_dir():
        return f"no folder {source.parent.as_posix()}"
    near = sorted(file.name for file in source.parent.glob("*.py"))
    return f"Python files there: {', '.join(near[:20]) or 'none'}"


def _run_file(source: Path) -> dict[str, Any]:
    found = importlib.util.spec_from_file_location(f"flashgen_spec_{source.stem}", source)
    assert found is not None, "a .py file always has a module spec"
    assert found.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(found)
    keep = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # write nothing into the user's folder
    try:
        found.loader.exec_module(module)
    except FlashgenError:
        raise
    except Exception as error:
        line = _line_in(error, source)
        raise SpecError(
            f"running the spec file raised {type(error).__name__}: {error}",
            where=f"{shown_path(str(source))}:{line}",
            numbers=f"file {source.name}; it must define an AttentionSpec",
            way_out="a file that runs on its own: python " + source.name,
        ) from error
    finally:
        sys.dont_write_bytecode = keep
    return vars(module)


def _line_in(error: Exception, source: Path) -> int:
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).name == source.name
    ]
    return lines[-1] if lines else 0
