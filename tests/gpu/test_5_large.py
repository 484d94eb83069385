"""On a GPU: tensors of more than 2^31 elements and 2^32 bytes, and the largest grids.

A window keeps the work small: the oracle computes the first and the last rows of some heads, with
the keys around them. Dry, the sizes are small: it shows that the slices are the right ones.
"""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from tests.support import gpu_device as gpu
from tests.support.gpu_problems import NAMES, Mode, Problem, path_of, problem, verdict_of
from tests.support.shapes import Case

Tensor = torch.Tensor


FAR = 2**31  # elements
WINDOW = gpu.pick(100, 20)
SLICE = gpu.pick(400, 70)  # rows that the oracle computes at a time
DIM = 64
SPEC = fg.load(path_of("sliding_window")).replace(head_dim=DIM, dtype="bfloat16")
NUMBERS = {"scalars": {"window": WINDOW}}


def need(gib: float) -> None:
    """Skips the test, with numbers, on a device with less free memory."""
    free = gpu.memory_gib()
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of GPU memory; {free:.0f} GiB are free")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=gpu.DEVICE, dtype=torch.bfloat16)


def check_ends(one: Problem, pairs: list[tuple[int, int]]) -> None:
    """Runs a problem, and holds the first and last rows of some (batch, head) to the error rule.

    A slice of rows and keys is a problem of its own. A row lacks the keys before the slice, and a
    key the rows after it, and the rows that lack keys: such results are left out.
    """
    results = one.results()
    gpu.synchronize()
    failures = gpu.Failures()
    seq = one.q.shape[2]
    for b, h in pairs:
        for start in (0, seq - SLICE):
            where = (slice(b, b + 1), slice(h, h + 1), slice(start, start + SLICE))
            operands = (tensor[where] for tensor in (one.q, one.k, one.v, one.dout))
            numbers = {**NUMBERS, "q_offset": start, "k_offset": start}
            part = Problem(one.spec, *operands, None, numbers)
            first = WINDOW if start > 0 else 0
            last = SLICE - WINDOW if start + SLICE < seq else SLICE
            seen = [slice(first, SLICE)] * 3 + [slice(first, last)] * 2
            label = f"batch {b}, head {h}, rows from {start:,}"
            with failures.case(label):
                for place, (exact, same) in enumerate(
                    zip(part.exact(), part.ordinary(), strict=True)
                ):
                    rows = seen[place]
                    got = results[place][where][:, :, rows]
                    line = verdict_of(NAMES[place], got, exact[:, :, rows], same[:, :, rows])
                    failures.add(label, [line] if line else [])
    failures.tell()


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_than_2_to_the_31_elements_in_operands_results_and_gradients(
    deterministic: bool,
) -> None:
    """A head has 2^25 elements, so that the last ones begin beyond 2^31."""
    need(64)
    heads, seq = gpu.pick((66, 1 << 19), (3, 150))
    q, k, v, dout = (normal(1, heads, seq, DIM) for _ in range(4))
    assert gpu.DRY or q.numel() > FAR
    one = Problem(SPEC, q, k, v, dout, None, NUMBERS, deterministic)
    check_ends(one, [(0, 0), (0, heads // 2), (0, heads - 1)])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_strides_that_lead_beyond_2_to_the_31_elements(axis: int, deterministic: bool) -> None:
    """q, k, v and dout lie side by side in each of the far slots of one axis, amid NaN."""
    need(20)
    shape = [2, 2, gpu.pick(1024, 150), DIM]
    if axis < 2:
        shape[axis] = 3
    inner = math.prod(shape) // shape[axis]
    slot = gpu.pick((FAR // (shape[axis] - 1) // 64 + 1) * 64, 4 * inner)  # aligned to 16 bytes
    size = slot * (shape[axis] - 1) + 4 * inner
    flat = torch.full((size,), torch.nan, dtype=torch.bfloat16, device=gpu.DEVICE)
    assert gpu.DRY or size > FAR
    strides = [math.prod(n for i, n in enumerate(shape) if i > at and i != axis) for at in range(4)]
    strides[axis] = slot
    operands = []
    for place in range(4):
        view = flat.as_strided(shape, strides, place * inner)
        operands.append(view.copy_(normal(*shape)))
    one = Problem(SPEC, *operands, None, NUMBERS, deterministic)
    assert not one.backward(one.forward()).copies, "the kernels did not see these strides"
    check_ends(one, [(0, 0), (shape[0] - 1, shape[1] - 1)])


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_batch_entries_or_heads_than_a_grid_has_meet_the_error_rule(axis: str) -> None:
    most = gpu.pick(65_537, 40)
    sizes = {"batch": (most, 2, 2), "heads": (1, most, most)}[axis]
    wrong = problem(path_of("causal"), Case(5, 9, *sizes, "float16", 8), Mode(0.0, True)).wrong()
    assert not wrong, "\n".join(wrong)
