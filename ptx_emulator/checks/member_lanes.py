"""The lanes that take part in warp-wide instructions: member masks, shuffles, whole warps.

PTX leaves undefined what a lane outside its own member mask does, what lanes of one mask do that
give different masks, what a shuffle reads from a lane that does not execute it with the same mask,
and what .aligned instructions do in a part of a warp.

The value that a shuffle takes from such a lane may be computed with as long as it is not used: in
sums by shfl.down over a part of a warp the upper lanes hold such values. So it counts as undefined
(`PtxProgram.strays`), as a register does that was never written. Where the mask is constant and
names all lanes of whole warps, and some have exited, the shuffle itself is the error.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np

from ptx_emulator.errors import BarrierDivergence, UninitialisedRead
from ptx_emulator.state.cohort import Cohort
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave, ranges_text

LANES = np.arange(32, dtype=np.uint32)


class _Stray(NamedTuple):
    """The lanes ``bad`` (n, 32) of a cohort that a shuffle filled from lanes that take no part."""

    cohort: Cohort
    bad: Array
    source: Array
    members: Array


class MemberLanes:
    """Checks of one wave; keeps of each shuffle the last values that are undefined."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self._strays: dict[int, _Stray] = {}

    def require(self, execution: Execution, mask: Any) -> None:
        """Checks that the lanes that execute a .sync instruction are in their member masks, and
        that the lanes of a mask have the same mask.

        Raises:
            BarrierDivergence: not so.
        """
        member_masks = np.asarray(mask)
        outside = (member_masks >> LANES) & np.uint32(1) == 0
        if execution.any(outside):
            site = execution.first(outside)
            what = "a lane executes an instruction whose member mask does not contain it"
            numbers = f"member mask {int(execution.spread(mask)[site.row, site.lane]):#010x}"
            way_out = "name every lane that executes it, or branch around it in the other lanes"
            self.machine.fail(BarrierDivergence, what, site, numbers, way_out)
        if member_masks.ndim < 2 or member_masks.shape[1] == 1:
            return
        lane_masks, active = execution.spread(member_masks), execution.active
        differ = lane_masks[:, :, None] != lane_masks[:, None, :]
        differ &= (lane_masks[:, :, None] >> LANES) & np.uint32(1) != 0
        differ &= active[:, :, None] & active[:, None, :]
        if differ.any():
            row, lane, other = (int(i) for i in np.argwhere(differ)[0])
            what = "lanes of one member mask execute an instruction with different member masks"
            own_mask, other_mask = (f"{int(lane_masks[row, i]):#010x}" for i in (lane, other))
            numbers = f"member mask {own_mask}; lane {other}, which it contains, has {other_mask}"
            way_out = "give all lanes that exchange with each other the same mask"
            site = execution.site(row, lane)
            self.machine.fail(BarrierDivergence, what, site, numbers, way_out)

    def taking_part(self, execution: Execution, source: Array, mask: Any, used: bool) -> Any:
        """Whether the lane that each lane reads, ``source``, is in its mask and executes a shuffle.

        Otherwise the result is undefined, which is an error if it is ``used``.
        """
        source, members = execution.spread(source), execution.spread(mask)
        executing = execution.active
        good = (members >> source.astype(np.uint32)) & np.uint32(1) != 0
        good &= np.take_along_axis(executing, source, axis=1)
        bad = ~good & executing
        if not bad.any():
            return np.True_
        self._strays[execution.pc] = stray = _Stray(execution.cohort, bad, source, members)
        if used:
            row, lane = (int(i) for i in np.argwhere(bad)[0])
            self._report(execution.pc, stray, row, lane, "")
        return good

    def blame_shuffle(self, site: Site) -> None:
        """Raises if the undefined value that a lane uses may come from a shuffle."""
        warp = site.cohort.rows[site.row]
        used = f"; the result is used by {self.machine.program.describe(site.pc)}"
        for pc, stray in reversed(self._strays.items()):
            for row in np.flatnonzero(stray.cohort.rows == warp).tolist():
                lanes = np.flatnonzero(stray.bad[row]).tolist()
                if lanes:
                    lane = site.lane if site.lane in lanes else lanes[0]
                    self._report(pc, stray, row, lane, used)

    def _report(self, pc: int, stray: _Stray, row: int, lane: int, used: str) -> NoReturn:
        source, members = int(stray.source[row, lane]), int(stray.members[row, lane])
        why = "does not execute it" if members >> source & 1 else "is outside"
        what = "a shuffle reads a lane that is outside its member mask or does not execute it: its "
        what += "result is undefined"
        numbers = f"lane {source} {why}, member mask {members:#010x}{used}"
        way_out = "let every lane that others read execute the shuffle, and name it in the mask"
        site = Site(stray.cohort, pc, row, lane)
        self.machine.fail(UninitialisedRead, what, site, numbers, way_out)

    def require_whole_warp(self, cohort: Cohort, pc: int) -> None:
        """Checks that no lane of a warp is missing at an instruction with .aligned.

        Raises:
            BarrierDivergence: lanes have exited, or the block ends within the warp.
        """
        machine, active = self.machine, cohort.full_mask()
        row = int(np.argmin(active.all(axis=1)))
        if active[row].all():
            return
        opcode = machine.program.code[pc].op
        what = f"a part of a warp executes {opcode}, which all 32 threads of a warp must execute "
        what += "(.aligned)"
        numbers = f"lanes {ranges_text(active[row])} execute it; the others have exited, or the "
        numbers += f"block of {machine.threads} threads does not have them"
        way_out = "branch around it in whole warps only, and let no lane exit before it"
        machine.fail(BarrierDivergence, what, Site(cohort, pc, row), numbers, way_out)
