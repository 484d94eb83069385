"""Runs examples/tour.ipynb, and makes the page "A tour" of it while the site is built.

    python docs/tour.py            executes the cells and writes their outputs into the notebook
    python docs/tour.py --check    exit status 1 when an output is not that of the notebook

A notebook is JSON, and its cells are plain Python: neither needs a Jupyter server. mkdocs calls the
functions `on_files` and `on_page_markdown` (mkdocs.yml, hooks). The page is in no folder, so that
its text stands in the notebook alone; pages link to `../examples/tour.ipynb`, which leads to the
notebook where the files are read, and to the page on the site.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
PAGE = "tour.md"

Cell = dict[str, Any]
Output = dict[str, Any]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    before = NOTEBOOK.read_text(encoding="utf-8")
    after = executed(json.loads(before))
    if "--check" not in sys.argv:
        NOTEBOOK.write_text(after, encoding="utf-8")
    elif after != before:
        shown = zip(before.splitlines(), after.splitlines(), strict=False)
        old, new = next(((a, b) for a, b in shown if a != b), ("", "more or fewer lines"))
        sys.exit(f"tour.ipynb is not up to date: python docs/tour.py\n- {old}\n+ {new}")


def executed(notebook: dict[str, Any]) -> str:
    """The text of the notebook with the outputs that its cells have now."""
    module = ModuleType("flashgen_tour")  # torch.compile looks functions up in their module
    sys.modules[module.__name__] = module
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
        cell["outputs"] = list(outputs_of("".join(cell["source"]), number, module.__dict__))
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def outputs_of(source: str, number: int, namespace: dict[str, Any]) -> Iterator[Output]:
    """Executes a cell: what it prints, then the value of its last line, as notebooks show it."""
    name = f"tour.ipynb, cell {number}"
    # flashgen quotes the lines of the functions that it traces.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    value = None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    if out.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": lines(out.getvalue())}
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_svg_"):
            data = {"image/svg+xml": lines(value._repr_svg_()), **data}
        yield {
            "data": data,
            "execution_count": number,
            "metadata": {},
            "output_type": "execute_result",
        }


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


# ---- the page ---------------------------------------------------------------------------------


def page(notebook: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The page as Markdown, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, str] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "]("))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/svg+xml")
            if picture:
                name = f"tour_{len(pictures) + 1}.svg"
                pictures[name] = "".join(picture)
                text = "".join(output["data"]["text/plain"]).split("\n\n")[0].replace("\n", "; ")
                parts.append(f"![{text}]({name})")
            else:
                text = "".join(output.get("text") or output["data"]["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page and its pictures to the site."""
    from mkdocs.structure.files import File

    text, pictures = page(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    for name, content in {PAGE: text, **pictures}.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to the notebook lead to the page."""
    return markdown.replace("](../examples/tour.ipynb", f"]({PAGE}")


if __name__ == "__main__":
    main()
