"""Tiny random models of Hugging Face transformers, and inputs that fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

from flashgen import reference
from flashgen.calls.ops import api
from flashgen.calls.runtime.arguments.options import draw_rng
from flashgen.integrations import transformers as integration
from flashgen.reference.verdict import GRADIENT_FACTOR, RMS_ELEMENTS
from flashgen.shared.dropout import keep_mask, keep_scale
from tests.support import kept_attention

Tensor = torch.Tensor

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
    "initializer_range": 0.1,  # large enough that attention is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTH = 260


@dataclass(frozen=True)
class TinyModel:
    """A configuration of one architecture.

    Attributes:
        make: the model's class.
        config: its configuration.
        dropout: the names of the configuration's attributes for dropout of attention weights.
        others: the attributes for other dropouts.
        kind: the inputs: "text", "pairs" for encoder and decoder, or "image".
    """

    make: Any
    config: Any
    dropout: tuple[str, ...] = ("attention_dropout",)
    others: tuple[str, ...] = ()
    kind: str = "text"

    def model(
        self, attention: str = "eager", dropout: float = 0.0, layers: int | None = None
    ) -> Any:
        """The model with the same weights each time, in float32 and evaluation mode."""
        config = self.config.__class__.from_dict(self.config.to_dict())
        if layers is not None:
            config.num_hidden_layers = layers
            if hasattr(config, "layer_types"):
                config.layer_types = config.layer_types[:layers]
            if hasattr(config, "num_decoder_layers"):
                config.num_decoder_layers = layers
        for name in (*self.dropout, *self.others):
            setattr(config, name, dropout if name in self.dropout else 0.0)
        torch.manual_seed(0)
        model = self.make._from_config(config, attn_implementation=attention).eval()
        if hasattr(model, "set_experts_implementation"):  # others have no float64
            model.set_experts_implementation("eager")
        return model

    def inputs(self, padding: str = "left", length: int = LENGTH) -> dict[str, Tensor]:
        """A batch of two, of which the first entry is padded."""
        generator = torch.Generator().manual_seed(1)
        if self.kind == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
        ids = torch.randint(3, 97, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        padded = {"left": slice(None, length // 7), "right": slice(-(length // 7), None)}
        if padding in padded:
            mask[0, padded[padding]] = 0
        given = {"input_ids": ids, "attention_mask": mask}
        if self.kind == "pairs":
            given["decoder_input_ids"] = torch.randint(
                3, 97, (2, 3 * length // 5), generator=generator
            )
        return given


def _text(name: str, **options: Any) -> TinyModel:
    config = getattr(hf, f"{name}Config")(**{**TEXT, **options})
    return TinyModel(getattr(hf, f"{name}ForCausalLM"), config)


def _bert() -> TinyModel:
    sizes = {name: TEXT[name] for name in TEXT if name not in ("num_key_value_heads",)}
    config = hf.BertConfig(**sizes, attention_probs_dropout_prob=0.0)
    return TinyModel(
        hf.BertModel, config, ("attention_probs_dropout_prob",), ("hidden_dropout_prob",)
    )


def _vit() -> TinyModel:
    config = hf.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=80,
        image_size=16,
        patch_size=4,
        initializer_range=0.1,
    )
    dropout = ("attention_probs_dropout_prob",)
    return TinyModel(hf.ViTModel, config, dropout, ("hidden_dropout_prob",), "image")


def _t5() -> TinyModel:
    config = hf.T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=80,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return TinyModel(hf.T5ForConditionalGeneration, config, ("dropout_rate",), (), "pairs")


def _deepseek() -> TinyModel:
    return _text(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        kv_lora_rank=24,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
    )


def _gemma_512() -> TinyModel:
    """Heads of 512, whose output takes more registers than a thread has."""
    return _text(
        "Gemma", head_dim=512, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )


def _gemma3() -> TinyModel:
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=11, layer_types=kinds)
    return TinyModel(hf.Gemma3ForCausalLM, config)


MODELS: dict[str, Callable[[], TinyModel]] = {
    "llama": lambda: _text("Llama"),
    "mistral": lambda: _text("Mistral", sliding_window=11),
    "qwen3": lambda: _text("Qwen3", head_dim=16),
    "gemma2": lambda: _text("Gemma2", head_dim=16, sliding_window=11, attn_logit_softcapping=3.0),
    "gemma3": _gemma3,
    "gpt_oss": lambda: _text(
        "GptOss",
        head_dim=16,
        sliding_window=11,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "t5": _t5,
    "deepseek_v3": _deepseek,
    "bert": _bert,
    "vit": _vit,
    "gemma_512": _gemma_512,
}


def tiny(name: str) -> TinyModel:
    """A model of `MODELS`; the integration is registered."""
    integration.register()
    kept_attention.register()
    return MODELS[name]()


class InFloat64(TorchFunctionMode):
    """Computes a model of float64 weights in float64 where its code says float32.

    The models compute norms, rotary embeddings and the softmax in float32 at least.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        given = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def outputs_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits or hidden states at the positions that are not padding, [positions, size]."""
    found = model(**inputs)
    values = found.logits if hasattr(found, "logits") else found.last_hidden_state
    mask = inputs.get("attention_mask")
    if mask is None or values.shape[:2] != mask.shape:
        return values.flatten(0, -2)
    return values[mask.bool()]


def gradients_of(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of all parameters for a fixed linear function of it."""
    model.zero_grad()
    values = outputs_of(model, inputs)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(values.shape, generator=generator).to(values.dtype)
    (values * weights).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": values.detach(), **found}


