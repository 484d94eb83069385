"""Loads every emitter module, so that the table of opcodes is complete."""

from __future__ import annotations


def load_families() -> None:
    """Fills :data:`flashgen.emulator.codegen.EMITTERS`; cheap after the first call."""
    from flashgen.emulator import (  # noqa: F401
        emit_async,
        emit_bits,
        emit_cluster,
        emit_convert,
        emit_float,
        emit_flow,
        emit_integer,
        emit_mbarrier,
        emit_memory,
        emit_tensor,
        emit_warp,
        emit_wgmma,
    )
