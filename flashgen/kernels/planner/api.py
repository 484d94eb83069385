"""The planner's functions: plans of the forward kernel, of a backward pass, of all tiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flashgen.kernels.planner import paper_policy
from flashgen.kernels.planner.backward_plan import BackwardPlan
from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.duration import decoding_tile
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.codes_sm80 import quantities_of
from flashgen.kernels.planner.models.spec_terms import (
    most_registers_served,
    served_registers,
)
from flashgen.kernels.planner.plan_errors import (
    check_size,
    given_tile,
    heads_cannot_share,
    no_tile_fits,
)
from flashgen.kernels.planner.plan_of_tile import plan_of_tile
from flashgen.kernels.planner.requests import (
    NO_SPARE_REGISTERS,
    NO_TILES,
    BackwardPlanRequest,
    PlanRequest,
    tangents_of,
)
from flashgen.kernels.planner.schedule import why_walks_differ
from flashgen.kernels.planner.search import (
    Evaluated,
    cheapest,
    evaluated,
    has_whole_boxes,
    obstacles_to_sharing,
    occupancies,
    shapes,
    warps_to_copy,
)
from flashgen.kernels.planner.tile_problem import Tile, TileProblem, problem_of
from flashgen.shared.arch import facts, portable
from flashgen.shared.errors import called_by_users
from flashgen.shared.launch_facts import DecodingTile
from flashgen.shared.split_choice import (
    choose_split,
    usual_group,
    usual_heads_kv,
)
from flashgen.spec.language.chosen_specs import spec_of_kernels
from flashgen.spec.language.signature import without_codes
from flashgen.spec.language.spec import AttentionSpec

MOST_OF_PREFILL = 1.1
"""The cost of the tile of calls with split keys over that of the cheapest one, at most: a prefill
has the keys of a tile that calls of one query have."""


@called_by_users()
def plan(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    access_bytes: int | None = None,
    spare_registers: int = 0,
    tile: Tile | None = None,
    heads_per_tile: int = 1,
    few_rows: int = 0,
    unpaired: bool = False,
) -> Plan:
    """Plans the forward kernel of ``spec``: tiles, warps, stages and shared-memory layout.

    ``print(plan)`` shows the derivation: each quantity as a formula with its numbers and its limit.

    Args:
        spec: the variant to plan for. Where queries choose their keys, the plan is for the
            calls in which a group of queries is a sequence.
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100" or "sm_120".
        sram: shared memory per block in bytes, M in the derivation, instead of the architecture's.
            The SM then has this amount plus the 1 KiB that the system reserves.
        policy: "derived" chooses the feasible tile of least predicted cost. "paper" chooses the
            tile of Algorithm 1 of FlashAttention (Dao et al., 2022), Bc = ceil(M/4d) and
            Br = min(Bc, d) with M in elements, rounded to a tile that the kernel can run.
        access_bytes: 16 (default) for tensors whose addresses and strides are multiples of 16
            bytes; the operand size in bytes for all other tensors.
        spare_registers: registers per thread that are left free beyond the model's number.
            `flashgen.build` raises it if the compiler spills.
        tile: a tile to plan with, whatever its cost, instead of the tile that the policy chooses.
        heads_per_tile: number of query heads that share K and V and one tile, of which each has an
            equal share of the rows. A number that does not divide the rows has the share of the
            next power of two. For a mask and block layout that are the same for all heads.
        few_rows: rows of a call with split keys or pages, for which a tile of fewer warps is
            planned where it takes less time for a key; 0 for the tile of all calls. The bits of a
            row are the same in both tiles.
        unpaired: whether blocks form no clusters: in a short call one more tile of queries, for a
            pair, may take longer. The bits of a row are the same.

    Returns:
        A frozen plan, with sizes in bytes and predicted costs in clocks of an SM per score element.

    Raises:
        PlanError: the architecture is unknown, an option is invalid, or no tile (or not the given
            tile) fits.
    """
    return plan_forward(
        PlanRequest(
            *(spec, arch, sram, policy, access_bytes, spare_registers, tile, heads_per_tile),
            few_rows=few_rows,
            unpaired=unpaired,
        )
    )


FEW_PAIRS = "no cluster: the tiles of queries are so few that one more for pairs takes longer"


@functools.lru_cache(maxsize=1024)
def plan_forward(request: PlanRequest) -> Plan:
    """See `plan`."""
    spec = request.spec
    check_size(spec)
    if spec.kv_dtype is not None:
        return _plan_of_codes(request)
    problem = problem_of(
        spec,
        facts(request.arch),
        request.sram,
        request.access_bytes or 16,
        request.spare_registers,
        heads_per_tile=request.heads_per_tile,
    )
    if request.heads_per_tile != 1:
        _check_heads(problem)
    if request.tile is not None:
        return plan_of_tile(problem, given_tile(problem, request.tile), "given")
    if spec.is_served and request.policy == "derived":
        return _plan_of_split_keys(problem, request)
    notes: tuple[str, ...] = ()
    if request.policy == "paper":
        chosen, notes = paper_policy.tile_of_paper(problem)
    else:
        chosen = cheapest(problem)
    if chosen is None:
        if cheapest(replace(problem, heads_per_tile=1)) is not None:
            raise heads_cannot_share(
                problem, f"no tile that fits has {_shares(problem)} rows for each of them"
            )
        raise no_tile_fits(problem, given_sram=request.sram is not None)
    if request.unpaired and chosen.tile.cluster > 1:
        alone = evaluated(problem, replace(chosen.tile, cluster=1))
        return plan_of_tile(problem, alone, "given", (*notes, FEW_PAIRS))
    return plan_of_tile(problem, chosen, request.policy, notes)


def _plan_of_codes(request: PlanRequest) -> Plan:
    """The plan of a spec whose cache has codes, on the path that all architectures have. Threads
    convert the codes that they copy.

    A tile has as many keys as without codes, so that results have the same bits. A call with few
    rows has a tile of few warps.
    """
    spec, arch = without_codes(request.spec), facts(portable(request.arch))
    plain = plan_forward(replace(request, spec=spec, arch=arch.name, few_rows=0))
    problem = problem_of(
        spec,
        arch,
        request.sram,
        request.access_bytes or 16,
        request.spare_registers,
        heads_per_tile=request.heads_per_tile,
    )
    in_tiles, in_registers = (
        problem.with_quantities(**quantities_of(problem, request.spec.kv_dtype, in_registers=form))
        for form in (False, True)
    )
    wide = evaluated(in_tiles, plain.tile)

    def tile_of_rows(rows: int) -> tuple[TileProblem, Evaluated]:
        candidates = [(in_tiles, wide)]
        if request.tile is None:
            for form in (in_tiles, in_registers)[: 2 if plain.tile.column_warps == 1 else 1]:
                few = _tiles_of_few_rows(form, plain.tile, rows)
                candidates += [(form, x) for x in few if form is in_tiles or x.tile.warps == 1]
        return min(candidates, key=lambda pair: _clocks_of_a_key(pair[1]))

    form, chosen = tile_of_rows(request.few_rows)
    group = usual_group(one_tensor="one_tensor" in problem.quantities)
    decoding = decoding_tile(plan_of_tile(*tile_of_rows(group), "given"), wide.cost, wide.cost)
    converted = "in shared memory, by the thread that copied it"
    if form is in_registers:
        converted = "in the registers of its product, as one warp has all rows"
    note = f"{request.spec.kv_dtype} codes: each is converted once, {converted}"
    planned = plan_of_tile(form, chosen, "given", (*plain.notes[1:], note))
    return replace(planned, decoding=decoding)


def plan_backward(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    deterministic: bool = False,
    spare_registers: Mapping[str, int] = NO_SPARE_REGISTERS,
    tiles: Mapping[str, Tile] = NO_TILES,
) -> BackwardPlan:
    """The kernels of the backward pass of ``spec``, their tiles, and the reasons for the choice.

    Args:
        arch, sram: as for `plan`.
        deterministic: only kernels whose gradients are bitwise reproducible.
        spare_registers: registers per thread to keep free beyond the model's need, by kernel:
            "dkdv", "dq", "fused", "captured", "captured_exact".
        tiles: by kernel, the tiles to plan with, whatever their cost. Where they include all
            kernels of a scheme, that scheme is chosen.

    Raises:
        PlanError: the architecture is unknown, an option is wrong, or no tile, or not a given
            tile, fits.
        SpecError: the spec is a partial result, which has no backward pass.
    """
    pairs = tuple(sorted(spare_registers.items())), tuple(sorted(tiles.items()))
    return plan_schemes(BackwardPlanRequest(spec, arch, sram, deterministic, *pairs))


def feasible(
    spec: AttentionSpec, arch: str = "sm_80", *, kernel: str = "forward", sram: int | None = None
) -> tuple[Plan, ...]:
    """A plan for every feasible tile of a kernel, the cheapest first; () where no tile fits.

    Args:
        arch, sram: as for `plan`.
        kernel: "forward", or a backward kernel: "dkdv", "dq", "fused", "captured" or
            "captured_exact"; or "tangent", with the tangents of all operands.

    Raises:
        PlanError: the architecture is unknown.
    """
    spec = spec_of_kernels(spec)
    moving = tangents_of(spec) if kernel == "tangent" else ()
    problem = problem_of(spec, facts(arch), sram, 16, 0, kernel, tangents=moving)
    fitting = (
        candidate
        for shape in shapes(problem)
        for candidate in occupancies(problem, shape)
        if not candidate.excesses
    )
    ranked = sorted(fitting, key=lambda candidate: candidate.rank)
    return tuple(plan_of_tile(problem, candidate, "given") for candidate in ranked)


def _plan_of_split_keys(problem: TileProblem, request: PlanRequest) -> Plan:
    """The plan of calls with split keys: all have one tile, however many heads share it.

    Raises:
        PlanError: no tile fits, or this number of heads cannot share the tile.
    """
    # The bits of a row depend on block_k, which therefore may depend neither on the lengths of a
    # call nor on its heads.
    shared = replace(problem, heads_per_tile=2)
    least = cheapest(shared)
    if least is None:
        raise no_tile_fits(problem, given_sram=request.sram is not None)
    tile, decoding = _served_tile(shared, least)
    chosen = _tile_of_few_rows(problem, given_tile(problem, tile), request.few_rows)
    extra = problem.quantities["extra"] - served_registers(request.spec, problem.path.name)
    best = cheapest(replace(problem, heads_per_tile=1).with_quantities(extra=extra))
    assert best is not None, "the tile itself can have one head"
    notes = [
        f"split keys: one tile for every call, which any heads can share: "
        f"{chosen.cost:.4f} clk against {best.cost:.4f} of the best one"
    ]
    if decoding.cost > decoding.least_cost:
        notes.append(
            f"calls of one query want block_k {tile.step} rather than {least.tile.step}, "
            f"with which a prefill takes {decoding.cost / decoding.least_cost:.3f} times the clocks"
        )
    # Two heads can share all tiles of more than 16 rows, where no box of TMA has rows of both.
    policy = "given" if problem.path.copies_by_tma else request.policy
    return replace(plan_of_tile(problem, chosen, policy, tuple(notes)), decoding=decoding)


def _served_tile(problem: TileProblem, least: Evaluated) -> tuple[Tile, DecodingTile]:
    """The tile of all calls with split keys, and the tile of calls with few rows.

    The keys of a tile divide the keys of a split, on which the time of calls of one query depends.
    Among the tiles that cost little more than the cheapest one, the function chooses the tile with
    which such calls take the least time, in the mean of `flashgen.shared.split_choice.LOADS`. Calls
    with pages and without have one tile.
    """
    most = most_registers_served(problem.spec, problem.quantities)
    with_most = problem.with_quantities(**most)
    choices = []
    group = usual_group(one_tensor="one_tensor" in problem.quantities)
    for step in range(least.tile.unit, least.model.max_step + 1, least.tile.unit):
        tile = replace(least.tile, step=step)
        candidate = evaluated(problem, tile)
        divides = has_whole_boxes(problem, tile) < has_whole_boxes(problem, least.tile)
        if candidate.excesses or divides or candidate.cost > MOST_OF_PREFILL * least.cost:
            continue
        few = _tile_of_few_rows(with_most, candidate, group)
        decoding = decoding_tile(plan_of_tile(problem, few, "given"), candidate.cost, least.cost)
        plan = replace(plan_of_tile(problem, candidate, "given"), decoding=decoding)
        heads_kv = usual_heads_kv(one_tensor=plan.one_tensor)
        choices.append((choose_split(plan, heads_kv, problem.arch.sms).mean, tile, decoding))
    _, chosen, decoding = min(choices)
    return chosen, decoding


def _tile_of_few_rows(problem: TileProblem, wide: Evaluated, rows: int) -> Evaluated:
    """The best tile of fewer warps with the keys and the exponentials of ``wide``, or ``wide``."""
    candidates = [wide]
    columns = {"fma_columns": wide.quantities.get("fma_columns", 0)}
    for candidate in _tiles_of_few_rows(problem, wide.tile, rows):
        quantities = candidate.model.costs({**candidate.quantities, **columns})
        candidates.append(replace(candidate, quantities=quantities, cost=float(quantities["cost"])))
    return min(candidates, key=_clocks_of_a_key)


def _tiles_of_few_rows(problem: TileProblem, wide: Tile, rows: int) -> Iterator[Evaluated]:
    """The tiles that fit, with the keys of ``wide``, and fewer rows, but at least ``rows`` of them;
    none for 0 rows."""
    warps = problem.model.warps_of_few_rows * wide.column_warps
    while rows and 0 < warps <= wide.warps:
        for row_groups in sorted({1, wide.row_groups}):
            tile = replace(wide, warps=warps, row_groups=row_groups, blocks=1)
            if rows <= tile.owned < wide.owned and warps >= warps_to_copy(problem):
                yield from (x for x in occupancies(problem, tile) if not x.excesses)
        warps *= 2


def _clocks_of_a_key(candidate: Evaluated) -> float:
    """Clocks that a tile takes for one key, for all its rows, also where a call has fewer."""
    return candidate.cost * candidate.tile.owned


def _check_heads(problem: TileProblem) -> None:
    """Checks that some tile can be shared by the problem's number of heads.

    Raises:
        PlanError: no tile, whether it fits or not, can be shared by this number of heads.
    """
    heads = problem.heads_per_tile
    why = why_walks_differ(problem.spec)
    tiles = {tile.owned for tile in shapes(problem)}
    dropout = problem.quantities["dropout_ops"] > 0
    if not why and all(
        any(obstacles_to_sharing(problem.path, rows, heads, dropout=dropout)) for rows in tiles
    ):
        why = f"no tile has {_shares(problem)} rows for each of them"
    if why:
        raise heads_cannot_share(problem, why)


def _shares(problem: TileProblem) -> str:
    """The numbers of rows that each head of a shared tile can have."""
    few = "" if problem.quantities["dropout_ops"] else "1, 2, 4, 8, "
    if problem.path.copies_by_tma:
        return f"{few}16, 32 or a multiple of 64"
    return f"{few}{'or ' if few else ''}a multiple of 16"
