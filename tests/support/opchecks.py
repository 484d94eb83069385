"""PyTorch's own checks of a registered operator."""

from __future__ import annotations

from typing import Any

# The public function cannot choose static shapes.
from torch.testing._internal.optests import opcheck

TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def passes_opcheck(overload: Any, given: tuple[Any, ...], **options: Any) -> bool:
    """Whether the operator passes all of `TESTS` for this call."""
    found = opcheck(overload, given, options, test_utils=TESTS)
    return set(found.values()) == {"SUCCESS"}
