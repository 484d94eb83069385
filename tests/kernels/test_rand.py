"""fg.rand in mods: the same numbers in kernels, on the CPU path and in the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from flashgen.shared.dropout import philox
from flashgen.shared.random_numbers import STREAMS, counter, random_bits
from flashgen.shared.signature import BOUNDARIES
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.bit_functions import RandomBits
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, SCORE, B, H
from flashgen.spec.language.tracing import trace_mask
from tests.support.judged import RNG, Call
from tests.support.shapes import Case
from tests.support.tiers import slow

Tensor = torch.Tensor
STATE = torch.tensor(RNG)
rate = fg.Scalar("rate", "float32")
width = fg.Tensor("width", ("heads",), "float32", grad=True)


def drops_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    """DropKey: Li et al., "DropKey", CVPR 2023 (arXiv 2208.02646)."""
    return fg.rand(b, h, q, k) >= rate


def random_columns(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Each sequence keeps the same random keys for all heads and queries; and its own position."""
    return (fg.rand(b, 0, 0, k // 2, stream=5) < 0.5) | (q == k)


def sparse_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (fg.rand(0, h, q // 8, k // 8) < 0.6)


def gumbel(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    u = fg.maximum(fg.rand(b, h, q, k, stream=1), 2.0**-24)
    return score - width[h] * fg.log(-fg.log1p(-u))


def dithered(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + width[h] * (fg.rand(b, h, q, k) - fg.rand(b, h, q, q, stream=63))


SPECS = {
    "dropkey": (drops_keys, None),
    "columns": (random_columns, None),
    "blocks": (sparse_blocks, dithered),
    "gumbel": (drops_keys, gumbel),
}


def call_of(name: str, case: Case, *, spec: dict[str, Any] | None = None, **how: Any) -> Call:
    mask, score = SPECS[name]
    made = fg.AttentionSpec(
        mask, score, head_dim=case.head_dim, dtype=case.dtype, name=name, **spec or {}
    )
    numbers: dict[str, Any] = {"rng": STATE}
    if mask is drops_keys:
        numbers["scalars"] = {"rate": 0.3}
    if score is not None:
        numbers["tensors"] = {"width": torch.linspace(-1, 2, case.heads_q)}
    return Call(made, case.tensors(7), numbers | how.pop("numbers", {}), **how)


def check(call: Call) -> None:
    call.judged_backward(call.judged_forward())


# ---- the numbers --------------------------------------------------------------------------------


def test_every_implementation_has_the_numbers_of_philox() -> None:
    generator = np.random.default_rng(3)
    words = generator.integers(-(2**31), 2**31, (8, 500))
    words[3] %= STREAMS
    low, high, *others = words
    expected = []
    for place in range(500):
        of = [int(word[place]) for word in (low, high)]
        key = of[0] & 0xFFFFFFFF, of[1] & 0xFFFFFFFF
        counted = counter(*(int(word[place]) for word in others))
        found = philox(tuple(np.array(word) for word in counted), key)
        q, k = others[-2:]
        expected.append(int(found[2 * (q[place] & 1) + (k[place] & 1)]) >> 8)
    assert random_bits(*words).tolist() == expected
    assert random_bits(*map(torch.from_numpy, words)).tolist() == expected
    assert [random_bits(*map(int, column)) for column in words.T] == expected


def test_numbers_are_uniform_with_24_bits_and_streams_are_independent() -> None:
    q, k = np.arange(512)[:, None], np.arange(512)
    bits = np.stack([random_bits(5, 6, 7, stream, 1, 2, q, k).ravel() for stream in range(4)])
    values = bits / 2.0**24
    count = values.shape[1]
    assert bits.min() >= 0
    assert bits.max() < 1 << 24
    ones = np.array([(bits >> place & 1).mean() for place in range(24)])
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(bits.size)
    assert np.abs(values.mean(1) - 0.5).max() < 5 * np.sqrt(1 / 12 / count)
    assert np.abs(values.var(1) - 1 / 12).max() < 5 * np.sqrt(1 / 180 / count)
    between = np.corrcoef(values)[np.triu_indices(4, 1)]
    grid = values[0].reshape(512, 512)
    shifted = [
        np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1],
        np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1],
    ]
    assert np.abs([*between, *shifted]).max() < 5 / np.sqrt(count)


def test_no_counter_is_one_of_dropout_or_of_another_stream() -> None:
    """The upper two bits of the second word differ; those of dropout's are equal."""
    ends = np.array([-(2**31), -(2**30), -17, -1, 0, 1, 2, 2**30 - 1, 2**30, 2**31 - 1])
    second = np.asarray(counter(0, 0, 0, 0, 0, ends)[1])
    assert ((second >> 31) != (second >> 30 & 1)).all()
    of_dropout = (4 * (ends[:, None] // 16) + np.arange(4)) & 0xFFFFFFFF
    assert ((of_dropout >> 31) == (of_dropout >> 30 & 1)).all()
    third = {counter(0, s, b, h, 0, 0)[2] for s in range(STREAMS) for b in (0, -1) for h in (0, -1)}
    assert len(third) == 4 * STREAMS
    assert max(third) == 0xFFFFFFFF


# ---- mods ---------------------------------------------------------------------------------------


def test_the_analysis_knows_the_range_of_random_numbers() -> None:
    def found(mask: Any) -> tuple[bool, bool]:
        """Whether a tile may have a kept score, and whether all of its scores are kept."""
        ends = {B: 0, H: 0, Q_LO: 0, Q_HI: 31, K_LO: 32, K_HI: 63}
        known = analyse_mask(trace_mask(lambda b, h, q, k: mask(fg.rand(b, h, q, k))).expr)
        return bool(evaluate(known.may, ends)), bool(evaluate(known.must, ends))

    for always, never in (
        (lambda u: u < 1, lambda u: u >= 1),
        (lambda u: u >= 0, lambda u: u < 0),
        (lambda u: u * 2 - 1 >= -1, lambda u: 3 - u < 2),
    ):
        assert found(always) == (True, True)
        assert found(never) == (False, False)
    assert found(lambda u: u < 0.3) == found(lambda u: u >= 2.0**-24) == (True, False)


def test_random_numbers_have_no_slope() -> None:
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s * fg.rand(b, h, q, k))
    slope = spec.score.diff(SCORE)
    assert slope.atoms(RandomBits)
    assert SCORE not in slope.free_symbols


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda q, k: fg.rand(0, 0, q, k, stream=64), "from 0 to 63"),
        (lambda q, k: fg.rand(0, 0, q, k, stream=q), "the number of one"),
        (lambda q, k: fg.rand(0, 0, q / 2, k), "q is"),
        (lambda q, k: fg.rand(0, 0, q, k < 3), "k is"),
    ],
)
def test_arguments_are_integers_and_a_known_stream(made: Any, says: str) -> None:
    with pytest.raises(fg.SpecError, match=says):
        fg.AttentionSpec(lambda b, h, q, k: made(q, k) < 0.5)


def test_a_captured_tensor_cannot_take_the_name_of_the_state() -> None:
    with pytest.raises(fg.SpecError, match="random_state"):
        fg.Tensor("random_state", (4,), "int32")


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "backend", "arch"),
    [
        ("dropkey", "float16", "emulator", "sm_80"),
        slow("dropkey", "bfloat16", "emulator", "sm_90a"),
        slow("columns", "float16", "emulator", "sm_90a"),
        ("columns", "float32", "tiled", None),
        slow("blocks", "float32", "emulator", "sm_80"),
        slow("blocks", "float16", "emulator", "sm_90a"),
        ("gumbel", "float32", "tiled", None),
        slow("gumbel", "bfloat16", "emulator", "sm_80"),
        slow("gumbel", "float16", "emulator", "sm_90a"),
        ("blocks", "bfloat16", "tiled", None),
    ],
)
def test_random_mods_meet_the_error_rule_in_both_passes(
    name: str, dtype: str, backend: str, arch: str | None
) -> None:
    check(call_of(name, Case(37, 45, 2, 4, 2, dtype, 16), backend=backend, arch=arch))


