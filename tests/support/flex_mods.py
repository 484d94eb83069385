"""Common mods for torch's flex_attention, and torch's results for them.

Each function takes the sizes of a call and returns (mask_mod, score_mod, captured tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import flashgen as fg

Tensor = torch.Tensor
Mod = Callable[..., Any] | None
Made = tuple[Mod, Mod, list[Tensor]]

MAKERS: dict[str, Callable[[int, int, int, int], Made]] = {}


def maker(function: Callable[[int, int, int, int], Made]) -> Callable[..., Made]:
    MAKERS[function.__name__] = function
    return function


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator)


def documents(batch: int, length: int) -> Tensor:
    """Ids that grow along each row."""
    ends = torch.arange(length)[None] * torch.tensor([[3.0], [4.0], [5.0]])[:batch] / length
    return ends.floor().to(torch.int32)


# Masks of the blog, the documentation and the tests.


@maker
def causal(batch, heads, seq_q, seq_k):
    return causal_mask, None, []


@maker
def causal_in_score(batch, heads, seq_q, seq_k):
    def causal(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    return None, causal, []


@maker
def causal_added(batch, heads, seq_q, seq_k):
    def causal(score, b, h, q_idx, kv_idx):
        return score + torch.where(q_idx >= kv_idx, 0.0, float("-inf"))

    return None, causal, []


@maker
def causal_filled(batch, heads, seq_q, seq_k):
    def causal(score, b, h, q_idx, kv_idx):
        return torch.tanh(score).masked_fill(q_idx < kv_idx, -torch.inf)

    return None, causal, []


@maker
def sliding_window(batch, heads, seq_q, seq_k):
    window = 16

    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    return sliding_window, None, []


@maker
def symmetric_window(batch, heads, seq_q, seq_k):
    return (lambda b, h, q, k: torch.abs(q - k) <= 12), None, []


@maker
def prefix_lm(batch, heads, seq_q, seq_k):
    lengths = torch.tensor([5, 11, 17], dtype=torch.int32)[:batch]

    def prefix(b, h, q_idx, kv_idx):
        return kv_idx <= lengths[b]

    return or_masks(prefix, causal_mask), None, []


@maker
def document(batch, heads, seq_q, seq_k):
    ids = documents(batch, max(seq_q, seq_k))

    def document_causal_mask(b, h, q_idx, kv_idx):
        return torch.logical_and(q_idx >= kv_idx, ids[b, q_idx] == ids[b, kv_idx])

    return document_causal_mask, None, []


@maker
def padding(batch, heads, seq_q, seq_k):
    lengths = torch.tensor([7, 1, 30])[:batch].clamp(max=seq_k)

    def padding_mask(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    return padding_mask, None, []


@maker
def padding_of_bools(batch, heads, seq_q, seq_k):
    kept = noise(batch, seq_k) > -0.5

    def keep(b, h, q_idx, kv_idx):
        return kept[b][kv_idx]

    return keep, None, []


@maker
def dilated(batch, heads, seq_q, seq_k):
    def dilated_sliding_window(b, h, q_idx, kv_idx):
        diff = torch.abs(q_idx - kv_idx)
        return (diff <= 20) & (diff % 3 == 0) & (diff > 0)

    return dilated_sliding_window, None, []


@maker
def natten(batch, heads, seq_q, seq_k):
    width, kernel_size = 8, 5

    def get_x_y(idx):
        return idx // width, idx % width

    def natten_mask(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        center_x = q_x.clamp(kernel_size // 2, (width - 1) - kernel_size // 2)
        center_y = q_y.clamp(kernel_size // 2, (width - 1) - kernel_size // 2)
        return ((center_x - kv_x).abs() <= kernel_size // 2) & (
            (center_y - kv_y).abs() <= kernel_size // 2
        )

    return natten_mask, None, []


@maker
def transfusion(batch, heads, seq_q, seq_k):
    """Causal text with images whose tokens attend to their whole image."""
    images = [(4, 9), (20, 8)]

    def image(offset, length):
        def mask(b, h, q_idx, kv_idx):
            q_in = (q_idx >= offset) & (q_idx < offset + length)
            return q_in & (kv_idx >= offset) & (kv_idx < offset + length)

        return mask

    return or_masks(causal_mask, *(image(*place) for place in images)), None, []


@maker
def paged(batch, heads, seq_q, seq_k):
    """A logical position for each physical one, as in paged attention."""
    page = 4
    logical = torch.arange((seq_k + page - 1) // page).flip(0).to(torch.int64)

    def paged_mask(b, h, q_idx, kv_idx):
        block = logical[kv_idx // page]
        position = block * page + kv_idx % page
        return torch.where(block >= 0, q_idx >= position, False)

    return paged_mask, None, []


@maker
def njt(batch, heads, seq_q, seq_k):
    """Packed sequences: their offsets, and the index of the sequence of each position."""
    length = max(seq_q, seq_k)
    seq_idx = documents(1, length)[0].to(torch.int64)
    offsets = torch.searchsorted(seq_idx, torch.arange(4))

    def njt_score_mod(qk, b, h, q_idx, kv_idx):
        q_nested = q_idx - offsets[seq_idx[q_idx]]
        kv_nested = kv_idx - offsets[seq_idx[kv_idx]]
        is_same_sequence = seq_idx[q_idx] == seq_idx[kv_idx]
        return torch.where(is_same_sequence, qk + 0.1 * (q_nested - kv_nested), -float("inf"))

    return None, njt_score_mod, []


@maker
def stitched(batch, heads, seq_q, seq_k):
    def sink(b, h, q_idx, kv_idx):
        return kv_idx < 2

    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 9

    return and_masks(causal_mask, or_masks(sink, window)), None, []


@maker
def dense_mask(batch, heads, seq_q, seq_k):
    kept = noise(batch, 1, seq_q, seq_k) > -1
    return (lambda b, h, q, k: kept[b, 0, q, k]), None, []


@maker
def additive_mask(batch, heads, seq_q, seq_k):
    """Minus infinity as an element of a tensor."""
    bias = noise(batch, seq_q, seq_k).masked_fill(noise(batch, seq_q, seq_k) < -1, -torch.inf)
    return None, (lambda score, b, h, q, k: score + bias[b, q, k]), []


# Scores.


@maker
def relative_bias(batch, heads, seq_q, seq_k):
    return None, (lambda score, b, h, q, k: score + (q - k)), []


@maker
def alibi(batch, heads, seq_q, seq_k):
    def alibi(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * scale

    return causal_mask, alibi, []


@maker
def alibi_slopes(batch, heads, seq_q, seq_k):
    slopes = torch.tensor([2.0 ** (-(i + 1)) for i in range(heads)], requires_grad=True)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return None, alibi, [slopes]


@maker
def softcap(batch, heads, seq_q, seq_k):
    cap = 2.0

    def tanh_softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return causal_mask, tanh_softcap, []


@maker
def times_two(batch, heads, seq_q, seq_k):
    return None, (lambda score, b, h, m, n: score * 2), []


@maker
def squared(batch, heads, seq_q, seq_k):
    return None, (lambda score, b, h, m, n: score * score), []


@maker
def gelu(batch, heads, seq_q, seq_k):
    """torch's own decomposition, with the products of its constants."""

    def gelu_mod(score, b, h, m, n):
        return torch.nn.functional.gelu(score, approximate="tanh")

    return None, gelu_mod, []


