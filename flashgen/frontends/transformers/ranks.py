"""Models whose sequences lie on several ranks: each rank computes with its own positions.

::

    with context_parallel(mesh["cp"], method="ring", shard="head_tail") as ranks:
        loss = model(**ranks.own(input_ids=ids, labels=ids)).loss
    loss.backward()

A model makes its masks from the inputs that it gets, and these are a part. Therefore `own` keeps
what masks must know of the whole batch: its length, its padding and where packed sequences begin.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from transformers.masking_utils import find_packed_sequence_indices

from flashgen.calls.ops import Attention
from flashgen.frontends import distributed
from flashgen.frontends.distributed.exchange import Exchange, group_of
from flashgen.frontends.distributed.sharding import check_method, sharding_of
from flashgen.frontends.transformers.layers import MaskFunction, closure, record_mask
from flashgen.frontends.transformers.packed import packed
from flashgen.shared.errors import InputError

Tensor = torch.Tensor

INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels")
"""The inputs that `Ranks.own` takes, each [batch, positions]."""

IGNORED = -100
"""The label of a position that has no part in the loss, as in transformers."""

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_ROPES_OF_LENGTH = ("dynamic", "longrope")


class Whole(NamedTuple):
    """The batch of a forward pass, as the masks of each rank read it.

    Attributes:
        rows: the number of positions that this rank has.
        seq: the number of all positions.
        positions: [batch, seq], as rotary embeddings count them.
        padding: bool [batch, seq], False for padding; None without an attention mask.
        packed: [batch, seq], the number of each position's sequence; None for one sequence a row.
    """

    rows: int
    seq: int
    positions: Tensor
    padding: Tensor | None
    packed: Tensor | None


class Ranks:
    """The ranks over which `context_parallel` divides sequences."""

    def __init__(self, group: Any, method: str, shard: Any) -> None:
        self.exchange = Exchange(group_of(group, _WHERE))
        check_method(method, _WHERE)
        sharding_of(shard, self.exchange.world, 2, _WHERE)  # refuses what no sequence can have
        self.method = method
        self.shard = shard
        self.whole: Whole | None = None

    def own(self, **inputs: Tensor) -> dict[str, Tensor]:
        """This rank's part of a batch that all ranks have, for the next forward pass.

        Position ids are those of the whole, 0, 1, ... unless they are given. Labels, those of a
        causal language model, are shifted before they are divided, and ``num_items_in_batch``
        makes the mean of the ranks' losses, and of their gradients, that of one process.

        Args:
            inputs: input_ids and any others of `INPUTS`, each [batch, positions].

        Raises:
            InputError: an input is invalid, cannot be divided, or differs between ranks.
        """
        self._check(inputs)
        ids = inputs["input_ids"]
        batch, seq = ids.shape
        world, rank = self.exchange.world, self.exchange.rank
        divisor = 2 * world if self.shard == "head_tail" else world
        even = seq - seq % divisor if isinstance(self.shard, str) else seq
        sharding = sharding_of(self.shard, world, even // world)
        if sharding.length != seq:
            _refuse(
                "the sequence cannot be divided like this",
                "argument input_ids",
                f"{seq} positions, {world} ranks, shard {self.shard!r:.100}",
                f"{-(-seq // divisor) * divisor} positions, the last ones padding"
                if isinstance(self.shard, str)
                else f"{sharding.length} positions, those of the chunks",
            )
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(seq, device=ids.device)[None]
        positions = positions.expand(batch, seq)
        padding = inputs.get("attention_mask")
        chunks = sharding.chunks_by_rank[rank]

        def part(x: Tensor) -> Tensor:
            return torch.cat([x[:, chunk.start : chunk.stop] for chunk in chunks], 1)

        # With a mask, transformers looks for no packed sequences in the positions of the part.
        mask = torch.ones_like(ids) if padding is None else padding
        whole_inputs = {**inputs, "position_ids": positions, "attention_mask": mask}
        if "labels" in inputs:
            shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
            whole_inputs["shift_labels"] = shifted
        part_inputs = {name: part(x) for name, x in whole_inputs.items()}
        if "labels" in inputs:
            part_inputs["num_items_in_batch"] = (shifted != IGNORED).sum() / world
        packed = find_packed_sequence_indices(positions) if padding is None else None
        keep = None if padding is None else padding.bool()
        self.whole = Whole(sharding.rows(rank), seq, positions, keep, packed)
        return part_inputs

    def _check(self, inputs: Mapping[str, Any]) -> None:
        unknown = [name for name in inputs if name not in INPUTS]
        if unknown:
            _refuse(
                "it is not known how this input is divided",
                f"argument {unknown[0]}",
                f"known: {', '.join(INPUTS)}",
                "the model's other arguments, given to the model itself, if all ranks have them",
            )
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            _refuse("a batch has input ids", "argument input_ids", f"{shape}", "[batch, positions]")
        for name, x in inputs.items():
            broadcast = name == "position_ids" and tuple(x.shape) == (1, ids.shape[1])
            if tuple(x.shape) != tuple(ids.shape) and not broadcast:
                numbers = f"{tuple(x.shape)}; input_ids have {tuple(ids.shape)}"
                _refuse(
                    "an input has an element for each position of the whole",
                    f"argument {name}",
                    numbers,
                    "[batch, positions], the same on all ranks",
                )
        sums = {n: zlib.crc32(x.contiguous().cpu().numpy().tobytes()) for n, x in inputs.items()}
        all_sums = self.exchange.values_of_ranks(sums, "comparison of the batches")
        other = next((rank for rank, x in enumerate(all_sums) if x != sums), None)
        if other is not None:
            names = [n for n in (*sums, *all_sums[other]) if sums.get(n) != all_sums[other].get(n)]
            _refuse(
                "the ranks of a group have different batches",
                f"argument {names[0]}",
                f"on rank {self.exchange.rank} and on rank {other}; {len(all_sums)} ranks "
                "share the positions of one batch",
                "the same batch on all ranks of the group, such as a data loader that is seeded "
                "by the data-parallel rank alone",
            )

    def mask_of_whole(
        self,
        mask_function: MaskFunction,
        attention_mask: Tensor | None,
        sizes: tuple[int, int, int | Tensor, int],
        config: Any,
        packs: bool,
    ) -> tuple[MaskFunction, Whole]:
        """The mask function for all positions, from that which a model makes for a part.

        Args:
            attention_mask: of the part; `own` always gives one.
            sizes: numbers of queries and keys, and the positions of the first ones.
            packs: whether packed sequences are recognised by their positions.

        Raises:
            InputError: the mask or the model depends on what a rank does not have.
        """
        _check_config(config)
        whole = self.whole
        if whole is None or attention_mask is None or attention_mask.shape[1] != whole.rows:
            _refuse(
                "the model has other inputs than those that the rank owns",
                "inputs of the model",
                "no attention_mask"
                if attention_mask is None
                else f"attention_mask {tuple(attention_mask.shape)}; the rank owns "
                f"{'nothing yet' if whole is None else f'{whole.rows} positions'}",
                "model(**ranks.own(input_ids=ids)) for each forward pass, and no generation",
            )
        if isinstance(sizes[2], Tensor) or sizes != (whole.rows, whole.rows, 0, 0):
            _refuse(
                "a cache and cross-attention cannot be divided over ranks yet",
                "inputs of the model",
                f"{sizes[0]} queries and {sizes[1]} keys of {whole.rows} positions",
                "generation and encoder-decoder models outside of context_parallel",
            )
        names = {id(tensor): name for name, tensor in closure(mask_function, Tensor)}
        for tensor in record_mask(mask_function, whole.positions.device).tensors:
            name = names.get(id(tensor), "a tensor")
            # Without padding it is 0 on every rank.
            if name != "left_padding" or whole.padding is not None:
                _refuse(
                    "a mask reads a tensor of which the rank has a part",
                    "mask of the model",
                    f"{name} {tuple(tensor.shape)}, beside padding and packed sequences",
                )
        if whole.packed is None:
            return mask_function, whole
        if not packs:
            _refuse(
                "the model's mask does not keep packed sequences apart",
                "argument position_ids of own",
                "positions that start again within a row, and a mask in both directions",
                "each sequence in a row of its own, with an attention_mask",
            )
        return packed(mask_function, whole.positions, whole.packed), whole

    def attention(self, op: Attention, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
        """Attention of this rank's queries; gradients of sinks are left to the user's reduction."""
        group, method, shard = self.exchange.group, self.method, self.shard
        options = {"group": group, "method": method, "shard": shard, "reduce_learned": False}
        return distributed.attention(op, q, k, v, **options, **call)


_entered: list[Ranks] = []  # a list, because torch.compile cannot trace a ContextVar


def current() -> Ranks | None:
    """The ranks of the context that was entered last."""
    return _entered[-1] if _entered else None


@contextlib.contextmanager
def context_parallel(
    group: Any = None, *, method: str = "ring", shard: Any = "head_tail"
) -> Iterator[Ranks]:
    """A context in which models with flashgen's attention have a part of each sequence.

    The backward pass may follow outside. Parameters have the gradients that the rank's positions
    make; their mean over the ranks, which FSDP and DDP compute, is the gradient of one process.

    Args:
        group: as for `flashgen.distributed.attention`.
        method: as for `flashgen.distributed.attention`.
        shard: as for `flashgen.distributed.attention`.

    Yields:
        The ranks, whose `own` gives the inputs of each forward pass.

    Raises:
        InputError: there is no such group, method or sharding.
    """
    ranks = Ranks(group, method, shard)
    _entered.append(ranks)
    try:
        yield ranks
    finally:
        _entered.pop()


def check_layer(ranks: Ranks | None, sizes: tuple[int, int], parts: Mapping[str, object]) -> None:
    """Refuses a layer whose attention depends on tensors that a rank does not have.

    Args:
        ranks: of the layer's mask; None for a mask that was not made in the context.
        sizes: the numbers of queries and keys.
        parts: tensors with an element for each score, by the names of their arguments.
    """
    name = next((name for name, tensor in parts.items() if tensor is not None), None)
    if name is not None:
        _refuse(
            "a tensor with an element for each score would have rows and columns of all ranks",
            f"argument {name} of the attention function",
            "the rank makes it from its own positions",
        )
    if ranks is None:
        _refuse(
            "a layer has no mask of all positions",
            "argument attention_mask of the attention function",
            "a tensor, a mask that was made outside of context_parallel, or none",
        )
    rows = None if ranks.whole is None else ranks.whole.rows
    if sizes[0] != sizes[1]:
        numbers = f"{sizes[0]} queries and {sizes[1]} keys; the rank owns {rows} positions"
        _refuse("a layer has other keys than those of the part", "keys of the layer", numbers)


def refuse_context_of_torch() -> None:
    """Refuses a layer in torch's `context_parallel`, which divides sequences for SDPA alone.

    The context is recognised by the function that it puts in the place of SDPA.
    """
    function = torch.nn.functional.scaled_dot_product_attention
    if (getattr(function, "__module__", None) or "").startswith("torch.distributed."):
        _refuse(
            "torch's context_parallel exchanges keys for scaled_dot_product_attention alone",
            "attn_implementation of the model's configuration",
            "each rank would attend to its own positions",
            "flashgen.integrations.transformers.context_parallel in its place, or "
            'attn_implementation="sdpa"',
        )


def _check_config(config: Any) -> None:
    if config is None:
        return
    if getattr(config, "is_encoder_decoder", False):
        _refuse("a decoder would attend to a part of its encoder", "model", type(config).__name__)
    others = [x for x in getattr(config, "layer_types", None) or () if x not in _ATTENTION]
    if others:
        _refuse(
            "a layer carries a state from position to position, and each rank would begin anew",
            "layer_types of the configuration",
            f"{', '.join(sorted(set(others)))}; known: {', '.join(_ATTENTION)}",
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    rope_settings = [ropes, *(x for x in ropes.values() if isinstance(x, dict))]
    length_dependent = [
        x["rope_type"] for x in rope_settings if x.get("rope_type") in _ROPES_OF_LENGTH
    ]
    if length_dependent:
        _refuse(
            "rotary embeddings depend on the last position, which differs between ranks",
            "rope_parameters of the configuration",
            f"rope_type {length_dependent[0]!r}",
            '"yarn", "llama3", "linear" or "default"',
        )


_WHERE = "flashgen.integrations.transformers.context_parallel"


def _refuse(what: str, where: str, numbers: str, way_out: str = "") -> NoReturn:
    raise InputError(
        what,
        where=f"{where}, in {_WHERE}",
        numbers=numbers,
        way_out=way_out or "this model outside of context_parallel, with whole sequences",
    )