def meet_the_rule(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    same: list[dict[str, Tensor]],
    kept: dict[str, Tensor] | None = None,
    few: int = RMS_ELEMENTS,
) -> None:
    """Holds results to the error rule: "output" to that of outputs, the others to gradients'.

    Args:
        same: of ordinary computations in the same dtype; for each result, the least accurate one
            counts.
        kept: `from_rounded` of `reference.compare`.
        few: gradients with fewer elements are judged as one.
    """
    assert found.keys() == exact.keys()
    ordinary = [_pooled(each, exact, few) for each in same]
    of_kept = None if kept is None else _pooled(kept, exact, few)
    true = _pooled(exact, exact, few)
    for key, value in _pooled(found, exact, few).items():
        rule: dict[str, Any] = {}
        if key != "output":
            rule = {
                "factor": GRADIENT_FACTOR,
                "from_rounded": None if of_kept is None else of_kept[key],
            }
        least = max((each[key] for each in ordinary), key=lambda x: _rms(x - true[key]))
        verdict = reference.compare(value, true[key], least, **rule)
        assert verdict, f"{key}: {verdict}"


def _pooled(found: dict[str, Tensor], exact: dict[str, Tensor], few: int) -> dict[str, Tensor]:
    """The results, with gradients of few elements as one, in units of the exact gradient's RMS.

    The largest error of a few elements depends on chance. The gradient of a bias of keys is 0 and
    has no unit.
    """
    units = {key: _rms(x) for key, x in exact.items() if x.numel() < few}
    units = {key: unit for key, unit in units.items() if unit > 1e-9}
    small = [(found[key] / unit).flatten() for key, unit in units.items()]
    large = {key: value for key, value in found.items() if key not in units}
    return {**large, "small gradients": torch.cat(small)} if small else large


def _rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


class KeepMasks:
    """The elements that flashgen dropped, given to models that call torch's dropout.

    flashgen draws a seed and an offset in each attention call; another model with the same layers
    calls dropout in the same order. Dropout of anything but scores is left out.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._drawn: list[Tensor] = []
        self._replayed = 0
        monkeypatch.setattr(api, "draw_rng", self._draw)
        monkeypatch.setattr(torch.nn.functional, "dropout", self._dropout)

    def _draw(self, p: float, device: torch.device) -> Tensor | None:
        rng = draw_rng(p, device)
        if rng is not None:
            self._drawn.append(rng)
        return rng

    def replay(self) -> None:
        """The next model uses the masks from the first one on."""
        self._replayed = 0

    def _dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0 or x.dim() < 4:
            return x
        seed, offset = self._drawn[self._replayed].tolist()
        self._replayed += 1
        batch, heads, seq_q, seq_k = x.shape
        pairs = np.arange(batch * heads)
        kept = keep_mask(p, seed, offset, pairs, range(seq_q), range(seq_k))
        return x * torch.from_numpy(kept).view(x.shape) * keep_scale(p)
