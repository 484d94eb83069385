"""The tiled algorithms on CPU tensors, with whole tiles of a plan, in memory linear in N.

The operator runs `forward` and `backward` on CPU tensors, and a small call without captured tensors
in one step; `tangent` and `backward_tangent`, which derivatives beyond the first backward pass are
made of, on tensors of any device. Like the kernels, these functions skip
empty tiles, evaluate the mask on mixed tiles only, and recompute P in the backward pass from LSE
and the seed of dropout.
"""

from flashgen.calls.cpu.backward import backward
from flashgen.calls.cpu.forward import forward
from flashgen.calls.cpu.invariant import forward as invariant_forward
from flashgen.calls.cpu.problem import TileArguments
from flashgen.calls.cpu.second import backward_tangent
from flashgen.calls.cpu.tangents import tangent

__all__ = [
    "TileArguments",
    "backward",
    "backward_tangent",
    "forward",
    "invariant_forward",
    "tangent",
]
