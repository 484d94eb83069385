"""Generation with models of transformers on flashgen: caches, beams, assistants; no rebuilds."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from flashgen.frontends.transformers import layers
from flashgen.spec.language.spec import AttentionSpec
from tests.support.tiers import slow
from tests.support.transformers_models import tiny

Tensor = torch.Tensor

DECODERS = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "t5")
CACHES = (None, "static")
"""The dynamic cache, hybrid where the model has sliding windows, and its static form."""

NEW_TOKENS = 64


def generated(name: str, attention: str, length: int = 23, **options: Any) -> Tensor:
    """The tokens of a left-padded batch of two, in float32."""
    model = tiny(name)
    made = model.model(attention)
    inputs = {k: x for k, x in model.inputs(length=length).items() if "decoder" not in k}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    torch.manual_seed(0)
    # No end: all steps are taken.
    return made.generate(**inputs, eos_token_id=None, pad_token_id=0, **options)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pair if pair in (("llama", None), ("gemma3", "static")) else slow(*pair)
        for pair in itertools.product(DECODERS, CACHES)
    ],
)
def test_greedy_generation_from_a_padded_batch_equals_eager(name: str, cache: str | None) -> None:
    expected = generated(name, "eager", cache_implementation=cache)
    found = generated(name, "fg", cache_implementation=cache)
    assert found.shape[1] >= NEW_TOKENS
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        slow({"do_sample": True, "temperature": 0.8, "top_k": 20}),
        slow({"use_cache": False}),
        slow({"num_beams": 4, "cache_implementation": "static"}),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_other_strategies_equal_eager(options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 20, **options}
    found, expected = (generated("mistral", each, **options) for each in ("fg", "eager"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("draft", ["model", slow("prompt")])
def test_assisted_generation_equals_eager(draft: str) -> None:
    def of(attention: str) -> Tensor:
        model = tiny("llama")
        made = model.model(attention)
        given = (
            {"assistant_model": model.model(attention, layers=1)}
            if draft == "model"
            else {"prompt_lookup_num_tokens": 4}
        )
        ids = model.inputs(length=19)["input_ids"][1:]
        return made.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **given,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    assert torch.equal(of("fg"), of("eager"))


STAGES = ("language", "analysis", "planner", "codegen", "compile", "pipeline")


class Built:
    """Counts specs, plans, emitted and compiled kernels: misses of the caches of each stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.specs = 0
        make = AttentionSpec.__post_init__

        def counted(spec: AttentionSpec) -> None:
            self.specs += 1
            make(spec)

        monkeypatch.setattr(AttentionSpec, "__post_init__", counted)
        monkeypatch.setattr(layers, "_names_of_masks", {})
        monkeypatch.setattr(layers, "_names", {})
        modules = [
            module
            for name, module in sys.modules.items()
            if name.startswith("flashgen.") and name.split(".")[1] in STAGES
        ]
        self._caches = {
            f"{cache.__module__}.{cache.__name__}": cache
            for module in modules
            for cache in vars(module).values()
            if type(cache) is functools._lru_cache_wrapper
            # These depend on the sizes of a call: whether integers of 32 bits suffice, and which
            # tiles the CPU path walks.
            and cache.__name__ not in ("_beyond_int32", "TileWalk")
        }

    def now(self) -> dict[str, int]:
        counts = {name: cache.cache_info().misses for name, cache in self._caches.items()}
        return {"specs": self.specs, **counts}


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["gemma3", slow("gpt_oss"), slow("t5")])
def test_nothing_is_traced_planned_or_built_after_the_second_step(
    name: str, cache: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_BACKEND", backend)
    model = tiny(name)
    made = model.model("fg", layers=2)
    if backend == "emulator":
        made = made.to(torch.float16)
    built = Built(monkeypatch)
    counts: list[dict[str, int]] = []
    forward = made.forward

    @functools.wraps(forward)
    def counted(*args: Any, **options: Any) -> Any:
        result = forward(*args, **options)
        counts.append(built.now())
        return result

    counted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(made, "forward", counted)
    inputs = {k: x for k, x in model.inputs(length=12).items() if "decoder" not in k}
    made.generate(
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
    )
    assert len(counts) == 12
    assert counts[0]["specs"] > 0, "the first step makes specs, which the counter sees"
    changed = [
        (step, name)
        for step, each in enumerate(counts)
        for name in each
        if step > 2 and each[name] != counts[2][name]
    ]
    assert changed == []
