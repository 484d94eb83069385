"""The errors when no tile fits or options contradict: what is needed, and what would fit."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from flashgen.kernels.planner.derivation import line_of, printed_line
from flashgen.kernels.planner.formulas import counted
from flashgen.kernels.planner.models.kernel_model import STEP
from flashgen.kernels.planner.search import Evaluated, evaluated, shapes, smallest
from flashgen.kernels.planner.tile_problem import Tile, TileProblem
from flashgen.shared.arch import facts, known_archs
from flashgen.shared.errors import PlanError
from flashgen.spec.language.lets import elements_of
from flashgen.spec.language.operations import MOST_EFFORT, effort
from flashgen.spec.language.spec import AttentionSpec


def no_tile_fits(problem: TileProblem, *, given_sram: bool) -> PlanError:
    """The error for a problem without a feasible tile.

    Args:
        given_sram: whether the caller gave M instead of using the architecture's.
    """
    least = smallest(problem)
    quantities, model = least.quantities, least.model
    if quantities["registers"] > quantities["register_limit"]:
        what = "no tile fits in the registers of a thread"
        needs, limit = f"{quantities['registers']:,g}", f"{quantities['register_limit']} per thread"
        line = line_of(model.registers, quantities, "register_limit")
    else:
        what = "no tile fits in shared memory"
        origin = "as given by sram" if given_sram else f"on {problem.arch.name}"
        needs, limit = f"{quantities['smem']:,} B", f"{quantities['M']:,} B per block {origin}"
        line = line_of(model.smem, quantities, "M")
    derived = textwrap.dedent("\n".join(printed_line(line)))
    where = _spec_text(problem.spec)
    return PlanError(
        what,
        where=where if problem.kernel == "forward" else f"{where}, kernel {problem.kernel}",
        numbers=f"needs {needs} at the smallest tile (block_q {quantities['block_q']}, "
        f"block_k {quantities['block_k']}); limit {limit}\n{derived}",
        way_out="\n".join(_ways_out(problem, least, given_sram)),
    )


def given_tile(problem: TileProblem, tile: Tile) -> Evaluated:
    """The tile that a caller gives for a kernel.

    Raises:
        PlanError: the kernel cannot have it.
    """
    if replace(tile, blocks=1) not in shapes(problem) or tile.blocks < 1:
        numbers = "the template does not support this combination of step, warps and sharing"
    else:
        candidate = evaluated(problem, tile)
        if not candidate.excesses:
            return candidate
        broken = candidate.excesses[0]
        needs, limit = counted(broken.needs), counted(broken.limit)
        numbers = f"{broken.quantity}: {needs} against {limit} {broken.unit}".rstrip()
    raise PlanError(
        "the kernel cannot have the given tile",
        where=f"{_spec_text(problem.spec)}, kernel {problem.kernel}, {tile}",
        numbers=numbers,
        way_out="one of flashgen.kernels.planner.feasible(spec, arch, kernel=...), or leave it out",
    )


def heads_cannot_share(problem: TileProblem, why: str) -> PlanError:
    """The error for a number of heads per tile that no tile can have."""
    return PlanError(
        "these heads cannot share a tile",
        where=f"{_spec_text(problem.spec)}, plan(heads_per_tile=...)",
        numbers=f"given {problem.heads_per_tile!r} on {problem.arch.name}: {why}",
        way_out="heads_per_tile=1, or leave it out: each call chooses it by its sizes",
    )


MOST_PARTS = 4
"""Parts of the columns of V that calls compute in turn: each computes all scores again."""


def columns_of_parts(dim: int) -> Iterator[int]:
    """The columns of a part of ``dim`` columns of V, for two parts and more.

    Each part begins at a multiple of 16 B, in codes of 8 bits too, and so 16 columns have no parts.
    """
    widths = (STEP * math.ceil(dim / parts / STEP) for parts in range(2, MOST_PARTS + 1))
    yield from (width for width in dict.fromkeys(widths) if width < dim)


MOST_LEARNED = 64
"""Elements of learned tensors that a score reads: a kernel has code for the gradient of each, and
these take the compiler about 4 s."""


def check_size(spec: AttentionSpec) -> None:
    """Raises PlanError if the mods of a spec are larger than a kernel can hold."""
    learned = {tensor.symbol for tensor in spec.tensors if tensor.grad}
    learned_reads = sum(element.tensor in learned for element in elements_of(spec.score))
    if learned_reads > MOST_LEARNED:
        raise PlanError(
            "score_mod reads too many elements of learned tensors for a kernel",
            where=_spec_text(spec),
            numbers=f"{learned_reads:,} elements with a gradient each; limit {MOST_LEARNED}",
            way_out="grad=False for tensors that need no gradient, or sums of these elements that "
            "are computed before the call",
        )
    needs = effort((spec.mask, spec.score))
    if needs > MOST_EFFORT:
        raise PlanError(
            "the mods of this spec are too large for a kernel",
            where=_spec_text(spec),
            numbers=f"about {needs:,} additions, with a function as several; "
            f"limit {MOST_EFFORT:,}: {needs / MOST_EFFORT:.3g} times too many",
            way_out="a captured tensor (fg.Tensor) with values that are computed before the call",
        )


def _spec_text(spec: AttentionSpec) -> str:
    """The spec as an error names it: ``specs/softcap.py:9  softcap(head_dim=256, ...)``."""
    line = spec.mask_line or spec.score_line
    dims = f"head_dim={spec.head_dim}"
    if spec.head_dim_v not in (None, spec.head_dim):
        dims += f", head_dim_v={spec.head_dim_v}"
    return (f"{line}  " if line else "") + f"{spec.name}({dims}, dtype={spec.dtype})"


def _ways_out(problem: TileProblem, least: Evaluated, given_sram: bool) -> Iterator[str]:
    """Changes with which the smallest tile, ``least``, fits; each is checked with the model."""
    needed, registers = int(least.quantities["smem"]), least.quantities["registers"]
    d_qk, d_v = problem.quantities["d_qk"], problem.quantities["d_v"]
    if problem.quantities["e"] > 2:
        half = smallest(problem.with_quantities(e=2))
        if not half.excesses:
            yield f'dtype="float16" ({int(half.quantities["smem"]):,} B)'
    for dim in range(int(max(d_qk, d_v)) - 8, 0, -8):
        lower = smallest(problem.with_quantities(d_qk=min(d_qk, dim), d_v=min(d_v, dim)))
        if not lower.excesses:
            # spec.replace(head_dim=...) keeps a head_dim_v that differs.
            dims = {"head_dim": d_qk, "head_dim_v": d_v if d_v != d_qk else 0}
            changed = ", ".join(f"{name}={dim}" for name, size in dims.items() if size > dim)
            yield f"{changed} ({int(lower.quantities['smem']):,} B)"
            break
    two_tensors = problem.with_two_tensors()
    for columns in columns_of_parts(int(d_v)):
        if not smallest(two_tensors.with_quantities(d_v=columns)).excesses:
            option = "" if two_tensors is problem else "shared_kv=False, "
            yield (
                f"{option}head_dim_v={columns}, the kernel of a part of the columns of v: "
                "a call computes them part by part"
            )
            break
    enough = registers <= least.quantities["register_limit"]
    fitting_archs = [
        name for name in known_archs() if enough and facts(name).smem_per_block >= needed
    ]
    if given_sram and enough:
        available = problem.arch.smem_per_block
        yield f"sram={needed}" + (f", or none for {problem.arch.name}'s own {available:,} B")
    elif fitting_archs:
        yield f"arch={' or '.join(fitting_archs)}"
    else:
        yield "tensors on the CPU, where no tile has to fit"
