"""Values for the captured tensors of a spec: the spec file's examples, or random numbers.

A spec file may define, at its top level, ::

    def example_tensors(sizes, generator):
        return {"length": [sizes.seq_k // 2] * sizes.batch}

Its arguments are the lengths of the call's dimensions (`Lengths`) and a torch.Generator seeded by
``--seed``. It returns a dictionary with a value for some or all of the tensors: tensors, arrays or
lists, which are converted to the declared dtype. Names that the spec does not capture are ignored.

A tensor without an example has random values. Each dimension has its length in the call; a
dimension with a name of its own has the length that the mods' indices need, where it follows from
the bounds of their expressions, and at least `OWN_LENGTH`. Floats are standard normal numbers times
0.1, bools are true or false with equal probability, integers are uniform from 0 to seq_k, or to the
last element of what they are an index of. There are `SEQUENCES` packed sequences of random lengths,
and some rows behind the last one.

A block layout given with the call is the tensor "layout", a bool for each block of queries and
keys: [batch or 1, heads or 1, blocks_q, blocks_k]. Without an example a random half of the blocks
is live, of all heads the same one where there would be more than `MOST_BLOCKS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.shared.errors import FlashgenError, InputError
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import LAYOUT, LAYOUT_LISTS, LISTS
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.spec import BOUNDARIES, AttentionSpec
from flashgen.spec.language.spec_file import file_and_variable, run_file
from flashgen.spec.language.tensor import Tensor as Capture
from flashgen.tools.cli.arguments import PlanArguments, VisualizeArguments
from flashgen.tools.cli.console import busy
from flashgen.tools.cli.inputs import Shape, scalar_values

if TYPE_CHECKING:
    from torch import Generator, Tensor

OWN_LENGTH, MOST_OWN = 64, 1 << 22
"""The least and the greatest length of a dimension with a name of its own."""

MOST_BLOCKS = 1 << 22
"""The blocks of a layout, which are sorted by rows and by columns, at most; more take minutes."""

SEQUENCES = 4
"""The number of packed sequences."""

_FLOAT_FACTOR = 0.1
_SEED = 0x5EED  # apart from the generator that makes q, k and v


@dataclass(frozen=True)
class Lengths:
    """The lengths of the dimensions of a call.

    Attributes:
        seq_q, seq_k: up to the last global position, the offset included.
    """

    batch: int
    heads: int
    heads_kv: int
    seq_q: int
    seq_k: int


def captures_of(
    spec: AttentionSpec,
    arguments: PlanArguments | VisualizeArguments,
    sizes: Shape,
    q_offset: int = 0,
    k_offset: int = 0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The scalars and the captured tensors of a call whose examples need not be told apart."""
    scalars, _ = scalar_values(spec, arguments.path, arguments.scalars)
    with busy("loading torch"):
        import torch  # noqa: F401
    path = arguments.path
    tensors, _ = tensor_values(spec, path, sizes, q_offset=q_offset, k_offset=k_offset)
    return scalars, tensors


