"""PyTorch's own functions on flashgen's kernels: the public names of `flashgen.frontends`."""

from flashgen.frontends.flash_operators import FlashOperatorWarning, register
from flashgen.frontends.flex.compiled import register_flex, unregister_flex

__all__ = ["FlashOperatorWarning", "register", "register_flex", "unregister_flex"]
