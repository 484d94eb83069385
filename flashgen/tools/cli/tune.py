"""``flashgen tune``: the tiles of a spec for one shape, ranked by the model, measured on a GPU."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import TYPE_CHECKING

from flashgen.calls import launch
from flashgen.kernels.compile.cache import usable_root
from flashgen.kernels.planner import split_of_call
from flashgen.kernels.planner.models.fitted_time import STATED_ERROR
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH, paths_of
from flashgen.shared.errors import InputError, SpecError
from flashgen.tools.cli.arguments import TuneArguments
from flashgen.tools.cli.call import RandomCall, choose_backend, random_call
from flashgen.tools.cli.console import busy, listing, plural, print_rows, say, seconds
from flashgen.tools.cli.inputs import Shape, changed_spec, check_one_pass, parse_shape

if TYPE_CHECKING:
    from flashgen.kernels.planner import Plan
    from flashgen.kernels.visits.visited_tiles import KnownCall
    from flashgen.spec.language.spec import AttentionSpec
    from flashgen.tools.tune.measure import Measured
    from flashgen.tools.tune.rank import TileChoice

SMALL_SEQ = 333
"""The sequence length of the check against the oracle: odd, and longer than any tile."""


def tune(arguments: TuneArguments) -> None:
    """Ranks the tiles; where there is a GPU, measures the best and keeps the winner."""
    spec = changed_spec(arguments.path, arguments)
    if spec.paged or spec.chooses:
        keys = "a paged cache" if spec.paged else "lists of blocks"
        option = "paged=True" if spec.paged else f"{spec.block_sparse!r}"
        raise SpecError(
            f"tuned tiles do not apply to calls with {keys}",
            where=f"{arguments.path}, {option}",
            numbers="all calls of a spec have one tile, so that the bits of a row are the same",
            way_out=f"flashgen plan, which shows the tile; or the spec without {option}",
        )
    sizes = parse_shape(arguments.shape)
    if 0 in astuple(sizes):
        raise InputError(
            "a call without scores has no tile to tune",
            where="option --shape",
            numbers=str(sizes),
            way_out="--shape 1,4,256",
        )
    pass_name = _pass(arguments)
    with busy("loading torch"):
        from flashgen.tools.tune.measure import checked, fastest, on_gpu
        from flashgen.tools.tune.rank import by_time, derived, rank
    arch, device, reason = _target(arguments)
    call = random_call(spec, arguments, sizes, device=device)
    known = known_call(spec, call)
    if pass_name == "forward" and split_of_call(spec, arch, known.problem):
        raise InputError(
            "tuned tiles do not apply to calls with split keys",
            where="option --shape",
            numbers=f"{sizes}: all calls with few query rows have one tile, so that the bits of a "
            "row are the same",
            way_out="flashgen plan --decode, which shows the tile; or a shape with more queries",
        )
    with busy(f"{spec.name}: ranking the tiles that fit"):
        choices = rank(known, arch, pass_name=pass_name, sram=arguments.sram)
    planned = derived(spec, arch, pass_name, choices, arguments.sram)
    unit = "time" if by_time(spec) else "clocks per score element (packed: no time is predicted)"
    print_rows(
        [
            ("spec", f"{spec.name}, {arguments.path}"),
            ("shape", f"{sizes}, {spec.dtype}, {pass_name}"),
            ("arch", arch),
            ("ranked", f"{plural(len(choices), 'choice')} by the model's {unit}; {STATED_ERROR}"),
        ]
    )
    say()
    if reason:
        _show_best(choices, planned)
        _show_ranked(choices, planned, arguments.show)
        for duration in choices[0].durations:
            say(f"\n{duration}")
        say(f"\nranked by the model, not measured: {reason}")
        return
    tried = [planned, *(choice for choice in choices[: arguments.most] if choice is not planned)]
    small = Shape(1, sizes.heads_q, sizes.heads_kv, SMALL_SEQ, SMALL_SEQ)
    small_call = random_call(spec, arguments, small, device="cuda")
    run_options = {"backend": "gpu", "arch": arch}
    with busy(f"{spec.name}: compiling {plural(len(tried), 'choice')}, each against the oracle"):
        candidates = checked(tried, spec, small_call, pass_name, **run_options)
    with busy(f"{spec.name}: measuring"):
        measured = fastest(candidates, on_gpu, spec, call, pass_name, **run_options)
    _show_measured(measured, planned)
    _keep(measured, planned, known, arch, pass_name)


def _pass(arguments: TuneArguments) -> str:
    """The pass as `flashgen.tools.tune` names it."""
    check_one_pass(arguments)
    if arguments.tangent:
        return "tangent"
    if not arguments.backward:
        return "forward"
    return "deterministic" if arguments.deterministic else "backward"


def _target(arguments: TuneArguments) -> tuple[str, str, str]:
    """The architecture, the device of the tensors, and why a measurement is impossible, or ""."""
    from flashgen.calls.trust import decide

    arch = arguments.arch or config.arch()
    backend, why = choose_backend(None)
    if backend != "gpu":
        return arch or DEFAULT_ARCH, "cpu", why
    runs = paths_of(launch.device_arch(0))
    if arch is not None and arch not in runs:
        return arch, "cpu", f"the GPU here is {why}, {' or '.join(runs)}"
    if arguments.sram is not None:
        return arch or runs[0], "cpu", "--sram plans for another machine than this one"
    return arch or decide(0).arch, "cuda", ""


def known_call(spec: AttentionSpec, call: RandomCall) -> KnownCall:
    """A call with its problem and its captured tensors as arrays."""
    from flashgen.calls.cpu.problem import array
    from flashgen.kernels.visits.visited_tiles import KnownCall
    from flashgen.tools.profile.run import problem_of_call, refuse_lists

    refuse_lists(spec)
    problem = problem_of_call(spec, call.operands, call.options)
    tensors = call.options["tensors"].items()
    return KnownCall(spec, problem, {name: array(tensor) for name, tensor in tensors})


def _show_best(choices: tuple[TileChoice, ...], planned: TileChoice) -> None:
    """Prints the best choice, the planner's and how far apart they are, in three lines."""
    best = choices[0]
    say(f"best for this shape: {_tiles(best.plans)}")
    say(f"for all shapes the planner takes: {_tiles(planned.plans)}")
    gain = planned.seconds / best.seconds - 1
    if best is planned or not gain > 0:
        say("they are the same by the model: tuning this shape gains nothing")
    else:
        say(f"the model predicts that the best takes {100 * gain / (1 + gain):.1f} % less time")
    say()


