"""The delta kernel reads neither mask nor score: specs of one dtype and head dim share it."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.kernels.codegen import Source
from flashgen.kernels.pipeline import build_backward, emit
from tests.support.examples import spec_path

CAUSAL = fg.load(spec_path("causal"))


def delta_of(spec: fg.AttentionSpec, **options: bool) -> Source:
    (found,) = (s for s in emit(spec, **options).backward if s.role == "delta")
    return found


@pytest.mark.parametrize("change", [{"dropout": True}, {"head_dim": 128, "head_dim_v": 64}])
def test_dropout_and_the_head_dim_of_q_change_nothing(change: dict[str, int]) -> None:
    changed = CAUSAL.replace(**change)
    assert delta_of(changed).text == delta_of(CAUSAL, deterministic=True).text


@pytest.mark.slow
def test_two_specs_share_the_compiled_kernel() -> None:
    packed = fg.load(spec_path("packed_causal"))
    small = {"head_dim": 16, "head_dim_v": 16}
    one, other = (build_backward(spec.replace(**small))[0] for spec in (CAUSAL, packed))
    assert one.source.role == other.source.role == "delta"
    assert one.binary.key == other.binary.key
    assert one.cubin == other.cubin


def test_its_name_has_the_dtype_the_head_dim_and_the_sink() -> None:
    def sink(name: str, *, grad: bool) -> fg.Tensor:
        return fg.Tensor(name, ("heads",), "float32", grad=grad)

    specs = [
        CAUSAL,
        CAUSAL.replace(dtype="bfloat16"),
        CAUSAL.replace(head_dim_v=40),
        CAUSAL.replace(sink=sink("sink", grad=True)),
        CAUSAL.replace(sink=sink("logits", grad=True)),
        CAUSAL.replace(sink=sink("sink", grad=False)),
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
    other = CAUSAL.replace(sink=sink("logits", grad=False))
    assert delta_of(other).text == delta_of(specs[-1]).text
