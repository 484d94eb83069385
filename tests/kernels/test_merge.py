"""Partial results merged into the result over all keys, by the emitted kernel and in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import InputError, SpecError
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime import bind_arguments
from flashgen.calls.runtime.backends import target_of
from flashgen.calls.runtime.merge import Results, bind_merge, merge, run_merge, tensors_of_merge
from flashgen.kernels.pipeline import build_merge
from flashgen.shared.arch import facts
from flashgen.shared.call import LaunchOptions
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import partial
from tests.support.examples import spec_path
from tests.support.judged import check_gates, judge_forward
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import slow

Tensor = torch.Tensor
INF = torch.inf
BATCH, HEADS, ROWS = 2, 3, 21


def parts_of(splits: int, dim: int, *, rows_first: bool = False) -> tuple[Tensor, Tensor]:
    """Parts with LSE of very different sizes. Some rows have no keys in a part, some in none."""
    generator = torch.Generator().manual_seed(splits)
    out = torch.randn(splits, BATCH, HEADS, ROWS, dim, generator=generator)
    lse = 20 * torch.randn(splits, BATCH, HEADS, ROWS, generator=generator)
    lse[0, 0, 1] = lse[-1, 1, :, 5:9] = lse[:, 1, 2, 7:] = -INF
    out[lse == -INF] = torch.nan  # as in memory that nothing has written
    if rows_first:
        out = out.transpose(2, 3).contiguous().transpose(2, 3)
    return out, lse


def exact_merge(
    out: Tensor, lse: Tensor, merged: tuple[Tensor, Tensor] | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In float64, by the formulas."""
    if merged is not None:
        out, lse = torch.cat([merged[0][None], out]), torch.cat([merged[1][None], lse])
    logits = lse.double()
    if sink is not None:
        logits = torch.cat([logits, sink.double()[None, None, :, None].expand(1, *lse.shape[1:])])
    total = logits.logsumexp(0)
    weight = torch.where(lse == -INF, 0, (lse - total).exp())[..., None]
    return torch.where(weight == 0, 0, weight * out).sum(0), total


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_merged", [False, True])
@pytest.mark.parametrize(
    ("splits", "dim", "dtype", "arch", "rows_first"),
    [
        (1, 64, torch.float16, "sm_80", False),
        (2, 40, torch.float32, "sm_80", True),
        (5, 24, torch.bfloat16, "sm_90a", False),
        (5, 40, torch.float32, "tiled", True),
        (2, 64, torch.float16, "tiled", False),
        slow(33, 8, torch.float16, "sm_80", True),
        slow(5, 72, torch.float32, "sm_90a", False),
        slow(3, 256, torch.bfloat16, "sm_80", True),
    ],
)
def test_the_merged_result_is_that_over_all_keys(
    splits: int,
    dim: int,
    dtype: torch.dtype,
    arch: str,
    rows_first: bool,
    with_merged: bool,
    with_sink: bool,
) -> None:
    parts = parts_of(splits, dim, rows_first=rows_first)
    out, lse = parts_of(7, dim, rows_first=rows_first)
    merged = (out[3].roll(4, 2), lse[3].roll(4, 2)) if with_merged else None
    sink = torch.tensor([-INF, 0.5, 30.0]) if with_sink else None
    how = {"backend": "tiled"} if arch == "tiled" else {"backend": "emulator", "arch": arch}
    out, lse = merge(*parts, merged=merged, sink=sink, out_dtype=dtype, **how)
    exact, exact_lse = exact_merge(*parts, merged, sink)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.stride() == parts[0][0].stride()
    unit = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps
    assert ((out - exact).abs() <= unit * (1 + exact.abs())).all()
    empty = exact_lse == -INF
    assert empty.any() or with_sink
    assert torch.equal(lse == -INF, empty)
    assert not out[empty].any()
    torch.testing.assert_close(lse[~empty].double(), exact_lse[~empty], rtol=2e-7, atol=2e-6)
    if arch != "tiled":
        check_gates(build_merge(dim, str(dtype).removeprefix("torch."), arch))


def test_one_part_is_its_own_result() -> None:
    out, lse = parts_of(1, 40)
    for how in ({"backend": "emulator"}, {"backend": "tiled"}):
        found, found_lse = merge(out, lse, **how)
        assert torch.equal(found_lse, lse[0])
        assert torch.equal(found, out[0].nan_to_num(0.0))


