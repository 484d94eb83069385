"""The mask function that is registered with transformers, and the masks that it makes."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from flashgen.frontends.flex.operation_results import name_of
from flashgen.frontends.transformers.layers import FULL, MaskFunction, name_of_mask, record_mask
from flashgen.frontends.transformers.packed import packed
from flashgen.frontends.transformers.ranks import Ranks, current
from flashgen.frontends.transformers.sequences import inputs_of_forward
from flashgen.shared.errors import InputError

Tensor = torch.Tensor


class MaskError(InputError, AttributeError):
    """A model uses a mask of flashgen for something else than attention.

    No TypeError, which a binary operator of torch would replace by a message of its own.
    """


@dataclass(eq=False, repr=False)
class Mask(BlockMask):
    """The mask of one forward pass, as an expression: nothing of N x N elements is stored.

    transformers passes a mask on as it is if it is a tensor or BlockMask with four dimensions,
    therefore the base class; a mask of flashgen has no blocks.

    Attributes:
        name: the name under which the traced expression of the mask is kept.
        tensors: the tensors that the mask reads.
        lengths: batch, number of queries, number of keys.
        q_offset: the position of the first query: an int, or a tensor whose value is never read
            by the host.
        k_offset: the position of the first key.
        bias: the tensor that a model has added to the mask; attention adds it to the scores.
        ranks: over which the positions are divided; the lengths are those of a part then, and the
            tensors those of the whole.
        padding: the mask of padding that the model was given, bool [batch, positions], or None.
        positions: ``position_ids`` of the forward pass that made the mask, or None.
        checked: the positions of layers that this mask was compared with.
        elements: makes the mask as a bool tensor [batch, 1, seq_q, seq_k]; None over ranks.
    """

    name: str
    tensors: tuple[Tensor, ...]
    lengths: tuple[int, int, int]
    q_offset: int | Tensor
    k_offset: int
    bias: Tensor | None = None
    ranks: Ranks | None = None
    padding: Tensor | None = None
    positions: Tensor | None = None
    checked: list[Any] = field(default_factory=list)  # FSDP copies a mask by all of its fields
    elements: Callable[[], Any] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, queries, keys = self.lengths
        return batch, 1, queries, keys

    def dim(self) -> int:
        return 4

    ndim = 4

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def to(self, device: Any = None, *_: Any, **__: Any) -> Mask:
        """The mask with its tensors on another device; a dtype has no effect."""
        if device is None or isinstance(device, torch.dtype):
            return self
        if isinstance(device, Tensor):
            device = device.device
        tensors = tuple(tensor.to(device) for tensor in self.tensors)
        offset = self.q_offset
        q_offset = offset.to(device) if isinstance(offset, Tensor) else offset
        bias = None if self.bias is None else self.bias.to(device)
        return self._with(tensors=tensors, q_offset=q_offset, bias=bias)

    def _with(self, **fields: Any) -> Mask:
        """The mask with other fields."""
        position_fields = "lengths", "q_offset", "k_offset"
        other_fields = "bias", "ranks", "padding", "positions", "elements"
        names = "name", "tensors", *position_fields, *other_fields
        return Mask(**{**{name: getattr(self, name) for name in names}, **fields})

    def _with_rows(self, rows: range) -> Mask:
        bias = self.bias
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., rows.start : rows.stop, :]
        return self._with(q_offset=self.q_offset + rows.start, bias=bias, elements=None)

    def __add__(self, other: Any) -> Mask:
        """The mask with a bias for each score, [batch or 1, heads or 1, seq_q or 1, seq_k]."""
        if not isinstance(other, Tensor) or not other.is_floating_point():
            _refuse("a sum")
        bias = other if self.bias is None else self.bias + other
        return self._with(bias=bias)

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Tensor, bool, int, float)):
            _refuse("a comparison")
        return self is other

    __hash__ = object.__hash__

    def contiguous(self) -> Mask:
        return self

    def __getitem__(self, index: Any) -> Any:
        """The mask of the first keys, of rows that follow each other, or of its one head.

        For slices that cut trailing keys, for slices of rows (Gemma 4), and for head 0.
        """
        items = index if isinstance(index, tuple) else (index,)
        selects_head = items[1:2] == (0,) and all(x == slice(None) for x in (items[0], *items[2:]))
        if selects_head and self.elements is not None and self.bias is None:
            return self._elements("its head")[:, 0].as_subclass(MaskOfHead)
        *leading, last = items
        rows = leading.pop() if len(items) == 4 and isinstance(leading[2], slice) else slice(None)
        whole = all(item == slice(None) or item is Ellipsis for item in leading)
        selects_keys = len(items) == 4 or Ellipsis in leading
        if whole and selects_keys and isinstance(last, slice) and not last.start:
            batch, queries, keys = self.lengths
            row_range = range(queries)[rows]
            cuts_ranks = self.ranks is not None and len(row_range) < queries
            if last.step in (None, 1) and row_range.step == 1 and not cuts_ranks:
                cut = self if len(row_range) == queries else self._with_rows(row_range)
                return cut._with(lengths=(batch, len(row_range), len(range(keys)[last])))
        _refuse(f"mask[{index}]")

    dtype = torch.bool
    """That of the elements, by which speech models tell how to negate a mask."""

    def __invert__(self) -> Tensor:
        """Which keys are not attended to, bool [batch, 1, seq_q, seq_k].

        For models that clear rows of padding before a convolution.
        """
        return ~self._elements("its negation")

    logical_not = __invert__

    def _elements(self, use: str) -> Tensor:
        """The mask as a bool tensor [batch, 1, seq_q, seq_k]."""
        if self.elements is None or self.bias is not None:
            _refuse(use)
        elements: Tensor = self.elements()[..., : self.lengths[2]]
        return elements

    def __repr__(self) -> str:
        return f"<mask of flashgen, shape {self.shape}>"

    __str__ = __repr__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Mask:
        if getattr(func, "__name__", "") in ("add", "__add__", "__radd__") and not kwargs:
            left, right = args
            if isinstance(right, Mask):
                return right.__add__(left)
            assert isinstance(left, Mask)
            return left.__add__(right)
        _refuse(f"torch.{getattr(func, '__name__', func)}")

    def __getattr__(self, attribute: str) -> NoReturn:
        _refuse(f"mask.{attribute}")


def _refuse(use: str) -> NoReturn:
    raise MaskError(
        "the model computes with its mask instead of passing it to its attention function",
        where="attn_implementation of the model's configuration",
        numbers=f"{use} of a mask that is an expression and has no elements",
        way_out='attn_implementation="eager" for this model, or for this part of it by a '
        "dictionary",
    )


_OPERATORS = (
    *("sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg"),
    *("and", "rand", "or", "ror", "xor", "rxor", "lt", "le", "gt", "ge"),
)


class MaskOfHead(Tensor):
    """A mask [batch, seq_q, seq_k] of conditions, by which a layer chooses keys (DeepSeek-V3.2).

    It can be negated. All else is refused, since a model may count on numbers that are added to
    scores.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OF_CONDITIONS:
            _refuse(f"torch.{name_of(func)} of its head")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