@pytest.mark.parametrize(
    ("backend", "arch"), [("tiled", None), slow("emulator", "sm_80"), slow("emulator", "sm_90a")]
)
def test_dropout_beside_random_mods_has_the_state_of_the_call(
    backend: str, arch: str | None
) -> None:
    numbers = {"dropout_p": 0.25, "q_offset": 16, "k_offset": -32}
    case = Case(40, 40, 1, 2, 1, "float16", 16)
    check(
        call_of(
            "dropkey", case, spec={"dropout": True}, numbers=numbers, backend=backend, arch=arch
        )
    )


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_packed_sequences_count_from_their_own_first_row(backend: str) -> None:
    call = call_of("gumbel", Case(40, 48, 1, 2, 1, "float32", 16), spec={"packed": True})
    bounds = torch.tensor([0, 13, 14, 40]), torch.tensor([0, 20, 20, 48])
    tensors = call.numbers["tensors"] | {
        name: x.int() for name, x in zip(BOUNDARIES, bounds, strict=True)
    }
    check(Call(call.spec, call.qkv, call.numbers | {"tensors": tensors}, backend=backend))


@pytest.mark.parametrize(
    ("backend", "arch"), [("tiled", None), ("emulator", "sm_80"), slow("emulator", "sm_90a")]
)
def test_split_keys_have_the_numbers_of_the_whole(backend: str, arch: str | None) -> None:
    call = call_of("dropkey", Case(3, 70, 1, 2, 2, "float16", 16), backend=backend, arch=arch)
    call.judged_forward(split_size=32)


