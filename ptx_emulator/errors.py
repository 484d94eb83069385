"""The error classes of the emulator, and the findings that are errors by the letter.

PTX forbids them, and hardware forgives them. A launch that is not strict reports none of them; a
strict one all but those that it allows by name. All other findings are errors.
"""

from __future__ import annotations

from flashgen.shared.errors import EmulatorError, called_by_users


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


ERROR, BY_THE_LETTER = "error", "by-the-letter"

FORGIVEN = {
    "atomic_without_fence": "what an atomic without .acquire found published is accessed without a "
    "fence or barrier after it",
    "barrier_left_incomplete": "threads arrive (bar.arrive) at a barrier that never completes",
    "cp_async_proxy": "wgmma or a bulk copy reads what cp.async or st.async wrote, without a proxy "
    "fence",
    "compare_and_swap_guess": "a plain load races with atomics, and a compare-and-swap checks it",
    "exit_before_bulk_store": "a block ends while a bulk copy out of its shared memory may read",
    "mbarrier_init_fence": "a bulk copy signals an mbarrier whose initialisation no fence followed",
    "mbarrier_reinit": "mbarrier.init at an mbarrier, without mbarrier.inval",
    "same_value": "several warps write the same value to the same bytes",
    "uninitialised_rows": "shared memory is read that was never written, or a register is stored "
    "there or in global memory that was never written; the bytes then hold ones in all bits, NaN "
    "as a float, so that results show whether it matters",
    "warp_synchronous": "lanes of one warp exchange through memory without __syncwarp",
    "wgmma_rows_syncwarp": "each warp writes its 16 rows of the A of wgmma, without a barrier of "
    "the warpgroup",
}

_FORGIVES = "hardware forgives this"


def way_out(name: str) -> str:
    """The end of a way out: the name under which a launch allows the finding."""
    assert name in FORGIVEN
    return f'; {_FORGIVES}: allow=("{name}",) of emulator.launch permits it, as does strict=False'


@called_by_users()
def severity(finding: EmulatorError) -> str:
    """How serious a finding is: "by-the-letter" if a launch may allow it, else "error"."""
    return BY_THE_LETTER if _FORGIVES in finding.way_out else ERROR