def test_parts_can_be_merged_one_after_another() -> None:
    out, lse = parts_of(5, 40)
    whole, whole_lse = merge(out, lse, backend="emulator")
    so_far = out[0].nan_to_num(0.0), lse[0]
    for part in zip(out[1:], lse[1:], strict=True):
        so_far = merge(part[0][None], part[1][None], merged=so_far, backend="emulator")
    torch.testing.assert_close(so_far[0], whole, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(so_far[1], whole_lse, rtol=1e-6, atol=2e-6)


def run(out: Tensor, lse: Tensor, **launch: Any) -> tuple[Tensor, Tensor, Any]:
    """The kernel's results, and the counters of the emulator."""
    results = torch.full_like(out[0], torch.nan), torch.full_like(lse[0], torch.nan)
    target = target_of("emulator", "sm_80", out.device)
    counters = run_merge(target, (out, lse), results, launch=LaunchOptions(**launch))
    return *results, counters


def run_splits(
    out: Tensor,
    lse: Tensor,
    merged: Results | None = None,
    sink: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **launch: Any,
) -> tuple[Tensor, Tensor, Any]:
    """The same with the kernel for split keys, whose lanes have a column of a row each."""
    results = torch.full_like(out[0], torch.nan, dtype=dtype), torch.full_like(lse[0], torch.nan)
    given = (out, lse), results, merged, sink
    name = str(dtype).removeprefix("torch.")
    kernel = build_merge(out.shape[4], name, "sm_80", splits=True)
    check_gates(kernel)
    target = target_of("emulator", "sm_80", out.device)
    bound = bind_merge(kernel, *given)
    counters = bound.run(target, tensors_of_merge(*given), LaunchOptions(**launch))
    return *results, counters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "dim", "dtype", "joined"),
    [
        (1, 40, torch.float32, False),
        (40, 40, torch.float16, True),
        (300, 128, torch.bfloat16, False),
        (9, 8, torch.float32, True),
        (600, 64, torch.bfloat16, True),
        (17, 72, torch.float32, True),
        (70, 24, torch.float16, True),
        (33, 256, torch.float16, True),
    ],
)
def test_lanes_with_a_column_each_give_the_result_over_all_keys(
    splits: int, dim: int, dtype: torch.dtype, joined: bool
) -> None:
    out, lse = (tensor[:, :, :, :9] for tensor in parts_of(splits, dim))
    merged = sink = None
    if joined:
        merged = out[0].nan_to_num(0.5).roll(2, 2), lse[0].roll(2, 2)
        sink = torch.tensor([-INF, 0.5, 30.0])
    found, found_lse, _ = run_splits(out, lse, merged, sink, dtype=dtype)
    exact, exact_lse = exact_merge(out, lse, merged, sink)
    unit = torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps
    assert ((found - exact).abs() <= unit * (1 + exact.abs())).all()
    empty = exact_lse == -INF
    assert torch.equal(found_lse == -INF, empty)
    assert not found[empty].any()
    torch.testing.assert_close(found_lse[~empty].double(), exact_lse[~empty], rtol=2e-7, atol=2e-6)
    if splits == 1:
        assert torch.equal(found, out[0].nan_to_num(0.0))
        assert torch.equal(found_lse, lse[0])


@pytest.mark.parametrize("dim", [40, slow(256)])
def test_the_bits_of_a_row_depend_on_its_parts_alone(dim: int) -> None:
    """Neither on other rows, nor on further parts without keys, whose memory is not written."""
    out, lse = (tensor[:, :, :, :9] for tensor in parts_of(70, dim))
    found = run_splits(out, lse)
    alone = run_splits(out[:, 1:, 1:2, 3:4], lse[:, 1:, 1:2, 3:4])
    room = torch.full((400, *out.shape[1:]), torch.nan), torch.full((400, *lse.shape[1:]), -INF)
    longer = run_splits(torch.cat([out, room[0]]), torch.cat([lse, room[1]]), order_seed=5)
    for mine, of_row, same in zip(found[:2], alone[:2], longer[:2], strict=True):
        assert torch.equal(mine[1:, 1:2, 3:4], of_row)
        assert torch.equal(mine, same)
    more = 4 * -(-dim // 32) * room[1].numel()  # each warp of a row reads the LSE
    assert longer[2].global_read_bytes == found[2].global_read_bytes + more


def test_warps_that_share_a_row_read_each_lse_once_and_only_parts_with_keys() -> None:
    out, lse = parts_of(40, 40)
    *_, counters = run_splits(out, lse)
    assert counters.global_read_bytes == 4 * 40 * int((lse > -INF).sum()) + 4 * 2 * lse.numel()


def test_parts_loaded_beside_their_lse_give_the_same_bits() -> None:
    """The O of the first 32 parts, which may not have been written, and no others without keys."""
    out, lse = (tensor[:, :1, :2, 4:8] for tensor in parts_of(40, 40))
    lse[3:20:2, 0, 1, :] = lse[36] = -INF
    out[lse == -INF] = torch.nan
    merged = out[2].nan_to_num(0.5).roll(1, 2), lse[2].roll(1, 2)
    sink = torch.tensor([-INF, 0.5])
    for given in ((), (merged, sink)):
        found = run_splits(out, lse, *given)
        with planted("merge", "bool loaded = ", "bool loaded = false && "):
            waits = run_splits(out, lse, *given)
        for mine, same in zip(found[:2], waits[:2], strict=True):
            assert torch.equal(mine, same)
            assert not mine.isnan().any()
        empty = int((lse[:32] == -INF).sum())
        more = found[2].global_read_bytes - waits[2].global_read_bytes
        assert empty > 0
        assert more == 4 * 40 * empty


def test_parts_without_keys_are_not_loaded_where_they_cost_more_than_a_wait() -> None:
    """What all blocks would load, in 4 bytes for each of 32 columns, over the rate of memory."""
    gpu = facts("sm_80")
    out, lse = parts_of(9, 256)
    columns = 256 // 32
    room = gpu.memory_latency / gpu.clock_hz * gpu.hbm_bytes_per_s
    most = int(room / (4 * 32 * columns * lse[0].numel()))
    for splits in (most, most + 1):
        parts = out[:splits], lse[:splits]
        reads = run_splits(*parts)[2].global_read_bytes
        rows = lse[:splits].numel() if splits == most else int((lse[:splits] > -INF).sum())
        assert reads == 4 * 256 * rows + 4 * columns * lse[:splits].numel()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("own_factor, j, LANES)", "1.0f, j, LANES)"),
        slow("(first + j) * p", "j * p"),
        slow("fmaf(total, factor, weight)", "total + weight"),
    ],
)
def test_bugs_of_shared_rows_are_seen(old: str, new: str) -> None:
    """Sums that keep an earlier scale, parts that count twice, a divisor with an earlier scale."""
    out, lse = (tensor[:, :, :, :4] for tensor in parts_of(90, 40))
    expected = run_splits(out, lse)[0]
    with planted("merge", old, new, after="// 3. Then the parts"):
        assert not torch.allclose(run_splits(out, lse)[0], expected, equal_nan=True)


