"""Formulas that are text, sympy expression and function at once.

A formula is written the way a person reads it, which is also valid Python. From that one text come
the sympy expression that can be reasoned about, the function that the search evaluates, and the
line with numbers in place of names that a derivation prints: what is printed is what was computed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import sympy

Number = int | float

# Every quantity that a formula may mention: name -> meaning.
QUANTITIES = {
    "block_q": "query rows per block (the paper's Br)",
    "block_k": "keys per step of the main loop (the paper's Bc)",
    "d_qk": "head dim of Q and K",
    "d_v": "head dim of V and O",
    "d": "the larger head dim (the paper's d)",
    "depth": "columns of Q and K in shared memory: whole steps of the product",
    "depth_v": "columns of V in shared memory",
    "e": "bytes per operand element",
    "stages": "buffers for K, and for V",
    "warps": "warps per block",
    "row_groups": "groups of 16 rows per warp, of the side that the block owns",
    "column_warps": "warps that own the same rows, each with a share of the columns of its sums",
    "score_warps": "how many of those share the scores, through shared memory; 1: none do",
    "repeats": "how many times each score is computed: column_warps / score_warps",
    "columns": "columns that a warp sums, of dK and dV or of dQ",
    "exchanged": "tiles that warps exchange: P and dS where they share scores, else 0",
    "dq_row_warps": "warps among which the rows of a dQ tile are shared; the rest share columns",
    "dq_columns": "columns of a dQ tile per warp",
    "dq_groups": "warpgroups that share the queries of a dQ tile; 1: they share its columns",
    "syncs": "barriers per step",
    "blocks": "resident blocks per SM",
    "M": "shared memory that one block can have, in bytes",
    "M_sm": "shared memory of an SM, in bytes",
    "reserved": "shared memory that the system takes from each block, in bytes",
    "R": "32-bit registers of an SM",
    "smem": "shared memory of a block, in bytes",
    "smem_sm": "shared memory of all resident blocks, in bytes",
    "registers": "registers that a thread needs",
    "pending": "registers per accumulator of S and dP, for values on their way in or out",
    "launched": "registers of each thread when a block begins",
    "searching": "registers of a warp that looks for live tiles while it copies; 0: none does",
    "producer": "registers that a thread of the copying warpgroup keeps",
    "register_limit": "registers that a thread can have with that many blocks resident",
    "query_bytes": "bytes of shared memory for LSE and delta of a query",
    "extra": "registers that the spec, the architecture and unequal head dims add",
    "access": "bytes per access to global memory",
    "copy_ops": "instructions per access of a copy to shared memory",
    "factors": "tensor-core products per multiplication: 6 for float32, else 1",
    "tensor_rate": "tensor-core multiply-adds per clock and SM",
    "l2_rate": "bytes per clock that an SM gets from L2",
    "atomic_rate": "bytes per clock that an SM can add to L2 atomically",
    "hbm_rate": "bytes per clock of global memory, per SM",
    "score_ops": "instructions of score_mod per element, its derivative's included in backward",
    "dropout_ops": "instructions per score element for dropout's random bits and selection",
    "macs": "multiply-adds per score element",
    "reads": "bytes of fragments read from shared memory per score element",
    "logit": "bytes of a sink's logit",
    "row_bytes": "bytes to and from global memory per row",
    "products": "instructions per score element for the matrix products",
    "rest": "instructions per score element for everything else",
    "tensor": "clocks of the tensor cores per score element",
    "shared": "clocks of shared memory per score element",
    "l2": "clocks of the path from L2 per score element",
    "atomics": "clocks of the atomic additions to dQ per score element",
    "special": "clocks of the special-function units per score element",
    "issue": "clocks of the instruction schedulers per score element",
    "busiest": "clocks of the busiest resource per score element",
    "alone": "clocks per score element of warps that nothing overlaps with",
    "overlap": "how many warps per scheduler are out of step with each other",
    "occupied": "share of the schedulers that have a warp",
    "barriers": "clocks lost at barriers per score element",
    "waits": "clocks per score element in which an only buffer is filled",
    "cost": "clocks of one SM per score element; per row for delta",
    "busy": "predicted share of the time in which the tensor cores multiply",
    "sms": "SMs of the product",
    "slots": "blocks that run at the same time",
    "jobs": "tiles of queries of a launch, of all heads and batch entries",
    "rounds": "how often every slot gets a block, where each job has one",
    "saved": "clocks of blocks that need not start, where they do one job after another",
    "clock_mhz": "clocks per microsecond",
    "cleared": "clocks to clear the counter by which blocks take jobs",
    "steps": "steps of the main loops of all blocks",
    "makespan": "steps until the last block is done, when each free slot takes the next one",
    "quantisation": "by how much slots that have no block at times make the launch longer",
    "scores": "score elements that the launch computes; rows for delta",
    "bytes": "of operands and results, each once",
    "work": "clocks of the launch if all SMs were busy until its end",
    "hbm": "clocks in which its bytes come from global memory",
    "time": "clocks of the launch",
}

SYMBOLS = {name: sympy.Symbol(name, positive=True) for name in QUANTITIES}
_SYMPY_NAMES: dict[str, Any] = {
    **SYMBOLS,
    "max": sympy.Max,
    "min": sympy.Min,
    "ceil": sympy.ceiling,
    "floor": sympy.floor,
}
_PYTHON_NAMES = {"max": max, "min": min, "ceil": math.ceil, "floor": math.floor}
_GLOBALS = {"__builtins__": {}, **_PYTHON_NAMES}
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Formula:
    """A named formula: ``name = text``, in ``unit``."""

    name: str
    text: str
    unit: str = ""

    @functools.cached_property
    def expr(self) -> sympy.Expr:
        """As a sympy expression over `SYMBOLS`."""
        return sympy.sympify(self.text, locals=_SYMPY_NAMES)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The quantities it mentions, in the order of first mention."""
        return tuple(dict.fromkeys(w for w in _WORD.findall(self.text) if w in QUANTITIES))

    @functools.cached_property
    def _code(self) -> CodeType:
        return compile(self.text, f"<formula {self.name}>", "eval")

    def __call__(self, values: Mapping[str, Number]) -> Number:
        """The value; an int when it is whole."""
        result: Number = eval(self._code, _GLOBALS, values)
        return tidy(result)

    def substituted(self, values: Mapping[str, Number]) -> str:
        """The text with numbers for names."""
        return _WORD.sub(
            lambda word: plain(values[word[0]]) if word[0] in QUANTITIES else word[0], self.text
        )


