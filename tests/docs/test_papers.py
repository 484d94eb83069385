"""The functions of docs/papers.md compute the formulas of their papers.

Each formula is written here in PyTorch, with whole matrices of scores, and shares no code with
flashgen. In float64 it is the reference of the error rule, and in the operands' dtype its baseline.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashgen.reference import GRADIENT_FACTOR, OUTPUT_FACTOR, compare
from tests.docs.test_code_blocks import MODULE
from tests.support.paths import ROOT
from tests.support.tiers import slow

Tensor = torch.Tensor
PAGE = "docs/papers.md"
B, H, N, D = 2, 4, 96, 64
SEVERAL_CALLS = ("cog", "softpick", "mlstm", "nsa")

I, J = torch.arange(N)[:, None], torch.arange(N)  # noqa: E741  positions of queries and of keys
CAUSAL = I >= J


@functools.cache
def page() -> dict[str, Any]:
    """What the code blocks of the page define."""
    module = ModuleType("flashgen_papers")
    sys.modules[module.__name__] = module
    for block in MODULE.blocks(PAGE):
        MODULE.execute(block, module.__dict__)
    return module.__dict__


# ---- what formulas have in common ---------------------------------------------------------------
# Scores and weights are computed in float32 at least, and rounded for the product with v.


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    products = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return products.to(torch.promote_types(q.dtype, torch.float32))


def output(weights: Tensor, v: Tensor) -> Tensor:
    return weights.to(v.dtype) @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)


def softmax(s: Tensor, keep: Tensor = CAUSAL) -> Tensor:
    empty = ~keep.any(-1, keepdim=True)
    return torch.softmax(s.masked_fill(~(keep | empty), -math.inf), -1).masked_fill(empty, 0)


class Kept(torch.autograd.Function):
    """A quotient whose gradients are computed from its rounded value, as backward passes do."""

    dtype: torch.dtype | None = None  # of that value; None for the quotient alone

    @staticmethod
    def forward(ctx: Any, products: Tensor, total: Tensor) -> Tensor:
        assert Kept.dtype is not None
        out = products / total
        ctx.save_for_backward(out.to(Kept.dtype).double(), total)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        out, total = ctx.saved_tensors
        return dout / total, -(dout * out).sum(-1, keepdim=True) / total

    @classmethod
    def of(cls, products: Tensor, total: Tensor) -> Tensor:
        quotient: Tensor = cls.apply(products, total)  # type: ignore[no-untyped-call]
        return quotient


def divided(w: Tensor, v: Tensor) -> Tensor:
    """The mean of v, weighted by w."""
    total = w.sum(-1, keepdim=True)
    if Kept.dtype is None:
        return output(w / total, v)
    rounded = total + (total.float().double() - total).detach()
    return Kept.of(output(w, v), rounded)


def attend(s: Tensor, v: Tensor, keep: Tensor = CAUSAL) -> Tensor:
    if Kept.dtype is None:
        return output(softmax(s, keep), v)
    empty = ~keep.any(-1, keepdim=True)
    s = s.masked_fill(~(keep | empty), -math.inf)
    weights = torch.exp(s - s.logsumexp(-1, keepdim=True).detach().float())
    total = weights.sum(-1, keepdim=True)
    return Kept.of(output(weights, v), total + (1 - total).detach()).masked_fill(empty, 0)


def weigh(w: Tensor, v: Tensor) -> Tensor:
    return output(w.masked_fill(~CAUSAL, 0), v)


def differences(rows: Tensor, columns: Tensor) -> Tensor:
    """rows[i] - columns[j], and 0 above the diagonal, where an exponential could overflow."""
    return (rows[..., :, None] - columns[..., None, :]).masked_fill(~CAUSAL, 0)


# ---- formulas -----------------------------------------------------------------------------------


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(torch.sigmoid(scores(q, k) - math.log(N)), v)


def hstu(q: Tensor, k: Tensor, v: Tensor, distances: Tensor) -> Tensor:
    return weigh(F.silu(scores(q, k, 1.0) + distances[(I - J).clamp(0)]) / N, v)


def polynomial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return output(scores(q, k) ** 3 / math.sqrt(N), v)


def power(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divided(scores(q, k).masked_fill(~CAUSAL, 0) ** 4, v)


def based(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return divided((1 + s + s**2 / 2).masked_fill(~CAUSAL, 0), v)


def lightning(q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
    return weigh(scores(q, k, 1.0) * torch.exp(-rate[:, None, None] * (I - J).clamp(0)), v)


def mamba2(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor) -> Tensor:
    total = log_a.cumsum(-1)
    return weigh(scores(q, k, 1.0) * torch.exp(differences(total, total)), v)


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    forgotten = F.logsigmoid(f).cumsum(-1)
    log_d = differences(forgotten, forgotten - i).masked_fill(~CAUSAL, -math.inf)
    largest = log_d.amax(-1, keepdim=True)
    c = scores(q, k) * torch.exp(log_d - largest)
    return output(c / torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-largest)), v)


def log_linear(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, levels: Tensor) -> Tensor:
    level = torch.zeros(N, N, dtype=torch.int64)
    for t in range(N):  # the tokens before t, in blocks by the bits of t: a Fenwick tree
        start = 0
        for bit in reversed(range(7)):
            if t & 1 << bit:
                level[t, start : start + (1 << bit)] = bit + 1
                start += 1 << bit
    total = log_a.cumsum(-1)
    weights = levels.gather(-1, level.expand(B, H, N, N)) * torch.exp(differences(total, total))
    return weigh(weights * scores(q, k, 1.0), v)


def forgetting(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
    total = F.logsigmoid(f).cumsum(-1)
    return attend(scores(q, k) + differences(total, total), v)


def ssmax(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    return attend(scores(q, k) * slope[:, None, None] * torch.log(I + 1), v)


def ngpt(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    q, k = (x / x.norm(dim=-1, keepdim=True) * s for x in (q, k))
    return attend(scores(q, k, math.sqrt(D)), v)


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, window: int) -> Tensor:
    logits = sink[:, None, None].expand(B, H, N, 1)  # of a key whose v is 0
    s = torch.cat([scores(q, k), logits], -1)
    return attend(s, F.pad(v, (0, 0, 0, 1)), F.pad(CAUSAL & (I - J).lt(window), (0, 1), value=True))


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return attend(scores(q, k), v) * torch.sigmoid(gate)


def exclusive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y, own = attend(scores(q, k), v), v / (v * v).sum(-1, keepdim=True).sqrt()
    return y - (y * own).sum(-1, keepdim=True) * own


def laser(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    largest = v.amax(-2, keepdim=True).detach()
    return largest + torch.log(attend(scores(q, k), torch.exp(v - largest)))


def mla(q: Tensor, k: Tensor, v: Tensor, q_rope: Tensor, k_rope: Tensor) -> Tensor:
    return attend(scores(q, k, 192**-0.5) + scores(q_rope, k_rope, 192**-0.5), v)


def differential(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    first = attend(scores(q[..., :D], k[..., :D]), v)
    return first - factor * attend(scores(q[..., D:], k[..., D:]), v)


def cog(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return output(torch.sign(s) * softmax(s.abs()), v)


def softpick(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.expm1(scores(q, k)).masked_fill(~CAUSAL, 0)
    return output(torch.relu(e) / e.abs().sum(-1, keepdim=True), v)


def self_extend(q: Tensor, k: Tensor, v: Tensor, window: int, group: int) -> Tensor:
    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / 10000 ** (torch.arange(0, D, 2) / D)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
        first, second = x.double().chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    near = scores(rotated(q, J), rotated(k, J))
    far_q = rotated(q, J // group + window - window // group)
    return attend(torch.where((I - J).lt(window), near, scores(far_q, rotated(k, J // group))), v)


def medusa(q: Tensor, k: Tensor, v: Tensor, ancestor: Tensor, **_: int) -> Tensor:
    committed = torch.ones(len(ancestor), N - len(ancestor), dtype=torch.bool)
    return attend(scores(q, k), v, torch.cat([committed, ancestor], 1))


def block_diffusion(q: Tensor, k: Tensor, v: Tensor, clean: int, block: int) -> Tensor:
    i, j = (torch.arange(clean) // block)[:, None], torch.arange(clean) // block
    keep = torch.cat([torch.cat([i == j, i > j], 1), torch.cat([i < 0 * j, i >= j], 1)])
    return attend(scores(q, k), v, keep)


def transfusion(q: Tensor, k: Tensor, v: Tensor, image: Tensor) -> Tensor:
    same = (image[:, :, None] == image[:, None]) & (image > 0)[:, None]
    return attend(scores(q, k), v, (CAUSAL | same)[:, None])


def flashmask(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    keep = torch.ones(B, 1, N, N, dtype=torch.bool)
    for b in range(B):
        for j in range(N):
            for start, end in rows[b, j].view(2, 2).tolist():
                keep[b, 0, start:end, j] = False
    return attend(scores(q, k), v, keep)


def duo(q: Tensor, k: Tensor, v: Tensor, retrieves: Tensor, window: int) -> Tensor:
    streaming = (J < 4) | (I - J).lt(window)
    return attend(scores(q, k), v, CAUSAL & (retrieves[:, None, None] | streaming))


def neighborhood(q: Tensor, k: Tensor, v: Tensor, height: int, width: int, **of: int) -> Tensor:
    def near(length: int) -> Tensor:  # as NATTEN finds the start of a window
        keep = torch.zeros(length, length, dtype=torch.int64)
        for place in range(length):
            leader = min(place // of["stride"] * of["stride"] + of["stride"] // 2, length - 1)
            start = max(leader - of["radius"], 0)
            start += min(length - of["radius"] - leader - 1, 0)
            keep[place, start : start + 2 * of["radius"] + 1] = 1
        return keep

    return attend(scores(q, k), v, torch.kron(near(height), near(width)).bool())


def expanded(blocks: Tensor) -> Tensor:
    return blocks.repeat_interleave(16, -1)


def xattention(q: Tensor, k: Tensor, v: Tensor, part: float) -> Tensor:
    s, count = scores(q, k).detach().double(), N // 16
    sums = torch.zeros(B, H, N // 4, N // 4, dtype=torch.float64)
    for t in range(4):  # the antidiagonals of blocks of 4 x 4
        sums += s[..., t::4, 3 - t :: 4] / 4
    mass = softmax(sums, CAUSAL[: N // 4, : N // 4]).view(B, H, count, 4, count, 4).sum((3, 5)) / 4
    live = torch.eye(count, dtype=torch.bool).repeat(B, H, 1, 1)
    for row, kept in zip(mass.view(-1, count), live.view(-1, count), strict=True):
        total = 0.0
        for j in row.argsort(descending=True).tolist():
            kept[j] |= total < part
            total += float(row[j])
    return attend(scores(q, k), v, CAUSAL & expanded(live.repeat_interleave(16, 2)))


def largest(values: Tensor, count: int) -> Tensor:
    """For each row the ``count`` largest values that are not -inf."""
    chosen = values >= values.sort(-1, descending=True).values[..., count - 1 : count]
    return chosen & (values > -math.inf)


def moba(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    means = k.double().view(B, H, -1, 16, D).mean(3).detach()
    gate = q.double().detach() @ means.mT
    block, own = torch.arange(N // 16), I // 16
    gate = gate.masked_fill(block > own, -math.inf).masked_fill(block == own, math.inf)
    return attend(scores(q, k), v, CAUSAL & expanded(largest(gate, count)))


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    gate: Tensor,
    window: int,
    count: int,
) -> Tensor:
    block, own = torch.arange(N // 16), I // 16
    whole = (block + 1) * 16 - 1 <= I
    compressed = scores(q, k_blocks)
    mass = softmax(scores(q.double(), k_blocks.double()), whole).detach()
    mass = mass.view(B, k.shape[1], -1, N, N // 16).sum(2)
    always = (block == 0) | (block == own) | (block == own - 1)
    mass = mass.masked_fill(always | (block > own), -math.inf)
    picked = (largest(mass, count) | always).repeat_interleave(H // k.shape[1], 1)
    s = scores(q, k)
    return (
        gate[..., :1] * attend(compressed, v_blocks, whole)
        + gate[..., 1:2] * attend(s, v, CAUSAL & expanded(picked))
        + gate[..., 2:] * attend(s, v, CAUSAL & (I - J).lt(window))
    )


def dsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weight: Tensor,
    count: int,
) -> Tensor:
    products = torch.relu(index_q.double() @ index_k.double().mT)
    index = torch.einsum("bhq,bhqk->bqk", index_weight.double(), products)
    picked = largest(index.masked_fill(~CAUSAL, -math.inf), count)
    return attend(scores(q, k), v, picked[:, None])


def selective(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    masks = torch.relu(s[:, 0]).masked_fill(~CAUSAL, 0)
    masks = masks * (1 - torch.eye(N)) * (J > 0)
    earlier = F.pad(masks, (0, 0, 1, 0))[:, :-1].cumsum(1)
    return attend(s - earlier[:, None].to(s.dtype), v)


def meanflow(
    q: Tensor, k: Tensor, v: Tensor, q_way: Tensor, k_way: Tensor, v_way: Tensor, elapsed: float
) -> Tensor:
    def u(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return output(torch.softmax(scores(q, k), -1), v)

    _, du = torch.func.jvp(u, (q.detach(), k.detach(), v.detach()), (q_way, k_way, v_way))
    everywhere = torch.ones(N, N, dtype=torch.bool)
    return attend(scores(q, k), v, everywhere) + elapsed * du


def snapkv(q: Tensor, k: Tensor, v: Tensor, observed: int, count: int) -> Tensor:
    s = scores(q[:, :, -observed:].detach().double(), k.detach().double())
    mass = softmax(s, CAUSAL[-observed:]).sum(2)[..., :-observed]
    best = F.avg_pool1d(mass, 5, stride=1, padding=2).topk(count, -1).indices
    keep = torch.zeros(*mass.shape[:2], N, dtype=torch.bool).scatter(-1, best, True)
    keep[..., -observed:] = True
    return attend(scores(q[:, :, -1:], k), v, keep[:, :, None])


def entropy_guided(q: Tensor, k: Tensor, v: Tensor, threshold: float) -> Tensor:
    s = scores(q, k)
    weights = softmax(s)
    entropy = -(weights * weights.masked_fill(~CAUSAL, 1).log()).sum(-1)
    excess = torch.relu(entropy.mean(2) - threshold)
    out = attend(s, v).to(s.dtype)
    return torch.cat([out, excess[:, :, None, None].expand(*out.shape[:3], 1)], -1)


# ---- inputs -------------------------------------------------------------------------------------


def made(name: str) -> dict[str, Any]:
    """The arguments of a function: floats in float64, in the range of its paper's."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tree = torch.eye(32, dtype=torch.bool)
    for node in range(1, 32):
        tree[node] |= tree[int(torch.randint(0, node, (), generator=g))]
    image = torch.zeros(B, N, dtype=torch.int32)
    image[:, 10:40], image[0, 60:80] = 1, 2
    start = torch.randint(0, N, (B, N), generator=g).maximum(J)
    rows = torch.stack([start, start + 20, torch.zeros_like(start), J.expand_as(start)], -1)
    heads_kv = {"gpt_oss": 2, "nsa": 2}.get(name, H)
    d, d_v = {"based": (16, D), "mla": (128, 128), "differential": (128, 128)}.get(name, (D, D))
    inputs = {
        "q": normal(B, H, 32 if name == "medusa" else N, d),
        "k": normal(B, heads_kv, N, d),
        "v": normal(B, heads_kv, N, d_v),
    }
    extra: dict[str, dict[str, Any]] = {
        "hstu": {"distances": normal(N)},
        "lightning": {"rate": 2.0 ** -torch.arange(1.0, 1 + H)},
        "mamba2": {"log_a": -normal(B, H, N).abs() / 8},
        "log_linear": {"log_a": -normal(B, H, N).abs() / 8, "levels": normal(B, H, N, 8).sigmoid()},
        "mlstm": {"i": normal(B, H, N), "f": normal(B, H, N) + 2},
        "forgetting": {"f": normal(B, H, N) + 2},
        "ssmax": {"slope": normal(H) / 8 + 0.5},
        "ngpt": {"s": normal(D) / 8 + 1},
        "gpt_oss": {"sink": normal(H), "window": 32},
        "gated": {"gate": normal(B, H, N, D)},
        "mla": {"q_rope": normal(B, H, N, D), "k_rope": normal(B, 1, N, D)},
        "differential": {"factor": torch.tensor(0.4, dtype=torch.float64)},
        "self_extend": {"window": 24, "group": 4},
        "medusa": {"ancestor": tree, "prefix": N - 32, "q_offset": N - 32},
        "block_diffusion": {"clean": N // 2, "block": 12},
        "transfusion": {"image": image},
        "flashmask": {"rows": rows.int()},
        "duo": {"retrieves": torch.tensor([True, False, False, True]), "window": 20},
        "neighborhood": {"height": 8, "width": 12, "radius": 2, "stride": 3},
        "xattention": {"part": 0.8},
        "moba": {"count": 3},
        "nsa": {
            "k_blocks": normal(B, heads_kv, N // 16, D),
            "v_blocks": normal(B, heads_kv, N // 16, D),
            "gate": normal(B, H, N, 3).sigmoid(),
            "window": 32,
            "count": 2,
        },
        "dsa": {
            "index_q": normal(B, 8, N, 32),
            "index_k": normal(B, 1, N, 32),
            "index_weight": normal(B, 8, N).abs(),
            "count": 24,
        },
        "snapkv": {"observed": 16, "count": 24},
        "entropy_guided": {"threshold": 2.5},
        "meanflow": {
            **{f"{x}_way": normal(*inputs[x].shape) for x in "qkv"},
            "elapsed": 0.25,
        },
    }
    return inputs | extra.get(name, {})


# Tensors that specs capture are float32 beside operands of 16 bits; others have their dtype.
CAPTURED = {"distances", "rate", "log_a", "levels", "i", "f", "slope", "sink"}
NO_GRADIENT = {"rate", "index_q", "index_k", "index_weight", *(f"{x}_way" for x in "qkv")}


def results(
    function: Callable[..., Tensor],
    inputs: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    exact: bool,
    dout: Tensor | None = None,
) -> dict[str, Tensor]:
    """The output of a function and its gradients, of inputs that ``dtype`` holds."""
    call = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            rounded = value.to(torch.float32 if name in CAPTURED else dtype)
            of = rounded.double() if exact else rounded
            call[name] = of.clone().requires_grad_(name not in NO_GRADIENT)
    learned = [n for n, t in call.items() if isinstance(t, Tensor) and t.requires_grad]
    out = function(**call)
    if dout is None:
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, [call[n] for n in learned], dout.to(dtype).to(out.dtype))
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(learned, grads, strict=True)}}


