"""Lines of code by folder: without blank lines, comments and docstrings.

    python benchmarks/lines.py

Counts the Python files of flashgen/, ptx_emulator/, tests/ and benchmarks/ and every file of
templates/. A control line of a kernel template is one that consists of Jinja statements alone, such
as `if`, `endfor`, `set` or `macro`; each line of a statement of several lines counts. Those that
include or import another template do not count. Their share is that of all lines of the kernel
templates, comments and blank lines included.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("flashgen", "ptx_emulator", "templates")
FOLDERS = (*PRODUCT, "tests", "benchmarks")
KERNELS = ("common", "sm80", "sm90")  # folders of templates/ whose files become kernels

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
STATEMENT = re.compile(r"/\*%.*?%\*/|^[ \t]*//%[^\n]*", re.DOTALL | re.MULTILINE)
REFERENCE = re.compile(r"/\*%[-+]?\s*(include|import|from)\b")
# Comments of Jinja, of C and of HTML. One that begins with /*% or /*{ is Jinja's, and no comment.
COMMENT = re.compile(r"/\*(?![%{]).*?\*/|<!--.*?-->", re.DOTALL)


def code_lines_of_python(text: str) -> int:
    """The lines of a Python file that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def code_lines_of_template(text: str) -> int:
    """The lines of a template, control lines included, that are neither blank nor comments."""
    text = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and (not line.startswith("//") or line[:3] == "//%") for line in lines)


def control_lines(text: str) -> int:
    """The lines of a template that are Jinja statements and nothing else."""

    def marked(match: re.Match[str]) -> str:
        return match[0] if REFERENCE.match(match[0]) else re.sub(r"[^\n]+", "\0", match[0])

    lines = (line.strip() for line in STATEMENT.sub(marked, text).splitlines())
    return sum("\0" in line and not line.strip("\0 \t") for line in lines)


def files_of(folder: str) -> Iterator[tuple[str, Path]]:
    """The files that are counted, each with the folder that its lines are added to."""
    for path in sorted((ROOT / folder).rglob("*" if folder == "templates" else "*.py")):
        if path.is_file() and "__pycache__" not in path.parts:
            above = path.relative_to(ROOT / folder).parts[:-1]
            yield "/".join((folder, *above[: 2 if folder == "flashgen" else 1], "")), path


def main() -> None:
    totals: Counter[str] = Counter()
    for folder in FOLDERS:
        by_subfolder: Counter[str] = Counter()
        files: Counter[str] = Counter()
        count = code_lines_of_template if folder == "templates" else code_lines_of_python
        for subfolder, path in files_of(folder):
            by_subfolder[subfolder] += count(path.read_text())
            files[subfolder] += 1
        for subfolder, lines in sorted(by_subfolder.items(), key=lambda item: -item[1]):
            print(f"{lines:8,}  {files[subfolder]:4} files  {subfolder}")
        totals[folder] = by_subfolder.total()
        print(f"{totals[folder]:8,}  {files.total():4} files  {folder} in all\n")

    product = sum(totals[folder] for folder in PRODUCT)
    print(f"{product:8,}  {' + '.join(PRODUCT)}")
    kernels = [path.read_text() for name, path in files_of("templates") if name[10:-1] in KERNELS]
    control, lines = sum(map(control_lines, kernels)), sum(text.count("\n") for text in kernels)
    print(f"{control:8,}  control lines of {lines:,} in kernel templates: {control / lines:.1%}")


if __name__ == "__main__":
    main()
