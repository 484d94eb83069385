"""The specs, plans and tile problems of the planner's tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import flashgen as fg
from flashgen.arch import facts, known
from flashgen.planner import BackwardPlan, Plan, plan, plan_backward
from flashgen.planner.tile_problem import Tile, TileProblem, problem_of

DTYPES = ("float16", "bfloat16", "float32")
UNEQUAL = ((192, 128), (8, 256), (256, 8), (40, 64), (128, 64), (64, 128))


@functools.cache
def spec_of(head_dim: int, head_dim_v: int, dtype: str) -> fg.AttentionSpec:
    return fg.AttentionSpec(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)


def plan_of(head_dim: int, dtype: str = "float16", arch: str = "sm_80", **options: object) -> Plan:
    head_dim_v = options.pop("head_dim_v", head_dim)
    return plan(spec_of(head_dim, head_dim_v, dtype), arch, **options)


def every_plan(step: int = 8) -> Iterator[Plan]:
    """Plans of every architecture and dtype, for head dims that are multiples of ``step``."""
    dims = [(d, d) for d in range(8, 257, step)] + list(UNEQUAL)
    for arch in known():
        for dtype in DTYPES:
            for head_dim, head_dim_v in dims:
                yield plan_of(head_dim, dtype, arch, head_dim_v=head_dim_v)


def backward_of(
    head_dim: int, dtype: str = "float16", arch: str = "sm_80", **options: object
) -> BackwardPlan:
    head_dim_v = options.pop("head_dim_v", head_dim)
    return plan_backward(spec_of(head_dim, head_dim_v, dtype), arch, **options)


def every_backward(step: int = 8) -> Iterator[BackwardPlan]:
    """Backward plans, deterministic or not, as `every_plan`."""
    dims = [(d, d) for d in range(8, 257, step)] + list(UNEQUAL)
    for arch in known():
        for dtype in ("float16", "float32"):
            for head_dim, head_dim_v in dims:
                for deterministic in (False, True):
                    yield backward_of(
                        head_dim, dtype, arch, head_dim_v=head_dim_v, deterministic=deterministic
                    )


@functools.cache
def learned(head_dim: int, head_dim_v: int, dtype: str = "float16") -> fg.AttentionSpec:
    """A spec whose score function reads a learned tensor, a different element for each score."""
    bias = fg.Tensor("bias", ("heads", "distance"), "float32", grad=True)
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    return fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: s + bias[h, q - k], dtype=dtype, name="learned", **dims
    )


@functools.cache
def every_hopper_kernel() -> tuple[Plan, ...]:
    """The plans of the backward kernels of path sm_90a, those for learned tensors among them."""
    found = []
    for head_dim, head_dim_v in (*((d, d) for d in range(8, 257, 24)), *UNEQUAL):
        for deterministic in (False, True):
            plain = spec_of(head_dim, head_dim_v, "float16")
            found += plan_backward(plain, "sm_90a", deterministic=deterministic).kernels[1:]
            of_learned = plan_backward(
                learned(head_dim, head_dim_v), "sm_90a", deterministic=deterministic
            )
            found.append(of_learned.kernels[-1])
    return tuple(found)


def problem_behind(plan: Plan) -> tuple[TileProblem, Tile]:
    """The search's view of a plan that was made with the architecture's own M."""
    make = learned if plan.of_captured else spec_of
    spec = make(plan.head_dim, plan.head_dim_v, plan.dtype)
    problem = problem_of(spec, facts(plan.arch), None, plan.access_bytes, kernel=plan.kernel)
    return problem, plan.tile
