"""The Triton kernel of `triton_fused`; imported only where Triton is installed.

No type hints but Triton's own: it takes every name in a signature for one of the kernel's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _walk(
    acc, norm, top, q, k_at, v_at, k_step, v_step, rows, first, last, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """One stretch of keys; BOUND: some of its tiles are cut by the end or by the diagonal."""
    columns = tl.arange(0, BLOCK_K)
    for start in range(first, last, BLOCK_K):
        keys = start + columns
        if BOUND:
            k = tl.load(k_at + start * k_step, mask=(keys < seq_k)[None, :], other=0.0)
        else:
            k = tl.load(k_at + start * k_step)
        scores = tl.dot(q, k) * scale
        if BOUND:
            kept = (keys < seq_k)[None, :]
            if CAUSAL:
                kept = kept & (rows[:, None] >= keys[None, :])
            scores = tl.where(kept, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has met no key yet has the maximum -inf, and -inf - -inf is NaN.
        used = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.math.exp2(scores - used[:, None])
        shrink = tl.math.exp2(top - used)
        norm = norm * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if BOUND:
            v = tl.load(v_at + start * v_step, mask=(keys < seq_k)[:, None], other=0.0)
        else:
            v = tl.load(v_at + start * v_step)
        acc = tl.dot(weights.to(v.dtype), v, acc)
        top = higher
    return acc, norm, top


@triton.jit
def attention_forward(
    q, k, v, out,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, share, seq_q, seq_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T * scale / log2(e)) v for one tile of rows of one head."""
    # The longest rows of a causal mask first: the last blocks to run are short ones.
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    b, h = b.to(tl.int64), h.to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_K)
    inside = (rows < seq_q)[:, None]
    q_at = q + b * q_b + h * q_h + rows[:, None].to(tl.int64) * q_n + dims[None, :]
    k_at = k + b * k_b + (h // share) * k_h + columns[None, :] * k_n + dims[:, None]
    v_at = v + b * v_b + (h // share) * v_h + columns[:, None] * v_n + dims[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    norm = tl.zeros((BLOCK_Q,), tl.float32)
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    whole = seq_k // BLOCK_K * BLOCK_K
    end = seq_k
    if CAUSAL:
        whole = tl.minimum(whole, tile * BLOCK_Q // BLOCK_K * BLOCK_K)
        end = tl.minimum(seq_k, (tile + 1) * BLOCK_Q)
    acc, norm, top = _walk(
        acc, norm, top, queries, k_at, v_at, k_n, v_n, rows, 0, whole, seq_k, scale,
        HEAD_DIM, BLOCK_K, CAUSAL, False,
    )  # fmt: skip
    acc, norm, top = _walk(
        acc, norm, top, queries, k_at, v_at, k_n, v_n, rows, whole, end, seq_k, scale,
        HEAD_DIM, BLOCK_K, CAUSAL, True,
    )  # fmt: skip
    norm = tl.where(norm == 0.0, 1.0, norm)
    o_at = out + b * o_b + h * o_h + rows[:, None].to(tl.int64) * o_n + dims[None, :]
    tl.store(o_at, (acc / norm[:, None]).to(out.dtype.element_ty), mask=inside)
