"""Static instruction counts of a cubin's main loop, from nvdisasm's listing.

The main loop is the natural loop with the most tensor-core instructions. Its basic blocks are those
that every iteration runs (they dominate the back edge), and conditional ones.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);?\s*$")
LABEL = re.compile(r"^\s*(\.L_[\w$]+):")
LEAVES = ("EXIT", "RET", "KILL")


@dataclass(frozen=True)
class Instruction:
    op: str  # with its modifiers
    predicated: bool
    target: str | None  # label of a branch

    @property
    def base(self) -> str:
        return self.op.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """Blocks of one loop, without those of loops inside it."""

    always: tuple[Instruction, ...]
    conditional: tuple[tuple[Instruction, ...], ...]
    inner_loops: int

    def matching(self, test: Callable[[Counter[str]], bool]) -> int:
        """Instructions of the conditional blocks whose opcodes pass ``test``."""
        return sum(len(b) for b in self.conditional if test(Counter(i.base for i in b)))


def nvdisasm() -> str:
    """Path of nvdisasm: on PATH, or from the package nvidia-cuda-nvdisasm (extra ``sass``)."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    for path in Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/bin/nvdisasm"):
        return str(path)
    sys.exit("nvdisasm is missing: pip install 'flashgen[sass]'")


def main_loop(cubin: bytes) -> Loop:
    """The loop of ``cubin`` with the most tensor-core instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    blocks, edges = _blocks(listing)
    dominators = _dominators(edges)
    loops: dict[int, tuple[set[int], set[int]]] = {}
    for block in dominators:
        for head in edges[block]:
            if head in dominators[block]:
                body, latches = loops.setdefault(head, ({head}, set()))
                latches.add(block)
                body |= _body(edges, head, block)

    def tensor(body: set[int]) -> int:
        return sum(i.base == "HMMA" for b in body for i in blocks[b])

    head = max(loops, key=lambda h: (tensor(loops[h][0]), -len(loops[h][0])))
    body, latches = loops[head]
    inner = [h for h, (other, _) in loops.items() if h != head and other < body]
    own = body.difference(*(loops[h][0] for h in inner))
    always = [b for b in sorted(own) if all(b in dominators[latch] for latch in latches)]
    rest = sorted(own.difference(always))
    return Loop(
        always=tuple(i for b in always for i in blocks[b]),
        conditional=tuple(tuple(blocks[b]) for b in rest),
        inner_loops=len(inner),
    )


def _blocks(listing: str) -> tuple[list[list[Instruction]], list[list[int]]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    in_text = False
    for line in listing.splitlines():
        if re.match(r"\s*\.section\s", line):
            in_text = ".text." in line
            continue
        if not in_text:
            continue
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif match := INSTRUCTION.match(line):
            target = re.search(r"\.L_[\w$]+", match[4])
            code.append(Instruction(match[3], match[2] is not None, target and target[0]))
    jumps = {n for n, i in enumerate(code) if i.base == "BRA" or i.base in LEAVES}
    starts = sorted({0, *labels.values(), *(n + 1 for n in jumps)} - {len(code)})
    number = {start: n for n, start in enumerate(starts)}
    blocks = [code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
    edges: list[list[int]] = []
    for n, block in enumerate(blocks):
        last, out = block[-1], []
        if last.base == "BRA" and last.target in labels:
            out.append(number[labels[last.target]])
        falls = last.predicated or last.base not in ("BRA", *LEAVES)
        if falls and n + 1 < len(blocks):
            out.append(n + 1)
        edges.append(out)
    return blocks, edges


def _dominators(edges: list[list[int]]) -> dict[int, set[int]]:
    reached, queue = {0}, [0]
    while queue:
        for target in edges[queue.pop()]:
            if target not in reached:
                reached.add(target)
                queue.append(target)
    before: dict[int, list[int]] = {n: [] for n in reached}
    for n in reached:
        for target in edges[n]:
            before[target].append(n)
    result = {n: set(reached) for n in reached}
    result[0] = {0}
    changed = True
    while changed:
        changed = False
        for n in sorted(reached - {0}):
            new = set.intersection(*(result[m] for m in before[n])) | {n}
            if new != result[n]:
                result[n], changed = new, True
    return result


def _body(edges: list[list[int]], head: int, latch: int) -> set[int]:
    body, queue = {head, latch}, [latch]
    while queue:
        block = queue.pop()
        if block == head:
            continue
        for n, out in enumerate(edges):
            if block in out and n not in body:
                body.add(n)
                queue.append(n)
    return body
