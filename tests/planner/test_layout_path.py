"""The code path of a pass over a block layout, where a call leaves it open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.programs import program_of
from flashgen.kernels.planner import plan
from flashgen.kernels.visits import layout_path
from flashgen.kernels.visits.layout_path import path_of_layout, paths_of_layout
from flashgen.spec.language.signature import split
from flashgen.spec.language.spec import AttentionSpec

SPECS = Path(__file__).resolve().parents[2] / "specs"
TARGET = Target("gpu", "sm_90a", torch.device("cpu"), 0, open_path=True)


def spec_of(name: str, head_dim: int = 128) -> AttentionSpec:
    return fg.load(SPECS / f"{name}.py").replace(head_dim=head_dim, head_dim_v=head_dim)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["butterfly", "bigbird", "local_global", "block_sparse"])
def test_the_path_of_fewer_predicted_clocks_is_taken(name: str, backward: bool) -> None:
    spec = spec_of(name)
    found = path_of_layout(spec, "sm_90a", backward=backward)
    assert found is not None
    seconds = {
        arch: layout_path._seconds(spec, layout_path._plans(spec, arch, backward, False))
        for arch in ("sm_90a", "sm_90")
    }
    assert seconds[found.arch] == min(seconds.values())
    assert f"{min(seconds.values()) * 1e3:.3f} ms with {found.arch}" in found.why


def test_the_path_of_portable_kernels_is_taken_where_hoppers_is_predicted_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_arch(spec: AttentionSpec, plans: Any) -> float:
        return 2.0 if plans[0].arch == "sm_90a" else 1.0

    monkeypatch.setattr(layout_path, "_seconds", by_arch)
    spec = spec_of("butterfly", 32)  # a spec of no other test: choices are kept
    program = program_of(spec)
    for which in ("forward", "backward"):
        chosen = program.path_of_pass(TARGET, which)
        assert chosen.arch == "sm_90"
        assert "block layout" in chosen.why
    path_of_layout.cache_clear()


def test_a_plan_names_the_path_of_calls_and_is_else_the_plan_of_the_kernel() -> None:
    spec = spec_of("local_global")
    shown, own = fg.plan(spec, "sm_90a"), plan(spec, "sm_90a")
    assert shown.notes == (*own.notes, str(path_of_layout(spec, "sm_90a")))
    assert replace(shown, notes=own.notes) == own
    assert "calls that name no architecture: block layout, forward: predicted" in str(shown)
    assert fg.plan(spec, "sm_80") == plan(spec, "sm_80")
    assert fg.plan(spec_of("causal"), "sm_90a") == plan(spec_of("causal"), "sm_90a")


def test_all_passes_are_listed_with_their_order_of_sums() -> None:
    found = paths_of_layout(spec_of("local_global"), "sm_90a")
    passes = [(path.backward, path.deterministic) for path in found]
    assert passes == [(False, False), (True, False), (True, True)]
    whats = [path.why.split(":")[0] for path in found]
    assert whats == [
        "block layout, forward",
        "block layout, backward",
        "block layout, backward with fixed order of sums",
    ]
    assert paths_of_layout(spec_of("local_global"), "sm_90a", backward=False) == found[:1]
    assert paths_of_layout(spec_of("causal"), "sm_90a") == ()


def test_a_call_that_names_its_architecture_keeps_it() -> None:
    program = program_of(spec_of("local_global"))
    named = replace(TARGET, open_path=False)
    assert program.path_of_pass(named, "forward").arch == "sm_90a"


def test_only_layouts_on_a_device_with_two_paths_have_a_choice() -> None:
    spec = spec_of("local_global")
    assert path_of_layout(spec_of("causal"), "sm_90a") is None
    assert path_of_layout(spec, "sm_80") is None
    assert path_of_layout(split(spec), "sm_90a") is None


def test_a_layout_of_the_call_and_a_mask_of_tensors_have_a_choice_too() -> None:
    ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, k] == 0

    spec = AttentionSpec(
        mask_mod=same, block_sparse=fg.BlockSparse(block_q=32, block_k=32), head_dim=64
    ).replace(dtype="float16")
    for backward in (False, True):
        assert path_of_layout(spec, "sm_90a", backward=backward) is not None


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_scalars_of_calls_change_no_choice(dtype: str) -> None:
    number = fg.Scalar("number", dtype)
    mods: tuple[dict[str, Any], ...] = (
        {"mask_mod": lambda b, h, q, k: fg.where(number, q, 2 * q) >= k},
        {"score_mod": lambda s, b, h, q, k: fg.where(number, s, -s)},
    )
    if dtype != "bool":
        mods = (
            {"mask_mod": lambda b, h, q, k: q - k < number},
            {"score_mod": lambda s, b, h, q, k: s * number},
        )
    for mod in mods:
        spec = spec_of("block_sparse").replace(**mod)
        for backward in (False, True):
            assert path_of_layout(spec, "sm_90a", backward=backward) is not None
