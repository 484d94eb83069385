"""What a CUDA graph does not see of the mods and the BlockMask of a call that it has captured.

A graph repeats kernels with the arguments of the captured call. Tensors are read again at each
replay; numbers and blocks are those of the capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from flashgen.frontends.flex.proofs import prove
from flashgen.frontends.flex.recorded_mods import Record
from flashgen.spec.language.user_source import lines_of, user_location

_warned: set[str] = set()
_CPU = torch.device("cpu")


def captures_a_graph(device: torch.device) -> bool:
    """Whether the current stream of a device is captured into a CUDA graph."""
    return device != _CPU and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def warn_of_values(mods: Sequence[Any], record: Record, has_blocks: bool) -> None:
    """Warns once of each set of values that replays of a captured call do not see.

    Args:
        mods: the mask_mod and the score_mod; None where there is none.
        record: the record of the mods, with notes.
        has_blocks: whether blocks of a BlockMask have been read.
    """
    assert record.notes is not None, "records have notes during a capture"
    indices = [x for x in range(len(record.numbers)) if x not in record.notes.literals]
    numbers = [record.numbers[index] for index in indices]
    unseen = [f"{record.numbers[index]} ({record.notes.line_of(index)})" for index in indices]
    if unseen:
        unseen = [f"numbers of the mods: {', '.join(unseen)}"]
    for mod in mods:
        if mod is None:
            continue
        proof, name = prove((mod,)), getattr(mod, "__name__", type(mod).__name__)
        others = "" if proof is None else ", ".join(_others(proof.values, numbers))
        if proof is None or others:
            shown = f" {others}" if others else ""
            unseen.append(f"other Python values that {name} reads{shown} ({lines_of(mod, '')})")
    if record.created_tensors:
        unseen.append("tensors that the mods make of numbers")
    if has_blocks:
        unseen.append(
            "the blocks of the BlockMask (kv_num_blocks, kv_indices, full_kv_num_blocks, "
            "full_kv_indices)"
        )
    if not unseen:
        return
    text = (
        f"{user_location()}: flex_attention is captured into a CUDA graph, whose replays "
        f"do not see changes of {'; '.join(unseen)}. They do see new elements of captured tensors. "
        "Capture again after such a change, or hold the values in tensors."
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def _others(values: Sequence[Any], numbers: Sequence[int | float]) -> list[str]:
    """The values of a proof that are not among the numbers of the record, each once."""
    named = {(type(number), number) for number in numbers}
    shown = (repr(x) for x in values if x is not None and (type(x), x) not in named)
    return list(dict.fromkeys(shown))
