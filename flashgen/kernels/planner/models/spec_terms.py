"""What a spec and an architecture add to a model: registers, and instructions per score."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

import sympy
from sympy.core.relational import Relational

from flashgen.kernels.planner.models import fitted_common, fitted_sm80, fitted_sm90
from flashgen.kernels.planner.models.kernel_model import LEARNED_KERNELS
from flashgen.kernels.planner.quantities import Number, Quantities
from flashgen.shared.arch import Arch
from flashgen.shared.dtypes import ITEMSIZE, OPERANDS
from flashgen.shared.launch_facts import KEY_KERNELS
from flashgen.shared.paths import PATHS
from flashgen.spec.analysis.diagonals import (
    code_of_mask,
    is_costly_for_scores,
    is_of_distance,
    known_positions,
    natural_positions,
)
from flashgen.spec.analysis.folding import FoldedScore, folded
from flashgen.spec.analysis.intervals import WalkedAxis, reach, row_interval
from flashgen.spec.analysis.invariants import Level, LeveledCode
from flashgen.spec.analysis.score import analyse_score, kind_of_sum
from flashgen.spec.analysis.windows import Window, window_of
from flashgen.spec.language.bit_functions import RandomBits
from flashgen.spec.language.divisors import is_data, is_power_of_two
from flashgen.spec.language.float_functions import FloatFunction
from flashgen.spec.language.float_operations import FloatPower, FloatQuotient, in_reals
from flashgen.spec.language.integer_limits import limits
from flashgen.spec.language.lets import contains, elements_of, parts_of, replaced
from flashgen.spec.language.operations import is_fraction_power
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import DISTANCE, PRODUCT, SCALE, SCORE, K, Q, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from flashgen.spec.language.tensor_elements import Element

# ---- instructions per score element --------------------------------------------------------------

_HALF = sympy.Rational(1, 2)


def score_instructions(spec: AttentionSpec, kernel: str, *, folds: bool = True) -> int:
    """Instructions of score_mod per score; in backward kernels with its derivative.

    Each score counts its share of what the scores of a row or of a column have in common. What all
    scores of a head have in common is not counted.

    Args:
        folds: whether factors are folded where they can be.
    """
    if spec.score == SCORE:
        return 0 if spec.is_softmax else 1  # the product with the scale, which no exponent has
    code, folds = _code_of_score(spec, kernel, folds)
    # A score that is not folded is multiplied by the scale.
    return math.ceil(_per_score(code, spec, kernel) + len(code.block.results) - folds)


def spared_instructions(spec: AttentionSpec, kernel: str) -> int:
    """Instructions per score that the models count for a softmax and that other weights lack."""
    if spec.is_softmax:
        return 0
    kind = "forward" if kernel == "forward" else "backward"
    return fitted_common.SOFTMAX_INSTRUCTIONS[kind][spec.sums_weights]


def special_functions(spec: AttentionSpec, kernel: str) -> float:
    """Instructions of special-function units per score that score_mod takes, such as tanh."""
    if spec.score == SCORE:
        return 0
    code, _ = _code_of_score(spec, kernel, folds=True)
    values, lets = dict(code.block.lets), code.needed(Level.SCORE)
    # How many of the scores of a lane have values of their own, by symbol.
    share = dict.fromkeys((SCORE, PRODUCT, Q, K), 1.0)
    share[DISTANCE] = fitted_common.OWN_DISTANCES
    for let in lets:
        share[let] = _share(values[let], share)
    parts = [*(values[let] for let in lets), *code.block.results]
    nodes = (node for part in parts for node in sympy.preorder_traversal(part))
    return sum(_special(node, share, OPERANDS[spec.dtype].approximates) for node in nodes)


def _share(expr: sympy.Basic, share: Mapping[sympy.Symbol, float]) -> float:
    return max((share.get(symbol, 0.0) for symbol in expr.free_symbols), default=0.0)


def _special(node: sympy.Basic, share: Mapping[sympy.Symbol, float], fast: bool) -> float:
    """The instructions of special-function units of a node of the score's code.

    Args:
        share: the share of a lane's scores that have values of their own, by symbol; else 0.
        fast: as in `_operations`.
    """
    if isinstance(node, FloatQuotient):  # a product with the reciprocal, which may be shared
        return _share(node.args[1], share)
    if isinstance(node, FloatFunction):
        return node.special[0 if fast else 1] * _share(node, share)
    if isinstance(node, FloatPower | sympy.Pow) and not is_int(node):
        return _special_of_power(node, fast) * _share(node, share)
    return 0


def _special_of_power(power: sympy.Basic, fast: bool) -> int:
    """The instructions of special-function units of a power, as the printer of floats writes it."""
    exponent = power.args[1]
    if abs(exponent) == _HALF:
        return 1  # a root, or its reciprocal
    if fast and is_fraction_power(power):
        return 2
    divides = exponent.is_Rational and bool(exponent < 0)
    return int(divides) + int(not exponent.is_Integer)


def _code_of_score(spec: AttentionSpec, kernel: str, folds: bool) -> tuple[LeveledCode, bool]:
    """The code of score_mod in a kernel, and whether its factors are folded."""
    analysis, folded_form = analyse_score(spec.score), folded_score(spec, kernel) if folds else None
    if folded_form is None:
        return (analysis.value if kernel == "forward" else analysis.value_and_derivative), False
    code = folded_form.code if kernel == "forward" else folded_form.code_with_slope
    assert code is not None, "a folded score of a backward kernel has its slope"
    return code, True


def mask_instructions(spec: AttentionSpec, kernel: str, *, in_parts: bool = False) -> float:
    """Instructions per score of a tile whose mask or block layout is evaluated.

    Each score is compared with the range of its row, or the mask's expression is evaluated, and the
    score is replaced where it is not kept.

    Args:
        in_parts: whether blocks of a layout are tested for several rows and columns at once.
    """
    choice = fitted_common.MASKING_INSTRUCTIONS
    if spec.block_sparse is not None and not in_parts:
        choice += fitted_common.LAYOUT_INSTRUCTIONS
    if row_interval(spec.mask) is not None:
        return choice
    code = code_of_mask(spec.mask, natural_positions(spec.mask, known_positions(spec)))
    if is_of_distance(spec.mask) and (spec.block_sparse is None or in_parts):
        evaluated = _per_score(code, spec, kernel) + fitted_common.WORD_OF_DISTANCES_INSTRUCTIONS
        return choice + evaluated / fitted_common.SCORES_OF_DISTANCE
    if kernel != "forward":
        choice += fitted_common.WORD_OF_PAIR_INSTRUCTIONS
    elif is_costly_for_scores(spec.mask):
        choice += fitted_common.LOOP_INSTRUCTIONS
    return choice + _per_score(code, spec, kernel, exchanges=spec.block_sparse is None or in_parts)


def _per_score(
    code: LeveledCode, spec: AttentionSpec, kernel: str, *, exchanges: bool = False
) -> float:
    """Instructions of code per score, with a share of what a row or a column has in common.

    Args:
        exchanges: whether lanes compute what a column shares for some columns each, and exchange
            it: an instruction for each value.
    """
    # In place of the scale, a number: products of numbers are computed once.
    lets = {let: replaced(value, {SCALE: _HALF}) for let, value in code.block.lets}
    results = [replaced(result, {SCALE: _HALF}) for result in code.block.results]
    parts = {level: [lets[let] for let in code.needed(level)] for level in Level}
    rows, columns = (Level.KEY, Level.QUERY) if kernel in KEY_KERNELS else (Level.QUERY, Level.KEY)
    fast = OPERANDS[spec.dtype].approximates

    def count(level: Level) -> int:
        return sum(_operations(expr, fast) for expr in parts[level])

    result_ops = sum(_operations(expr, fast) for expr in results)
    column_ops: float = count(columns)
    if exchanges:
        used = set().union(*(expr.free_symbols for expr in (*parts[Level.SCORE], *results)))
        column_ops /= fitted_common.LANES_OF_COLUMN
        column_ops += len(used & set(code.needed(columns)))
    shared = count(rows) / fitted_common.SCORES_OF_ROW + column_ops / fitted_common.SCORES_OF_COLUMN
    return count(Level.SCORE) + result_ops + shared


def folded_score(spec: AttentionSpec, kernel: str) -> FoldedScore | None:
    """The score function of a kernel with its factors folded; None where it is as written."""
    if ITEMSIZE[spec.dtype] == 4 or kernel in LEARNED_KERNELS or not spec.is_softmax:
        return None
    learns = any(tensor.grad for tensor in spec.tensors)
    slope = analyse_score(spec.score).derivative
    # A row of a served call has the same bits in every kernel of its spec.
    result = folded(spec.score, slope, shifts=not learns, distances=not spec.is_served)
    if result is None:
        return None
    return result if kernel == "forward" or result.code_with_slope is not None else None


def moving_terms(spec: AttentionSpec, tangents: Collection[str]) -> dict[str, Number]:
    """Which of the operands and of the scores of a call have a tangent, as numbers: 0 or 1.

    Args:
        tangents: the names of the tensors that have one.
    """
    reads_product = SCORE in spec.score.free_symbols
    learned = {tensor.name for tensor in spec.tensors if tensor.symbol in spec.score.free_symbols}
    moves = {f"{name}_moves": int(reads_product and name in tangents) for name in ("q", "k")}
    scores = any(moves.values()) or not learned.isdisjoint(tangents)
    return {**moves, "v_moves": int("v" in tangents), "scores_move": int(scores)}


def dropout_instructions(spec: AttentionSpec, kernel: str) -> int:
    """Instructions of dropout: random bits, comparison and selection."""
    if not spec.dropout:
        return 0
    if kernel in KEY_KERNELS:  # their scores are transposed
        return fitted_common.TRANSPOSED_DROPOUT_INSTRUCTIONS
    return fitted_common.DROPOUT_INSTRUCTIONS


@lru_cache(maxsize=1 << 14)
def _operations(expr: sympy.Basic, fast: bool) -> int:
    """Instructions of an expression, including the addresses of elements of captured tensors.

    Args:
        fast: whether the operands' dtype allows fast approximations.
    """
    parts = [in_reals(part) for part in parts_of(expr)]
    indices = sum(len(element.indices) for element in elements_of(expr))
    total = sum(int(sympy.count_ops(part)) for part in parts)
    total += fitted_common.READ_INSTRUCTIONS * indices
    for node in (node for part in parts for node in sympy.preorder_traversal(part)):
        if isinstance(node, FloatFunction):
            total += node.instructions[0 if fast else 1] - 1
        elif isinstance(node, RandomBits):
            total += fitted_common.RANDOM_INSTRUCTIONS - 1
        elif isinstance(node, FloorDiv | FloorMod):
            total += _division_instructions(node) - 1
        elif isinstance(node, sympy.And | sympy.Or):
            # A comparison joins its result with another condition, and a negation is part of both.
            others = sum(not isinstance(arg, Relational) for arg in node.args)
            total -= len(node.args) - max(others, 1)
        elif isinstance(node, sympy.Not):
            total -= 1
        elif isinstance(node, sympy.Eq | sympy.Ne) and _tests_multiples(node):
            total += fitted_common.MULTIPLE_INSTRUCTIONS - _division_instructions(node.lhs)
        if isinstance(node, sympy.Pow) and not (node.exp.is_Integer or abs(node.exp) == _HALF):
            total += _power_instructions(node, fast) - 1
        elif isinstance(node, sympy.Pow) and node.exp.is_Integer and node.exp > 2:
            bits = f"{int(node.exp):b}"  # repeated squaring
            total += len(bits) + bits.count("1") - 3
        if isinstance(node, sympy.Add):  # a product and a sum are one instruction
            total -= min(sum(arg.is_Mul for arg in node.args), len(node.args) - 1)
    return total


def _power_instructions(power: sympy.Pow, fast: bool) -> int:
    """Instructions of a power that is no product and no root, as printed for floats."""
    base, exponent = power.args
    if fast and base.is_number:
        return fitted_common.EXP2_INSTRUCTIONS
    is_integer_root = is_int(base) and exponent.is_Rational and exponent.q == 2
    if is_integer_root or (fast and is_fraction_power(power)):
        return fitted_common.FAST_POWER_INSTRUCTIONS
    return fitted_common.POWER_INSTRUCTIONS


def _tests_multiples(relation: Relational) -> bool:
    """Whether a comparison asks for multiples of a number that is known before the launch."""
    remainder, number = relation.args
    if not isinstance(remainder, FloorMod) or number != 0 or not is_int(remainder):
        return False
    divisor = remainder.args[1]
    is_known = divisor.is_Integer or (divisor.is_Symbol and not is_data(divisor))
    return is_known and not is_power_of_two(divisor)


def _division_instructions(node: FloorDiv | FloorMod) -> int:
    """Instructions of a quotient or a remainder, as the printer of integers writes it."""
    number, divisor = node.args
    if not is_int(node) or is_data(divisor) or not (divisor.is_Integer or divisor.is_Symbol):
        return fitted_common.DIVISION_INSTRUCTIONS
    if is_power_of_two(divisor):
        return 1
    if limits(divisor)[0] <= 0:
        return fitted_common.SIGNED_DIVISION_INSTRUCTIONS + isinstance(node, FloorMod)
    natural = node.natural or limits(number)[0] >= 0
    corrected = 0 if natural else fitted_common.ROUNDING_INSTRUCTIONS
    return fitted_common.QUOTIENT_INSTRUCTIONS + corrected + isinstance(node, FloorMod)


# ---- registers of path sm_80, and of the forward kernel on both paths ----------------------------


def registers_sm80(spec: AttentionSpec, arch: Arch, kernel: str, spare: int) -> dict[str, Number]:
    """The quantities by which a spec and an architecture add to a kernel's registers."""
    extra = _extra_sm80(spec, arch, kernel) + served_registers(spec, "sm_80") + spare
    if kernel == "forward":  # its formulas have a constant of their own for what is pending
        return {"extra": extra}
    pending = fitted_sm80.BACKWARD_PENDING[ITEMSIZE[spec.dtype]]
    pending += fitted_sm80.BACKWARD_DROPOUT_PENDING if spec.dropout else 0
    return {"extra": extra, "pending": pending}


