"""torch's flex_attention on flashgen's operators."""

from tests.support.compiled_flex import registered

__all__ = ["registered"]
