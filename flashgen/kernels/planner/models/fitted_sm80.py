"""Constants of the sm_80 cost models that were fitted, counted or assumed.

"Fitted": the smallest number with which no chosen tile spills, over compiled kernels of all dtypes,
head dims and kinds of spec (tests/planner/test_compiled.py).
"Counted": instructions read from the machine code of the same kernels.

A mapping by 2 and 4 is by bytes per operand element: 2 for float16 and bfloat16, 4 for float32.
"""

from __future__ import annotations

from fractions import Fraction

# ---- forward: registers per thread, fitted -------------------------------------------------------

# Besides the accumulators: fragments, row statistics and addresses.
FORWARD_REGISTERS = {2: 64, 4: 62}
# For each accumulator element of S, while it becomes an operand of P V.
FORWARD_PENDING = {2: Fraction(1, 8), 4: Fraction(1, 2)}

# Besides the columns of O and the fragments of P, where warps exchange P.
EXCHANGE_REGISTERS = 56

# Registers that a spec adds, on the sm_90a path too. A score_mod is evaluated for several elements
# at once. A mask that is not one interval of keys per row is evaluated for each tile. From sm_90
# on, the compiler interleaves more instructions.
FORWARD_SCORE_MOD_REGISTERS = 16
FORWARD_MASK_REGISTERS = 4
FORWARD_NEWER_ARCH_REGISTERS = 4
FORWARD_DROPOUT_REGISTERS = 10
# In calls with split keys or pages: addresses of pages, and room for the compiler, because all
# these calls have one tile, with or without pages, packed queries and shared tiles.
FORWARD_SERVED_REGISTERS = 16
# Where rows of K are longer than rows of V, more loads of K are in flight than the size of O
# suggests: one register for each of this number of elements.
LONGER_K_ELEMENTS_PER_REGISTER = 16

# ---- forward: instructions, counted --------------------------------------------------------------

# Per score element: maximum, scaling, exponential, sum and rounding; for float32 P is split into
# three numbers of bfloat16.
FORWARD_INSTRUCTIONS = {2: 4.5, 4: 10}
# Per step and row group: loop, addresses, barriers, row statistics.
FORWARD_STEP_INSTRUCTIONS = 100
# float32, forward and backward: to load an element of a fragment from shared memory and split it.
SPLIT_INSTRUCTIONS = 6.6
# Per access of a copy to shared memory: cp.async of a 16-byte vector, or a load and a store of one
# element with its address.
VECTOR_COPY_INSTRUCTIONS = 1
ELEMENT_COPY_INSTRUCTIONS = 3

# ---- backward: registers per thread, fitted ------------------------------------------------------

# By kernel and operand size, besides the accumulators: a constant, and a number per row group.
BACKWARD_REGISTERS = {
    ("dkdv", 2): (56, 0),
    ("dkdv", 4): (80, 0),
    ("fused", 2): (66, 0),
    ("fused", 4): (80, 0),
    ("dq", 2): (52, 4),
    ("dq", 4): (68, 8),
    ("captured", 2): (60, 4),
    ("captured", 4): (80, 8),
}
# Tangents, in the same way.
TANGENT_REGISTERS = {2: (56, 8), 4: (72, 12)}
# For each accumulator element of S and dP, for values that are being made or used. A fragment of
# float32 is three times as large as one of 16 bits. Random bits are made for several elements.
BACKWARD_PENDING = {2: 1 / 8, 4: 1 / 2}
BACKWARD_DROPOUT_PENDING = 1 / 8
# "fused": registers of the dQ tile by its columns per warp, divided by 32 * dq_row_warps per query.
FUSED_DQ_REGISTERS = {2: "dq_columns*9/8", 4: "2*dq_columns + 24"}

# Registers that a spec adds. A score_mod comes with its derivative.
BACKWARD_SCORE_MOD_REGISTERS = 16
BACKWARD_MASK_REGISTERS = 12
BACKWARD_DROPOUT_REGISTERS = 28
BACKWARD_NEWER_ARCH_REGISTERS = {2: 8, 4: 16}  # from sm_90 on
BACKWARD_CONSUMER_ARCH_REGISTERS = 16  # sm_86 and sm_89: the compiler schedules them differently
UNEQUAL_HEAD_DIM_REGISTERS = 8  # operands of two row lengths are copied by two patterns
# For each index but one of a learned element that every score adds to by itself: 64-bit strides.
INDEX_REGISTERS = 10

# ---- backward: instructions, counted -------------------------------------------------------------

# Per score element, where a block owns keys and where it owns queries: exp2, the differences and
# products around it, and the rounding or splitting of what becomes an operand.
BY_KEYS_INSTRUCTIONS = {2: "5", 4: "23 - 5.5*exchanged"}
BY_QUERIES_INSTRUCTIONS = {2: "4.3", 4: "15"}
# Tangents: an exponential with its multiply-add, the distance of a score's tangent from the row's
# reference, a product, a sum, two halves of a rounding. For float32, assumed.
TANGENT_INSTRUCTIONS = {2: "6", 4: "20"}
# Per step: addresses, loads of LSE and delta, barriers.
BY_KEYS_STEP_INSTRUCTIONS = 170
BY_QUERIES_STEP_INSTRUCTIONS = 110
# Per step and tile of P or dS in shared memory: its addresses.
EXCHANGED_TILE_INSTRUCTIONS = 50
# "fused": per element of dQ, to add it in global memory.
ATOMIC_INSTRUCTIONS = 2.5

# ---- time, measured by others --------------------------------------------------------------------

# The best matrix product on A100 reaches 271.2 of 312 TFLOP/s (github.com/stas00/ml-engineering,
# compute/accelerator, maximum achievable matmul FLOPS). Assumed for mma.sync on other GPUs.
SUSTAINED_SHARE = 0.87
