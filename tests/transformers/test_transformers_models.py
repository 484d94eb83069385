"""Models of transformers on flashgen: outputs, gradients, dropout, and the emitted kernels."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers")

from flashgen.integrations import transformers as integration
from flashgen.shared.paths import PATHS
from tests.support.tiers import one_in, slow
from tests.support.transformers_models import (
    MODELS,
    InFloat64,
    KeepMasks,
    TinyModel,
    gradients_of,
    meet_the_rule,
    tiny,
)

Tensor = torch.Tensor

# The models that torch's scaled_dot_product_attention cannot compute, of which transformers refuses
# the first and has no such attention for the second.
WITHOUT_SDPA = ("gemma2", "gpt_oss")
DROPOUT = 0.125


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}


def results(
    model: TinyModel, attention: str, inputs: dict[str, Tensor], dropout: float, exact: bool = False
) -> dict[str, Tensor]:
    """The outputs and the gradients of all parameters, in training mode."""
    made = model.model(attention, dropout).train()
    if not exact:
        return gradients_of(made, inputs)
    with InFloat64():
        return gradients_of(made.double(), cast(inputs, torch.float64))


def check(name: str, dropout: float, keep: KeepMasks | None, padding: str = "left") -> None:
    model = tiny(name)
    inputs = model.inputs(padding)

    def of(attention: str, exact: bool = False) -> dict[str, Tensor]:
        if keep is not None:
            keep.replay()
        return results(model, attention, inputs, dropout, exact)

    found, exact, kept = of("fg"), of("eager", exact=True), of("kept", exact=True)
    # Two ordinary computations: the rounding errors of one depend on the machine's matrix products.
    same = [of("eager"), of("kept")]
    if name not in WITHOUT_SDPA and not dropout:
        same.append(of("sdpa"))
    meet_the_rule(found, exact, same, kept)


@pytest.mark.parametrize("name", one_in(4, MODELS))
def test_outputs_and_gradients_meet_the_error_rule(name: str) -> None:
    check(name, 0.0, None)


@pytest.mark.parametrize("name", [n if n == "gpt_oss" else slow(n) for n in MODELS])
def test_dropout_is_eager_attention_with_the_same_elements(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, DROPOUT, KeepMasks(monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["right", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_may_be_anywhere(name: str, padding: str) -> None:
    check(name, 0.0, None, padding)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_meets_the_error_rule_by_emitted_kernels(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name)
    inputs = model.inputs(length=70)
    exact = of_one_layer(model, "eager", inputs, torch.float64)
    same = of_one_layer(model, "eager", inputs, torch.float16)
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    monkeypatch.setenv("FLASHGEN_ARCH", arch)
    found = of_one_layer(model, "fg", inputs, torch.float16)
    assert_emulated(arch)
    meet_the_rule(found, exact, [same])


def of_one_layer(
    model: TinyModel, attention: str, inputs: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    made = model.model(attention, layers=1).train().to(dtype)
    with InFloat64() if dtype == torch.float64 else nullcontext():
        return gradients_of(
            made, {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        )


def assert_emulated(arch: str) -> None:
    """The last calls of the operators were of kernels for the architecture."""
    reports = [op.report for op in integration.operators() if op.report is not None]
    used = [r for r in reports if r.backend == "emulator" and r.kernel is not None]
    assert used
    assert any(report.kernel.plan.arch == arch for report in used)
