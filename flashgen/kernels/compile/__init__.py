"""Compilation of emitted files by NVRTC, without a GPU or driver, with a cache of the results.

Most callers need only `compile`::

    binary = compile(text, filename="causal.cu", kernel="causal", arch="sm_80")
    binary.ptx, binary.cubin, binary.resources.registers, binary.warnings

It looks in the memory of the process, then in the disk cache (`kernels.compile.cache`), and
compiles otherwise.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from flashgen.kernels.compile import cache, nvrtc, nvrtc_log, override
from flashgen.kernels.compile.nvrtc_log import Resources
from flashgen.kernels.compile.override import Override
from flashgen.shared import config
from flashgen.shared.errors import CompileError

__all__ = ["Binary", "Resources", "compile", "forget"]


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    The emulator executes the PTX; a GPU loads the cubin.
    """

    kernel: str
    arch: str
    filename: str  # the emitted file's name in messages
    source: str = field(repr=False)
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    resources: Resources
    warnings: tuple[str, ...]  # of the compiler: spills, serialised wgmma, unused variables, ...
    log: str = field(repr=False)  # NVRTC's messages, without timings
    seconds: float  # duration of this call
    from_cache: bool
    key: str  # content key: equal keys mean equal binaries
    folder: Path | None  # the cache entry, which contains the source file

    @property
    def cuda(self) -> int:
        """The major version of CUDA of the compiler: PTX 8 is CUDA 12's and PTX 9 is CUDA 13's (PTX
        ISA, release notes)."""
        declared = re.search(r"^\.version (\d+)\.", self.ptx, re.MULTILINE)
        assert declared is not None, "PTX begins with its version"
        return int(declared[1]) + 4


_DECIDING = ("source", "filename", "kernel", "arch")


@dataclass(frozen=True)
class _Request:
    """The arguments of a call of `compile` that determine its result."""

    source: str
    filename: str
    kernel: str
    arch: str
    options: tuple[str, ...]
    override: Override | None

    @functools.cached_property
    def key(self) -> str:
        """The content key of the binary."""
        return cache.key(
            {
                **{name: value for name, value in vars(self).items() if name in _DECIDING},
                **({} if self.override is None else {"override": self.override.key}),
                "options": [*nvrtc.BASE_OPTIONS, *self.options],
                "nvrtc": nvrtc.version(),
                "resources": [entry.name for entry in fields(Resources)],
            }
        )

    def binary(
        self,
        cubin: bytes,
        ptx: str,
        resources: Resources,
        log: str,
        warnings: tuple[str, ...],
        folder: Path | None = None,
    ) -> Binary:
        """The binary of this request; it is from the cache if it has a folder."""
        return Binary(
            kernel=self.kernel,
            arch=self.arch,
            filename=self.filename,
            source=self.source,
            cubin=cubin,
            ptx=ptx,
            resources=resources,
            warnings=warnings,
            log=log,
            seconds=0.0,
            from_cache=folder is not None,
            key=self.key,
            folder=folder,
        )


_memory: dict[str, Binary] = {}
_in_process: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def compile(
    source_text: str,
    *,
    filename: str,
    kernel: str,
    arch: str,
    options: tuple[str, ...] = (),
    others: Callable[[], Iterable[str]] | None = tuple,
) -> Binary:
    """Compiles one emitted file, or loads it from the cache.

    Args:
        source_text: self-contained CUDA C++.
        filename: the emitted file's name, without folders; messages and line information use it.
        kernel: name of the ``extern "C" __global__`` function.
        arch: "sm_80", "sm_90a", ...
        options: NVRTC options besides flashgen's own.
        others: as for `flashgen.kernels.compile.override.replacing`.

    Returns:
        The binary; `Binary.warnings` are the warnings of the compiler.

    Raises:
        CompileError: NVRTC is missing, rejects the source or does not support the architecture.
        FlashgenError: the file of FLASHGEN_OVERRIDE is no text.
    """
    start = time.perf_counter()
    _check_names(filename, kernel, arch)
    edited = override.replacing(filename, others)
    note: tuple[str, ...] = ()
    if edited is not None:
        source_text, note = edited.text, (f"compiled from FLASHGEN_OVERRIDE={edited.path}",)
    request = _Request(source_text, filename, kernel, arch, tuple(options), edited)
    key = request.key
    with _guard:
        lock = _in_process.setdefault(key, threading.Lock())
    # Threads that compile the same kernel wait for the first one.
    with lock:
        cached = _memory.get(key)
        if cached is None:
            fresh = _memory[key] = _load_or_make(request)
            return _reported(fresh, fresh.from_cache, start, note)
    return _reported(cached, True, start, note)


