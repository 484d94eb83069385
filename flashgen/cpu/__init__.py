"""The tiled algorithms on CPU tensors, with the tiles of a plan, in memory linear in N.

The operator runs `forward` and `backward` on CPU tensors. Like the kernels, these functions skip
empty tiles, evaluate the mask on mixed tiles only, and recompute P in the backward pass from LSE
and the seed of dropout.
"""

from flashgen.cpu.backward import backward
from flashgen.cpu.forward import forward
from flashgen.cpu.problem import TileArguments

__all__ = ["TileArguments", "backward", "forward"]