def served_registers(spec: AttentionSpec, path: str) -> int:
    """The registers that calls with split keys or pages take more than other calls.

    The number is negative where consumers need fewer, because the producer searches for them.
    """
    if not spec.is_served:
        return 0
    if not PATHS[path].copies_by_tma:
        return fitted_sm80.FORWARD_SERVED_REGISTERS
    columns = spec.head_dim_v or spec.head_dim
    if columns > fitted_sm90.FORWARD_WIDE_COLUMNS and spec.block_sparse is None:
        return 0
    usual = columns in fitted_sm90.SERVED_HEAD_DIMS or is_wide(spec)
    reads = _reads_for_each_score(spec)
    # Elements and the values of a weight function are alive together.
    needed = (not usual or reads) + (reads and not spec.is_softmax)
    extra = fitted_sm80.FORWARD_SERVED_REGISTERS * (needed + (spec.block_sparse is not None))
    leaves = spec.paged and searches(spec) and not is_wide(spec)
    return extra - fitted_sm90.PAGED_SEARCH_REGISTERS * leaves


def is_wide(spec: AttentionSpec) -> bool:
    """Whether O, or the depth of Q K^T, has more columns than one wgmma can have.

    The kernels then make the descriptors of Q again in each step, so that served calls need no more
    registers. Consumers have no registers to leave to a producer that searches: it has as many
    without pages as with them, so that all calls have one tile.
    """
    return max(spec.head_dim, spec.head_dim_v or 0) > fitted_sm90.SHARED_BEYOND


