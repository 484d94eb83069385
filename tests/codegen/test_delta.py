"""The delta kernel reads neither mask nor score: specs of one dtype and head dim share it."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.codegen import Source
from flashgen.pipeline import build_backward, emit
from tests.support.paths import ROOT

SPECS = {path.stem: fg.load(path) for path in sorted((ROOT / "specs").glob("*.py"))}


def delta_of(spec: fg.AttentionSpec, arch: str = "sm_80", **options: bool) -> Source:
    (found,) = (s for s in emit(spec, arch, **options).backward if s.role == "delta")
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_specs_without_a_sink_share_the_source(arch: str) -> None:
    found = {delta_of(spec, arch).text for spec in SPECS.values() if spec.sink is None}
    assert len(found) == 1
    (text,) = found
    assert not any(name in text for name in SPECS if name not in ("full", "sink"))
    assert delta_of(SPECS["causal"], arch).filename == f"delta_fp16_d64_{arch}.cu"


@pytest.mark.parametrize("change", [{"dropout": True}, {"head_dim": 128, "head_dim_v": 64}])
def test_dropout_and_the_head_dim_of_q_change_nothing(change: dict[str, int]) -> None:
    changed = SPECS["causal"].replace(**change)
    assert delta_of(changed).text == delta_of(SPECS["causal"], deterministic=True).text


def test_two_specs_share_the_compiled_kernel() -> None:
    one, other = (build_backward(SPECS[name])[0] for name in ("causal", "packed_causal"))
    assert one.source.role == other.source.role == "delta"
    assert one.binary.key == other.binary.key
    assert one.cubin == other.cubin


def test_its_name_has_the_dtype_the_head_dim_and_the_sink() -> None:
    def sink(name: str, *, grad: bool) -> fg.Tensor:
        return fg.Tensor(name, ("heads",), "float32", grad=grad)

    causal = SPECS["causal"]
    specs = [
        causal,
        causal.replace(dtype="bfloat16"),
        causal.replace(head_dim_v=40),
        causal.replace(sink=sink("sink", grad=True)),
        causal.replace(sink=sink("logits", grad=True)),
        causal.replace(sink=sink("sink", grad=False)),
    ]
    assert [delta_of(spec).name for spec in specs] == [
        "delta_fp16_d64",
        "delta_bf16_d64",
        "delta_fp16_d40",
        "delta_sink_fp16_d64",
        "delta_logits_fp16_d64",
        "delta_fixed_sink_fp16_d64",
    ]
    assert len({delta_of(spec).text for spec in specs}) == len(specs)
    other = causal.replace(sink=sink("logits", grad=False))
    assert delta_of(other).text == delta_of(specs[-1]).text
