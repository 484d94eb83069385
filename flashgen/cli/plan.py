"""``flashgen plan``: block sizes and their derivation, proofs, and predicted times of launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen import config
from flashgen.cli.console import busy, write
from flashgen.cli.inputs import load_spec, parse_shape
from flashgen.plan import Plan, plan_backward
from flashgen.plan import plan as plan_forward

if TYPE_CHECKING:
    from flashgen.spec import AttentionSpec

DEFAULT_ARCH = "sm_80"


@dataclass(frozen=True)
class Request:
    """The options of one ``flashgen plan``; their meanings are in the command's help."""

    path: str
    dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    arch: str | None = None
    sram: int | None = None
    shape: str | None = None
    scalars: tuple[str, ...] = ()
    policy: str = "derived"
    backward: bool = False
    deterministic: bool = False
    certify: bool = False


def plan(request: Request) -> None:
    """Prints the plan, then what else was asked for.

    Raises:
        FlashgenError: no tile fits, an option is wrong, or a claim cannot be proved.
    """
    spec = load_spec(
        request.path,
        dtype=request.dtype,
        head_dim=request.head_dim,
        head_dim_v=request.head_dim_v,
    )
    arch = request.arch or config.arch() or DEFAULT_ARCH
    plans: Sequence[Plan]
    if request.backward:
        passed = plan_backward(spec, arch, sram=request.sram, deterministic=request.deterministic)
        write(str(passed))
        plans = passed.kernels
    else:
        plans = (plan_forward(spec, arch, sram=request.sram, policy=request.policy),)
        write(str(plans[0]))
    if request.shape is not None:
        _predict(request, request.shape, spec, plans)
    if request.certify:
        from flashgen.certify import certify

        for each in certify(
            spec,
            arch,
            sram=request.sram,
            policy=request.policy,
            deterministic=request.deterministic,
        ):
            write(f"\n{each}")


def _predict(request: Request, shape: str, spec: AttentionSpec, plans: Sequence[Plan]) -> None:
    """How long each launch takes, as the model has it."""
    sizes = parse_shape(shape)
    with busy("loading torch"):
        from flashgen.cli.tune import inputs_of, problem_of
        from flashgen.ops.bind import blocks_of_call, heads_of_call
        from flashgen.tune import predicted
    inputs = inputs_of(spec, request.path, sizes, scalars=request.scalars)
    problem, captured = problem_of(spec, inputs)
    of_call = []
    for planned in plans:
        if planned.kernel == "forward":
            heads = heads_of_call(spec, planned, problem, captured)
            if heads.reason:
                write(f"\nheads_per_tile  {heads.heads}  {heads.reason}")
            if heads.heads > 1:
                planned = plan_forward(
                    spec,
                    planned.arch,
                    sram=request.sram,
                    policy=request.policy,
                    heads_per_tile=heads.heads,
                )
                write(f"\n{planned}")
            if planned.takes_jobs:
                write(f"\n{blocks_of_call(planned, problem, packed=spec.packed)}")
        of_call.append(planned)
    durations = predicted(spec, problem, captured, of_call)
    for each in durations:
        write(f"\n{each}")
    if not durations:
        write("\nno time is predicted: the tiles of packed sequences depend on where they begin")