def most_registers_served(spec: AttentionSpec, quantities: Quantities) -> dict[str, Number]:
    """The registers of the variant of a served spec, with or without pages, that takes the most.

    Args:
        quantities: the quantities of the spec.
    """
    if "searching" not in quantities or not searches(spec):
        return {}
    leaves = spec.paged and not is_wide(spec)
    extra = quantities["extra"] + fitted_sm90.PAGED_SEARCH_REGISTERS * leaves
    return {"extra": extra, "searching": max(quantities["searching"], fitted_sm90.GATHER_REGISTERS)}


def _extra_sm80(spec: AttentionSpec, arch: Arch, kernel: str) -> int:
    """Registers that do not depend on the tile."""
    fitted = fitted_sm80
    d_v = spec.head_dim_v or spec.head_dim
    has_score, has_interval = spec.score != SCORE, row_interval(spec.mask) is not None
    if kernel == "forward":
        newer = fitted.FORWARD_NEWER_ARCH_REGISTERS if arch.major >= 9 else 0
        score = fitted.FORWARD_SCORE_MOD_REGISTERS if has_score else 0
        words = has_interval or is_of_distance(spec.mask)
        mask = 0 if words else fitted.FORWARD_MASK_REGISTERS
        dropout = fitted.FORWARD_DROPOUT_REGISTERS if spec.dropout else 0
        longer = max(0, spec.head_dim - d_v) // fitted.LONGER_K_ELEMENTS_PER_REGISTER
        return newer + score + mask + longer + dropout
    if arch.major >= 9:
        newer = fitted.BACKWARD_NEWER_ARCH_REGISTERS[ITEMSIZE[spec.dtype]]
    else:
        newer = 0 if arch.name == "sm_80" else fitted.BACKWARD_CONSUMER_ARCH_REGISTERS
    score = fitted.BACKWARD_SCORE_MOD_REGISTERS if has_score else 0
    mask = 0 if has_interval else fitted.BACKWARD_MASK_REGISTERS
    dropout = fitted.BACKWARD_DROPOUT_REGISTERS if spec.dropout else 0
    unequal = fitted.UNEQUAL_HEAD_DIM_REGISTERS if spec.head_dim != d_v else 0
    indices = fitted.INDEX_REGISTERS * _learned_indices(spec, kernel)
    return newer + score + mask + unequal + dropout + indices


