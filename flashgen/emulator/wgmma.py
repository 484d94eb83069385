"""wgmma: products of warpgroups that run behind the warps until a wait lands them.

An instruction only notes what it was given: registers of A, descriptors, and whether it adds to
the sums. Instructions that use the same sums one after the other form a chain. wgmma.wait_group
executes what is old enough, as few large products as it can, and gives the sums back; until then
the registers hold what they held before, and the program was compiled to refuse whoever looks
(`hazards`). Operands in shared memory are read by the asynchronous proxy from issue to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator import descriptors
from flashgen.emulator.chains import Chain, Step
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.descriptors import PIECE_BYTES
from flashgen.emulator.errors import OutOfBounds
from flashgen.emulator.products import ROWS, Form, Operand, reach
from flashgen.emulator.register_order import RegisterOrder
from flashgen.errors import EmulatorError

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine

Array = npt.NDArray[Any]
KEPT_GROUPS = 64  # committed groups whose reads are remembered: so many may stay in flight
_KEPT_OPERANDS = 4096


class Warpgroups:
    """What the warpgroups of a wave have in flight."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.per_block = -(-machine.warps // 4)
        count = len(machine.blocks) * self.per_block
        self.chains: list[Chain] = []
        self.committed = np.zeros(count, np.int64)
        self.newest = np.zeros(count, np.int64)  # time of the newest read
        self.times = np.zeros((count, KEPT_GROUPS), np.int64)  # the same when groups were committed
        self.order = RegisterOrder(machine)
        self._operands: dict[tuple[Any, ...], tuple[Operand, Array]] = {}

    def groups_of(self, rows: Array) -> Array:
        """The warpgroup in the wave of each warp (n,)."""
        m = self.machine
        return m.row_block[rows] * self.per_block + m.row_warp[rows] // 4  # type: ignore[no-any-return]

    def numbers(self, C: Cohort) -> Array:
        """The warpgroups that a cohort of whole ones consists of (g,)."""
        if C.groups is None:
            C.groups = self.groups_of(C.rows[::4])
        return C.groups

    # ---- issue

    def issue(self, C: Cohort, form: Form, a: Any, b: Any, adds: Any, sums: Any, pc: int) -> None:
        """Starts wgmma.mma_async.

        Args:
            C: whole warpgroups.
            a: descriptor, or four registers.
            b: descriptor.
            adds: scale-d.
            sums: the values of the sums; None when a chain of all of them is in flight.
            pc: the instruction.
        """
        groups = self.numbers(C)
        left = a if form.fragments else self._operand(C, groups, a, form, 0, pc)
        right = self._operand(C, groups, b, form, 1, pc)
        some = self._alike(C, adds, "scale-d", pc)
        add = None if some.all() else some
        step = Step(form, left, right, add, self.committed[groups], pc)
        chains = self._claim(groups, form, C, pc)
        inside = sum(len(chain.groups) for chain in chains)
        if inside < len(groups):
            fresh = Chain(form.registers, groups, list(sums), [])
            if chains:
                taken = np.concatenate([chain.groups for chain in chains])
                fresh = fresh.part(~np.isin(groups, taken))
            chains.append(fresh)
            self.chains.append(fresh)
        for chain in chains:
            whole = len(chain.groups) == len(groups)
            chain.append(step if whole else step.part(np.isin(groups, chain.groups)))

    def _claim(self, groups: Array, form: Form, C: Cohort, pc: int) -> list[Chain]:
        """The chains in flight that hold the sums of some warpgroups, cut to these."""
        found = []
        for chain in list(self.chains):
            same = chain.registers == form.registers
            if not same and set(chain.registers).isdisjoint(form.registers):
                continue
            here, _ = self._cut(chain, groups)
            if here is None:
                continue
            if not same:
                register = min(set(chain.registers).intersection(form.registers))
                by, use = chain.steps[-1].pc, "one of the sums, of another shape,"
                self.order.fail_in_flight(C, pc, register, by, use)
            found.append(here)
        return found

    def _cut(self, chain: Chain, groups: Array) -> tuple[Chain | None, Chain | None]:
        """The parts of a chain that belong to some warpgroups and to others."""
        if len(chain.groups) == len(groups) and (chain.groups == groups).all():
            return chain, None
        mine = np.isin(chain.groups, groups)
        if mine.all():
            return chain, None
        if not mine.any():
            return None, chain
        here, rest = chain.part(mine), chain.part(~mine)
        at = self.chains.index(chain)
        self.chains[at : at + 1] = [here, rest]
        return here, rest

    def _alike(self, C: Cohort, value: Any, what: str, pc: int) -> Array:
        """A value that must be the same in all lanes of a warpgroup, (g,)."""
        if value.ndim == 0:
            return np.broadcast_to(value, C.n // 4)
        quads = np.broadcast_to(value, (C.n, value.shape[1])).reshape(C.n // 4, -1)
        first: Array = quads[:, 0]
        bad = (quads != first[:, None]).any(axis=1)
        if bad.any():
            group = int(np.argmax(bad))
            self.machine.fail(
                EmulatorError,
                f"the threads of a warpgroup give wgmma different values of its {what}",
                C,
                pc,
                row=4 * group,
                numbers=f"the first has {first[group]}, others {quads[group][-1]}",
                way_out="compute it from what all 128 share, such as threadIdx.x / 128",
            )
        return first

    # ---- operands in shared memory

    def _operand(
        self, C: Cohort, groups: Array, word: Any, form: Form, which: int, pc: int
    ) -> Operand:
        """Decodes the descriptor of A (0) or B (1); its bytes are counted and being read."""
        words = self._alike(C, word, f"descriptor of {'AB'[which]}", pc)
        rows, mn_major = (ROWS, form.columns)[which], form.transposed[which]
        key = (words.tobytes(), rows, mn_major)
        found = self._operands.get(key)
        if found is None:
            if len(self._operands) >= _KEPT_OPERANDS:
                self._operands.clear()
            found = self._decode(C, words, "AB"[which], rows, mn_major, pc)
            self._operands[key] = found
        operand, pieces = found
        m = self.machine
        size = len(groups) * pieces.shape[1] * PIECE_BYTES
        m.counters.shared_read_bytes += size
        if m.recorder is not None:
            m.recorder.operand(size, pc)
        if m.proxy is not None:
            self._read(C, groups, pieces, pc)
        return operand

    def _decode(
        self, C: Cohort, words: Array, name: str, rows: int, mn_major: bool, pc: int
    ) -> tuple[Operand, Array]:
        """An operand and its pieces, numbered from the start of the shared window (g, pieces)."""
        for one in np.unique(words).tolist():
            wrong = descriptors.problem(one)
            if wrong:
                row = 4 * int(np.argmax(words == one))
                self._refuse(C, row, pc, name, one, wrong, EmulatorError)
        kinds = descriptors.layouts(words)
        if len(set(kinds)) > 1:
            other = next(kind for kind in kinds if kind != kinds[0])
            wrong = f"another warpgroup's has {other}"
            self._refuse(C, 0, pc, name, int(words[0]), wrong, EmulatorError)
        operand = Operand(descriptors.starts(words), kinds[0])
        low, high, pieces = reach(operand, rows, mn_major)
        size = self.machine.shared_size
        for place in np.flatnonzero((low < 0) | (high > size)):
            wrong = f"bytes {low[place]:,} to {high[place]:,} of {size:,} would be read"
            self._refuse(C, 4 * int(place), pc, name, int(words[place]), wrong, OutOfBounds)
        return operand, pieces

    def _refuse(
        self,
        C: Cohort,
        row: int,
        pc: int,
        name: str,
        word: int,
        wrong: str,
        kind: type[EmulatorError],
    ) -> NoReturn:
        one = np.array([word], np.uint64)
        start, layout = int(descriptors.starts(one)[0]), descriptors.layouts(one)[0]
        outside = kind is OutOfBounds
        self.machine.fail(
            kind,
            f"operand {name} of wgmma reaches outside shared memory"
            if outside
            else f"the emulator does not take this descriptor of {name}",
            C,
            pc,
            row=row,
            numbers=f"{word:#018x}: start {start}, {layout}; {wrong}",
            way_out="check the start and the offsets, or pass a larger shared_bytes"
            if outside
            else "see flashgen/emulator/descriptors.py for what the fields mean",
        )

    def _read(self, C: Cohort, groups: Array, pieces: Array, pc: int) -> None:
        """The pieces (g, k) are read from now on."""
        m = self.machine
        assert m.proxy is not None
        block, member = np.divmod(groups, self.per_block)
        where = pieces * PIECE_BYTES + (block * m.shared_pitch)[:, None]
        rows = C.rows.reshape(-1, 4)
        for number in np.unique(member).tolist():
            here = np.flatnonzero(member == number)
            column = m.proxy.agent("warpgroup", number, f"wgmma of warpgroup {number}")
            time = m.proxy.read(C, rows[here], column, where[here], pc, PIECE_BYTES, 4 * here)
            self.newest[groups[here]] = time

    # ---- groups

    def commit(self, C: Cohort) -> None:
        """wgmma.commit_group."""
        groups = self.numbers(C)
        self.times[groups, self.committed[groups] % KEPT_GROUPS] = self.newest[groups]
        self.committed[groups] += 1

    def wait(
        self, C: Cohort, left: int, registers: tuple[int, ...], current: tuple[Any, ...]
    ) -> list[Any]:
        """wgmma.wait_group: lands all but the ``left`` newest groups.

        Args:
            C: whole warpgroups.
            left: less than KEPT_GROUPS.
            registers: that may be among the sums that land.
            current: their values now.

        Returns:
            Their values afterwards.
        """
        groups = self.numbers(C)
        limit = self.committed[groups] - left
        out = list(current)
        for chain in list(self.chains):
            here, _ = self._cut(chain, groups)
            if here is None:
                continue
            mine = limit[np.searchsorted(groups, here.groups)]
            done = np.sum([step.group < mine for step in here.steps], axis=0)
            names, rest = here.groups, here
            for count in np.unique(done).tolist():
                part, other = self._cut(rest, names[done == count])
                assert part is not None
                rest = other or rest
                if count:
                    self._land(part, count, groups, registers, out)
        self._learn(C, groups, limit)
        return out

    def _land(
        self, chain: Chain, count: int, groups: Array, registers: tuple[int, ...], out: list[Any]
    ) -> None:
        m = self.machine
        arena = chain.groups // self.per_block * m.shared_pitch
        sums = chain.execute(count, m.shared.view[16], arena)
        if count < len(chain.steps):
            chain.start, chain.steps = sums, chain.steps[count:]
            return
        self.chains.remove(chain)
        for register, value in zip(chain.registers, sums, strict=True):
            if register in registers:
                at = registers.index(register)
                out[at] = _placed(out[at], groups, chain.groups, value)

    def _learn(self, C: Cohort, groups: Array, limit: Array) -> None:
        """The warps know now that the operands of what has landed are read no more."""
        m = self.machine
        if m.proxy is None:
            return
        times = self.times[groups, (limit - 1) % KEPT_GROUPS]
        member = groups % self.per_block
        rows = C.rows.reshape(-1, 4)
        for number in np.unique(member[limit > 0]).tolist():
            here = (member == number) & (limit > 0)
            column = m.proxy.agent("warpgroup", number)
            m.proxy.clocks.learn(rows[here].reshape(-1), column, np.repeat(times[here], 4))


def _placed(old: Any, groups: Array, numbers: Array, value: Array) -> Array:
    """``value``, of some of the warpgroups, put into ``old``."""
    if value.dtype != old.dtype:
        value = value.view(old.dtype)
    if len(numbers) == len(groups):
        return value
    out = np.array(np.broadcast_to(old, (4 * len(groups), 32)))
    out[np.repeat(np.isin(groups, numbers), 4)] = value
    return out
