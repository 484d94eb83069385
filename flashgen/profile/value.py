"""The profile of a kernel: frozen values, made once from the emulator's counters."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.emulator import Totals
from flashgen.emulator.l2 import L2Traffic
from flashgen.plan import Plan
from flashgen.plan.duration import Duration


@dataclass(frozen=True)
class Quantity:
    """Something that was counted and, where the plan says something of it, predicted.

    Attributes:
        unit: "B", "clk" (clocks of one SM), or "" for a number.
        predicted: None where nothing was.
    """

    name: str
    unit: str
    counted: float
    predicted: float | None = None

    @property
    def ratio(self) -> float | None:
        """Counted to predicted; None where nothing, or 0, was predicted."""
        return self.counted / self.predicted if self.predicted else None


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes of global memory that a launch moved of one tensor, or of several that share memory.

    Attributes:
        name: of the kernel's pointers.
        issued: as lanes asked for them.
        distinct: each byte once; read and written counts twice.
        sectors, sectors_least: of 32 bytes that accesses of warps took, and the fewest they could.
    """

    name: str
    issued: Quantity
    distinct: int
    sectors: int
    sectors_least: int


@dataclass(frozen=True)
class Phase:
    """What one numbered step of the emitted file took.

    Attributes:
        number: as the file has it, "5b"; "" for what belongs to no step.
        title: of the step.
        totals: of its instructions, those of functions inlined in it included.
    """

    number: str
    title: str
    totals: Totals


@dataclass(frozen=True)
class SourceLine:
    """What one line of the emitted file took, wherever it was inlined."""

    line: int
    text: str
    totals: Totals


@dataclass(frozen=True)
class Bound:
    """A resource of the chip and how long it is busy.

    Attributes:
        name: of the resource.
        seconds: if it worked at its peak all of the time, on every SM.
        amount, unit: of what it does.
        peak: of that per second.
    """

    name: str
    seconds: float
    amount: float
    unit: str
    peak: float


@dataclass(frozen=True)
class Roofline:
    """What the counts allow at best on the product that the architecture's rates are of.

    Attributes:
        flops: of the tensor cores; a multiply-add counts as two.
        intensity: FLOP per byte of HBM by the model of L2.
        intensity_l2: FLOP per byte asked of L2.
        ridge: FLOP per byte of HBM from which on the tensor cores can be the bound.
        bounds: the longest first: `bounds[0]` names what the kernel is bound by.
    """

    flops: float
    intensity: float
    intensity_l2: float
    ridge: float
    bounds: tuple[Bound, ...]

    @property
    def bound(self) -> Bound:
        return self.bounds[0]

    @property
    def attainable(self) -> float:
        """FLOP/s of the tensor cores when the bound is met."""
        return self.flops / self.bound.seconds if self.bound.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """One kernel's run in the emulator.

    Attributes:
        kernel: its name.
        plan: block sizes, and the predictions.
        arch: of the plan, whose rates the clocks and the roofline are of.
        blocks: of the launch.
        tensors: in the order of the kernel's parameters.
        issued, distinct: sums over them.
        work: tiles, multiply-adds and, for each term of the plan's cost, clocks of one SM.
        totals: of the whole kernel.
        l2: HBM traffic by the model of the L2 cache.
        phases: in the order of the file.
        lines: the ones with the most warp instructions first.
        duration: predicted for the launch, of the product that the architecture's rates are of;
            None where nothing is predicted.
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
    duration: Duration | None = None

    @property
    def sectors_in_excess(self) -> int:
        """Sectors of global memory beyond the fewest: 0 when all accesses are coalesced."""
        return self.totals.sectors - self.totals.sectors_least
