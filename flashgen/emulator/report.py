"""Where something went wrong, in words: every error of a running kernel is raised from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.barriers import WaitsAtBarrier
from flashgen.emulator.clusters import WaitsForCluster
from flashgen.emulator.cohort import Cohort, Issued
from flashgen.emulator.errors import (
    BarrierDivergence,
    DeadlockError,
    StepLimit,
    UninitialisedRead,
)
from flashgen.emulator.mbarriers import WaitsForPhase
from flashgen.emulator.program import Program
from flashgen.errors import EmulatorError

if TYPE_CHECKING:
    from flashgen.emulator.barriers import Barriers
    from flashgen.emulator.clusters import ClusterBarrier
    from flashgen.emulator.mbarriers import Mbarriers
    from flashgen.emulator.warpgroup import RegisterPool

Array = npt.NDArray[Any]
_MOST_LINES = 24  # of a deadlock's report


class WaitsForWarp:
    """The cohort stands at a warp-wide instruction that other lanes have not reached."""

    whole = "warp"

    def __init__(self, pc: int, needed: Array) -> None:
        self.pc = pc
        self.needed = needed

    def partners(self, rows: Array) -> Array:
        """The warps without which these cannot go on."""
        return rows


class Reports:
    """The part of the machine that names places and raises errors."""

    program: Program
    grid: tuple[int, int, int]
    blocks: Array
    row_block: Array
    row_warp: Array
    alive: Array
    steps: int
    step_limit: int
    cohorts: list[Cohort]
    barriers: Barriers
    mbarriers: Mbarriers
    registers: RegisterPool
    cluster: ClusterBarrier

    def block_name(self, row: int) -> str:
        linear = int(self.blocks[self.row_block[row]])
        gx, gy, _ = self.grid
        return f"({linear % gx}, {linear // gx % gy}, {linear // (gx * gy)})"

    def place(self, row: int, lane: int | None, pc: int) -> str:
        program = self.program
        at = f"kernel {program.name}, block {self.block_name(row)}, warp {self.row_warp[row]}"
        if lane is not None:
            at += f", lane {lane}"
        return f"{at}, {program.describe(pc)}"

    def fail(
        self,
        kind: type[EmulatorError],
        what: str,
        C: Cohort,
        pc: int,
        *,
        row: int = 0,
        lane: int | None = None,
        numbers: str,
        way_out: str,
    ) -> NoReturn:
        """Raises an error at a row of a cohort."""
        if isinstance(C, Issued):
            lane = int(C.lane[row])
        where = self.place(int(C.rows[row]), lane, pc)
        raise kind(what, where=where, numbers=numbers, way_out=way_out)

    def demand_defined(self, C: Cohort, defined: Any, lanes: Any, pc: int) -> None:
        """Raises when an active lane uses a register that it never wrote."""
        if defined.all():
            return
        missing = np.broadcast_to(~defined, (C.n, 32))
        if lanes is not None:
            missing = missing & lanes
        if not missing.any():
            return
        row, lane = np.argwhere(missing)[0]
        self.fail(
            UninitialisedRead,
            "a register is used that was never written",
            C,
            pc,
            row=int(row),
            lane=int(lane),
            numbers=f"{int(missing.sum())} lanes use a value that no instruction has set",
            way_out="initialise the variable on every path that leads here",
        )

    def _too_many_steps(self, c: Cohort) -> None:
        self.fail(
            StepLimit,
            "the launch does not come to an end",
            c,
            c.pc,
            numbers=f"{self.steps:,} segments executed, limit {self.step_limit:,}",
            way_out="look for an endless loop, or raise step_limit of emulator.launch",
        )

    def warps_text(self, rows: Array) -> str:
        """Warps of the wave: those of the first block by number."""
        row = int(rows[0])
        here = self.row_warp[rows[self.row_block[rows] == self.row_block[row]]]
        there = np.zeros(int(here.max()) + 1, bool)
        there[here] = True
        others = f" and {len(rows) - len(here)} of other blocks" if len(rows) > len(here) else ""
        plural = "s" if len(here) > 1 else ""
        return f"block {self.block_name(row)} warp{plural} {lane_text(there)}{others}"

    def _stuck(self) -> NoReturn:
        """Nobody can run: says who waits for what."""
        lines = []
        partial = None
        for c in self.cohorts:
            row = int(c.rows[0])
            text = self.warps_text(c.rows)
            if isinstance(c.waits, WaitsForPhase):
                lines += self.mbarriers.describe(c)
                continue
            if isinstance(c.waits, WaitsAtBarrier):
                lines += self.barriers.describe(c)
                continue
            if isinstance(c.waits, WaitsForWarp):
                pc = c.waits.pc
                # The earliest is the one in the branch; others wait where they would have met it.
                if not self._comes(c) and (partial is None or pc < partial.waits.pc):
                    partial = c
                mask = c.mask[0] if c.mask is not None else np.ones(32, bool)
                text += f", lanes {lane_text(mask)} of {lane_text(self.alive[row])}, wait at "
                text += f"{self.program.describe(pc)}"
            elif isinstance(c.waits, WaitsForCluster):
                text += ", " + self.cluster.describe(c)
            else:
                text += ", " + self.registers.describe(c)
            lines.append(text)
        if partial is not None:
            pc, whole = partial.waits.pc, partial.waits.whole
            raise BarrierDivergence(
                f"only a part of a {whole} reached an instruction that the whole {whole} must "
                "execute",
                where=self.place(int(partial.rows[0]), None, pc),
                numbers="\n".join(lines),
                way_out="move it out of the divergent branch, or let all of the "
                f"{whole} take the branch",
            )
        # What waits for the rest of its warp only follows from what that waits for.
        first = next(
            (c for c in self.cohorts if not isinstance(c.waits, WaitsForWarp)), self.cohorts[0]
        )
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more like these"]
        raise DeadlockError(
            "deadlock: every warp waits and nobody can release them",
            where=self.place(int(first.rows[0]), None, first.waits.pc),
            numbers="\n".join(lines),
            way_out="check that every warp that the barrier counts arrives at it, and that as many "
            "bytes are copied as an mbarrier expects",
        )

    def _comes(self, c: Cohort) -> bool:
        """Whether the lanes that ``c`` waits for are at an mbarrier, and would come from there."""
        partners = c.waits.partners(c.rows)
        waiting = (o.rows for o in self.cohorts if isinstance(o.waits, WaitsForPhase))
        return any(np.isin(partners, rows).any() for rows in waiting)


def lane_text(mask: Array) -> str:
    """Lanes as ranges, such as ``0-3 8``."""
    lanes = np.flatnonzero(mask)
    runs = np.split(lanes, np.flatnonzero(np.diff(lanes) > 1) + 1) if len(lanes) else []
    return " ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs) or "none"
