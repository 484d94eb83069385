"""Tiles of masks of every function: none with a kept element is called empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, B, H, K, Q
from flashgen.spec.language.tracing import trace_mask
from tests.support.tiers import one_in

MASKS: dict[str, Any] = {
    "erf": lambda q, k: fg.erf((q - k) / 20) > 0.4,
    "erfc": lambda q, k: fg.erfc((q - k) / 20) > 0.4,
    "log1p": lambda q, k: fg.log1p(fg.abs(q - k)) < 2.1,
    "expm1": lambda q, k: fg.expm1((k - q) / 9) < 0.3,
    "exp2": lambda q, k: fg.exp2((k - q) / 9) < 1.3,
    "rsqrt": lambda q, k: fg.rsqrt(fg.abs(q - k) + 1) > 0.3,
    "atan": lambda q, k: fg.atan((q - k) / 9) < 0.7,
    "atan2": lambda q, k: fg.atan2(q + 0.5, k + 0.5) > 0.8,
    "round": lambda q, k: fg.round((q - k) / 7) == 2,
    "sign": lambda q, k: fg.sign(q - k - 5) == 1,
    "clamp": lambda q, k: fg.clamp(q - k, 3, 9) == 9,
    "isfinite": lambda q, k: fg.isfinite(1 / (q + 0.5)) & (k <= q),
    "popcount": lambda q, k: fg.popcount(q ^ k) < 2,
    "morton window": lambda q, k: (q & 0x55) // 16 == (k & 0x55) // 16,
    "and": lambda q, k: (q & k) == 8,
    "or": lambda q, k: (q | k) < 24,
    "xor": lambda q, k: (q ^ k) < 8,
    "shifts": lambda q, k: (q >> (k & 3)) == (1 << (k & 2)),
    "far shifts": lambda q, k: ((q * 2**30 + 5) >> (k & 63)) < 9,
    "far bits": lambda q, k: (1 << (k & 63)) & (q * 2**30) != 0,
    "far bits of few": lambda q, k: ((k & 3) << (q & 63)) > (1 << (k & 63)),
    "not": lambda q, k: (~q & 7) == (k & 7),
    "large divisor": lambda q, k: k // fg.maximum(q, 1) == 1,
}


@pytest.mark.parametrize("name", one_in(2, MASKS))
def test_tiles_of_every_function_are_classified_as_their_elements(name: str) -> None:
    trace = trace_mask(lambda b, h, q, k: MASKS[name](q, k))
    mask = analyse_mask(trace.expr)
    positions = np.arange(-16, 80)
    kept = evaluate(trace.expr, {B: 0, H: 0, Q: positions[:, None], K: positions[None, :]})
    kept = np.broadcast_to(kept, (96, 96))
    for size in (8, 32):
        for q in range(0, 96, size):
            for k in range(0, 96, size):
                tile = kept[q : q + size, k : k + size]
                ends = {
                    Q_LO: int(positions[q]),
                    Q_HI: int(positions[q + size - 1]),
                    K_LO: int(positions[k]),
                    K_HI: int(positions[k + size - 1]),
                }
                values = {B: 0, H: 0, **ends}
                assert evaluate(mask.may, values) or not tile.any(), ends
                assert tile.all() or not evaluate(mask.must, values), ends
