"""The specs, plans and tile problems of the planner's tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import flashgen as fg
from flashgen.kernels.planner import BackwardPlan, Plan, plan, plan_backward
from flashgen.kernels.planner.tile_problem import Tile, TileProblem, problem_of
from flashgen.shared.arch import KIB, facts, known_archs

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
    for arch in known_archs():
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
    for arch in known_archs():
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
    """Backward kernels of Hopper's path, those for learned tensors too."""
    found: list[Plan] = []
    for head_dim, head_dim_v in [*((d, d) for d in range(8, 257, 24)), *UNEQUAL]:
        for deterministic in (False, True):
            options = {"head_dim_v": head_dim_v, "deterministic": deterministic}
            planned = backward_of(head_dim, "float16", "sm_90a", **options).kernels
            found += (kernel for kernel in planned if not kernel.streams)
            spec = learned(head_dim, head_dim_v)
            found.append(plan_backward(spec, "sm_90a", deterministic=deterministic).kernels[-1])
    return tuple(found)


def within_limits(plan: Plan) -> None:
    """Shared memory, threads and registers are within those of the architecture."""
    arch = facts(plan.arch)
    assert plan.smem_bytes <= arch.smem_per_block
    assert plan.blocks_per_sm * (plan.smem_bytes + KIB) <= arch.smem_per_sm
    assert plan.blocks_per_sm * plan.threads <= arch.threads_per_sm
    assert plan.blocks_per_sm * plan.threads * plan.registers <= arch.registers_per_sm
    assert plan.registers_needed <= plan.registers <= 255


def problem_behind(plan: Plan) -> tuple[TileProblem, Tile]:
    """The search's view of a plan that was made with the architecture's own M."""
    make = learned if plan.is_for_learned else spec_of
    spec = make(plan.head_dim, plan.head_dim_v, plan.dtype)
    problem = problem_of(spec, facts(plan.arch), None, plan.access_bytes, kernel=plan.kernel)
    return problem, plan.tile
