"""wgmma: asynchronous matrix products of warpgroups, executed by the wait that covers them.

The issue of a wgmma.mma_async only records its operands: registers of A, descriptors, and scale-d.
Successive instructions with the same accumulators form a chain. wgmma.wait_group executes the
chains of the groups that it covers, as few large products, and assigns the accumulators; until then
the registers keep their old values, and the generated code rejects accesses to them
(`checks.wgmma_registers`). Operands in shared memory are read by the asynchronous proxy from issue
to wait.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.checks.shadow import SharedAccess
from ptx_emulator.checks.wgmma_registers import RegisterOrder
from ptx_emulator.errors import InFlight, OutOfBounds, RaceError, way_out
from ptx_emulator.isa import descriptors, wgmma
from ptx_emulator.isa.descriptors import CHUNK_BYTES, STEP_CHUNKS
from ptx_emulator.isa.mma import (
    add_integers,
    add_single,
    check_places,
    join_halves,
    places_of_units,
    split_halves,
)
from ptx_emulator.isa.tensor_core_sums import model_for
from ptx_emulator.isa.wgmma import SharedOperand, WgmmaForm
from ptx_emulator.state.cohort import Cohort, spread
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave


class IssuedWgmma(NamedTuple):
    """One instruction of a chain, for one or more warpgroups.

    Attributes:
        a: a SharedOperand, or four registers.
        adds: whether each warpgroup adds to the accumulators (g,); None if all do.
        group: number of its committed group, per warpgroup (g,).
        pc: the instruction.
        places: where the stored units of a sparse A belong, (g, 64, units).
    """

    form: WgmmaForm
    a: Any
    b: SharedOperand
    adds: Array | None
    group: Array
    pc: int
    places: Array | None = None

    def part(self, keep: Array) -> IssuedWgmma:
        """The instruction for the warpgroups that ``keep`` (g,) selects."""
        a = self.a.part(keep) if isinstance(self.a, SharedOperand) else _rows_of(self.a, keep)
        adds = None if self.adds is None else self.adds[keep]
        places = None if self.places is None else self.places[keep]
        part = self._replace(a=a, b=self.b.part(keep), adds=adds, group=self.group[keep])
        return part._replace(places=places)

    def joins(self, other: IssuedWgmma) -> bool:
        """Whether ``other``, the next along k, can be computed together with this one."""
        if other.adds is not None or self.form.fuses_as != other.form.fuses_as:
            return False
        if self.b.layout != other.b.layout:
            return False
        return bool(self.form.fragments) or bool(self.a.layout == other.a.layout)


@dataclass(eq=False)
class WgmmaChain:
    """Instructions in flight that use the same accumulators, oldest first.

    Attributes:
        registers: the accumulators.
        groups: warpgroups of the wave, sorted (g,).
        start: the accumulators before the first instruction, per register; None for zeros.
    """

    registers: tuple[int, ...]
    groups: Array
    start: list[Any] | None
    steps: list[IssuedWgmma]

    def part(self, keep: Array) -> WgmmaChain:
        """The chain of the warpgroups that ``keep`` (g,) selects."""
        start = None if self.start is None else _rows_of(self.start, keep)
        steps = [step.part(keep) for step in self.steps]
        return WgmmaChain(self.registers, self.groups[keep], start, steps)

    def append(self, step: IssuedWgmma) -> None:
        """Appends an instruction; earlier ones are dropped if it overwrites the accumulators."""
        if step.adds is not None and not step.adds.any():
            self.start, self.steps = None, []
            step = step._replace(adds=None)
        self.steps.append(step)

    def execute(self, machine: Wave, count: int, arena: Array) -> list[Any]:
        """The accumulators after the first ``count`` instructions, each (warps, 32).

        Args:
            arena: offset in `Wave.shared` of the block of each warpgroup, in bytes (g,).
        """
        warps, view = 4 * len(self.groups), machine.shared.view[16]
        accumulators = self.start
        index = 0
        while index < count:
            first = self.steps[index]
            end = index + 1
            # Accumulators of float16 are rounded, and integers clamped, after every instruction.
            fuses = first.form.sums == "f32"
            while end < count and fuses and first.joins(self.steps[end]):
                end += 1
            run = self.steps[index:end]
            a, b = [step.a for step in run], [step.b for step in run]
            if first.adds is not None and accumulators is not None:
                keep = np.repeat(first.adds, 4)[:, None]
                accumulators = [np.where(keep, v, v.dtype.type(0)) for v in accumulators]
            form, start = first.form, list(accumulators or ())
            half, integers = form.sums == "f16", form.sums == "s32"
            if half:
                start = split_halves(start, warps)
            model = None
            if not integers:
                arguments = form.kinds[0], form.depth, half, form.is_sparse
                model = model_for(machine, "wgmma", *arguments)
            places = None
            if form.is_sparse:
                places = np.concatenate([step.places for step in run], axis=-1)
            operands = form, a, b, warps, model, start, places
            product = wgmma.warpgroup_product(view, arena, *operands)
            if integers:
                accumulators = add_integers(product, start, form.saturates)
            else:
                accumulators = list(product) if model else add_single(product, start)
            if half:
                accumulators = join_halves(accumulators)
            index = end
        return list(accumulators or ())


def _rows_of(values: Any, keep: Array) -> list[Any]:
    """Register values of the warps of the warpgroups that ``keep`` selects."""
    rows = np.repeat(keep, 4)
    return [v[rows] if v.ndim and v.shape[0] == len(rows) else v for v in values]


_KEPT_OPERANDS = 4096


class Warpgroups:
    """The wgmma instructions of a wave that are in flight."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.per_block = -(-machine.warps // 4)
        count = len(machine.blocks) * self.per_block
        self.chains: list[WgmmaChain] = []
        self.committed = np.zeros(count, np.int64)
        self.newest = np.zeros(count, np.int64)  # time of the newest asynchronous read
        # `newest` when each group was committed.
        self.times = np.zeros((count, wgmma.KEPT_GROUPS), np.int64)
        self.order = RegisterOrder(machine)
        self._operands: dict[tuple[Any, ...], tuple[SharedOperand, Array]] = {}

    def groups_of(self, rows: Array) -> Array:
        """Number in the wave of the warpgroup of each warp (n,)."""
        machine = self.machine
        return machine.row_block[rows] * self.per_block + machine.row_warp[rows] // 4  # type: ignore[no-any-return]

    def arena(self, groups: Array) -> Array:
        """Offset in `Wave.shared` of the block of each warpgroup, in bytes (g,)."""
        return groups // self.per_block * self.machine.shared_pitch

    def numbers(self, cohort: Cohort) -> Array:
        """The warpgroups (g,) of a cohort that consists of whole warpgroups."""
        if cohort.groups is None:
            cohort.groups = self.groups_of(cohort.rows[::4])
        return cohort.groups

    # ---- issue

    def issue(
        self,
        execution: Execution,
        form: WgmmaForm,
        a: Any,
        b: Any,
        adds: Any,
        c: Any,
        metadata: Any = None,
    ) -> None:
        """Starts wgmma.mma_async.

        Args:
            execution: by whole warpgroups.
            a: descriptor, or four registers.
            b: descriptor.
            adds: scale-d.
            c: values of the accumulators; None if a chain with all of them is in flight.
            metadata: of a sparse A.
        """
        groups = self.numbers(execution.cohort)
        if self.machine.shared_races is not None:
            self.machine.mbarriers.late.wgmma(execution.cohort.rows)
        left = a if form.fragments else self._operand(execution, groups, a, form, 0)
        right = self._operand(execution, groups, b, form, 1)
        some = self._uniform(execution, adds, "scale-d")
        add = None if some.all() else some
        places = None
        if form.selector is not None:
            words = spread(metadata, execution.cohort.n)
            places = places_of_units(words, form.selector, 4, form.unit)
            view, arena = self.machine.shared.view[16], self.arena(groups)
            stored = functools.partial(
                wgmma.stored_units, view, arena, form, [left], execution.cohort.n
            )
            check_places(execution, places, False, stored)
            places = places.reshape(len(groups), wgmma.ROWS, -1)
        step = IssuedWgmma(form, left, right, add, self.committed[groups], execution.pc, places)
        chains = self._claim(execution, groups, form)
        inside = sum(len(chain.groups) for chain in chains)
        if inside < len(groups):
            fresh = WgmmaChain(form.registers, groups, list(c), [])
            if chains:
                claimed = np.concatenate([chain.groups for chain in chains])
                fresh = fresh.part(~np.isin(groups, claimed))
            chains.append(fresh)
            self.chains.append(fresh)
        for chain in chains:
            whole = len(chain.groups) == len(groups)
            chain.append(step if whole else step.part(np.isin(groups, chain.groups)))

    def _claim(self, execution: Execution, groups: Array, form: WgmmaForm) -> list[WgmmaChain]:
        """The chains in flight with the accumulators of ``groups``, cut to these warpgroups."""
        claimed = []
        for chain in list(self.chains):
            same = chain.registers == form.registers
            if not same and set(chain.registers).isdisjoint(form.registers):
                continue
            part, _ = self._cut(chain, groups)
            if part is None:
                continue
            if not same:
                register = min(set(chain.registers).intersection(form.registers))
                pc, use = chain.steps[-1].pc, "an accumulator, with a different shape,"
                self.order.fail_in_flight(execution.site(), register, pc, use)
            claimed.append(part)
        return claimed

    def _cut(self, chain: WgmmaChain, groups: Array) -> tuple[WgmmaChain | None, WgmmaChain | None]:
        """The parts of a chain that belong to ``groups`` and to other warpgroups."""
        if len(chain.groups) == len(groups) and (chain.groups == groups).all():
            return chain, None
        belongs = np.isin(chain.groups, groups)
        if belongs.all():
            return chain, None
        if not belongs.any():
            return None, chain
        cut, rest = chain.part(belongs), chain.part(~belongs)
        index = self.chains.index(chain)
        self.chains[index : index + 1] = [cut, rest]
        return cut, rest

    def _uniform(self, execution: Execution, value: Any, name: str) -> Array:
        """The value (g,) of an operand that must be the same in all lanes of a warpgroup."""
        n = execution.cohort.n
        if value.ndim == 0:
            return np.broadcast_to(value, n // 4)
        quads = np.broadcast_to(value, (n, value.shape[1])).reshape(n // 4, -1)
        first: Array = quads[:, 0]
        bad = (quads != first[:, None]).any(axis=1)
        for group in np.flatnonzero(bad)[:1]:
            what = f"the {name} of wgmma differs between threads of a warpgroup"
            numbers = f"the first thread has {first[group]}, others {quads[group][-1]}"
            way_out = "compute it from values common to all 128 threads: threadIdx.x / 128"
            self.machine.fail(EmulatorError, what, execution.site(4 * group), numbers, way_out)
        return first

    # ---- operands in shared memory

    def _operand(
        self, execution: Execution, groups: Array, word: Any, form: WgmmaForm, which: int
    ) -> SharedOperand:
        """Decodes the descriptor of A (0) or B (1), and counts and checks the read."""
        words = self._uniform(execution, word, f"descriptor of {'AB'[which]}")
        rows, mn_major = (wgmma.ROWS, form.columns)[which], form.transposed[which]
        count = STEP_CHUNKS << (form.is_sparse and which == 1)
        key = (words.tobytes(), rows, mn_major, count)
        decoded = self._operands.get(key)
        if decoded is None:
            if len(self._operands) >= _KEPT_OPERANDS:
                self._operands.clear()
            decoded = self._decode(execution, words, "AB"[which], rows, mn_major, count)
            self._operands[key] = decoded
        operand, chunks = decoded
        machine = self.machine
        size = len(groups) * chunks.shape[1] * CHUNK_BYTES
        machine.counters.shared_read_bytes += size
        if machine.recorder is not None:
            machine.recorder.operand(size, execution.pc)
        if machine.proxy is not None:
            name = "wgmma_rows_syncwarp"
            if which == 0 and name in machine.config.allow:
                self._read(execution, groups, _rows_of_warps(chunks, mn_major))
                return operand
            try:
                self._read(execution, groups, [chunks])
            except RaceError as race:
                with contextlib.suppress(RaceError):
                    if which == 0:
                        self._read(execution, groups, _rows_of_warps(chunks, mn_major))
                        race.way_out += way_out(name)
                raise
        return operand

    def _decode(
        self, execution: Execution, words: Array, name: str, rows: int, mn_major: bool, count: int
    ) -> tuple[SharedOperand, Array]:
        """An operand and its chunks, numbered from the start of the shared window (g, chunks).

        ``count``: chunks along k.
        """
        for word in np.unique(words).tolist():
            wrong = descriptors.problem(word)
            if wrong:
                site = execution.site(4 * np.argmax(words == word))
                self._refuse(site, name, word, wrong, EmulatorError)
        kinds = descriptors.layouts(words)
        if len(set(kinds)) > 1:
            other = next(kind for kind in kinds if kind != kinds[0])
            wrong = f"the descriptor of another warpgroup has {other}"
            self._refuse(execution.site(), name, int(words[0]), wrong, EmulatorError)
        if not mn_major and CHUNK_BYTES < kinds[0].span < count * CHUNK_BYTES:
            wrong = f"{count * CHUNK_BYTES} bytes of each row are read, more than the swizzle has"
            self._refuse(execution.site(), name, int(words[0]), wrong, EmulatorError)
        operand = SharedOperand(descriptors.starts(words), kinds[0]._replace(chunks=count))
        low, high, chunks = wgmma.reach(operand, rows, mn_major)
        size = self.machine.shared_size
        for group in np.flatnonzero((low < 0) | (high > size)):
            wrong = f"bytes {low[group]:,} to {high[group]:,} of {size:,} would be read"
            self._refuse(execution.site(4 * group), name, int(words[group]), wrong, OutOfBounds)
        return operand, chunks

    def _refuse(
        self, site: Site, name: str, word: int, wrong: str, kind: type[EmulatorError]
    ) -> NoReturn:
        words = np.array([word], np.uint64)
        start, layout = int(descriptors.starts(words)[0]), descriptors.layouts(words)[0]
        what = f"the emulator does not support this descriptor of {name}"
        way_out = "see ptx_emulator/isa/descriptors.py for the meaning of the fields"
        if kind is OutOfBounds:
            what = f"operand {name} of wgmma extends beyond shared memory"
            way_out = "check the start and the offsets, or pass a larger shared_bytes"
        numbers = f"{word:#018x}: start {start}, {layout}; {wrong}"
        self.machine.fail(kind, what, site, numbers, way_out)

    def _read(self, execution: Execution, groups: Array, parts: list[Array]) -> None:
        """Records the reads of the chunks (g, k) of an operand, which begin now.

        The chunks come as one part, which all warps read, or in four parts, one for each warp.
        """
        machine = self.machine
        assert machine.proxy is not None
        block = groups // self.per_block
        member = groups % (self.per_block * machine.cluster_size)
        base = (block * machine.shared_pitch)[:, None]
        rows = execution.cohort.rows.reshape(-1, 4)
        for number in np.unique(member).tolist():
            chosen = np.flatnonzero(member == number)
            column = machine.proxy.agent("warpgroup", number, f"wgmma of warpgroup {number}")
            for warp, chunks in enumerate(parts):
                offsets = (chunks * CHUNK_BYTES + base)[chosen]
                members = rows[chosen] if len(parts) == 1 else rows[chosen][:, warp : warp + 1]
                access = SharedAccess(
                    execution.cohort, members, offsets, CHUNK_BYTES, execution.pc, 4 * chosen
                )
                self.newest[groups[chosen]] = machine.proxy.read(access, column)

    # ---- groups

    def warps_exit(self, cohort: Cohort, gone: Array) -> None:
        """Checks that no wgmma of the rows ``gone`` of a cohort, which end now, is in flight.

        Raises:
            InFlight: one is.
        """
        groups = self.groups_of(cohort.rows)
        for chain in self.chains if self.machine.config.check else ():
            left = gone & np.isin(groups, chain.groups)
            if left.any():
                what = "a warp ends while one of its wgmma may be in flight"
                step = chain.steps[-1]
                open_group = step.group[0] >= self.committed[chain.groups[0]]
                numbers = f"no wgmma.{'commit_group' if open_group else 'wait_group'} covers it"
                way_out = "execute wgmma.commit_group and wgmma.wait_group 0 before the end"
                site = Site(cohort, step.pc, int(np.argmax(left)))
                self.machine.fail(InFlight, what, site, numbers, way_out)

    def commit(self, cohort: Cohort) -> None:
        """wgmma.commit_group."""
        groups = self.numbers(cohort)
        self.times[groups, self.committed[groups] % wgmma.KEPT_GROUPS] = self.newest[groups]
        self.committed[groups] += 1

    def wait(self, cohort: Cohort, left: int, current: dict[int, Any]) -> list[Any]:
        """wgmma.wait_group: completes all but the ``left`` newest groups.

        Args:
            cohort: whole warpgroups.
            left: number of groups that may remain in flight, less than KEPT_GROUPS.
            current: the values of the accumulators that may be completed.

        Returns:
            Their values after the wait.
        """
        groups = self.numbers(cohort)
        limit = self.committed[groups] - left
        for chain in list(self.chains):
            part, _ = self._cut(chain, groups)
            if part is None:
                continue
            limits = limit[np.searchsorted(groups, part.groups)]
            done = np.sum([step.group < limits for step in part.steps], axis=0)
            rest_groups, rest = part.groups, part
            for count in np.unique(done).tolist():
                completed, other = self._cut(rest, rest_groups[done == count])
                assert completed is not None
                rest = other or rest
                if count:
                    self._complete(completed, count, groups, current)
        self._order_after_reads(cohort, groups, limit)
        return list(current.values())

    def _complete(
        self, chain: WgmmaChain, count: int, groups: Array, current: dict[int, Any]
    ) -> None:
        machine = self.machine
        accumulators = chain.execute(machine, count, self.arena(chain.groups))
        if count < len(chain.steps):
            chain.start, chain.steps = accumulators, chain.steps[count:]
            return
        self.chains.remove(chain)
        for register, value in zip(chain.registers, accumulators, strict=True):
            if register in current:
                current[register] = _placed(current[register], groups, chain.groups, value)

    def _order_after_reads(self, cohort: Cohort, groups: Array, limit: Array) -> None:
        """Orders the warps after the reads of the operands of completed instructions."""
        machine = self.machine
        if machine.proxy is None:
            return
        times = self.times[groups, (limit - 1) % wgmma.KEPT_GROUPS]
        member = groups % (self.per_block * machine.cluster_size)
        rows = cohort.rows.reshape(-1, 4)
        for number in np.unique(member[limit > 0]).tolist():
            chosen = (member == number) & (limit > 0)
            column = machine.proxy.agent("warpgroup", number)
            warps, warp_times = rows[chosen].reshape(-1), np.repeat(times[chosen], 4)
            machine.proxy.clocks.order_after(warps, column, warp_times)


def _rows_of_warps(chunks: Array, mn_major: bool) -> list[Array]:
    """The chunks (g, k) of A that each of the four warps reads: 16 rows."""
    count = len(chunks)
    if mn_major:
        tile = chunks.reshape(count, -1, wgmma.ROWS // 8)
        return [tile[:, :, 2 * w : 2 * w + 2].reshape(count, -1) for w in range(4)]
    tile = chunks.reshape(count, wgmma.ROWS, -1)
    return [tile[:, 16 * w : 16 * w + 16].reshape(count, -1) for w in range(4)]


def _placed(old: Any, groups: Array, numbers: Array, value: Array) -> Array:
    """``old`` with the rows of the warpgroups ``numbers`` replaced by ``value``."""
    if value.dtype != old.dtype:
        value = value.view(old.dtype)
    if len(numbers) == len(groups):
        return value
    out = np.array(np.broadcast_to(old, (4 * len(groups), 32)))
    out[np.repeat(np.isin(groups, numbers), 4)] = value
    return out
