"""Constants of the cost models that both code paths share, each with its origin.

"Counted": read from the machine code of compiled kernels. "Chosen" and "assumed": no measurement
stands behind the number.
"""

from __future__ import annotations

# ---- instructions --------------------------------------------------------------------------------

# Counted. Instructions for each index of an element of a captured tensor that is read: an offset is
# added to the index, which is then multiplied by a 64-bit stride.
READ_INSTRUCTIONS = 5

# Counted. Instructions of a floor division or a remainder by an element of a tensor or by a value
# that is computed, or of floats, and of a power with a variable exponent.
DIVISION_INSTRUCTIONS = 8
# Counted: the functions of templates/common/math.cuh.j2. Instructions of a quotient by a number
# that is known before the launch (n is doubled, multiplied and shifted; a remainder has one more),
# what it takes to round a negative quotient down, the same by a number that may be negative, and
# the instructions of a test for multiples beside its comparison (a product and a rotation).
QUOTIENT_INSTRUCTIONS = 3
ROUNDING_INSTRUCTIONS = 3
SIGNED_DIVISION_INSTRUCTIONS = 12
MULTIPLE_INSTRUCTIONS = 2
POWER_INSTRUCTIONS = 65
# Counted. Of a power by a literal fraction, for 16-bit operands: a comparison, a selection, lg2, a
# product and ex2.
FAST_POWER_INSTRUCTIONS = 5
# Counted. Instructions of a power of a number, for 16-bit operands: one product and ex2.
EXP2_INSTRUCTIONS = 2

# Counted. The share of a lane's scores, whose rows are 8 apart, that have distances q - k of their
# own: the assembler computes a function of the distance once for the others. It is 0.54 where a
# lane has rows of one group of 16, and 0.32 where it has rows of two, which fits records better.
OWN_DISTANCES = 0.32

# Derived, not counted. Instructions of fg.rand's bits: seven rounds of two wide products and two
# xors of three words each, and 12 for the counter and the choice of a word.
RANDOM_INSTRUCTIONS = 40

# Counted. Instructions per score of a tile whose mask is evaluated, beside the instructions of the
# mask's expression: comparisons with the ends of a row's range, and the replacement of the score.
MASKING_INSTRUCTIONS = 2
# Counted. Further instructions for masks that are no range. Where each score reads an element, a
# loop shifts in a bit for each score and tests it afterwards. Backward kernels set half a word of a
# pair by a selection, and clear P and dS by the word.
LOOP_INSTRUCTIONS = 2
WORD_OF_PAIR_INSTRUCTIONS = 1
# Counted. For a mask of the distance q - k: the scores of a lane for each distance at which it
# evaluates the mask (16 rows and 96 keys have 111 distances, 4 for each lane, and 48 scores), and
# the instructions for each distance besides the mask: the distance, a vote, a shift.
SCORES_OF_DISTANCE = 12
WORD_OF_DISTANCES_INSTRUCTIONS = 4
# Counted. The same for the blocks of a layout: reads, shifts and tests of its bits.
LAYOUT_INSTRUCTIONS = 8
# Counted. The same for a gathered tile that has a box without a live block of some rows.
DEAD_BOX_INSTRUCTIONS = 1

# Counted. Instructions per score of a softmax that kernels of other weights have not, by whether
# these are summed. Forward: the maximum, the multiply-add and exponential of P, and its sum.
# Backward: the multiply-add and exponential, the difference from delta, and the product with P;
# where weights are summed, they and dP - delta are multiplied by the factor of their row instead.
SOFTMAX_INSTRUCTIONS = {"forward": {True: 3, False: 4}, "backward": {True: 2, False: 4}}

# Scores of a lane that share the values of their row (a step of 64 positions), or of their column
# (two rows); and the lanes of a warp that have scores of one column.
SCORES_OF_ROW = 16
SCORES_OF_COLUMN = 2
LANES_OF_COLUMN = 8

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

# Chosen. Consumer warpgroups run in ping-pong up to this head dim. Beyond it a tile has so few keys
# that the barriers cost more than the alternation gains, as in FlashAttention-3's tile table.
PING_PONG_HEAD_DIM = 128

# Assumed, in microseconds: from the end of a launch to the start of the next one of its call; and
# the same where the second is launched before the first ends, and waits for it itself.
LAUNCH_GAP_US = 4
OVERLAP_GAP_US = 1
