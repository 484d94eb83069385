"""Constants of the cost models that both code paths share, each with its origin.

"Counted": read from the machine code of compiled kernels. "Assumed": no measurement exists, as for
every number of clocks here.
"""

from __future__ import annotations

# ---- instructions --------------------------------------------------------------------------------

# Counted. Instructions for each index of an element of a captured tensor that is read: an offset is
# added to the index, which is then multiplied by a 64-bit stride.
READ_INSTRUCTIONS = 5

# Counted. Instructions of a floor division or a remainder, and of a power with a variable exponent.
DIVISION_INSTRUCTIONS = 8
POWER_INSTRUCTIONS = 65

# Scores of a lane that share the values of their row (a step of 64 positions), or of their column
# (two rows). Registers for this number of such values are among those of a score function.
SCORES_OF_ROW = 16
SCORES_OF_COLUMN = 2
KEPT_VALUES = 24

# Counted. Instructions of dropout per score element: Philox4x32-7 makes the random bits of 8
# elements; each element needs a comparison and a selection. Kernels with transposed scores make
# the bits for the elements of two lanes, which exchange halves of them.
DROPOUT_INSTRUCTIONS = 6
TRANSPOSED_DROPOUT_INSTRUCTIONS = 12

# ---- choices that depend on more than one tile ---------------------------------------------------

# Assumed. The share of L2 for the operands that interleaved heads read again and again. The rest
# is for data that passes through once: queries, results, and lines that are not evicted yet.
L2_SHARE_OF_HEADS = 2 / 3

# Chosen. A number of heads per tile is another kernel to compile: it must save more than this
# factor of tiles.
HEADS_PER_TILE_GAIN = 1.1

# Counted. A costly mask is evaluated in a loop up to this head dim of V. Beyond it, the accumulator
# of O leaves too few registers for the loop: tiles would be smaller, and full tiles would need a
# tenth more instructions.
MASK_LOOP_HEAD_DIM = 128
