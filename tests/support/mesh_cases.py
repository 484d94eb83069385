"""Cases of context parallelism beside FSDP2 and tensor parallelism, on a DeviceMesh.

Every rank trains the same small transformer alone, on the whole sequences, and compares.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashgen as fg
from flashgen import distributed
from flashgen.frontends.distributed.sharding import METHODS, sharding_of
from tests.support.distributed_cases import causal_spec, rich_spec

Tensor = torch.Tensor

BATCH, SEQ, WIDTH, HEADS, HEADS_KV, DIM, WORDS = 4, 64, 32, 4, 2, 16, 19
LARGEST_DIFFERENCE = 1e-5


class Layer(nn.Module):
    """Attention with grouped queries; ``learned``: a table of the distance and a sink."""

    def __init__(self, learned: bool, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * DIM)
        self.wk = nn.Linear(WIDTH, HEADS_KV * DIM)
        self.wv = nn.Linear(WIDTH, HEADS_KV * DIM)
        self.wo = nn.Linear(HEADS * DIM, WIDTH)
        self.op = fg.attention(rich_spec() if learned else causal_spec())
        self.table = nn.Parameter(torch.randn(HEADS, 32)) if learned else None
        self.sink = nn.Parameter(torch.randn(HEADS)) if learned else None
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(2, (-1, DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        learned = {} if self.table is None else {"table": self.table, "sink": self.sink}
        if self.options is None:
            out = self.op(q, k, v, **learned)
        else:
            out = distributed.attention(self.op, q, k, v, **self.options, **learned)
        return x + self.wo(out.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Two layers; the same weights each time. ``options``: of distributed calls."""

    def __init__(self, learned: bool = False, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer(learned, options) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, places: Tensor, following: Tensor) -> Tensor:
        """The mean loss at the given positions."""
        x = self.embedding(ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Words, their positions and the words that follow; the same on every rank."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(WORDS, (BATCH, SEQ + 1), generator=generator)
    return ids[:, :-1].clone(), torch.arange(SEQ).expand(BATCH, SEQ).clone(), ids[:, 1:].clone()


def own(whole: tuple[Tensor, ...], mesh: Any, shard: str = "head_tail") -> list[Tensor]:
    """The part of a rank: its sequences of the dimension dp, and its positions of cp."""
    cp = mesh["cp"]
    sharding = sharding_of(shard, cp.size(), SEQ // cp.size())
    chunks = sharding.chunks_by_rank[cp.get_local_rank()]
    parts = whole
    if "dp" in mesh.mesh_dim_names:
        dp = mesh["dp"]
        parts = tuple(x.chunk(dp.size())[dp.get_local_rank()] for x in whole)
    return [torch.cat([x[:, chunk.start : chunk.stop] for chunk in chunks], 1) for x in parts]


def alone(learned: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one process."""
    model = Transformer(learned)
    loss = model(*batch())
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def compare(loss: Tensor, found: dict[str, Tensor], learned: bool, group: Any = None) -> float:
    """The difference of the losses; fails where it or a gradient's is too large.

    Args:
        loss: of this rank, whose mean over the ranks is that of one process.
    """
    expected, gradients = alone(learned)
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name],
            gradient,
            atol=LARGEST_DIFFERENCE,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    difference = abs(float(mean) - expected)
    assert difference <= LARGEST_DIFFERENCE, difference
    return difference


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


def fsdp_over_cp() -> float:
    """Parameters are sharded over dp and cp together; FSDP averages all gradients."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    every = init_device_mesh("cpu", (world,))
    calls = [(every, method) for method in METHODS]
    if world > 2:  # replicated over dp, sharded over cp
        calls.append((mesh, "ring"))
    differences = []
    for sharded, method in calls:
        options = {"group": mesh["cp"], "method": method, "shard": "head_tail"}
        model = Transformer(True, {**options, "reduce_learned": False})
        for layer in model.layers:
            fully_shard(layer, mesh=sharded)
        fully_shard(model, mesh=sharded)
        loss = model(*own(batch(), mesh))
        loss.backward()
        differences.append(compare(loss, whole_gradients(model), True))
    return max(differences)


def ddp() -> float:
    """DDP averages all gradients, as FSDP does."""
    model = Transformer(True, {"shard": "head_tail", "reduce_learned": False})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    averaged = nn.parallel.DistributedDataParallel(model)
    loss = averaged(*own(batch(), mesh))
    loss.backward()
    return compare(loss, whole_gradients(model), True)


def fsdp_over_dp_alone() -> float:
    """Parameters are sharded over dp; the user averages over cp all but the learned tensors.

    Those have the sum over cp on each rank already, of the losses of the ranks.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    options = {"group": mesh["cp"], "method": "ring", "shard": "head_tail"}
    model = Transformer(True, options)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    loss = model(*own(batch(), mesh))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        local = parameter.grad.to_local()
        if not name.endswith(("table", "sink")):
            dist.all_reduce(local, group=mesh["cp"].get_group())
        local /= mesh["cp"].size()
    return compare(loss, whole_gradients(model), True)


def tensor_parallel_heads() -> float:
    """Each rank of tp has some heads, with their rows of learned tensors, beside cp."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("cp", "tp"))
    tp = mesh["tp"]
    differences = []
    for method in METHODS:
        options = {"group": mesh["cp"], "method": method, "shard": "head_tail"}
        if method == "all_to_all" and HEADS_KV // tp.size() % mesh["cp"].size():
            continue
        model = Transformer(True, {**options, "reduce_learned": False})
        plan = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, tp, {**plan, "wo": RowwiseParallel()})
            if layer.table is not None:  # heads count from 0 on every rank
                layer.table = nn.Parameter(
                    layer.table.detach().chunk(tp.size())[tp.get_local_rank()]
                )
                layer.sink = nn.Parameter(layer.sink.detach().chunk(tp.size())[tp.get_local_rank()])
        loss = model(*own(batch(), mesh))
        loss.backward()
        found: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            if name.endswith(("table", "sink")):
                gradient = DTensor.from_local(gradient, tp, [Shard(0)])
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            dist.all_reduce(gradient, group=mesh["cp"].get_group())
            found[name] = gradient / mesh["cp"].size()
        differences.append(compare(loss, found, True))
    return max(differences)


def buffers_of_torch() -> float:
    """torch's context_parallel shards the inputs, head and tail; flashgen computes attention."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model = Transformer(True, {"group": mesh, "shard": "head_tail", "reduce_learned": False})
    buffers = list(batch())
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        assert buffers[0].shape == (BATCH, SEQ // world)
        loss = model(*buffers)
        loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    return compare(loss, whole_gradients(model), True)


def what_is_refused() -> list[str]:
    """The messages for DTensors, and for a mesh of two dimensions."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    op = fg.attention(causal_spec())
    x = torch.zeros(1, 2, 32, DIM)
    parts = [DTensor.from_local(x, mesh["cp"], [Shard(2)]) for _ in range(3)]
    unnamed = DTensor.from_local(x, init_device_mesh("cpu", (world,)), [Shard(2)])
    rich, table = fg.attention(rich_spec()), torch.zeros(HEADS, 32)
    tables = {"table": distribute_tensor(table, mesh["cp"], [Replicate()]), "sink": torch.zeros(4)}
    q = torch.zeros(1, HEADS, 32, DIM)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (op, (parts[0], parts[1], parts[2]), {"group": mesh["cp"]}),
        (op, (x, x, unnamed), {"group": mesh["cp"]}),
        (rich, (q, q, q), {"group": mesh["cp"], **tables}),
        (op, (x, x, x), {"group": mesh}),
    ]
    messages = []
    for called, operands, options in calls:
        try:
            distributed.attention(called, *operands, **options)
        except fg.InputError as error:
            messages.append(str(error))
    return messages


def learned_gradients_once() -> float:
    """The gradients of learned tensors against one call's, by each method.

    With ``reduce_learned=False`` each rank has its own part of them; those of tensors that are
    divided like the keys are complete.
    """
    distance = fg.Tensor("distance", ("length",), "float32", grad=True)
    of_keys = fg.Tensor("of_keys", ("seq_k",), "float32", grad=True)
    spec = fg.AttentionSpec(
        lambda b, h, q, k: k <= q,
        lambda score, b, h, q, k: score + distance[fg.minimum(q - k, 31)] + of_keys[k],
        head_dim=DIM,
        dtype="float32",
        name="learned",
    )
    op, world, rank = fg.attention(spec), dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    qkv = [torch.randn(1, HEADS, 32, DIM, generator=generator) for _ in range(3)]
    values = {name: torch.randn(32, generator=generator) for name in ("distance", "of_keys")}
    rows = slice(rank * 32 // world, (rank + 1) * 32 // world)

    def gradients(part: slice, call: Any, **options: Any) -> list[Tensor]:
        q, k, v = (x[:, :, part] for x in qkv)
        learned = {name: x.clone().requires_grad_() for name, x in values.items()}
        if part != slice(None):
            learned["of_keys"] = values["of_keys"][part].clone().requires_grad_()
        call(q, k, v, **options, **learned).square().sum().backward()
        return [x.grad for x in learned.values() if x.grad is not None]

    whole = gradients(slice(None), op)
    differences = []
    for method in ("ring", "all_gather", "all_to_all"):
        for reduce_learned in (True, False):
            options = {"method": method, "reduce_learned": reduce_learned}
            call = functools.partial(distributed.attention, op, sharded={"of_keys": 0}, **options)
            shared, own_keys = gradients(rows, call)
            if not reduce_learned:
                dist.all_reduce(shared)
            differences.append(float((shared - whole[0]).abs().max() / whole[0].abs().max()))
            differences.append(
                float((own_keys - whole[1][rows]).abs().max() / whole[1].abs().max())
            )
    return max(differences)
