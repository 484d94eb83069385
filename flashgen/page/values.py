"""The values that a report shows: frozen, made before any page is.

A page has one side, or two that are compared; a side is one call, with a pane for each kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.compile import Resources
from flashgen.page.code import KernelCode
from flashgen.planner import Plan
from flashgen.planner.kernel_plan import SmemRegion

Row = tuple[str, str]
"""The name of a fact, and its value."""


@dataclass(frozen=True)
class Figure:
    """A number that two reports can be compared by.

    Attributes:
        unit: "B", "s", "clk", "%" or "" for a number.
        counted: "counted" by the emulator, "static" in the plan or the compiled file, or
            "predicted" by the model.
    """

    name: str
    value: float
    unit: str = ""
    origin: str = "counted"


@dataclass(frozen=True)
class Step:
    """The counted work of a numbered step of the kernel.

    Attributes:
        number, title: as in the emitted file; "" for code outside the steps.
        line: the line of the step's comment in the emitted file; 0 without one.
        share: the share of the kernel's warp instructions.
    """

    number: str
    title: str
    line: int
    warps: int
    share: float
    multiply_adds: int
    global_bytes: int
    wavefronts: int
    conflicts: int
    barriers: int


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of global memory that a launch moved for a tensor; predicted is None without one."""

    name: str
    issued: float
    predicted: float | None
    distinct: int
    sectors: int
    sectors_least: int


@dataclass(frozen=True)
class RooflineFacts:
    """The roofline of a launch on the product that the architecture's facts name.

    Attributes:
        flops: operations of the tensor cores.
        hbm, l2, peak: bytes per second, and FLOP per second.
        intensity, intensity_l2: FLOP per byte of HBM, and per byte requested from L2.
        bounds: each resource, and the seconds for which it is busy; the longest first.
    """

    product: str
    flops: float
    hbm: float
    l2: float
    peak: float
    intensity: float
    intensity_l2: float
    attainable: float
    bounds: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class WorkTile:
    """A work tile in the predicted schedule of a launch.

    Attributes:
        slot: the place where it runs: one of the resident blocks of an SM.
        start, end: steps of the main loop since the start of the launch.
        tile: the number of the tile along the side that blocks own.
        head: the number of the head among all heads of all batch entries.
        steps: the tiles that it visits.
    """

    slot: int
    start: float
    end: float
    tile: int
    head: int
    steps: float


@dataclass(frozen=True)
class Schedule:
    """The predicted work tiles over SMs in time.

    Attributes:
        shape: the shape of the launch, where it is not the one that was executed; else "".
        sms, blocks_per_sm: the machine.
        work_tiles: those that are shown.
        total: the number of all work tiles of the launch.
        makespan: steps until the last one ends.
        seconds: the predicted duration of the launch; quantisation: see `Duration`.
        lines: the derivation of the duration, as it is printed.
    """

    product: str
    shape: str
    sms: int
    blocks_per_sm: int
    work_tiles: tuple[WorkTile, ...]
    total: int
    makespan: float
    seconds: float
    quantisation: float
    bound: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ErrorHistogram:
    """The differences of one result from the float64 oracle.

    Attributes:
        name: the result, such as "out" or "dq".
        verdict: the outcome of the error rule in words; passed: whether it holds.
        exponents: the bins: bin i counts errors of [10^e, 10^(e+1)), except for the first, which
            counts all smaller ones, 0 included.
        found, ordinary: elements per bin, of the kernel and of PyTorch in the operands' dtype.
        max_error, max_allowed, rms_error, rms_allowed: as in `flashgen.reference.Verdict`.
    """

    name: str
    verdict: str
    passed: bool
    exponents: tuple[int, ...]
    found: tuple[int, ...]
    ordinary: tuple[int, ...]
    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float


@dataclass(frozen=True)
class KernelPane:
    """Everything that is shown of one launch.

    Attributes:
        title: the role of the kernel, unique in the side: "forward", "dkdv".
        name: the name of the kernel.
        launch: grid and block in words.
        tile_map: the tile map as data for the page; None without one.
        tile_map_note: why there is no tile map, or what it leaves out.
        notes: what is missing here, and why.
    """

    title: str
    name: str
    plan: Plan
    resources: Resources
    code: KernelCode
    facts: tuple[Row, ...]
    figures: tuple[Figure, ...]
    smem: tuple[SmemRegion, ...]
    steps: tuple[Step, ...] = ()
    tensors: tuple[TensorBytes, ...] = ()
    roofline: RooflineFacts | None = None
    schedule: Schedule | None = None
    tile_map: Mapping[str, Any] | None = None
    tile_map_note: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """The report of one call.

    Attributes:
        title: what tells the sides of a comparison apart.
        call: the call in rows: spec, shape, captured tensors, backend.
        errors: the histogram of each result; () where no oracle was computed.
        versions: the versions of what made the report.
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