def listed() -> list[str]:
    """The names in the column "code" of the page's table."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    found = re.findall(r"^\|.*\| (?:yes|in part) \| `(\w+)` \|", text, re.M)
    assert len(found) == len(set(found)) >= 30
    return found


def wrong(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The results of a function of the page that break the error rule, with their verdicts."""
    formula, inputs = globals()[name], made(name)
    exact = results(formula, inputs, dtype, exact=True)
    same = results(formula, inputs, dtype, exact=False)
    found = results(page()[name], inputs, dtype, exact=False)
    if name in SEVERAL_CALLS:  # which round as often
        kept = same
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Kept, "dtype", dtype)
            kept = results(formula, inputs, dtype, exact=True)
    verdicts = {
        what: compare(
            found[what],
            reference,
            same[what],
            factor=OUTPUT_FACTOR if what == "out" else GRADIENT_FACTOR,
            from_rounded=kept[what],
        )
        for what, reference in exact.items()
    }
    return {what: str(verdict) for what, verdict in verdicts.items() if not verdict}


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)], ids=str)
@pytest.mark.parametrize("name", listed())
def test_a_function_of_the_page_computes_the_formula_of_its_paper(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong(name, dtype, monkeypatch) == {}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", listed())
def test_the_kernels_of_a_function_of_the_page_compute_the_formula_of_its_paper(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    monkeypatch.setenv("FLASHGEN_ARCH", arch)
    monkeypatch.setitem(globals(), "B", 1)
    assert wrong(name, torch.bfloat16, monkeypatch) == {}


def test_every_paper_has_one_row_with_its_year_and_a_reason() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "arxiv.org" in line]
    numbers = []
    for row in rows:
        _, paper, year, served, *code, reason = [cell.strip(" |") for cell in row]
        link = re.fullmatch(r"\[(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/\1\)", paper)
        assert link is not None, paper
        assert year == f"20{paper[1:3]}" in ("2024", "2025", "2026")
        assert served in ("yes", "in part", "no")
        assert reason
        assert served != "no" or code in ([], [""])
        numbers.append(link[1])
    assert len(numbers) == len(set(numbers)) >= 30
