"""Errors that concern the whole machine: undefined registers, endless loops and deadlocks."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.errors import BarrierDivergence, DeadlockError, StepLimit, UninitialisedRead
from flashgen.emulator.state.cohort import (
    Cohort,
    WaitsAtBarrier,
    WaitsForCluster,
    WaitsForPhase,
    WaitsForRegisters,
    WaitsForWarp,
)
from flashgen.emulator.state.wave import Site, Wave, ranges_text

Array = npt.NDArray[Any]
_MOST_LINES = 24  # of the report of a deadlock


class Reports(Wave):
    """The part of the machine that detects and reports these errors."""

    def require_defined(self, cohort: Cohort, defined: Any, lanes: Any, pc: int) -> None:
        """Checks that ``defined`` is true in all active lanes.

        Raises:
            UninitialisedRead: a lane reads a register that it has not written.
        """
        if defined.all():
            return
        missing = np.broadcast_to(~defined, (cohort.n, 32))
        if lanes is not None:
            missing = missing & lanes
        if not missing.any():
            return
        row, lane = (int(i) for i in np.argwhere(missing)[0])
        self.members.blame_shuffle(Site(cohort, pc, row, lane))
        self.fail(
            UninitialisedRead,
            "a register is read that was never written",
            Site(cohort, pc, row, lane),
            f"{int(missing.sum())} lanes read a value that no instruction has written",
            "initialise the variable on every path that leads here",
        )

    def _too_many_steps(self, c: Cohort) -> None:
        self.fail(
            StepLimit,
            "the launch does not come to an end",
            Site(c, c.pc),
            f"{self.steps:,} segments executed, limit {self.step_limit:,}",
            "look for an endless loop, or raise step_limit of emulator.launch",
        )

    def _report_deadlock(self) -> NoReturn:
        """Reports what each cohort waits for, when no cohort can run.

        Raises:
            BarrierDivergence: a part of a warp or warpgroup waits for the rest.
            DeadlockError: otherwise.
        """
        lines = []
        partial = None
        described = {
            WaitsAtBarrier: self.barriers.describe,
            WaitsForCluster: self.cluster.describe,
            WaitsForPhase: self.mbarriers.describe,
            WaitsForRegisters: self.registers.describe,
        }
        for c in self.cohorts:
            if type(c.waits) in described:
                lines += described[type(c.waits)](c)
                continue
            pc = c.waits.pc
            # The first one in program order is inside the branch; the others wait at the point of
            # reconvergence.
            if not self._comes(c) and (partial is None or pc < partial.waits.pc):
                partial = c
            lanes, alive = ranges_text(c.full_mask()[0]), ranges_text(self.alive[int(c.rows[0])])
            lines.append(
                f"{self.warps_text(c.rows)}, lanes {lanes} of {alive}, wait at "
                f"{self.program.describe(pc)}"
            )
        if partial is not None:
            pc, whole = partial.waits.pc, partial.waits.whole
            raise BarrierDivergence(
                f"only a part of a {whole} reached an instruction that the whole {whole} must "
                "execute",
                where=self.place(int(partial.rows[0]), None, pc),
                numbers="\n".join(lines),
                way_out="move it out of the divergent branch, or make the branch uniform in the "
                f"{whole}",
            )
        # A wait for the rest of a warp is a consequence of what the rest waits for.
        first = next(
            (c for c in self.cohorts if not isinstance(c.waits, WaitsForWarp)), self.cohorts[0]
        )
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more like these"]
        raise DeadlockError(
            "deadlock: every warp waits and none can be released",
            where=self.place(int(first.rows[0]), None, first.waits.pc),
            numbers="\n".join(lines),
            way_out="check that all warps that a barrier counts arrive at it, and that as many "
            "bytes are copied as an mbarrier expects",
        )

    def _comes(self, c: Cohort) -> bool:
        """Whether the lanes that ``c`` waits for wait at an mbarrier themselves."""
        partners = c.waits.partners(c.rows)
        waiting = (o.rows for o in self.cohorts if isinstance(o.waits, WaitsForPhase))
        return any(np.isin(partners, rows).any() for rows in waiting)
