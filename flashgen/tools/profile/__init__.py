"""Profiles: the work of a kernel counted in the emulator, compared with its plan's predictions.

``profile_forward`` and ``profile_backward`` run a spec's kernels in the emulator and return a
`Profile` of each: bytes as issued, distinct bytes and bytes by the model of the L2 cache,
coalescing, bank conflicts, work by class, each by step and by line of the emitted file, and a
roofline.
"""

from flashgen.tools.profile.decoding import DecodingPlan, plan_decoding
from flashgen.tools.profile.kernel_profile import Profile, Quantity
from flashgen.tools.profile.kernel_steps import steps_of
from flashgen.tools.profile.prediction import expected_multiply_adds
from flashgen.tools.profile.roofline import check_plot, counted_cost, plot
from flashgen.tools.profile.run import array_of, problem_of_call, profile_backward, profile_forward
from flashgen.tools.profile.visited_tiles import walks_of

__all__ = [
    "DecodingPlan",
    "Profile",
    "Quantity",
    "array_of",
    "check_plot",
    "counted_cost",
    "expected_multiply_adds",
    "plan_decoding",
    "plot",
    "problem_of_call",
    "profile_backward",
    "profile_forward",
    "steps_of",
    "walks_of",
]
