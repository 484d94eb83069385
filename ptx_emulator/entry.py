"""The public entry points: execute a kernel on numpy arrays, which are updated in place."""

from __future__ import annotations

import functools
import math
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from flashgen.shared.errors import called_by_users
from ptx_emulator.checks.dependent_launch import Footprint
from ptx_emulator.counters.totals import Counters
from ptx_emulator.errors import FORGIVEN, LaunchArguments
from ptx_emulator.isa.segments import Segments
from ptx_emulator.machine.arguments import DeviceArguments
from ptx_emulator.machine.machine import Machine
from ptx_emulator.ptx.parser import parse
from ptx_emulator.ptx.program import PtxProgram
from ptx_emulator.ptx.syntax import Module
from ptx_emulator.state.wave import LaunchConfig

STEP_LIMIT = 5_000_000
SUMS = ("hardware", "rounded")
MOST_BLOCKS_PER_CLUSTER = 16
MOST_SHARED = 232448  # bytes per block, of sm_90
_LOCK = threading.RLock()
_LAUNCHES: ContextVar[list[Counters] | None] = ContextVar("launches", default=None)
_FORMER: ContextVar[Footprint | None] = ContextVar("former", default=None)
_WATCHER: ContextVar[Callable[[Counters], None] | None] = ContextVar("watcher", default=None)


@called_by_users()
def launch(
    ptx: str,
    name: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    shared_bytes: int = 0,
    check: bool = True,
    order_seed: int | None = None,
    *,
    step_limit: int = STEP_LIMIT,
    profile: bool = False,
    sums: str = "hardware",
    strict: bool = True,
    allow: Sequence[str] = (),
    cluster: int | Sequence[int] | None = None,
    overlaps: bool = False,
) -> Counters:
    """Executes a kernel of a PTX text.

    Args:
        ptx: text of one module, from NVRTC or another compiler.
        name: the kernel, as it is spelled in the PTX.
        grid: blocks in x, y, z (trailing ones may be left out).
        block: threads in x, y, z.
        args: in the order of the kernel's parameters: a numpy array (a device buffer, updated in
            place; any dtype and strides, bfloat16 as uint16 or ml_dtypes.bfloat16), a number, None
            (a null pointer), a TensorMap (a CUtensorMap by value), or a tuple or list for one
            struct passed by value with the alignment of C, whose items are arrays, None, numpy
            scalars, TensorMaps or structs. A pointer to a struct in global memory, or to tensor
            maps there, is a numpy array of dtype object with such items, or one TensorMap. The
            address of a buffer mod 16 is that of the array.
        shared_bytes: dynamic shared memory per block.
        check: also check for races and for reads of memory or registers that were never written.
            Bounds, alignment, deadlocks and barriers are always checked.
        order_seed: if given, blocks and warps run in a random order drawn from this seed.
        step_limit: number of compiled segments after which the launch is considered endless.
        profile: also fill in `Counters.recorded`, which is slower. Launches inside `profiling` do
            so too.
        sums: how mma.sync and wgmma add floats. "hardware": as the tensor cores of the module's
            ``.target``, bit for bit (`isa.tensor_core_sums`). "rounded": in float64,
            rounded to float32 once for a chain of instructions, which is faster.
        strict: also report findings by the letter: what PTX forbids and hardware forgives, the keys
            of `ptx_emulator.FORGIVEN`. Other findings are errors and are always reported.
        allow: names of findings by the letter that are not reported, such as "cp_async_proxy".
        cluster: blocks per cluster in x, y, z, as the launch attribute; what the kernel requires
            (.reqnctapercluster), or 1, by default.
        overlaps: with the launch attribute of programmatic stream serialization: this launch may
            start before the last one of this thread has ended, if that has executed
            griddepcontrol.launch_dependents. It starts as early as it may: it sees nothing of what
            that launch writes, until all of its warps that can run wait (griddepcontrol.wait).

    Returns:
        Counters of instructions and memory traffic.

    Raises:
        LaunchArguments: the arguments do not fit the kernel.
        EmulatorError: the kernel did something that PTX forbids or that is not supported.
    """
    threads = _three_sizes(block, "block")
    segments = _loaded(ptx, name, math.prod(threads) % 32 > 0)
    program = segments.program
    config = LaunchConfig(
        _three_sizes(grid, "grid"),
        threads,
        shared_bytes,
        check,
        order_seed,
        step_limit,
        profile or _LAUNCHES.get() is not None,
        sums,
        _allowed(allow) if strict else frozenset(FORGIVEN),
        _cluster_of(program, cluster),
        _WATCHER.get(),
        overlaps,
        _FORMER.get(),
    )
    _FORMER.set(None)
    for what, numbers, way_out in _misfits(program, config):
        where = f"kernel {program.name}"
        raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
    machine = Machine(segments, config, DeviceArguments(program, args))
    begin = time.perf_counter()
    try:
        counters = machine.run()
        _FORMER.set(machine.footprint())
    finally:
        machine.memory.copy_back()
        # The machine and its parts refer to each other: without this, their memory would stay
        # until the garbage collector runs.
        vars(machine).clear()
    counters.seconds = time.perf_counter() - begin
    launches = _LAUNCHES.get()
    if launches is not None:
        launches.append(counters)
    return counters


@called_by_users()
@contextmanager
def profiling() -> Iterator[list[Counters]]:
    """Profiles every launch inside the context, as with profile=True.

    Yields:
        A list to which the counters of each launch are appended.
    """
    launches: list[Counters] = []
    token = _LAUNCHES.set(launches)
    try:
        yield launches
    finally:
        _LAUNCHES.reset(token)


