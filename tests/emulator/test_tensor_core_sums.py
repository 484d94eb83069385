"""Sums of tensor cores: those that GPUs made, special values, and that blocks follow each other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tensor_core_vectors import SAMPLE, Vectors, emulated, vectors_of


@pytest.mark.parametrize(
    "vectors", vectors_of(SAMPLE), ids=lambda v: f"{v.gpu}-{v.kind}-{'fp16' if v.half else 'fp32'}"
)
def test_sums_have_the_bits_that_gpus_gave(vectors: Vectors) -> None:
    assert emulated(vectors).tobytes() == vectors.d.tobytes()
    assert len(vectors.d) == 80
    assert np.isfinite(vectors.d).all()
