"""Hugging Face transformers: every model that dispatches its attention runs on flashgen's kernels.

::

    from flashgen.integrations import transformers

    transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="fg")

A model describes its mask as a Python function of positions, and its score by arguments of the
attention function (softcap, sinks, a position bias). Both become one spec, traced once for each
kind of mask, and the kernels of that spec compute the attention of all layers that share it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flashgen.calls.ops import Attention
from flashgen.shared.errors import InputError, called_by_users

if TYPE_CHECKING:
    from flashgen.frontends.transformers.ranks import Ranks

__all__ = ["context_parallel", "operators", "register"]

_RESERVED = ("eager", "sdpa", "flex_attention")


@called_by_users()
def register(name: str = "fg") -> None:
    """Makes flashgen's attention and its masks available as ``attn_implementation=name``.

    Args:
        name: the name for configurations. A name that contains "flash" is refused, because
            transformers takes it for one of its own FlashAttention backends.

    Raises:
        InputError: the name cannot be used, or transformers is missing or older than 5.
    """
    if not isinstance(name, str) or not name or name in _RESERVED or "|" in name:
        _refuse_name("transformers has its own attention of this name", name)
    if "flash" in name:
        _refuse_name("transformers takes every name with 'flash' for FlashAttention", name)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise InputError(
            "the integration needs transformers 5 or newer",
            where="flashgen.integrations.transformers.register",
            numbers=str(error),
            way_out='pip install "transformers>=5"',
        ) from error

    from flashgen.frontends.transformers.attention import attention
    from flashgen.frontends.transformers.masks import make_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)


@called_by_users()
def context_parallel(
    group: Any = None, *, method: str = "ring", shard: Any = "head_tail"
) -> AbstractContextManager[Ranks]:
    """A context in which each rank of a group has a part of the sequences of a model.

    ::

        with context_parallel(mesh["cp"]) as ranks:
            loss = model(**ranks.own(input_ids=ids, labels=ids)).loss
        loss.backward()

    ``own`` takes the whole batch, which all ranks of the group have: input_ids, attention_mask,
    position_ids, token_type_ids and the labels of a causal language model. The mean over the ranks
    of the losses and of the gradients, which FSDP and DDP compute, is that of one process.

    Args:
        group: as for `flashgen.distributed.attention`.
        method: as for `flashgen.distributed.attention`.
        shard: as for `flashgen.distributed.attention`.

    Raises:
        InputError: there is no such group, method or sharding; in the context also for whatever
            a part of a sequence cannot be computed with.
    """
    from flashgen.frontends.transformers.ranks import context_parallel as entered

    return entered(group, method=method, shard=shard)


@called_by_users()
def operators() -> tuple[Attention, ...]:
    """The operators that models use so far, in the order of their first use.

    ``operator.spec`` is the spec of a kind of layer, and ``operator.report`` describes its last
    call: backend, kernel, tile and counters.
    """
    from flashgen.frontends.transformers.layers import operators as made

    return tuple(vars(made).values())


def _refuse_name(what: str, name: object) -> None:
    raise InputError(
        what,
        where="argument name of flashgen.integrations.transformers.register",
        numbers=f"given {name!r}",
        way_out='register("fg"), and attn_implementation="fg"',
    )