def test_a_part_of_the_positions_and_heads_has_the_numbers_of_the_whole() -> None:
    case = Case(48, 40, 1, 4, 2, "float32", 16)
    spec = fg.AttentionSpec(drops_keys, head_dim=16, dtype="float32", name="dropkey")
    op, (q, k, v) = fg.attention(spec), case.tensors(3)
    whole = op(q, k, v, rate=0.4, rng=STATE)
    part = op(
        q[:, 2:, 17:],
        k[:, 1:],
        v[:, 1:],
        rate=0.4,
        rng=STATE,
        q_offset=17,
        h_offset=2,
        whole={"heads": 4, "seq_q": 48},
    )
    torch.testing.assert_close(part, whole[:, 2:, 17:])


def test_a_state_is_drawn_and_the_backward_pass_has_it() -> None:
    spec = fg.AttentionSpec(drops_keys, head_dim=16, dtype="float32", name="dropkey")
    op, (q, k, v) = fg.attention(spec), Case(20, 20, 1, 1, 1, "float32", 16).tensors(3)
    torch.manual_seed(5)
    v.requires_grad_()
    first, other = op(q, k, v, rate=0.5), op(q, k, v, rate=0.5)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    rng = torch.randint(2**63 - 1, (2,))
    assert torch.equal(first, op(q, k, v, rate=0.5, rng=rng))
    numbers = {"scalars": {"rate": 0.5}, "rng": rng}
    (found,) = torch.autograd.grad(first.sum(), v)
    ones = torch.ones_like(first)
    exact = reference.gradients(spec, q, k, v.detach(), ones, None, **numbers)
    torch.testing.assert_close(found.double(), exact[2], rtol=1e-5, atol=1e-5)


def test_runs_without_autograd_need_the_state_of_the_forward_pass() -> None:
    spec = fg.AttentionSpec(drops_keys, head_dim=16, dtype="float32", name="dropkey")
    q, k, v = Case(20, 20, 1, 1, 1, "float32", 16).tensors(3)
    run = run_forward(spec, q, k, v, scalars={"rate": 0.5})
    assert run.rng is not None
    assert run.rng.shape == (2,)
    with pytest.raises(fg.InputError, match="needs a random state"):
        run_backward(spec, q, k, v, run.out, run.lse, run.out, scalars={"rate": 0.5})
    with pytest.raises(fg.InputError, match="not a seed and an offset"):
        run_forward(spec, q, k, v, scalars={"rate": 0.5}, rng=torch.zeros(3))
    with pytest.raises(fg.InputError, match="that call"):
        reference.attention(spec, q, k, v, scalars={"rate": 0.5})


def test_a_compiled_call_draws_in_the_graph_and_takes_a_given_state() -> None:
    spec = fg.AttentionSpec(drops_keys, head_dim=16, dtype="float32", name="dropkey")
    op, (q, k, v) = fg.attention(spec), Case(20, 20, 1, 1, 1, "float32", 16).tensors(3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor, rng: Tensor | None) -> Tensor:
        return op(q, k, v, rate=0.5, rng=rng)

    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compiled(*given, STATE)
    expected = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = op(*expected, rate=0.5, rng=STATE)
    assert torch.equal(out, plain)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), given),
        torch.autograd.grad(plain.sum(), expected),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert not torch.equal(compiled(q, k, v, None), compiled(q, k, v, None))
