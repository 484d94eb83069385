"""The kinds of errors of the emulator, all of the family :class:`flashgen.errors.EmulatorError`."""

from __future__ import annotations

from flashgen.errors import EmulatorError


class PtxSyntaxError(EmulatorError):
    """The PTX text cannot be parsed."""


class UnknownInstruction(EmulatorError):
    """The kernel executes an instruction, or a combination of modifiers, that is not emulated."""


class LaunchArguments(EmulatorError):
    """The launch does not fit the kernel: its name, parameters, block or shared memory."""


class OutOfBounds(EmulatorError):
    """An access outside every allocation, outside shared memory or outside a local array."""


class Misaligned(EmulatorError):
    """An address that is not a multiple of the size of the access."""


class UninitialisedRead(EmulatorError):
    """Shared memory or a register is used that was never written."""


class RaceError(EmulatorError):
    """Two unordered accesses to the same bytes, at least one of them a write."""


class InFlight(EmulatorError):
    """A register that a wgmma still uses is read or written before the wait that covers it."""


class FenceError(EmulatorError):
    """A wgmma uses registers that were written without a wgmma.fence in between."""


class BarrierDivergence(EmulatorError):
    """Only a part of a warp reached a barrier or a warp-wide instruction, for ever."""


class MbarrierMisuse(EmulatorError):
    """An mbarrier that was not initialised, or that counts more than it can or expects."""


class DeadlockError(EmulatorError):
    """Warps wait and nobody is left to release them."""


class StepLimit(EmulatorError):
    """The launch executed more steps than allowed: an endless loop, most likely."""


class Trapped(EmulatorError):
    """The kernel executed trap, brkpt or a failed device-side assertion."""
