"""Constants of the sm_90a cost models that were fitted, counted or assumed.

"Fitted": the smallest number with which no chosen tile of most example specs spills
(tests/kernels/sm90/test_backward.py and test_captured.py for the backward kernels). The compiler's
use of registers is no smooth function of the instructions: these are steps between tiles. With
dropout, where a score reads several tensors, and for a few masks, a first plan may spill all the
same; `flashgen.build` then plans again with spare registers. "Counted": instructions read from the
machine code of compiled kernels. "Measured": on the GPU that is named. "Assumed": neither a
measurement nor the published timings decide the number.
"""

from __future__ import annotations

from fractions import Fraction

# ---- producer warpgroup: registers per thread, fitted --------------------------------------------

# Where the producer searches for live tiles, or evaluates a range with two ends.
SEARCH_REGISTERS = 40
# Where the forward producer searches by one bound.
SEARCH_BY_BOUND_REGISTERS = 32
# Where the forward producer gathers boxes with live blocks of a layout to tiles, or searches for
# tiles whose keys are in pages.
GATHER_REGISTERS = 72
# The same in kernels whose blocks own keys, which gather boxes of queries.
GATHER_QUERIES_REGISTERS = 56
# More of them, where the forward producer evaluates the mask for each tile ...
SEARCH_BY_MASK_REGISTERS = 16
# ... and where the producer of a backward kernel reads captured tensors to find tiles.
SEARCH_BY_TENSORS_REGISTERS = 16

# The head dims of v for which calls with split keys or pages need no more registers of consumers
# than others; wide heads do not, either. With another, or a score function that reads an element of
# a tensor for each score, they need as many more as on sm_80; and as many again with a block
# layout. Of more columns than FORWARD_WIDE_COLUMNS, which two warpgroups have, only those with a
# block layout need more.
SERVED_HEAD_DIMS = (*range(25), *range(49, 129))
# Those that consumers leave to a producer that searches for tiles whose keys are in pages.
PAGED_SEARCH_REGISTERS = 8

# ---- forward: registers per thread of the consumer warpgroups, fitted ----------------------------

# Besides S, P and O: row statistics, descriptors, addresses.
FORWARD_REGISTERS = 32
# For each key of a step: an accumulator of S (1/2) and P rounded to the operand type (1/4).
FORWARD_REGISTERS_PER_KEY = Fraction(3, 4)
# Beyond so many columns of O, one more register for each 2 columns: the compiler spills at 352 in
# tiles of 32 keys, and from 376 on in those of 16.
FORWARD_WIDE_COLUMNS = 320
FORWARD_COLUMNS_PER_REGISTER = 2
# Chosen. Beyond so many columns of O, which one wgmma computes, two warpgroups may share rows.
SHARED_BEYOND = 256

# ---- forward: instructions, counted --------------------------------------------------------------

# Per thread and step around the products: descriptors, barriers, the loop; and for each wgmma.
FORWARD_STEP_INSTRUCTIONS = 45
FORWARD_WGMMA_INSTRUCTIONS = 3.7
# Per score element: a maximum, a multiply-add, an exponential, a sum, and half of a rounding.
FORWARD_INSTRUCTIONS = 4.5
# Where another warpgroup has P too: a store and a load of 16 bytes, which 8 elements have.
EXCHANGE_INSTRUCTIONS = 0.25
# Registers that the assembler needs for a product beside its sums: it asks for 130 with 208 keys in
# Q K^T, and as many with 200 columns in P V, where P has some of them.
PRODUCT_REGISTERS = 26
REGISTERS_OF_P = 4
# Further instructions of an exponential on FMA units instead of special-function units.
FMA_EXP2_INSTRUCTIONS = 10
# Chosen. Exponentials are divided where that saves this share of the predicted clocks.
FMA_EXP2_GAIN = 0.03
# Chosen. Blocks form a cluster where that saves this share of the predicted clocks, which do not
# count that each of the two waits for the other.
CLUSTER_GAIN = 0.05

# ---- backward: registers per thread of the consumer warpgroups, fitted ---------------------------

