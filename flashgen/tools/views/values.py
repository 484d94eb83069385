"""The values that a report shows: frozen, made before any page is.

A page has one side, or two that are compared; a side is one call, with a pane for each kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.kernels.compile import Resources
from flashgen.kernels.pipeline import Build
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.duration import Duration
from flashgen.shared.launch_facts import CONVERT_KERNELS
from flashgen.tools.views.code import KernelTexts

if TYPE_CHECKING:
    from flashgen.reference import Verdict
    from flashgen.tools.profile.kernel_profile import Profile

Row = tuple[str, str]
"""The name of a fact, and its value."""


@dataclass(frozen=True)
class Figure:
    """A number that two reports can be compared by.

    Attributes:
        unit: "B", "s", "clk", "%" or "" for a number.
        origin: "counted" by the emulator, "static" in the plan or the compiled file, or
            "predicted" by the model.
    """

    name: str
    value: float
    unit: str = ""
    origin: str = "counted"


@dataclass(frozen=True)
class ErrorHistogram:
    """The differences of one result from the float64 oracle.

    Attributes:
        name: the result, such as "out" or "dq".
        verdict: the outcome of the error rule.
        exponents: the bins: bin i counts errors of [10^e, 10^(e+1)), except for the first, which
            counts all smaller ones, 0 included.
        found, ordinary: elements per bin, of the kernel and of PyTorch in the operands' dtype.
    """

    name: str
    verdict: Verdict
    exponents: tuple[int, ...]
    found: tuple[int, ...]
    ordinary: tuple[int, ...]


_TITLES = {
    "smem_q": "Q",
    "smem_k": "K",
    "smem_v": "V",
    "smem_q_tangent": "Q's tangent",
    "smem_k_tangent": "K's tangent",
    "smem_v_tangent": "V's tangent",
    "smem_do": "dO",
    "smem_ring": "panels in a ring",
    "smem_rows": "LSE and delta",
    "smem_p": "P",
    "smem_ds": "dS",
    "smem_windows": "sums of learned elements",
}


@dataclass(frozen=True)
class SmemRegion:
    """A range of dynamic shared memory.

    Attributes:
        title: the contents in words: "K", "dS", "mbarriers".
        offset, size: bytes.
    """

    title: str
    offset: int
    size: int


def smem_map(plan: Plan) -> tuple[SmemRegion, ...]:
    """The regions of a block's dynamic shared memory, in the order of their offsets.

    They cover all of `smem_bytes`; () for a kernel that has none. When its main loop is done,
    the forward kernel of the path sm_80 stages O over Q, K and V.
    """
    regions, end = [], 0
    gradient = CONVERT_KERNELS.get(plan.kernel)
    only = f"a tile of d{gradient[1].upper()}" if gradient else "other"
    for name, size in plan.smem.parts or ((only, plan.smem_bytes),):
        title = _TITLES.get(name, name)
        if plan.one_tensor and name == "smem_k":
            title = "K and V"
        if plan.exchanges:
            other_titles = {"smem_k": "panels of K and V", "smem_rows": "maxima and sums of warps"}
            title = other_titles.get(name, title)
        buffers = {"smem_k": plan.stages, "smem_v": plan.stages_v}.get(name, 1)
        if plan.kernel == "forward" and buffers > 1:
            title += f" ({buffers} buffers)"
        if size:
            regions.append(SmemRegion(title, end, size))
        end += size
    return tuple(regions)


@dataclass(frozen=True)
class KernelPane:
    """Everything that is shown of one launch.

    Attributes:
        title: the role of the kernel, unique in the side: "forward", "dkdv".
        facts: grid, block and others in words.
        profile: what the emulator counted; None where the launch was not counted.
        duration: the predicted duration of the launch; None without a prediction.
        shape: the shape of that launch, where it is not the one that was executed; else "".
        tile_map: the tile map as data for the page; None without one.
        tile_map_note: why there is no tile map, or what it leaves out.
        notes: the parts that are missing here, and why.
    """

    title: str
    build: Build
    code: KernelTexts
    facts: tuple[Row, ...]
    figures: tuple[Figure, ...]
    profile: Profile | None = None
    duration: Duration | None = None
    shape: str = ""
    tile_map: Mapping[str, Any] | None = None
    tile_map_note: str = ""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.build.source.name

    @property
    def plan(self) -> Plan:
        return self.build.plan

    @property
    def resources(self) -> Resources:
        return self.build.binary.resources

    @property
    def smem(self) -> tuple[SmemRegion, ...]:
        return smem_map(self.plan)


@dataclass(frozen=True)
class Side:
    """The report of one call.

    Attributes:
        title: what tells the sides of a comparison apart.
        call: the call in rows: spec, shape, captured tensors, backend.
        errors: the histogram of each result; () where no oracle was computed.
        versions: the versions of flashgen, Python, packages and NVRTC.
    """

    title: str
    call: tuple[Row, ...]
    kernels: tuple[KernelPane, ...]
    errors: tuple[ErrorHistogram, ...] = ()
    errors_note: str = ""
    versions: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Page:
    """A report of one call, or the comparison of two."""

    title: str
    sides: tuple[Side, ...]

    @property
    def compares(self) -> bool:
        return len(self.sides) > 1

    @property
    def differing(self) -> tuple[str, ...]:
        """The names of the rows of the calls in which the sides of a comparison differ."""
        first, last = dict(self.sides[0].call), dict(self.sides[-1].call)
        names = dict.fromkeys([*first, *last])
        return tuple(name for name in names if first.get(name) != last.get(name))
