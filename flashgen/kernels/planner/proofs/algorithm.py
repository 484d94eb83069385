"""Proofs of FlashAttention's claims: the bytes that it moves, and that its softmax is exact.

Tiling moves Theta(N^2 d^2 / M) elements, and standard attention Theta(N d + N^2): Theorem 2 of Dao
et al., "FlashAttention", 2022, with its Algorithms 0 and 1; sizes in elements.

The online softmax is exact, because two merged blocks are the softmax of both together: section 3.1
of the same paper; Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import sympy

from flashgen.kernels.planner import Plan, forward_traffic
from flashgen.kernels.planner.proofs.certificate import Certificate, ProofStep, vanishes
from flashgen.spec.language.spec import AttentionSpec

N, D, M = sympy.symbols("N d M", positive=True)

# Algorithm 1: K and V once; for each of the N / Bc tiles of keys Q, O, l and m are read, O, l and m
# written. Algorithm 0: S and P are written and read back, Q, K and V are read, O is written.
BC = M / (4 * D)
ALGORITHM_1 = 2 * N * D + (N / BC) * (3 * N * D + 4 * N)
ALGORITHM_0 = (2 * N * D + N**2) + 2 * N**2 + (N**2 + 2 * N * D)


def certify_tiled() -> Certificate:
    """The proof for Algorithm 1 with d <= M <= N d, as in the theorem."""
    ratio = sympy.expand(ALGORITHM_1 / (N**2 * D**2 / M))
    # d = 1 + u and M = N d (1 - w): every d >= 1 and every M up to N d.
    u = sympy.Symbol("u", nonnegative=True)
    w = sympy.Symbol("w", nonnegative=True)
    inside = sympy.simplify(ratio.subs(M, N * D * (1 - w)).subs(D, 1 + u))
    below = sympy.expand(sympy.simplify(30 - inside))
    return Certificate(
        "traffic",
        "Algorithm 1 moves Theta(N^2 d^2 / M) elements, for d <= M <= N d",
        (
            ProofStep(
                "T = 2 N d + (N / Bc) (3 N d + 4 N) with Bc = M / 4d: "
                f"T = {sympy.expand(ALGORITHM_1)}"
            ),
            ProofStep(
                f"T / (N^2 d^2 / M) = {ratio}",
                vanishes(ratio - (12 + 16 / D + 2 * M / (N * D))),
            ),
            ProofStep(
                "above 12, because what is added is positive", bool((ratio - 12).is_positive)
            ),
            ProofStep(
                "at most 30: with d = 1 + u and M = N d (1 - w), 0 <= w < 1, what is left of 30 is "
                f"{below}, not negative",
                _nonnegative(below),
            ),
            ProofStep(
                "Bc rounded up is less than M / 4d + 1, at most twice M / 4d where M >= 4d: the "
                "constants change by at most 2",
                bool((2 * BC - (BC + 1)).subs(M, 4 * D * (1 + u)).simplify().is_nonnegative),
            ),
        ),
    )


def certify_standard() -> Certificate:
    """The proof for Algorithm 0, standard attention."""
    ratio = sympy.simplify(ALGORITHM_0 / (N * D + N**2))
    return Certificate(
        "standard",
        "standard attention moves Theta(N d + N^2) elements",
        (
            ProofStep(
                "S = Q K^T: 2 N d read, N^2 written; P = softmax(S): 2 N^2; O = P V: N^2 + N d "
                f"read, N d written: T = {sympy.expand(ALGORITHM_0)}"
            ),
            ProofStep(f"T / (N d + N^2) = {ratio} for all N and d", bool(ratio == 4)),
        ),
    )


def certify_plan(plan: Plan, smem: int) -> Certificate:
    """The proof for the bytes of this forward kernel without a mask.

    Args:
        smem: M, the shared memory of the plan, in bytes.
    """
    e, block = plan.itemsize, plan.block_q * plan.cluster  # a cluster reads its keys once
    dims = plan.head_dim + plan.head_dim_v
    key_columns = plan.head_dim + plan.columns_read_again + plan.own_columns_of_v
    tiles = sympy.Symbol("tiles", positive=True)
    formula = e * N * dims + tiles * e * N * key_columns + 4 * N
    owner = "tile of queries" if plan.cluster == 1 else f"cluster of {plan.cluster} tiles"
    rows = "K and V" if plan.own_columns_of_v else "K, whose first columns are V,"
    steps = [
        ProofStep(
            f"a head moves {formula} B besides what a sink takes, tiles = ceil(N / {block}): "
            f"Q is read and O written once, {rows} once for each {owner}, LSE written"
        )
    ]
    lengths = (1, block - 1, block, 1000, 4096, 16 * block + 1)
    traffic_by_length = {n: forward_traffic(plan, 1, 1, 1, n, n) for n in lengths}
    counted = [
        traffic.issued - traffic.sink == int(formula.subs({tiles: -(-n // block), N: n}))
        for n, traffic in traffic_by_length.items()
    ]
    steps.append(
        ProofStep(
            f"the same as the plan's own count of its loops, at N = {', '.join(map(str, lengths))}",
            all(counted),
        )
    )
    leading = sympy.limit(formula.subs(tiles, N / block) / N**2, N, sympy.oo)
    d = sympy.Rational(dims, 2)
    constant = leading / e / (d**2 / sympy.Rational(smem, e))
    steps.append(
        ProofStep(
            f"as N grows, {leading} N^2 B: {float(constant):.3g} N^2 d^2 / M elements, with "
            f"d = {d} and M = {smem:,} B = {smem // e:,} elements",
            bool(leading == sympy.Rational(e * key_columns, block)),
        )
    )
    return Certificate("plan", "this plan moves Theta(N^2 d / block_q) bytes", tuple(steps))


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


def _nonnegative(expr: sympy.Expr) -> bool:
    """Whether no term of a sum can be negative."""
    return all(term.is_nonnegative for term in sympy.Add.make_args(expr))