@maker
def head_offset(batch, heads, seq_q, seq_k):
    offsets = noise(heads).requires_grad_()
    return None, (lambda score, b, h, m, n: score * offsets[h]), [offsets]


@maker
def trig(batch, heads, seq_q, seq_k):
    return None, (lambda score, b, h, m, n: torch.sin(torch.cos(score)) + torch.tan(b)), []


@maker
def trig_of_buffer(batch, heads, seq_q, seq_k):
    table = noise(heads, seq_k).requires_grad_()

    def trig2(score, b, h, m, n):
        return torch.sin(score) * torch.cos(table[h, n]) + torch.exp(-(score**2))

    return None, trig2, [table]


@maker
def rel_causal(batch, heads, seq_q, seq_k):
    def mod(score, b, h, token_q, token_kv):
        return torch.where(token_q <= token_kv, score + (token_q - token_kv), score - 1e4)

    return None, mod, []


@maker
def relative_table(batch, heads, seq_q, seq_k):
    table = noise(seq_q + seq_k).requires_grad_()

    def bias(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + seq_k - 1]

    return None, bias, [table]


@maker
def relative_table_from_the_end(batch, heads, seq_q, seq_k):
    """Negative indices count from the end."""
    table = noise(heads, 2 * max(seq_q, seq_k)).requires_grad_()
    return None, (lambda score, b, h, q, k: score + table[h, q - k]), [table]


