"""One family of errors. Every message says four things: what, where, the numbers, the way out.

::

    PlanError: no tile fits in shared memory
      where    specs/softcap.py:9  softcap(head_dim=256, dtype=float32)
      numbers  needs 131,072 B at the smallest tile (block_q 64, block_k 32), limit 101,376 B
      try      dtype="float16" (65,536 B)
"""

from __future__ import annotations


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose.

    Args:
        what: one sentence, no full stop, that says what is wrong.
        where: the user's file and line, the kernel and instruction, or the argument.
        numbers: the figures that decide: shapes, bytes, limits; what was given, what expected.
        way_out: what to do instead, concretely.
    """

    def __init__(self, what: str, *, where: str, numbers: str, way_out: str) -> None:
        self.what = what
        self.where = where
        self.numbers = numbers
        self.way_out = way_out
        super().__init__(what)

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
        # Keyword-only arguments need help to cross a process boundary.
        return (_rebuild, (type(self), self.what, self.where, self.numbers, self.way_out))


def _rebuild(
    kind: type[FlashgenError], what: str, where: str, numbers: str, way_out: str
) -> FlashgenError:
    return kind(what, where=where, numbers=numbers, way_out=way_out)


class SpecError(FlashgenError):
    """The user's spec (its Python functions or its options) cannot be understood."""


class PlanError(FlashgenError):
    """No tiling satisfies the constraints of the architecture."""


class CertificateError(FlashgenError):
    """Something that a plan or its kernels rest on could not be proved."""


class RenderError(FlashgenError):
    """A template and the plan disagree, or a committed file differs from what would be emitted."""


class CompileError(FlashgenError):
    """NVRTC is missing or rejected the source."""


class LaunchError(FlashgenError):
    """A kernel could not be loaded or launched on the device."""


class InputError(FlashgenError):
    """An argument of the operator has the wrong shape, dtype, device, stride or name."""


class EmulatorError(FlashgenError):
    """The emulated kernel did something that PTX forbids, or used PTX that the emulator lacks."""
