"""The Jinja environment of the templates, whose delimiters leave them valid C++ to an editor.

``/*% %*/`` blocks, ``/*{ x }*/`` values, ``/*# #*/`` comments, ``//%`` line statements and ``//#``
line comments. A line that ends with ``//? condition`` is part of the kernel where the condition
holds. The default ``{{ }}`` would silently eat CUDA initialisers such as ``{{0}}``.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import jinja2
import jinja2.ext

from flashgen.codegen.text import one_line
from flashgen.errors import RenderError

# In a wheel the templates are inside the package; in a checkout the folder is beside it.
TEMPLATE_FOLDERS = (
    Path(__file__).parent.parent / "templates",
    Path(__file__).parent.parent.parent / "templates",
)


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
    folder, found = template_folder(), hashlib.sha256()
    for path in sorted(folder.rglob("*.j2")):
        text = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()[:16]


class _GuardedLines(jinja2.ext.Extension):
    """Lines with a condition at their end, as blocks; line numbers of errors stay the same."""

    _GUARDED = re.compile(r"^(.*?) *//\? (.+)$", re.MULTILINE)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return self._GUARDED.sub(self._block, source)

    @staticmethod
    def _block(found: re.Match[str]) -> str:
        line, condition = found.groups()
        end = "" if line.endswith("-}*/") else '/*{ "\\n" }*/'  # a macro that ends its lines
        return f"/*% if {condition} %*/{line}{end}/*% endif %*/"


@functools.cache
def environment() -> jinja2.Environment:
    """The environment that loads the templates of this installation.

    Raises:
        RenderError: when the templates folder is missing.
    """
    made = jinja2.Environment(
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
        extensions=[_GuardedLines],
    )
    made.filters["one_line"] = one_line
    return made


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
            way_out="make the template and flashgen/codegen agree on the name",
        ) from None
    return text
