"""Each operation of torch that a mod may use, element by element against torch itself."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import flashgen as fg
from flashgen import SpecError
from flashgen.frontends.flex.known_mods import read
from flashgen.frontends.flex.recorder import OF_OPERATORS
from flashgen.frontends.flex.traced_mods import CallSizes
from flashgen.reference import evaluate
from flashgen.spec.language.symbols import SCORE, B, H, K, Q
from flashgen.spec.language.tensor import Tensor
from tests.support.flex_mods import noise, operands
from tests.support.paths import from_root

SIZE = 7

table = torch.tensor([0.5, -1.5, 2.0, 0.25, 3.0, -0.75, 1.25])
square = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE) / 10 - 2
ids = torch.tensor([0, 0, 1, 1, 1, 2, 2])
small = torch.tensor([2, -1, 3, 0, 1, 5, -7], dtype=torch.int8)
flags = torch.tensor([True, False, True, True, False, False, True])
factor = torch.tensor(0.3)
odd = torch.tensor([math.nan, math.inf, -math.inf, 0.5, -0.0, 2.0, math.nan])
words = torch.randint(-(2**59), 2**59, (16,), generator=torch.Generator().manual_seed(3))
bytes_ = torch.tensor([0, 255, 128, 7, 200, 64, 1], dtype=torch.uint8)
nested = torch.nested.nested_tensor([[1.0, 2.0], [3.0]], layout=torch.jagged)
small_ends = torch.tensor([-128, 127, 0, -1, 64, 3, -77], dtype=torch.int8)

SCORES: dict[str, Callable] = {
    # Arithmetic.
    "arithmetic": lambda s, b, h, q, k: -(s + 1) * 2 - 3 / (s * s + 1) + (1 - s) / 4,
    "scalars on the left": lambda s, b, h, q, k: 2 - 3 * s + 1 / (2 + k) + 2**q,
    "ints divided": lambda s, b, h, q, k: q / (k + 1),
    "add with alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=2),
    "sub with alpha": lambda s, b, h, q, k: torch.sub(s, q, alpha=2),
    "rsub": lambda s, b, h, q, k: torch.rsub(s, k),
    "floor division": lambda s, b, h, q, k: (q - k) // 3 + (q - 5) // (k + 1),
    "remainder": lambda s, b, h, q, k: (q - k) % 3 + (k - 9) % (q + 1),
    "remainder of floats": lambda s, b, h, q, k: torch.remainder(s, 0.7),
    "floor division of floats": lambda s, b, h, q, k: torch.floor_divide(s, 0.7),
    "div floor": lambda s, b, h, q, k: torch.div(q - k, 2, rounding_mode="floor"),
    "div trunc": lambda s, b, h, q, k: torch.div(q - k, 2, rounding_mode="trunc"),
    "div trunc by variable": lambda s, b, h, q, k: torch.div(q - 4, k - 9, rounding_mode="trunc"),
    "div trunc of floats": lambda s, b, h, q, k: torch.div(s * 5, 2, rounding_mode="trunc"),
    "fmod": lambda s, b, h, q, k: torch.fmod(q - k, 3) + torch.fmod(s, 0.7),
    "pow": lambda s, b, h, q, k: s**2 + torch.pow(s, 3) + (s * s + 1) ** 0.5 + s**2.0,
    "square": lambda s, b, h, q, k: torch.square(s) + s.square(),
    "negative": lambda s, b, h, q, k: torch.neg(s) - torch.positive(q),
    "reciprocal": lambda s, b, h, q, k: torch.reciprocal(s * s + 1),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, s, s, value=0.5),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, -s, 0.25),
    # Functions.
    "abs": lambda s, b, h, q, k: torch.abs(s) + abs(q - k) + (k - q).abs(),
    "sign": lambda s, b, h, q, k: torch.sign(s) + torch.sign(q - k) + torch.sgn(s),
    "exp": lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.exp2(s) + torch.expm1(s),
    "log": lambda s, b, h, q, k: torch.log(1 + q) + torch.log2(1 + s * s) + torch.log1p(k),
    "log10": lambda s, b, h, q, k: torch.log10(s * s + 1),
    "sqrt": lambda s, b, h, q, k: torch.sqrt(k) + torch.rsqrt(s * s + 1),
    "trigonometry": lambda s, b, h, q, k: torch.sin(s) + torch.cos(q) + torch.tan(s),
    "hyperbolic": lambda s, b, h, q, k: torch.tanh(s) + torch.sinh(s) + torch.cosh(s),
    "arcs": lambda s, b, h, q, k: torch.asin(s / 3) + torch.acos(-s / 3) + torch.atanh(s / 3),
    "areas": lambda s, b, h, q, k: torch.asinh(s * 9) + torch.asinh(-k) + torch.acosh(s * s + 1),
    "hypot": lambda s, b, h, q, k: torch.hypot(s, q - k) + torch.hypot(k * 1e30, q * 1e30) / 1e30,
    "copysign": lambda s, b, h, q, k: torch.copysign(s, q - k) + torch.signbit(odd[3:6][k % 3]),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) + s.sigmoid(),
    "floor": lambda s, b, h, q, k: torch.floor(s) + torch.ceil(s) + torch.trunc(s),
    "round": lambda s, b, h, q, k: torch.round(s * 2) + torch.round((q - k) / 2),
    "round to decimals": lambda s, b, h, q, k: torch.round(s * 1.01, decimals=1) + (q * 9).round(),
    "frac": lambda s, b, h, q, k: torch.frac(s),
    "relu": lambda s, b, h, q, k: F.relu(s) + torch.relu(q - k),
    "softplus": lambda s, b, h, q, k: F.softplus(s),
    "silu": lambda s, b, h, q, k: F.silu(s),
    "leaky relu": lambda s, b, h, q, k: F.leaky_relu(s, 0.1),
    "elu": lambda s, b, h, q, k: F.elu(s),
    "logsigmoid": lambda s, b, h, q, k: F.logsigmoid(s),
    "hardtanh": lambda s, b, h, q, k: F.hardtanh(s, -0.5, 0.5),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5) + (q - k).clamp(min=-1),
    "clamp by tensors": lambda s, b, h, q, k: torch.clamp(s, min=-k, max=q),
    "clip": lambda s, b, h, q, k: torch.clip(s, max=0.1) + torch.clamp_min(s, 0),
    "minimum": lambda s, b, h, q, k: torch.minimum(q, k) + torch.maximum(s, factor),
    "min of two": lambda s, b, h, q, k: torch.min(q, k) + torch.max(q, torch.tensor(3)),
    "where": lambda s, b, h, q, k: torch.where(q > k, s, 2.5) + torch.where(q < k, q, 1),
    "where of conditions": lambda s, b, h, q, k: torch.where(
        torch.where(q > 2, q > k, k > 3), s, 0
    ),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill((q - k) % 2 == 0, 3.0),
    "in place": lambda s, b, h, q, k: s.clone().mul_(2).add_(q),
    # Kinds.
    "casts": lambda s, b, h, q, k: (s * 3).int() + q.float() / 2 + k.to(s.dtype) + s.long(),
    "half": lambda s, b, h, q, k: (q.half() + k.bfloat16()).float(),
    "bools": lambda s, b, h, q, k: s + (q > k) + (q == k).int() * 2 + (q > 1).float(),
    "bool to bool": lambda s, b, h, q, k: torch.where(
        (q - k).bool() & (s > 0).to(torch.bool), s, 1
    ),
    "bool arithmetic": lambda s, b, h, q, k: (
        torch.where((q > k) + (k > 3), s, 1) * ((q > 1) * (k > 1))
    ),
    "type_as": lambda s, b, h, q, k: q.type_as(s) * s,
    # Constants.
    "constants": lambda s, b, h, q, k: s + torch.tensor(1.5) * torch.full((), 2.0) + math.pi,
    "new": lambda s, b, h, q, k: s + s.new_tensor(2.0) + s.new_full((), 3) + s.new_ones(()),
    "like": lambda s, b, h, q, k: torch.zeros_like(s) + torch.ones_like(s) + torch.full_like(s, 2),
    "constant table": lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0, 4.0])[q % 3],
    "constant range": lambda s, b, h, q, k: s + (torch.arange(8) * 2)[k] + torch.arange(3)[1],
    "stack": lambda s, b, h, q, k: torch.stack([s, -s, s * 2])[q % 3],
    "cat": lambda s, b, h, q, k: torch.cat([torch.stack([s, -s]), (s * 2)[None]])[q % 3],
    "a part of cat": lambda s, b, h, q, k: torch.cat([s[None], torch.stack([q, k])]).amax(),
    "prod": lambda s, b, h, q, k: torch.stack([s, s / 9 + 1]).prod(),
    # Captured tensors.
    "cat of tensors": lambda s, b, h, q, k: s + torch.cat([square, square.T], -1)[q, k - SIZE],
    "cat beside nothing": lambda s, b, h, q, k: s + torch.cat([table[:0], table])[k],
    "block_diag": lambda s, b, h, q, k: s + torch.block_diag(table[None], table[None])[q % 2, k],
    "element as an integer": lambda s, b, h, q, k: s + table[k].int() + table[q].trunc(),
    "element": lambda s, b, h, q, k: s + table[q] * factor + small[k],
    "elements": lambda s, b, h, q, k: s + square[q, k] + square[k][q] + square[2, k],
    "element of element": lambda s, b, h, q, k: s + table[ids[q]] + table[ids[k] + 1],
    "negative index": lambda s, b, h, q, k: table[q - k] + table[-1] + square[-2, -1 - k],
    "slices": lambda s, b, h, q, k: (
        table[1:][q % 5] + square[:, 1][k] + square[2:6, ::2][q % 4, k % 4]
    ),
    "slice from the end": lambda s, b, h, q, k: table[-3:][q % 3] + square[..., -1][k],
    "none and ellipsis": lambda s, b, h, q, k: table[None, :][0, q] + square[..., k][q],
    "views": lambda s, b, h, q, k: square.view(-1)[q * 7 + k] + square.t()[q, k] + square.T[k, q],
    "reshape": lambda s, b, h, q, k: square.reshape(7, 7, 1)[q, k, 0] + square.flatten()[k],
    "permute": lambda s, b, h, q, k: square.permute(1, 0)[q, k] + square.transpose(0, 1)[q][k],
    "expand": lambda s, b, h, q, k: (
        table[:, None].expand(7, 4)[q, k % 4] + square.unsqueeze(0)[0, q, k]
    ),
    "squeeze": lambda s, b, h, q, k: table[None].squeeze(0)[q] + table.flip(0)[k],
    "arithmetic on tensors": lambda s, b, h, q, k: (table * 2 + 1)[q] + (square + table)[q, k],
    "casts of tensors": lambda s, b, h, q, k: (
        ids.float()[q] / 2 + flags.int()[k] + small.to(torch.int64)[q]
    ),
    "index_select": lambda s, b, h, q, k: (
        table.index_select(0, q.view(1))[0] + torch.index_select(square, 0, k.view(1))[0, q]
    ),
    "gathers of tensors": lambda s, b, h, q, k: table[ids][q] + square[ids, 2][k],
    "shape": lambda s, b, h, q, k: table[table.shape[0] - 1 - q] + len(square) + table.numel(),
    "reductions": lambda s, b, h, q, k: (
        (square[q] * square[:, k]).sum() + square[q].amax() + square[k].mean()
    ),
    "reduction of one dimension": lambda s, b, h, q, k: (
        square.sum(0)[q] + square.sum(dim=1, keepdim=True)[k, 0]
    ),
    "dot": lambda s, b, h, q, k: torch.dot(square[q], square[k]),
    "flags": lambda s, b, h, q, k: torch.where(flags[q] & ~flags[k], s, 2),
    # Products of matrices.
    "matmul": lambda s, b, h, q, k: s + square[q] @ (square @ square[k]) + (square[q] @ square)[k],
    "mm": lambda s, b, h, q, k: s + (square @ square.T)[q, k] + torch.outer(table, table)[k, q],
    "bmm": lambda s, b, h, q, k: s + torch.bmm(square[None], square.T[None])[0, q, k],
    "einsum": lambda s, b, h, q, k: (
        torch.einsum("i,ij,j->", square[q], square, square[k])
        + torch.einsum("qi,ki->qk", square, square)[q, k]
    ),
    "linear": lambda s, b, h, q, k: s + F.linear(square[q], square, table)[k],
    # Parts of few elements.
    "places of extrema": lambda s, b, h, q, k: (
        torch.argmax(square[q] * table) + square.T[k].argmin(keepdim=True)[0] * 10
    ),
    "places of NaN and ties": lambda s, b, h, q, k: s + odd[1:].argmax() + ids.argmax() * 10,
    "extrema with places": lambda s, b, h, q, k: square[q].max(0).values + square[k].min(-1)[1],
    "extremum of all": lambda s, b, h, q, k: torch.max(square[q]) + torch.stack((q, k)).min(),
    "gather": lambda s, b, h, q, k: (
        square[q].gather(0, ids)[k] + torch.take_along_dim(square, ids[:, None], 1)[k, 0]
    ),
    "take": lambda s, b, h, q, k: s + square.take((q * SIZE + k).long()) + table.take(-k.long()),
    "parts": lambda s, b, h, q, k: square[q].split(3)[1].sum() + table.chunk(2)[1][k % 3],
    "diagonal": lambda s, b, h, q, k: torch.diagonal(square, 1)[k % 6] + square.trace(),
    "variance": lambda s, b, h, q, k: square[q].var() + torch.std(square[k], unbiased=False),
    "layer_norm": lambda s, b, h, q, k: F.layer_norm(square[q], (SIZE,), table)[k],
    "rms_norm": lambda s, b, h, q, k: F.rms_norm(square[q], (SIZE,), table)[k],
    "softmax": lambda s, b, h, q, k: F.softmax(square[q], -1)[k] + torch.logsumexp(table, 0),
    "cosine_similarity": lambda s, b, h, q, k: F.cosine_similarity(square[q], table + k, dim=0),
    "normalize": lambda s, b, h, q, k: F.normalize(square[q], dim=-1)[k],
    "grid of places": lambda s, b, h, q, k: (
        torch.cartesian_prod(torch.arange(3), torch.arange(3))[q, 1]
        + torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")[0].flatten()[k]
    ),
    "in place of several": lambda s, b, h, q, k: (square[q] * 2).add_(table).clamp_(min=0)[k],
    "before it is changed": lambda s, b, h, q, k: changed_later(square[q] * 2)[k],
    "place among all": lambda s, b, h, q, k: (
        (square[:2, :3] * s).argmax(keepdim=True)[0, 0] + s.argmin() + s.argmax(-1, keepdim=True)
    ),
    "any of one": lambda s, b, h, q, k: s.any() * 2 + k.any() + table[k][None].all(0).int(),
    "any of uint8": lambda s, b, h, q, k: (
        s + ~torch.any(torch.stack([bytes_[q], bytes_[k]])) + ~bytes_.all()
    ),
    "any over no dimension": lambda s, b, h, q, k: s + torch.any(square[q], dim=[])[k],
    "reductions to another dtype": lambda s, b, h, q, k: (
        square[q].sum(dtype=torch.int64)
        + torch.stack([s, s * 2]).prod(dtype=torch.int32)
        + torch.stack([q * 100, k * 100]).sum(dtype=torch.int8)
        + torch.stack([q, k]).sum(dtype=torch.bool)
    ),
    # What consists of simpler operations.
    "dropout outside of training": lambda s, b, h, q, k: (
        F.dropout(s, 0.5, training=False) + F.dropout1d(square[None], 0.1, False)[0, q, k]
    ),
    "digamma": lambda s, b, h, q, k: (
        torch.digamma(s * 4 + 0.05)
        + torch.digamma(q * 50.0 + 1) / 5
        + torch.nan_to_num(torch.digamma(odd[k] - 2), 3.0, 4.0, -4.0)
    ),
    "an empty list in an index": lambda s, b, h, q, k: (
        s + square[q, []].sum() + square[[[]], k].sum() + table[[]].sum()
    ),
    "no elements": lambda s, b, h, q, k: (
        s * torch.stack([s, s])[:0].prod() + table[:0].sum() + torch.stack([q > k])[:0].all()
    ),
    "padding": lambda s, b, h, q, k: (
        F.pad(torch.stack([s, -s]), (2, 3), value=7.0)[k]
        + F.pad(square, (1, 1, -1, 2), value=-1.0)[q, k + 2]
    ),
    "sorting": lambda s, b, h, q, k: (
        torch.sort(torch.stack([s, table[q], square[q, k]]))[0][k % 3]
        + torch.argsort(odd, descending=True)[q]
        + torch.sort(odd[:4].view(1, 4) + s, dim=1).indices[0, k % 4]
        + torch.sort(square[:3, :3] % 0.7, 0, descending=True)[0][q % 3, k % 3]
    ),
    "the largest": lambda s, b, h, q, k: (
        torch.stack([s, table[q], table[k]]).topk(2)[0].sum()
        + small[None].topk(3, largest=False)[1][0, q % 3]
        + torch.stack([s, -s, table[k]]).kthvalue(2)[0]
        + without_past(s, q, k).topk(1)[0]
    ),
    "the middle": lambda s, b, h, q, k: (
        torch.stack([s, table[q], table[k]]).median()
        + odd[:3].median(0).indices
        + square[:2, :2].median(1, keepdim=True)[0][q % 2, 0]
        + torch.nan_to_num(odd[2:].median(), 7.0)
        + small[:4].median(-1)[1]
        + table[ids[:3].median(0).values % SIZE]
    ),
    "running extrema": lambda s, b, h, q, k: (
        torch.cummax(torch.stack([s, table[q], table[k]]), 0)[0][k % 3]
        + torch.cummin(square[:, :4] % 0.7, -1)[1][q, k % 4]
        + torch.cummax(s, 0)[0]
    ),
    "running extrema of NaN and ties": lambda s, b, h, q, k: (
        s + torch.cummax(ids[:4], 0).indices[k % 4] + torch.cummin(odd[2:], 0)[1][q % 5]
    ),
    "running sums of exponentials": lambda s, b, h, q, k: (
        torch.logcumsumexp(torch.stack([s, table[q], table[k]]), 0)[k % 3]
        + torch.logcumsumexp(square[:3], 1)[q % 3, k]
        + torch.logcumsumexp(s, 0)
    ),
    "windows": lambda s, b, h, q, k: (
        (table.unfold(0, 3, 2)[q % 3] * s).sum() + square.unfold(1, 2, 1)[q, k % 6, 1]
    ),
    "lists in an index": lambda s, b, h, q, k: (
        square[[0, 2], k].sum() + square[q, range(1, 3)][k % 2] + square[[[1], [3]], k][1, 0]
    ),
    "log gamma": lambda s, b, h, q, k: (
        torch.lgamma(s * 4) + torch.lgamma(q * 50.0) / 50 + torch.lgamma(odd[k] - 1)
    ),
    "inverse error function": lambda s, b, h, q, k: (
        torch.erfinv(s / 2.4) + torch.erfinv(torch.tensor([1.0, -1, 2, 0.99999])[k % 4])
    ),
    # Minus infinity.
    "functions of minus infinity": lambda s, b, h, q, k: (
        torch.exp(without_past(s, q, k)) + 3 * torch.tanh(without_past(s, q, k) / 3)
    ),
    "clamp of minus infinity": lambda s, b, h, q, k: without_past(s, q, k).clamp(-1, 1),
    "minus infinity compared": lambda s, b, h, q, k: torch.where(
        without_past(s, q, k) == -torch.inf, -5.0, s
    ),
    "larger than minus infinity": lambda s, b, h, q, k: torch.maximum(
        without_past(s, q, k), torch.minimum(without_past(s, k, q), q - 2)
    ),
    "isneginf": lambda s, b, h, q, k: (
        torch.isneginf(without_past(s, q, k)) + torch.isinf(without_past(s, k, q)) * 2
    ),
    "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num(without_past(s, q, k), neginf=-4.0),
    "difference of minus infinities": lambda s, b, h, q, k: (
        (without_past(s, q, k) - without_past(s, k, q)).square()
        + torch.sub(without_past(s, q, k), without_past(s, q, k), alpha=2).exp()
    ),
    "lengths to infinity": lambda s, b, h, q, k: (
        torch.hypot(without_past(s, q, k), without_past(s, k, q)) + torch.hypot(odd[1:3], odd[1])[0]
    ),
    "minus infinity and infinities": lambda s, b, h, q, k: (
        without_past(s, q, k) + odd[k] + (odd[q] + torch.where(q > k, 0.0, -torch.inf) - odd[k])
    ),
    "minus infinity and an overflow": lambda s, b, h, q, k: (
        without_past(s, q, k) + torch.exp(q * 1000.0)
    ),
    "minus infinity times what may be 0": lambda s, b, h, q, k: (
        without_past(s, q, k) * odd[k].exp() + without_past(s, q, k) / torch.exp(q * 1000.0)
    ),
    "asinh of minus infinity": lambda s, b, h, q, k: torch.asinh(without_past(s, q, k)),
    "logaddexp": lambda s, b, h, q, k: torch.logaddexp(without_past(s, q, k), s),
    # Integers as bits.
    "bits": lambda s, b, h, q, k: (q & 5) + ((q - k) & 6) + (k | 4) + (q ^ 3) + ~k,
    "shifts": lambda s, b, h, q, k: (q - k) // 2 + ((q - k) >> 1) + (k << 2),
}


def without_past(score, q, k):
    return torch.where(q > k, score, -torch.inf)


def changed_later(x):
    before = x + 1
    x += 5
    return before * x


MASKS: dict[str, Callable] = {
    "comparisons": lambda b, h, q, k: (q > k) | (q <= 2) & (k != 3) | (q == 5) ^ (k >= 4),
    "logical": lambda b, h, q, k: torch.logical_or(
        torch.logical_not(q > 2), torch.logical_xor(q > k, k > 1)
    ),
    "logical of numbers": lambda b, h, q, k: torch.logical_and(q - 2, k),
    "named comparisons": lambda b, h, q, k: (
        torch.eq(q, k) | q.ge(5) | torch.lt(q, k - 2) | k.ne(q) & q.gt(3)
    ),
    "equal conditions": lambda b, h, q, k: (q > 2) == (k > 2),
    "different conditions": lambda b, h, q, k: (q > 2) != (k > 2),
    "bitwise": lambda b, h, q, k: torch.bitwise_and(q > 1, k > 1) | torch.bitwise_not(q > 3),
    "elements": lambda b, h, q, k: (ids[q] == ids[k]) & flags[k],
    "any": lambda b, h, q, k: torch.any(torch.stack([q == k, q == 2, k == 3])),
    "all": lambda b, h, q, k: torch.stack([q >= k, q > 2]).all(),
    "ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (q > k),
    "isin": lambda b, h, q, k: (k == torch.tensor([1, 3, 5])).any(),
    "always": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool),
    "python bool": lambda b, h, q, k: (q > k) & True,
    "nan": lambda b, h, q, k: (odd[q] != odd[q]) | ~(odd[k] < 1),
    "isnan": lambda b, h, q, k: torch.isnan(odd[k]) | torch.isinf(odd[q]),
    "isfinite": lambda b, h, q, k: torch.isfinite(odd[k] * 2.0),
    "difference of infinities": lambda b, h, q, k: odd[q] - odd[k] == 0,
    "rounded product": lambda b, h, q, k: (q * 0.1) * 10 == k.float() * 0.1 * 10,
    "relu of nan": lambda b, h, q, k: torch.isnan(torch.relu(odd[k])),
    "extrema of nan": lambda b, h, q, k: torch.minimum(odd[q], odd[k]) < 1.0,
    "fmin and fmax": lambda b, h, q, k: torch.fmin(odd[q], odd[k]) < torch.fmax(odd[k], odd[q]),
    "clamp by nan": lambda b, h, q, k: torch.clamp(odd[q], min=odd[k]) < 3.0,
    "sum of uint8": lambda b, h, q, k: bytes_[q] + bytes_[k] > 100,
    "uint8 and a number": lambda b, h, q, k: bytes_[q] + 300 < bytes_[k] * 3,
    "negative uint8": lambda b, h, q, k: -bytes_[q] > ~bytes_[k],
    "uint8 and a position": lambda b, h, q, k: bytes_[q] * q > 700 - k,
    "int8": lambda b, h, q, k: abs(small_ends[q]) + small_ends[k] > small_ends[q] * 2,
    "uint8 beside int8": lambda b, h, q, k: bytes_[q] + small_ends[k] > 150,
    "cast to uint8": lambda b, h, q, k: (q * 100 + k).to(torch.uint8) > 60,
    "cast of uint8": lambda b, h, q, k: bytes_[q].int() + bytes_[k].long() > 300,
    "shift of int16": lambda b, h, q, k: (bytes_[q].to(torch.int16) << 8) > k,
    "far bits of int64": lambda b, h, q, k: (words[q] >> (k * 9)) % 2 == 1,
    "a bit of a word": lambda b, h, q, k: words[q] & (torch.tensor(1) << k * 8) != 0,
    "far shift of int8": lambda b, h, q, k: (small_ends[q] << small_ends[k]) > bytes_[k],
    "all bits shifted out": lambda b, h, q, k: torch.tensor(1) << (k - 3) * 15 > q,
    "shift back": lambda b, h, q, k: (words[q] >> (k - 3)) % 2 == 1,
    "bool of int": lambda b, h, q, k: ((q > k).int() * (k > 1).int()).bool(),
}


def values_of(mod: Callable, role: str) -> torch.Tensor:
    """What flashgen reads from a mod, at each q and k, for scores that differ."""
    sizes = CallSizes(2, 3, SIZE, SIZE, torch.device("cpu"), learned=True)
    given = (None, mod) if role == "score" else (mod, None)
    reading, found = read(*given, sizes)
    stored = getattr(reading, role)
    values: dict[sympy.Symbol, torch.Tensor] = {
        SCORE: SCORES_GIVEN.double(),
        B: torch.tensor(1),
        H: torch.tensor(2),
        Q: torch.arange(SIZE)[:, None],
        K: torch.arange(SIZE)[None, :],
    }
    named = {c.name: c for c in stored.trace.captures}
    for name, value in reading.captures(found, torch.device("cpu")).items():
        capture = named[name]
        symbol = capture.symbol if isinstance(capture, Tensor) else capture.expr
        values[symbol] = torch.as_tensor(value)
    return evaluate(stored.trace.expr, values).expand(SIZE, SIZE)


SCORES_GIVEN = torch.linspace(-2.1, 2.3, SIZE * SIZE).view(SIZE, SIZE)


def expected(mod: Callable, role: str) -> torch.Tensor:
    """What torch computes, one element at a time."""
    found = torch.empty(SIZE, SIZE, dtype=torch.float64 if role == "score" else torch.bool)
    for q, k in itertools.product(range(SIZE), range(SIZE)):
        positions = [torch.tensor(x, dtype=torch.int32) for x in (1, 2, q, k)]
        score = [SCORES_GIVEN[q, k].clone()] if role == "score" else []
        found[q, k] = mod(*score, *positions)
    return found


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    torch.testing.assert_close(
        values_of(SCORES[name], "score").double(),
        expected(SCORES[name], "score"),
        rtol=3e-3 if name == "half" else 2e-5,
        atol=2e-5,
        equal_nan=True,
    )


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    assert torch.equal(values_of(MASKS[name], "mask"), expected(MASKS[name], "mask"))


def refusal_of(mod: Callable, role: str = "score") -> SpecError:
    with pytest.raises(SpecError) as caught:
        values_of(mod, role)
    assert caught.value.where.startswith(f"{from_root(__file__)}:")
    return caught.value


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


def without_gradients(x):
    with torch.no_grad():
        return x * 2


held: dict[str, torch.Tensor] = {}

REFUSED: dict[str, tuple[Callable, str]] = {
    "a backward of its own": (
        lambda s, b, h, q, k: StraightThrough.apply(s) * 2,
        r"applies a torch\.autograd\.Function",
    ),
    "another transform": (
        lambda s, b, h, q, k: torch.vmap(lambda x: x * 2)(s[None])[0],
        "cannot be recorded",
    ),
    "a value of an earlier call": (
        lambda s, b, h, q, k: held.setdefault("s", s * 2) + s,
        "value of an earlier call",
    ),
    "a function as an operand": (lambda s, b, h, q, k: s * table.apply_(abs)[q], "be recorded"),
    "polygamma": (lambda s, b, h, q, k: torch.polygamma(1, s), "torch.polygamma cannot be expr"),
    "convolution": (
        lambda s, b, h, q, k: F.conv1d(torch.stack([s, s])[None], square[None, :1, :1])[0, 0],
        "torch.convolution cannot be expressed",
    ),
    "divmod": (lambda s, b, h, q, k: s + divmod(q, 3)[1], "raised TypeError"),
    "a list of tensors": (
        lambda s, b, h, q, k: s + square[[q, 1], k].sum(),
        "indexed by a list that contains tensors",
    ),
    "a list of tensors alone": (
        lambda s, b, h, q, k: s + table[[q]].sum(),
        "indexed by a list that contains tensors",
    ),
    "if": (lambda s, b, h, q, k: s if q > k else -s, "needs the value of a tensor"),
    "and": (lambda s, b, h, q, k: (q > 1 and k > 1) * s, "needs the value of a tensor"),
    "item": (lambda s, b, h, q, k: s * table[0].item(), "needs the value of a tensor"),
    "math": (lambda s, b, h, q, k: s + math.sin(q), "needs the value of a tensor"),
    "range": (lambda s, b, h, q, k: sum(s for _ in range(q)), "needs the value of a tensor"),
    "random": (lambda s, b, h, q, k: s + torch.rand(()), "random numbers: torch.rand"),
    "random like": (
        lambda s, b, h, q, k: s + torch.rand_like(s),
        "random numbers: torch.rand_like",
    ),
    "random inside": (
        lambda s, b, h, q, k: s + F.gumbel_softmax(square[k])[q],
        "random numbers: torch.exponential_",
    ),
    "random of captured tensors": (
        lambda s, b, h, q, k: s + F.dropout1d(square[None])[0, q, k],
        "random numbers: torch.bernoulli_",
    ),
    "a part that is written": (
        lambda s, b, h, q, k: s + F.pad(table[None], (1, 1), mode="circular")[0, q],
        "writes into a tensor: torch.copy_",
    ),
    "bits of another dtype": (
        lambda s, b, h, q, k: s + table.view(torch.int32)[k],
        "does not read the bits",
    ),
    "a shape that changes": (lambda s, b, h, q, k: s.clone().unsqueeze_(0)[0], "unsqueeze_"),
    "write": (lambda s, b, h, q, k: table.add_(1)[q], "writes into a tensor: torch.add_"),
    "mask index": (lambda s, b, h, q, k: table[table > 0][q], "indexed by a mask"),
    "detach": (lambda s, b, h, q, k: s * torch.tanh(s).detach(), "detach\\(\\)"),
    "nested": (lambda s, b, h, q, k: s + nested[0][k], "reads a nested tensor"),
    "complex": (
        lambda s, b, h, q, k: s + table.to(torch.complex64)[q].real,
        "complex|cannot be expressed",
    ),
    "shift beyond 60": (lambda s, b, h, q, k: s + (q << 61), "not from 0 to 60"),
    "shift that may lose bits": (
        lambda s, b, h, q, k: s + (torch.tensor(1) << k * 12),
        "so many places that bits are lost",
    ),
    "division by 0": (lambda s, b, h, q, k: s + k % h, "% by positions that can be 0"),
    "large reduction": (
        lambda s, b, h, q, k: s + torch.ones(2).expand(500, 2)[:, q % 2].sum(),
        "cannot be written out",
    ),
    "a vector": (lambda s, b, h, q, k: table, "must return one number"),
    "a condition": (lambda s, b, h, q, k: q > k, "must return one number"),
    "nothing": (lambda s, b, h, q, k: None, "must return one number"),
    "error of torch": (lambda s, b, h, q, k: s + table[9], "IndexError"),
    "error of python": (lambda s, b, h, q, k: s + undefined_name, "NameError"),  # noqa: F821
    "arguments": (lambda s, q, k: s, "TypeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_operation_and_the_line(name: str) -> None:
    mod, message = REFUSED[name]
    error = refusal_of(mod)
    assert re.search(message, error.what), error.what
    assert int(error.where.rpartition(":")[2]) == mod.__code__.co_firstlineno


def doubled(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def mod(s, b, h, q, k):
        view(s).mul_(2)
        return s

    return mod


WRITES: dict[str, Callable[..., Any]] = {
    "a view": doubled(lambda s: s.view(())),
    "a view of two": doubled(lambda s: s[None].squeeze(0)),
    "one of several": doubled(lambda s: torch.stack([s, s])[None].unbind()[0][0]),
    "relu": lambda s, b, h, q, k: s + F.relu(s.view(()), inplace=True),
    "a captured tensor": lambda s, b, h, q, k: s + table[0].add_(1),
    "a position": lambda s, b, h, q, k: s + k.expand(()).add_(1) + k,
}


def test_the_error_for_item_offers_the_tensor_itself() -> None:
    error = refusal_of(lambda s, b, h, q, k: s * table[1].item() + table.mean().item())
    assert error.way_out == "the tensor itself in place of its .item()"
    q, k, v = operands(1, 1, 8, 8)
    fg.flex_attention(q, k, v, lambda s, b, h, q, k: s * table[1] + table.mean())


@pytest.mark.parametrize("name", WRITES)
def test_what_shares_memory_is_not_written(name: str) -> None:
    assert "writes into a tensor" in refusal_of(WRITES[name]).what


def test_a_tensor_of_which_there_is_a_view_is_not_written() -> None:
    def mod(s, b, h, q, k):
        s = s * 1
        view = s.view(())
        s.mul_(2)
        return view

    assert "writes into a tensor" in refusal_of(mod).what


@pytest.mark.parametrize("function", OF_OPERATORS, ids=lambda function: function.__name__)
def test_functions_of_pythons_operators_are_those_that_torch_applies(function: Callable) -> None:
    passed = []

    class Passed(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            passed.append(func)
            return func(*args, **(kwargs or {}))

    unary = function in (operator.neg, operator.pos, operator.abs, operator.invert)
    x = torch.tensor([1, 2, 1])
    with Passed():
        function(x, *([] if unary else [x]))
    assert passed == [OF_OPERATORS[function]]


def test_whether_a_value_requires_gradients_is_as_in_torch() -> None:
    """A mod may ask, and its answer is not that of an earlier call."""
    learned, fixed = torch.ones(8, requires_grad=True), torch.ones(8)
    found: list[tuple[bool, ...]] = []

    def mod(s, b, h, q, k):
        written = fixed[k] * 2
        written += learned[k]
        values = (s, s * 2, *torch.stack([fixed[q], s]).unbind(), learned[k], written)
        others = (fixed[k], fixed[k].detach(), q.float(), learned[k] > 0, torch.zeros_like(s))
        found.append(tuple(x.requires_grad for x in (*values, *others)))
        return s + learned[k] if (fixed[k] + s).requires_grad else s

    q, k, v = (x.detach() for x in operands(1, 1, 8, 8))
    with torch.no_grad():
        fg.flex_attention(q, k, v, mod)
    assert set(found) == {(False,) * 11}
    found.clear()
    fg.flex_attention(q, k, v, mod)
    assert set(found) == {(False,) * 4 + (True,) * 2 + (False,) * 5}
    found.clear()
    fg.flex_attention(q, k.requires_grad_(), v, mod)
    assert set(found) == {(True,) * 6 + (False,) * 5}


def test_a_derivative_of_its_own_is_refused_where_there_are_gradients_alone() -> None:
    mod = REFUSED["a backward of its own"][0]
    q, k, v = (x.detach() for x in operands(1, 1, 8, 8))
    out = fg.flex_attention(q, k, v, mod)
    torch.testing.assert_close(out, fg.flex_attention(q, k, v, lambda s, b, h, q, k: s * 2))
    with pytest.raises(SpecError, match=r"applies a torch\.autograd\.Function"):
        fg.flex_attention(q, k.requires_grad_(), v, mod)


ADDED_TO_MINUS_INFINITY: dict[str, Callable[..., Any]] = {
    "a number": lambda s, h, q, k: -2.5,
    "a distance": lambda s, h, q, k: (k - q) * torch.exp2(-((h + 1) * 8.0 / 12)),
    "a score": lambda s, h, q, k: 20 * torch.tanh(s / 20) + s,
    "an integer of a tensor": lambda s, h, q, k: ids[k],
}


@pytest.mark.parametrize("name", ADDED_TO_MINUS_INFINITY)
def test_minus_infinity_plus_what_is_finite_stays_a_mask_that_skips_tiles(name: str) -> None:
    def mod(s, b, h, q, k):
        return 2 * without_past(s, q, k) + ADDED_TO_MINUS_INFINITY[name](s, h, q, k)

    reading, _ = read(None, mod, CallSizes(2, 3, SIZE, SIZE, torch.device("cpu")))
    assert reading.mask is not None
    assert reading.mask.trace.expr == sympy.Gt(Q, K)


def test_no_gradient_is_lost_in_silence() -> None:
    error = refusal_of(lambda s, b, h, q, k: s + without_gradients(s))
    assert "detach()" in error.what
    with torch.no_grad():
        q, k, v = (x.detach() for x in operands(1, 2, 8, 8))
        out = fg.flex_attention(q, k, v, lambda s, b, h, q, k: s + without_gradients(s))
        torch.testing.assert_close(out, fg.flex_attention(q, k, v, lambda s, b, h, q, k: 3 * s))


COMPOSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a padded sort": lambda s, row: (
        s + F.pad(torch.sort(row * 3 % 2, descending=True)[0], (1, 1))[1]
    ),
    "a running extremum": lambda s, row: (
        torch.cummax(torch.stack([row[0], s, row[2]]), 0)[0][1]
        + torch.cummin(torch.stack([s, row[1]]), 0)[0].sum()
    ),
    "a running sum": lambda s, row: torch.logcumsumexp(torch.stack([row[0], s, row[2]]), 0)[1],
    "the middle of windows": lambda s, row: (
        torch.stack([s, row[0], row[1], row[2]]).unfold(0, 3, 1).median(1)[0].sum()
    ),
    "the largest": lambda s, row: torch.stack([s, row[0], row[2]]).topk(2)[0].sum(),
    "log gamma": lambda s, row: s * torch.lgamma(row[1] - 0.9),
    "inverse error function": lambda s, row: torch.erfinv(torch.tanh(s)) * row.kthvalue(2)[0],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_consists_of_simpler_operations_is_differentiated(name: str) -> None:
    composed = COMPOSED[name]
    bias = torch.linspace(0.2, 2.9, 4 * 3).reshape(4, 3).requires_grad_()
    q, k, v = operands(1, 1, 8, 8)
    out = fg.flex_attention(q, k, v, lambda s, b, h, q, k: composed(s, bias[q % 4]))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    rows = [torch.stack([composed(s, bias[i % 4]) for s in scores[0, 0, i]]) for i in range(8)]
    wanted = torch.softmax(torch.stack(rows), -1) @ v
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    tangent = noise(*out.shape)
    found, expected = (torch.autograd.grad(x, (q, k, v, bias), tangent) for x in (out, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


AT_KINKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fmod": lambda x, y: torch.fmod(x, 1.5) + torch.fmod(x, y * y + 0.75),
    "a power of zero": lambda x, y: torch.pow(0.0, y * y),
    "norm": lambda x, y: torch.stack([x, y]).norm(dim=0),
    "norm of a difference": lambda x, y: torch.linalg.vector_norm(
        torch.stack([x - y, y - x]), 2, 0
    ),
    "norm of order 3": lambda x, y: torch.stack([x, y]).norm(p=3, dim=0),
    "norm of order 1/2": lambda x, y: torch.stack([x, y]).norm(p=0.5, dim=0),
    "other norms": lambda x, y: (
        torch.stack([x, y]).norm(p=1, dim=0)
        + torch.stack([x, y]).norm(p=math.inf, dim=0)
        + torch.stack([x, y + 3]).norm(p=-math.inf, dim=0)
        + torch.stack([x + 4, y + 3]).norm(p=-1, dim=0)
        + torch.stack([x, y]).norm(p=0, dim=0)
        + torch.stack([x]).norm(dim=0)
    ),
    "distance": lambda x, y: torch.nn.functional.pairwise_distance(
        torch.stack([x, y], -1), torch.stack([y, x], -1), eps=0.0
    ),
    "deviation": lambda x, y: (
        torch.stack([x, y]).std(0)
        + torch.std_mean(torch.stack([x, y, x]), 0)[0]
        + torch.stack([y, x, y, y]).std(0, unbiased=False)
    ),
    "hypot": lambda x, y: torch.hypot(x, y) + torch.hypot(x - y, x * 0 + 3),
    "xlogy": lambda x, y: torch.xlogy(x, y * y + 0.5),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y + 2.5),
}


@pytest.mark.parametrize("name", AT_KINKS)
def test_derivatives_at_kinks_are_those_of_torch(name: str) -> None:
    """At zeros and where operands are equal, as in learned tables that begin as zeros."""
    ends = (0.0, 1.0, -1.0, 2.0)
    x, y = (torch.tensor(line) for line in zip(*itertools.product(ends, ends), strict=True))
    x.requires_grad_(), y.requires_grad_()
    function = AT_KINKS[name]
    q, k = torch.zeros(1, 1, len(x), 8), torch.zeros(1, 1, 1, 8)
    # The log-sum-exp of a row with one key is the score itself.
    _, lse = fg.flex_attention(
        q, k, k, lambda s, b, h, q, k: s + function(x[q], y[q]), return_lse=True
    )
    wanted = function(x, y)
    torch.testing.assert_close(lse[0, 0], wanted, rtol=1e-5, atol=1e-5)
    for leaf in (x, y):
        found, expected = (
            torch.autograd.grad(value.sum(), leaf, retain_graph=True, allow_unused=True)[0]
            for value in (lse, wanted)
        )
        expected = torch.zeros_like(leaf) if expected is None else expected
        found = torch.zeros_like(leaf) if found is None else found
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_mask_is_a_condition() -> None:
    error = refusal_of(lambda b, h, q, k: q - k, "mask")
    assert "torch.int64" in error.numbers
