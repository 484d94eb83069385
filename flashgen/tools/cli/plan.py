"""``flashgen plan``: block sizes and their derivation, proofs, and predicted times of launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

from flashgen.kernels.pipeline import plan_backward_of_call
from flashgen.kernels.planner import (
    Plan,
    TangentPlanRequest,
    plan_backward,
    plan_tangent,
    split_of_call,
)
from flashgen.kernels.planner import plan as plan_forward
from flashgen.kernels.planner.duration import cost_of_parts
from flashgen.kernels.planner.traffic import LaunchSizes
from flashgen.kernels.visits.layout_path import path_of_layout
from flashgen.shared.errors import InputError
from flashgen.tools.cli.arguments import DECODING_SHAPE, CallArguments, PlanArguments
from flashgen.tools.cli.call import random_call
from flashgen.tools.cli.captured_tensors import captures_of
from flashgen.tools.cli.console import busy, write
from flashgen.tools.cli.decoding import capacity_of, decoding_plan, sizes_of
from flashgen.tools.cli.inputs import (
    Shape,
    arch_of,
    changed_spec,
    check_file,
    check_one_pass,
)
from flashgen.tools.profile.roofline import check_plot

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec


def plan(arguments: PlanArguments) -> None:
    """Prints the plan, then the predicted times and the proofs that the options name.

    With --world, what each rank of a distributed call does instead.
    """
    spec = changed_spec(arguments.path, arguments)
    sizes = sizes_of(arguments, arguments.shape or DECODING_SHAPE, spec)
    arch, sram = arch_of(arguments.arch), arguments.sram
    check_one_pass(arguments)
    if arguments.world is not None:
        _distributed(arguments, spec, arch, arguments.world, sizes)
        return
    plans: Sequence[Plan]
    if arguments.decode:
        _decoding(arguments, spec, arch, sizes)
        plans = ()
    elif arguments.backward:
        fixed = arguments.deterministic
        if arguments.shape is None:
            backward = plan_backward(spec, arch, sram=sram, deterministic=fixed)
        else:
            backward = plan_backward_of_call(
                spec, arch, astuple(sizes), sram=sram, deterministic=fixed
            )
        plans = backward.kernels
        write_summary(plans)
        write(str(backward))
    else:
        if arguments.tangent:
            plans = (plan_tangent(TangentPlanRequest.for_all(spec, arch, sram)),)
        else:
            plans = (plan_forward(spec, arch, sram=sram, policy=arguments.policy),)
        write_summary(plans)
        write(str(plans[0]))
    path = path_of_layout(
        spec,
        arch,
        backward=arguments.backward or arguments.tangent,
        deterministic=arguments.deterministic or arguments.tangent,
    )
    if path is not None:
        write(str(path))
    if arguments.shape is not None and not arguments.decode:
        _predict(arguments, sizes, spec, plans)
    if arguments.certify:
        from flashgen.kernels.planner.proofs import certify

        for certificate in certify(
            spec,
            arch,
            sram=sram,
            policy=arguments.policy,
            deterministic=arguments.deterministic,
        ):
            write(f"\n{certificate}")


def write_summary(plans: Sequence[Plan]) -> None:
    """Writes the chosen tile of each kernel in three lines, above the formulas."""
    for planned in plans:
        if planned.summary:
            write("\n".join(planned.summary) + "\n")


def _decoding(arguments: PlanArguments, spec: AttentionSpec, arch: str, sizes: Shape) -> None:
    """The kernels of decoding calls, and the predictions for their launches."""
    whole = replace(sizes, seq_k=capacity_of(arguments, sizes))
    scalars, tensors = captures_of(spec, arguments, whole, q_offset=sizes.seq_k - sizes.seq_q)
    options = {"scalars": scalars, "tensors": tensors}
    planned = decoding_plan(spec, arguments, sizes, options, arch)
    write(f"{planned}\n\nfor {sizes}, {spec.dtype}")


def _distributed(
    arguments: PlanArguments, spec: AttentionSpec, arch: str, world: int, sizes: Shape
) -> None:
    """Prints the rows that each rank of a distributed call holds, sends and computes."""
    names = ("backward", "tangent", "certify", "sram")
    unsupported = [f"--{name}" for name in names if getattr(arguments, name)]
    unsupported += ["--policy"] if arguments.policy != "derived" else []
    if unsupported:
        raise InputError(
            "the forecast of a distributed call is that of forward passes by derived plans",
            where=f"option {unsupported[0]}",
            numbers=f"--world {world} with {' and '.join(unsupported)}",
            way_out=f"leave {unsupported[0]} or --world out",
        )
    if arguments.link is not None and not 0 < arguments.link < math.inf:
        raise InputError(
            "the link is no speed at which a GPU can send",
            where="option --link",
            numbers=f"given {arguments.link} GB/s",
            way_out="--link 450, or another number above 0",
        )
    if arguments.map is not None:
        check_plot(arguments.map, "--map")
        check_file(arguments.map, "--map")
    scalars, tensors = captures_of(spec, arguments, sizes)
    captures = {**scalars, **tensors}
    from flashgen.frontends import distributed
    from flashgen.frontends.distributed.sharding import WAYS

    shard: object = arguments.shard
    if shard not in (*WAYS, "balance"):
        raise InputError(
            "no such sharding",
            where="option --shard",
            numbers=f"{shard!r}; available: {', '.join(WAYS)}, balance",
            way_out="--shard head_tail, which suits causal masks",
        )
    if shard == "balance":
        from flashgen.frontends.distributed.forecast import tile_of

        shard = distributed.balance(
            spec,
            sizes.seq_q,
            world,
            batch=sizes.batch,
            heads=sizes.heads_q,
            tile=tile_of(sizes.seq_q),
            **captures,
        ).chunks
    forecast = distributed.forecast(
        spec,
        world,
        (sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.seq_q),
        arch=arch,
        method=arguments.method,
        shard=shard,
        captures=captures,
        link=None if arguments.link is None else arguments.link * 1e9,
    )
    write(str(forecast))
    if arguments.map is not None:
        forecast.draw(arguments.map)
        write(f"map     {arguments.map}")


def _predict(
    arguments: PlanArguments, sizes: Shape, spec: AttentionSpec, plans: Sequence[Plan]
) -> None:
    """Prints the predicted time of each launch for a shape."""
    with busy("loading torch"):
        from flashgen.calls.runtime.bind_arguments import blocks_of_call, heads_of_call
        from flashgen.tools.cli.tune import known_call
        from flashgen.tools.tune.rank import predicted
    example = CallArguments(path=arguments.path, scalars=arguments.scalars)
    known = known_call(spec, random_call(spec, example, sizes))
    plans_of_call = []
    for planned in plans:
        if planned.kernel == "forward":
            heads = heads_of_call(spec, planned, known.problem, known.captured)
            if heads.reason:
                write(f"\nheads_per_tile  {heads.heads}  {heads.reason}")
            size = split_of_call(spec, planned.arch, known.problem)
            if size:
                write(
                    f"\nsplit_size  {size:,}, by the plan: --decode shows the launches of a call "
                    "with few query rows"
                )
                return
            if heads.heads > 1 or heads.few_rows or heads.unpaired:
                planned = plan_forward(
                    spec,
                    planned.arch,
                    sram=arguments.sram,
                    policy=arguments.policy,
                    heads_per_tile=heads.heads,
                    few_rows=heads.few_rows,
                    unpaired=heads.unpaired,
                )
                write(f"\n{planned}")
            if planned.is_persistent:
                write(f"\n{blocks_of_call(planned, known.problem, packed=spec.packed)}")
        plans_of_call.append(planned)
    durations = predicted(known, plans_of_call)
    for duration in durations:
        write(f"\n{duration}")
    parts = cost_of_parts(durations, LaunchSizes(*astuple(sizes)))
    if parts:
        write(f"\n{parts}")
    if not durations:
        write("\nno time is predicted: the tiles of packed sequences depend on where they begin")