class Steps:
    """Formulas that build on each other, in order; evaluated together because search is hot."""

    def __init__(self, *formulas: Formula) -> None:
        self.formulas = formulas
        self._code: CodeType | None = None

    def __call__(self, values: dict[str, Number]) -> dict[str, Number]:
        """``values``, to which the value of each formula is added under its name."""
        if self._code is None:
            lines = "\n".join(f"{formula.name} = {formula.text}" for formula in self.formulas)
            self._code = compile(lines, "<formulas>", "exec")
        exec(self._code, _GLOBALS, values)
        return values


def tidy(value: Number) -> Number:
    """An int where the value is whole, so that bytes and registers print as such."""
    return int(value) if value == int(value) else float(value)


def plain(value: Number) -> str:
    """A number inside a formula: no separators; four digits where it is not whole."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def counted(value: Number) -> str:
    """A number in a sentence: 166,912 or 0.2561."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def evaluate(text: str) -> Number:
    """The value of a formula's substituted text: the arithmetic that a derivation prints.

    Raises:
        NameError: the text has names other than min, max, ceil, floor.
    """
    code = compile(text, "<derivation>", "eval")
    unknown = set(code.co_names) - set(_PYTHON_NAMES)
    if unknown:
        raise NameError(f"not a number: {', '.join(sorted(unknown))}")
    return tidy(eval(code, _GLOBALS))
