"""The tiled algorithms on CPU tensors, with the plan's own tiles, in memory that grows with N.

`forward` and `backward` are what the operator runs on the CPU. They classify tiles as the kernels
do, skip empty ones, evaluate the mask on mixed ones alone, and recompute P in the backward pass
from LSE and dropout's seed.
"""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
