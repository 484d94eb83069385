"""Packed sequences: each is computed as if it were alone, and no tile outside them is computed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.calls.runtime import prepared_call
from flashgen.shared.call import OutputGradients
from tests.support.judged import Call
from tests.support.shapes import DTYPES
from tests.support.tiers import one_in, slow
from tests.support.tiles_visited import present, visited

Tensor = torch.Tensor

RNG = torch.tensor([11, 3])
ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")
gate = fg.Tensor("gate", ("batch", "heads"), "float32", grad=True)
bias = fg.Tensor("bias", ("distance",), "float32", grad=True)
window = fg.Scalar("window", "int32")


def bottom_right(b, h, q, k):
    return q + (fg.seq_k - fg.seq_q) >= k


def windowed(b, h, q, k):
    return (q >= k) & (q - k < window)


def same_part(b, h, q, k):
    return ids[b, q] == ids[b, k]


def gated(score, b, h, q, k):
    return score * gate[b, h]


def biased(score, b, h, q, k):
    return score + bias[q - k + 40]


LENGTHS = {
    "mixed": ([100, 0, 17, 150, 64, 1], [120, 5, 17, 0, 64, 90]),
    "one": ([130], [70]),
    "short": ([1, 2, 3] * 12, [3, 1, 2] * 12),
    "none": ([0, 0], [4, 0]),
    "equal": ([64, 128, 64], [64, 128, 64]),
    "three": ([20, 70, 30], [40, 90, 20]),
    "near": ([63, 65, 127, 129, 1, 128], [129, 64, 1, 127, 65, 225]),
}
ARCHS = ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)]
MODS: dict[str, tuple[Any, Any]] = {
    "full": (None, None),
    "bottom_right": (bottom_right, None),
    "windowed": (windowed, None),
    "same_part": (same_part, gated),
    "biased": (bottom_right, biased),
}


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def spec_of(mods: str, **options: Any) -> fg.AttentionSpec:
    options = {"head_dim": 16, "dtype": "float16", "packed": True, "name": mods} | options
    return fg.AttentionSpec(*MODS[mods], **options)


def arguments(spec: fg.AttentionSpec, lengths: str) -> dict[str, Any]:
    of_q, of_k = LENGTHS[lengths]
    count, longest = len(of_q), max(160, *of_q, *of_k)
    generator = torch.Generator().manual_seed(5)
    parts = torch.randint(3, (count, longest), generator=generator, dtype=torch.int32)
    known = {
        "cu_seqlens_q": ends(of_q),
        "cu_seqlens_k": ends(of_k),
        "ids": parts.sort(1)[0],
        "gate": torch.rand(count, 2, generator=generator) + 0.5,
        "bias": torch.randn(70, generator=generator),
        "sink": torch.randn(2, generator=generator),
    }
    scalars = {scalar.name: 40 for scalar in spec.scalars}
    return {"scalars": scalars, "tensors": {t.name: known[t.name] for t in spec.tensors}}


def operands(spec: fg.AttentionSpec, lengths: str, tail: int = 7) -> tuple[Tensor, ...]:
    """q, k, v and dout with NaN behind the last boundary."""
    generator = torch.Generator().manual_seed(1)
    totals = [sum(each) for each in LENGTHS[lengths]]
    shapes = ((2, totals[0]), (1, totals[1]), (1, totals[1]), (2, totals[0]))
    dims = (spec.head_dim, spec.head_dim, spec.head_dim_v, spec.head_dim_v)
    made = []
    for (heads, total), dim in zip(shapes, dims, strict=True):
        tensor = torch.randn(1, heads, total + tail, dim, generator=generator)
        tensor[:, :, total:] = torch.nan
        made.append(tensor.to(getattr(torch, spec.dtype)))
    return tuple(made)


def check(
    spec: fg.AttentionSpec,
    lengths: str,
    backend: str,
    arch: str | None = None,
    *,
    deterministic: bool = False,
    **options: Any,
) -> tuple[ForwardRun, BackwardRun]:
    """Both passes by the error rule; rows of no sequence are 0, and their LSE is -inf."""
    *qkv, dout = operands(spec, lengths)
    total_q, total_k = (sum(each) for each in LENGTHS[lengths])
    numbers = arguments(spec, lengths) | options
    call = Call(spec, tuple(qkv), numbers, backend=backend, arch=arch)
    call.gradients = dout.nan_to_num(), call.gradients[1]
    run = call.judged_forward()
    back = call.judged_backward(run, deterministic=deterministic)
    assert not run.out[:, :, total_q:].any()
    assert (run.lse[:, :, total_q:] == -torch.inf).all()
    for gradient, total in ((back.dq, total_q), (back.dk, total_k), (back.dv, total_k)):
        assert not gradient[:, :, total:].any()
    return run, back


@pytest.mark.slow
@pytest.mark.parametrize(("mods", "lengths"), list(itertools.product(MODS, LENGTHS)))
def test_kernels_meet_the_error_rule(mods: str, lengths: str) -> None:
    turn = list(MODS).index(mods) + list(LENGTHS).index(lengths)
    spec = spec_of(mods, dtype=DTYPES[turn % 3])
    check(spec, lengths, "emulator", deterministic=turn // 3 % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("mods", ["same_part", "biased"])
def test_gradients_of_captures_have_the_same_bits_in_any_order(mods: str) -> None:
    spec = spec_of(mods)
    q, k, v, dout = (tensor.nan_to_num() for tensor in operands(spec, "mixed"))
    values = arguments(spec, "mixed")
    run = run_forward(spec, q, k, v, **values)
    given = (q, k, v, run.out, run.lse, dout)
    how = {"backend": "emulator", "deterministic": True}
    found = [
        run_backward(spec, *given, order_seed=seed, **how, **values).captured for seed in range(3)
    ]
    assert all(torch.equal(found[0][0], other[0]) for other in found[1:])
    exact = reference.gradients(spec, q, k, v, dout, **values)
    torch.testing.assert_close(found[0][0].double(), exact[3], rtol=1e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_offsets_and_another_length_of_v_compose(dtype: str) -> None:
    spec = spec_of("bottom_right", dtype=dtype, dropout=True, head_dim_v=40)
    check(spec, "mixed", "emulator", dropout_p=0.3, rng=RNG, q_offset=32, k_offset=16)


@pytest.mark.parametrize("backend", [slow("emulator"), "tiled"])
@pytest.mark.parametrize("lengths", ["mixed", "none"])
def test_a_sink_joins_every_sequence(lengths: str, backend: str) -> None:
    check(spec_of("bottom_right", sink=True), lengths, backend)


def test_a_sink_without_any_key_is_the_lse_of_every_row_of_a_sequence() -> None:
    spec = spec_of("full", sink=True)
    q, k, v = torch.ones(1, 4, 7, 16).half(), *torch.ones(2, 1, 2, 0, 16).half()
    sink = torch.tensor([0.5, 1.0, 2.0, 3.0], requires_grad=True)
    boundaries = {"cu_seqlens_q": ends([2, 3]), "cu_seqlens_k": ends([0, 0])}
    for backend in ("emulator", "tiled"):
        out, lse = fg.attention(spec)(
            q, k, v, sink=sink, **boundaries, return_lse=True, backend=backend
        )
        assert not out.any()
        assert torch.equal(lse[0, :, :5], sink.detach()[:, None].expand(4, 5))
        assert (lse[:, :, 5:] == -torch.inf).all()
        (gradient,) = torch.autograd.grad(lse[:, :, :6].exp().sum(), sink)
        torch.testing.assert_close(gradient, 5 * sink.detach().exp())


@pytest.mark.slow
@pytest.mark.parametrize("lengths", one_in(2, LENGTHS))
def test_the_tiled_path_meets_the_error_rule(lengths: str) -> None:
    for mods in MODS:
        check(spec_of(mods, dropout=True), lengths, "tiled", dropout_p=0.1, rng=RNG)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sequence_has_the_bits_of_a_separate_call(arch: str) -> None:
    spec = spec_of("windowed")
    alone = spec_of("windowed", packed=False)
    q, k, v, _ = operands(spec, "mixed")
    values = arguments(spec, "mixed")
    how = {"backend": "emulator", "arch": arch, "scalars": values["scalars"]}
    run = run_forward(spec, q, k, v, tensors=values["tensors"], **how)
    of_q, of_k = (values["tensors"][f"cu_seqlens_{axis}"].tolist() for axis in "qk")
    plans = set()
    tile = run.report.kernel.plan.tile  # with another one the sums have another order
    how["tiles"] = {"forward": tile}
    for i in range(len(of_q) - 1):
        rows, keys = slice(of_q[i], of_q[i + 1]), slice(of_k[i], of_k[i + 1])
        part = run_forward(alone, q[:, :, rows], k[:, :, keys], v[:, :, keys], **how)
        assert torch.equal(run.out[:, :, rows], part.out)
        assert torch.equal(run.lse[:, :, rows], part.lse)
        if part.report.kernel is not None:
            plans.add(part.report.kernel.plan.block_k)
    assert plans == {run.report.kernel.plan.block_k}  # else the bits would be equal by chance only


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, slow(True)])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_tile_outside_all_sequences_is_computed(arch: str, deterministic: bool) -> None:
    spec = spec_of("bottom_right", head_dim=64)
    q, k, v, dout = operands(spec, "mixed")
    values = arguments(spec, "mixed") | {"backend": "emulator", "check_memory": False}
    values["arch"] = arch
    run = run_forward(spec, q, k, v, **values)
    grads = (dout.nan_to_num(), None)
    values["deterministic"] = deterministic
    back = run_backward(spec, q, k, v, run.out, run.lse, *grads, **values)
    for report in (run.report, *back.reports):
        if not report.kernel.plan.streams:
            there = 0
            for rows, keys in zip(*LENGTHS["mixed"], strict=True):
                keep = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
                heads = 2 // report.kernel.plan.heads_per_tile
                there += heads * present(report, keep)
            assert visited(report) == there, report.kernel.plan.kernel


@pytest.mark.parametrize("deterministic", [slow(False), True])
@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_wrong_boundaries_keep_kernels_inside_their_tensors(
    arch: str, deterministic: bool, monkeypatch
) -> None:
    # As on a GPU, where the boundaries are not checked, because that would synchronise the device.
    monkeypatch.setattr(prepared_call, "check_contents", lambda *_: None)
    spec = spec_of("bottom_right")
    q, k, v, dout = (tensor.nan_to_num() for tensor in operands(spec, "mixed"))
    for wrong in ([-50, 10, 400], [0, 200, 100], [2**31 - 1, -(2**31), 5], [339, 339, 10_000]):
        tensors = {f"cu_seqlens_{axis}": torch.tensor(wrong, dtype=torch.int32) for axis in "qk"}
        values = {"tensors": tensors, "backend": "emulator", "arch": arch}
        run = run_forward(spec, q, k, v, **values)
        values["deterministic"] = deterministic
        run_backward(spec, q, k, v, run.out, run.lse, dout, **values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "what"),
    [
        ("three", "nan"),
        *(pytest.param("near", what, marks=pytest.mark.slow) for what in ("nan", "inf")),
    ],
)
@pytest.mark.parametrize("deterministic", [False, slow(True)])
@pytest.mark.parametrize("arch", [slow("sm_80"), "sm_90a"])
def test_no_value_of_a_sequence_reaches_another(
    arch: str, lengths: str, what: str, deterministic: bool
) -> None:
    """0 times such a number would be NaN, in every row of a tile that reaches into its sequence."""
    spec = spec_of("bottom_right", head_dim=64)
    values = arguments(spec, lengths) | {"backend": "emulator", "arch": arch}
    how = values | {"deterministic": deterministic}
    q, k, v, dout = (tensor.nan_to_num() for tensor in operands(spec, lengths))
    found = []
    for poison in (None, float(what)):
        nobodys = [torch.ones(tensor.shape[2], dtype=torch.bool) for tensor in (q, k)]
        if poison is not None:
            for tensor, name in ((q, "q"), (k, "k"), (v, "k"), (dout, "q")):
                ends_of = values["tensors"][f"cu_seqlens_{name}"].tolist()
                for i in range(1, len(ends_of) - 1, 2):
                    tensor[:, :, ends_of[i] : ends_of[i + 1]] = poison
                    nobodys["qk".index(name)][ends_of[i] : ends_of[i + 1]] = False
        run = run_forward(spec, q, k, v, **values)
        back = run_backward(spec, q, k, v, run.out, run.lse, dout, **how)
        of_q, of_k = (run.out, run.lse[..., None], back.dq), (back.dk, back.dv)
        found.append(([*of_q, *of_k], [nobodys[0]] * 3 + [nobodys[1]] * 2))
    (clean, _), (poisoned, rows) = found
    for expected, got, others in zip(clean, poisoned, rows, strict=True):
        assert torch.equal(got[:, :, others], expected[:, :, others])
        assert not torch.equal(got[:, :, ~others].nan_to_num(), expected[:, :, ~others])


@pytest.mark.slow
def test_gradients_of_the_tiled_path_agree_with_finite_differences() -> None:
    from flashgen.calls import cpu

    spec = spec_of("biased", dtype="float32", head_dim=8)
    tensors = {"cu_seqlens_q": ends([3, 0, 2]), "cu_seqlens_k": ends([2, 3, 4])}
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double).requires_grad_()

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, learned):
            ctx.options = cpu.TileArguments(scale=0.3, tensors=tensors | {"bias": learned})
            out, lse = cpu.forward(spec, q, k, v, ctx.options)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            return cpu.backward(
                spec,
                *ctx.saved_tensors[:3],
                OutputGradients(*ctx.saved_tensors[3:], dout, None),
                ctx.options,
            )

    given = (normal(1, 2, 6, 8), normal(1, 1, 9, 8), normal(1, 1, 9, 8), normal(70))
    assert torch.autograd.gradcheck(Tiled.apply, given)