# Besides the accumulators: addresses and descriptors; in the kernels for learned tensors also
# their sums. Beyond 256 columns of accumulators, one more register for each 10 columns.
BACKWARD_REGISTERS = 20
LEARNED_REGISTERS = 46
WIDE_COLUMNS = 256
WIDE_COLUMNS_PER_REGISTER = 10
# Where warps own the same keys: addresses and descriptors; and what "fused" needs for dQ.
COLUMNS_REGISTERS = 12
COLUMNS_DQ_REGISTERS = 29

# Where tiles come panel by panel: addresses, descriptors, and the index in the ring; and for each
# row of a step, the operands that two warpgroups have of the row.
STREAMED_REGISTERS = 6
STREAMED_REGISTERS_PER_ROW = Fraction(1, 2)
# Chosen. Up to this head dim whole tiles fit; tiles up to 256 were timed.
STREAMED_BEYOND = 320

# Registers for addresses and descriptors of "fused" while it computes S of the next step, and the
# clocks of a step that it then hides: the least squares over seven calls at d 64, 96 and 128, 0.95
# to 0.99 of the time without (H100, 2026-11-28).
AHEAD_REGISTERS = 16
# Chosen. The registers that are left free where the compiler spills in such a kernel: the tiles are
# then as for kernels that do not compute scores ahead.
SPARE_NOT_AHEAD = 1
AHEAD_CLOCKS = 236

# For each accumulator element of S and dP: in all kernels; for random bits; for elements of
# captured tensors, by how the gradient of such an element is summed (`analysis.kind_of_sum`): read
# by each score for itself, or by a row or a column of scores; and for elements of tensors that the
# mask reads, where it is evaluated for each score.
PENDING = 1 / 8
DROPOUT_PENDING = 1 / 4
READ_PENDING = {"element": 1 / 2, "row": 3 / 16, "column": 3 / 16, "block": 0.0}
MASK_PENDING = 1 / 4

# Registers that a spec adds, whatever the step.
DROPOUT_REGISTERS = 4
SCORE_MOD_REGISTERS = 13
MASK_OF_TENSORS_REGISTERS = 5
# For each index but one of a learned element that every score adds to by itself: 64-bit strides.
INDEX_REGISTERS = 8

# Tangents: besides the accumulators, and one more for so many columns of O.
TANGENT_REGISTERS = 36
TANGENT_COLUMNS_PER_REGISTER = 12

# ---- backward: instructions, counted -------------------------------------------------------------

# Per thread and step around the products, and for each multiple of 16 of their depth.
BACKWARD_STEP_INSTRUCTIONS = 60
BACKWARD_WGMMA_INSTRUCTIONS = 3
# The same where warps own the same keys, whose products read both operands from shared memory; and
# for each pass over the keys of a warpgroup.
COLUMNS_STEP_INSTRUCTIONS = {"dkdv": 90, "fused": 150}
COLUMNS_WGMMA_INSTRUCTIONS = 5
PASS_INSTRUCTIONS = 60
# The same where tiles come panel by panel, and for each panel.
STREAMED_STEP_INSTRUCTIONS = 90
STREAMED_WGMMA_INSTRUCTIONS = 3
STREAMED_PANEL_INSTRUCTIONS = 20
# Per score element: an exponential, a difference or the start of a sum, two products, two
# roundings. Where a block owns keys, and where it owns queries.
BY_KEYS_INSTRUCTIONS = 4.5
BY_QUERIES_INSTRUCTIONS = 4.8

# Tangents: an exponential with its multiply-add, the distance of a score's tangent from the row's
# reference, a product, a sum, two halves of a rounding.
TANGENT_INSTRUCTIONS = 6

# ---- time, assumed -------------------------------------------------------------------------------

# From the start of a TMA copy until its first bytes arrive from L2.
COPY_CLOCKS = 600

# A block's start: its launch, its barriers, and its first keys, which nothing overlaps.
BLOCK_START_CLOCKS = 600
# Microseconds to clear the work-tile counter: a small kernel between two others.
CLEAR_COUNTER_US = 2
