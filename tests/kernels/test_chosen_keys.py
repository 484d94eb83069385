"""Queries that choose their keys: emitted kernels against the oracle, on both code paths."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.chosen_lists import KeyRows
from flashgen.shared.errors import EmulatorError
from flashgen.shared.paths import PATHS
from tests.support.chosen_lists import call_of, spec_of
from tests.support.judged import check_gates, equal, normal
from tests.support.planted import planted
from tests.support.tiers import one_in, slow

Tensor = torch.Tensor


def judged(spec: fg.AttentionSpec, *rest: Any, backward: bool = True, **numbers: Any) -> None:
    call = call_of(spec, *rest, **numbers)
    forward = call.judged_forward()
    if backward:
        call.judged_backward(forward)


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + 20 - k >= 0) & (q - k < 40)


def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    slopes = fg.Tensor("slopes", ("heads",), "float32")
    return 20 * fg.tanh((score + slopes[h] * (k - q)) / 20)


BLOCKS = ((1, 16), (1, 64), (4, 32), (3, 1), (1, 128), (64, 64))
FAST = [((2, 16), "sm_80"), ((2, 1), "sm_90a")]
SIZES = (1, 4, 2, 9, 100)
# Tests share the kernels of these: blocks and single keys on sm_80, single keys on sm_90a.
PAIRS = spec_of(2, 16, None, head_dim=32)
KEYS = spec_of(1, 1, lambda b, h, q, k: q >= k, head_dim=32)
GATHERED = spec_of(2, 1, None, head_dim=32)


@pytest.mark.parametrize(
    ("blocks", "arch"), [*FAST, *(slow(*case) for case in product(BLOCKS, PATHS))]
)
def test_blocks_of_any_size_meet_the_error_rule(blocks: tuple[int, int], arch: str) -> None:
    most = 1 if blocks[1] > 64 else 2 if blocks[1] > 16 else 5 if blocks[1] > 1 else 40
    if (blocks, arch) in FAST:
        judged(spec_of(*blocks, None, head_dim=32), SIZES, arch, most)
        return
    judged(spec_of(*blocks, head_dim=64), SIZES, arch, most)


SPECS: dict[str, dict[str, Any]] = {
    "all scores": {"mask_mod": None},
    "window, softcap, slopes": {"mask_mod": window, "score_mod": biased},
    "sink": {"sink": True},
    "silu": {"weight_mod": lambda s, b, h, q, k: s * fg.sigmoid(s), "normalize": "none"},
    "squares": {"weight_mod": lambda s, b, h, q, k: s * s + 0.1, "normalize": "sum"},
    "192/128": {"dtype": "float16", "head_dim": 192, "head_dim_v": 128},
    "40/24": {"dtype": "float16", "head_dim": 40, "head_dim_v": 24},
    "256": {"head_dim": 256},
    "values inside keys": {"head_dim": 96, "head_dim_v": 64, "shared_kv": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", SPECS)
def test_specs_meet_the_error_rule(name: str, arch: str) -> None:
    options = SPECS[name]
    tensors: dict[str, Tensor] = {}
    if options.get("score_mod"):
        tensors["slopes"] = normal((8,), torch.float32, 9) * 0.05
    if options.get("sink"):
        tensors["sink"] = normal((8,), torch.float32, 10)
    spec = spec_of(2, 16, **{"head_dim": 64, **options})
    judged(spec, (1, 8, 2, 17, 90), arch, tensors=tensors)


@pytest.mark.slow
def test_float32_meets_the_error_rule() -> None:
    judged(spec_of(1, 16, head_dim=64, dtype="float32"), (1, 4, 1, 20, 70), "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_heads_of_512_and_values_inside_keys_meet_the_error_rule(arch: str) -> None:
    wide = {"head_dim": 576, "head_dim_v": 512, "shared_kv": True}
    judged(spec_of(1, 1, **wide), (1, 16, 1, 3, 90), arch, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "block_k"), [(64, 1), (128, 1), (64, 64), (128, 64)])
def test_wide_heads_meet_the_error_rule_with_the_same_bits_in_every_order(
    heads: int, block_k: int
) -> None:
    """Also with a mask, a score function and a sink; single keys on the path of Hopper."""
    wide = {"head_dim": 576, "head_dim_v": 512, "shared_kv": True, "sink": True}
    spec = spec_of(1, block_k, score_mod=lambda s, b, h, q, k: 20 * fg.tanh(s / 20), **wide)
    most = 40 if block_k == 1 else 2
    sink = normal((heads,), torch.float32, 10)
    call = call_of(spec, (1, heads, 1, 3, 90), "sm_90a", most, tensors={"sink": sink})
    run = call.judged_forward()
    found = call.judged_backward(run)
    for build in (report.kernel for report in found.reports):
        if build is not None and block_k == 1:
            check_gates(build)
    plans = {each.kernel.plan.kernel: each.kernel.plan for each in found.reports if each.kernel}
    if block_k == 1:
        assert plans["dkdv"].path == "sm_90a"
    again = call.backward(run, backend="emulator:7")
    assert all(torch.equal(getattr(found, x), getattr(again, x)) for x in ("dq", "dk", "dv"))


def gathered(
    q: Tensor, k: Tensor, v: Tensor, lists: dict[str, Tensor], block_q: int, block_k: int
) -> Tensor:
    """Attention over the keys of each list, taken out of k and v one group after another."""
    counts, blocks = lists["kv_num_blocks"], lists["kv_indices"].long()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    rows = []
    for b, h, g in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        own = blocks[b, h, g, : counts[b, h, g]]
        keys = (own[own >= 0, None] * block_k + torch.arange(block_k)).flatten()
        keys = keys[keys < k.shape[2]]
        heads = slice(h * group, (h + 1) * group)
        queries = slice(g * block_q, (g + 1) * block_q)
        if len(keys):
            scores = q[b, heads, queries] @ k[b, h, keys].T / q.shape[3] ** 0.5
            rows.append((b, heads, queries, scores.softmax(-1) @ v[b, h, keys]))
    for b, heads, queries, found in rows:
        out[b, heads, queries] = found
    return out


@pytest.mark.parametrize(
    ("arch", "blocks"),
    [
        ("sm_80", (2, 16)),
        ("sm_90a", (2, 1)),
        slow("sm_80", (2, 1)),
        slow("sm_90a", (2, 16)),
        *(slow(arch, (1, 64)) for arch in PATHS),
    ],
)
def test_gradients_are_those_of_attention_over_gathered_keys(
    arch: str, blocks: tuple[int, int]
) -> None:
    call = call_of(spec_of(*blocks, None, head_dim=32), (2, 4, 2, 7, 90), arch, 2)
    run = call.forward()
    q, k, v = (x.double().requires_grad_() for x in call.qkv)
    out = gathered(q, k, v, call.numbers["tensors"], *blocks)
    dout, _ = call.gradients
    call.gradients = dout, None
    found = call.backward(run)
    out.backward(dout.double())
    for name, exact in (("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        error = (getattr(found, name) - exact).norm() / exact.norm()
        assert error < 2**-7, name


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_the_keys_with_the_largest_scores_of_an_indexer(arch: str) -> None:
    """Causal lists of single keys, in the order of their scores; the first query has one key."""
    generator = torch.Generator().manual_seed(5)
    length, most = 40, 12
    scores = torch.randn(1, 1, length, length, generator=generator)
    scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    counts = torch.arange(1, length + 1).clamp(max=most).int().view(1, 1, length)
    lists = {"kv_num_blocks": counts, "kv_indices": scores.topk(most).indices.int()}
    call = call_of(KEYS, (1, 4, 1, length, length), arch, lists=lists)
    run = call.judged_forward()
    call.judged_backward(run)


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_positions_of_the_queries_are_those_of_the_call(arch: str) -> None:
    spec = spec_of(2, 16, lambda b, h, q, k: (q >= k) & (k % 3 != b), head_dim=32)
    judged(spec, (2, 4, 2, 5, 60), arch, q_offset=55, backward=False)
    starts = torch.tensor([30, 50], dtype=torch.int32)
    judged(spec, (2, 4, 2, 5, 60), arch, q_offset=starts, backward=False)


# One query splits its keys.
@pytest.mark.parametrize(("arch", "queries"), one_in(2, product(PATHS, (1, 2))))
def test_paged_caches_meet_the_error_rule(arch: str, queries: int) -> None:
    spec = spec_of(1, 16, head_dim=64, paged=True)
    lengths = torch.tensor([60, 96], dtype=torch.int32)
    table = torch.randperm(6, generator=torch.Generator().manual_seed(3)).view(2, 3).int()
    lists = {
        "kv_num_blocks": torch.tensor([[[2, 3]], [[3, 0]]], dtype=torch.int32),
        "kv_indices": torch.tensor([[[[3, 0, 9]], [[1, 2, 0]]], [[[5, 2, 1]], [[0, 0, 0]]]]).view(
            2, 1, 2, 3
        ),
    }
    lists = {name: x[:, :, :queries].int() for name, x in lists.items()}
    call = call_of(spec, (2, 4, 1, queries, 96), arch, lists=lists)
    caches = [normal((6, 1, 32, 64), torch.bfloat16, seed) for seed in (1, 2)]
    for cache in caches:  # slots past the keys, in a block that is listed first
        cache[table[0, 1], :, 28:] = torch.nan
    call.qkv = call.qkv[0], *caches
    call.numbers["tensors"] |= {"page_table": table, "cache_seqlens": lengths}
    call.judged_forward()


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_lists_of_all_keys_have_the_bits_of_the_dense_call(arch: str) -> None:
    """In tiles of as many keys."""
    spec = spec_of(1, 16, None, head_dim=64)
    blocks = torch.arange(6, dtype=torch.int32).expand(1, 1, 70, 6)
    lists = {"kv_num_blocks": torch.full((1, 1, 70), 6, dtype=torch.int32), "kv_indices": blocks}
    call = call_of(spec, (1, 1, 1, 70, 96), arch, lists=lists)
    run = call.forward()
    assert run.report.kernel is not None
    dense = fg.AttentionSpec(head_dim=64, dtype="bfloat16", paged=True)
    tensors = {
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "cache_seqlens": torch.tensor([96], dtype=torch.int32),
    }
    given: dict[str, Any] = {"tensors": tensors, "backend": "emulator", "arch": arch}
    expected = run_forward(dense, *call.qkv, split_size=0, **given)
    assert expected.report.kernel is not None
    assert run.report.kernel.plan.block_k == expected.report.kernel.plan.block_k
    assert equal(run, expected)


def test_groups_without_blocks_are_rows_without_keys() -> None:
    lists = {
        "kv_num_blocks": torch.zeros(1, 1, 4, dtype=torch.int32),
        "kv_indices": torch.full((1, 1, 4, 2), -1, dtype=torch.int32),
    }
    call = call_of(PAIRS, (1, 2, 1, 8, 40), "sm_80", lists=lists)
    run = call.judged_forward()
    assert not run.out.any()
    assert (run.lse == -torch.inf).all()
    gradients = call.backward(run)
    assert not any(x.any() for x in (gradients.dq, gradients.dk, gradients.dv))


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize("spec", [PAIRS, KEYS], ids=["pairs", "keys"])
def test_gradients_have_the_same_bits_in_every_order_of_blocks(
    spec: fg.AttentionSpec, arch: str
) -> None:
    call = call_of(spec, (1, 4, 2, 30, 64), arch)
    run = call.forward()
    first = call.backward(run)
    again = call.backward(run, backend="emulator:7")
    assert all(torch.equal(getattr(first, x), getattr(again, x)) for x in ("dq", "dk", "dv"))


def test_long_lists_are_cut_and_their_parts_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.calls.runtime.chosen_lists.MOST_OF_LIST", 8)
    lists = {
        "kv_num_blocks": torch.ones(1, 1, 25, dtype=torch.int32),
        "kv_indices": torch.full((1, 1, 25, 1), 2, dtype=torch.int32),  # all choose one block
    }
    call = call_of(PAIRS, (1, 2, 1, 50, 64), "sm_80", lists=lists)
    call.judged_backward(call.forward())


@pytest.mark.parametrize(
    ("arch", "spec"), [("sm_80", PAIRS), ("sm_90a", GATHERED)], ids=["sm_80", "sm_90a"]
)
def test_a_block_that_is_none_makes_its_group_nan(
    arch: str, spec: fg.AttentionSpec, monkeypatch: Any
) -> None:
    """Where lists are not checked first, as on a GPU."""
    monkeypatch.setattr("flashgen.calls.runtime.arguments.call.check_choice", lambda *given: None)
    monkeypatch.setattr("flashgen.calls.runtime.arguments.call.check_pages", lambda *given: None)
    blocks = torch.tensor([0, 2, 1, 70, 3, -5], dtype=torch.int32)
    lists = {
        "kv_num_blocks": torch.full((1, 2, 3), 2, dtype=torch.int32),
        "kv_indices": blocks.view(1, 1, 3, 2).expand(1, 2, 3, 2),
    }
    call = call_of(spec, (1, 2, 2, 6, 64), arch, lists=lists)
    out = call.forward().out
    assert not out[:, :, :2].isnan().any()
    assert out[:, :, 2:].isnan().all()


def test_the_oracle_finds_lists_by_keys_that_miss_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(PAIRS, (1, 2, 1, 20, 64), "sm_80")
    run = call.forward()
    lists_of = KeyRows.by_block

    def short(*given: Any) -> KeyRows:
        made = lists_of(*given)
        groups, lengths = made.pages
        return made._replace(pages=(groups, (lengths - 1).clamp_min(0)))

    monkeypatch.setattr(KeyRows, "by_block", short)
    verdicts = call.verdicts(call.backward(run))
    assert not verdicts["dk"].ok
    assert not verdicts["dv"].ok


def test_the_oracle_finds_keys_of_lists_that_miss_one(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(KEYS, (1, 2, 1, 20, 64), "sm_80", 9, q_offset=64)
    run = call.forward()
    lists_of = KeyRows.by_group

    def short(*given: Any) -> KeyRows:
        made = lists_of(*given)
        places = made.key_blocks.clone()
        places[0, 0] = made.sizes.blocks  # of no block
        return made._replace(key_blocks=places)

    monkeypatch.setattr(KeyRows, "by_group", short)
    verdicts = call.verdicts(call.backward(run))
    assert not verdicts["dk"].ok
    assert not verdicts["dv"].ok


@pytest.mark.parametrize("arch", [slow("sm_80"), "sm_90a"])
def test_groups_in_parts_have_the_gradients_of_all_at_once(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(GATHERED, (1, 4, 2, 9, 64), arch, 9)
    run = call.forward()
    whole = call.backward(run)
    monkeypatch.setattr("flashgen.calls.runtime.chosen_lists.MOST_ROWS", 30)
    parts = call.backward(run)
    assert len(parts.reports) > len(whole.reports)
    assert all(torch.equal(getattr(whole, x), getattr(parts, x)) for x in ("dq", "dk", "dv"))


@pytest.mark.parametrize("arch", PATHS)
def test_a_list_read_past_its_length_is_found(arch: str) -> None:
    call = call_of(spec_of(1, 16, None, head_dim=32), (1, 2, 1, 20, 64), arch)
    old = "return min(max(__shfl_sync(0xffffffffu, length, 0), 0), call.seq_k);"
    with planted("forward", old, "return call.seq_k;"):
        try:
            run = call.forward()
        except EmulatorError:
            return
    assert not all(verdict.ok for verdict in call.verdicts(run).values())