_OF_CONDITIONS = (
    *(Tensor.__invert__, Tensor.bitwise_not, Tensor.logical_not, torch.bitwise_not),
    *(torch.logical_not, Tensor.dtype.__get__),  # type: ignore[attr-defined]
)


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(self: Any, *_: Any) -> NoReturn:
        _refuse(f"the operator {name}")

    return operator


for _name in _OPERATORS:
    setattr(Mask, f"__{_name}__", _refused(_name))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Mask:
    """The mask of a forward pass, as `transformers.AttentionMaskInterface` defines its functions.

    Args:
        batch_size, q_length, kv_length: the sizes of the attention.
        q_offset, kv_offset: the positions of the first query and the first key.
        mask_function: the mask of the model, a function of batch entry, head, query and key. It is
            executed once here; its expression is traced where no earlier mask computes the same.
        attention_mask: bool [batch, positions], False for padding; None without padding.
        device: the device of the queries.
        options: others of transformers, such as the model's config.

    Raises:
        InputError: the model is divided over ranks that its heads cannot be divided over, or drops
            a mask that is no tensor.
        SpecError: the mask function uses an operation that kernels cannot express.
    """
    _check_heads(options.get("config"))
    _check_layers(options.get("config"))
    if attention_mask is not None and attention_mask.dim() != 2:
        raise InputError(
            "a mask of padding has two dimensions, and one of scores four",
            where="argument attention_mask of the model",
            numbers=f"{attention_mask.dtype}, shape {tuple(attention_mask.shape)}",
            way_out="[batch, positions], 0 or False for padding; or [batch, 1, seq_q, seq_k], bool "
            "or added to the scores",
        )
    # A static cache advances its position in place before the first layer reads it.
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()
    elements: Callable[[], Any] | None = functools.partial(
        sdpa_mask,
        *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask),  # type: ignore[arg-type]
        allow_is_causal_skip=False,
        device=device,
    )
    lengths = batch_size, q_length, kv_length
    ranks, model_padding = current(), attention_mask
    if ranks is not None:
        sizes = q_length, kv_length, q_offset, kv_offset
        packs = "allow_is_bidirectional_skip" not in options
        mask_function, whole = ranks.mask_of_whole(
            mask_function, attention_mask, sizes, options.get("config"), packs
        )
        attention_mask, kv_length = whole.padding, whole.seq
        elements = None
    parts = [] if mask_function is bidirectional_mask_function else [mask_function]
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None
        parts.append(padding_mask_function(padding))
    name = FULL
    tensors: tuple[Tensor, ...] = ()
    if parts:
        mask_function = parts[0] if len(parts) == 1 else and_masks(*parts)
        recorded = record_mask(mask_function, torch.device(device))
        name = name_of_mask(recorded, mask_function, torch.device(device))
        tensors = recorded.tensors
        if attention_mask is None and q_length == kv_length:
            _expect_packed(name, mask_function, (batch_size, q_length), torch.device(device))
    positions = None if torch.compiler.is_compiling() else inputs_of_forward()[0]
    others: dict[str, Any] = {
        "padding": model_padding,
        "positions": positions,
        "elements": elements,
    }
    return Mask(name, tensors, lengths, q_offset, kv_offset, ranks=ranks, **others)


