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

_MOST_SETTLED = 4096
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
        key: what they have in common.
        first: the numbers of the first record.
        varying: the places of numbers of which there has been another value.
        constant: the places of those that can only be constants.
        traced: the traced mods by the places of run-time scalars and the other numbers.
    """

    key: RecordKey
    first: tuple[int | float, ...]
    varying: set[int] = field(default_factory=set)
    constant: set[int] = field(default_factory=set)
    traced: dict[Any, list[TracedMods]] = field(default_factory=dict)

    def scalars(self, found: Record) -> frozenset[int]:
        """The places of the numbers that are run-time scalars in a call.

        Integers of which torch.compile traces symbols are scalars from their first value on.
        With deterministic algorithms these are all numbers that the mods' code does not contain,
        so that the bits of a result do not depend on earlier calls.
        """
        chosen = {place for place, x in enumerate(found.numbers) if type(x) is OpenInt}
        if torch.are_deterministic_algorithms_enabled():
            assert found.notes is not None, "records have notes with deterministic algorithms"
            chosen |= set(range(len(found.numbers))) - found.notes.literals
        elif found.numbers != self.first:
            pairs = enumerate(zip(found.numbers, self.first, strict=True))
            self.varying.update(place for place, (a, b) in pairs if a != b)
            chosen |= self.varying
        numbers = ((place, found.numbers[place]) for place in chosen - self.constant)
        # Run-time scalars hold no others, and floats beyond them may remove scores.
        most = {True: SCALAR_LIMIT, False: 1e30}
        return frozenset(place for place, x in numbers if abs(x) < most[isinstance(x, int)])

    def of(self, found: Record) -> list[TracedMods]:
        scalars = self.scalars(found)
        return self.traced.get((scalars, _others(found, scalars)), [])


_kept: OrderedDict[RecordKey, _Variants] = OrderedDict()

_settled_records: OrderedDict[Any, None] = OrderedDict()
"""What code has computed each time that it was executed."""


_versions: OrderedDict[Hashable, dict[tuple[Any, ...], None]] = OrderedDict()
"""What the same lines of code compute: records, lengths of tensors that they make, and specs."""


@dataclass
class _Proved:
    """What is known of mods that need not be recorded again.

    Attributes:
        record: their record without tensors.
        places: the places of the tensors that they read among those of the proof.
        traced: the traced mods of the last call.
    """

    record: Record
    places: tuple[int, ...]
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
        known, found = _read(mask_mod, score_mod, sizes, None, pure=True)
        _keep(key, proof, found, known)
        return known, found
    tensors = tuple([proof.tensors[place] for place in proved.places])
    at_first = proved.record
    found = Record(at_first.key, at_first.numbers, tensors, at_first.made, at_first.notes)
    traced = proved.traced  # another thread may replace it
    if traced is None or not traced.serves(sizes, found):
        traced, found = _read(mask_mod, score_mod, sizes, found, pure=True)
        proved.traced = traced
    return traced, found


def _read(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    sizes: CallSizes,
    found: Record | None,
    pure: bool = False,
) -> tuple[TracedMods, Record]:
    """What `read` returns, of mods that are recorded.

    Args:
        found: their record; they are recorded now if None.
        pure: whether the mods are known to compute the same each time.
    """
    if found is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        notes = Notes() if deterministic or captures_a_graph(sizes.device) else None
        found = _shared(record(mask_mod, score_mod, sizes.device, notes, sizes.learned))
    codes = tuple([None if mod is None else code_of(mod) for mod in (mask_mod, score_mod)])
    with _lock:
        pure = pure or (codes, found.numbers, found.key) in _settled_records
        known = _known(found, sizes) if pure else None
    if known is not None:
        return known, found
    found = _shared(_settled(mask_mod, score_mod, sizes, found))
    with _lock:
        _settled_records[codes, found.numbers, found.key] = None
        while len(_settled_records) > _MOST_SETTLED:
            _settled_records.popitem(last=False)
        known = _known(found, sizes)
        if known is None:
            with alone():
                known = _traced(mask_mod, score_mod, found, sizes)
        return known, found


def _shared(found: Record) -> Record:
    """The record with the key of an earlier one that is equal, so that one of them is kept."""
    with _lock:
        variants = _kept.get(found.key)
    return found if variants is None else found._replace(key=variants.key)


def _keep(key: Any, proof: Proof, found: Record, traced: TracedMods) -> None:
    at = {id(tensor): place for place, tensor in enumerate(proof.tensors)}
    places = tuple([at.get(id(tensor), -1) for tensor in found.tensors])
    if -1 in places:  # the mods make a tensor of which the record says nothing
        return
    with _lock:
        _proved[key] = _Proved(found._replace(tensors=()), places, traced)
        while len(_proved) > _MOST_RECORDS:
            _proved.popitem(last=False)


def _known(found: Record, sizes: CallSizes) -> TracedMods | None:
    variants = _kept.get(found.key)
    if variants is None:
        return None
    _kept.move_to_end(found.key)
    return next((each for each in variants.of(found) if each.serves(sizes, found)), None)


def _traced(
    mask_mod: Mod | None, score_mod: Mod | None, found: Record, sizes: CallSizes
) -> TracedMods:
    variants = _kept.setdefault(found.key, _Variants(found.key, found.numbers))
    while len(_kept) > _MOST_RECORDS:
        _kept.popitem(last=False)
    # The second trace for one key assumes nothing about the sizes of a call.
    bounds = {} if variants.of(found) else sizes.bounds
    scalars = variants.scalars(found)

    def attempt(places: frozenset[int]) -> TracedMods | None:
        try:
            made = trace(mask_mod, score_mod, found, bounds, places)
            made.spec(64, 64, "float32")
        except FlashgenError:
            return None
        return made

    _check_count(variants, found)
    traced = attempt(scalars) if scalars else None
    if scalars and traced is None:
        alone = {place for place in scalars if attempt(frozenset({place})) is None}
        variants.constant |= alone or scalars
        return _known(found, sizes) or _traced(mask_mod, score_mod, found, sizes)
    if traced is None:
        try:
            traced = trace(mask_mod, score_mod, found, bounds)
        except SpecError:  # some operations can only be expressed with what the sizes are
            if bounds:
                raise
            traced = trace(mask_mod, score_mod, found, sizes.bounds)
    is_first = not variants.traced
    kept = variants.traced.get((scalars, _others(found, scalars)), [])
    if is_first or traced.shapes is not None:
        _check_versions((mask_mod, score_mod), found, traced)
    variants.traced[scalars, _others(found, scalars)] = kept
    kept.insert(0, traced)
    del kept[_MOST_LENGTHS:]
    return traced


def _others(found: Record, scalars: frozenset[int]) -> tuple[int | float, ...]:
    if not scalars:
        return found.numbers
    return tuple(x for place, x in enumerate(found.numbers) if place not in scalars)


def _check_count(variants: _Variants, found: Record) -> None:
    """Refuses one more value of a number that can only be compiled as a constant."""
    scalars = variants.scalars(found)
    known = [others for places, others in variants.traced if places == scalars]
    numbers = _others(found, scalars)
    if numbers in known or len(known) < MOST_CONSTANTS:
        return
    assert found.notes is not None, "what is traced has notes"
    differing = (i for i, x in enumerate(found.numbers) if x != variants.first[i])
    place = next(place for place in differing if place not in scalars)
    raise SpecError(
        f"a number in a mod has its value number {MOST_CONSTANTS + 1}, and each is compiled into "
        "kernels of its own",
        where=found.notes.line_of(place),
        numbers=f"{found.numbers[place]}, after {variants.first[place]} and others; no kernel "
        "takes it as an argument",
        way_out="a captured tensor that is computed with the number outside of the mod, or fewer "
        "values",
    )


def _check_versions(mods: Sequence[Mod | None], found: Record, traced: TracedMods) -> None:
    """Refuses one more version of mods that differs from earlier ones in more than numbers."""
    key, notes = found.key, found.notes
    assert notes is not None, "what is traced has notes"
    lines = ((notes.line(i), x.function) for i, x in enumerate(key.operations))
    reads = (each[1:] for each in key.reads)
    codes = tuple([None if mod is None else code_of(mod) for mod in mods])
    shared = codes, frozenset(lines), frozenset(reads), key.device, key.default_dtype
    known = _versions.setdefault(shared, {})
    _versions.move_to_end(shared)
    while len(_versions) > _MOST_RECORDS:
        _versions.popitem(last=False)
    made = () if traced.shapes is None else traced.shapes[len(found.tensors) :]
    version = key, made, traced.spec(64, 64, "float32")
    if version not in known and len(known) >= MOST_VERSIONS:
        earlier = next(reversed(known))[0].operations
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
    known[version] = None


def _settled(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: CallSizes, found: Record
) -> Record:
    """A record with notes of mods that compute the same each time.

    Args:
        found: a record of the same mods; they may have filled caches since.

    Raises:
        SpecError: the mods compute something else each time that they are executed.
    """
    earlier, drawn = found, ""
    for _ in range(_MOST_EXECUTIONS):
        with _Draws() as draws:
            again = record(mask_mod, score_mod, sizes.device, Notes(), sizes.learned)
        drawn = draws.found
        with alone():
            if not drawn and _parts(again) == _parts(earlier):
                return again
        earlier, found = again, earlier
    _refuse_change(mask_mod if mask_mod is not None else score_mod, found, earlier, drawn)


class _Draws:
    """Watches whether this thread draws random numbers of Python or numpy."""

    def __enter__(self) -> _Draws:
        self.found = ""
        self.of_numpy = self._of_numpy()
        self.watches = sys.getprofile() is None  # Python has place for one profiler
        if self.watches:
            sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        if self.watches:
            sys.setprofile(None)
        if self.of_numpy != self._of_numpy():
            self.found = "numpy.random"

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if event == "c_call" and isinstance(owner, random.Random):
            self.found = "random"

    def _of_numpy(self) -> object:
        state: Any = np.random.get_state()
        return state[1].tobytes(), *state[2:]


def _parts(found: Record) -> tuple[object, ...]:
    made = [(number, x.dtype, _bytes(x)) for number, x in found.made.items()]
    return found.key, found.numbers, made


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _refuse_change(mod: Mod | None, first: Record, second: Record, drawn: str) -> NoReturn:
    assert mod is not None, "no mods compute nothing"
    assert second.notes is not None, "records are compared with their notes"
    where, numbers = str(lines_of(mod, "")), "executed twice with the same arguments"
    pairs = zip(first.numbers, second.numbers, strict=False)
    for place, (a, b) in enumerate(pairs):
        if a != b:
            where, numbers = second.notes.line_of(place), f"{a}, then {b}"
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
