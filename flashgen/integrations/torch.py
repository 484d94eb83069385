"""PyTorch's own functions on flashgen's kernels: the public names of `flashgen.frontends`."""

from flashgen.frontends.flash_operators import FlashOperatorWarning, register

__all__ = ["FlashOperatorWarning", "register"]