def _learned_indices(spec: AttentionSpec, kernel: str) -> int:
    """The largest number of indices but one of a learned element that each score adds to."""
    if kernel not in LEARNED_KERNELS:
        return 0
    learned = {tensor.symbol for tensor in spec.tensors if tensor.grad}
    read = (element for element in elements_of(spec.score) if element.tensor in learned)
    return max(
        (len(element.indices) - 1 for element in read if kind_of_sum(element) == "element"),
        default=0,
    )


# ---- registers of path sm_90a --------------------------------------------------------------------


def registers_sm90(spec: AttentionSpec, arch: Arch, kernel: str, spare: int) -> dict[str, Number]:
    """The quantities by which a spec adds to the registers of producers and consumers."""
    forward = kernel == "forward"  # a spec adds the same to the forward kernels of both paths
    extra = _extra_sm80(spec, arch, kernel) if forward else _extra_sm90(spec, kernel)
    return {
        "extra": extra + served_registers(spec, "sm_90a") + spare,
        "searching": _searching_sm90(spec, kernel, spare),
        **({} if forward else {"pending": _pending_sm90(spec)}),
        **({"first_plan": int(not spare)} if kernel == "fused" else {}),
    }


def _extra_sm90(spec: AttentionSpec, kernel: str) -> int:
    """Registers of a consumer thread of a backward kernel that do not depend on the tile."""
    fitted = fitted_sm90
    has_score = _score_pending(spec) > 0 or (spec.score != SCORE and not spec.dropout)
    score = fitted.SCORE_MOD_REGISTERS if has_score else 0
    mask = fitted.MASK_OF_TENSORS_REGISTERS if _mask_reads_elements(spec) else 0
    dropout = fitted.DROPOUT_REGISTERS if spec.dropout else 0
    indices = fitted.INDEX_REGISTERS * _learned_indices(spec, kernel)
    return score + mask + dropout + indices


