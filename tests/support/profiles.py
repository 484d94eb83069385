"""Profiles of forward and backward calls on random operands."""

from __future__ import annotations

import functools

import torch

import flashgen as fg
from flashgen.calls.runtime.block_layouts import with_layout
from flashgen.spec.language.signature import signature_of
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.profile.run import profile_backward, profile_forward, profile_tangent
from tests.support.judged import Call
from tests.support.paths import ROOT
from tests.support.sparse_layouts import random_layout

Sizes = tuple[int, int, int, int, int]


@functools.cache
def loaded(name: str) -> fg.AttentionSpec:
    return fg.load(ROOT / "specs" / f"{name}.py")


def random_operands(spec: fg.AttentionSpec, sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """q, k and v for (batch, heads_q, heads_kv, seq_q, seq_k)."""
    generator = torch.Generator().manual_seed(0)
    batch, heads_q, heads_kv, seq_q, seq_k = sizes
    dims = (spec.head_dim, spec.head_dim, spec.head_dim_v)
    shapes = ((heads_q, seq_q), (heads_kv, seq_k), (heads_kv, seq_k))
    dtype = getattr(torch, spec.dtype)
    return tuple(
        torch.randn(batch, *shape, dim, generator=generator).to(dtype)
        for shape, dim in zip(shapes, dims, strict=True)
    )


@functools.cache
def forward(spec: fg.AttentionSpec, sizes: Sizes, arch: str = "sm_80") -> Profile:
    """The profile of the forward kernel, whose keys are not split."""
    operands = random_operands(spec, sizes)
    _, (found,) = profile_forward(spec, *operands, arch=arch, split_size=0)
    return found


@functools.cache
def all_kernels(
    spec: fg.AttentionSpec,
    sizes: Sizes,
    *,
    density: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    dropout_p: float = 0.0,
    sink: bool = False,
    arch: str = "sm_80",
    **values: float,
) -> tuple[Profile, ...]:
    """The profiles of the forward kernel and of each backward kernel of both schemes.

    The non-deterministic scheme has a gradient of LSE.

    Args:
        density: share of live blocks of the random layouts that are given with the call, one for
            each batch entry and head, with one column of blocks past the last key.
    """
    q, k, v = random_operands(spec, sizes)
    options = {"scalars": values, "q_offset": q_offset, "k_offset": k_offset, "arch": arch}
    if dropout_p:
        options |= {"dropout_p": dropout_p, "rng": torch.tensor([7, 3])}
    if sink:
        options["tensors"] = {spec.sink.name: torch.linspace(-1, 1, sizes[1])}
    if density is not None:
        ends = sizes[3] + q_offset, sizes[4] + k_offset + spec.block_sparse.block_k
        live = random_layout(spec, sizes[:2], ends, density, seed=0)
        options["tensors"] = dict(with_layout(signature_of(spec), {"layout": live}))
    run, found = profile_forward(spec, q, k, v, **options)
    dout = torch.randn(run.out.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    for deterministic, dlse in ((False, torch.ones_like(run.lse)), (True, None)):
        _, more = profile_backward(
            spec, q, k, v, run.out, run.lse, dout, dlse, deterministic=deterministic, **options
        )
        found += more
    return found


def tangents(spec: fg.AttentionSpec, sizes: Sizes, arch: str = "sm_80") -> tuple[Profile, ...]:
    """The profiles of the tangent pass, along random tangents of all operands."""
    numbers = {}
    if spec.sink is not None:
        numbers["tensors"] = {spec.sink.name: torch.linspace(-1, 1, sizes[1])}
    call = Call(spec, random_operands(spec, sizes), numbers, arch=arch)
    return profile_tangent(spec, *call.qkv, *call.results, call.moving(), arch=arch, **numbers)[1]
