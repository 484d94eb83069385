"""Batch-invariant attention of ranks that have some of the heads each, on processes of a group."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashgen as fg
from flashgen.calls.runtime.programs import SpecProgram

Tensor = torch.Tensor

HEADS, HEADS_KV, D, PAGE, KEYS, SPLIT = 8, 4, 64, 16, 131, 96


def _near(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (q - k < 90)


def _biased(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return 20 * fg.tanh(score / 20) + fg.exp2(-8.0 * (h + 1) / fg.heads) * (k - q)


SPEC = fg.AttentionSpec(_near, _biased, head_dim=D, sink=True, name="of_ranks")
"""Its scores depend on the number of a head in the whole."""


def _attention(world: int, group: Any, how: dict[str, Any]) -> dict[str, Tensor]:
    """What the ranks of a group compute of their heads each, put together."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(1, HEADS, KEYS, D, generator=generator).half()
    k, v = torch.randn(2, 1, HEADS_KV, KEYS, D, generator=generator).half()
    q, k, v = (x.chunk(world, 1)[rank].contiguous() for x in (q, k, v))
    first = {"h_offset": rank * HEADS // world, "whole": {"heads": HEADS}}
    own: dict[str, Any] = {"sink": torch.linspace(-1, 2, HEADS), **first, **how}
    found: dict[str, Tensor] = {}

    cache = torch.zeros(2, 12, HEADS_KV // world, PAGE, D).half()
    table = torch.randperm(12, generator=generator)[None, : -(-KEYS // PAGE)].int()
    tables = {"page_table": table, "cache_seqlens": torch.tensor([KEYS], dtype=torch.int32)}
    fg.append_kv(k, v, *cache, **tables)
    serve = fg.attention(SPEC.replace(paged=True))
    found["decoded"] = serve(q[:, :, -1:], *cache, **tables, **own)

    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = fg.attention(SPEC)(q, k, v, **own)
    found["trained"] = out.detach()
    if how:  # the gradients of the CPU path depend on the number of heads
        out.float().square().sum().backward()
        found |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    whole = {}
    for name, x in found.items():
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous(), group)
        whole[name] = torch.cat(parts, 1)
    return whole


def _of_arch(arch: str | None) -> dict[int, dict[str, Tensor]]:
    """The results of 1, 2 and 4 of the ranks, as far as this rank is one of them."""
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    found = {}
    with pytest.MonkeyPatch.context() as patch, fg.batch_invariant_mode():
        if arch is not None:  # the keys have several splits
            patch.setattr(SpecProgram, "invariant_split", lambda self, target: SPLIT)
        for world in (1, 2, 4):
            group = dist.new_group(list(range(world)))
            if dist.get_rank() < world:
                found[world] = _attention(world, group, how)
    return found


def on_the_cpu() -> dict[int, dict[str, Tensor]]:
    return _of_arch(None)


def on_sm_80() -> dict[int, dict[str, Tensor]]:
    return _of_arch("sm_80")


def on_sm_90a() -> dict[int, dict[str, Tensor]]:
    return _of_arch("sm_90a")


def of_a_model() -> int:
    """A tensor parallel Llama of transformers: each layer's heads against one call for all heads.

    Returns the number of layers that were compared.
    """
    import transformers as hf
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from flashgen.integrations import transformers as integration
    from tests.support.transformers_models import TEXT

    integration.register()
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **{**TEXT, "num_attention_heads": HEADS, "num_key_value_heads": HEADS_KV}
    )
    world = dist.get_world_size()
    os.environ["WORLD_SIZE"] = str(world)  # as torchrun sets it
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        if dist.get_rank() == 0:
            hf.LlamaForCausalLM(config).save_pretrained(names[0])
        dist.barrier()
        plan = {"tp_plan": "auto"} if world > 1 else {}
        model = hf.AutoModelForCausalLM.from_pretrained(
            names[0], attn_implementation="fg", dtype=torch.float32, **plan
        ).eval()
        dist.barrier()
    calls: list[tuple[Any, ...]] = []
    attend = ALL_ATTENTION_FUNCTIONS["fg"]

    def recorded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> Any:
        out = attend(module, q, k, v, mask, **rest)
        calls.append((module, (q, k, v), mask, rest, out[0]))
        return out

    ids = torch.randint(3, 97, (2, 50), generator=torch.Generator().manual_seed(5))
    with pytest.MonkeyPatch.context() as patch, fg.batch_invariant_mode(), torch.no_grad():
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "fg", recorded)
        model(ids, use_cache=False)
        for module, rows, mask, rest, out in calls:
            assert out.shape[2] == HEADS // world
            whole = []
            for x in rows:
                parts = [torch.empty_like(x.contiguous()) for _ in range(world)]
                dist.all_gather(parts, x.contiguous())
                whole.append(torch.cat(parts, 1))
            expected = attend(module, *whole, mask, **rest)[0]
            own = slice(*(HEADS // world * (dist.get_rank() + end) for end in (0, 1)))
            assert torch.equal(out, expected[:, :, own])
    return len(calls)
