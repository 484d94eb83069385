"""Block-sparse layouts in the operator and on the tiled path, and the forms that a call accepts."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime import block_layouts
from flashgen.kernels import planner
from flashgen.shared.errors import InputError, SpecError
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.tile_walk import (
    EMPTY,
    FULL,
    MIXED,
    BlockLayoutTiles,
    TileAxis,
    TileWalk,
)
from flashgen.tools.cli.captured_tensors import tensor_values
from flashgen.tools.cli.inputs import Shape
from tests.support.examples import spec_path
from tests.support.masks import causal
from tests.support.opchecks import passes_opcheck
from tests.support.paths import from_root
from tests.support.sparse_layouts import by_position, random_layout, sparse_spec, touched
from tests.support.tiers import slow
from tests.support.tiled_calls import both

Tensor = torch.Tensor

SPEC = sparse_spec(16, 32, causal, head_dim=8, dtype="float32")
OP = fg.attention(SPEC)


def diagonals(i: int, j: int) -> bool:
    return (i - j) % 3 == 0


def of_head(b: int, h: int, i: int, j: int) -> bool:
    return (i + j + b + h) % 2 == 0


STATIC = fg.attention(sparse_spec(16, 16, causal, of_head, head_dim=8, dtype="float32"))


def halvings() -> Callable[[int], int]:
    """A function that sees itself, through its closure."""

    def halving(i: int) -> int:
        return 0 if i < 1 else 1 + halving(i // 2)

    return halving


halving = halvings()


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def operands(learned: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 40, 8), (2, 2, 50, 8), (2, 2, 50, 8))
    return [torch.randn(s, generator=generator).requires_grad_(learned) for s in shapes]


def layout(seed: int = 0, lines: tuple[int, int] = (2, 4)) -> Tensor:
    return random_layout(SPEC, lines, (40, 50), 0.6, seed)


ALL = torch.ones_like(layout())


# ---- what a call gives -------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=str)
def test_a_compressed_layout_lists_the_live_blocks_in_order(lines: tuple[int, int]) -> None:
    live = layout(3, lines)
    made = fg.Layout.of(live)
    for blocks, counts, listed in (
        (live, made.row_counts, made.row_blocks),
        (live.transpose(2, 3), made.column_counts, made.column_blocks),
    ):
        assert counts.dtype == listed.dtype == torch.int32
        assert listed.shape == blocks.shape
        for line, count, places in zip(
            blocks.flatten(0, 2), counts.flatten(), listed.flatten(0, 2), strict=True
        ):
            assert places[:count].tolist() == line.nonzero().flatten().tolist()
            assert sorted(places.tolist()) == list(range(len(line)))


def test_a_tensor_a_compressed_layout_and_a_block_mask_are_the_same() -> None:
    mask = create_block_mask(lambda b, h, q, k: q // 16 != k // 32, 2, 4, 40, 50, "cpu", (16, 32))
    live = mask.to_dense().bool()
    assert 0 < live.sum() < live.numel()
    wanted, _ = reference.attention(SPEC, *operands(), tensors={"layout": live})
    out = OP(*operands(), layout=live)
    torch.testing.assert_close(out, wanted.float(), atol=1e-5, rtol=0)
    for given in (fg.Layout.of(live), mask):
        assert torch.equal(OP(*operands(), layout=given), out)


def test_gradients_flow_past_a_layout_and_it_is_compressed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    listed = block_layouts._listed
    monkeypatch.setattr(
        "flashgen.calls.runtime.block_layouts._listed", lambda live: calls.append(0) or listed(live)
    )
    q, k, v = operands(learned=True)
    live = layout()
    OP(q, k, v, layout=live).square().sum().backward()
    assert len(calls) == 2  # rows and columns
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    kept = by_position(live, 16, 32, 40, 50) & torch.ones(40, 50, dtype=torch.bool).tril()
    k2, v2 = (t.repeat_interleave(2, 1) for t in exact[1:])
    s = (exact[0] @ k2.transpose(2, 3) * 8**-0.5).masked_fill(~kept, -1e30)
    p = s.softmax(-1).masked_fill(~kept, 0)
    (p @ v2).square().sum().backward()
    for tensor, other in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad.float(), atol=1e-4, rtol=1e-4)


def test_a_function_is_called_once_for_each_block_and_kept() -> None:
    listed = []

    def counted(i: int, j: int) -> bool:
        listed.append((i, j))
        return i >= j

    op = fg.attention(sparse_spec(16, 16, None, counted, head_dim=8, dtype="float32"))
    calls = op.spec.block_sparse._bound.__closure__[0].cell_contents  # the spec has a copy
    q, k, v = operands()
    op(q, k, v)
    op(q[:, :, :33], k, v)
    op(q, k, v, q_offset=7)
    assert sorted(calls) == [(i, j) for i in range(3) for j in range(4)]
    op(q, k, v, q_offset=9)  # a row of blocks more
    assert len(calls) == 12 + 16


def test_positions_of_a_layout_are_global() -> None:
    q, k, v = operands()
    live = random_layout(SPEC, (1, 4), (60, 80), 0.5, 4)
    got = OP(q, k, v, layout=live, q_offset=20, k_offset=30)
    kept = by_position(live, 16, 32, 60, 80)[:, :, 20:, 30:]
    kept = kept & (torch.arange(20, 60)[:, None] >= torch.arange(30, 80))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    seen = kept.any(3).expand(2, 4, 40)
    torch.testing.assert_close(got[seen], wanted[seen], atol=1e-5, rtol=0)
    assert not got[~seen].any()


@pytest.mark.parametrize("backward", [False, True])
def test_the_plan_prints_that_a_block_layout_is_walked(backward: bool) -> None:
    make = planner.plan_backward if backward else fg.plan
    printed = " ".join(str(make(sparse_spec(16, 32, None, diagonals))).split())
    note = "visits the tiles of a block-sparse layout: diagonals at "
    assert f"{note}{from_root(__file__)}" in printed
    assert "blocks of 16 queries" in printed
    assert "layout" not in str(make(fg.AttentionSpec()))


def test_the_command_line_makes_a_random_layout_where_the_file_has_no_example(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sparse.py"
    file.write_text("import flashgen as fg\nspec = fg.AttentionSpec(block_sparse=fg.BlockSparse())")
    found, examples = tensor_values(
        fg.load(file), str(file), Shape(2, 4, 2, 100, 130), q_offset=50, seed=3
    )
    assert examples == []
    assert found["layout"].shape == (2, 4, 3, 3)
    assert 0 < found["layout"].sum() < 72
    assert torch.equal(found["layout_row_counts"], found["layout"].sum(-1).int())


def test_a_random_layout_of_a_long_call_is_that_of_all_heads(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text(
        "import flashgen as fg\nspec = fg.AttentionSpec(block_sparse=fg.BlockSparse(None, 64, 64))"
    )
    for keys, layouts in ((1_024, (2, 4)), (65_536, (1, 1))):
        found, _ = tensor_values(fg.load(file), str(file), Shape(2, 4, 2, keys, keys))
        assert found["layout"].shape == (*layouts, keys // 64, keys // 64)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "'layout' of the spec is missing"),
        ({"layout": 3}, "is not a block layout"),
        ({"layout": layout().int()}, "torch.int32; expected torch.bool"),
        ({"layout": layout()[0]}, r"shape \(4, 3, 2\)"),
        ({"layout": layout()[:, :, :2]}, "too few blocks of queries"),
        ({"layout": layout()[..., :1]}, "too few blocks of keys"),
        ({"layout": layout()[:, :3]}, "length of its dimension heads"),
        ({"layout": layout().repeat(2, 1, 1, 1)}, "length of its dimension batch"),
        ({"layout": layout().to("meta")}, "not on the device of q"),
        ({"layout": layout(), "other": 1}, "'other' is not a tensor of the spec"),
        ({"layout": layout(), "layout_row_counts": layout()}, "layout_row_blocks.* is missing"),
        (
            {"layout": fg.Layout.of(layout())._replace(row_blocks=layout().transpose(2, 3).int())},
            "layout_row_blocks does not have the length",
        ),
        (
            {"layout": fg.Layout.of(layout())._replace(column_counts=layout()[:, :1, 0].int())},
            "column_counts does not have the shape",
        ),
        (
            {"layout": fg.Layout.of(layout())._replace(row_counts=layout()[..., 0].int() + 1)},
            r"layout_row_counts does not list the live blocks\n.*\n.*at \(0, 0, 0\): ",
        ),
        (
            {"layout": fg.Layout.of(ALL)._replace(column_blocks=ALL.transpose(2, 3).int())},
            "layout_column_blocks does not list the live blocks",
        ),
        (
            {"layout": create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 40, 50, "cpu", 16)},
            r"another block size.*\n.*\n.*BLOCK_SIZE \(16, 16\); the spec has \(16, 32\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_layout_is_refused_with_its_numbers(given: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        OP(*operands(), **given)
    assert len(str(error.value).splitlines()) == 4


def test_a_layout_reaches_the_last_global_position() -> None:
    with pytest.raises(InputError, match="the queries end at 60, in blocks of 16: at least 4"):
        OP(*operands(), layout=layout(), q_offset=20)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fg.BlockSparse(lambda i: True), "takes 2 or 4 arguments"),
        (lambda: fg.BlockSparse(3), "is a function of block coordinates"),
        (lambda: fg.BlockSparse(block_q=0), "block_q 0; from 1"),
        (lambda: fg.BlockSparse(heads=np.ones(2)), "heads array"),
        (lambda: fg.BlockSparse(block_k=64.0), "block_k 64.0; from 1"),
        (
            lambda: fg.AttentionSpec(block_sparse=diagonals),
            "block_sparse is a BlockSparse layout or None",
        ),
        (
            lambda: sparse_spec(
                16, 16, lambda b, h, q, k: fg.Tensor("layout", ("seq_q",), "int32")[q] > 0
            ),
            "the name 'layout' belongs to the block-sparse layout",
        ),
    ],
)
def test_a_wrong_spec_of_a_layout_is_refused(make: object, words: str) -> None:
    with pytest.raises(SpecError, match=words) as error:
        make()
    assert "where    tests/" in str(error.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda i, j: i - j, "returned 0"),
        (lambda i, j: 1 // (i + j), "raised ZeroDivisionError"),
    ],
)
def test_a_layout_function_that_returns_no_bool_is_an_error_that_names_the_block(
    function: object, words: str
) -> None:
    op = fg.attention(sparse_spec(16, 16, None, function, head_dim=8, dtype="float32"))
    with pytest.raises(SpecError, match=words) as error:
        op(*operands())
    assert "called with (0, 0)" in str(error.value)


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_a_mod_may_capture_the_name_layout_without_a_block_layout(backend: str) -> None:
    mine = fg.Tensor("layout", ("seq_k",), "bool")
    spec = fg.AttentionSpec(lambda b, h, q, k: mine[k], head_dim=8, dtype="float32")
    q, k, v = operands()
    out = fg.attention(spec)(q, k, v, layout=torch.arange(50) < 20, backend=backend)
    torch.testing.assert_close(
        out,
        fg.attention(fg.AttentionSpec(head_dim=8, dtype="float32"))(q, k[:, :, :20], v[:, :, :20]),
    )


# ---- torch's machinery -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("learned", [slow(False), True])
@pytest.mark.parametrize("static", [False, slow(True)])
def test_opcheck_passes_all_its_tests(static: bool, learned: bool) -> None:
    spec = (STATIC if static else OP).spec
    given = (*operands(learned), *(() if static else fg.Layout.of(layout())))
    assert passes_opcheck(operator_of(spec).overload, given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "backend"), [(False, "aot_eager"), slow(False, "inductor"), slow(True, "inductor")]
)
def test_torch_compile_makes_one_graph_with_the_compression_in_it(
    dynamic: bool, backend: str
) -> None:
    compiled = torch.compile(
        lambda q, k, v, given: OP(q, k, v, layout=given),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
    )
    q, k, v = operands(learned=True)
    OP(q, k, v, layout=layout()).sum().backward()
    wanted, q.grad = q.grad, None
    out = compiled(q, k, v, layout())
    assert torch.equal(out, OP(q, k, v, layout=layout()))
    out.sum().backward()
    torch.testing.assert_close(q.grad, wanted)
    shorter = q[:, :, :30], k[:, :, :20], v[:, :, :20], layout()
    torch.testing.assert_close(compiled(*shorter), OP(*shorter[:3], layout=layout()))
    made = fg.Layout.of(layout())
    assert torch.equal(compiled(q, k, v, made), OP(q, k, v, layout=layout()))


def test_torch_compile_takes_a_static_layout() -> None:
    compiled = torch.compile(STATIC, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*operands()), STATIC(*operands()))


def test_every_sample_of_a_vmap_has_its_own_layout() -> None:
    q, k, v = operands()
    live = torch.stack([layout(seed, (1, 4)) for seed in (1, 2)])
    given = q[:, None], k[:, None], v[:, None]
    mapped = torch.vmap(lambda q, k, v, live: OP(q, k, v, layout=live))(*given, live)
    loop = [OP(*(t[i] for t in given), layout=live[i]) for i in range(2)]
    assert torch.equal(mapped, torch.stack(loop))
    mapped = torch.vmap(STATIC)(*given)
    assert torch.equal(mapped, torch.stack([STATIC(*(t[i] for t in given)) for i in range(2)]))


def test_specs_of_layouts_can_be_pickled_and_copied() -> None:
    specs = (
        SPEC,
        sparse_spec(16, 16, causal, diagonals),
        sparse_spec(16, 16, causal, lambda i, j, s=2: halving(i) == halving(j) - s + 2),
        fg.load(spec_path("bigbird")),
    )
    for spec in specs:
        found = pickle.loads(pickle.dumps(spec))
        assert found == spec
        assert copy.deepcopy(spec) == spec
        if spec.block_sparse.is_static:
            tables = [each.block_sparse.table(1, 2, 5, 6) for each in (spec, found)]
            assert tables[0] == tables[1]


def test_code_of_another_python_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sparse_spec(16, 16, None, lambda i, j: i == j)
    data = pickle.dumps(spec)
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    with pytest.raises(SpecError, match="only in the same version of Python"):
        pickle.loads(data)


def test_equal_functions_of_a_layout_make_equal_specs() -> None:
    def made(step: int) -> fg.AttentionSpec:
        return sparse_spec(16, 16, None, lambda i, j: (i - j) % step == 0)

    assert made(2) == made(2)
    assert hash(made(2)) == hash(made(2))
    assert made(2) != made(3)
    assert made(2) != sparse_spec(16, 32, None, lambda i, j: (i - j) % 2 == 0)


def test_autocast_keeps_the_layout() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = OP(*operands(), layout=layout())
    narrow = fg.attention(SPEC.replace(dtype="bfloat16"))
    assert torch.equal(out, narrow(*(t.bfloat16() for t in operands()), layout=layout()))


# ---- the tiled algorithms ----------------------------------------------------------------------


@pytest.mark.parametrize("block", [(16, 32), (5, 7), (40, 9)], ids=str)
def test_the_tiled_path_visits_the_tiles_that_touch_a_live_block(block: tuple[int, int]) -> None:
    live = torch.rand(3, 9, 11, generator=torch.Generator().manual_seed(5)) < 0.2
    live[:, :4, :6], live[:, 4:, 7:] = False, True
    q_offset, k_offset = 3, 6
    queries = TileAxis(9 * block[0] - q_offset, 12, q_offset)
    keys = TileAxis(11 * block[1] - k_offset, 10, k_offset)
    by_row = BlockLayoutTiles(live.numpy(), *block)
    by_column = BlockLayoutTiles(live.numpy().swapaxes(1, 2), *reversed(block))
    walk = functools.partial(TileWalk, analyse(fg.AttentionSpec()).mask, (), queries, keys)
    whole = by_position(live, *block, 9 * block[0], 11 * block[1])[:, q_offset:, k_offset:]
    some, every = touched(whole, 12, 10).any(0), ~touched(~whole, 12, 10).any(0)
    wanted = torch.where(every, FULL, torch.where(some, MIXED, EMPTY))
    rows = [walk(False, by_row).classes(*ends) for ends in queries.tiles()]
    columns = [walk(True, by_column).classes(*ends) for ends in keys.tiles()]
    assert torch.equal(torch.tensor(np.array(rows)), wanted)
    assert torch.equal(torch.tensor(np.array(columns)), wanted.T)
    assert {EMPTY, MIXED, FULL} == set(wanted.flatten().tolist())


@pytest.mark.parametrize("static", [False, True])
def test_tiled_gradients_are_those_of_finite_differences(static: bool) -> None:
    spec = (STATIC if static else OP).spec
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(1, heads, seq, 8, generator=generator, dtype=torch.double)
        for heads, seq in ((2, 37), (1, 41), (1, 41))
    )
    live = random_layout(spec, (1, 2), (37, 41), 0.5, 8)
    tensors = {} if static else {"layout": live}
    dout = torch.randn(1, 2, 37, 8, generator=generator, dtype=torch.double)
    found = both(spec, q, k, v, dout, tensors=tensors, block_q=16, block_k=24)
    wanted, _ = reference.attention(spec, q, k, v, tensors=tensors)
    torch.testing.assert_close(found[0], wanted)
    step = 1e-5
    for place, gradient in enumerate(found[2:]):
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.double)
        ends = []
        for sign in (1, -1):
            moved = [q, k, v]
            moved[place] = moved[place] + sign * step * direction
            ends.append((reference.attention(spec, *moved, tensors=tensors)[0] * dout).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), slope, atol=1e-7, rtol=1e-6)
