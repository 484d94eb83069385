"""On a GPU: every spec, forward and backward, meets the error rule against the float64 oracle.

The reference runs on the GPU too. Each test goes through many cases and lists those that fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
import torch

from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.merge import merge
from flashgen.spec.language.signature import partial
from tests.support import gpu_device as gpu
from tests.support.gpu_problems import (
    MODES,
    SPECS,
    Mode,
    Problem,
    cases_of,
    kernels_ahead,
    path_of,
    problem,
)
from tests.support.judged import judge_forward
from tests.support.shapes import DTYPES, HEAD_DIMS, LENGTHS, Case

PAIRS = list(product(HEAD_DIMS, DTYPES))
PATHS = gpu.pick(SPECS, [path_of(name) for name in ("causal", "alibi", "sliding_window")])


def kinds(number: int) -> list[tuple[str, int]]:
    """Dtypes and head dims of a spec: the common one, then others in turn, all among the specs."""
    others = [PAIRS[(2 * number + i) % len(PAIRS)] for i in range(gpu.pick(2, 0))]
    return list(dict.fromkeys([("float16", 64), *[(dtype, dim) for dim, dtype in others]]))


def turn_of(number: int) -> int:
    """Where a spec begins in the modes; dry, the second and third have one mode each."""
    return gpu.pick(number, number + (number > 0))


COVERING = [
    (
        path,
        kind,
        cases_of(
            turn_of(number) + place,
            gpu.pick(LENGTHS, ((33, 70), (64, 40))[: 1 if number else 2]),
            *kind,
            most_scores=gpu.pick(4 << 20, 1),
        ),
    )
    for number, path in enumerate(PATHS)
    for place, kind in enumerate(kinds(number))
]

CAUSAL = path_of("causal")
DIMS = gpu.pick(((192, 128), (64, 128), (128, 8), (24, 72)), ((64, 32),))
UNEQUAL = [
    (Case(113, 203, 2, 4, 2, dtype, head_dim, head_dim_v), MODES[(number + turn) % len(MODES)])
    for number, (head_dim, head_dim_v) in enumerate(DIMS)
    for turn, dtype in enumerate(gpu.pick(DTYPES, ("float16",)))
]

LONG = gpu.pick(
    [
        ("causal", Case(4096, 4096, 1, 8, 8, "float16", 64), Mode()),
        ("causal", Case(2048, 2048, 2, 16, 2, "bfloat16", 128), Mode(0.0, True)),
        ("causal", Case(4224, 4224, 1, 4, 4, "bfloat16", 128), Mode()),
        ("softcap", Case(2048, 2048, 1, 4, 4, "float16", 256), Mode(0.0, True)),
        ("causal", Case(2048, 2048, 1, 4, 2, "bfloat16", 320), Mode()),
        ("full", Case(1024, 4096, 1, 4, 1, "float16", 96), Mode()),
        ("sliding_window", Case(8192, 8192, 1, 4, 2, "bfloat16", 64), Mode()),
        ("alibi", Case(2048, 2048, 1, 2, 2, "float16", 128), Mode(0.17, True)),
        ("prefix_lm", Case(1500, 3000, 1, 2, 2, "float16", 64), Mode(0.17, False)),
        ("full", Case(2048, 2048, 1, 2, 2, "float32", 64), Mode(0.0, True)),
    ],
    [("causal", Case(130, 130, 1, 2, 1, "float16", 64), Mode())],
)

OFFSETS = gpu.pick(((96, 0), (0, 48), (1008, 896), (-48, -64)), ((96, 0),))


compiled_ahead = kernels_ahead(
    [
        *[(path, *one) for path, _, cases in COVERING for one in cases],
        *[(CAUSAL, *one) for one in UNEQUAL],
        *[(path_of(name), *one) for name, *one in LONG],
    ],
    dry=True,
)


def all_right(rows: Iterable[tuple[Path, Case, Mode]], **offsets: int) -> None:
    failures = gpu.Failures()
    for path, case, mode in rows:
        label = f"{path.stem} {case.id} {mode} {offsets or ''}"
        with failures.case(label):
            failures.add(label, problem(path, case, mode, **offsets).wrong())
    failures.tell()


@pytest.mark.parametrize(
    ("path", "kind", "cases"),
    [pytest.param(*row, id=f"{row[0].stem}-{row[1][0]}-d{row[1][1]}") for row in COVERING],
)
def test_every_spec_meets_the_error_rule_at_every_length(
    path: Path, kind: tuple[str, int], cases: list[tuple[Case, Mode]]
) -> None:
    all_right((path, *one) for one in cases)


@pytest.mark.parametrize(
    ("name", "case", "mode"),
    [pytest.param(*row, id=f"{row[0]}-{row[1].id}-{row[2]}") for row in LONG],
)
def test_long_sequences_meet_the_error_rule(name: str, case: Case, mode: Mode) -> None:
    wrong = problem(path_of(name), case, mode).wrong()
    assert not wrong, "\n".join(wrong)


def test_values_may_be_longer_or_shorter_than_keys() -> None:
    all_right((CAUSAL, *one) for one in UNEQUAL)


@pytest.mark.parametrize(("turn", "offsets"), enumerate(OFFSETS))
def test_offsets_shift_the_positions_that_mods_see(turn: int, offsets: tuple[int, int]) -> None:
    modes = [MODES[(turn_of(number) + turn) % len(MODES)] for number in range(len(PATHS))]
    rows = [(path, Case(113, 203, 1, 4, 2), mode) for path, mode in zip(PATHS, modes, strict=True)]
    all_right(rows, q_offset=offsets[0], k_offset=offsets[1])


def shifted(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor where its rows, or its first element, do not lie at multiples of 16 bytes."""
    dim = tensor.shape[-1]
    more, start = (1, 0) if kind == "odd stride" else (8, 1)
    wide = tensor.new_full((*tensor.shape[:-1], dim + more), torch.nan)
    view = wide[..., start : start + dim]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("kind", ["odd stride", "odd base"])
