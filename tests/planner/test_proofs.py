"""Certificates: what is proved is so, and what is not so is not proved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
from typer.testing import CliRunner

import flashgen as fg
from flashgen.kernels.planner import plan, plan_backward
from flashgen.kernels.planner import proofs as package
from flashgen.kernels.planner.proofs import (
    algorithm,
    certify,
    plan_constraints,
    score_derivative,
)
from flashgen.kernels.planner.proofs.certificate import Certificate
from flashgen.shared.errors import CertificateError
from flashgen.spec.analysis import analyse
from flashgen.spec.language.lets import lets_of
from flashgen.spec.language.symbols import SCORE
from flashgen.spec.language.sympy_functions import Maximum
from flashgen.tools.cli.program import app
from tests.support.examples import SPECS
from tests.support.tiers import one_in, slow

t = fg.Tensor("t", ("n",), "float32", grad=True)


@pytest.mark.parametrize("path", one_in(8, SPECS), ids=lambda path: path.stem)
def test_every_spec_is_certified(path: Path) -> None:
    found = certify(fg.load(path))
    assert all(each.holds and each.steps for each in found)
    names = [each.name for each in found]
    assert names[0] == "forward"
    assert {"delta", "traffic", "standard", "plan", "softmax", "derivative"} <= set(names)


@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("sram", [None, 48 * 1024])
def test_other_architectures_and_sram_sizes_are_certified(arch: str, sram: int | None) -> None:
    certify(fg.AttentionSpec(head_dim=128, dtype="float32"), arch, sram=sram, deterministic=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("shared_kv", [True, False])
def test_bytes_of_wide_heads_and_of_values_inside_keys_are_certified(
    arch: str, shared_kv: bool
) -> None:
    certify(fg.AttentionSpec(head_dim=512, dtype="bfloat16", shared_kv=shared_kv), arch)


SCORES: dict[str, Any] = {
    "leaky": lambda s, b, h, q, k: fg.maximum(s, 0.1 * s) + fg.minimum(s * s, t[q]),
    "choice": lambda s, b, h, q, k: fg.where(s > 0, fg.sqrt(s), fg.exp(s) * t[k]),
    "smooth": lambda s, b, h, q, k: fg.sigmoid(s) * fg.log2(2 + s * s) + fg.sin(s) * fg.cos(t[0]),
    "cubic": lambda s, b, h, q, k: s**3 / (1 + fg.abs(s)),
    "steps": lambda s, b, h, q, k: (s % 3) * t[1] + s // 2 + fg.floor(s),
    "power": lambda s, b, h, q, k: (1 + s * s) ** t[h],
    "degree": lambda s, b, h, q, k: s**h,
}


@pytest.mark.parametrize("name", [slow(n) if n == "smooth" else n for n in SCORES])
def test_a_score_function_has_its_derivative_certified_and_no_other(name: str) -> None:
    spec = fg.AttentionSpec(score_mod=SCORES[name], head_dim=64, name=name)
    right = analyse(spec)
    assert score_derivative.certify_derivatives(spec, right).holds
    slope = right.score.derivative
    for wrong in (2 * slope, slope + sympy.Rational(1, 10**12)):
        other = replace(right, score=replace(right.score, derivative=wrong))
        assert not score_derivative.certify_derivatives(spec, other).holds


def test_a_score_with_named_parts_is_certified_as_one_expression() -> None:
    def waves(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return sum((fg.sin(score * (i + 1.0)) / (i + 1) for i in range(40)), score)

    spec = fg.AttentionSpec(score_mod=waves, head_dim=64)
    assert lets_of(spec.score)
    right = analyse(spec)
    assert score_derivative.certify_derivatives(spec, right).holds
    other = replace(right, score=replace(right.score, derivative=2 * right.score.derivative))
    assert not score_derivative.certify_derivatives(spec, other).holds


def test_a_function_without_a_rule_is_not_certified() -> None:
    spec = fg.AttentionSpec(head_dim=64)
    object.__setattr__(spec, "score", sympy.gamma(SCORE))
    right = analyse(fg.AttentionSpec(head_dim=64))
    found = replace(right, score=replace(right.score, derivative=sympy.gamma(SCORE)))
    assert not score_derivative.certify_derivatives(spec, found).holds


def test_a_plan_beyond_its_limits_is_not_certified() -> None:
    chosen = plan(fg.AttentionSpec(head_dim=64))
    assert plan_constraints.certify_constraints(chosen).holds
    tight = tuple(
        replace(line, limit=line.value - 1) if line.name == "registers" else line
        for line in chosen.derivation
    )
    assert not plan_constraints.certify_constraints(replace(chosen, derivation=tight)).holds
    by_length = tuple(
        replace(line, formula=f"{line.formula} + seq_k") if line.name == "smem" else line
        for line in chosen.derivation
    )
    broken = plan_constraints.certify_constraints(replace(chosen, derivation=by_length))
    assert [s.text for s in broken.steps if not s.holds] == [
        f"smem = {by_length[0].formula} has no length in it: it is the same for all N"
    ]


def test_traffic_of_another_order_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algorithm.certify_tiled().holds
    n, d = algorithm.N, algorithm.D
    monkeypatch.setattr(algorithm, "ALGORITHM_1", algorithm.ALGORITHM_1 + n**2)
    assert not algorithm.certify_tiled().holds
    monkeypatch.setattr(algorithm, "ALGORITHM_0", algorithm.ALGORITHM_0 + n * d)
    assert not algorithm.certify_standard().holds


def test_a_plan_that_counts_its_loops_otherwise_is_not_certified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = plan(fg.AttentionSpec(head_dim=64))
    assert algorithm.certify_plan(chosen, 166_912).holds
    count = algorithm.forward_traffic
    longer = lambda *sizes: count(*sizes[:-1], sizes[-1] + 1)  # noqa: E731
    monkeypatch.setattr(algorithm, "forward_traffic", longer)
    assert not algorithm.certify_plan(chosen, 166_912).holds


def test_a_failing_certificate_is_an_error_that_shows_the_derivation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(spec: fg.AttentionSpec) -> Certificate:
        return Certificate("softmax", "1 = 2", (package.ProofStep("1 - 2 = 0", holds=False),))

    monkeypatch.setattr(algorithm, "certify_softmax", wrong)
    with pytest.raises(CertificateError) as error:
        certify(fg.AttentionSpec(head_dim=64, name="mine"))
    assert error.value.what == "not proved: 1 = 2"
    assert "mine" in error.value.where
    assert "NOT PROVED" in error.value.numbers
    assert "1 - 2 = 0" in error.value.way_out


def test_the_backward_plan_is_certified_kernel_by_kernel() -> None:
    spec = fg.AttentionSpec(score_mod=SCORES["leaky"], head_dim=64)
    names = [each.name for each in certify(spec, deterministic=True)]
    assert (
        names[1:4] == [each.kernel for each in plan_backward(spec, deterministic=True).kernels][:3]
    )


def test_the_command_prints_the_proofs() -> None:
    result = CliRunner().invoke(app, ["plan", "specs/softcap.py", "--certify"])
    assert result.exit_code == 0
    assert result.output.count("proved") >= 7
    assert "1 - tanh(score/50)**2" in result.output
    assert all(len(line) <= 100 for line in result.output.splitlines())


def test_extremes_share_where_they_are_equal() -> None:
    found = score_derivative._chain(Maximum(SCORE, -SCORE), SCORE)
    assert found.subs(SCORE, 2) == 1
    assert found.subs(SCORE, -2) == -1
