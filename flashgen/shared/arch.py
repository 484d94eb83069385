"""Facts about each GPU architecture, with the source of each number.

Limits belong to the compute capability. Rates and capacities belong to a product: each row names
its product. The planner uses rates only to compare tiles with each other and to predict durations.

Sources of the limits: CUDA C++ Programming Guide 13, "Compute Capabilities", table "Technical
Specifications per Compute Capability" (threads, warps, blocks, registers and shared memory per
SM), and table "Throughput of Native Arithmetic Instructions" (operations per clock and SM).

Source of the rates of L2, which are lower than those of the whitepapers (64 B per clock and SM):
reads of a buffer that fits in L2, by all SMs, as measured by github.com/te42kyfo/gpu-benches
(gpu-l2-cache, gpu-cache): A100 80GB 5.4 TB/s = 35 B per clock and SM, H100 PCIe 6.9 TB/s = 34.5,
H200 9.8 TB/s = 37, A40 2.43 TB/s = 17, L40 5.2 TB/s = 15.

Source of the latencies of global memory: gpu-benches too (gpu-latency), pointer chasing: A100 80GB
570 clocks, H100 PCIe 650. Rows without a measurement have that of A100 or, from sm_90 on, of H100.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashgen.shared.errors import PlanError
from flashgen.shared.paths import PATHS, CodePath, path_on

DEFAULT_ARCH = "sm_80"
"""The architecture where none is named and there is no GPU: its kernels run on every newer one."""

KIB = 1024
MIB = 1024 * KIB

# The same for every architecture that flashgen supports (CUDA C++ Programming Guide, same tables).
WARP = 32  # threads
MAX_REGISTERS = 255  # 32-bit registers per thread
REGISTER_STEP = 8  # registers per thread are granted in multiples of this (256 a warp)
SMEM_RESERVED = 1 * KIB  # the system's share of shared memory in every resident block
SCHEDULERS = 4  # per SM, each issues one warp instruction per clock
SMEM_BYTES_PER_CLOCK = 128  # 32 banks of 4 bytes
SPECIAL_PER_CLOCK = 16  # exp2, log2, reciprocal, ... results per clock and SM


class GpuMemory(NamedTuple):
    """The memory of a GPU, on which the choice of parts of groups of query heads depends.

    Attributes:
        l2_bytes: the size of L2.
        bytes_per_s: the rate of global memory, by its clock and its width.
    """

    l2_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Arch:
    """Facts about one architecture. Sizes in bytes, rates per clock and per SM unless named."""

    name: str  # as in NVRTC's option --gpu-architecture
    smem_per_sm: int
    smem_per_block: int  # with opt-in
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    fp32_per_clock: int  # add, multiply, multiply-add
    product: str
    sms: int
    clock_hz: float
    l2_bytes: int
    hbm_bytes_per_s: float
    tensor_16bit: int  # multiply-adds, dense, fp16 or bf16 operands, fp32 sums, fastest path
    mma_16bit: int  # the same with mma.sync
    l2_bytes_per_clock: float
    memory_latency: int  # clocks from a load of global memory, not in L2, to its data
    link_bytes_per_s: float = 32e9  # to another GPU; PCI Express 4.0 with 16 lanes

    @property
    def code_path(self) -> CodePath:
        """The code path of the architecture's own kernels."""
        return path_on(self.name)

    @property
    def path(self) -> str:
        """The name of the code path."""
        return self.code_path.name

    @property
    def memory(self) -> GpuMemory:
        """The memory of the product."""
        return GpuMemory(self.l2_bytes, self.hbm_bytes_per_s)

    @property
    def major(self) -> int:
        """The major version of the compute capability: 9 for sm_90a."""
        return version_of(self.name)[0]

    @property
    def warps_per_sm(self) -> int:
        return self.threads_per_sm // WARP

    def tensor_rate(self, path: str) -> int:
        """Multiply-adds per clock and SM with the instructions of a code path, by its name."""
        return int(getattr(self, PATHS[path].tensor_rate))


