"""The best known variants of FlexAttention, unchanged under torch.compile, on flashgen's kernels.

Each is written from its description in attention-gym's or PyTorch's documentation. Forward and
backward passes are compared with dense math in float64: the CPU path, and both code paths of the
kernels in the emulator. Outputs are compared with those of torch's own kernel for the CPU too,
which has no gradients. torch's refusal of gradients on CPU tensors, in Python, is replaced.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

from flashgen.integrations.torch import unregister_flex
from tests.support.compiled_flex import assert_same, compile, expected, operands
from tests.support.flex_mods import noise
from tests.support.tiers import one_in

SEQ, HEADS = 64, 4
Variant = tuple[Any, Any, list[torch.Tensor]]
VARIANTS: dict[str, Callable[[], Variant]] = {}


def variant(function: Callable[[], Variant]) -> Callable[[], Variant]:
    """A function that returns the mask_mod, the score_mod and the learned tensors of a variant."""
    VARIANTS[function.__name__] = function
    return function


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@variant
def causal_mask() -> Variant:
    return causal, None, []


@variant
def sliding_window() -> Variant:
    window = 24

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= window

    return and_masks(causal, near), None, []


@variant
def dilated_window() -> Variant:
    window, dilation = 24, 3

    def dilated(b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).abs()
        return (distance <= window) & (distance % dilation == 0)

    return dilated, None, []


@variant
def alibi() -> Variant:
    def bias(score, b, h, q_idx, kv_idx):
        slope = torch.exp2(-((h + 1) * 8.0 / HEADS))
        return score + slope * (kv_idx - q_idx)

    return causal, bias, []


@variant
def soft_cap() -> Variant:
    cap = 4.0

    def capped(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return causal, capped, []


@variant
def relative_position() -> Variant:
    table = noise(2 * SEQ - 1).requires_grad_()

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + SEQ - 1]

    return None, relative, [table]


@variant
def t5_bias() -> Variant:
    buckets, farthest = 16, 48
    table = noise(buckets, HEADS).requires_grad_()

    def biased(score, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        half = buckets // 2
        near = half // 2
        size = distance.abs()
        ratio = torch.log(size.float().clamp(min=1.0) / near) / math.log(farthest / near)
        far = (near + (ratio * (half - near)).to(torch.int64)).clamp(max=half - 1)
        bucket = torch.where(distance > 0, half, 0) + torch.where(size < near, size, far)
        return score + table[bucket, h]

    return None, biased, [table]


def document_ids() -> torch.Tensor:
    lengths = torch.tensor([20, 7, 30, 7])
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


@variant
def documents() -> Variant:
    ids = document_ids()

    def same(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    return and_masks(causal, same), None, []


@variant
def documents_with_offsets() -> Variant:
    """A mask on positions inside of each document, which begins at an offset, as in a page."""
    ids = document_ids()
    starts = torch.searchsorted(ids, torch.arange(4))

    def window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 9) | (kv_idx < 2))

    def inside(b, h, q_idx, kv_idx):
        document = ids[q_idx]
        start = starts[document]
        return (document == ids[kv_idx]) & window(b, h, q_idx - start, kv_idx - start)

    return inside, None, []


@variant
def prefix_lm() -> Variant:
    prefixes = torch.tensor([13])

    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < prefixes[b]

    return or_masks(prefix, causal), None, []


@variant
def natten() -> Variant:
    width = height = math.isqrt(SEQ)
    kernel = 5

    def neighbours(b, h, q_idx, kv_idx):
        q_x, q_y = q_idx // width, q_idx % width
        k_x, k_y = kv_idx // width, kv_idx % width
        x = q_x.clamp(kernel // 2, width - 1 - kernel // 2)
        y = q_y.clamp(kernel // 2, height - 1 - kernel // 2)
        return ((x - k_x).abs() <= kernel // 2) & ((y - k_y).abs() <= kernel // 2)

    return neighbours, None, []


@variant
def transfusion() -> Variant:
    """Text is causal; each image, an offset and a length, attends to all of itself."""
    images = torch.tensor([[[5, 16], [40, 10]]])

    def image(b, h, q_idx, kv_idx):
        found = q_idx < 0
        for place in range(images.shape[1]):
            start, length = images[b, place, 0], images[b, place, 1]
            is_in = (q_idx >= start) & (q_idx < start + length)
            found = found | (is_in & (kv_idx >= start) & (kv_idx < start + length))
        return found

    return or_masks(causal, image), None, []


CASES = list(itertools.product(VARIANTS, ("cpu", "sm_80", "sm_90a")))


@pytest.mark.filterwarnings("error::flashgen.integrations.torch.FlashOperatorWarning")
@pytest.mark.parametrize(
    ("name", "path"), one_in(len(CASES), CASES, CASES.index(("soft_cap", "sm_80")))
)
def test_a_variant_runs_unchanged(registered, monkeypatch, name, path):
    if path != "cpu":
        monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
        monkeypatch.setenv("FLASHGEN_ARCH", path)
    mask, score, learned = VARIANTS[name]()
    sizes = None, None, SEQ, SEQ
    block_mask = mask and create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=32)
    attend = functools.partial(flex_attention, score_mod=score, return_lse=True)
    function, counter = compile(lambda q, k, v, m: attend(q, k, v, block_mask=m))
    inputs = operands(seq=SEQ)
    assert_same(function(*inputs, block_mask), expected(*inputs, score, mask), [*inputs, *learned])
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("error::flashgen.integrations.torch.FlashOperatorWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_the_output_of_torchs_own_kernel(registered, name):
    mask, score, _ = VARIANTS[name]()
    sizes = None, None, SEQ, SEQ
    block_mask = mask and create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=32)
    attend = functools.partial(flex_attention, score_mod=score, block_mask=block_mask)
    inputs = operands(seq=SEQ, learn=False)
    with torch.no_grad():
        found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
        unregister_flex()
        torch._dynamo.reset()
        own = torch.compile(attend, fullgraph=True, backend="inductor")(*inputs)
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-4)