def _show_ranked(choices: tuple[TileChoice, ...], planned: TileChoice, most: int) -> None:
    """Prints the best choices, and the planner's own choice whatever its rank."""
    listing(
        ("rank", "kernels and tiles", "predicted", ""),
        [
            (str(position), _tiles(choice.plans), _predicted(choice), _whose(choice, planned))
            for position, choice in enumerate(choices, 1)
            if position <= most or choice is planned
        ],
        ("rank", "predicted"),
    )


def _whose(choice: TileChoice, planned: TileChoice) -> str:
    return "the planner's, for all shapes" if choice is planned else ""


def _predicted(choice: TileChoice) -> str:
    """The predicted time, or clocks per score element where no time is predicted."""
    if math.isnan(choice.seconds):
        return ""
    return seconds(choice.seconds) if choice.durations else f"{choice.seconds:.4f} clk"


def _tiles(plans: tuple[Plan, ...]) -> str:
    return "; ".join(
        f"{plan.kernel} {plan.block_q} x {plan.block_k}, {plural(plan.warps, 'warp')}, "
        f"{plan.blocks_per_sm} per SM" + _sharing(plan)
        for plan in plans
    )


def _sharing(plan: Plan) -> str:
    """How the warps that work on the same rows divide the work."""
    if plan.column_warps == 1:
        return ""
    scores = "share the scores" if plan.score_warps > 1 else "each with all scores"
    if plan.kernel == "forward" and plan.other_warps:
        scores = "one with all scores"
    return f", {plan.column_warps} to a row, {scores}"


def _keep(
    measured: list[Measured], planned: TileChoice, known: KnownCall, arch: str, pass_name: str
) -> None:
    """Writes the winner to the cache, for later calls of this kind."""
    from flashgen.calls.runtime.tuned_tiles import Winner, gpu_name, tiles_file, write

    winner = measured[0]
    if winner.seconds is None:
        say("\nno choice has the right result and a time: no tile is kept")
        return
    root = usable_root()
    if root is None:
        say("\nno tile is kept: FLASHGEN_CACHE_DIR is off, or not this user's alone")
        return
    planners_seconds = next(
        (candidate.seconds for candidate in measured if candidate.choice is planned), None
    )
    path = tiles_file(root, gpu_name(0), known.spec, arch, pass_name, known.problem)
    record = Winner(winner.choice.tiles, winner.seconds, planners_seconds or 0.0)
    if write(path, record):
        say(f"\nkept for calls of this kind of shape on {gpu_name(0)}: {path}")


def _show_measured(measured: list[Measured], planned: TileChoice) -> None:
    listing(
        ("kernels and tiles", "predicted", "measured", ""),
        [
            (
                _tiles(candidate.choice.plans),
                _predicted(candidate.choice),
                seconds(candidate.seconds) if candidate.seconds is not None else candidate.refused,
                _whose(candidate.choice, planned),
            )
            for candidate in measured
        ],
        ("predicted", "measured"),
    )
