"""Proof that the online softmax is exact: two merged blocks are the softmax of both together.

Section 3.1 of Dao et al., "FlashAttention", 2022; Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018.
"""

from __future__ import annotations

import sympy

from flashgen.language.spec import AttentionSpec
from flashgen.planner.proofs.certificate import Certificate, ProofStep, vanishes


def certify_softmax(spec: AttentionSpec) -> Certificate:
    """The proof for any scores and any running maxima, including maxima that lag behind."""
    m1, m2, m, s = sympy.symbols("m1 m2 m s", real=True)
    # Over the keys of a block, L = sum of e^s and U = sum of e^s v.
    l1, l2 = sympy.symbols("L1 L2", positive=True)
    u1, u2 = sympy.symbols("U1 U2", real=True)
    first, second = (
        (l1 * sympy.exp(-m1), u1 * sympy.exp(-m1)),
        (l2 * sympy.exp(-m2), u2 * sympy.exp(-m2)),
    )
    total, out = (
        sympy.exp(m1 - m) * a + sympy.exp(m2 - m) * b for a, b in zip(first, second, strict=True)
    )
    steps = [
        ProofStep(
            "a block keeps a maximum m_i, l_i = L_i e^-m_i and o_i = U_i e^-m_i, where L_i = "
            "sum e^s and U_i = sum e^s v over its keys"
        ),
        ProofStep(
            "l = e^(m1 - m) l1 + e^(m2 - m) l2 = (L1 + L2) e^-m, for any m1, m2 and m",
            vanishes(total - (l1 + l2) * sympy.exp(-m)),
        ),
        ProofStep(
            "o = e^(m1 - m) o1 + e^(m2 - m) o2 = (U1 + U2) e^-m, likewise",
            vanishes(out - (u1 + u2) * sympy.exp(-m)),
        ),
        ProofStep(
            "O = o / l = (U1 + U2) / (L1 + L2): the softmax over both blocks times V; m is gone",
            vanishes(out / total - (u1 + u2) / (l1 + l2)),
        ),
        ProofStep(
            "LSE = m + log l = log(L1 + L2)",
            vanishes(
                sympy.expand_log(m + sympy.log((l1 + l2) * sympy.exp(-m)), force=True)
                - sympy.log(l1 + l2)
            ),
        ),
        ProofStep(
            "2^(s log2(e) - m log2(e)) = e^(s - m): the kernel's exponential is to base 2",
            vanishes(2 ** ((s - m) / sympy.log(2)) - sympy.exp(s - m)),
        ),
        ProofStep(
            "so m may be any number; the kernel's lags behind the maximum by at most 8 in base 2, "
            "so that no P is above 2^8 and nothing overflows"
        ),
    ]
    return Certificate(
        "softmax", f"the online softmax of {spec.name} is exact, tile after tile", tuple(steps)
    )
