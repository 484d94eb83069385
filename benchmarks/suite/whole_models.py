"""Three language models with random weights: their sizes, their data, one training, one decoding.

They are transformers' own classes, and a backend is one word of their configuration. The weights
are bfloat16 and the same for every backend. Three choices make an error of a backend visible that
weights as they are usually drawn would hide: scores are about 1 at every size and capped at 5, and
a sink is 4, as much as 55 keys of score 0. The mixture of experts has one expert, because rounding
would choose among several.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.suite.context import OutOfTime
from benchmarks.suite.device import Device
from benchmarks.suite.supervisor import Budget

Tensor = torch.Tensor
DTYPE = torch.bfloat16
SINK = 4.0
LEARNING_RATE = 3e-4
DISTINCT = 8
"""Tokens are drawn from the first of so many parts of the vocabulary: the loss falls by ln 8."""
TRAIN, DECODE = "train", "decode"
EAGER = "eager"
CHECKED = 8


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        config: the name of the configuration's class in transformers.
        batch: sequences of a training step.
        positions: tokens of a sequence, in training and at the end of decoding.
        dropout: the name of the option that is the dropout of attention weights.
        needs: the features of its attention beyond masks and grouped heads.
    """

    name: str
    config: str
    batch: int
    positions: int
    dropout: str
    needs: tuple[str, ...]
    options: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Problem:
    """A model and its mode: training or decoding.

    Attributes:
        mode: `TRAIN` or `DECODE`.
        count: training steps, or decoded tokens of each sequence.
        warm_up: the first steps or tokens, which are not timed.
    """

    model: Model
    mode: str
    batch: int
    count: int
    warm_up: int
    dropout: float = 0.0

    @property
    def name(self) -> str:
        dropped = f" with dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.mode} {self.model.name}{dropped} B{self.batch} N{self.model.positions}"

    @property
    def needs(self) -> tuple[str, ...]:
        return self.model.needs + (("dropout",) if self.dropout else ())

    @property
    def layers(self) -> int:
        options = self.model.options
        return int(options.get("num_hidden_layers") or options["n_layer"])

    @property
    def tokens(self) -> int:
        """Those of a step."""
        return self.batch * (self.model.positions if self.mode == TRAIN else 1)


def models(tiny: bool) -> tuple[Model, Model, Model]:
    """GPT-OSS-like, Gemma-like and GPT-2-like; 0.57, 0.57 and 0.12 billion parameters."""
    gpt_oss: dict[str, Any] = {
        "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 10, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 64, "sliding_window": 128, "num_local_experts": 1, "num_experts_per_tok": 1,
        "max_position_embeddings": 4096, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    }  # fmt: skip
    gemma: dict[str, Any] = {
        "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 5.0,
        "sliding_window": 1024, "max_position_embeddings": 4096,
    }  # fmt: skip
    gpt2: dict[str, Any] = {
        "vocab_size": 50304, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    sizes = [(2, 4096), (4, 4096), (16, 1024)]
    if tiny:
        small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
        small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"head_dim": 16, "sliding_window": 16, "max_position_embeddings": 64}
        gpt_oss |= small
        gemma |= small | {"query_pre_attn_scalar": 16}
        gpt2 |= {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
        sizes = [(2, 64)] * 3
    for options in (gpt_oss, gemma, gpt2):
        width = options.get("hidden_size") or options["n_embd"]
        options["initializer_range"] = width**-0.5  # so that scores are about 1 at every size
    return (
        Model("gpt-oss-like", "GptOssConfig", *sizes[0], "attention_dropout", ("sinks",), gpt_oss),
        Model("gemma-like", "Gemma2Config", *sizes[1], "attention_dropout", ("softcap",), gemma),
        Model("gpt2-like", "GPT2Config", *sizes[2], "attn_pdrop", (), gpt2),
    )


def problems(tiny: bool) -> list[Problem]:
    """All problems, most important first."""
    gpt_oss, gemma, gpt2 = models(tiny)

    def train(model: Model, dropout: float = 0.0) -> Problem:
        return Problem(model, TRAIN, model.batch, 20, 5, dropout)

    def decode(model: Model, batch: int) -> Problem:
        return Problem(model, DECODE, batch, *((8, 2) if tiny else (256, 16)))

    return [
        *(train(gpt2, 0.1), train(gpt_oss), train(gemma)),
        *(decode(model, 1) for model in (gpt2, gpt_oss, gemma)),
        *(decode(model, 2 if tiny else 16) for model in (gpt2, gpt_oss, gemma)),
        train(gpt2),
    ]


def build(problem: Problem, implementation: str, device: Device) -> Any:
    """The model, whose attention is `implementation`; its weights depend on the problem alone.

    Raises:
        Exception: whatever transformers raises where the model does not support it.
    """
    import transformers

    options = {**problem.model.options, problem.model.dropout: problem.dropout}
    config = getattr(transformers, problem.model.config)(**options)
    torch.manual_seed(0)
    with device.torch:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, dtype=DTYPE
        )
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, SINK)
    return model.to(device.torch)


