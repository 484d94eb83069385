"""The facts of a machine on which flashgen depends: versions, GPUs, the cache."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from flashgen.calls import launch
from flashgen.calls.launch import Gpu, fitting_driver, fitting_versions, loads
from flashgen.calls.native import build
from flashgen.kernels.compile import cache, nvrtc
from flashgen.kernels.compile.ownership import hindrance
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH, paths_of
from flashgen.shared.errors import CompileError, FlashgenError, LaunchError, PlanError
from flashgen.version import __version__

_SOURCE = 'extern "C" __global__ void nothing(int *x) { *x = 1; }'
_VARIABLES = (
    *(config.arch, config.backend, config.batch_invariant, config.check_reads, config.trust),
    *(config.emulator_order, config.emulator_sums, config.override, config.debug_level),
)
"""What reads the variables that calls follow: a wrong value is an error of each call."""
_TORCH = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what to do about it."""

    what: str
    way_out: str


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC as it is loaded.

    Attributes:
        version: such as "13.0".
        library: the path of the library.
        archs: the architectures that it supports.
        seconds: duration of compiling a small kernel.
    """

    version: str
    library: str
    archs: tuple[str, ...]
    seconds: float

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class Cache:
    """The kernel cache; the folder is None where caching on disk is off."""

    folder: str | None
    entries: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class MachineFacts:
    """The versions of everything that a call needs, and the GPUs.

    Attributes:
        templates: digest of flashgen's templates.
        bindings: version of cuda-bindings; None where it is missing.
        torch_cuda: the CUDA version that torch is built for; None for a build without CUDA.
        torch_sees: whether torch can use a GPU.
        nvrtc: None where it cannot be loaded or compiles nothing; ``broken`` has the reason.
        native: why calls are made in Python; "" where the native part of `flashgen build-native`
            makes them.
        gpus: empty where there are none; ``no_gpu`` has the reason.
    """

    flashgen: str
    templates: str
    system: str
    python: str
    numpy: str
    bindings: str | None
    torch: str
    torch_cuda: str | None
    torch_sees: bool
    nvrtc: Nvrtc | None
    cache: Cache
    native: str = ""
    gpus: tuple[Gpu, ...] = ()
    no_gpu: str = ""
    broken: tuple[Finding, ...] = ()


def inspect(driver: Any = None) -> MachineFacts:
    """The facts of this machine.

    Args:
        driver: replaces ``cuda.bindings.driver``.
    """
    import numpy
    import torch

    broken: list[Finding] = []

    def attempt(make: Any, otherwise: Any) -> Any:
        try:
            return make()
        except FlashgenError as error:
            broken.append(Finding(f"{error.what} ({error.numbers})", error.way_out))
            return otherwise

    for read in _VARIABLES:
        attempt(read, None)
    gpus, no_gpu = _gpus(driver)
    return MachineFacts(
        flashgen=__version__,
        templates=attempt(_templates, "missing"),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        numpy=numpy.__version__,
        bindings=version_of("cuda-bindings"),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_sees=torch.cuda.is_available(),
        nvrtc=attempt(_nvrtc, None),
        cache=attempt(_cache, Cache(None)),
        native=attempt(build.missing, "its settings are wrong"),
        gpus=gpus,
        no_gpu=no_gpu,
        broken=tuple(dict.fromkeys(broken)),
    )


def _gpus(driver: Any) -> tuple[tuple[Gpu, ...], str]:
    reason = launch.available() if driver is None else launch.device.first_device(driver)
    if reason is not None:
        return (), reason
    try:
        return launch.gpus(driver=driver), ""
    except LaunchError as error:
        return (), f"{error.what} ({error.numbers})"


def _templates() -> str:
    from flashgen.kernels.codegen.environment import template_digest

    return template_digest()


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc() -> Nvrtc:
    """NVRTC, after it has compiled a kernel.

    Raises:
        CompileError: it is missing or compiles nothing.
    """
    from time import perf_counter

    version, archs, begin = nvrtc.version(), nvrtc.supported_archs(), perf_counter()
    try:
        nvrtc.run(_SOURCE, program="nothing.cu", arch=DEFAULT_ARCH)
    except nvrtc.NvrtcRejection as error:
        raise CompileError(
            "NVRTC does not compile a small kernel",
            where="cuda.bindings.nvrtc",
            numbers=str(error).replace("\n", " ")[:200],
            way_out="reinstall nvidia-cuda-nvrtc",
        ) from None
    seconds = perf_counter() - begin
    return Nvrtc(version.split(" ")[0], str(nvrtc.library() or "unknown"), archs, seconds)


def _cache() -> Cache:
    root = config.cache_dir()
    if root is None:
        return Cache(None)
    above = next(path for path in (root, *root.parents) if os.path.lexists(path))
    reason = hindrance(root)
    if not reason and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        reason = f"{above} is no folder that this user can write"
    if reason:
        raise FlashgenError(
            f"the kernel cache {root} is not used",
            where="environment, FLASHGEN_CACHE_DIR",
            numbers=reason,
            way_out=f"chmod go-w and chown, or FLASHGEN_CACHE_DIR with another folder than {root}",
        )
    return Cache(str(root), len(cache.entries(root)), cache.size(root))


# ---- versions that do not fit --------------------------------------------------------------------


def unfit(machine: MachineFacts, index: int = 0) -> tuple[Finding, ...]:
    """The parts that are missing or do not fit together, and the packages to install.

    Args:
        index: the number of the CUDA device that is to be used.
    """
    findings = list(machine.broken)
    if machine.bindings is None:
        findings.append(Finding("cuda-bindings is missing", 'pip install "flashgen[cuda]"'))
    elif machine.nvrtc is not None and _major(machine.bindings) != machine.nvrtc.major:
        what = f"cuda-bindings {machine.bindings} loads NVRTC {machine.nvrtc.version}"
        way_out = "install cuda-bindings and nvidia-cuda-nvrtc of one major version"
        findings.append(Finding(what, way_out))
    gpu = next((gpu for gpu in machine.gpus if gpu.index == index), None)
    return (*findings, *(_unfit_for(machine, gpu) if gpu is not None else ()))


def _unfit_for(machine: MachineFacts, gpu: Gpu) -> Iterator[Finding]:
    try:
        paths: tuple[str, ...] = paths_of(gpu.arch)
    except PlanError as error:
        yield Finding(f"{gpu.name} is {gpu.arch}: {error.what}", error.way_out)
        return
    nvrtc_facts = machine.nvrtc
    supports = f"driver {gpu.driver} supports CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
    if nvrtc_facts is not None and not loads(gpu.cuda, nvrtc_facts.major):
        what = f"{supports}; NVRTC {nvrtc_facts.version} compiles for CUDA {nvrtc_facts.major}"
        yield Finding(what, fitting_versions(nvrtc_facts.major, gpu.cuda))
    if nvrtc_facts is not None and paths[-1] not in nvrtc_facts.archs:
        what = f"NVRTC {nvrtc_facts.version} does not compile for {paths[-1]}"
        yield Finding(what, "install a newer nvidia-cuda-nvrtc")
    if machine.torch_cuda is None:
        what = f"torch {machine.torch} is built without CUDA"
        yield Finding(what, f"install a CUDA build of torch ({_TORCH})")
    elif not loads(gpu.cuda, _major(machine.torch_cuda)):
        what = f"{supports}; torch is built for CUDA {machine.torch_cuda}"
        newer = fitting_driver(_major(machine.torch_cuda))
        yield Finding(what, f"{newer}, or a build of torch for CUDA {gpu.cuda[0]}")
    elif not machine.torch_sees:
        what = f"torch {machine.torch} sees no GPU, the driver does"
        yield Finding(what, 'python -c "import torch; torch.cuda.init()" says why')
    if gpu.compute_mode == "prohibited":
        what = f"{gpu.name} is in compute mode prohibited, in which no process can use it"
        yield Finding(what, f"nvidia-smi -i {gpu.index} -c DEFAULT")


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0