def _check_heads(config: Any) -> None:
    """Refuses a plan of tensor parallelism that would leave a rank a part of a head.

    The model's own projections would fail a moment later, by an error about shapes.
    """
    divided = getattr(config, "distributed_config", None)
    ranks = getattr(divided, "tp_size", None) or 1
    uses_models_plan = not isinstance(getattr(divided, "tp_plan", None), dict)
    if ranks == 1 or not uses_models_plan:
        return
    plan = getattr(config, "base_model_tp_plan", None) or {}
    for projection, name in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        heads = getattr(config, name, None) or ranks
        ways = [way for key, way in plan.items() if key.endswith(f"self_attn.{projection}_proj")]
        if "colwise" in ways and heads % ranks and torch.distributed.is_initialized():
            raise InputError(
                "the heads of the model cannot be divided among the ranks of its plan",
                where=f"{name} of the configuration, tensor parallelism of transformers",
                numbers=f"{heads} heads, {ranks} ranks",
                way_out=f"a tp_size that divides {heads}; or DistributedConfig(fsdp_size={ranks}), "
                "which shards parameters alone",
            )


def _check_layers(config: Any) -> None:
    """Refuses a model whose layers do something else with a BlockMask than with a tensor.

    They take a mask of flashgen for a BlockMask, and would leave out their steps for a tensor.
    """
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    layer = _layer_with_block_masks(name)
    if layer:
        raise InputError(
            "a layer of the model tells a BlockMask from a tensor, and would drop this mask",
            where="attn_implementation of the model's configuration",
            numbers=f"{layer} of {name}",
            way_out='attn_implementation="sdpa" for this model',
        )


@functools.lru_cache(maxsize=256)
def _searched(module: str) -> str:
    members = vars(sys.modules[module]).values() if module in sys.modules else ()
    classes = (
        member for member in members if isinstance(member, type) and member.__module__ == module
    )
    for method in itertools.chain.from_iterable(vars(defined).values() for defined in classes):
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        if code is not None and BlockMask.__name__ in code.co_names:
            return str(method.__qualname__)
    return ""


def _layer_with_block_masks(module: str) -> str:
    """The name of the first method of a module's classes that reads BlockMask; "" for none."""
    return _searched(module)


# The same as torch.compiler.assume_constant_result, without the import of torch._dynamo, which
# traces what functools.lru_cache wraps.
setattr(_layer_with_block_masks, "_dynamo_marked_constant", True)  # noqa: B010
_packed: set[str] = set()  # names of masks whose packed counterpart has been traced


def _expect_packed(
    name: str, function: MaskFunction, shape: tuple[int, int], device: torch.device
) -> None:
    """Traces the mask for packed sequences too, at the first call with a mask.

    transformers takes every batch without padding for packed sequences while torch.compile traces
    it, since it cannot read the positions there.
    """
    if torch.compiler.is_compiling() or name in _packed:
        return
    _packed.add(name)
    positions, sequences = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in "12")
    function = packed(function, positions, sequences)
    with suppress(Exception):  # a mask that only packed sequences need
        name_of_mask(record_mask(function, device), function, device)
