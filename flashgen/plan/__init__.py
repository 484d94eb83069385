"""Block sizes derived from the SRAM size M, registers and traffic; with the derivation.

``plan(spec, arch)`` enumerates the tiles that fit the architecture, takes the one of least
predicted cost, and says why: ``print(plan(spec, "sm_80"))``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from flashgen.arch import facts
from flashgen.errors import PlanError
from flashgen.plan import paper, streams
from flashgen.plan.backward import KERNELS, plan_kernels
from flashgen.plan.derive import made
from flashgen.plan.feasible import feasible
from flashgen.plan.heads import HeadsPerTile, choose_heads, one_walk_each
from flashgen.plan.problem import ITEMSIZE, problem_of
from flashgen.plan.refuse import does_not_fit, nothing_fits
from flashgen.plan.search import Problem, Tile, can_have, cheapest, shapes, unshared
from flashgen.plan.traffic import Traffic
from flashgen.plan.traffic_backward import BackwardTraffic
from flashgen.plan.value import BackwardPlan, Line, Plan, Refusal
from flashgen.spec import AttentionSpec

__all__ = [
    "BackwardPlan",
    "BackwardTraffic",
    "HeadsPerTile",
    "Line",
    "Plan",
    "Refusal",
    "Tile",
    "Traffic",
    "choose_heads",
    "feasible",
    "plan",
    "plan_backward",
    "plan_summary",
]

POLICIES = ("derived", "paper")
NONE_SPARE: Mapping[str, int] = MappingProxyType({})
NO_TILES: Mapping[str, Tile] = MappingProxyType({})


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
) -> Plan:
    """The tiles, warps and shared-memory layout of the forward kernel of ``spec``.

    Args:
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120".
        sram: M, bytes of shared memory per block, instead of the architecture's; the SM then has
            that and the system's 1 KiB.
        policy: "derived": the feasible tile of least predicted cost. "paper": Algorithm 1's
            Bc = ceil(M/4d), Br = min(Bc, d), with M in elements, rounded to what the kernel runs.
        access_bytes: 16 (default) for tensors whose addresses and strides are multiples of 16
            bytes, the operand size for any other.
        spare_registers: per thread, kept free beyond what the model asks for. `flashgen.build`
            raises it when the compiler needs more for a score_mod than the model foresaw.
        tile: this one, whatever it costs, instead of the policy's: one of `feasible`, or a measured
            one.
        heads_per_tile: query heads that share K and V, and a tile: each has an equal share of its
            rows. On path "sm_90a", for a mask and a layout that are the same for all heads.

    Raises:
        PlanError: the architecture is unknown, an option is wrong, or no tile, or not the given
            one, fits.
    """
    width = 16 if access_bytes is None else access_bytes
    _check_options(spec, sram, policy, width)
    _check_number(heads_per_tile)
    if tile is not None and policy != "derived":
        raise PlanError(
            "a given tile leaves a policy nothing to decide",
            where="plan(policy=..., tile=...)",
            numbers=f"given {policy!r} and {tile}",
            way_out="one of them",
        )
    return _plan(spec, arch, sram, policy, width, spare_registers, tile, heads_per_tile)


@functools.lru_cache(maxsize=1024)
def _plan(
    spec: AttentionSpec,
    arch: str,
    sram: int | None,
    policy: str,
    access_bytes: int,
    spare_registers: int,
    tile: Tile | None,
    heads_per_tile: int,
) -> Plan:
    problem = problem_of(
        spec, facts(arch), sram, access_bytes, spare_registers, heads_per_tile=heads_per_tile
    )
    if heads_per_tile != 1:
        _check_heads(spec, problem)
    if tile is not None:
        if not can_have(problem, tile):
            raise does_not_fit(problem, tile, _where(spec))
        return made(problem, tile, "given", ())
    notes: tuple[str, ...] = ()
    if policy == "paper":
        chosen, notes = paper.tile(problem)
    else:
        chosen = cheapest(problem)
    if chosen is None:
        raise nothing_fits(problem, _where(spec), given_sram=sram is not None)
    return made(problem, chosen, policy, notes)


def plan_backward(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    deterministic: bool = False,
    spare_registers: Mapping[str, int] = NONE_SPARE,
    tiles: Mapping[str, Tile] = NO_TILES,
) -> BackwardPlan:
    """The kernels of the backward pass of ``spec``, their tiles, and why these.

    Args:
        arch, sram: as for `plan`.
        deterministic: only kernels whose sums have one order.
        spare_registers: per thread and kernel ("dkdv", "dq", "fused", "captured",
            "captured_exact"), kept free beyond what the model asks for.
        tiles: of these kernels, whatever they cost, instead of the cheapest. Where all kernels of a
            scheme have one, that scheme is taken.

    Raises:
        PlanError: the architecture is unknown, an option is wrong, or no tile, or not a given one,
            fits.
    """
    _check_options(spec, sram, "derived", 16)
    for option, given in (("spare_registers", spare_registers), ("tiles", tiles)):
        unknown = sorted(set(given) - set(KERNELS))
        if unknown:
            raise PlanError(
                f"{option} are of the kernels of a backward pass that have a tile to choose",
                where=f"plan_backward({option}=...)",
                numbers=f"given {', '.join(map(repr, unknown))}",
                way_out=" or ".join(f'"{name}"' for name in KERNELS),
            )
    spare = tuple(sorted(spare_registers.items()))
    return _plan_backward(spec, arch, sram, deterministic, spare, tuple(sorted(tiles.items())))


@functools.lru_cache(maxsize=1024)
def _plan_backward(
    spec: AttentionSpec,
    arch: str,
    sram: int | None,
    deterministic: bool,
    spare_registers: tuple[tuple[str, int], ...],
    tiles: tuple[tuple[str, Tile], ...],
) -> BackwardPlan:
    spare = dict(spare_registers)
    return plan_kernels(spec, facts(arch), _where(spec), sram, deterministic, spare, dict(tiles))


def plan_summary(spec: AttentionSpec, arch: str = "sm_80") -> Plan:
    """The plan of the kernels that make the tables of extremes which a mask of tensors asks for.

    Raises:
        PlanError: the architecture is unknown.
    """
    return streams.summary(spec, facts(arch))


def _where(spec: AttentionSpec) -> str:
    """The spec as an error names it: ``specs/softcap.py:9  softcap(head_dim=256, ...)``."""
    place = spec.mask_line or spec.score_line
    dims = f"head_dim={spec.head_dim}"
    if spec.head_dim_v not in (None, spec.head_dim):
        dims += f", head_dim_v={spec.head_dim_v}"
    return (f"{place}  " if place else "") + f"{spec.name}({dims}, dtype={spec.dtype})"


def _check_options(spec: AttentionSpec, sram: int | None, policy: str, access_bytes: int) -> None:
    if policy not in POLICIES:
        raise PlanError(
            "there is no such planning policy",
            where="plan(policy=...)",
            numbers=f"given {policy!r}",
            way_out=" or ".join(f'policy="{name}"' for name in POLICIES),
        )
    if access_bytes not in (16, ITEMSIZE[spec.dtype]):
        raise PlanError(
            "global memory is accessed in whole granules or element by element",
            where="plan(access_bytes=...)",
            numbers=f"given {access_bytes!r}; {spec.dtype} has {ITEMSIZE[spec.dtype]} bytes",
            way_out=f"access_bytes=16 or access_bytes={ITEMSIZE[spec.dtype]}",
        )
    if sram is not None and (not isinstance(sram, int) or isinstance(sram, bool) or sram <= 0):
        raise PlanError(
            "the SRAM size is a positive number of bytes",
            where="plan(sram=...)",
            numbers=f"given {sram!r}",
            way_out="sram=101376, which is 99 KiB, for example",
        )


def _check_number(heads: object) -> None:
    if not isinstance(heads, int) or isinstance(heads, bool) or heads <= 0:
        raise PlanError(
            "heads_per_tile is not a number of heads",
            where="plan(heads_per_tile=...)",
            numbers=f"given {heads!r}: it is a number of query heads",
            way_out="heads_per_tile=1, or nothing: calls choose it by their lengths",
        )


def _check_heads(spec: AttentionSpec, problem: Problem) -> None:
    """Whether some tile, fitting or not, can have so many heads."""
    heads = problem.heads_per_tile
    why = one_walk_each(spec)
    if not why and problem.path != "sm_90a":
        why = "the kernels of path sm_80 have tiles of one head"
    if not why and all(next(unshared(tile.owned, heads), None) for tile in shapes(problem)):
        why = "no tile has 16, 32 or a multiple of 64 rows for each of them"
    if why:
        raise PlanError(
            "these heads cannot share a tile",
            where=f"{_where(spec)}, plan(heads_per_tile=...)",
            numbers=f"given {heads!r} on {problem.arch.name}: {why}",
            way_out="heads_per_tile=1, or nothing: calls choose it by their lengths",
        )


class _CallablePackage(ModuleType):
    """Importing this package binds ``flashgen.plan`` to it, where users expect the function."""

    def __call__(self, *args: Any, **options: Any) -> Plan:
        return plan(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
