"""Buffers by role that are reused by all calls of a thread, because mapping new pages is slow."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_SCRATCH = threading.local()


def scratch(role: str, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An uninitialised array that is valid until the next call with the same role."""
    size = math.prod(shape) * dtype.itemsize
    buffers = vars(_SCRATCH)
    if role not in buffers or len(buffers[role]) < size:
        buffers[role] = np.empty(size, np.uint8)
    found: npt.NDArray[Any] = buffers[role][:size].view(dtype).reshape(shape)
    return found
