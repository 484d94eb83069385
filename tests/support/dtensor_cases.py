"""Cases of calls of DTensors, each executed by every rank of a group (`tests.support.ranks`).

Every rank makes the whole problem from one seed, computes it by one call, and compares the whole of
the results of calls of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention import (
    activate_flash_attention_impl,
    flex_attention,
    restore_flash_attention_impl,
)

import flashgen as fg
from flashgen.integrations.torch import register, register_flex, unregister_flex
from flashgen.shared.errors import InputError

Tensor = torch.Tensor
Placements = Mapping[str, Any]
"""The placements of tensors by name; all ranks have the others."""

BIAS = fg.Tensor("bias", ("heads", "seq_k"), "float32", grad=True)
OF_KEYS = fg.Tensor("of_keys", ("seq_k",), "float32", grad=True)
IDS = fg.Tensor("ids", ("batch", "seq_k"), "int32")
SINK = fg.Tensor("sink", ("heads",), "float32", grad=True)
OF_KEY_HEADS = fg.Tensor("of_key_heads", ("heads_kv", "seq_k"), "float32", grad=True)
OF_ENTRIES = fg.Tensor("of_entries", ("batch", "seq_k"), "float32", grad=True)

SIZES = {
    "q": (3, 8, 24, 16),
    "k": (3, 4, 24, 16),
    "v": (3, 4, 24, 16),
    "bias": (8, 24),
    "of_keys": (24,),
    "sink": (8,),
    "of_key_heads": (4, 24),
    "of_entries": (3, 24),
}
RNG = torch.tensor([5, 7])
BY_BATCH: Placements = {name: Shard(0) for name in ("q", "k", "v", "ids")}
BY_HEADS: Placements = {
    **{name: Shard(1) for name in ("q", "k", "v")},
    **{name: Shard(0) for name in ("bias", "sink")},
}
BY_HEADS_OF_Q: Placements = {"q": Shard(1)}


def _documents(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (IDS[b, q] == IDS[b, k])


def _slope(h):  # type: ignore[no-untyped-def]
    return fg.exp2(-8.0 * (h + 1) / fg.heads)


def _read(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score + BIAS[h, k] + OF_KEYS[k]


def _counted(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score + _slope(h) * (k - q) + OF_KEYS[k]


def _both(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score + _slope(h) * (k - q) + BIAS[h, k]


def _of_keys(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score + OF_KEYS[k]


def _by_entry(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q + b


def operator(score: Any, mask: Any = _documents, **options: Any) -> Any:
    options = {"head_dim": 16, "dtype": "float32", **options}
    return fg.attention(fg.AttentionSpec(mask, score, **options))


OPERATORS = {
    "read": operator(_read, sink=SINK, name="heads_read"),
    "counted": operator(_counted, name="heads_counted"),
    "both": operator(_both, name="heads_both"),
    "dropped": operator(_of_keys, dropout=True, name="heads_dropped"),
}
"""How the head is used: to read captured tensors, as a number, both, by dropout alone."""


def _by_key_heads(index: Callable[[Any], Any]) -> Any:
    return operator(lambda s, b, h, q, k: s + OF_KEY_HEADS[index(h), k])


def mesh_of(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def problem(op: Any) -> dict[str, Tensor]:
    """q, k, v and what the operator captures, on the whole."""
    generator = torch.Generator().manual_seed(2)
    made = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    made["ids"] = torch.randint(2, (3, 24), generator=generator, dtype=torch.int32)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        made[name] = torch.tensor([0, 10, 24], dtype=torch.int32)
    made |= lists_of_whole()
    return {n: made[n] for n in ("q", "k", "v", *(x.name for x in op.spec.tensors))}


def spread(mesh: DeviceMesh, whole: Mapping[str, Tensor], *dims: Placements) -> dict[str, DTensor]:
    """The tensors as DTensors; floats require gradients."""
    places = {name: [dim.get(name, Replicate()) for dim in dims] for name in whole}
    return {
        name: distribute_tensor(x.detach(), mesh, places[name]).requires_grad_(x.requires_grad)
        for name, x in whole.items()
    }


def compare(
    op: Any,
    mesh: DeviceMesh,
    *dims: Placements,
    compiled: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fails unless results and gradients are those of one call.

    Returns:
        The placements of out and of the gradients by name, and the communication as "sent".
    """
    whole = {
        name: x.detach().clone().requires_grad_(x.is_floating_point())
        for name, x in (tensors or problem(op)).items()
    }
    everywhere = [Replicate()] * mesh.ndim
    drops = op.spec.dropout
    numbers = {**options, **({"dropout_p": 0.25} if drops else {})}
    given = spread(mesh, whole, *dims)
    more = {"rng": RNG} if drops else {}
    more_given = {name: distribute_tensor(x, mesh, everywhere) for name, x in more.items()}

    def call(**tensors: Any) -> Any:
        return op(**tensors, **numbers, return_lse=True)

    def loss(out: Any, lse: Any) -> Any:
        return out.square().sum() + lse.sum()

    expected = call(**whole, **more)
    loss(*expected).backward()
    results = call(**given, **more_given)
    with CommDebugMode() as sent:
        again = call(**given, **more_given)
        torch.autograd.backward(again, [torch.ones_like(x) for x in again])
    for x in given.values():
        x.grad = None
    if compiled:  # not in the mode, inside of which Dynamo compiles nothing
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
        results = call(**given, **more_given)
    loss(*results).backward()
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, atol=1e-5, rtol=1e-4)
    found = {"out": results[0].placements, "sent": sent.get_total_counts()}
    for name, x in whole.items():
        if x.requires_grad:
            gradient = given[name].grad
            found[name] = gradient.placements
            torch.testing.assert_close(gradient.full_tensor(), x.grad, atol=1e-4, rtol=1e-4)
    return found


