"""A call on random operands that the emulator executes and counts: for `profile` and `report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flashgen.shared import config
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.arguments import CountedArguments
from flashgen.tools.cli.call import RandomCall, random_call
from flashgen.tools.cli.decoding import ServedCall, capacity_of, served_call
from flashgen.tools.cli.inputs import Shape
from flashgen.tools.cli.progress import emulated, expected_work

if TYPE_CHECKING:
    from flashgen.calls.ops import BackwardRun, ForwardRun
    from flashgen.calls.runtime.reports import TangentRun
    from flashgen.tools.profile.kernel_profile import Profile


@dataclass(frozen=True)
class ProfiledCall:
    """A call, its results, and the profile of each launch in launch order.

    Attributes:
        served: the call as the kernels compute it.
    """

    served: ServedCall
    run: ForwardRun
    gradients: BackwardRun | None
    tangents: TangentRun | None
    profiles: tuple[Profile, ...]


def call_of(spec: AttentionSpec, arguments: CountedArguments, sizes: Shape) -> RandomCall:
    """The operands of the call that the arguments name."""
    first = sizes.seq_k - sizes.seq_q if arguments.decode else 0
    capacity = capacity_of(arguments, sizes)
    return random_call(spec, arguments, sizes, q_offset=first, capacity=capacity)


def profiled_call(
    spec: AttentionSpec,
    arguments: CountedArguments,
    sizes: Shape,
    call: RandomCall,
    tiles: Mapping[str, Any] | None = None,
) -> ProfiledCall:
    """Executes a call in the emulator, and the passes after it that the arguments name.

    Args:
        tiles: as in `flashgen.calls.ops.run_forward`.
    """
    from flashgen.tools.profile.run import profile_backward, profile_forward, profile_tangent

    served = served_call(spec, call, arguments)
    run_options = {"arch": arguments.arch, "sram": arguments.sram}
    message = f"{spec.name}: compiling, then counting {sizes} in the emulator"
    with emulated(message, partial(expected_work, spec, call, arguments)):
        forward_options = served.options | run_options
        run, profiles = profile_forward(
            served.spec, *served.operands, tiles=tiles, **forward_options
        )
    options = call.options | run_options
    results, gradients, tangents = (*call.operands, run.out, run.lse), None, None
    if arguments.backward:
        fixed = arguments.deterministic or config.batch_invariant()
        message = f"{spec.name}: compiling and counting the backward kernels"
        with emulated(message, partial(expected_work, spec, call, arguments, "backward")):
            gradients, pass_profiles = profile_backward(
                spec, *results, *call.gradients, deterministic=fixed, **options
            )
        profiles += pass_profiles
    if arguments.tangent:
        message = f"{spec.name}: compiling and counting the kernel of tangents"
        with emulated(message, partial(expected_work, spec, call, arguments, "tangent")):
            tangents, pass_profiles = profile_tangent(spec, *results, call.tangents, **options)
        profiles += pass_profiles
    return ProfiledCall(served, run, gradients, tangents, profiles)
