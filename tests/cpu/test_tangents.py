"""The tiled tangent passes against forward mode through the oracle, in float64, with tiles that
leave odd ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls import cpu
from flashgen.shared.call import OutputGradients, ResultTangents, Tangents
from flashgen.spec.language.spec import AttentionSpec
from tests.support.examples import SPEC_IDS, SPECS, fitted, values_of
from tests.support.judged import dropping, sized
from tests.support.shapes import Case
from tests.support.tiers import one_in
from tests.support.tiled_calls import arguments
from tests.support.weights import SPECS as WEIGHTS
from tests.support.weights import captured_by, spec_of

Tensor = torch.Tensor
CASE = Case(29, 37, 2, 4, 2, "float32", 8, 16)


class Problem:
    """A call with random tangents of everything that can have one."""

    def __init__(self, spec: AttentionSpec, case: Case, numbers: dict[str, Any]) -> None:
        self.spec, self.numbers = spec, numbers
        self.make = torch.Generator().manual_seed(11)
        tensors = numbers.get("tensors") or {}
        for tensor in spec.tensors:  # float64, so that nothing is rounded to float32
            if tensor.name in tensors and tensors[tensor.name].is_floating_point():
                tensors[tensor.name] = tensors[tensor.name].double()
        self.q, self.k, self.v = (x.double() for x in case.tensors(3))
        learned = [tensors[tensor.name] for tensor in spec.tensors if tensor.grad]
        self.moving = Tangents(
            *map(self.like, (self.q, self.k, self.v)), tuple(map(self.like, learned))
        )
        self.tiles = arguments(spec, self.q, block_q=16, block_k=16, **numbers)
        self.out, self.lse = cpu.forward(spec, self.q, self.k, self.v, self.tiles)

    def like(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.make, dtype=torch.float64)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def check(self) -> None:
        """Both passes, with all tangents and with each of them alone."""
        dout = self.like(self.out)
        gradients = (dout, self.like(self.lse) if self.spec.is_softmax else None)
        ways = self.like(self.out), None if gradients[1] is None else self.like(self.lse)
        none = Tangents(captured=(None,) * len(self.moving.captured))
        some = [none._replace(**{name: getattr(self.moving, name)}) for name in ("q", "k", "v")]
        some += [none._replace(captured=self.moving.captured)] * bool(self.moving.captured)
        for moving in (self.moving, *some):
            found = cpu.tangent(self.spec, *self.operands, (self.out, self.lse), moving, self.tiles)
            wanted = reference.tangents(self.spec, *self.operands, moving, **self.numbers)
            if not self.spec.is_softmax:
                assert_close(found[:1], wanted[:1])
            else:
                assert_close(found, wanted)
            of_gradients = ways if moving is self.moving else (None, None)
            second = cpu.backward_tangent(
                self.spec,
                *self.operands,
                OutputGradients(self.out, self.lse, *gradients),
                moving,
                ResultTangents(*found, *of_gradients),
                self.tiles,
            )
            expected = reference.gradient_tangents(
                self.spec, *self.operands, gradients, moving, of_gradients, **self.numbers
            )
            assert_close(second, expected)


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-9, atol=1e-9 * (1 + float(other.abs().max()))
        )


def of_file(path: Path, dropout_p: float = 0.0) -> Problem:
    spec = sized(fg.load(path), CASE, dropout_p)
    case = fitted(spec, CASE)
    numbers = values_of(path, case) | dropping(dropout_p)
    return Problem(spec, case, numbers)


@pytest.mark.parametrize("path", one_in(2, SPECS), ids=SPEC_IDS)
def test_tangents_of_every_spec_are_those_of_forward_mode_through_the_oracle(path: Path) -> None:
    of_file(path, 0.3 * (SPECS.index(path) % 2)).check()


def test_tangents_of_a_score_function_that_is_large_enough_to_have_a_name() -> None:
    def deep(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(12):
            score = fg.tanh(score + 0.1)
        return score

    spec = AttentionSpec(score_mod=deep, head_dim=8, dtype="float32")
    assert not spec.score.args, "the score is a name"
    Problem(spec, Case(5, 9, 1, 2, 1, "float32", 8), {}).check()


def test_a_score_function_that_returns_a_scalar_has_no_tangents() -> None:
    level = fg.Scalar("level", "float32")
    spec = AttentionSpec(score_mod=lambda s, b, h, q, k: level, head_dim=8, dtype="float32")
    q, k, v = Case(5, 9, 1, 2, 1, "float32", 8).tensors()
    op = fg.attention(spec)
    _, of_out = torch.func.jvp(lambda q: op(q, k, v, level=0.5), (q,), (torch.ones_like(q),))
    assert not of_out.any()


@pytest.mark.parametrize("name", WEIGHTS)
def test_tangents_of_other_weights_are_those_of_forward_mode_through_the_oracle(name: str) -> None:
    spec = spec_of(name, 8, "float32").replace(head_dim_v=16)
    numbers = {"tensors": captured_by(spec, 4, 29)} | dropping(0.3 * spec.dropout)
    Problem(spec, CASE, numbers).check()


BIAS = fg.Tensor("bias", ("heads", "seq_q"), grad=True)
ID = fg.Tensor("id", ("seq_k",), "int32")


@pytest.mark.parametrize("weighs", [False, True])
def test_all_operations_are_on_the_device_of_the_operands(weighs: bool) -> None:
    """With tensors without contents, whose operations with tensors elsewhere torch refuses."""
    how = {"weight_mod": lambda s, b, h, q, k: fg.sigmoid(s), "normalize": "sum"} if weighs else {}
    spec = AttentionSpec(
        lambda b, h, q, k: (k <= q) & ((h + b + k) % 5 != 0),
        lambda s, b, h, q, k: fg.where(
            ID[k] + h > 2 * b, 3 * fg.tanh(s / 3) * BIAS[h, q], BIAS[0, 0]
        ),
        **{"head_dim": 8, "dtype": "float32", "dropout": True, "sink": not weighs, **how},
    )
    with torch.device("meta"):
        q, k, v = (torch.empty(2, heads, n, 8) for heads, n in ((4, 20), (2, 30), (2, 30)))
        tensors = {"bias": torch.empty(4, 20), "id": torch.empty(30).int()}
        tensors |= {} if weighs else {"sink": torch.empty(4)}
        out, lse = torch.empty_like(q), torch.empty(2, 4, 20)
    moving = Tangents(q, k, v, tuple(tensors[x.name] for x in spec.tensors if x.grad))
    given = arguments(spec, q, tensors=tensors, dropout_p=0.3, rng=(1, 2))
    found = cpu.tangent(spec, q, k, v, (out, lse), moving, given)
    outputs = OutputGradients(out, lse, out, None if weighs else lse)
    ways = ResultTangents(*found, out, None if weighs else lse)
    found += cpu.backward_tangent(spec, q, k, v, outputs, moving, ways, given)
    assert all(x.is_meta for x in found)