def _pending_sm90(spec: AttentionSpec) -> float:
    """Registers of a consumer thread of a backward kernel per accumulator element of S and dP."""
    dropout = fitted_sm90.DROPOUT_PENDING if spec.dropout else 0
    mask = fitted_sm90.MASK_PENDING if _mask_reads_elements(spec) else 0
    return fitted_sm90.PENDING + dropout + mask + _score_pending(spec)


def _searching_sm90(spec: AttentionSpec, kernel: str, spare: int) -> int:
    """Registers of a producer thread, where it needs more than to evaluate one bound; else 0.

    Args:
        spare: registers to keep free. The compiler does not report which threads spill.
    """
    fitted = fitted_sm90
    row, reads = row_interval(spec.mask), _reads_elements(spec)
    two_ends = row is not None and None not in (row.lo, row.hi)
    if kernel == "forward" or spec.is_served:
        gathers = spec.block_sparse is not None and not spec.is_served
        wide_or_paged = spec.paged or (spec.is_served and is_wide(spec))
        if gathers or (wide_or_paged and searches(spec)):
            return fitted.GATHER_REGISTERS
        if row is None or spec.is_served or spare > fitted.SEARCH_BY_MASK_REGISTERS:
            return fitted.SEARCH_REGISTERS + fitted.SEARCH_BY_MASK_REGISTERS
        # A range with two ends that are made from quotients or from elements of tensors.
        two_costly = two_ends and (contains(spec.mask, FloorDiv, FloorMod) or reads)
        if spec.packed or two_costly:
            return fitted.SEARCH_REGISTERS
        return fitted.SEARCH_BY_BOUND_REGISTERS if searches(spec) else 0
    tests_tiles = spec.block_sparse is not None or row is None
    by_tensors = fitted.SEARCH_BY_TENSORS_REGISTERS
    more_spare = spare > fitted.SPARE_NOT_AHEAD
    if (tests_tiles and reads) or spare > by_tensors or (more_spare and reads):
        return fitted.SEARCH_REGISTERS + by_tensors
    if kernel in KEY_KERNELS and spec.block_sparse is not None:
        return fitted.GATHER_QUERIES_REGISTERS
    return fitted.SEARCH_REGISTERS if tests_tiles or reads or two_ends or more_spare else 0


