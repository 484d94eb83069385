"""Conditions of tiles that are emitted as several return statements."""

from __future__ import annotations

from typing import Any

import flashgen as fg
from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.spec.analysis.sharing import share_evaluated
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO
from flashgen.spec.language.sympy_functions import FloorDiv

LENGTH = fg.Tensor("length", ("batch",), "int32")
WIDTH = fg.Tensor("width", ("heads",), "int16")


def exclusive(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Both alternatives of the xor read the same two tensors."""
    return (abs(q - k) <= WIDTH[h]) ^ (k < LENGTH[b])


def test_alternatives_that_read_the_same_tensors_declare_names_of_their_own() -> None:
    spec = fg.AttentionSpec(exclusive, head_dim=8, name="exclusive")
    assert fg.build(spec).binary.cubin


def test_a_name_of_a_nested_block_does_not_inherit_the_type_of_an_earlier_one() -> None:
    printer = CPrinter({}, "float32")
    wide, narrow = FloorDiv(Q_LO * 2**20 * K_LO, 3), FloorDiv(Q_HI - K_HI, 3)
    for value, ctype in ((wide, "int64"), (narrow, "int")):
        block = share_evaluated(value < 5, value > 1)
        printer.lets(block, nested=True)
        assert [printer.ctype(symbol) for symbol, _ in block.lets] == [ctype]
