"""Names of a user's scalars and tensors never collide with those of the templates."""

from __future__ import annotations

import re

import pytest

import flashgen as fg
from flashgen.codegen.functions import FIELDS, PARAMETERS
from flashgen.language.capture_names import check_name


def accepted(name: str) -> bool:
    try:
        check_name("Scalar", name)
    except fg.SpecError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_no_scalar_equals_a_symbol_of_the_emitted_functions(dtype: str) -> None:
    for symbol in (*PARAMETERS, *FIELDS):
        if accepted(symbol.name):
            assert fg.Scalar(symbol.name, dtype).expr != symbol
    for text in (*PARAMETERS.values(), *FIELDS.values()):
        name = re.split(r"[ .]", text)[-1]
        if accepted(name):
            assert fg.Scalar(name, dtype).expr not in {*PARAMETERS, *FIELDS}


@pytest.mark.slow
def test_every_word_of_a_kernel_can_name_a_scalar() -> None:
    causal = fg.emit(fg.AttentionSpec(lambda b, h, q, k: k <= q), arch="sm_80")
    texts = (kernel.text for kernel in (causal.forward, *causal.backward))
    words = sorted({word for text in texts for word in re.findall(r"[A-Za-z]\w*", text)})
    names = [word for word in words if accepted(word)]
    assert {"tile", "tile_end", "row_sum"} <= set(names)
    for first in range(0, len(names), 400):
        scalars = [fg.Scalar(name) for name in names[first : first + 400]]
        limit = sum(scalars[1:], start=scalars[0])
        fg.build(fg.AttentionSpec(lambda b, h, q, k, n=limit: q - k < n), arch="sm_80")


def test_a_tensor_that_is_named_like_a_function_leaves_its_calls_alone() -> None:
    expf = fg.Tensor("expf", (), "float32")
    spec = fg.AttentionSpec(None, lambda score, b, h, q, k: fg.exp(score * expf) + expf)
    body = fg.emit(spec, arch="sm_80").forward.text
    assert "float expf" not in body
    assert "expf(score *" in body