def searches(spec: AttentionSpec) -> bool:
    """Whether key tiles are searched for: by a layout, or as bounds of the mask are not exact."""
    return spec.block_sparse is not None or not reach(spec.mask, WalkedAxis())[1]


def _reads_for_each_score(spec: AttentionSpec) -> bool:
    """Whether the score function reads an element of a tensor for each score of a tile.

    Where heads share a tile, that includes elements which depend on the head and the key.
    """
    return any(kind_of_sum(element) in ("element", "column") for element in elements_of(spec.score))


def _score_pending(spec: AttentionSpec) -> float:
    """Registers per accumulator element for the elements of tensors that the score reads."""
    read = elements_of(spec.score)
    return max((fitted_sm90.READ_PENDING[kind_of_sum(element)] for element in read), default=0.0)


def _mask_reads_elements(spec: AttentionSpec) -> bool:
    """Whether the mask is evaluated for each score and reads captured tensors then."""
    return row_interval(spec.mask) is None and _reads_elements(spec)


def _reads_elements(spec: AttentionSpec) -> bool:
    return next(iter(elements_of(spec.mask)), None) is not None


# ---- windows: sums of learned elements in shared memory, one set per warp ------------------------

MOST_WINDOWS = 16
"""The windows of a kernel: a lane keeps two registers for each. Elements beyond have none."""

Learned = tuple[tuple[Element, tuple[int | str, ...]], ...]
"""Elements of learned tensors, each with the dims of its tensor."""


def added_by_scores(spec: AttentionSpec, kernel: str) -> Learned:
    """The elements to whose gradients each score of a kernel adds for itself."""
    if kernel not in LEARNED_KERNELS:
        return ()
    dims = {tensor.symbol: tensor.dims for tensor in spec.tensors if tensor.grad}
    return tuple(
        (element, dims[element.tensor])
        for element in elements_of(spec.score)
        if element.tensor in dims and kind_of_sum(element) == "element"
    )


def windows_of(learned: Learned, rows: int, keys: int) -> Iterator[Window]:
    """The windows of a warp with this part of a tile, in the order of ``learned``."""
    for element, dims in learned[:MOST_WINDOWS]:
        window = window_of(element, dims, rows, keys)
        if window is not None:
            yield window


def window_bytes(kernel: str, dtype: str, learned: Learned, rows: int, keys: int) -> int:
    """Bytes of shared memory for the windows of one warp."""
    entries = sum(window.entries for window in windows_of(learned, rows, keys))
    return (8 if kernel == "captured_exact" else OPERANDS[dtype].sums.itemsize) * entries
