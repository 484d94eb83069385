"""``flashgen visualize``: the tile map of a spec, as a file or as text."""

from __future__ import annotations

from dataclasses import astuple

from flashgen.tools.cli.arguments import VisualizeArguments
from flashgen.tools.cli.captured_tensors import captures_of
from flashgen.tools.cli.console import print_rows, write
from flashgen.tools.cli.inputs import arch_of, changed_spec, check_file, parse_shape, parse_tile


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
    offsets = {"q_offset": arguments.q_offset, "k_offset": arguments.k_offset}
    contiguous = spec
    if spec.paged:  # one sequence, whose queries are the last positions
        contiguous = spec.replace(paged=False, kv_dtype=None)
        offsets["q_offset"] = offsets["q_offset"] or sizes.seq_k - sizes.seq_q
    scalars, tensors = captures_of(contiguous, arguments, sizes, **offsets)
    from flashgen.tools.views.visualize import visualize as map_of

    tile_map = map_of(
        spec,
        astuple(sizes),
        arch=arch_of(arguments.arch),
        tile=tile,
        kernel=arguments.kernel,
        batch=arguments.batch,
        head=arguments.head,
        captures={**scalars, **tensors},
        **offsets,
    )
    if arguments.output is None:
        write(str(tile_map))
        return
    tile_map.save(arguments.output)
    size = arguments.output.stat().st_size
    print_rows(
        [
            ("picture", f"{arguments.output.as_posix()}, {size:,} B"),
            ("shows", tile_map.drawing().counts),
        ]
    )
