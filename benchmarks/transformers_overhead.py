"""The cost in Python of a layer of transformers on flashgen, beside that of its sdpa.

As in overhead.py, all is done that a call does on a GPU, but the launch. Columns, microseconds::

    function        the attention function that a layer calls, with everything below it
    kernel call     flashgen's operator, or torch's scaled_dot_product_attention, called directly
                    (the latter computes: it has no launch to leave out)
    integration     the difference: the cost of the attention function itself
    mask            making the mask of a forward pass, which layers share

Rows: a prefill with a causal mask; the same with padding, and with a sliding window and a softcap;
a decoding step with a cache. sdpa refuses a softcap.

    python benchmarks/transformers_overhead.py [--calls 100] [--rounds 50]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from benchmarks.overhead import median_us, pretend_a_gpu
from flashgen.frontends.transformers.attention import attention
from flashgen.frontends.transformers.masks import make_mask
from flashgen.integrations import transformers as integration

LENGTH = 32


@dataclass(frozen=True)
class Case:
    """A layer and its mask."""

    name: str
    queries: int = LENGTH
    function: Callable[..., Any] = causal_mask_function
    padded: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return 2, self.queries, LENGTH, LENGTH - self.queries, 0

    def mask_arguments(self) -> dict[str, Any]:
        padding = torch.ones(2, LENGTH, dtype=torch.bool)
        padding[0, :3] = False
        return {
            "mask_function": self.function,
            "attention_mask": padding if self.padded else None,
            "allow_is_causal_skip": False,
        }


CASES = (
    Case("causal"),
    Case("causal, padding", padded=True),
    Case(
        "window, padding, softcap",
        function=sliding_window_causal_mask_function(8),
        padded=True,
        options={"softcap": 30.0},
    ),
    Case("decoding", queries=1),
    Case("decoding, padding", queries=1, padded=True),
)


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


def measured(case: Case, flashgen: bool, calls: int, rounds: int) -> tuple[float, float, float]:
    """The times of the attention function, of the kernel call, and of making the mask."""
    # As models have them: views of [batch, seq, heads, head_dim].
    shapes = (2, case.queries, 4, 64), (2, LENGTH, 2, 64), (2, LENGTH, 2, 64)
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    arguments, layer = case.mask_arguments(), Layer()
    make = make_mask if flashgen else sdpa_mask
    mask = make(*case.sizes, **arguments)
    function: Callable[..., Any] = attention if flashgen else sdpa_attention_forward

    def whole() -> Any:
        return function(layer, q, k, v, mask, scaling=0.125, **case.options)

    direct = kernel_call(whole, flashgen)
    return (
        median_us(whole, calls, rounds),
        median_us(direct, calls, rounds),
        median_us(lambda: make(*case.sizes, **arguments), calls, rounds),
    )


def kernel_call(whole: Callable[[], Any], flashgen: bool) -> Callable[[], Any]:
    """The call of the operator, or of torch's function, that an attention function makes."""
    from flashgen.calls.ops import Attention

    owner: Any = Attention if flashgen else torch.nn.functional
    name = "__call__" if flashgen else "scaled_dot_product_attention"
    real, seen = getattr(owner, name), []

    def noted(*args: Any, **options: Any) -> Any:
        seen.append((args, options))
        return real(*args, **options)

    setattr(owner, name, noted)
    try:
        whole()
    finally:
        setattr(owner, name, real)
    args, options = seen[0]
    return (lambda: args[0](*args[1:], **options)) if flashgen else (lambda: real(*args, **options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    integration.register()
    pretend_a_gpu("sm_80")
    table = Table(title="cost of a layer in Python, us (median)")
    table.add_column("")
    for column in ("", "function", "kernel call", "integration", "mask"):
        table.add_column(column, justify="right")
    with torch.no_grad():
        for case in CASES:
            for flashgen in (True, False):
                name = "flashgen" if flashgen else "sdpa"
                if not flashgen and "softcap" in case.options:
                    table.add_row("", name, "refused")
                    continue
                whole, direct, mask = measured(case, flashgen, options.calls, options.rounds)
                numbers = (f"{x:.1f}" for x in (whole, direct, whole - direct, mask))
                table.add_row(case.name if flashgen else "", name, *numbers)
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
