"""Plans with spare registers, for kernels that need more of them than the plan's model says.

A kernel lacks registers where it spills, or where the assembler serialises its wgmma instructions.
It is planned again with more registers left free, until it lacks none or no tile leaves as many.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from flashgen.kernels.built_kernel import Build
from flashgen.shared import config
from flashgen.shared.errors import CompileError, PlanError

MOST_SPARE_REGISTERS = 128
"""A kernel that spills although its plan leaves this many registers free keeps its spills."""

_CHANGED_WGMMA = "(C75"
"""The codes of ptxas for wgmma instructions that it serialises, or orders by fences and waits that
the kernel lacks: C7510 to C7519."""


def with_enough_registers(
    build_with: Callable[[Mapping[str, int]], tuple[Build, ...]], fixed_roles: Container[str]
) -> tuple[Build, ...]:
    """The kernels that lack the fewest registers; serialised instructions are worse than any spill.

    Args:
        build_with: compiles the kernels with these numbers of registers left free, by their roles.
        fixed_roles: the roles of the kernels whose tiles stay.

    Raises:
        PlanError: no tile fits, even with no register left free.
        CompileError: the assembler changed the order of wgmma instructions in every plan.
    """
    spare = dict[str, int]()
    best: tuple[Build, ...] | None = None
    while all(count <= MOST_SPARE_REGISTERS for count in spare.values()):
        try:
            builds = build_with(spare)
        except PlanError:
            if best is None:
                raise
            break  # no tile leaves these registers free; the best kernels have warnings
        cramped = [
            build for build in builds if any(_lacks(build)) and build.source.role not in fixed_roles
        ]
        if best is None or not cramped or _most_lacked(builds) < _most_lacked(best):
            best = builds
        if not cramped:
            break
        for build in cramped:
            role = build.source.role
            spare[role] = _next_spare(build, spare.get(role, 0))
    assert best is not None, "the first round gives kernels or raises"
    for build in best:
        _refuse_changed_wgmma(build)
    return best


def _refuse_changed_wgmma(build: Build) -> None:
    source, changed = build.source, _changed_wgmma(build)
    if changed:
        raise CompileError(
            f"the assembler serialises the wgmma instructions of {source.name}, or adds to them",
            where=source.filename,
            numbers=changed.splitlines()[0],
            way_out="arch='sm_80', whose kernels have no wgmma, or mods that need fewer registers",
        )


def _changed_wgmma(build: Build) -> str:
    """The first warning that the assembler changed the order of wgmma instructions; "" without."""
    return next((text for text in build.binary.warnings if _CHANGED_WGMMA in text), "")


def _lacks(build: Build) -> tuple[bool, int]:
    """What a plan with more registers may mend: serialised wgmma instructions, bytes of spills."""
    return bool(_changed_wgmma(build)), _spilled(build)


def _most_lacked(builds: tuple[Build, ...]) -> tuple[int, int]:
    """The kernels with serialised instructions, and the bytes of spills of all kernels."""
    serialised, spilled = zip(*map(_lacks, builds), strict=True)
    return sum(serialised), sum(spilled)


def _spilled(build: Build) -> int:
    """Bytes of spills that a smaller tile can avoid: not those around calls of a large function."""
    return 0 if build.source.outlined else build.binary.resources.spill_store_bytes


def _next_spare(build: Build, spare: int) -> int:
    """The next number of registers to leave free: its tile does not leave as many."""
    name, plan = build.source.name, build.plan
    problem = f"spills {_spilled(build)} B" if _spilled(build) else "has serialised wgmma"
    config.log(1, f"flashgen: {name} {problem} with {spare} spare registers")
    return plan.spare_after_spill(spare)
