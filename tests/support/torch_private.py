"""The private names of torch that modules of flashgen use, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

UNSTABLE = ("torch.fx.experimental.",)
"""Public by their names, without a promise of torch."""


def private_names() -> dict[str, str]:
    """The dotted names, each with a module that uses it."""
    paths = sorted((ROOT / "flashgen").rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    found = {
        name: path.relative_to(ROOT).as_posix()
        for path, text in texts.items()
        if "import torch" in text or "from torch" in text
        for name in _names_in(ast.parse(text))
        if name.startswith(UNSTABLE) or any(_is_private(part) for part in name.split("."))
    }
    prefixes = {name.rpartition(".")[0] for name in found}
    return {name: path for name, path in found.items() if name not in prefixes}


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _names_in(module: ast.Module) -> Iterator[str]:
    """The names that begin with torch: those that are imported, and chains of attributes."""
    aliases: dict[str, str] = {}
    nodes = list(ast.walk(module))
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases |= {each.name: each.name for each in node.names if each.name == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            imported = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            aliases |= imported
            yield from imported.values()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            chain = _chain(node.value, aliases)
            if isinstance(target, ast.Name) and chain:
                aliases[target.id] = chain
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from filter(None, [_chain(node, aliases)])


def _chain(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The dotted name of a chain of attributes; None where it does not begin with an alias."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    before = _chain(node.value, aliases) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if before else None
