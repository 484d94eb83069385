"""The profile of a kernel: frozen values made from the emulator's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.kernels.pipeline import Build
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.duration import Duration
from flashgen.shared.arch import Arch
from ptx_emulator import Totals
from ptx_emulator.counters.l2 import L2Traffic
from ptx_emulator.counters.ptx_lines import PtxLine


@dataclass(frozen=True)
class Quantity:
    """A quantity that was counted and, where the plan predicts it, its prediction.

    Attributes:
        unit: "B", "clk" (clocks of one SM), or "" for a number.
        predicted: the plan's prediction; None without one.
    """

    name: str
    unit: str
    counted: float
    predicted: float | None = None

    @property
    def ratio(self) -> float | None:
        """Counted divided by predicted; None without a prediction, or where it is 0."""
        return self.counted / self.predicted if self.predicted else None


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes of global memory that a launch moved for one tensor, or for several in one buffer.

    Attributes:
        name: the names of the kernel's pointers.
        issued: bytes of the lanes' loads and stores.
        distinct: bytes, each counted once; a byte that is read and written counts twice.
        sectors, sectors_least: sectors of 32 bytes that the warps' accesses touched, and the
            fewest that would contain their bytes.
    """

    name: str
    issued: Quantity
    distinct: int
    sectors: int
    sectors_least: int


@dataclass(frozen=True)
class Phase:
    """The work of one numbered step of the emitted file.

    Attributes:
        number: the step's number in the file, as in "5b"; "" for instructions outside the steps.
        title: the step's title.
        line: the line of the step's comment in the file; 0 without one.
        totals: the work of its instructions, including the functions inlined in it.
    """

    number: str
    title: str
    line: int
    totals: Totals


@dataclass(frozen=True)
class SourceLine:
    """The work of one line of the emitted file, wherever it was inlined."""

    line: int
    text: str
    totals: Totals


@dataclass(frozen=True)
class RooflineBound:
    """A resource of the GPU, and the seconds that a launch takes on every SM at its peak rate."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """The best rate that the counts allow on the product that the architecture's facts name.

    Attributes:
        flops: operations of the tensor cores; a multiply-add counts as two.
        intensity: FLOP per byte of HBM, by the model of the L2 cache.
        intensity_l2: FLOP per byte requested from L2.
        ridge: FLOP per byte of HBM above which the tensor cores can be the bound.
        bounds: the resources, the one busy for the longest time first.
    """

    flops: float
    intensity: float
    intensity_l2: float
    ridge: float
    bounds: tuple[RooflineBound, ...]

    @property
    def bound(self) -> RooflineBound:
        """The resource that is busy for the longest time."""
        return self.bounds[0]

    @property
    def attainable(self) -> float:
        """FLOP/s of the tensor cores when the bound is reached."""
        return self.flops / self.bound.seconds if self.bound.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """One kernel's run in the emulator.

    Attributes:
        kernel: the kernel's name.
        plan: the kernel's plan, with the predictions.
        arch: the facts of the plan's architecture; clocks and roofline use their rates.
        blocks: thread blocks of the launch.
        tensors: bytes by tensor, in the order of the kernel's parameters.
        issued, distinct: sums over the tensors.
        work: multiply-adds and, for each term of the plan's cost, clocks of one SM.
        totals: the work of the whole launch.
        l2: HBM traffic, by the model of the L2 cache.
        phases: the work of each step, in the order of the file.
        lines: the work of each line, the line with the most warp instructions first.
        duration: the predicted duration of the launch on the product that the architecture's facts
            name; None without a prediction.
        build: the compiled kernel.
        ptx: the work of each line of its PTX.
    """

    kernel: str
    plan: Plan
    arch: Arch
    blocks: int
    tensors: tuple[TensorTraffic, ...]
    issued: Quantity
    distinct: Quantity
    work: tuple[Quantity, ...]
    totals: Totals
    l2: L2Traffic
    roofline: Roofline
    phases: tuple[Phase, ...]
    lines: tuple[SourceLine, ...]
    build: Build = field(repr=False)
    ptx: tuple[PtxLine, ...] = field(repr=False)
    duration: Duration | None = None

    @property
    def sectors_in_excess(self) -> int:
        """Sectors of global memory beyond the fewest: 0 when all accesses are coalesced."""
        return self.totals.sectors - self.totals.sectors_least
