"""Models of transformers whose sequences lie on several ranks, against one process.

Every rank computes the whole by itself, and compares.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel as torch_context
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    create_bidirectional_mask,
    or_masks,
)

import flashgen as fg
from flashgen.frontends.transformers.attention import attention
from flashgen.frontends.transformers.masks import make_mask
from flashgen.integrations import transformers as integration
from tests.support.transformers_models import TEXT, tiny

Tensor = torch.Tensor

BATCH, LENGTH = 2, 128


def inputs() -> dict[str, Tensor]:
    """Ids and labels, of which some are ignored: more on one rank than on others."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(3, 97, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, : LENGTH // 3] = -100
    return {"input_ids": ids, "labels": labels}


def padded() -> dict[str, Tensor]:
    given = inputs()
    mask = torch.ones_like(given["input_ids"])
    mask[1, : LENGTH // 5] = 0
    return {**given, "attention_mask": mask}


def packed() -> dict[str, Tensor]:
    """Sequences that begin where a rank's chunk does, and elsewhere."""
    lengths = (LENGTH // 4, LENGTH // 4 + 5, LENGTH // 2 - 5), (LENGTH // 2, LENGTH // 2)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {**inputs(), "position_ids": positions}


def compare(
    name: str, batch: dict[str, Tensor], fsdp: bool = False, layers: int = 2, **options: Any
) -> float:
    """The difference of the losses; fails where it or a gradient's is too large."""
    one = tiny(name).model("fg", layers=layers)
    expected = one(**batch, use_cache=False).loss
    expected.backward()
    model = tiny(name).model("fg", layers=layers)
    if options.pop("checkpointing", False):
        model.train()
        model.gradient_checkpointing_enable()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    if fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    with integration.context_parallel(mesh, **options) as ranks:
        loss = model(**ranks.own(**batch)).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    wanted = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
    for parameter_name, parameter in model.named_parameters():
        found = parameter.grad
        if found is None:  # experts without a token on this rank
            found = torch.zeros_like(parameter)
        if isinstance(found, DTensor):
            found = found.full_tensor()
        else:
            dist.all_reduce(found)
            found /= dist.get_world_size()
        gradient = wanted.get(parameter_name, torch.zeros(()))
        largest = float(gradient.abs().max())
        difference = float((found - gradient).abs().max())
        assert difference <= 2e-4 * largest + 1e-6, (
            f"{name} {parameter_name}: {difference}, {largest}"
        )
    difference = abs(float(mean) - float(expected.detach()))
    assert difference <= 1e-4, difference
    return difference


def a_causal_model() -> float:
    return compare("llama", inputs())


def windows_and_sinks() -> float:
    return compare("gpt_oss", padded())


def windows_and_softcaps() -> float:
    return compare("gemma2", padded(), method="all_gather", shard="contiguous")


def packed_sequences() -> float:
    """A sequence of the second row is what rank 0 of 2 owns: it alone could not know that."""
    return compare("mistral", packed(), method="all_gather", shard="contiguous")


def packed_sequences_in_two_chunks() -> float:
    return compare("mistral", packed())


def heads_exchanged() -> float:
    return compare("gpt_oss", inputs(), method="all_to_all")


def fsdp_and_sinks() -> float:
    return compare("gpt_oss", inputs(), fsdp=True, checkpointing=True)


def dropped() -> float:
    """With dropout, the ranks draw what one process draws."""
    losses = []
    for parallel in (False, True):
        model = tiny("llama").model("fg", dropout=0.2).train()
        torch.manual_seed(8 if not parallel else 8 + dist.get_rank())
        if not parallel:
            losses.append(model(**inputs()).loss.detach())
            continue
        with integration.context_parallel(method="all_gather") as ranks:
            losses.append(model(**ranks.own(**inputs())).loss.detach())
    dist.all_reduce(losses[1])
    return abs(float(losses[0]) - float(losses[1]) / dist.get_world_size())


def compiled() -> list[float]:
    """The sums of logits of one process, and of a compiled model before and in the context."""
    model, given = tiny("llama").model("fg", layers=1), {"input_ids": inputs()["input_ids"]}
    quick = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = [quick(**given, use_cache=False).logits.sum()]
        with integration.context_parallel() as ranks:
            for each in (model, quick):
                found.append(each(**ranks.own(**given), use_cache=False).logits.sum())
    for part in found[1:]:
        dist.all_reduce(part)
    return [float(x) for x in found]


def what_is_refused() -> dict[str, str]:
    """The messages, by what is tried."""
    ids = inputs()["input_ids"]
    whole = {"input_ids": ids}
    llama = tiny("llama").model("fg", layers=1)

    def tried(call: Any = None, given: Any = whole, **options: Any) -> str:
        try:
            with integration.context_parallel(**options) as ranks, torch.no_grad():
                own = ranks.own(**given)
                if call is not None:
                    call(own)
        except fg.InputError as error:
            return str(error)
        return "nothing is refused"

    def mask(own: dict[str, Tensor], function: Any = causal_mask_function, **config: Any) -> Any:
        rows, keep = own["input_ids"].shape[1], own["attention_mask"]
        options = {"config": hf.LlamaConfig(**{**TEXT, **config}), "mask_function": function}
        return make_mask(BATCH, rows, rows, attention_mask=keep, **options)

    def layer(own: dict[str, Tensor], given: Any, **options: Any) -> None:
        rows = own["input_ids"].shape[1]
        x = torch.zeros(BATCH, 2, rows, 16)
        attention(torch.nn.Module(), x, x, x, given, **options)

    def in_context_of_torch() -> str:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        part = inputs()["input_ids"]
        try:
            with torch_context(mesh, buffers=[part], buffer_seq_dims=[1]), torch.no_grad():
                llama(part)
        except fg.InputError as error:
            return str(error)
        return "nothing is refused"

    rows = LENGTH // dist.get_world_size()
    bias = torch.zeros(1, 2, rows, rows)
    images = or_masks(causal_mask_function, blockwise_overlay(torch.zeros(BATCH, rows)))
    chunks = chunked_causal_mask_function(16, torch.zeros(BATCH, dtype=torch.int64))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    kinds = ["linear_attention", "full_attention"]

    def bidirectional(own: dict[str, Tensor]) -> Any:
        part, keep = own["input_ids"].float()[..., None], own["attention_mask"]
        config = hf.BertConfig(attn_implementation="fg")
        return create_bidirectional_mask(config, part, keep)

    return {
        "method": tried(method="rings"),
        "shard": tried(shard="tail"),
        "length": tried(given={"input_ids": ids[:, :-1]}),
        "batches": tried(given={"input_ids": ids + dist.get_rank()}),
        "names": tried(given={**whole, "pixel_values": ids}),
        "shape": tried(given={**whole, "labels": ids[:, 1:]}),
        "no mask": tried(lambda own: llama(own["input_ids"])),
        "whole": tried(lambda own: llama(**padded())),
        "cache": tried(
            lambda own: make_mask(BATCH, 1, rows, rows, 0, causal_mask_function, ids[:, :rows])
        ),
        "tensor": tried(lambda own: layer(own, bias)),
        "none": tried(lambda own: layer(own, None, is_causal=True)),
        "bias": tried(lambda own: layer(own, mask(own), position_bias=bias)),
        "added": tried(lambda own: layer(own, mask(own) + bias)),
        "context of torch": in_context_of_torch(),
        "rope": tried(lambda own: mask(own, rope_parameters=rope)),
        "encoder": tried(lambda own: mask(own, is_encoder_decoder=True)),
        "state": tried(lambda own: mask(own, layer_types=kinds)),
        "images": tried(lambda own: mask(own, images)),
        "packed": tried(bidirectional, packed()),
        "chunks": tried(lambda own: mask(own, chunks), padded()),
        "chunks without padding": tried(lambda own: layer(own, mask(own, chunks))),
    }
