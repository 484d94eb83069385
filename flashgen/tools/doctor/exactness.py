"""Whether the bits of what a kernel computes are determined, decided instruction by instruction.

PTX leaves the bits of an instruction open for one of these reasons (PTX ISA 9.0, sections as
named):

- it is an approximation: `.approx`, and `.full` of division (9.7.3);
- it is a floating-point add, sub or mul without a rounding modifier, which the assembler may fuse
  into a multiply-add (9.7.3, "add": "may be optimized aggressively");
- it adds floating-point products in a tensor core, whose order and rounding inside a sum are not
  specified (9.7.14, 9.7.15). They are determined where the emulator adds as the GPU does
  (`ptx_emulator.has_sums_of`);
- it adds floating-point numbers to memory, in whatever order the blocks come (9.7.13: atom, red;
  9.7.9: cp.reduce.async.bulk).
"""

from __future__ import annotations

import re
from collections import Counter

from ptx_emulator import has_sums_of

_TARGET = re.compile(r"^\.target (sm_\w+)", re.MULTILINE)
_STATEMENT = re.compile(r"^\s*\{?\s*(?:@!?%\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)\s", re.MULTILINE)
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}
_ROUNDINGS = {"rn", "rz", "rm", "rp"}
_MEMORY = {"atom", "red", "multimem"}


def open_instructions(ptx: str, gpu: str | None = None) -> Counter[str]:
    """The instructions whose results may differ between a GPU and the emulator, with their counts.

    A kernel without any has the same bits on both.

    Args:
        gpu: the architecture of the GPU, such as "sm_90". None: of any machine that follows the PTX
            manual, where all floating-point sums of tensor cores are open.
    """
    target = _TARGET.search(ptx)
    counts: Counter[str] = Counter()
    for match in _STATEMENT.finditer(ptx):
        if _is_open(match[1], gpu, target[1] if target else ""):
            counts[match[1]] += 1
    return counts


def _is_open(instruction: str, gpu: str | None, target: str) -> bool:
    name, *modifiers = instruction.split(".")
    suffixes = set(modifiers)
    if suffixes & {"approx", "full"}:
        return True
    if not suffixes & _FLOATS and not suffixes & {"tf32", "e4m3", "e5m2"}:
        return False
    if name in ("mma", "wgmma", "wmma"):
        multiplies = "mma" in (name, *modifiers) or "mma_async" in suffixes
        return multiplies and not (gpu and has_sums_of(gpu, target, instruction))
    if name in _MEMORY or instruction.startswith("cp.reduce"):
        return "add" in suffixes
    return name in ("add", "sub", "mul") and not suffixes & _ROUNDINGS