def forget() -> None:
    """Drops the binaries in the memory of the process; the disk cache stays."""
    with _guard:
        _memory.clear()
        _in_process.clear()


def _reported(binary: Binary, from_cache: bool, start: float, note: tuple[str, ...]) -> Binary:
    seconds = time.perf_counter() - start
    origin = "from the cache" if from_cache else "compiled"
    config.log(2, f"flashgen: {binary.filename} for {binary.arch} {origin} in {seconds:.4f} s")
    if not from_cache:
        config.log(5, binary.ptx)
    return replace(binary, seconds=seconds, from_cache=from_cache, warnings=note + binary.warnings)


def _check_names(filename: str, kernel: str, arch: str) -> None:
    # The arguments become names of files and folders.
    for kind, value, pattern in (
        ("file name", filename, r"[\w.-]+\.cuh?"),
        ("kernel name", kernel, r"[A-Za-z_]\w*"),
        ("architecture", arch, r"sm_\d{2,3}[af]?"),
    ):
        if not re.fullmatch(pattern, value, re.ASCII):
            raise CompileError(
                f"this is not a valid {kind}",
                where=f"flashgen.kernels.compile, {kind}",
                numbers=f"given {value!r}; expected the form {pattern}",
                way_out="letters, digits and underscores, such as causal.cu, causal and sm_80",
            )


def _load_or_make(request: _Request) -> Binary:
    root, filename, key = cache.usable_root(), request.filename, request.key
    if root is None:
        return _make(request, filename)
    folder = cache.folder(root, filename=filename, arch=request.arch, key=key)
    binary = _load(request, folder)
    if binary is not None:
        return binary
    with cache.locked(root, cache.lock_of(key)) as acquired:
        if not acquired:
            return _make(request, filename)
        # Another process may have compiled it while this one waited.
        binary = _load(request, folder, quiet=True)
        if binary is not None:
            return binary
        # NVRTC 13.0 writes the time stamp of a file of the program's name into the line table.
        cache.discard(folder)
        # Line information names the copy of the source in the cache, which profilers can open.
        return _store(_make(request, str(folder / filename)), folder, request.options)


def _load(request: _Request, folder: Path, *, quiet: bool = False) -> Binary | None:
    entry = cache.read(folder, request.key, quiet=quiet)
    if entry is None:
        return None
    meta, files = entry
    _, cubin, ptx = (files[name] for name in cache.names_of(request.filename))
    return request.binary(cubin, ptx.decode(), meta.resources, meta.log, meta.warnings, folder)


def _store(binary: Binary, folder: Path, options: tuple[str, ...]) -> Binary:
    meta = cache.Meta(
        key=binary.key,
        files={},
        filename=binary.filename,
        kernel=binary.kernel,
        arch=binary.arch,
        options=options,
        nvrtc=nvrtc.version(),
        resources=binary.resources,
        warnings=binary.warnings,
        log=binary.log,
    )
    data = binary.source.encode(), binary.cubin, binary.ptx.encode()
    written = cache.write(
        folder, meta, dict(zip(cache.names_of(binary.filename), data, strict=True))
    )
    return replace(binary, folder=folder if written else None)


def _make(request: _Request, program: str) -> Binary:
    """Compiles; messages and line information name the source ``program``, or an edited file."""
    if request.override is not None:
        program = str(request.override.path)
    if not nvrtc.keeps_name(program):
        program = request.filename
    source, filename, arch = request.source, request.filename, request.arch
    try:
        output = nvrtc.run(source, program=program, arch=arch, options=request.options)
    except nvrtc.NvrtcRejection as rejected:
        raise nvrtc_log.explain(
            rejected,
            source,
            filename=filename,
            arch=arch,
            nvrtc=nvrtc.version(),
            archs=nvrtc.supported_archs(),
        ) from None
    log = nvrtc_log.steady(output.log.replace(program, filename))
    ptx = nvrtc.name_the_file(output.ptx, program, filename)
    resources = nvrtc_log.resources(output.cubin, request.kernel, log)
    return request.binary(output.cubin, ptx, resources, log, nvrtc_log.warnings(log))
