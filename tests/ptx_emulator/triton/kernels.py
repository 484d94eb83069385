"""Small Triton kernels whose compiled PTX lies beside this file; build.py writes it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, stride, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    scores = tl.load(x + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(out + row * stride + at, weights / tl.sum(weights, axis=0), mask=inside)


@triton.jit
def matmul(
    a, b, c, m, n, k, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c[m, n] = a[m, k] @ b[k, n], any sizes; float16 or float32 (tf32) operands."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    at_a = a + rows[:, None] * stride_a + inner[None, :]
    at_b = b + inner[:, None] * stride_b + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        left = tl.load(at_a, mask=(rows[:, None] < m) & (inner[None, :] < k - start), other=0.0)
        right = tl.load(at_b, mask=(inner[:, None] < k - start) & (columns[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
        at_a += BLOCK_K
        at_b += BLOCK_K * stride_b
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * stride_c + columns[None, :], total, mask=inside)


@triton.jit
def flash(
    q, k, v, out, lse, n, scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Causal attention of contiguous [heads, n, D] tensors, one tile of queries a program."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows, depth = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    base = head.to(tl.int64) * n * D
    query = tl.load(
        q + base + rows[:, None] * D + depth[None, :], mask=rows[:, None] < n, other=0.0
    )
    top = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_Q,), tl.float32)
    total = tl.zeros((BLOCK_Q, D), tl.float32)
    slope = scale * 1.4426950408889634
    for start in range(0, tl.minimum((tile + 1) * BLOCK_Q, n), BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        at = base + columns[:, None] * D + depth[None, :]
        keys = tl.load(k + at, mask=columns[:, None] < n, other=0.0)
        values = tl.load(v + at, mask=columns[:, None] < n, other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * slope
        scores = tl.where(rows[:, None] >= columns[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        chances = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight = weight * shrink + tl.sum(chances, axis=1)
        total = tl.dot(chances.to(v.dtype.element_ty), values, total * shrink[:, None])
        top = new_top
    place = base + rows[:, None] * D + depth[None, :]
    tl.store(out + place, total / weight[:, None], mask=rows[:, None] < n)
    tl.store(lse + head * n + rows, (top + tl.log2(weight)) * 0.6931471805599453, mask=rows < n)


@triton.jit
def running_sums(x, out, columns, BLOCK: tl.constexpr):
    """Prefix sums of each row, and the place of its largest element in the last column."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    numbers = tl.load(x + row * columns + at, mask=inside, other=-1000)
    best = tl.argmax(numbers, axis=0)
    sums = tl.cumsum(tl.where(inside, numbers, 0), axis=0)
    tl.store(out + row * (columns + 1) + at, sums, mask=inside)
    tl.store(out + row * (columns + 1) + columns, best)


@triton.jit
def histogram(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    bins = tl.load(x + at, mask=inside, other=0)
    tl.atomic_add(out + bins, 1, mask=inside)
    tl.atomic_max(out + 16, tl.max(bins, axis=0))
