"""Predicates are rounded operation by operation, so that all warps and kernels agree on them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.kernels.pipeline import build_backward
from flashgen.shared.paths import PATHS
from flashgen.spec.analysis.sharing import share
from flashgen.spec.language.tracing import trace_score
from tests.support.shapes import Case

row = fg.Tensor("row", ("queries",), "float32")
rest = fg.Tensor("rest", ("queries",), "float32")
column = fg.Tensor("column", ("keys",), "float32")


def exact_ties(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Merged into the difference, the product is not rounded and there are no ties."""
    return row[q] * column[k] - rest[q] <= 0 * column[k]


def numbers(seq_q: int, seq_k: int) -> dict[str, torch.Tensor]:
    """Of these every query meets ties at keys that it keeps, by float32 arithmetic."""
    generator = torch.Generator().manual_seed(5)
    rows = 1 + torch.rand(seq_q, generator=generator)
    few = 1 + torch.rand(8, generator=generator)
    columns = few[torch.randint(8, (seq_k,), generator=generator)]
    return {"row": rows, "column": columns, "rest": rows * few[torch.arange(seq_q) % 8]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [("sm_80", 64), ("sm_90a", 16), ("sm_90a", 64), ("sm_90a", 128), ("sm_80", 16)],
)
def test_every_kernel_keeps_the_elements_that_float32_keeps(arch: str, head_dim: int) -> None:
    case = Case(130, 300, 1, 1, 1, "float16", head_dim)
    spec = fg.AttentionSpec(exact_ties, head_dim=head_dim, dtype="float16")
    given = numbers(case.seq_q, case.seq_k)
    q, k, v = case.tensors(seed=1)
    product = given["row"][:, None] * given["column"]
    keep = product - given["rest"][:, None] <= 0
    assert (product == given["rest"][:, None]).sum() > 1000

    how: dict[str, Any] = {"tensors": given, "backend": "emulator", "arch": arch}
    # With scores of 0, the LSE and dV show which elements a row keeps.
    q = torch.zeros_like(q)
    forward = run_forward(spec, q, k, v, **how)
    count = keep.sum(1)
    assert (count > 0).all()
    expected = count.double().log().expand_as(forward.lse)
    torch.testing.assert_close(forward.lse.double(), expected, atol=1e-5, rtol=0)
    dout, dlse = torch.ones_like(forward.out), torch.zeros_like(forward.lse)
    shares = (keep / count[:, None]).sum(0).double()
    for deterministic in (False, True):
        run = run_backward(
            *(spec, q, k, v, forward.out, forward.lse, dout, dlse),
            deterministic=deterministic,
            **how,
        )
        of_key = case.heads_q // case.heads_kv * shares[:, None].expand_as(run.dv[0, 0])
        torch.testing.assert_close(run.dv[0, 0].double(), of_key, atol=0.0, rtol=2e-3)


LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);", re.M)


def may_be_merged(ptx: str) -> list[str]:
    """Comparisons with 0 of sums with products in them that ptxas may make one operation of.

    It may merge operations that do not name their rounding; the emulator rounds each. The
    kernel's own comparisons, of sums of exponentials and of maxima, are not with 0 or not ordered.
    """
    made: dict[str, list[tuple[str, list[str]]]] = {}
    found = []
    for opcode, operands in LINE.findall(ptx):
        into, *args = (each.strip() for each in operands.split(","))
        made.setdefault(into, []).append((opcode, args))
        if re.match(r"setp\.(lt|le|gt|ge)u?\.f32", opcode) and "0f00000000" in args:
            waiting, seen = args, set()
            while waiting:
                register = waiting.pop()
                for by, of in made.get(register, []) if register not in seen else []:
                    if by in ("add.f32", "sub.f32", "fma.rn.f32"):
                        waiting += of
                    if by in ("mul.f32", "fma.rn.f32") and register not in args:
                        found.append(f"{opcode} {operands}")
                seen.add(register)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_no_comparison_depends_on_how_ptxas_fuses_operations(arch: str) -> None:
    spec = fg.AttentionSpec(exact_ties, head_dim=16, dtype="float16")
    for built in (fg.build(spec, arch), *build_backward(spec, arch)):
        assert may_be_merged(built.ptx) == [], built.source.filename
    merging = "mul.f32 %f1, %f2, %f3;\nadd.f32 %f4, %f1, %f2;\nsetp.gt.f32 %p1, %f4, 0f00000000;\n"
    assert may_be_merged(merging)


def printed(mod: Any) -> list[str]:
    block = share(trace_score(mod).expr)
    printer = CPrinter({}, "float32")
    return [*printer.lets(block), printer.float(block.results[0])]


def test_only_predicates_keep_the_compiler_from_fusing() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = 0.3 * fg.sqrt(q) + 0.7 * fg.sqrt(k)
        return fg.where(near * s > 2, s, near + s * 0.1)

    assert printed(score_mod) == [
        "const float t0 = __fmul_rn(0.3f, sqrtf(float(q))) + __fmul_rn(0.7f, sqrtf(float(k)));",
        "selected(score * t0 > 2.0f, score, 0.1f * score + t0)",
    ]


def test_functions_with_jumps_are_predicates_and_others_are_not() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.floor(0.5 * s + 0.1 * fg.sqrt(k)) + (0.7 * s + 1) ** 2

    assert printed(score_mod) == [
        "square(0.7f * score + 1.0f) + floorf(__fmul_rn(0.5f, score) + "
        "__fmul_rn(0.1f, sqrtf(float(k))))"
    ]


def test_a_sum_that_is_divided_keeps_its_brackets() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.where((s + fg.sqrt(q)) / (s * s + 1) > 2, s, 0.0)

    (text,) = printed(score_mod)
    assert (
        text == "(score + sqrtf(float(q))) / (__fmul_rn(score, score) + 1.0f) > 2.0f ? score : 0.0f"
    )


def test_powers_in_predicates_are_rounded_at_every_product() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.where(s * s * s + s**3 > 2, s, 0.0)

    assert printed(score_mod) == [
        "rounded_power<3>(score) + __fmul_rn(__fmul_rn(score, score), score) > 2.0f ? score : 0.0f"
    ]
