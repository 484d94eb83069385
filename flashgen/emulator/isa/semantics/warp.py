"""Exchanges between the lanes of a warp: shfl, vote, match, redux."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.registry import runtime
from flashgen.emulator.state.cohort import Cohort

Array = npt.NDArray[Any]
LANES = np.arange(32)
BITS = (np.uint64(1) << np.arange(32, dtype=np.uint64)).astype(np.uint64)


def _full(value: Any, n: int) -> Array:
    return np.broadcast_to(value, (n, 32))


@runtime
def shuffle(cohort: Cohort, mode: str, value: Any, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """shfl: the value of another lane, and whether that lane is in the segment.

    ``clamp`` holds the segment mask in bits 8 to 12 and the highest (or lowest) lane in 0 to 4.
    """
    if lane.ndim == 0 and clamp.ndim == 0:
        source, inside = _source(mode, int(lane), int(clamp))
        if value.ndim == 0 or value.shape[1] == 1:
            return value, inside
        if (source == source[0]).all():
            first = int(source[0])
            return value[:, first : first + 1], inside
        if mode == "bfly" and inside.all():
            return _butterfly(value, int(lane) & 31), np.True_
        return value.take(source, axis=1), inside
    source, inside = _source_lanes(mode, _full(lane, cohort.n), _full(clamp, cohort.n))
    if value.ndim == 0 or value.shape[1] == 1:
        return value, inside
    return np.take_along_axis(_full(value, cohort.n), source, axis=1), inside


def _butterfly(value: Array, mask: int) -> Array:
    if mask and not mask & (mask - 1):
        # Swap neighbouring runs of lanes.
        rows = value.shape[0]
        return value.reshape(rows, 16 // mask, 2, mask)[:, :, ::-1].reshape(rows, 32)
    return value.take(LANES ^ mask, axis=1)


def _source(mode: str, lane: int, clamp: int) -> tuple[Array, Array]:
    source, inside = _source_lanes(mode, np.array([lane]), np.array([clamp]))
    return np.broadcast_to(source, (1, 32))[0], np.broadcast_to(inside, (1, 32))


def _source_lanes(mode: str, lane: Array, clamp: Array) -> tuple[Array, Array]:
    b = lane.astype(np.int64) & 31
    c = clamp.astype(np.int64) & 31
    segment = (clamp.astype(np.int64) >> 8) & 31
    highest = (LANES & segment) | (c & ~segment)
    lowest = LANES & segment
    if mode == "up":
        source = LANES - b
        inside = source >= highest
    elif mode == "down":
        source = LANES + b
        inside = source <= highest
    elif mode == "bfly":
        source = LANES ^ b
        inside = source <= highest
    else:
        source = lowest | (b & ~segment)
        inside = source <= highest
    source, inside = np.broadcast_arrays(source, inside)
    return np.where(inside, source, LANES), inside


def _bits(lanes: Any) -> Array:
    """Lane flags (n, 32) as a word per row, (n, 1)."""
    words = np.packbits(lanes, axis=1, bitorder="little")
    return np.ascontiguousarray(words).view(np.uint32)


def _members(mask: Any, n: int) -> Array:
    """The member mask of each lane as flags (n, 32 or 1, 32)."""
    bits = (np.asarray(mask)[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.astype(bool)


@runtime
def vote(cohort: Cohort, mode: str, predicate: Any, mask: Any) -> Any:
    """vote: ballot gives uint32, all / any / uni a predicate, over the active lanes of the mask."""
    n = cohort.n
    active = np.ones((n, 32), bool) if cohort.mask is None else cohort.mask
    flags = _full(predicate, n)
    if np.ndim(mask) < 2 or mask.shape[1] == 1:
        members = active & np.broadcast_to(_members(mask, n).reshape(-1, 32), (n, 32))
        return _vote_uniform(mode, flags, members)
    # Groups of lanes vote among themselves.
    groups = active[:, None, :] & _members(mask, n)
    wanted = np.broadcast_to(flags[:, None, :], groups.shape)
    if mode == "ballot":
        return ((groups & wanted) * BITS).sum(axis=2).astype(np.uint32)
    every = (~groups | wanted).all(axis=2)
    some = (groups & wanted).any(axis=2)
    return every if mode == "all" else some if mode == "any" else every | ~some


def _vote_uniform(mode: str, flags: Array, members: Array) -> Any:
    if mode == "ballot":
        return _bits(flags & members)
    every = (flags | ~members).all(axis=1, keepdims=True)
    some = (flags & members).any(axis=1, keepdims=True)
    return every if mode == "all" else some if mode == "any" else every | ~some


@runtime
def active_mask(cohort: Cohort) -> Any:
    return np.uint32(0xFFFFFFFF) if cohort.mask is None else _bits(cohort.mask)


@runtime
def match(cohort: Cohort, every: bool, value: Any, mask: Any) -> tuple[Any, Any]:
    """match.any: lanes with an equal value; match.all: the mask if all are equal, else 0."""
    n = cohort.n
    active = np.ones((n, 32), bool) if cohort.mask is None else cohort.mask
    values = _full(value, n)
    members = _members(mask, n)
    if members.ndim < 3:
        members = np.broadcast_to(members.reshape(-1, 1, 32), (n, 32, 32))
    else:
        members = np.broadcast_to(members, (n, 32, 32))
    equal = values[:, :, None] == values[:, None, :]
    among = members & active[:, None, :]
    if not every:
        return ((equal & among) * BITS).sum(axis=2).astype(np.uint32), np.True_
    same = (equal | ~among).all(axis=2)
    word = (among * BITS).sum(axis=2).astype(np.uint32)
    return np.where(same, word, np.uint32(0)), same


@runtime
def reduce_lanes(cohort: Cohort, operation: str, value: Any, mask: Any) -> Any:
    """redux: a reduction over the member lanes."""
    n = cohort.n
    active = np.ones((n, 32), bool) if cohort.mask is None else cohort.mask
    values = _full(value, n)
    flags = _members(mask, n)
    neutral = {
        "add": 0,
        "or": 0,
        "xor": 0,
        "and": -1,
        "min": np.iinfo(value.dtype).max,
        "max": np.iinfo(value.dtype).min,
    }[operation]
    fill = np.array(neutral).astype(value.dtype)
    function = {
        "add": np.add,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "and": np.bitwise_and,
        "min": np.minimum,
        "max": np.maximum,
    }[operation]
    if flags.ndim < 3 or flags.shape[1] == 1:
        members = active & np.broadcast_to(flags.reshape(-1, 32), (n, 32))
        chosen = np.where(members, values, fill)
        return function.reduce(chosen, axis=1, keepdims=True, dtype=value.dtype)
    groups = active[:, None, :] & np.broadcast_to(flags, (n, 32, 32))
    chosen = np.where(groups, values[:, None, :], fill)
    return function.reduce(chosen, axis=2, dtype=value.dtype)


@runtime
def elect(cohort: Cohort, mask: Any) -> tuple[Any, Any]:
    """elect.sync: the lowest active member lane, and whether this lane is it."""
    n = cohort.n
    active = np.ones((n, 32), bool) if cohort.mask is None else cohort.mask
    flags = _members(mask, n)
    if flags.ndim < 3 or flags.shape[1] == 1:
        members = active & np.broadcast_to(flags.reshape(-1, 32), (n, 32))
        first: Array = np.argmax(members, axis=1)[:, None]
    else:
        # Groups of lanes elect among themselves.
        first = np.argmax(active[:, None, :] & flags, axis=2)
    return first.astype(np.uint32), first == LANES
