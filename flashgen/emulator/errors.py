"""The error classes of the emulator, all derived from :class:`flashgen.errors.EmulatorError`."""

from __future__ import annotations

from flashgen.errors import EmulatorError


class PtxSyntaxError(EmulatorError):
    """The PTX text cannot be parsed."""


class UnknownInstruction(EmulatorError):
    """The kernel executes an instruction, or a combination of modifiers, that is not supported."""


class LaunchArguments(EmulatorError):
    """The launch does not fit the kernel: its name, parameters, block or shared memory."""


class OutOfBounds(EmulatorError):
    """An access outside every allocation, outside shared memory or outside a local array."""


class Misaligned(EmulatorError):
    """An address that is not a multiple of the size of the access."""


class UninitialisedRead(EmulatorError):
    """A value is used that no instruction has written: of memory, of a register, or of a lane that
    takes no part in a shuffle.
    """


class RaceError(EmulatorError):
    """Two unordered accesses to the same bytes, at least one of them a write."""


class InFlight(EmulatorError):
    """A register that a wgmma still uses is read or written before the wait that covers it."""


class FenceError(EmulatorError):
    """A wgmma uses registers that were written without a wgmma.fence in between."""


class BarrierDivergence(EmulatorError):
    """Lanes of a warp are missing at a barrier or warp-wide instruction, or at its member mask."""


class MbarrierMisuse(EmulatorError):
    """An mbarrier is used uninitialised, or its counts exceed what it expects or can hold."""


class DeadlockError(EmulatorError):
    """All remaining warps wait, and none of them can be released."""


class StepLimit(EmulatorError):
    """The launch executed more segments than ``step_limit``: most likely an endless loop."""


class Trapped(EmulatorError):
    """The kernel executed trap, brkpt or a failed device-side assertion."""