def tensor_values(
    spec: AttentionSpec,
    path: str,
    sizes: Shape,
    *,
    q_offset: int = 0,
    k_offset: int = 0,
    seed: int = 0,
    device: str = "cpu",
    scalars: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], list[str]]:
    """A value for each captured tensor of a spec; the same for the same seed.

    Args:
        scalars: the scalars of the call, on which lengths may depend.

    Returns:
        The tensors by name, and the names of those with the file's example values.

    Raises:
        InputError: the file's example_tensors is not a function, raises, or returns another type.
    """
    if not spec.tensors:
        return {}, []
    import torch

    generator = torch.Generator().manual_seed(seed + _SEED)
    lengths = Lengths(
        sizes.batch,
        sizes.heads_q,
        sizes.heads_kv,
        max(sizes.seq_q + q_offset, 1 if sizes.seq_q else 0),
        max(sizes.seq_k + k_offset, 1 if sizes.seq_k else 0),
    )
    example_values = _example_values(path, lengths, generator)
    values = {}
    packed = dict(zip(BOUNDARIES, (sizes.seq_q, sizes.seq_k), strict=True)) if spec.packed else {}
    derived_names = [RANDOM_STATE]  # made of rng, which is not a tensor that the spec captures
    if spec.block_sparse is not None:
        # Made below, the lists of a layout from the live blocks.
        derived_names += LISTS if spec.chooses else LAYOUT_LISTS
    needed, highest = _needed(spec, lengths, scalars or {})
    for tensor in spec.tensors:
        if tensor.name in derived_names:
            continue
        value = example_values.get(tensor.name)
        if value is None and tensor in packed:
            value = _boundaries(packed[tensor], generator)
        elif value is None:
            dims = [needed.get(dim, dim) for dim in _dims(spec, tensor, lengths)]
            value = _random(
                tensor, dims, lengths, highest.get(tensor.name, max(lengths.seq_k, 1)), generator
            )
        dtype = getattr(torch, tensor.dtype)
        try:
            values[tensor.name] = torch.as_tensor(value).to(device=device, dtype=dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(
                f"example_tensors gives no tensor for {tensor.name}: {error}",
                where=f"{path}, example_tensors",
                numbers=f"given {value!r}"[:200],
                way_out="a tensor, an array or a list of numbers",
            ) from None
    examples = [name for name in values if name in example_values]
    if spec.block_sparse is None:
        return values, examples
    if spec.chooses:
        values |= dict(zip(LISTS, _lists(spec.block_sparse, sizes, generator), strict=True))
    from flashgen.calls.runtime.block_layouts import with_layout
    from flashgen.spec.language.signature import signature_of

    return dict(with_layout(signature_of(spec), values)), examples


def _dims(spec: AttentionSpec, tensor: Capture, lengths: Lengths) -> tuple[str | int, ...]:
    """The dimensions of a tensor; the dimensions of a block layout are numbers of blocks."""
    if spec.block_sparse is None or tensor.name != LAYOUT:
        return tensor.dims
    blocks = spec.block_sparse.blocks(lengths.seq_q, lengths.seq_k)
    whole = lengths.batch * lengths.heads * math.prod(blocks) <= MOST_BLOCKS
    return (*(tensor.dims[:2] if whole else (1, 1)), *blocks)


def _needed(
    spec: AttentionSpec, lengths: Lengths, scalars: Mapping[str, Any]
) -> tuple[dict[str | int, int], dict[str, int]]:
    """The lengths and the greatest elements with which no index of a mod is outside of a tensor.

    Returns:
        The lengths of dimensions with names of their own, and for integer tensors whose elements
        are indices of dimensions with another length, their greatest element.
    """
    from flashgen.spec.language.integer_limits import Limits, limits
    from flashgen.spec.language.lets import elements_of
    from flashgen.spec.language.symbols import BATCH, HEADS, SEQ_K, SEQ_Q, B, H, K, Q
    from flashgen.spec.language.tensor_elements import Element

    sizes = (lengths.batch, lengths.heads, lengths.seq_q, lengths.seq_k)
    index_sizes = zip((B, H, Q, K), sizes, strict=True)
    known_limits: dict[Any, Limits] = {x: (0, max(size, 1) - 1) for x, size in index_sizes}
    known_limits |= {x: (n, n) for x, n in zip((BATCH, HEADS, SEQ_Q, SEQ_K), sizes, strict=True)}
    for scalar in spec.scalars:
        if scalar.dtype == "int32" and scalar.name in scalars:
            known_limits[scalar.expr] = (int(scalars[scalar.name]),) * 2
    dims = {tensor.symbol: tensor.dims for tensor in spec.tensors}
    reads = [
        (element, dim, index)
        for element in elements_of(spec.mask, spec.score)
        for dim, index in zip(dims.get(element.tensor, ()), element.indices, strict=False)
    ]
    highest: dict[str, int] = {}
    for _, dim, index in reads:
        length = dim if isinstance(dim, int) else getattr(lengths, dim, None)
        if isinstance(index, Element) and length is not None:
            name = index.tensor.name
            highest[name] = min(highest.get(name, lengths.seq_k), max(length, 1) - 1)
    memo: dict[Any, Limits] = {}
    for element, _, _ in reads:
        if element.tensor.is_integer:
            greatest = highest.get(element.tensor.name, max(lengths.seq_k, 1))
            memo[element] = max(element.limits[0], 0), min(element.limits[1], greatest)
    needed: dict[str | int, int] = {}
    for _, dim, index in reads:
        if isinstance(dim, str) and not hasattr(lengths, dim):
            try:
                length = limits(index, known_limits, memo)[1] + 1
            except TypeError:  # an index that is made of floats
                length = OWN_LENGTH
            needed[dim] = max(needed.get(dim, OWN_LENGTH), min(length, MOST_OWN))
    return needed, highest


def _random(
    tensor: Capture, dims: Sequence[str | int], lengths: Lengths, highest: int, generator: Generator
) -> Tensor:
    import torch

    shape = [d if isinstance(d, int) else getattr(lengths, d, OWN_LENGTH) for d in dims]
    if tensor.dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator) * _FLOAT_FACTOR
    high = min(highest, torch.iinfo(dtype).max)
    return torch.randint(high + 1, shape, generator=generator)


def _lists(sparse: BlockSparse, sizes: Shape, generator: Generator) -> tuple[Tensor, Tensor]:
    """Lists of a quarter of the blocks of keys for each group of queries, in any order."""
    import torch

    groups, blocks = sparse.blocks(sizes.seq_q, sizes.seq_k)
    shape = sizes.batch, sizes.heads_kv, groups, blocks
    listed = torch.rand(shape, generator=generator).argsort(-1)[..., : max(1, blocks // 4)]
    return torch.full(shape[:3], listed.shape[-1], dtype=torch.int32), listed.int()


def _boundaries(length: int, generator: Generator) -> Tensor:
    import torch

    end = length - length // 16
    cuts = torch.randint(end + 1, (SEQUENCES - 1,), generator=generator).sort().values
    return torch.cat([cuts.new_tensor([0]), cuts, cuts.new_tensor([end])])


def _example_values(path: str, lengths: Lengths, generator: Generator) -> Mapping[str, Any]:
    """The dictionary that the file's example_tensors returns; empty without such a function."""
    file, _ = file_and_variable(path)
    function: Callable[..., Any] | None = run_file(file).get("example_tensors")
    if function is None:
        return {}
    where = f"{Path(file).as_posix()}, example_tensors"
    try:
        values = function(lengths, generator)
    except (FlashgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too
        raise InputError(
            f"example_tensors raised {type(error).__name__}: {error}",
            where=where,
            numbers=f"given {lengths}",
            way_out="def example_tensors(sizes, generator): return {name: values, ...}",
        ) from error
    if isinstance(values, Mapping):
        return values
    raise InputError(
        "example_tensors does not return a dictionary",
        where=where,
        numbers=f"returned a {type(values).__name__}",
        way_out='return {"ids": ...}, a value for each tensor by name',
    )