def tokens_of(problem: Problem, batches: int, device: Device) -> Tensor:
    """Random tokens [batches, batch, positions], the same ones for every backend.

    All of a training at once: a copy for each step would make the host wait for the GPU.
    """
    generator = torch.Generator().manual_seed(1)
    most = problem.model.options["vocab_size"] // DISTINCT
    shape = (batches, problem.batch, problem.model.positions)
    return torch.randint(most, shape, generator=generator).to(device.torch)


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        ms: the milliseconds of each step that is timed.
        peak_bytes: the most bytes of weights, optimizer and activations.
        losses: the loss of each training step, in nats per token.
        spreads: the standard deviations of the losses of the tokens of each step.
        tensor: the gradients of all parameters of attention layers in the first step as one
            vector; after decoding, the logits of the `CHECKED` last tokens of the last sequence.
        drops: whether the loss of the first batch depends on the seed.
    """

    ms: list[float]
    parameters: int
    tensor: Tensor
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    drops: bool = False


def run_problem(problem: Problem, implementation: str, device: Device, budget: Budget) -> Result:
    """
    Raises:
        OutOfTime: the budget was spent before the end.
        Exception: whatever the model raises on this backend.
    """
    run = _train if problem.mode == TRAIN else _decode
    device.reset_peak()
    before = device.peak_bytes()
    # Outside of a GPU torch.compile would need a C++ compiler: FlexAttention is not compiled there.
    plain: AbstractContextManager[Any] = nullcontext()
    if device.kind != "gpu":
        plain = torch.compiler.set_stance("force_eager")
    with plain:
        result = run(problem, implementation, device, budget)
    return replace(result, peak_bytes=device.peak_bytes() - before)


def _train(problem: Problem, implementation: str, device: Device, budget: Budget) -> Result:
    model = build(problem, implementation, device).train()
    if implementation == EAGER:
        # Or its scores would not fit into memory. The first name is that of newer releases.
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        next(getattr(model, name) for name in names if hasattr(model, name))()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = tokens_of(problem, problem.count, device)
    gradient: list[Tensor] = []
    means: list[Tensor] = []
    spreads: list[Tensor] = []

    def losses_of(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        targets = ids[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets, reduction="none"
        )

    def step(ids: Tensor) -> None:
        losses = losses_of(ids)
        mean = losses.mean()
        mean.backward()
        if not gradient:
            gradient.append(_attention_gradient(model))
        optimizer.step()
        optimizer.zero_grad()
        means.append(mean.detach())
        spreads.append(losses.detach().std())

    drops = problem.dropout > 0 and _depends_on_seed(losses_of, batches[0])
    torch.manual_seed(2)
    ms = _timed(problem, device, budget, lambda turn: step(batches[turn]))
    return Result(
        ms=ms,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tensor=gradient[0],
        losses=torch.stack(means).tolist(),
        spreads=torch.stack(spreads).tolist(),
        drops=drops,
    )


def _timed(
    problem: Problem, device: Device, budget: Budget, step: Callable[[int], object]
) -> list[float]:
    """Milliseconds of the steps behind the warm-up; the host waits for none of them."""
    spans = []
    for turn in range(problem.count):
        if budget.out:
            raise OutOfTime(f"stopped after {turn} of {problem.count} steps")
        spans.append(device.record(partial(step, turn)))
        if turn < problem.warm_up:
            device.synchronize()
    device.synchronize()
    return [span.ms() for span in spans[problem.warm_up :]]


def _attention_gradient(model: Any) -> Tensor:
    gradients = []
    for name, parameter in model.named_parameters():
        if "attn" in name:
            if parameter.grad is None:
                raise NotImplementedError(f"it gives {name} no gradient")
            gradients.append(parameter.grad.flatten())
    return torch.cat(gradients)


def _depends_on_seed(losses_of: Callable[[Tensor], Tensor], ids: Tensor) -> bool:
    losses = []
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            losses.append(losses_of(ids))
    return not torch.equal(*losses)


@torch.no_grad()
def _decode(problem: Problem, implementation: str, device: Device, budget: Budget) -> Result:
    """Tokens one by one behind a prompt. The tokens are given, not those that the model chooses:
    the choice between logits that are nearly equal would depend on rounding.
    """
    from transformers import DynamicCache

    model = build(problem, implementation, device).eval()
    ids = tokens_of(problem, 1, device)[0]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if implementation == EAGER:  # the whole sequence at once, without a cache
        logits = model(input_ids=ids[-1:], use_cache=False, logits_to_keep=CHECKED).logits
        return Result([], parameters, logits[-1])
    cache = DynamicCache(config=model.config)
    # It was called past_key_values.
    takes = inspect.signature(type(model).forward).parameters
    cache_option = {"cache" if "cache" in takes else "past_key_values": cache}
    prompt = problem.model.positions - problem.count
    last: deque[Tensor] = deque(maxlen=CHECKED)

    def step(first: int, behind: int) -> None:
        part = ids[:, first:behind]
        logits = model(input_ids=part, use_cache=True, logits_to_keep=1, **cache_option).logits
        last.append(logits[-1, -1])

    step(0, prompt)
    ms = _timed(problem, device, budget, lambda turn: step(prompt + turn, prompt + turn + 1))
    return Result(ms, parameters, torch.stack([*last]))
