"""Calls with packed sequences: torch's machinery, one kernel for all boundaries, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.optests import opcheck

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops.registration import operator_of
from flashgen.kernels.planner import plan_backward
from flashgen.shared.errors import InputError, SpecError
from flashgen.shared.paths import PATHS
from tests.kernels.test_packed import RNG, Tensor, arguments, ends, operands, spec_of


@pytest.mark.slow
def test_autograd_compile_vmap_and_opcheck_accept_packed_sequences() -> None:
    spec = spec_of("same_part", dropout=True)
    q, k, v, dout = (tensor.nan_to_num() for tensor in operands(spec, "equal"))
    tensors = arguments(spec, "equal")["tensors"]
    op = fg.attention(spec)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    captured = tensors | {"gate": tensors["gate"].clone().requires_grad_()}
    out = op(*leaves, **captured, dropout_p=0.2, rng=RNG)
    out.backward(dout)
    compiled = torch.compile(op, fullgraph=True)(q, k, v, **tensors, dropout_p=0.2, rng=RNG)
    assert torch.equal(out, compiled)
    stacked = torch.vmap(lambda x: op(x, k, v, **tensors))(torch.stack([q, 2 * q]))
    assert torch.equal(stacked[1], op(2 * q, k, v, **tensors))
    given = (q, k, v, *(tensors[tensor.name] for tensor in spec.tensors))
    assert set(opcheck(operator_of(spec).overload, given, {}).values()) == {"SUCCESS"}


def test_new_boundaries_need_no_new_kernel() -> None:
    spec = spec_of("bottom_right")
    q, k, v, _ = (tensor.nan_to_num() for tensor in operands(spec, "equal", tail=0))
    op = fg.attention(spec)
    for lengths in ([64, 128, 64], [1, 254, 1], [100, 100, 50]):
        boundaries = {f"cu_seqlens_{axis}": ends(lengths) for axis in "qk"}
        out = op(q, k, v, **boundaries)
        exact, _ = reference.attention(spec, q, k, v, tensors=boundaries)
        torch.testing.assert_close(out.double(), exact, atol=5e-3, rtol=0)


BOUNDARIES = {"cu_seqlens_q": ends([64, 128, 64]), "cu_seqlens_k": ends([64, 128, 64])}


@pytest.mark.parametrize(
    ("change", "what", "numbers"),
    [
        ({"cu_seqlens_q": ends([64, 64])}, "different numbers of sequences", "(3,) and (4,)"),
        (dict.fromkeys(BOUNDARIES, ends([])[:0]), "has no elements", "(0,)"),
        ({"cu_seqlens_q": ends([64, 300, 1])}, "does not ascend", "to 365"),
        (
            {"cu_seqlens_k": torch.tensor([0, 9, 5, 20]).int()},
            "does not ascend",
            "smallest step -4",
        ),
        ({"cu_seqlens_k": torch.tensor([-1, 9, 9, 20]).int()}, "does not ascend", "from -1"),
        ({"cu_seqlens_q": ends([64, 128, 64]).clamp(min=4)}, "does not ascend from 0", "from 4"),
        ({"cu_seqlens_q": ends([64, 128, 64]).long()}, "dtype", "torch.int64"),
        (
            {"q": torch.zeros(2, 2, 256, 16, dtype=torch.float16)},
            "one batch entry",
            "(2, 2, 256, 16)",
        ),
        (
            {"ids": torch.zeros(3, 20).int()},
            "shorter than the longest sequence",
            "longest sequence 128",
        ),
        ({"ids": torch.zeros(2, 128).int()}, "length of its dimension batch", "batch is 3"),
    ],
)
def test_wrong_boundaries_are_refused_before_anything_runs(
    change: dict[str, Tensor], what: str, numbers: str
) -> None:
    spec = spec_of("same_part")
    q, k, v, _ = operands(spec, "equal", tail=0)
    given = arguments(spec, "equal")["tensors"] | {"q": q, "k": k, "v": v} | change
    if change.get("q") is not None:
        given |= {name: given[name].expand(2, -1, -1, -1) for name in "kv"}
    with pytest.raises(InputError) as error:
        fg.attention(spec)(**given)
    assert what in error.value.what
    assert numbers in error.value.numbers


def test_packed_is_a_bool_and_reserves_its_names() -> None:
    with pytest.raises(SpecError, match="packed is True or False"):
        fg.AttentionSpec(packed=1)  # type: ignore[arg-type]
    other = fg.Tensor("cu_seqlens_q", ("batch",), "int32")
    with pytest.raises(SpecError, match="two different captures"):
        fg.AttentionSpec(lambda b, h, q, k: other[b] > k, packed=True)


@pytest.mark.parametrize("arch", PATHS)
def test_the_backward_pass_takes_the_scheme_that_it_takes_without_packing(arch: str) -> None:
    for head_dim in (64, 128, 256):
        packed = plan_backward(spec_of("full", head_dim=head_dim), arch)
        alone = plan_backward(spec_of("full", head_dim=head_dim, packed=False), arch)
        assert packed.scheme == alone.scheme
        assert packed.notes == alone.notes
