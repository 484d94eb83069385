"""Groups of any number of query heads share a tile: those of 16 and more, and no powers of two.

A lane then computes rows of several heads, and a tile may have rows of no head. `make test` has a
case of each mechanism.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.kernels.pipeline import build
from flashgen.spec.language.signature import split
from tests.kernels.test_heads_per_tile import ARCH, ARCHS, judged, shared_tiles
from tests.kernels.test_heads_per_tile_plans import bytes_of
from tests.kernels.test_packed import ends, spec_of
from tests.support.examples import SPECS, spec_path
from tests.support.judged import FEW_BYTES, Call, equal, example, normal
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_specs import SERVED, VALUES
from tests.support.planted import planted
from tests.support.profiles import loaded
from tests.support.shapes import Case
from tests.support.tiers import case_id, every_share, slow, take_turns

CAUSAL = fg.load(spec_path("causal"))
FULL = fg.load(spec_path("full"))
GROUPS = (3, 5, 6, 7, 12, 16, 32, 71, 128)


def before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


BIAS = fg.Tensor("bias", ("heads", "seq_k"), "float32")
GATE = fg.Tensor("gate", ("batch", "heads", "seq_q"), "float32", grad=True)


def biased(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return (score + BIAS[h, k]) * GATE[b, h, q] + h * (k - q) / 64


BY_HEAD = fg.AttentionSpec(before, biased, head_dim=64, sink=True, name="all_by_head")


def all_by_head(case: Case, dtype: str = "float16", **how: Any) -> Call:
    """A call of a spec whose score, captured and learned tensors and sink depend on the head."""
    spec = BY_HEAD.replace(
        dtype=dtype, head_dim=case.head_dim, head_dim_v=case.head_dim_v or case.head_dim
    )
    tensors = {
        "bias": normal((case.heads_q, case.seq_k), torch.float32, 1),
        "gate": normal((case.batch, case.heads_q, case.seq_k), torch.float32, 2),
        "sink": torch.linspace(-1, 2, case.heads_q),
    }
    numbers = {"tensors": tensors, "q_offset": case.seq_k - case.seq_q}
    return Call(spec, case.tensors(seed=5), numbers, **how)


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "case"),
    [
        # Rows of a lane of different heads; a tile with rows of no head, whose last group ends
        # where the tensors end; heads of whole warps, and those of row groups, of which one has
        # none.
        ("sm_90a", Case(3, 90, 1, 16, 1)),
        ("sm_80", Case(5, 90, 1, 24, 2)),
        ("sm_90a", Case(9, 90, 1, 7, 1, "bfloat16")),
        ("sm_80", Case(30, 90, 1, 3, 1)),
        ("sm_80", Case(9, 90, 1, 14, 2, "float16", 64, None, "gaps")),
        *(
            (arch, Case(seq_q, 150, 2, 2 * group, 2, dtype, dim, dim_v, layout))
            for arch in ARCHS
            for group in (3, 7, 12, 16, 71)
            for seq_q, dtype, dim, dim_v, layout in (
                (1, "float16", 64, None, "gaps"),
                (4, "bfloat16", 128, None, "sequence_major"),
                (11, "float16", 40, 96, "contiguous"),
            )
        ),
    ],
    ids=lambda each: each.id if isinstance(each, Case) else each,
)
def test_all_that_depends_on_the_head_is_that_of_the_row(arch: str, case: Case) -> None:
    judged(all_by_head(case, case.dtype, arch=arch), None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seq_q", [1, 3, 8, 20])
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_and_few_queries(group: int, seq_q: int, arch: str) -> None:
    heads_kv = 1 if group > 16 else 2
    case = Case(seq_q, 130, 1, heads_kv * group, heads_kv)
    call = example(spec_path("causal"), case, offsets={"q_offset": 130 - seq_q}, arch=arch)
    judged(call, group if seq_q == 1 else None)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "arch"), take_turns(SPECS, ARCHS), ids=case_id)
def test_every_spec_with_groups_of_12_and_16(path: Any, arch: str) -> None:
    for case in (Case(3, 200, 2, 12, 1), Case(2, 90, 1, 32, 2, "bfloat16", 96)):
        call = example(path, case, arch=arch)
        # A power of two: the products are exact, whether the compiler fuses them with sums or not.
        call.spec = call.spec.replace(scale=0.125)
        judged(call, None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [8, 40, 104, 128, 192, 248, 256])
def test_padded_head_dims(head_dim: int, arch: str) -> None:
    for group in (7, 16):
        judged(all_by_head(Case(3, 90, 1, group, 1, head_dim=head_dim), arch=arch), group)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "dims"), [(12, (64, 64)), (16, (40, 96)), (7, (64, 64))])
def test_float32_and_tensors_that_are_not_aligned(group: int, dims: tuple[int, int]) -> None:
    judged(all_by_head(Case(3, 60, 1, group, 1, "float32", *dims), "float32", arch="sm_80"), group)
    call = all_by_head(Case(3, 60, 1, group, 1, "float16", *dims), arch=ARCH)
    flat = torch.zeros(call.qkv[0].numel() + 1, dtype=torch.float16)
    call.qkv = (flat[1:].view_as(call.qkv[0]).copy_(call.qkv[0]), *call.qkv[1:])
    judged(call, group)
    run = call.forward()
    assert run.plan is not None
    assert run.plan.access_bytes == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "arch"), [(7, "sm_80"), *((n, arch) for n in (7, 12, 16, 32) for arch in ARCHS)]
)
def test_packed_sequences_share_no_rows(group: int, arch: str) -> None:
    of_q, of_k = [1, 3, 0, 4, 1, 2], [90, 30, 5, 150, 0, 2]
    spec = spec_of("biased", head_dim=64, sink=True)
    case = Case(sum(of_q), sum(of_k), 1, 2 * group, 2, spec.dtype)
    known = {
        "cu_seqlens_q": ends(of_q),
        "cu_seqlens_k": ends(of_k),
        "gate": normal((len(of_q), 2 * group), torch.float32, 1) + 0.5,
        "bias": normal((200,), torch.float32, 2),
        "sink": torch.linspace(-1, 2, 2 * group),
    }
    numbers = {"tensors": {tensor.name: known[tensor.name] for tensor in spec.tensors}}
    judged(Call(spec, case.tensors(), numbers, arch=arch), group)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_dropout_in_groups_of_any_number(arch: str) -> None:
    """Of a head a tile has at least 16 rows: some groups have several tiles."""
    for group in (12, 16, 5, 7, 71):
        case = Case(3, 64, 1, group, 1, head_dim=128)
        judged(example(spec_path("alibi"), case, 0.3, {"q_offset": 48}, arch=arch), None)


# ---- serving ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numbers", "arch", "split_size"),
    [
        *take_turns(SERVED, ((12, 1), (16, 3), (32, 1), (5, 8)), ARCHS, (64, 0)),
        *take_turns(("causal",), [(group, 1) for group in GROUPS], ARCHS, (64, 0)),
    ],
)
def test_pages_and_splits(name: str, numbers: tuple[int, int], arch: str, split_size: int) -> None:
    spec, (group, queries) = SERVED[name], numbers
    values = VALUES | {
        "sink": torch.linspace(-1, 2, 2 * group),
        "bias": normal((2 * group, 512), torch.float32, 1),
    }
    names = {tensor.name for tensor in spec.tensors} & values.keys()
    given = {"tensors": {each: values[each] for each in names}} if names else {}
    of = Sequences.of((queries,) * 3, (150, 8, 217), (2 * group, 2))
    how = {"arch": arch, "split_size": split_size}
    run = Paged(spec, of, 16, numbers=given, how=how).judged()
    assert run.plan is not None
    assert run.plan.heads_per_tile == group
    # Where a score reads a tensor by head and key, the tile of all calls may spill a few bytes.
    resources = run.report.kernel.binary.resources
    assert resources.spill_store_bytes <= (FEW_BYTES if name == "bias" else 0)
    packed = Paged(spec, of, 16, packed=True, numbers=given, how=how).run()
    for found, alone in zip(
        dataclasses.replace(Paged(spec, of, 16, packed=True)).parts(packed),
        Paged(spec, of, 16).parts(run),
        strict=True,
    ):
        assert all(map(torch.equal, found, alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "arch"),
    [(12, "sm_80"), *((group, arch) for arch in ARCHS for group in (7, 16, 71))],
)
def test_decoding_gives_the_bits_of_the_row_in_a_prefill(group: int, arch: str) -> None:
    case, size = Case(150, 150, 1, group, 1), 80
    q, k, v = case.tensors(seed=5)
    k[..., 0], q[..., 0] = torch.linspace(0, 40, case.seq_k), 0.7
    q[:, ::2, :, 0] = 20  # neighbours whose maxima grow in each tile
    how: dict[str, Any] = {"backend": "emulator", "arch": arch, "split_size": size}
    prefill = run_forward(CAUSAL, q, k, v, **how)
    for p in (0, 81, 149):
        alone = (q[:, :, p : p + 1], k[:, :, : p + 1], v[:, :, : p + 1])
        some = run_forward(CAUSAL, *alone, q_offset=p, **how)
        assert some.plan is not None
        assert some.plan.heads_per_tile == group
        assert torch.equal(some.out, prefill.out[:, :, p : p + 1])
        assert torch.equal(some.lse, prefill.lse[:, :, p : p + 1])


# ---- rows without a head, and neighbours --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 60_000.0])
def test_what_a_neighbour_contains_reaches_no_other_row(value: float, arch: str) -> None:
    """Another head of the tile, another query of the head, and the head after the tile's last."""
    call = example(spec_path("sink"), Case(4, 90, 1, 14, 2), offsets={"q_offset": 86}, arch=arch)
    expected = call.forward()
    assert expected.plan is not None
    assert expected.plan.heads_per_tile == 7
    assert expected.plan.head_places == 8
    q = call.qkv[0].clone()
    q[:, 3], q[:, 5, 1], q[:, 7] = value, value, value
    call.qkv = (q, *call.qkv[1:])
    found = call.forward()
    others = torch.ones(q.shape[:3], dtype=torch.bool)
    others[:, 3], others[:, 5, 1], others[:, 7] = False, False, False
    assert torch.equal(found.out[others], expected.out[others])
    assert torch.equal(found.lse[others], expected.lse[others])


