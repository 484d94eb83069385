"""A device function that is made from a spec, with the parameters that its body needs."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

import sympy

from flashgen.kernels.codegen.text import DeviceFunction
from flashgen.spec.language.symbols import (
    DISTANCE,
    K_HI,
    K_LO,
    PRODUCT,
    Q_HI,
    Q_LO,
    SCORE,
    SCORE_TANGENT,
    B,
    H,
    K,
    Q,
)

# No scalar of a spec can have these names, so that no two symbols are equal.
TILE = sympy.Symbol(".tile", integer=True)
TILE_END = sympy.Symbol(".tile_end", integer=True)

# Function parameters in the order of a signature, with their C++ type.
PARAMETERS: dict[sympy.Symbol, str] = {
    SCORE: "float score",
    SCORE_TANGENT: "float score_tangent",
    PRODUCT: "float product",
    DISTANCE: "float distance",
    B: "int b",
    H: "int h",
    Q: "int q",
    K: "int k",
    Q_LO: "int q_lo",
    Q_HI: "int q_hi",
    K_LO: "int k_lo",
    K_HI: "int k_hi",
    TILE: "int tile",
    TILE_END: "int tile_end",
}

MOST_INLINED = 72
"""Instructions of the largest function of a spec that is inlined.

A thread of sm_90a has 104 scores, and code for each in full and in mixed tiles: 130 instructions
would be 1.5 MB of machine code, for which the assembler takes 10 s."""

MOST_SINES = 16
"""Sines and cosines that are inlined in a function that is not inlined itself. Each has about 80
instructions, and their compilation takes longer than that of the rest of the kernel."""

_SINE = re.compile(r"\b(?:co)?sine\(")

# A field of p, or p as an argument of a function that reads a tensor.
_TAKES_PARAMS = re.compile(r"\bp[.,)]")


@dataclass(frozen=True)
class SpecFunction(DeviceFunction):
    """A function made from the spec.

    Attributes:
        uses: the symbols that determine its parameters.
        extra_params: the parameters for values that other functions of the spec return.
        struct: the declaration of the struct that it returns; "" without a struct of its own.
        operations: its instructions, roughly, where it may be large, else 0.
    """

    uses: frozenset[sympy.Symbol]
    extra_params: tuple[str, ...] = ()
    struct: str = ""
    operations: int = 0

    @property
    def is_inlined(self) -> bool:
        """False for a large function: its copies for all scores of a thread would take minutes to
        compile, and fill the instruction cache."""
        return self.operations <= MOST_INLINED

    @property
    def calls_sines(self) -> bool:
        """Whether the function has so many sines and cosines that it calls them."""
        return not self.is_inlined and len(_SINE.findall("\n".join(self.body))) > MOST_SINES

    @property
    def text(self) -> str:
        """The function, after its struct, without a final newline."""
        return f"{self.struct}\n\n{super().text}" if self.struct else super().text

    @staticmethod
    def create(
        name: str,
        returns: str,
        comment: Sequence[str],
        body: Sequence[str],
        uses: Set[sympy.Symbol],
        *,
        extra_params: Sequence[str] = (),
        struct: str = "",
        operations: int = 0,
    ) -> SpecFunction:
        """The function with the parameters that its body needs, in the order of PARAMETERS."""
        params = ["const Params& p"] if _TAKES_PARAMS.search(" ".join(body)) else []
        params += extra_params
        params += [text for symbol, text in PARAMETERS.items() if symbol in uses]
        return SpecFunction(
            name,
            returns,
            tuple(params),
            tuple(comment),
            tuple(body),
            frozenset(uses),
            tuple(extra_params),
            struct,
            operations,
        )
