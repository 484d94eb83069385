"""The errors of flashgen. Every message has four parts: what, where, the numbers, the way out.

::

    PlanError: no tile fits in shared memory
      where    specs/softcap.py:9  softcap(head_dim=256, dtype=float32)
      numbers  needs 131,072 B at the smallest tile (block_q 64, block_k 32), limit 101,376 B
      try      dtype="float16" (65,536 B)
"""

from __future__ import annotations

from functools import partial


class FlashgenError(Exception):
    """The base class of all errors that flashgen raises.

    Args:
        what: one sentence about the mistake, without a full stop.
        where: the user's file and line, the kernel and instruction, or the argument.
        numbers: the values that were given and those that are allowed: shapes, bytes, limits.
        way_out: a concrete alternative.
    """

    def __init__(self, what: str, *, where: str, numbers: str, way_out: str) -> None:
        self.what = " ".join(what.split())  # one line, also of the messages of other packages
        self.where = where
        self.numbers = numbers
        self.way_out = way_out
        super().__init__(self.what)

    def __str__(self) -> str:
        def block(label: str, text: str) -> str:
            return f"  {label:<8} " + text.replace("\n", "\n" + " " * 11)

        return "\n".join(
            [
                self.what,
                block("where", self.where),
                block("numbers", self.numbers),
                block("try", self.way_out),
            ]
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled with positional arguments only.
        parts = {"where": self.where, "numbers": self.numbers, "way_out": self.way_out}
        return partial(type(self), self.what, **parts), ()


class SpecError(FlashgenError):
    """The user's spec is invalid: its Python functions cannot be traced or its options used."""


class PlanError(FlashgenError):
    """No tiling satisfies the constraints of the architecture."""


class CertificateError(FlashgenError):
    """A condition that a plan or its kernels depend on could not be proved."""


class RenderError(FlashgenError):
    """A template and the plan disagree, or a committed file differs from what would be emitted."""


class CompileError(FlashgenError):
    """NVRTC is missing or rejected the source."""


class LaunchError(FlashgenError):
    """A kernel could not be loaded or launched on the device."""


class ExportError(LaunchError):
    """A folder holds no export, one of another version, or a damaged one."""


class InputError(FlashgenError):
    """An argument of the operator has the wrong shape, dtype, device, stride or name."""


class EmulatorError(FlashgenError):
    """The emulated kernel did something that PTX forbids, or used PTX that the emulator lacks."""