@pytest.mark.parametrize(
    ("arch", "group", "old", "new"),
    [
        ("sm_80", 12, " && head < HEADS_PER_TILE", ""),
        slow("sm_80", 12, "row_head = head + 2 * g + r", "row_head = head + 2 * g"),
        ("sm_80", 12, " && head + 2 * g + r <= last_head", ""),
        slow("sm_80", 12, " && first_head + n <= last_head", ""),
        slow("sm_80", 24, "warp_query + lane / 4 % TILE_QUERIES", "warp_query + lane / 4"),
        slow("sm_80", 24, "+ lane / 4 / TILE_QUERIES", ""),
        slow("sm_90a", 12, "row_head = head + r", "row_head = head"),
        slow("sm_90a", 12, "row_head = first_head + r", "row_head = first_head"),
        slow("sm_90a", 12, " && first_head + r <= last_head", ""),
        slow("sm_90a", 24, "q_start + lane / 4 % TILE_QUERIES", "q_start + lane / 4"),
        slow("sm_90a", 12, "(first_head + r) * p.o_stride_h", "first_head * p.o_stride_h"),
    ],
)
def test_a_row_that_is_computed_as_one_of_another_head_is_seen(
    arch: str, group: int, old: str, new: str
) -> None:
    """Heads of 8 or 4 rows each; the rows of no head come last, at the end of all tensors."""
    head_dim = 192 if arch == "sm_90a" else 128  # with tiles of 128 rows
    call = all_by_head(Case(48 // group, 40, 1, 24, 24 // group, head_dim=head_dim), arch=arch)
    assert build(call.spec, arch, heads_per_tile=group).plan.queries_per_tile == 96 // group
    after = "extern" if "HEADS_PER_TILE" not in old else ""
    with planted("forward", old, new, after), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_forward()


# ---- what is moved ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "seq_q", "arch"),
    [
        (7, 1, "sm_90a"),
        slow(16, 3, "sm_80"),
        *(slow(group, 1, arch) for group in GROUPS for arch in ARCHS),
        *(slow(group, 17, arch) for group in (3, 7) for arch in ARCHS),
    ],
)
def test_k_and_v_are_read_once_for_a_group_as_the_plan_predicts(
    group: int, seq_q: int, arch: str
) -> None:
    sizes = (1, 2 * group, 2, seq_q, 100)
    plan, moved = bytes_of(FULL, arch, sizes=sizes)
    assert plan.heads_per_tile == group
    tiles = -(-seq_q // plan.queries_per_tile)
    assert moved["k"] == moved["v"] == tiles * 2 * 100 * 64 * 2


@every_share
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group", [7, 12, 16])
def test_predicted_bytes_are_exact_for_a_sink(group: int, arch: str) -> None:
    tensors = {"sink": torch.linspace(-1, 1, 2 * group)}
    sizes = (2, 2 * group, 2, 3, 100)
    plan, _ = bytes_of(loaded("sink"), arch, sizes=sizes, tensors=tensors)
    assert plan.heads_per_tile == group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "arch"),
    [(16, "sm_90a"), *((group, arch) for group in (7, 12, 16, 71) for arch in ARCHS)],
)
def test_decoding_reads_each_key_once_for_a_group(group: int, arch: str) -> None:
    case = Case(1, 832, 1, group, 1)
    call = example(spec_path("causal"), case, offsets={"q_offset": 831}, arch=arch)
    run = call.forward(split_size=416)
    keys = 832 * 64 * 2 * 2
    rows = group * 2 * 64 * 2  # q, in each split
    assert run.counters.global_read_bytes == pytest.approx(keys + rows, rel=0.02)