@maker
def dense_bias(batch, heads, seq_q, seq_k):
    bias = noise(batch, 1, seq_q, seq_k).requires_grad_()
    return None, (lambda score, b, h, q, k: score + bias[b, 0, q, k]), [bias]


@maker
def dense_bias_expanded(batch, heads, seq_q, seq_k):
    bias = noise(seq_q, seq_k, 1).requires_grad_()
    wide = bias.movedim(2, 0).expand(heads, -1, -1)
    return None, (lambda score, b, h, q, k: score + wide[h, q, k]), [bias]


@maker
def symmetric_bias(batch, heads, seq_q, seq_k):
    t = noise(max(seq_q, seq_k)).requires_grad_()
    return None, (lambda score, b, h, q, k: score + t[q] + t[k]), [t]


@maker
def gate(batch, heads, seq_q, seq_k):
    """A factor without dimensions and a detached one."""
    g = torch.tensor(0.7, requires_grad=True)
    d = noise(heads).requires_grad_()

    def gated(score, b, h, q, k):
        return score * torch.sigmoid(g) + d.detach()[h] * g

    return causal_mask, gated, [g]


@maker
def t5(batch, heads, seq_q, seq_k):
    table = noise(16, heads).requires_grad_()

    def t5_bias(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).clamp(min=0)
        far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / math.log(4) * 8).to(torch.long)
        bucket = torch.where(distance < 8, distance, torch.minimum(far, torch.tensor(15)))
        return score + table[bucket, h]

    return causal_mask, t5_bias, [table]


@maker
def half_precision_buffer(batch, heads, seq_q, seq_k):
    bias = noise(seq_k).half().requires_grad_()
    return None, (lambda score, b, h, q, k: score + bias[k].to(score.dtype)), [bias]


@maker
def double_buffer(batch, heads, seq_q, seq_k):
    bias = noise(seq_k).double().requires_grad_()
    return None, (lambda score, b, h, q, k: score + bias[k]), [bias]


@maker
def from_buffer_to_score(batch, heads, seq_q, seq_k):
    """The score itself is not used."""
    bias = noise(heads, seq_q, seq_k).requires_grad_()
    return None, (lambda score, b, h, q, k: bias[h, q, k]), [bias]


def torch_answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_mod: Mod,
    score_mod: Mod,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """torch's eager flex_attention: out and lse. Its public entry has no gradients on the CPU."""

    def keep(b, h, q_idx, kv_idx):
        return b.new_ones((), dtype=torch.bool)

    def same(score, b, h, q_idx, kv_idx):
        return score

    block_mask = (None,) * 12 + (mask_mod or keep,)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, _ = math_attention(q, k, v, score_mod or same, block_mask, scale, {})
    return out, lse * math.log(2)


def operands(
    batch: int, heads: int, seq_q: int, seq_k: int, dim: int = 16, heads_kv: int | None = None
) -> list[Tensor]:
    shapes: Sequence[tuple[int, int]] = [(heads, seq_q), *[(heads_kv or heads, seq_k)] * 2]
    return [noise(batch, h, n, dim, seed=i).requires_grad_() for i, (h, n) in enumerate(shapes)]


def compared(score_mod: Mod = None, mask_mod: Mod = None, sizes: Any = (1, 2, 8, 8, 8)) -> Tensor:
    """The output of `fg.flex_attention` for operands of these sizes, which is torch's."""
    q, k, v = (x.detach() for x in operands(*sizes))
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, sizes[0], sizes[1], *sizes[2:4], device="cpu")
    out = fg.flex_attention(q, k, v, score_mod, mask)
    wanted, _ = torch_answer(q, k, v, mask_mod, score_mod)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    return out
