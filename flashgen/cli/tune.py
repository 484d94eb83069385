"""``flashgen tune``: the tiles of a spec for one shape, ranked by the model, measured on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen import config
from flashgen.cli.captures import tensor_values
from flashgen.cli.console import busy, facts, listing, plural, say, seconds
from flashgen.cli.inputs import Shape, load_spec, parse_shape, scalar_values

if TYPE_CHECKING:
    from flashgen.ops import Problem
    from flashgen.plan import Plan
    from flashgen.spec import AttentionSpec
    from flashgen.tune import Choice, Inputs, Measured

SMALL_SEQ = 333
"""Rows of the check against the oracle: odd, and more than any tile."""


@dataclass(frozen=True)
class Request:
    """The options of one ``flashgen tune``; their meanings are in the command's help."""

    path: str
    shape: str
    dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    arch: str | None = None
    sram: int | None = None
    scalars: tuple[str, ...] = ()
    backward: bool = False
    deterministic: bool = False
    dropout: float = 0.0
    most: int = 8
    show: int = 10
    seed: int = 0

    @property
    def which(self) -> str:
        """The pass."""
        if not self.backward:
            return "forward"
        return "deterministic" if self.deterministic else "backward"


def tune(request: Request) -> None:
    """Ranks the tiles; measures the best and keeps the winner where there is a GPU to do it on.

    Raises:
        FlashgenError: a stage refused, or no tile fits.
    """
    spec = load_spec(
        request.path,
        dtype=request.dtype,
        head_dim=request.head_dim,
        head_dim_v=request.head_dim_v,
    )
    if request.dropout:
        spec = spec.replace(dropout=True)
    sizes = parse_shape(request.shape)
    with busy("loading torch"):
        from flashgen.tune import by_time, derived, rank
    arch, device, reason = _target(request)
    inputs = _inputs(request, spec, sizes, device)
    problem, captured = problem_of(spec, inputs)
    with busy(f"{spec.name}: ranking the tiles that fit"):
        choices = rank(spec, problem, captured, arch, which=request.which, sram=request.sram)
    own = derived(spec, arch, request.which, choices, request.sram)
    unit = "time" if by_time(spec) else "clocks per score element (packed: no time is predicted)"
    facts(
        [
            ("spec", f"{spec.name}, {request.path}"),
            ("shape", f"{sizes}, {spec.dtype}, {request.which}"),
            ("arch", arch),
            ("ranked", f"{plural(len(choices), 'choice')} by the model's {unit}"),
        ]
    )
    say()
    if reason:
        _show_ranked(choices, own, request.show, timed=by_time(spec))
        for each in choices[0].durations:
            say(f"\n{each}")
        say(f"\nranked by the model, nothing measured: {reason}")
        return
    tried = [own, *(each for each in choices[: request.most] if each is not own)]
    _measure(request, spec, tried, inputs, arch, problem)


def _target(request: Request) -> tuple[str, str, str]:
    """The architecture, the device of the tensors, and why nothing can be measured, or ""."""
    from flashgen.cli.run import choose_backend
    from flashgen.ops.forward import nearest_arch

    asked = request.arch or config.arch()
    backend, why = choose_backend(None)
    if backend != "gpu":
        return asked or "sm_80", "cpu", why
    from flashgen import launch

    own = nearest_arch(launch.device_arch(0))
    if asked not in (None, own):
        return asked or own, "cpu", f"the GPU here is {why}, {own}"
    if request.sram is not None:
        return own, "cpu", "--sram plans for another machine than this one"
    return own, "cuda", ""


