"""Findings by the letter: what PTX forbids and hardware forgives. All other findings are errors.

A launch that is not strict reports none of them; a strict one all but those that it allows by name.
"""

from __future__ import annotations

from flashgen.errors import EmulatorError

ERROR, BY_THE_LETTER = "error", "by-the-letter"

FORGIVEN = {
    "barrier_left_incomplete": "threads arrive (bar.arrive) at a barrier that never completes",
    "cp_async_proxy": "wgmma or a bulk copy reads what cp.async wrote, without a proxy fence",
    "exit_before_bulk_store": "a block ends while a bulk copy out of its shared memory may read",
    "mbarrier_init_fence": "a bulk copy signals an mbarrier whose initialisation no fence followed",
    "mbarrier_reinit": "mbarrier.init at an mbarrier, without mbarrier.inval",
    "same_value": "several warps write the same value to the same bytes",
    "uninitialised_rows": "shared memory is read that was never written; it then holds ones in all "
    "bits, NaN as a float, so that results show whether it matters",
    "warp_synchronous": "lanes of one warp exchange through memory without __syncwarp",
    "wgmma_rows_syncwarp": "each warp writes its 16 rows of the A of wgmma, without a barrier of "
    "the warpgroup",
}

_FORGIVES = "hardware forgives this"


def way_out(name: str) -> str:
    """The end of a way out: the name under which a launch allows the finding."""
    assert name in FORGIVEN
    return f'; {_FORGIVES}: allow=("{name}",) of emulator.launch permits it, as does strict=False'


def severity(finding: EmulatorError) -> str:
    """How serious a finding is: "by-the-letter" if a launch may allow it, else "error"."""
    return BY_THE_LETTER if _FORGIVES in finding.way_out else ERROR
