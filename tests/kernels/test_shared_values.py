"""What the scores of a head, a query or a key share: computed once, with the same results."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flashgen as fg
from benchmarks.instructions import work_of
from flashgen.kernels.codegen.functions import SpecFunctions
from flashgen.kernels.codegen.shared_values import FunctionInParts
from flashgen.kernels.pipeline import build
from flashgen.shared.paths import PATHS
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.invariants import MOST_VALUES, Level, leveled
from flashgen.spec.language.float_functions import Cos, Exp
from flashgen.spec.language.symbols import SCORE, H
from tests.codegen.test_tile_functions import functions_of
from tests.support.judged import Call, normal

first = fg.Tensor("first", ("batch",), "int32")
reach = fg.Tensor("reach", ("heads",), "int32")
ids = fg.Tensor("ids", ("batch", "tokens"), "int32")
offset = fg.Tensor("offset", ("heads", "seq_k"), "float32", grad=True)
gain = fg.Tensor("gain", ("seq_q",), "float32", grad=True)
span = fg.Scalar("span", "int32", minimum=1)


def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
    near = fg.abs(q // span - k // span) <= reach[h]
    return (k >= first[b]) & near & ((ids[b, q] != ids[b, k]) | (q == k))


def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    decay = fg.exp(-fg.abs(gain[q])) * (q - k) / 16
    return score + decay * fg.log(2.0 + reach[h]) + offset[h, k]


SPEC = fg.AttentionSpec(mask_mod, score_mod, head_dim=16, dtype="float16", name="shared_values")


def fire(hidden: int = 8, **options: Any) -> fg.AttentionSpec:
    """FIRE: a learned network of one hidden layer, of the relative position.

    Source: Li et al., "Functional Interpolation for Relative Positions Improves Long Context
    Transformers", 2024.
    """
    slope, threshold = (fg.Tensor(n, (), "float32", grad=True) for n in ("slope", "threshold"))
    weight, bias = (fg.Tensor(n, (hidden,), "float32", grad=True) for n in ("weight", "bias"))
    output = fg.Tensor("output", ("heads", hidden), "float32", grad=True)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        longest = fg.maximum(q, fg.abs(threshold))
        place = fg.log(fg.abs(slope * (q - k)) + 1) / fg.log(fg.abs(slope * longest) + 1)
        layer = (fg.maximum(weight[i] * place + bias[i], 0) for i in range(hidden))
        return score + sum(output[h, i] * x for i, x in enumerate(layer))

    return fg.AttentionSpec(lambda b, h, q, k: k <= q, score_mod, name="fire", **options)


def call_of(arch: str) -> Call:
    operands = tuple(normal((2, 2, 80, 16), torch.float16, seed) for seed in range(3))
    tensors = {
        "first": torch.tensor([0, 7], dtype=torch.int32),
        "reach": torch.tensor([1, 4], dtype=torch.int32),
        "ids": (torch.arange(160, dtype=torch.int32) % 7).reshape(2, 80),
        "offset": normal((2, 80), torch.float32, 5),
        "gain": normal((80,), torch.float32, 6),
    }
    arguments = {"tensors": tensors, "scalars": {"span": 11}}
    return Call(SPEC, operands, arguments, arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_kernels_with_shared_values_agree_with_the_oracle(arch: str) -> None:
    call_of(arch).judged_forward()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", PATHS)
def test_backward_kernels_with_shared_values_agree_with_the_oracle(
    arch: str, deterministic: bool
) -> None:
    call = call_of(arch)
    call.judged_backward(call.judged_forward(), deterministic=deterministic)


def reads(parts: FunctionInParts) -> dict[str, set[str]]:
    """The captured tensors that the body of each function reads."""
    return {
        each.name: set(re.findall(r"read_(\w+)\(", " ".join(each.body))) for each in parts.functions
    }


def test_a_score_reads_nothing_that_others_share() -> None:
    make = SpecFunctions(SPEC, analyse(SPEC))
    assert reads(make.score_mod()) == {
        "score_head_values": {"reach"},
        "score_query_values": {"gain"},
        "score_key_values": {"offset"},
        "score_mod": set(),
    }
    mask = make.mask_mod()
    assert reads(mask) == {
        "mask_head_values": {"reach", "first"},
        "mask_query_values": {"ids"},
        "mask_key_values": {"ids"},
        "mask_mod": set(),
    }
    divides = {each.name for each in mask.functions if "fast_div" in each.text}
    assert divides == {"mask_query_values", "mask_key_values"}


def test_what_a_pair_of_positions_determines_stays_in_the_score() -> None:
    make = functions_of("relative_bias")
    assert reads(make.score_mod()) == {"score_mod": {"table"}}


def test_a_kernel_keeps_a_bounded_number_of_values() -> None:
    score = SCORE + sum(Exp(Cos(H + n)) for n in range(90))
    assert len(leveled(score).values(Level.HEAD)) == MOST_VALUES[Level.HEAD]


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_a_learned_network_takes_the_planned_instructions(arch: str) -> None:
    built = build(fire(head_dim=64, dtype="float16"), arch)
    costs = {line.name: float(line.value) for line in built.plan.derivation}
    work = work_of(built)
    counted, planned = work.per_score(work.full), costs["issue"] * 128
    assert 0.75 < counted / planned < 1.25


def test_a_remainder_of_a_float_by_a_number_of_the_call_is_emitted() -> None:
    divisor = fg.Scalar("divisor", "int32", minimum=1)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + fg.floor(score) % divisor

    spec = fg.AttentionSpec(score_mod=score_mod, name="float_remainder")
    assert "float_mod(floorf(score), float(p.s_divisor))" in fg.emit(spec).forward.text