def inputs_of(
    spec: AttentionSpec,
    path: str,
    sizes: Shape,
    *,
    scalars: Sequence[str] = (),
    dropout: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    """Random tensors of a call, and the file's examples; the same for the same seed."""
    from flashgen.cli.run import random_tensors
    from flashgen.tune import Inputs

    values, _ = scalar_values(spec, path, scalars)
    backend = "gpu" if device == "cuda" else "emulator"
    operands, (dout, dlse, rng) = random_tensors(spec, sizes, seed, backend)
    captured, _ = tensor_values(spec, path, sizes, seed=seed, device=device)
    options: dict[str, Any] = {"scalars": values, "tensors": captured}
    if dropout:
        options |= {"dropout_p": dropout, "rng": rng}
    return Inputs(operands, (dout, dlse), options)


def _inputs(request: Request, spec: AttentionSpec, sizes: Shape, device: str) -> Inputs:
    options: dict[str, Any] = {"scalars": request.scalars, "dropout": request.dropout}
    return inputs_of(spec, request.path, sizes, seed=request.seed, device=device, **options)


def problem_of(spec: AttentionSpec, inputs: Inputs) -> tuple[Problem, dict[str, Any]]:
    """The problem that the inputs state, and what they capture as arrays."""
    from flashgen.profile import array_of, problem_of_call

    problem = problem_of_call(spec, inputs.operands, inputs.options)
    tensors = inputs.options["tensors"]
    return problem, {name: array_of(tensor.cpu()) for name, tensor in tensors.items()}


def _show_ranked(choices: tuple[Choice, ...], own: Choice, most: int, *, timed: bool) -> None:
    """The best, and the planner's own wherever it stands."""
    listing(
        ("rank", "kernels and tiles", "predicted", ""),
        [
            (str(place), _tiles(each.plans), _predicted(each, timed=timed), _whose(each, own))
            for place, each in enumerate(choices, 1)
            if place <= most or each is own
        ],
        ("rank", "predicted"),
    )


def _whose(choice: Choice, own: Choice) -> str:
    return "the planner's, for all shapes" if choice is own else ""


def _predicted(choice: Choice, *, timed: bool) -> str:
    if math.isnan(choice.seconds):
        return ""
    return seconds(choice.seconds) if timed else f"{choice.seconds:.4f} clk"


def _tiles(plans: tuple[Plan, ...]) -> str:
    return "; ".join(
        f"{plan.kernel} {plan.block_q} x {plan.block_k}, {plural(plan.warps, 'warp')}, "
        f"{plan.blocks_per_sm} per SM" + _sharing(plan)
        for plan in plans
    )


def _sharing(plan: Plan) -> str:
    """Which warps work on the same rows."""
    if plan.column_warps == 1:
        return ""
    scores = "share the scores" if plan.score_warps > 1 else "each with all scores"
    return f", {plan.column_warps} to a row, {scores}"


def _measure(
    request: Request,
    spec: AttentionSpec,
    tried: list[Choice],
    inputs: Inputs,
    arch: str,
    problem: Problem,
) -> None:
    """Checks and times choices, the planner's own first; keeps the fastest."""
    from flashgen.ops.tuned import Winner, gpu_name, place, write
    from flashgen.tune import by_time, checked, fastest, on_gpu

    own = tried[0]
    sizes = parse_shape(request.shape)
    small = Shape(1, sizes.heads_q, sizes.heads_kv, SMALL_SEQ, SMALL_SEQ)
    check_inputs = _inputs(request, spec, small, "cuda")
    how = {"backend": "gpu", "arch": arch}
    with busy(f"{spec.name}: compiling {plural(len(tried), 'choice')}, each against the oracle"):
        candidates = checked(spec, tried, check_inputs, request.which, **how)
    with busy(f"{spec.name}: measuring"):
        measured = fastest(spec, candidates, inputs, request.which, on_gpu, **how)
    _show_measured(measured, own, timed=by_time(spec))
    winner = measured[0]
    if winner.seconds is None:
        say("\nnone of them is right or fit to be timed: nothing is kept")
        return
    root = config.cache_dir()
    if root is None:
        say("\nnothing is kept: FLASHGEN_CACHE_DIR is off")
        return
    of_own = next((each.seconds for each in measured if each.choice is own), None)
    path = place(root, gpu_name(0), spec, arch, request.which, problem)
    kept = Winner(winner.choice.tiles, winner.seconds, of_own or 0.0)
    if write(path, kept):
        say(f"\nkept for calls of this kind of shape on {gpu_name(0)}: {path}")


def _show_measured(measured: list[Measured], own: Choice, *, timed: bool) -> None:
    listing(
        ("kernels and tiles", "predicted", "measured", ""),
        [
            (
                _tiles(each.choice.plans),
                _predicted(each.choice, timed=timed),
                seconds(each.seconds) if each.seconds is not None else each.refused,
                _whose(each.choice, own),
            )
            for each in measured
        ],
        ("predicted", "measured"),
    )
