"""Models of transformers whose parameters are DTensors, against one process.

Every rank computes the whole by itself, and compares: tensor parallel by the plan of the model,
FSDP2, and both.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from tests.support.transformers_models import tiny

Tensor = torch.Tensor

LENGTH = 24


def inputs() -> dict[str, Tensor]:
    """Ids, labels and left padding of four sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 97, (4, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, :5] = 0  # as many in each half of the batch
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def loaded(name: str, **options: Any) -> tuple[Any, Any]:
    """The model in one process, and as ``from_pretrained`` loads it with the options."""
    one = tiny(name).model("fg")
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())  # as torchrun sets it
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        one.save_pretrained(names[0])  # rank 0 does
        dist.barrier()
        model = hf.AutoModelForCausalLM.from_pretrained(
            names[0], attn_implementation="fg", dtype=torch.float32, **options
        )
        dist.barrier()
    return one, model.eval()


def compare(one: Any, model: Any, parts: int = 1, part: int = 0) -> float:
    """The difference of the losses; fails where it or a gradient's is too large.

    Args:
        parts: the parts of the batch, which FSDP averages over; this rank computes ``part``.
    """
    batch = inputs()
    expected = one(**batch, use_cache=False).loss
    expected.backward()
    loss = model(**{n: x.chunk(parts)[part] for n, x in batch.items()}, use_cache=False).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    found = dict(model.named_parameters())
    for name, parameter in one.named_parameters():
        gradient = found[name].grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, atol=2e-6, rtol=2e-4)
    difference = abs(float(mean) - float(expected.detach()))
    assert difference <= 1e-5, difference
    return difference


def is_divided(model: Any, heads: int) -> None:
    """Fails unless the attention of the last call had some of the heads."""
    from flashgen.integrations import transformers as integration

    projection = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(projection, DTensor)
    assert all(op.report is not None for op in integration.operators())
    assert projection.to_local().shape[0] == heads * 16


def tensor_parallel() -> float:
    """``tp_plan="auto"``: heads of Llama, of Gemma 2's windows and softcaps, of Qwen 3's norms."""
    differences = []
    for name in ("llama", "gemma2", "qwen3"):
        one, model = loaded(name, tp_plan="auto")
        differences.append(compare(one, model))
        is_divided(model, 2)
    return max(differences)


def generated() -> float:
    one, model = loaded("llama", tp_plan="auto")
    batch = inputs()
    given = {n: batch[n] for n in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(one.generate(**given, **options), model.generate(**given, **options))
    return 0.0


def fsdp() -> float:
    """transformers' own FSDP2, then torch's, which shards a learned sink too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    one, model = loaded("llama", distributed_config=DistributedConfig(fsdp_size=world))
    differences = [compare(one, model, world, rank)]
    one, model = (tiny("gpt_oss").model("fg") for _ in range(2))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return max(*differences, compare(one, model, world, rank))


def both() -> float:
    """Tensor parallel on two ranks, FSDP2 over two such groups."""
    config = DistributedConfig(tp_size=2, fsdp_size=2)
    one, model = loaded("gemma2", distributed_config=config)
    difference = compare(one, model, 2, dist.get_rank() // 2)
    is_divided(model, 1)
    return difference
