"""On a GPU: its results and the emulator's of the same cubin's PTX, on the same inputs, agree.

What may differ: tensor cores add products in an order and a precision of their own (the emulator
rounds to nearest), and ex2, lg2 and rcp are approximations. Both sides get the same out and lse in
the backward pass. Dropout is integer arithmetic: its pattern is the same bit for bit.

A dry run compares the emulator with itself, blocks in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.shared.dropout import keep_mask
from tests.support import gpu_device as gpu
from tests.support.gpu_problems import (
    NAMES,
    RNG,
    Mode,
    Problem,
    kernels_ahead,
    path_of,
    problem,
    units,
)
from tests.support.shapes import Case

Tensor = torch.Tensor


CPU = torch.device("cpu")

PROBLEMS = gpu.pick(
    [
        ("causal", Case(113, 203, 1, 4, 2, "float16", 64), Mode()),
        ("causal", Case(257, 257, 1, 2, 1, "bfloat16", 128), Mode(0.17, True)),
        ("softcap", Case(127, 512, 1, 2, 2, "float16", 96), Mode(0.0, True)),
        ("sliding_window", Case(255, 256, 1, 2, 1, "bfloat16", 64, None, "gaps"), Mode(0.17)),
        ("alibi", Case(64, 128, 2, 2, 2, "float16", 40), Mode(0.0, True)),
        ("full", Case(64, 128, 1, 2, 1, "float16", 256), Mode(0.3, True)),
        ("causal", Case(113, 203, 1, 2, 1, "float32", 64), Mode(0.17, True)),
        ("full", Case(128, 217, 1, 2, 2, "float32", 40), Mode()),
    ],
    [("causal", Case(70, 100, 1, 2, 1, "float16", 64, None, "gaps"), Mode(0.17, True))],
)


compiled_ahead = kernels_ahead([(path_of(name), *rest) for name, *rest in PROBLEMS])


def allowed(name: str, one: Problem) -> float:
    """How far the two may be apart, in unit roundoffs of the largest magnitude.

    In half precision 4: twice the step that a result takes when its last rounding goes the other
    way, once for itself and once for the roundings of P and dS before it. What happens in float32
    is far below that. The lse and all results in float32: 3 for each step of the longest chain of
    products, one for the emulator's rounding and two for a truncating tensor core, times how large
    the score may be that it errs in, and 8 for the elementary functions.
    """
    single = one.q.dtype == torch.float32
    if name != "lse" and not single:
        return 4.0
    dim, depth = one.spec.head_dim, 8 if single else 16
    largest = float(one.q.double().norm(dim=-1).max() * one.k.double().norm(dim=-1).max())
    largest *= one.spec.scale or 1 / math.sqrt(dim)
    steps = math.ceil(dim / depth) * max(1.0, largest)
    if name != "lse":
        steps += math.ceil(max(one.q.shape[2], one.k.shape[2]) / depth)
    return 8 + 3 * steps


def emulated(one: Problem) -> Problem:
    return one.to(CPU)


@pytest.mark.parametrize(
    ("name", "case", "mode"),
    [pytest.param(*row, id=f"{row[0]}-{row[1].id}-{row[2]}") for row in PROBLEMS],
)
def test_the_emulator_and_the_gpu_agree_to_a_few_roundings(
    name: str, case: Case, mode: Mode, record_property: Callable[[str, Any], None]
) -> None:
    one = problem(path_of(name), case, mode)
    arch = gpu.arch()
    there = emulated(one)
    emulator = {"backend": "emulator", "check_memory": False, "order_seed": 99}
    forward, expected = one.forward(arch=arch), there.forward(arch=arch, **emulator)
    assert forward.binary.key == expected.binary.key, "not the same binary"
    # The emulator's out and lse go into both backward passes.
    given = replace(expected, out=expected.out.to(gpu.DEVICE), lse=expected.lse.to(gpu.DEVICE))
    run, wanted = one.backward(given, arch=arch), there.backward(expected, arch=arch, **emulator)
    keys = [
        [report.kernel.binary.key for report in side.reports if report.kernel]
        for side in (run, wanted)
    ]
    assert keys[0] == keys[1]
    assert keys[0]
    got = (forward.out, forward.lse, run.dq, run.dk, run.dv)
    want = (expected.out, expected.lse, wanted.dq, wanted.dk, wanted.dv)
    wrong = []
    for label, left, right in zip(NAMES, got, want, strict=True):
        found, most = units(left.cpu(), right), allowed(label, one)
        record_property(f"{name} {case.id} {label}", f"{found:.2f} of {most:.1f} roundoffs")
        print(f"{name} {case.id} {mode} {label}: {found:.2f} of {most:.1f} roundoffs")
        if found > most:
            wrong.append(f"{label}: {found:.2f} roundoffs of the largest magnitude; {most:.1f} may")
    assert not wrong, "\n".join(wrong)


def kept(one: Problem, **options: Any) -> dict[str, Tensor]:
    """Where each kernel keeps elements of P, seen from outside; q, k, v, dout are square.

    q and k are 0, so that P is the same everywhere; every factor but P * Z is 1 or the identity.
    """
    identity, zeros = one.v, torch.zeros_like(one.v)
    ones = zeros.clone()
    ones[..., 0] = 1
    nothing = {"dlse": None, "q": zeros, "k": zeros}
    plain = replace(one, **nothing, dout=identity)
    forward = plain.forward(**options)
    found = {"forward": forward.out}
    empty = replace(forward, out=zeros)
    # dV = (P * Z)^T dO with dO = I
    found["dv"] = plain.backward(empty, **options).dv.transpose(2, 3)
    # dP = dO V^T = 1 and D = 0, so dS = P * Z; then dK = scale dS^T Q and dQ = scale dS K
    nothing |= {"v": ones, "dout": ones}
    for_dk = replace(one, **nothing | {"q": identity})
    found["dk"] = for_dk.backward(empty, **options).dk.transpose(2, 3)
    for_dq = replace(one, **nothing | {"k": identity})
    found["dq"] = for_dq.backward(empty, **options).dq
    return {name: (pattern != 0).cpu() for name, pattern in found.items()}


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    gpu.pick(
        [("float16", 64), ("bfloat16", 128), ("float32", 64), ("float16", 40), ("float16", 256)],
        [("float16", 64)],
    ),
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_kernel_drops_the_elements_that_the_definition_drops(
    dtype: str, head_dim: int, deterministic: bool
) -> None:
    batch, heads, p = 2, 3, 0.5
    identity = torch.eye(head_dim, dtype=getattr(torch, dtype), device=gpu.DEVICE)
    v = identity.repeat(batch, heads, 1, 1)
    numbers = {"dropout_p": p, "rng": torch.tensor(RNG, device=gpu.DEVICE)}
    spec = fg.AttentionSpec(head_dim=head_dim, dtype=dtype, dropout=True)
    one = Problem(spec, v, v, v, v, None, numbers, deterministic)
    rows = range(head_dim)
    levels = keep_mask(p, *RNG, torch.arange(batch * heads).numpy(), rows, rows)
    expected = torch.from_numpy(levels).view(batch, heads, head_dim, head_dim)
    for name, pattern in kept(one).items():
        assert torch.equal(pattern, expected), f"{name}: {int((pattern != expected).sum())} differ"
