"""The Jinja environment of the templates, whose delimiters leave them valid C++ to an editor.

``/*% %*/`` blocks, ``/*{ x }*/`` values, ``/*# #*/`` comments, ``//%`` line statements and ``//#``
line comments. A line that ends with ``//? condition`` is part of the kernel where the condition
holds; after ``//?? condition``, so is the whole statement or function that begins there, with the
comments above it, the deeper lines below it and its closing brace. A line that is one value
becomes the value's lines, indented, and none if the value is empty. The default ``{{ }}`` would
silently eat CUDA initialisers such as ``{{0}}``.
"""

from __future__ import annotations

import functools
import hashlib
import re
import textwrap
from pathlib import Path

import jinja2
import jinja2.ext

from flashgen.kernels.codegen.text import one_line
from flashgen.shared.errors import RenderError

# In a wheel the templates are inside the package; in a checkout the folder is beside it.
_PACKAGE = Path(__file__).parents[2]
TEMPLATE_FOLDERS = (_PACKAGE / "templates", _PACKAGE.parent / "templates")


def template_folder() -> Path:
    """The folder of the templates of this installation.

    Raises:
        RenderError: when the templates folder is missing.
    """
    folder = next((f for f in TEMPLATE_FOLDERS if (f / "sm80/forward.cu.j2").is_file()), None)
    if folder is None:
        raise RenderError(
            "the template files are missing",
            where="templates/ beside or inside the flashgen package",
            numbers=f"{len(TEMPLATE_FOLDERS)} folders searched, sm80/forward.cu.j2 in none",
            way_out="reinstall flashgen, or run it from a complete checkout",
        )
    return folder


@functools.cache
def template_digest() -> str:
    """A digest of the names and contents of all templates, 16 hex digits.

    Raises:
        RenderError: when the templates folder is missing.
    """
    folder, digest = template_folder(), hashlib.sha256()
    for path in sorted(folder.rglob("*.j2")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:16]


class _Lines(jinja2.ext.Extension):
    """Turns guards at the end of lines into blocks, and a line that is one value into its lines.

    The line numbers of errors stay the same.
    """

    _VALUE = re.compile(r"^( *)/\*\{ ((?:(?!\}\*/).)+) \}\*/$")
    _GUARD = re.compile(r"^(.*?) *//\?(\??) (.+)$")
    _LEADS = re.compile(r" *(//|#pragma|template <.*>$)")  # what belongs to the statement below it

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        lines = source.split("\n")
        guards = {i: guard for i, line in enumerate(lines) if (guard := self._GUARD.match(line))}
        lines = [guards[i][1] if i in guards else line for i, line in enumerate(lines)]
        last = {i: self._last(lines, i) if guard[2] else i for i, guard in guards.items()}
        lines = [self._VALUE.sub(self._lines_of_value, line) for line in lines]
        for i, guard in reversed(guards.items()):
            lines[i] = f"/*% if {guard[3]} %*/{lines[i]}"
            ends_its_lines = lines[last[i]].endswith(("#*/", "%*/"))
            lines[last[i]] += "/*% endif %*/" if ends_its_lines else '/*{ "\\n" }*//*% endif %*/'
        return "\n".join(lines)

    @staticmethod
    def _lines_of_value(match: re.Match[str]) -> str:
        return f"/*{{ ({match[2]}) | lines({len(match[1])}) }}*//*# trims the end #*/"

    @classmethod
    def _last(cls, lines: list[str], i: int) -> int:
        """The last line of the statement that begins at line i."""
        while cls._LEADS.match(lines[i]) and i + 1 < len(lines):
            i += 1
        indent = _indent(lines[i])
        for j in range(i + 1, len(lines)):
            if not lines[j] or lines[j].startswith("#") or _indent(lines[j]) > indent:
                continue
            if _indent(lines[j]) < indent or lines[j][indent] != "}":
                break
            i = j
            if not lines[j].endswith("{"):
                return j
        else:
            j = len(lines)
        j -= 1
        while j > i and (not lines[j] or lines[j].startswith("#")):
            j -= 1
        return j


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _lines_of(value: object, indent: int) -> str:
    """The lines of a value, indented and each with its end."""
    text = str(value).removesuffix("\n")
    return textwrap.indent(text, " " * indent) + "\n" if text.strip() else ""


@functools.cache
def environment() -> jinja2.Environment:
    """The environment that loads the templates of this installation.

    Raises:
        RenderError: when the templates folder is missing.
    """
    result = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        block_start_string="/*%",
        block_end_string="%*/",
        variable_start_string="/*{",
        variable_end_string="}*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=[_Lines],
    )
    result.filters.update(one_line=one_line, lines=_lines_of)
    return result


def render_template(template: str, /, **fields: object) -> str:
    """The text of a template with its fields filled in.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    try:
        text = environment().get_template(template).render(**fields)
    except jinja2.TemplateError as error:
        raise RenderError(
            f"template {template} could not be filled: {error.message}",
            where=f"templates/{template}"
            + (f":{error.lineno}" if hasattr(error, "lineno") else ""),
            numbers=f"{len(fields)} fields were given: {', '.join(sorted(fields))}",
            way_out="make the template and flashgen/kernels/codegen agree on the name",
        ) from None
    return text