_SM_80 = Arch(
    name="sm_80",
    smem_per_sm=164 * KIB,
    smem_per_block=163 * KIB,
    threads_per_sm=2048,
    blocks_per_sm=32,
    registers_per_sm=64 * KIB,
    fp32_per_clock=64,
    # NVIDIA A100 whitepaper and A100 80GB datasheet: 312 TFLOPS fp16, 40 MB of
    # L2, 2,039 GB/s; NVLink's 600 GB/s count both directions.
    product="A100 SXM 80GB",
    sms=108,
    clock_hz=1410e6,
    l2_bytes=40 * MIB,
    hbm_bytes_per_s=2039e9,
    tensor_16bit=1024,
    mma_16bit=1024,
    l2_bytes_per_clock=35,
    memory_latency=570,
    link_bytes_per_s=300e9,
)
_SM_86 = Arch(
    name="sm_86",
    smem_per_sm=100 * KIB,
    smem_per_block=99 * KIB,
    threads_per_sm=1536,
    blocks_per_sm=16,
    registers_per_sm=64 * KIB,
    fp32_per_clock=128,
    # NVIDIA Ampere GA102 whitepaper, RTX A6000: 154.8 TFLOPS fp16, 6 MB of L2,
    # 768 GB/s. (GeForce cards of this architecture do fp16 with fp32 sums at half that rate.)
    product="RTX A6000",
    sms=84,
    clock_hz=1800e6,
    l2_bytes=6 * MIB,
    hbm_bytes_per_s=768e9,
    tensor_16bit=512,
    mma_16bit=512,
    l2_bytes_per_clock=17,
    memory_latency=570,
)
_SM_89 = replace(
    _SM_86,
    name="sm_89",
    blocks_per_sm=24,
    # NVIDIA Ada whitepaper, RTX 6000 Ada Generation: 364.2 TFLOPS fp16, 96 MB
    # of L2, 960 GB/s.
    product="RTX 6000 Ada",
    sms=142,
    clock_hz=2505e6,
    l2_bytes=96 * MIB,
    hbm_bytes_per_s=960e9,
    l2_bytes_per_clock=15,
)
_SM_90 = replace(
    _SM_80,
    name="sm_90",
    smem_per_sm=228 * KIB,
    smem_per_block=227 * KIB,
    fp32_per_clock=128,
    # NVIDIA H100 whitepaper, H100 SXM5: 989.4 TFLOPS fp16, 50 MB of L2, 3.35 TB/s, 900 GB/s of
    # NVLink. mma.sync reaches 62.9 % of these TFLOPS: Luo et al., arXiv 2402.13499, measured.
    product="H100 SXM",
    sms=132,
    clock_hz=1830e6,
    l2_bytes=50 * MIB,
    hbm_bytes_per_s=3350e9,
    tensor_16bit=2048,
    mma_16bit=1288,
    l2_bytes_per_clock=35,
    memory_latency=650,
    link_bytes_per_s=450e9,
)
_SM_100 = replace(
    _SM_90,
    name="sm_100",
    # NVIDIA DGX B200 datasheet, an eighth of it: 2.25 PFLOPS fp16, 8 TB/s, 1.8 TB/s of NVLink; 148
    # SMs at 1.86 GHz and 126 MB of L2 as the device reports. No rate of mma.sync is published:
    # sm_80's is assumed; nor one of L2: H100's is assumed.
    product="B200",
    sms=148,
    clock_hz=1860e6,
    l2_bytes=126 * MIB,
    hbm_bytes_per_s=8000e9,
    tensor_16bit=4096,
    mma_16bit=1024,
    link_bytes_per_s=900e9,
)
_SM_120 = replace(
    _SM_89,
    name="sm_120",
    # NVIDIA RTX PRO Blackwell whitepaper, RTX PRO 6000: 503.8 TFLOPS fp16,
    # 128 MB of L2, 1,792 GB/s. The rate of L2 is assumed to be that of L40.
    product="RTX PRO 6000 Blackwell",
    sms=188,
    clock_hz=2617e6,
    l2_bytes=128 * MIB,
    hbm_bytes_per_s=1792e9,
)

_FACTS = {row.name: row for row in (_SM_80, _SM_86, _SM_89, _SM_90, _SM_100, _SM_120)}
# From 9.0 on a name may end in "a" or "f": the same chip with its non-portable instructions.
_NAME = re.compile(r"sm_(?P<major>\d{1,2})(?P<minor>\d)(?P<suffix>[af]?)")
# By every such name: the planner asks for the facts at each tile.
_BY_NAME = {
    name + suffix: replace(row, name=name + suffix)
    for name, row in _FACTS.items()
    for suffix in ("", "a", "f")
    if not suffix or int(name[3:-1]) >= 9
}


KNOWN = f"{', '.join(_FACTS)}, and from sm_90 on those with an a or f at the end, such as sm_90a"
"""The architectures that have facts, in words."""


def known_archs() -> tuple[str, ...]:
    """Names of the architectures that have facts, oldest first."""
    return tuple(_FACTS)


def facts(name: str) -> Arch:
    """The facts of an architecture by its name: "sm_80", "sm_90", "sm_90a", ...

    Raises:
        PlanError: there are none for this name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise PlanError(
        "flashgen has no facts about this architecture",
        where=f"arch={name!r}",
        numbers=f"known: {KNOWN}",
        way_out=_way_out(_NAME.fullmatch(name)),
    )


def version_of(arch: str) -> tuple[int, int, bool]:
    """The compute capability of an architecture, and whether its name ends in a or f.

    The order of these is the precedence of kernels on a device that runs several of them.
    """
    number = arch.removeprefix("sm_").rstrip("af")
    return int(number[:-1]), int(number[-1]), portable(arch) != arch


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a device runs cubins of an architecture: of the same major version and no newer minor
    version; with the suffix "a" or "f", of exactly the same version."""
    major, minor, own_version_only = version_of(arch)
    if own_version_only:
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def portable(arch: str) -> str:
    """The architecture without the instructions that exist on it alone: "sm_90" for "sm_90a"."""
    return arch.rstrip("af")


def paths_of(device: str) -> tuple[str, ...]:
    """The architectures whose code a device runs, the one with the fastest code path first.

    The last one has the code path of all devices. It is the newest architecture with facts of the
    device's major version: a cubin runs on the same major version from its minor version up.

    Args:
        device: the device's compute capability, such as "sm_90".

    Raises:
        PlanError: there is no such architecture.
    """
    capability = version_of(device)[:2]
    fitting = [name for name in known_archs() if runs_on(name, capability)]
    newest = facts(fitting[-1] if fitting else device).name
    specific_arch = f"{device}a"
    return (specific_arch, newest) if path_on(specific_arch).only_on else (newest,)


def _way_out(match: re.Match[str] | None) -> str:
    """A known architecture whose kernels also run on the unknown one, where there is one."""
    if match is None:
        return f'a name such as arch="{DEFAULT_ARCH}"'
    name = f"sm_{match['major']}{match['minor']}"
    for base in reversed(_FACTS):
        if runs_on(base, version_of(name)[:2]):
            also = f"; its kernels also run on {name}" if base != name else ""
            return f'arch="{base}"{also}'
    return f'arch="{DEFAULT_ARCH}", whose kernels run on every newer architecture'