@pytest.mark.parametrize("dtype", gpu.pick(DTYPES, ("float16",)))
def test_tensors_not_aligned_to_16_bytes_meet_the_error_rule(dtype: str, kind: str) -> None:
    one = problem(CAUSAL, Case(65, 70, 2, 4, 2, dtype, 40), Mode(0.0, True))
    moved = {name: shifted(getattr(one, name), kind) for name in ("q", "k", "v", "dout")}
    crooked = Problem(**{**vars(one), **moved})
    run = crooked.forward()
    assert run.report.access_bytes == one.q.element_size(), run.report.access_reason
    assert len(crooked.backward(run).copies) >= 4
    wrong = crooked.wrong()
    assert not wrong, "\n".join(wrong)


def test_expanded_keys_and_values_and_no_gradient_of_the_lse() -> None:
    """One head of k and v, seen as many through a stride of 0; dlse None."""
    one = problem(CAUSAL, Case(113, 203, 2, 4, 4, "float16", 64), Mode(0.0, True))
    shared = {n: getattr(one, n)[:, :1].expand(-1, 4, -1, -1) for n in ("k", "v")}
    wrong = Problem(**{**vars(one), **shared, "dlse": None}).wrong()
    assert not wrong, "\n".join(wrong)


def test_merged_results_over_parts_of_the_keys_meet_the_error_rule() -> None:
    """The first queries have no keys in the second and third part; a sink joins at the end."""
    one = problem(path_of("causal"), Case(113, 203, 2, 4, 2, "bfloat16", 128), Mode())
    how = {"backend": gpu.options()["backend"], "arch": gpu.arch()}
    parts = [
        run_forward(partial(one.spec), one.q, one.k[:, :, i:j], one.v[:, :, i:j], k_offset=i, **how)
        for i, j in ((0, 64), (64, 100), (100, 203))
    ]
    out, lse = (torch.stack([getattr(part, name) for part in parts]) for name in ("out", "lse"))
    first = out[0], lse[0]
    merged = merge(out[1:], lse[1:], merged=first, out_dtype=one.q.dtype, **how)
    judge_forward(merged, one.spec, one.q, one.k, one.v)
    sink = torch.linspace(-1, 1, 4, device=out.device)
    lse_of_sink = torch.logaddexp(merged[1], sink[:, None])
    with_sink = merge(out, lse, sink=sink, **how)
    torch.testing.assert_close(with_sink[1], lse_of_sink)


@pytest.mark.parametrize(("batch", "seq_q", "seq_k"), [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_a_size_of_0_gives_empty_results_or_zeros(batch: int, seq_q: int, seq_k: int) -> None:
    results = problem(CAUSAL, Case(seq_q, seq_k, batch, 4, 2)).results()
    out, lse, *gradients = results
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((gradient == 0).all() for gradient in gradients)
    assert [tuple(result.shape[:3]) for result in results] == [
        (batch, 4, seq_q),
        (batch, 4, seq_q),
        (batch, 4, seq_q),
        (batch, 2, seq_k),
        (batch, 2, seq_k),
    ]
