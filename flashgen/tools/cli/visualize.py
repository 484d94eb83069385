"""``flashgen visualize``: the tile map of a spec, as a file or as text."""

from __future__ import annotations

from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH
from flashgen.tools.cli.arguments import VisualizeArguments
from flashgen.tools.cli.console import busy, facts, write
from flashgen.tools.cli.inputs import (
    changed_spec,
    check_file,
    parse_shape,
    parse_tile,
    scalar_values,
)


def visualize(arguments: VisualizeArguments) -> None:
    """Prints the tile map, or writes it to a file.

    Scalars and captured tensors have the values of the options and of the spec file, or random
    ones, as for `flashgen run`.

    Raises:
        InputError: an option is wrong, or the file cannot be written.
    """
    if arguments.output is not None:
        check_file(arguments.output, "--output")
    spec = changed_spec(arguments.path, arguments)
    sizes = parse_shape(arguments.shape)
    tile = None if arguments.tile is None else parse_tile(arguments.tile)
    scalars, _ = scalar_values(spec, arguments.path, arguments.scalars)
    q_offset, k_offset = arguments.q_offset, arguments.k_offset
    with busy("loading torch"):
        from flashgen.tools.cli.captured_tensors import tensor_values
        from flashgen.tools.views.visualize import visualize as map_of
    tensors, _ = tensor_values(spec, arguments.path, sizes, q_offset=q_offset, k_offset=k_offset)
    found = map_of(
        spec,
        (sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.seq_q, sizes.seq_k),
        arch=arguments.arch or config.arch() or DEFAULT_ARCH,
        tile=tile,
        kernel=arguments.kernel,
        batch=arguments.batch,
        head=arguments.head,
        captures={**scalars, **tensors},
        q_offset=q_offset,
        k_offset=k_offset,
    )
    if arguments.output is None:
        write(str(found))
        return
    found.save(arguments.output)
    size = arguments.output.stat().st_size
    facts(
        [
            ("picture", f"{arguments.output.as_posix()}, {size:,} B"),
            ("shows", found.drawing().counts),
        ]
    )