def divided_by_heads() -> None:
    mesh, summed = mesh_of(), (Partial(),)
    for name, op in OPERATORS.items():
        own = {**BY_HEADS, "bias": Shard(0) if name == "read" else Replicate()}
        found = compare(op, mesh, own, compiled=name != "both")
        assert found["sent"] == 0
        assert found["out"] == found["q"] == found["k"] == (Shard(1),)
        assert found.get("of_keys", summed) == summed
        if "bias" in found:
            assert found["bias"] == ((Shard(0),) if name == "read" else summed)
    # What all ranks have is divided without communication.
    found = compare(OPERATORS["read"], mesh, BY_HEADS_OF_Q)
    assert (found["sent"], found["k"], found["bias"]) == (0, (Shard(1),), (Shard(0),))
    by_key_heads = {**BY_HEADS, "of_key_heads": Shard(0)}
    compare(_by_key_heads(lambda h: h // 2), mesh, by_key_heads)
    # Not by the call's number of query heads for each key head.
    for op in (_by_key_heads(lambda h: h // 3), _by_key_heads(lambda h: 0)):
        assert compare(op, mesh, BY_HEADS)["of_key_heads"] == summed


def divided_by_batch() -> None:
    """Also in parts of different lengths: a batch of 3."""
    mesh, summed = mesh_of(), (Partial(),)
    for name, op in OPERATORS.items():
        found = compare(op, mesh, BY_BATCH, compiled=name == "dropped")
        assert found["sent"] == 0
        assert found["out"] == found["q"] == found["v"] == (Shard(0),)
        assert {found[n] for n in ("bias", "of_keys", "sink") if n in found} == {summed}
    assert compare(OPERATORS["dropped"], mesh, {})["of_keys"] == (Replicate(),)
    op = operator(lambda score, b, h, q, k: score + OF_ENTRIES[b, k], name="entries_read")
    one = {name: x[:1] for name, x in problem(op).items()}
    for own in (BY_BATCH, {**BY_BATCH, "of_entries": Shard(0)}):  # a rank has none
        assert compare(op, mesh, own, tensors=one)["of_entries"] == (Shard(0),)


def divided_by_two_dimensions() -> None:
    mesh = mesh_of((2, 2))
    for dims in ((BY_BATCH, BY_HEADS), (BY_HEADS, BY_BATCH), (BY_HEADS, BY_HEADS), ({}, BY_HEADS)):
        for name, op in OPERATORS.items():
            whole = {"bias"} if name == "both" else set()
            own = [{n: p for n, p in dim.items() if n not in whole} for dim in dims]
            for compiled in (False, True):
                assert compare(op, mesh, *own, compiled=compiled)["sent"] == 0


def parts_of_wholes() -> None:
    """Calls on some heads of a whole; packed sequences; a layout, tensors of positions."""
    mesh, heads = mesh_of(), {name: Shard(1) for name in ("q", "k", "v")}
    compare(OPERATORS["counted"], mesh, BY_HEADS, h_offset=4, whole={"heads": 16})
    op = operator(_of_keys, None, name="of_keys")
    offset = torch.tensor([3, 0, 1])
    whole = {**problem(op), "of_keys": torch.randn(40)}
    for dims in (heads, {**BY_BATCH, "q_offset": Shard(0)}):
        compare(op, mesh, dims, tensors={**whole, "q_offset": offset})
    packed = operator(_counted, _before, packed=True)
    whole = {name: x[:1] if x.dim() == 4 else x for name, x in problem(packed).items()}
    compare(packed, mesh, heads, tensors=whole)
    whole = {name: problem(op)[name] for name in ("q", "k", "v", "of_keys")}
    generator = torch.Generator().manual_seed(5)
    blocks = fg.BlockSparse(block_q=16, block_k=16)
    sparse, counted = (operator(x, None, block_sparse=blocks) for x in (_of_keys, _counted))
    for shape in ((1, 8, 2, 2), (3, 1, 2, 2)):
        live = torch.rand(shape, generator=generator) < 0.7
        compare(sparse, mesh, heads, tensors=whole, layout=live)
        compare(counted, mesh, heads, tensors=whole, layout=live)
        compare(sparse, mesh, BY_BATCH, tensors=whole, layout=live)
    stripes = fg.BlockSparse(lambda b, h, i, j: (h + j) % 3 > 0, block_q=16, block_k=16)
    compare(operator(_of_keys, None, block_sparse=stripes), mesh, heads, tensors=whole)


def paged_caches() -> None:
    """Pages are on all ranks with some of their heads; sequences may be divided."""
    mesh = mesh_of()
    op = operator(_slope_alone, _before, paged=True)
    generator = torch.Generator().manual_seed(6)
    tensors = {
        "q": torch.randn(2, 4, 1, 16, generator=generator),
        "k": torch.randn(6, 2, 16, 16, generator=generator),
        "v": torch.randn(6, 2, 16, 16, generator=generator),
        "page_table": torch.tensor([[0, 2], [5, 1]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([20, 31], dtype=torch.int32),
    }
    heads = {name: Shard(1) for name in ("q", "k", "v")}
    entries = {name: Shard(0) for name in ("q", "page_table", "cache_seqlens")}
    for dims, mode in ((heads, torch.no_grad()), (entries, torch.inference_mode())):
        with mode:
            found = op(**spread(mesh, tensors, dims))
            torch.testing.assert_close(found.full_tensor(), op(**tensors))


def _before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


def _slope_alone(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score + _slope(h) * (k - q)


def torch_functions() -> None:
    """Compiled flex_attention, torch's and flashgen's, and torch's flash operator."""
    mesh = mesh_of()
    whole = {name: torch.randn(2, 4, 24, 16) for name in ("q", "k", "v")}
    for x in whole.values():
        dist.broadcast(x, 0)
    table = torch.linspace(-1, 1, 4 * 24).reshape(4, 24)

    def scored(bias: Any) -> Callable[..., Any]:
        return lambda score, b, h, q, k: score + bias[h, k] + (q - k) * torch.exp2(-1.0 * h)

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < 6 * (h + 1)

    blocks = flex_attention.create_block_mask(near, 2, 4, 24, 24, device="cpu")
    expected = fg.flex_attention(*whole.values(), score_mod=scored(table), block_mask=blocks)
    register_flex()
    check = flex_attention._validate_device
    flex_attention._validate_device = lambda *tensors: None  # it refuses gradients on the CPU
    try:
        functions = (fg.flex_attention, Shard(0)), (flex_attention.flex_attention, Shard(1))
        for function, own in functions:
            floats = {n: x.clone().requires_grad_() for n, x in whole.items()}
            given = spread(mesh, floats, dict.fromkeys(whole, own))
            bias = distribute_tensor(table, mesh, [Replicate()])
            call = torch.compile(function, fullgraph=True, backend="aot_eager")
            out = call(*given.values(), score_mod=scored(bias), block_mask=blocks)
            out.sum().backward()
            assert out.placements == given["q"].grad.placements == (own,)
            torch.testing.assert_close(out.full_tensor(), expected, atol=1e-5, rtol=1e-4)
    finally:
        flex_attention._validate_device = check
        unregister_flex()
    register("CPU")
    activate_flash_attention_impl("flashgen")
    try:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        halves = {n: x.to(torch.bfloat16).requires_grad_() for n, x in whole.items()}
        wanted = flash(*halves.values(), 0.0, True, False, scale=0.2)[0]
        given = spread(mesh, halves, dict.fromkeys(whole, Shard(1)))
        out = flash(*given.values(), 0.0, True, False, scale=0.2)[0]
        torch.testing.assert_close(out.full_tensor(), wanted)
    finally:
        restore_flash_attention_impl(_raise_warn=False)


def emulated() -> None:
    """The kernels of both code paths drop, and count heads, as in the whole."""
    mesh, everywhere = mesh_of(), [Replicate()]
    whole = {n: torch.randn(4, 4, 40, 64, dtype=torch.float16) for n in ("q", "k", "v")}
    for x in whole.values():
        dist.broadcast(x, 0)
    options: dict[str, Any] = {"head_dim": 64, "dtype": "float16"}
    dropped = operator(None, _before, dropout=True, name="dropped_in_16_bits", **options)
    counted = operator(_slope_alone, _before, name="counted_in_16_bits", **options)
    drops = {"dropout_p": 0.3}
    for op, axis, more in ((dropped, 0, drops), (dropped, 1, drops), (counted, 1, {})):
        floats = {n: x.clone().requires_grad_() for n, x in whole.items()}
        rng = {"rng": RNG} if more else {}
        spread_rng = {n: distribute_tensor(x, mesh, everywhere) for n, x in rng.items()}
        expected = op(**floats, **rng, **more)
        expected.float().square().sum().backward()
        for arch in ("sm_80", "sm_90a"):
            given = spread(mesh, floats, dict.fromkeys(whole, Shard(axis)))
            out = op(**given, **spread_rng, **more, backend="emulator", arch=arch)
            assert op.report.backend == "emulator"
            out.float().square().sum().backward()
            torch.testing.assert_close(out.full_tensor(), expected, atol=4e-3, rtol=4e-3)
            for name, x in floats.items():
                gradient = given[name].grad.full_tensor()
                torch.testing.assert_close(gradient, x.grad, atol=2e-2, rtol=2e-2)


def compiled_by_name() -> None:
    """A program that calls torch's operator would be cached for all ranks."""
    op = operator(None, None, name="compiled_by_name")
    given = spread(mesh_of(), problem(op), {name: Shard(1) for name in ("q", "k", "v")})
    overload = getattr(torch.ops.flashgen, op.name)
    torch.testing.assert_close(overload(**given)[0].full_tensor(), op(**problem(op)))
    call = torch.compile(lambda **tensors: overload(**tensors), backend="aot_eager")
    with pytest.raises(BackendCompilerFailed, match="which sets the mark"):
        call(**given)


def programs_of_the_rank() -> int:
    """How many programs AOTAutograd's cache kept; the results are compared."""
    from torch._dynamo.utils import counters

    op, mesh = OPERATORS["counted"], mesh_of()
    whole = problem(op)
    given = spread(mesh, whole, {name: Shard(1) for name in ("q", "k", "v")})
    found = torch.compile(op, fullgraph=True)(**given)
    torch.testing.assert_close(found.full_tensor(), op(**whole))
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 1
    return int(counters["aot_autograd"]["autograd_cache_saved"])


def refused() -> dict[str, str]:
    """The messages of calls that cannot be divided as their DTensors are."""
    mesh, everywhere = mesh_of(), [Replicate()]
    read, both, dropped = (OPERATORS[name] for name in ("read", "both", "dropped"))

    def message(op: Any, dims: Placements, compiled: bool = False, **changed: Any) -> str:
        given = {**spread(mesh, problem(op), dims), **changed}
        call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
        with pytest.raises(InputError) as caught:
            call(**given)
        return str(caught.value)

    sequence = {name: Shard(2) for name in ("q", "k", "v")}
    few = {name: x[:, :1] for name, x in problem(read).items() if name in ("k", "v")}
    few = {name: distribute_tensor(x, mesh, everywhere) for name, x in few.items()}
    three = {n: x[:3] for n, x in problem(read).items() if n in ("bias", "sink")}
    three["q"] = problem(read)["q"][:, :3]
    three = {n: distribute_tensor(x, mesh, [BY_HEADS[n]]) for n, x in three.items()}
    rng = distribute_tensor(RNG, mesh, everywhere)
    plain = [(n, x) for n, x in problem(read).items() if n in ("q", "k", "v")]
    packed = operator(_of_keys, None, packed=True)
    whole = {n: x[:1] if x.dim() == 4 else x for n, x in problem(packed).items()}
    entries = spread(mesh, whole, {name: Shard(0) for name in ("q", "k", "v")})
    with_lists = operator(
        _counted, None, block_sparse=fg.BlockSparse(block_q=2, block_k=4, heads="kv")
    )
    return {
        "sequence": message(read, sequence),
        "compiled sequence": message(read, sequence, compiled=True),
        "keys": message(read, {"k": Shard(2)}),
        "sum": message(read, {}, q=DTensor.from_local(torch.ones(SIZES["q"]), mesh, [Partial()])),
        "axes": message(read, {"q": Shard(0), "k": Shard(1)}),
        "captured": message(read, {**BY_HEADS, "bias": Shard(1)}),
        "whole captured": message(both, BY_HEADS),
        "captured by dropout": message(
            operator(_read, dropout=True), BY_HEADS, dropout_p=0.1, rng=rng
        ),
        "few key heads": message(read, BY_HEADS, **few),
        "odd heads": message(read, BY_HEADS, **few, **three),
        "plain captured": message(read, BY_HEADS, bias=torch.zeros(SIZES["bias"])),
        "plain operand": message(read, BY_HEADS, v=torch.zeros(SIZES["v"])),
        "plain queries": message(read, {"bias": Shard(0)}, **{n: x[:, :2] for n, x in plain}),
        "compiled plain queries": message(
            read, {"bias": Shard(0)}, compiled=True, **{n: x[:, :2] for n, x in plain}
        ),
        "no rng": message(dropped, BY_HEADS, dropout_p=0.1),
        "own rng": message(dropped, BY_HEADS, dropout_p=0.1, rng=RNG),
        "entry": message(operator(_of_keys, _by_entry), BY_BATCH),
        "dropped entries": message(operator(_both, dropout=True), BY_BATCH, dropout_p=0.1, rng=rng),
        "packed": message(packed, {}, **entries),
        "lists": message(with_lists, BY_HEADS),
    }


def lists_of_whole() -> dict[str, Tensor]:
    """Lists of each key head of the whole, for 24 queries in groups of 2."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.rand(3, 4, 12, 6, generator=generator).argsort(-1)[..., :3].int()
    return {"kv_num_blocks": torch.full((3, 4, 12), 3, dtype=torch.int32), "kv_indices": blocks}


def chosen_keys() -> None:
    """Lists of chosen keys are divided as other tensors of batch entries and key heads."""
    lists = fg.BlockSparse(block_q=2, block_k=4, heads="kv")
    op = operator(None, lambda b, h, q, k: k <= q, block_sparse=lists, name="with_lists")
    mesh = mesh_of()
    given = problem(op)
    whole = {name: given.pop(name).requires_grad_() for name in ("q", "k", "v")}
    request = fg.AuxRequest(entropy=True)
    wanted, of_rows = op(**whole, layout=fg.Layout.from_lists(*given.values()), return_aux=request)
    (wanted.square().sum() + of_rows.entropy.sin().sum()).backward()
    for placement in (Shard(0), Shard(1), Replicate()):
        parts: Any = spread(mesh, whole, dict.fromkeys(whole, placement))
        for places in (placement, Replicate()):
            of_parts = spread(mesh, given, dict.fromkeys(given, places))
            layout = fg.Layout.from_lists(*of_parts.values())
            out, aux = op(**parts, layout=layout, return_aux=request)
            torch.testing.assert_close(out.full_tensor(), wanted)
            (out.square().sum() + aux.entropy.sin().sum()).backward()
            for name, x in parts.items():
                torch.testing.assert_close(x.grad.full_tensor(), whole[name].grad)
                x.grad = None


def statistics() -> None:
    """Results beside the output, divided as the queries are."""
    statistics = {"of_heads": fg.sum_over_keys(lambda s, w, b, h, q, k: w * (h + 1))}
    request = fg.AuxRequest(lse=True, max_scores=True, entropy=True, key_mass=True, block_mass=8)
    mesh = mesh_of()
    parts: dict[str, Any]
    for op in (
        operator(_of_keys, name="with_statistics"),
        operator(_both, statistics=statistics, name="statistics_of_heads"),
    ):
        whole: dict[str, Any] = {
            n: x.requires_grad_(x.is_floating_point()) for n, x in problem(op).items()
        }
        wanted = op(**whole, return_aux=request)[1]
        wanted.entropy.square().sum().backward()
        for placements in (BY_HEADS, BY_BATCH):
            parts = spread(mesh, whole, {**placements, "bias": Replicate()})
            found = op(**parts, return_aux=request)[1]
            for name in request._fields:
                result = getattr(found, name).full_tensor()
                torch.testing.assert_close(result, getattr(wanted, name))
            for name, value in wanted.statistics.items():
                torch.testing.assert_close(found.statistics[name].full_tensor(), value)
            found.entropy.square().sum().backward()
            for name in ("q", "k"):
                torch.testing.assert_close(parts[name].grad.full_tensor(), whole[name].grad)
    op = operator(_read, sink=SINK, name="entropy_beside_a_sink")
    parts = {
        name: distribute_tensor(x, mesh, [Replicate()]).requires_grad_(x.is_floating_point())
        for name, x in problem(op).items()
    }
    with pytest.raises(InputError, match="has no gradients beside a sink"):
        op(**parts, return_aux=request)
    with torch.no_grad():
        op(**parts, return_aux=request)