@called_by_users()
@contextmanager
def watching(tell: Callable[[Counters], None]) -> Iterator[None]:
    """Calls ``tell`` with the counters of the running launch, many times per second.

    The counters of a launch are one object, whose numbers grow.
    """
    token = _WATCHER.set(tell)
    try:
        yield
    finally:
        _WATCHER.reset(token)


@called_by_users()
def load(ptx: str, name: str) -> PtxProgram:
    """The decoded kernel; each PTX text is decoded once.

    Raises:
        PtxSyntaxError: the text cannot be parsed.
        LaunchArguments: it has no kernel of this name.
    """
    return _loaded(ptx, name).program


@functools.lru_cache(maxsize=32)
def _module(ptx: str) -> tuple[Module, dict[tuple[str, bool], Segments]]:
    """A module, and its kernels that have been decoded."""
    return parse(ptx), {}


def _loaded(ptx: str, name: str, ragged: bool = False) -> Segments:
    if not isinstance(ptx, str):
        what, numbers = "ptx is no text", f"ptx is a {type(ptx).__name__}"
        way_out = "pass the PTX of one module as a str"
        raise LaunchArguments(what, where="ptx_emulator", numbers=numbers, way_out=way_out)
    with _LOCK:
        module, kernels = _module(ptx)
        if (name, ragged) not in kernels:
            kernels[name, ragged] = Segments(PtxProgram(module, name, ragged))
        return kernels[name, ragged]


def _allowed(names: Sequence[str]) -> frozenset[str]:
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in FORGIVEN]
    if unknown:
        what = "allow names a finding that cannot be allowed"
        numbers = f"{', '.join(map(repr, unknown))}; known are {', '.join(FORGIVEN)}"
        way_out = "the error message of a finding contains its name, if it can be allowed"
        raise LaunchArguments(what, where="ptx_emulator.launch", numbers=numbers, way_out=way_out)
    return frozenset(names)


def _cluster_of(program: PtxProgram, cluster: int | Sequence[int] | None) -> tuple[int, int, int]:
    """The sizes of a cluster: the launch's, which must be equal to the kernel's if it has any."""
    directive = program.directives.get(".reqnctapercluster")
    required = _three_sizes(directive, "cluster") if directive else None
    sizes = required or (1, 1, 1) if cluster is None else _three_sizes(cluster, "cluster")
    if required and sizes != required:
        what = "the cluster differs from the one that the kernel requires"
        where = f"kernel {program.name}"
        numbers = f"cluster {sizes}; .reqnctapercluster {required}"
        raise LaunchArguments(what, where=where, numbers=numbers, way_out="leave cluster out")
    return sizes


def _three_sizes(size: int | Sequence[int], name: str) -> tuple[int, int, int]:
    try:
        passed = [size] if isinstance(size, (int, np.integer)) else size
        sizes = [operator.index(number) for number in passed]
    except TypeError:  # something that is no whole number
        sizes = [0]
    sizes += [1] * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 1:
        problem = f"the {name} needs one to three positive sizes"
        where = "ptx_emulator.launch"
        numbers = f"{name} = {size!r}"
        way_out = "pass for example (blocks, heads, batch)"
        raise LaunchArguments(problem, where=where, numbers=numbers, way_out=way_out)
    return sizes[0], sizes[1], sizes[2]


def _misfits(program: PtxProgram, config: LaunchConfig) -> Iterator[tuple[str, str, str]]:
    """The problems of a launch with the kernel or CUDA, each with its numbers and a way out."""
    grid, block, cluster = config.grid, config.block, config.cluster
    threads = math.prod(block)
    limit = min(math.prod(program.max_threads) if program.max_threads else 1024, 1024)
    required = tuple((*program.required_threads, 1, 1)[:3])
    same_size = "launch with the block size that the kernel was compiled for"
    if config.sums not in SUMS:
        names = ", ".join(map(repr, SUMS))
        yield "tensor cores have no such sums", f"sums = {config.sums!r}", f"pass one of {names}"
    if threads > limit:
        numbers = f"{threads} threads; the kernel allows {limit}"
        yield "too many threads per block", numbers, same_size
    if program.required_threads and required != block:
        what = "the block size differs from the one that the kernel requires"
        yield what, f"block {block}; .reqntid {required}", same_size
    uneven = any(size % part for size, part in zip(grid, cluster, strict=True))
    if uneven or math.prod(cluster) > MOST_BLOCKS_PER_CLUSTER:
        what = "a grid that does not consist of whole clusters, or a cluster that is too large"
        most = f"at most {MOST_BLOCKS_PER_CLUSTER} blocks per cluster"
        way_out = "make each size of the grid a multiple of that of the cluster"
        yield what, f"grid {grid}, cluster {cluster}; {most}", way_out
    if max(grid[1:]) > 65535 or grid[0] >= 1 << 31 or block[2] > 64:
        way_out = "a grid has at most 2^31 - 1, 65535 and 65535 blocks; a block 64 in z"
        yield "a grid or block beyond the limits of CUDA", f"grid {grid}, block {block}", way_out
    static = program.dynamic_shared
    if static + config.shared_bytes > MOST_SHARED:
        numbers = f"{static:,} bytes of the kernel and {config.shared_bytes:,} of the launch; "
        numbers += f"no GPU has more than {MOST_SHARED:,} per block"
        way_out = "pass the number of bytes that the kernel was compiled for"
        yield "too much shared memory", numbers, way_out
    if config.shared_bytes < 0:
        numbers = f"shared_bytes = {config.shared_bytes}"
        way_out = "pass the number of bytes that the kernel was compiled for"
        yield "a negative amount of shared memory", numbers, way_out
