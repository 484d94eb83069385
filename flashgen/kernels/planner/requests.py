"""The arguments of a request for a plan, as frozen values, and the checks of these arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.kernels.planner.tile_problem import Tile
from flashgen.shared.dtypes import ITEMSIZE
from flashgen.shared.errors import PlanError
from flashgen.spec.language.chosen_specs import spec_of_kernels
from flashgen.spec.language.spec import AttentionSpec

POLICIES = ("derived", "paper")
TILED_BACKWARD_KERNELS = ("dkdv", "dq", "fused", "captured", "captured_exact")
NO_TILES: Mapping[str, Tile] = MappingProxyType({})
NO_SPARE_REGISTERS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `flashgen.kernels.planner.plan`; their meanings are there.

    Raises:
        PlanError: an option is wrong, or two options contradict each other.
    """

    spec: AttentionSpec
    arch: str
    sram: int | None = None
    policy: str = "derived"
    access_bytes: int | None = None
    spare_registers: int = 0
    tile: Tile | None = None
    heads_per_tile: int = 1
    few_rows: int = 0
    unpaired: bool = False

    def __post_init__(self) -> None:
        _check_target(self.spec, self.arch)
        object.__setattr__(self, "spec", spec_of_kernels(self.spec))
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise PlanError(
                "there is no such planning policy",
                where="plan(policy=...)",
                numbers=f"given {self.policy!r}",
                way_out=" or ".join(f'policy="{name}"' for name in POLICIES),
            )
        itemsize = ITEMSIZE[self.spec.dtype]
        vector = self.access_bytes
        if vector is not None and not (isinstance(vector, int) and vector in (16, itemsize)):
            raise PlanError(
                "global memory is accessed in whole vectors or element by element",
                where="plan(access_bytes=...)",
                numbers=f"given {self.access_bytes!r}; {self.spec.dtype} has {itemsize} bytes",
                way_out=f"access_bytes=16 or access_bytes={itemsize}",
            )
        _check_sram(self.sram)
        heads = self.heads_per_tile
        if not isinstance(heads, int) or isinstance(heads, bool) or heads <= 0:
            raise PlanError(
                "heads_per_tile is not a number of heads",
                where="plan(heads_per_tile=...)",
                numbers=f"given {heads!r}: it is a number of query heads",
                way_out="heads_per_tile=1, or leave it out: each call chooses it by its sizes",
            )
        _check_tile(self.tile, "tile")
        if self.tile is not None and self.policy != "derived":
            raise PlanError(
                "a given tile cannot be combined with a policy",
                where="plan(policy=..., tile=...)",
                numbers=f"given {self.policy!r} and {self.tile}",
                way_out="give one of the two",
            )


@dataclass(frozen=True)
class BackwardPlanRequest:
    """The arguments of `flashgen.kernels.planner.plan_backward`; their meanings are there.

    Mappings are pairs of a kernel's name and its value, so that requests are hashable.

    Raises:
        PlanError: an option is wrong.
    """

    spec: AttentionSpec
    arch: str
    sram: int | None = None
    deterministic: bool = False
    spare_registers: tuple[tuple[str, int], ...] = ()
    tiles: tuple[tuple[str, Tile], ...] = ()
    in_parts: bool = False  # blocks of "fused", if chosen, own parts of groups of query heads
    alone: str = ""  # "queries" or "keys": the kernels of their gradients, and of no others
    few_rows: int = 0  # of these kernels: the query rows of each sequence; 0 for many

    def __post_init__(self) -> None:
        _check_target(self.spec, self.arch)
        object.__setattr__(self, "spec", spec_of_kernels(self.spec))
        _check_sram(self.sram)
        for name, tile in self.tiles:
            _check_tile(tile, f"tiles[{name!r}]")
        for option in ("spare_registers", "tiles"):
            names = {name for name, _ in getattr(self, option)}
            unknown = sorted(names - set(TILED_BACKWARD_KERNELS))
            if unknown:
                raise PlanError(
                    f"{option} names a kernel without a tile to choose",
                    where=f"plan_backward({option}=...)",
                    numbers=f"given {', '.join(map(repr, unknown))}",
                    way_out=" or ".join(f'"{name}"' for name in TILED_BACKWARD_KERNELS),
                )


@dataclass(frozen=True)
class TangentPlanRequest:
    """The arguments of `flashgen.kernels.planner.plan_tangent`.

    Attributes:
        tangents: the names of the tensors that have a tangent, of "q", "k", "v" and the learned
            tensors, in this order.
        spare_registers, tile: as for `flashgen.plan`.

    Raises:
        PlanError: an option is wrong.
    """

    spec: AttentionSpec
    arch: str
    tangents: tuple[str, ...]
    sram: int | None = None
    spare_registers: int = 0
    tile: Tile | None = None

    @classmethod
    def for_all(cls, spec: AttentionSpec, arch: str, sram: int | None = None) -> TangentPlanRequest:
        """The request for a kernel along the tangents of all operands."""
        return cls(spec, arch, tangents_of(spec), sram)

    def __post_init__(self) -> None:
        _check_target(self.spec, self.arch)
        _check_sram(self.sram)
        _check_tile(self.tile, "tile")
        possible = tangents_of(self.spec)
        if not self.tangents or self.tangents != tuple(x for x in possible if x in self.tangents):
            raise PlanError(
                "tangents are not names of tensors that have one",
                where="tangents=...",
                numbers=f"given {self.tangents!r}",
                way_out=f"some of {', '.join(possible)}, in this order",
            )


def tangents_of(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of all tensors of a spec that can have a tangent, in their order."""
    return "q", "k", "v", *(tensor.name for tensor in spec.tensors if tensor.grad)


def _check_target(spec: object, arch: object) -> None:
    """Checks the types of what is planned for."""
    for argument, value, kind, example in (
        ("spec", spec, AttentionSpec, "fg.AttentionSpec(mask_mod=...)"),
        ("arch", arch, str, '"sm_80"'),
    ):
        if not isinstance(value, kind):
            raise PlanError(
                f"{argument} is not of type {kind.__name__}",
                where=f"argument {argument}",
                numbers=f"given a {type(value).__name__}",
                way_out=f"{argument}={example}",
            )
    if isinstance(spec, AttentionSpec) and spec.dtype is None:
        raise PlanError(
            "a plan is for one dtype of q, k and v",
            where=f"spec {spec.name}",
            numbers="dtype None: each call has the dtype of its q",
            way_out='spec.replace(dtype="bfloat16"), or --dtype bfloat16 of a command',
        )


def _check_sram(sram: object) -> None:
    """Checks a size of shared memory in bytes; None stands for the architecture's own."""
    if sram is not None and (not isinstance(sram, int) or isinstance(sram, bool) or sram <= 0):
        raise PlanError(
            "the SRAM size is a positive number of bytes",
            where="plan(sram=...)",
            numbers=f"given {sram!r}",
            way_out="sram=101376, which is 99 KiB, for example",
        )


def _check_tile(tile: object, argument: str) -> None:
    """Checks a given tile; None leaves the choice to the planner."""
    if tile is not None and not isinstance(tile, Tile):
        raise PlanError(
            "a given tile is a flashgen.kernels.planner.Tile",
            where=f"argument {argument}",
            numbers=f"given {tile!r}; rows and columns alone leave the number of warps open",
            way_out="Tile(step=64, warps=8, row_groups=1, blocks=1), which has 128 queries and 64 "
            "keys in a forward kernel; or leave it out: the planner chooses it",
        )
