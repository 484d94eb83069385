"""The traced mods of earlier calls, found by what the mods of a call compute.

The first value of a number among the operands is compiled as a constant. If it changes, it becomes
a run-time scalar, so that no number of values costs more than two kernels. Where only a constant
can be compiled, the number of values is limited.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch

from flashgen.frontends.flex.graph_capture import captures_a_graph
from flashgen.frontends.flex.operation_results import alone
from flashgen.frontends.flex.proofs import Proof, prove
from flashgen.frontends.flex.recorded_mods import Mod, Notes, Record, RecordKey, record
from flashgen.frontends.flex.recorder import OpenInt
from flashgen.frontends.flex.traced_mods import CallSizes, TracedMods, trace
from flashgen.shared.dtypes import SCALAR_LIMIT
from flashgen.shared.errors import FlashgenError, SpecError
from flashgen.spec.language.user_source import code_of, lines_of

_MOST_RECORDS = 1024
"""The number of records whose traced mods are kept, least recently used first to go."""

_MOST_STABLE = 4096
"""The number of records of which it is kept that the mods compute the same each time."""

_MOST_EXECUTIONS = 3
"""How often mods are executed until they compute the same twice."""

_MOST_LENGTHS = 16
"""The number of traced mods that are kept of a record where they depend on lengths."""

MOST_CONSTANTS = 7
"""The number of values of a number that can only be compiled as a constant."""

MOST_VERSIONS = 63
"""The number of versions of a mod that differ in other constants, in lengths or in how often they
repeat a line: as many as the layers of a deep model may have, each with its own."""

_lock = threading.RLock()


@dataclass
class _Variants:
    """The traced mods of records that differ in numbers only.

    Attributes:
        key: the record key that they have in common.
        first: the numbers of the first record.
        varying: the indices of the numbers that have had another value.
        constant: the indices of the numbers that can only be constants.
        traced: the traced mods by the indices of run-time scalars and the other numbers.
    """

    key: RecordKey
    first: tuple[int | float, ...]
    varying: set[int] = field(default_factory=set)
    constant: set[int] = field(default_factory=set)
    traced: dict[Any, list[TracedMods]] = field(default_factory=dict)

    def scalars(self, call_record: Record) -> frozenset[int]:
        """The indices of the numbers that are run-time scalars in a call.

        Integers of which torch.compile traces symbols are scalars from their first value on.
        With deterministic algorithms these are all numbers that the mods' code does not contain,
        so that the bits of a result do not depend on earlier calls.
        """
        chosen = {index for index, x in enumerate(call_record.numbers) if type(x) is OpenInt}
        if torch.are_deterministic_algorithms_enabled():
            assert call_record.notes is not None, "records have notes with deterministic algorithms"
            chosen |= set(range(len(call_record.numbers))) - call_record.notes.literals
        elif call_record.numbers != self.first:
            pairs = enumerate(zip(call_record.numbers, self.first, strict=True))
            self.varying.update(index for index, (a, b) in pairs if a != b)
            chosen |= self.varying
        numbers = ((index, call_record.numbers[index]) for index in chosen - self.constant)
        # Run-time scalars hold no others, and floats beyond them may remove scores.
        limits = {True: SCALAR_LIMIT, False: 1e30}
        return frozenset(index for index, x in numbers if abs(x) < limits[isinstance(x, int)])

    def traced_for(self, call_record: Record) -> list[TracedMods]:
        scalars = self.scalars(call_record)
        return self.traced.get((scalars, _constant_numbers(call_record, scalars)), [])


_variants_of_keys: OrderedDict[RecordKey, _Variants] = OrderedDict()

_stable_records: OrderedDict[Any, None] = OrderedDict()
"""What code has computed each time that it was executed."""


_versions: OrderedDict[Hashable, dict[tuple[Any, ...], None]] = OrderedDict()
"""What the same lines of code compute: records, lengths of tensors that they make, and specs."""


@dataclass
class _Proved:
    """The record and the traced mods of mods that need not be recorded again.

    Attributes:
        record: their record without tensors.
        tensor_indices: the index in the proof of each tensor that they read.
        traced: the traced mods of the last call.
    """

    record: Record
    tensor_indices: tuple[int, ...]
    traced: TracedMods | None = None


_proved: OrderedDict[Any, _Proved] = OrderedDict()


def read(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: CallSizes
) -> tuple[TracedMods, Record]:
    """The traced mods, from an earlier call where possible, and the record of this call.

    Raises:
        SpecError: kernels cannot express a mod; the message names the operation and the line.
    """
    proof = prove((mask_mod, score_mod))
    if proof is None:
        return _read(mask_mod, score_mod, sizes, None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = proof.key, sizes.device, deterministic, captures_a_graph(sizes.device)
    with _lock:
        proved = _proved.get(key)
        if proved is not None:
            _proved.move_to_end(key)
    if proved is None:
        first_traced, call_record = _read(mask_mod, score_mod, sizes, None, pure=True)
        _keep(key, proof, call_record, first_traced)
        return first_traced, call_record
    tensors = tuple([proof.tensors[index] for index in proved.tensor_indices])
    at_first = proved.record
    call_record = Record(
        at_first.key, at_first.numbers, tensors, at_first.created_tensors, at_first.notes
    )
    traced = proved.traced  # another thread may replace it
    if traced is None or not traced.serves(sizes, call_record):
        traced, call_record = _read(mask_mod, score_mod, sizes, call_record, pure=True)
        proved.traced = traced
    return traced, call_record


def read_alone(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: CallSizes
) -> tuple[TracedMods, Record]:
    """What `read` returns, with the names and lines of these mods, and numbers as constants."""
    call_record = record(mask_mod, score_mod, sizes.device, Notes(), sizes.learned)
    with _lock, alone():
        return trace(mask_mod, score_mod, call_record, sizes.bounds), call_record


def _read(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    sizes: CallSizes,
    call_record: Record | None,
    pure: bool = False,
) -> tuple[TracedMods, Record]:
    """What `read` returns, of mods that are recorded.

    Args:
        call_record: their record; they are recorded now if None.
        pure: whether the mods are known to compute the same each time.
    """
    if call_record is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        notes = Notes() if deterministic or captures_a_graph(sizes.device) else None
        call_record = _shared(record(mask_mod, score_mod, sizes.device, notes, sizes.learned))
    codes = tuple([None if mod is None else code_of(mod) for mod in (mask_mod, score_mod)])
    with _lock:
        pure = pure or (codes, call_record.numbers, call_record.key) in _stable_records
        traced = _find_traced(call_record, sizes) if pure else None
    if traced is not None:
        return traced, call_record
    call_record = _shared(_stable_record(mask_mod, score_mod, sizes, call_record))
    with _lock:
        _stable_records[codes, call_record.numbers, call_record.key] = None
        while len(_stable_records) > _MOST_STABLE:
            _stable_records.popitem(last=False)
        traced = _find_traced(call_record, sizes)
        if traced is None:
            with alone():
                traced = _traced(mask_mod, score_mod, call_record, sizes)
        return traced, call_record


def _shared(call_record: Record) -> Record:
    """The record with the key of an earlier one that is equal, so that one of them is kept."""
    with _lock:
        variants = _variants_of_keys.get(call_record.key)
    return call_record if variants is None else call_record._replace(key=variants.key)


def _keep(key: Any, proof: Proof, call_record: Record, traced: TracedMods) -> None:
    index_by_id = {id(tensor): index for index, tensor in enumerate(proof.tensors)}
    tensor_indices = tuple([index_by_id.get(id(tensor), -1) for tensor in call_record.tensors])
    if -1 in tensor_indices:  # the mods make a tensor of which the record says nothing
        return
    with _lock:
        _proved[key] = _Proved(call_record._replace(tensors=()), tensor_indices, traced)
        while len(_proved) > _MOST_RECORDS:
            _proved.popitem(last=False)


def _find_traced(call_record: Record, sizes: CallSizes) -> TracedMods | None:
    variants = _variants_of_keys.get(call_record.key)
    if variants is None:
        return None
    _variants_of_keys.move_to_end(call_record.key)
    fitting = (x for x in variants.traced_for(call_record) if x.serves(sizes, call_record))
    return next(fitting, None)


def _traced(
    mask_mod: Mod | None, score_mod: Mod | None, call_record: Record, sizes: CallSizes
) -> TracedMods:
    variants = _variants_of_keys.setdefault(
        call_record.key, _Variants(call_record.key, call_record.numbers)
    )
    while len(_variants_of_keys) > _MOST_RECORDS:
        _variants_of_keys.popitem(last=False)
    # The second trace for one key assumes nothing about the sizes of a call.
    bounds = {} if variants.traced_for(call_record) else sizes.bounds
    scalars = variants.scalars(call_record)

    def attempt(indices: frozenset[int]) -> TracedMods | None:
        try:
            attempted = trace(mask_mod, score_mod, call_record, bounds, indices)
            attempted.spec(64, 64, "float32")
        except FlashgenError:
            return None
        return attempted

    _check_count(variants, call_record)
    traced = attempt(scalars) if scalars else None
    if scalars and traced is None:
        alone = {index for index in scalars if attempt(frozenset({index})) is None}
        variants.constant |= alone or scalars
        return _find_traced(call_record, sizes) or _traced(mask_mod, score_mod, call_record, sizes)
    if traced is None:
        try:
            traced = trace(mask_mod, score_mod, call_record, bounds)
        except SpecError:  # some operations can only be expressed with what the sizes are
            if bounds:
                raise
            traced = trace(mask_mod, score_mod, call_record, sizes.bounds)
    is_first = not variants.traced
    same_constants = variants.traced.get((scalars, _constant_numbers(call_record, scalars)), [])
    if is_first or traced.shapes is not None:
        _check_versions((mask_mod, score_mod), call_record, traced)
    variants.traced[scalars, _constant_numbers(call_record, scalars)] = same_constants
    same_constants.insert(0, traced)
    del same_constants[_MOST_LENGTHS:]
    return traced


def _constant_numbers(call_record: Record, scalars: frozenset[int]) -> tuple[int | float, ...]:
    if not scalars:
        return call_record.numbers
    return tuple(x for index, x in enumerate(call_record.numbers) if index not in scalars)


def _check_count(variants: _Variants, call_record: Record) -> None:
    """Refuses one more value of a number that can only be compiled as a constant."""
    scalars = variants.scalars(call_record)
    earlier = [constants for indices, constants in variants.traced if indices == scalars]
    numbers = _constant_numbers(call_record, scalars)
    if numbers in earlier or len(earlier) < MOST_CONSTANTS:
        return
    assert call_record.notes is not None, "what is traced has notes"
    differing = (i for i, x in enumerate(call_record.numbers) if x != variants.first[i])
    index = next(index for index in differing if index not in scalars)
    raise SpecError(
        f"a number in a mod has its value number {MOST_CONSTANTS + 1}, and each is compiled into "
        "kernels of its own",
        where=call_record.notes.line_of(index),
        numbers=f"{call_record.numbers[index]}, after {variants.first[index]} and others; no "
        "kernel takes it as an argument",
        way_out="a captured tensor that is computed with the number outside of the mod, or fewer "
        "values",
    )


def _check_versions(mods: Sequence[Mod | None], call_record: Record, traced: TracedMods) -> None:
    """Refuses one more version of mods that differs from earlier ones in more than numbers."""
    key, notes = call_record.key, call_record.notes
    assert notes is not None, "what is traced has notes"
    lines = ((notes.line(i), x.function) for i, x in enumerate(key.operations))
    reads = (reading[1:] for reading in key.reads)
    codes = tuple([None if mod is None else code_of(mod) for mod in mods])
    shared = codes, frozenset(lines), frozenset(reads), key.device, key.default_dtype
    versions = _versions.setdefault(shared, {})
    _versions.move_to_end(shared)
    while len(_versions) > _MOST_RECORDS:
        _versions.popitem(last=False)
    created_shapes = () if traced.shapes is None else traced.shapes[len(call_record.tensors) :]
    version = key, created_shapes, traced.spec(64, 64, "float32")
    if version not in versions and len(versions) >= MOST_VERSIONS:
        earlier = next(reversed(versions))[0].operations
        pairs = zip(key.operations, earlier, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(earlier))
        first = next(mod for mod in mods if mod is not None)
        raise SpecError(
            f"a mod has its version number {MOST_VERSIONS + 1}; each is traced anew, and most "
            "need kernels of their own",
            where=notes.line(same) if same < len(key.operations) else str(lines_of(first, "")),
            numbers=f"{len(key.operations)} operations, before {len(earlier)}; constants other "
            "than numbers, lengths or the count of a loop change from call to call",
            way_out="a captured tensor that is computed outside of the mod, or fewer versions",
        )
    versions[version] = None


def _stable_record(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: CallSizes, call_record: Record
) -> Record:
    """A record with notes of mods that compute the same each time.

    Args:
        call_record: a record of the same mods, which may have filled caches since.

    Raises:
        SpecError: the mods compute something else each time that they are executed.
    """
    earlier, drawn = call_record, ""
    for _ in range(_MOST_EXECUTIONS):
        with _Draws() as draws:
            again = record(mask_mod, score_mod, sizes.device, Notes(), sizes.learned)
        drawn = draws.drawn_from
        with alone():
            if not drawn and _parts(again) == _parts(earlier):
                return again
        earlier, call_record = again, earlier
    _refuse_change(mask_mod if mask_mod is not None else score_mod, call_record, earlier, drawn)


class _Draws:
    """Watches whether this thread draws random numbers of Python or numpy."""

    def __enter__(self) -> _Draws:
        self.drawn_from = ""
        self.numpy_before = self._numpy_state()
        self.watches = sys.getprofile() is None  # Python has place for one profiler
        if self.watches:
            sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        if self.watches:
            sys.setprofile(None)
        if self.numpy_before != self._numpy_state():
            self.drawn_from = "numpy.random"

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if event == "c_call" and isinstance(owner, random.Random):
            self.drawn_from = "random"

    def _numpy_state(self) -> object:
        state: Any = np.random.get_state()
        return state[1].tobytes(), *state[2:]


def _parts(call_record: Record) -> tuple[object, ...]:
    created = [(number, x.dtype, _bytes(x)) for number, x in call_record.created_tensors.items()]
    return call_record.key, call_record.numbers, created


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _refuse_change(mod: Mod | None, first: Record, second: Record, drawn: str) -> NoReturn:
    assert mod is not None, "no mods compute nothing"
    assert second.notes is not None, "records are compared with their notes"
    where, numbers = str(lines_of(mod, "")), "executed twice with the same arguments"
    pairs = zip(first.numbers, second.numbers, strict=False)
    for index, (a, b) in enumerate(pairs):
        if a != b:
            where, numbers = second.notes.line_of(index), f"{a}, then {b}"
            break
    if drawn:
        numbers += f"; random numbers of {drawn} are drawn"
    raise SpecError(
        "a mod computes something else each time that it is executed",
        where=where,
        numbers=numbers,
        way_out="random numbers that are drawn before the call, as a captured tensor; dropout=True "
        "of fg.AttentionSpec for dropout",
    )
