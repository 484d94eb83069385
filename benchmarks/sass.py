"""Static instruction counts of a cubin's main loop, from nvdisasm's listing.

The main loop is the natural loop with the most tensor-core instructions. Its basic blocks are those
that every iteration runs (they dominate the back edge), and conditional blocks. Small loops that
poll a barrier are waits, which normally end at the first test: these loops and the branches back
from them are left out. A predicated instruction counts, because it takes an issue slot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.kernels.compile.disassembly import disassembled
from flashgen.kernels.pipeline import Build

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);?\s*$")
LABEL = re.compile(r"^\s*(\.L_[\w$]+):")
PLACE = re.compile(r'^\s*//## File "[^"]*", line (\d+)')
LEAVES = ("EXIT", "RET", "KILL")
TENSOR = ("HMMA", "HGMMA")
WAIT_AT_MOST = 16  # instructions of a loop that polls a barrier

CLASSES: dict[str, tuple[str, ...]] = {
    "tensor": (*TENSOR, "WARPGROUP", "WARPGROUPSET"),
    "exponential": ("MUFU",),
    "float": ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"),
    "maximum, select": ("FMNMX", "FSEL", "FSETP", "FSET", "SEL", "FCHK"),
    "convert": ("F2FP", "F2F", "F2I", "I2F", "I2FP", "PRMT", "FRND", "HMNMX2"),
    "memory": ("LDG", "STG", "LD", "ST", "LDS", "STS", "LDSM", "STSM", "LDGSTS", "LDL", "STL"),
    "lanes": ("SHFL", "VOTE", "VOTEU", "REDUX", "MATCH"),
    "barrier": ("BAR", "SYNCS", "FENCE", "MEMBAR", "DEPBAR", "LDGDEPBAR", "NANOSLEEP"),
    "move": ("MOV", "CS2R", "S2R", "LDC"),
    "control": ("BRA", "BSSY", "BSYNC", "BREAK", "BMOV", "NOP", "WARPSYNC", "YIELD", *LEAVES),
}
_CLASS_OF = {base: name for name, bases in CLASSES.items() for base in bases}


@dataclass(frozen=True)
class Instruction:
    op: str  # with its modifiers
    operands: str
    predicated: bool
    target: str | None  # label of a branch
    lines: tuple[int, ...]  # its source line, then the lines where that was inlined

    @property
    def base(self) -> str:
        return self.op.split(".")[0]

    @property
    def kind(self) -> str:
        """A name of CLASSES, "uniform" (once for the warp), or "integer" for all others."""
        if self.base in _CLASS_OF:
            return _CLASS_OF[self.base]
        if self.base == "IMAD" and ", RZ, RZ, " in self.operands:
            return "move"
        uniform = self.base.startswith("U") or self.base in ("R2UR", "S2UR", "CS2UR")
        return "uniform" if uniform else "integer"


Block = tuple[Instruction, ...]


@dataclass(frozen=True)
class Loop:
    """Blocks of one loop, without the blocks of loops inside it.

    Attributes:
        always: the instructions that each iteration runs.
        conditional: blocks that an iteration may leave out.
        inner: the most instructions that one iteration of each loop inside runs, without waits.
        waits: loops that poll a barrier.
    """

    always: Block
    conditional: tuple[Block, ...]
    inner: tuple[Block, ...]
    waits: int


def listing_of(cubin: bytes, kernel: str, arch: str) -> str:
    """nvdisasm's listing of ``cubin``, with source lines."""
    return disassembled(cubin, kernel, arch, ("-c", "-gi"))


def instructions(listing: str) -> list[Instruction]:
    """All instructions of a listing, in the order of their addresses."""
    return [instruction for block in _blocks(listing)[0] for instruction in block]


