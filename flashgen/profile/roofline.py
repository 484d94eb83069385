"""The time for which the counted work keeps each resource busy, and which one is the bound."""

from __future__ import annotations

from flashgen.arch import SCHEDULERS, SPECIAL_PER_CLOCK, Arch
from flashgen.emulator import Totals
from flashgen.emulator.counters.l2 import L2Traffic
from flashgen.emulator.counters.recorder import SECTOR_BYTES
from flashgen.planner.models.fitted_common import ATOMIC_SHARE_OF_L2_RATE
from flashgen.profile.kernel_profile import Roofline, RooflineBound


def tensor_rate(arch: Arch, dtype: str, path: str = "sm_80") -> int:
    """Multiply-adds per clock and SM: with wgmma on the sm_90a path, with mma.sync elsewhere."""
    if path == "sm_90a":
        return arch.tensor_16bit
    return arch.mma_tf32 if dtype == "float32" else arch.mma_16bit


def clocks(
    arch: Arch, dtype: str, totals: Totals, added_bytes: int, path: str = "sm_80"
) -> dict[str, float]:
    """Clocks of one SM for all of a kernel's work, by the names of the terms of a plan's cost.

    A wavefront of shared memory is a clock, a PTX instruction an issue slot. The assembler
    translates PTX to other instructions, which `flashgen inspect --sass` counts.

    Args:
        added_bytes: bytes added to global memory by atomics; they are not part of "l2".
    """
    plain = totals.sectors * SECTOR_BYTES - added_bytes
    return {
        "tensor": totals.tensor_multiply_adds / tensor_rate(arch, dtype, path),
        "shared": float(totals.wavefronts),
        "l2": plain / arch.l2_bytes_per_clock,
        "atomics": added_bytes / (ATOMIC_SHARE_OF_L2_RATE * arch.l2_bytes_per_clock),
        "special": totals.lanes.get("special", 0) / SPECIAL_PER_CLOCK,
        "issue": totals.warp_instructions / SCHEDULERS,
    }


def roofline(
    arch: Arch,
    dtype: str,
    totals: Totals,
    added_bytes: int,
    l2: L2Traffic,
    path: str = "sm_80",
) -> Roofline:
    """The roofline of a kernel, if every SM has an equal share of the work."""
    flops = 2.0 * totals.tensor_multiply_adds
    chip = arch.sms * arch.clock_hz
    at = clocks(arch, dtype, totals, added_bytes, path)
    requested = totals.sectors * SECTOR_BYTES
    peak = 2.0 * tensor_rate(arch, dtype, path) * chip
    float_lanes = totals.lanes.get("float", 0)
    amounts = {
        "tensor": ("tensor cores", flops, "FLOP"),
        "shared": ("shared memory", totals.wavefronts, "wavefronts"),
        "l2": ("L2", requested - added_bytes, "B"),
        "atomics": ("atomic additions in L2", added_bytes, "B"),
        "special": ("special functions", totals.lanes.get("special", 0), "results"),
        "issue": ("instruction issue", totals.warp_instructions, "warp instructions"),
    }
    bounds = [
        RooflineBound("HBM", l2.hbm / arch.hbm_bytes_per_s, l2.hbm, "B", arch.hbm_bytes_per_s),
        RooflineBound(
            "FMA pipe",
            float_lanes / (arch.fp32_per_clock * chip),
            float_lanes,
            "operations",
            arch.fp32_per_clock * chip,
        ),
    ]
    for term, (name, amount, unit) in amounts.items():
        seconds = at[term] / chip
        if seconds:
            bounds.append(RooflineBound(name, seconds, amount, unit, amount / seconds))
    return Roofline(
        flops=flops,
        intensity=flops / l2.hbm if l2.hbm else 0.0,
        intensity_l2=flops / requested if requested else 0.0,
        ridge=peak / arch.hbm_bytes_per_s,
        bounds=tuple(sorted(bounds, key=lambda bound: -bound.seconds)),
    )
