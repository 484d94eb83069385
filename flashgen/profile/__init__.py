"""What a kernel did in the emulator, beside what its plan predicted.

``profile_forward`` and ``profile_backward`` run a spec's kernels in the emulator and give a
`Profile` of each: bytes as issued, distinct and by the model of the L2 cache, coalescing, bank
conflicts, work by class, all of it by step and by line of the emitted file, and a roofline.
"""

from flashgen.profile.cost import counted_cost
from flashgen.profile.make import array_of, problem_of_call, profile_backward, profile_forward
from flashgen.profile.phases import Step, steps_of
from flashgen.profile.plot import check_plot, plot
from flashgen.profile.value import (
    Bound,
    Phase,
    Profile,
    Quantity,
    Roofline,
    SourceLine,
    TensorTraffic,
)
from flashgen.profile.visits import walks_of

__all__ = [
    "Bound",
    "Phase",
    "Profile",
    "Quantity",
    "Roofline",
    "SourceLine",
    "Step",
    "TensorTraffic",
    "array_of",
    "check_plot",
    "counted_cost",
    "plot",
    "problem_of_call",
    "profile_backward",
    "profile_forward",
    "steps_of",
    "walks_of",
]
