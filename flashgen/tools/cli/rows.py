"""The inputs of a call as rows of names and values, for `run` and `report`."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import LAYOUT_LISTS
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.call import RandomCall


def input_rows(spec: AttentionSpec, call: RandomCall) -> Iterator[tuple[str, str]]:
    """The block layout, the scalars, each captured tensor and dropout, with the values' origin."""
    scalars, tensors = call.options["scalars"], call.options["tensors"]
    if spec.block_sparse is not None:
        yield "layout", spec.block_sparse.described
    if scalars:
        text = ", ".join(f"{name} = {value}" for name, value in scalars.items())
        examples = ", ".join(name for name in scalars if name in call.examples)
        yield "scalars", text + (f"  ({examples}: the file's example)" if examples else "")
    own = LAYOUT_LISTS if spec.block_sparse is not None else ()
    for tensor in (each for each in spec.tensors if each.name != RANDOM_STATE):
        if tensor.name not in own:
            text = f"{tensor.name} {list(tensors[tensor.name].shape)}, {tensor.dtype}"
            text += ", learned" if tensor.grad else ""
            text += ", the file's example" if tensor.name in call.examples else ", random"
            yield "captured", text
    if "rng" in call.options:
        seed, offset = call.options["rng"].tolist()
        drops = f"p {call.options['dropout_p']}, " if "dropout_p" in call.options else ""
        kind = "dropout" if drops else "fg.rand"
        yield kind, f"{drops}seed {seed}, offset {offset}"
