"""The mask of packed sequences, as the installed release of transformers composes it."""

from __future__ import annotations

import torch
from transformers import masking_utils

from flashgen.frontends.transformers.layers import MaskFunction


def packed(
    function: MaskFunction, positions: torch.Tensor, sequences: torch.Tensor
) -> MaskFunction:
    """The mask of packed sequences from the mask of one sequence.

    Releases before 5.23 apply the function to positions of the row, later ones to positions inside
    each sequence; 5.23 and 5.24 differ in the order of the operations. A composition that differs
    from that of transformers costs one more trace, and a call before torch.compile with
    fullgraph=True; results are the same.

    Args:
        function: the mask of the model, a function of batch entry, head, query and key.
        positions: int64 [batch, seq], positions inside each sequence.
        sequences: int64 [batch, seq], the number of each position's sequence.
    """
    composed = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if composed is not None:
        mask: MaskFunction = composed(function, positions, sequences)
        return mask
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if remap is not None:
        function = remap(function, positions)
    together: MaskFunction = masking_utils.and_masks(
        function, masking_utils.packed_sequence_mask_function(sequences)
    )
    return together