def waiting_exponentials(built: Build, listing: str | None = None) -> int:
    """Exponentials that Hopper's fused or dq kernel computes when it has nothing else to do: of
    those behind the wait for dP, what exceeds a third of all. Those before it overlap with dP.

    A score function and dropout are computed with dS, after that wait.

    Args:
        listing: the text of its disassembly; None to make it.
    """
    plan = built.plan
    overlap = plan.path == "sm_90a" and plan.kernel in ("fused", "dq") and plan.score_warps == 1
    if not overlap or "while dP is computed" not in built.source.text:
        return 0
    if listing is None:
        listing = listing_of(built.cubin, built.binary.kernel, built.binary.arch)
    waits, before, behind = False, 0, 0
    for i in main_loop(listing).always:
        waits |= i.op.startswith("WARPGROUP.DEPBAR") and i.operands.endswith(", 0x0")
        if i.op == "MUFU.EX2":
            before, behind = before + (not waits), behind + waits
    return max(0, behind - (before + behind) // 3)


def main_loop(listing: str, *, around_passes: bool = False) -> Loop:
    """The innermost loop with at least half of the most tensor-core instructions of any loop.

    Around a main loop there may be one over tiles, with the products of its first and last step.

    Args:
        around_passes: the main loop has some of its products in a loop inside: it is the innermost
            loop with the most tensor-core instructions.

    Raises:
        ValueError: no loop has a tensor-core instruction.
    """
    graph = _LoopGraph(listing)
    products = graph.products()
    share = 1 if around_passes else 2
    large = (head for head, count in products.items() if share * count >= max(products.values()))
    return graph.loop(min(large, key=lambda head: len(graph.loops[head][0])))


def product_loops(listing: str) -> list[Loop]:
    """All innermost loops with tensor-core instructions, in the order of their addresses.

    A kernel may have one loop for masked tiles and one for others, or loops of warps with different
    work.

    Raises:
        ValueError: no loop has a tensor-core instruction.
    """
    graph = _LoopGraph(listing)
    bodies = {head: graph.loops[head][0] for head, count in graph.products().items() if count}
    return [
        graph.loop(head)
        for head, body in sorted(bodies.items())
        if not any(other < body for other in bodies.values())
    ]


class _LoopGraph:
    """The natural loops of a listing: by the number of their first block, body and latches."""

    def __init__(self, listing: str) -> None:
        self.blocks, self.edges = _blocks(listing)
        self.dominators = _dominators(self.edges)
        self.loops: dict[int, tuple[set[int], set[int]]] = {}
        for block in self.dominators:
            for head in self.edges[block]:
                if head in self.dominators[block]:
                    body, latches = self.loops.setdefault(head, ({head}, set()))
                    latches.add(block)
                    body |= _body(self.edges, head, block)

    def instructions_of(self, body: set[int] | Sequence[int]) -> Block:
        return tuple(i for b in sorted(body) for i in self.blocks[b])

    def products(self) -> dict[int, int]:
        """The number of tensor-core instructions of each loop; ValueError if there are none."""
        counts = {
            head: sum(i.base in TENSOR for i in self.instructions_of(body))
            for head, (body, _) in self.loops.items()
        }
        if not any(counts.values()):
            raise ValueError("no loop of this listing has a tensor-core instruction")
        return counts

    def loop(self, head: int) -> Loop:
        body, latches = self.loops[head]
        inner = [other for h, (other, _) in self.loops.items() if h != head and other < body]
        waits = [other for other in inner if _is_wait(self.instructions_of(other))]
        own_blocks = body - set().union(*inner)
        always = [b for b in sorted(own_blocks) if all(b in self.dominators[n] for n in latches)]
        before = {b: {n for n in body if b in self.edges[n]} for b in own_blocks}
        slow = {b for b in own_blocks if before[b] and before[b] <= set().union(*waits)}
        return Loop(
            always=self.instructions_of(always),
            conditional=tuple(
                tuple(self.blocks[b]) for b in sorted(own_blocks.difference(always, slow))
            ),
            inner=tuple(self.instructions_of(other) for other in inner if other not in waits),
            waits=len(waits),
        )


def by_kind(block: Sequence[Instruction]) -> Counter[str]:
    return Counter(instruction.kind for instruction in block)


def _is_wait(block: Block) -> bool:
    polls = any(i.base in ("SYNCS", "NANOSLEEP") for i in block)
    return polls and len(block) <= WAIT_AT_MOST


def _blocks(listing: str) -> tuple[list[list[Instruction]], list[list[int]]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    in_text = False
    lines: list[int] = []
    ended = False  # whether the lines above belong to the previous instruction
    for text in listing.splitlines():
        if re.match(r"\s*\.section\s", text):
            in_text = ".text." in text
        elif not in_text:
            continue
        elif location := PLACE.match(text):
            if ended:
                lines, ended = [], False
            lines.append(int(location[1]))
        elif label := LABEL.match(text):
            labels[label[1]] = len(code)
        elif match := INSTRUCTION.match(text):
            ended = True
            target = re.search(r"\.L_[\w$]+", match[4])
            code.append(
                Instruction(
                    match[3],
                    match[4].strip(),
                    match[2] is not None,
                    target[0] if target else None,
                    tuple(lines),
                )
            )
    jumps = {n for n, i in enumerate(code) if i.base in ("BRA", "CALL", *LEAVES)}
    starts = sorted({0, *labels.values(), *(n + 1 for n in jumps)} - {len(code)})
    number = {start: n for n, start in enumerate(starts)}
    blocks = [code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
    edges: list[list[int]] = []
    for n, block in enumerate(blocks):
        last, out = block[-1], []
        # ptxas leaves some loops by CALL. A function that does return has no edge back.
        if last.base in ("BRA", "CALL") and last.target in labels:
            out.append(number[labels[last.target]])
        # A branch may be conditional by an operand too: BRA P0, ... or BRA.DIV.
        by_operand = re.match(r"!?U?P\d", last.operands) is not None or ".DIV" in last.op
        falls = last.predicated or by_operand or last.base not in ("BRA", *LEAVES)
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
            new = set.intersection(*(result[before_n] for before_n in before[n])) | {n}
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
