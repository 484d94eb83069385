"""A call as rows of names and values, for `run` and `report`: inputs, pages and splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashgen.shared import config
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import LAYOUT_LISTS
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.arguments import DecodingArguments
from flashgen.tools.cli.call import RandomCall
from flashgen.tools.cli.inputs import Shape

if TYPE_CHECKING:
    from flashgen.calls.runtime.reports import Report


def input_rows(spec: AttentionSpec, call: RandomCall, sizes: Shape) -> Iterator[tuple[str, str]]:
    """The block layout, the scalars, each captured tensor and dropout, with the values' origin;
    and the shape."""
    scalars, tensors = call.options["scalars"], call.options["tensors"]
    if spec.block_sparse is not None:
        yield "layout", spec.block_sparse.described
    if scalars:
        text = ", ".join(f"{name} = {value}" for name, value in scalars.items())
        examples = ", ".join(name for name in scalars if name in call.examples)
        yield "scalars", text + (f"  ({examples}: the file's example)" if examples else "")
    derived_names = LAYOUT_LISTS if spec.block_sparse is not None else ()
    for tensor in (captured for captured in spec.tensors if captured.name != RANDOM_STATE):
        if tensor.name not in derived_names:
            text = f"{tensor.name} {list(tensors[tensor.name].shape)}, {tensor.dtype}"
            text += ", learned" if tensor.grad else ""
            text += ", the file's example" if tensor.name in call.examples else ", random"
            yield "captured", text
    if "rng" in call.options:
        seed, offset = call.options["rng"].tolist()
        drops = f"p {call.options['dropout_p']}, " if "dropout_p" in call.options else ""
        kind = "dropout" if drops else "fg.rand"
        yield kind, f"{drops}seed {seed}, offset {offset}"
    dims = " and ".join(map(str, dict.fromkeys((spec.head_dim, spec.head_dim_v))))
    yield "shape", f"{sizes}, head_dim {dims}, {spec.dtype}"


def decoding_rows(
    arguments: DecodingArguments, pages: int, report: Report
) -> Iterator[tuple[str, str]]:
    """The pages and splits of the keys; nothing for a call without either.

    Args:
        pages: the pages of the caches; 0 for contiguous keys.
        report: the report of the forward kernel.
    """
    size = report.split_size
    if not arguments.decode and not size:
        return
    if pages:
        text = f"{arguments.page:,} keys each, {pages:,} in the caches, shuffled"
        rest = 0 if arguments.kv_dtype == "int8" else "NaN"  # the code of NaN
        yield "pages", f"{text}; slots without a key are {rest}"
        if arguments.kv_dtype is not None:
            yield "codes", f"{arguments.kv_dtype}, with a scale for each page and key head"
    why = "that of batch-invariant calls" if config.batch_invariant() else "the plan's choice"
    why = why if arguments.split_size is None else "from --split-size"
    yield "split", f"{size:,} keys, {why}" if size else f"none, {why}"