def test_only_parts_with_keys_are_read() -> None:
    out, lse = parts_of(5, 40)
    *_, counters = run(out, lse)
    assert counters.global_read_bytes == 4 * 40 * int((lse > -INF).sum()) + 4 * lse.numel()
    assert counters.global_write_bytes == 4 * (40 + 1) * lse[0].numel()


def test_every_order_of_blocks_and_every_grid_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, lse = parts_of(5, 40)
    first = run(out, lse)
    other = run(out, lse, order_seed=3)
    monkeypatch.setattr(bind_arguments, "MOST_ALONG_Y_AND_Z", 1)
    for found in (other, run(out, lse)):
        assert torch.equal(found[0], first[0])
        assert torch.equal(found[1], first[1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lse == minus_infinity() ? lse : lse - top", "lse - top"),  # -inf - -inf
        ("with_keys >> (i + j) & 1", "exists && i + j < count"),  # 0 * NaN
        ("total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total"),  # 0 / 0
    ],
)
def test_a_bug_in_rows_without_keys_gives_nan(old: str, new: str) -> None:
    assert not any(x.isnan().any() for x in run(*parts_of(5, 40))[:2])
    with planted("merge", old, new):
        assert any(x.isnan().any() for x in run(*parts_of(5, 40))[:2])


def test_rows_past_the_end_are_not_written() -> None:
    with planted("merge", "= row < p.seq_q;", "= row <= p.seq_q;"), caught("OutOfBounds"):
        run(*parts_of(5, 40))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_results_over_parts_of_the_keys_are_those_of_one_call(arch: str) -> None:
    """The queries before the second part have no keys in it."""
    spec, (q, k, v) = fg.load(spec_path("causal")), Case(113, 203, 1, 4, 2).tensors()
    how: dict[str, Any] = {"backend": "emulator", "arch": arch}
    parts = [
        run_forward(
            partial(spec), q, k[:, :, start:stop], v[:, :, start:stop], k_offset=start, **how
        )
        for start, stop in ((0, 64), (64, 203))
    ]
    out = torch.stack([part.out for part in parts])
    lse = torch.stack([part.lse for part in parts])
    assert (lse[1, :, :, :64] == -INF).all()
    judge_forward(merge(out, lse, out_dtype=q.dtype, **how), spec, q, k, v)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"parts_out": torch.zeros(2, 1, 3, 4, 8, dtype=torch.float16)}, "do not fit together"),
        ({"parts_out": torch.zeros(1, 3, 4, 8)}, "do not fit together"),
        ({"parts_lse": torch.zeros(2, 1, 3, 5)}, "do not fit together"),
        ({"parts_lse": None}, "not a torch tensor"),
        ({"merged": (torch.zeros(1, 3, 4, 16), torch.zeros(1, 3, 4))}, "do not fit together"),
        ({"sink": torch.zeros(2)}, "a logit for each head"),
        ({"parts_out": torch.zeros(2, 1, 3, 4, 9)[..., 1:]}, "in 16-byte vectors"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], what: str) -> None:
    given = {"parts_out": torch.zeros(2, 1, 3, 4, 8), "parts_lse": torch.zeros(2, 1, 3, 4)}
    with pytest.raises(InputError, match=what) as error:
        merge(**given | change, backend="emulator")  # type: ignore[arg-type]
    assert next(iter(change)) in error.value.where
    assert error.value.way_out


def test_kernels_have_the_head_dims_of_specs() -> None:
    with pytest.raises(SpecError, match="head_dim is a multiple of 8"):
        merge(torch.zeros(1, 1, 1, 1, 4), torch.zeros(1, 1, 1, 1), backend="emulator")
    out, lse = merge(torch.zeros(1, 1, 1, 0, 8), torch.zeros(1, 1, 1, 0), backend="emulator")
    assert (out.shape, lse.shape) == ((1, 1, 0, 8), (1, 1, 0))
