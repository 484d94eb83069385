"""Gradients that warps sum in shared memory: the error rule, additions counted, planted bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.kernels.pipeline import Build, build_backward
from flashgen.kernels.planner import Tile
from flashgen.shared.paths import PATHS
from flashgen.tools.profile.run import profile_backward
from tests.support.examples import spec_path
from tests.support.judged import Call, check_gates, dropping, example
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import slow

WIDTH = 16  # of the image of the specs with two axes

line = fg.Tensor("t", ("n",), "float32", grad=True)
image = fg.Tensor("t", ("heads", "y", "x"), "float32", grad=True)
small = fg.Tensor("t", (13, 13), "float32", grad=True)
row = fg.Tensor("row", ("heads", "seq_q"), "float32", grad=True)
column = fg.Tensor("column", ("seq_k",), "float32", grad=True)
gate = fg.Tensor("gate", (), "float32", grad=True)


def clip(x: Any, lo: int, hi: int) -> Any:
    return fg.minimum(fg.maximum(x, lo), hi)


def clipped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * line[clip(q - k, -20, 20) + 20]


def halved(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + line[(q - k) // 2 + 60]


def outside(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Most indices are outside the tensor, where its first or last element is read."""
    return s + line[q - k]


def twice(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + line[q - k + 50] * fg.tanh(s * line[fg.abs(q - k)])


def of_pixels(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + image[h, q // WIDTH - k // WIDTH + 10, q % WIDTH - k % WIDTH + WIDTH - 1]


def of_near_pixels(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    y, x = q // WIDTH - k // WIDTH, q % WIDTH - k % WIDTH
    return s + small[clip(y, -6, 6) + 6, clip(x, -6, 6) + 6]


def in_registers(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Sums of a row, of a column and of all scores, which lanes keep in registers."""
    return s * gate + fg.tanh(s * column[k]) + row[h, q]


SCORES: dict[Any, tuple[int, ...]] = {
    clipped: (41,),
    halved: (99,),
    outside: (60,),
    twice: (120,),
    of_pixels: (2, 21, 31),
    of_near_pixels: (13, 13),
}


def reaches(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + 30 >= k


def windows(build: Build) -> bool:
    """Whether the kernel for learned tensors has sums in shared memory."""
    return build.plan.smem["windows"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("score", SCORES)
def test_sums_in_shared_memory_meet_the_error_rule(
    path: str, score: Any, deterministic: bool
) -> None:
    """With offsets, heads that share keys, a mask, ragged tiles, and dropout in one of two."""
    spec = fg.AttentionSpec(reaches, score, name=score.__name__, dropout=deterministic, head_dim=64)
    shape = SCORES[score]
    numbers: dict[str, Any] = {
        "tensors": {"t": torch.randn(shape, generator=torch.Generator().manual_seed(3))},
        "q_offset": 16 if deterministic else 5,
        "k_offset": -16 if deterministic else 2,
        **(dropping(0.2) if deterministic else {}),
    }
    call = Call(spec, Case(100, 150, 1, 2, 1).tensors(seed=1), numbers, arch=path)
    run = call.judged_backward(deterministic=deterministic)
    kernel = run.reports[-1].kernel
    assert kernel is not None
    assert windows(kernel)
    check_gates(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("column_warps", [2, 4])
@pytest.mark.parametrize("step", [16, 48])
@pytest.mark.parametrize("score", [*SCORES, in_registers])
def test_warps_with_the_same_rows_divide_the_sums(
    score: Any, step: int, column_warps: int, deterministic: bool
) -> None:
    spec = fg.AttentionSpec(reaches, score, name=score.__name__, dropout=deterministic, head_dim=64)
    generator = torch.Generator().manual_seed(3)
    shapes = {"t": SCORES.get(score, ()), "row": (2, 56), "column": (150,), "gate": ()}
    tensors = {x.name: torch.randn(shapes[x.name], generator=generator) for x in spec.tensors}
    numbers = {"tensors": tensors, "q_offset": 16, **(dropping(0.2) if deterministic else {})}
    call = Call(spec, Case(40, 150, 1, 2, 1).tensors(seed=1), numbers, arch="sm_80")
    name = "captured_exact" if deterministic else "captured"
    tile = Tile(step, 4, 1, 1, column_warps)
    run = call.judged_backward(deterministic=deterministic, tiles={name: tile})
    kernel = run.reports[-1].kernel
    assert kernel is not None
    assert kernel.plan.tile == tile
    check_gates(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("in_windows", [False, True])
def test_sums_of_many_elements_in_a_loop_meet_the_error_rule(
    path: str, deterministic: bool, in_windows: bool
) -> None:
    rows = fg.Tensor("t", ("heads", "seq_k"), "float32", grad=True)
    biases = fg.Tensor("t", (64,), "float32", grad=True)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(12):
            read = biases[fg.clamp(q - k + i, 0, 63)] if in_windows else rows[h, k - i]
            s = s * (1 + read / 8)
        return s + biases[q] * biases[3] if in_windows else s

    spec = fg.AttentionSpec(score_mod=score, name="many", dtype="float16", head_dim=64)
    shape = (64,) if in_windows else (1, 150)
    tensors = {"t": torch.randn(shape, generator=torch.Generator().manual_seed(3))}
    case = Case(50, 150, 1, 1, 1, "float16", 64)
    call = Call(spec, case.tensors(seed=1), {"tensors": tensors}, arch=path)
    kernel = call.judged_backward(deterministic=deterministic).reports[-1].kernel
    assert kernel is not None
    assert windows(kernel) == in_windows
    assert "kept_ds" in kernel.source.text


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences_have_windows_of_their_own_positions(
    path: str, deterministic: bool
) -> None:
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: s + line[q - k + 40], packed=True, name="packed_relative"
    )
    boundaries = torch.tensor([0, 70, 90, 200], dtype=torch.int32)
    tensors = {
        "t": torch.randn(90, generator=torch.Generator().manual_seed(3)),
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
    }
    call = Call(spec, Case(200, 200, 1, 2, 1).tensors(seed=1), {"tensors": tensors}, arch=path)
    kernel = call.judged_backward(deterministic=deterministic).reports[-1].kernel
    assert kernel is not None
    assert windows(kernel)


# ---- what is counted ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", [slow("sm_80"), "sm_90a"])
@pytest.mark.parametrize("name", ["relative_bias", slow("dense_bias")])
def test_a_tile_adds_its_sums_once_to_global_memory(name: str, path: str) -> None:
    """Of a relative bias rows + keys - 1 sums per warp and step; of a dense bias every score."""
    call = example(spec_path(name), Case(128, 192, 1, 1, 1, "float16", 64))
    given = (call.spec, *call.qkv, *call.results, *call.gradients)
    _, profiles = profile_backward(*given, arch=path, **call.numbers)
    plan = profiles[-1].plan
    (added,) = (each for each in profiles[-1].tensors if each.name.startswith("dc_"))
    scores = 128 * 192
    assert scores % (plan.block_q * plan.block_k) == 0
    steps = plan.warps * scores // (plan.block_q * plan.block_k)
    rows = 16 * plan.row_groups
    sums = steps * (rows + plan.block_k - 1) if name == "relative_bias" else scores
    assert added.issued.counted == 4 * sums
    places = {True: "in shared memory", False: "each score is added in global memory"}
    assert any(places[name == "relative_bias"] in note for note in plan.notes)


@pytest.mark.parametrize(
    ("name", "path", "head_dim"),
    [
        slow(name, path, head_dim)
        for name in ("relative_bias", "t5_bias")
        for path in PATHS
        for head_dim in (64, 128)
    ],
)
def test_windows_fit_into_the_plan_without_spills(name: str, path: str, head_dim: int) -> None:
    spec = fg.load(spec_path(name)).replace(head_dim=head_dim)
    for deterministic in (False, True):
        build = build_backward(spec, path, deterministic=deterministic)[-1]
        assert windows(build)
        assert build.binary.resources.spill_store_bytes == 0
        check_gates(build)


# ---- planted bugs ------------------------------------------------------------------------------


def of_planted(path: str) -> Call:
    case = Case(40, 210, 1, 1, 1, "float16", 16)  # several steps
    return example(spec_path("relative_bias"), case, arch=path)


@pytest.mark.parametrize("path", ["sm_80", slow("sm_90a")])
def test_sums_that_are_not_cleared_at_first_are_caught(path: str) -> None:
    cleared = "i < WINDOW_ENTRIES; i += 32) sums[i] = 0;"
    with planted("captured", cleared, "i < 0; i += 32) {}"), caught("initiali"):
        of_planted(path).backward()


@pytest.mark.parametrize("path", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("        sums[place] = 0;\n", "", id="sums are not cleared"),
        slow("if (held_by0 >= 0) {\n      atomicAdd(", "if (false) {\n      atomicAdd("),
    ],
)
def test_wrong_sums_are_seen_by_the_error_rule(path: str, old: str, new: str) -> None:
    call = of_planted(path)
    with planted("captured", old, new):
        verdicts = call.verdicts(call.backward())
    assert [name for name, verdict in verdicts.items() if not verdict.ok] == ["dtable"]