# ---- the choice and the kernels -----------------------------------------------------------------


@every_share
@pytest.mark.slow
def test_the_operator_chooses_the_group() -> None:
    op = fg.attention(CAUSAL)
    q, k, v = Case(1, 40, 1, 14, 2).tensors()
    out, lse = op(q, k, v, q_offset=39, backend="emulator", return_lse=True)
    run = run_forward(CAUSAL, q, k, v, q_offset=39, backend="emulator")
    assert run.plan is not None
    assert run.plan.heads_per_tile == 7
    assert run.report.heads_reason == "of 7 that share K and V: 2 tiles instead of 14"
    assert torch.equal(out, run.out)
    assert torch.equal(lse, run.lse)


@pytest.mark.parametrize(
    ("name", "head_dim", "arch", "kind", "heads"),
    [
        ("causal", 64, ARCH, "plain", 16),
        *shared_tiles(("plain", "split", "paged"), 7, 12, 16, 32, 128),
    ],
)
def test_no_kernel_spills(name: str, head_dim: int, arch: str, kind: str, heads: int) -> None:
    spec = loaded(name).replace(head_dim=head_dim, head_dim_v=head_dim)
    if kind == "paged":
        if spec.packed or spec.block_sparse is not None:
            pytest.skip("has no paged cache")
        spec = spec.replace(paged=True)
    spec = spec if kind == "plain" else split(spec)
    alone, built = fg.plan(spec, arch), build(spec, arch, heads_per_tile=heads)
    assert built.plan.heads_per_tile == heads
    if kind == "plain":
        assert built.plan.cost <= 1.2 * alone.cost  # 128 rows instead of 192
    else:
        assert built.plan.tile == alone.tile
    assert built.binary.resources.clean
    assert built.binary.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_bits_do_not_depend_on_the_order_of_warps_and_copies(arch: str) -> None:
    for group in (7, 16):
        call = all_by_head(Case(3, 300, 1, group, 1), arch=arch)
        assert equal(call.forward(), call.forward(order_seed=3))
