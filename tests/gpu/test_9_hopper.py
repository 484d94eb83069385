"""On a Hopper GPU: the kernels with TMA and wgmma against the oracle, and the same bits again.

A dry run does the same in the emulator, with one small case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from tests.support import gpu_device as gpu
from tests.support.examples import fitted, spec_path, values_of
from tests.support.judged import judge_forward
from tests.support.shapes import Case

HEAD_DIMS = gpu.pick((40, 64, 96, 128, 192, 256), (64,))
SPECS = gpu.pick(
    (
        *("causal", "full", "softcap", "sliding_window", "document", "bigbird", "sink", "alibi"),
        "variable_length",
    ),
    ("causal",),
)
LENGTHS = gpu.pick(((1023, 1024), (257, 257), (1, 700)), ((70, 90),))


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not gpu.DRY and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")


class Example(NamedTuple):
    """A spec with operands, on the device and, for the oracle, on the CPU."""

    spec: fg.AttentionSpec
    operands: tuple[torch.Tensor, ...]
    values: dict[str, Any]
    given: tuple[torch.Tensor, ...]
    how: dict[str, Any]  # of the run on the device


def example(name: str, head_dim: int, lengths: tuple[int, int]) -> Example:
    path = spec_path(name)
    spec = fg.load(path).replace(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim)
    case = fitted(spec, Case(*lengths, 2, 4, 2, "bfloat16", head_dim))
    values = values_of(path, case)
    tensors = {name: tensor.to(gpu.DEVICE) for name, tensor in values["tensors"].items()}
    operands = case.tensors(seed=5)
    given = tuple(tensor.to(gpu.DEVICE) for tensor in operands)
    how = {"backend": gpu.BACKEND, "arch": "sm_90a", **values, "tensors": tensors}
    return Example(spec, operands, values, given, how)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", SPECS)
def test_the_hopper_kernel_meets_the_error_rule_and_repeats_its_bits(name, head_dim, lengths):
    spec, (q, k, v), values, given, how = example(name, head_dim, lengths)
    run = run_forward(spec, *given, **how)
    assert run.plan.path == "sm_90a"
    judge_forward((run.out.cpu(), run.lse.cpu()), spec, q, k, v, **values)
    for _ in range(gpu.pick(20, 1)):
        again = run_forward(spec, *given, **how)
        assert torch.equal(again.out, run.out)
        assert torch.equal(again.lse, run.lse)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", SPECS)
def test_hopper_gradients_meet_the_error_rule_and_repeat_their_bits(
    name, head_dim, lengths, deterministic
):
    """But for dQ of the fused kernel, whose sums have no order."""
    spec, (q, k, v), values, given, how = example(name, head_dim, lengths)
    forward = run_forward(spec, *given, **how)
    generator = torch.Generator().manual_seed(6)
    dout = torch.randn(forward.out.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(forward.lse.shape, generator=generator)
    given += (forward.out, forward.lse, dout.to(gpu.DEVICE), dlse.to(gpu.DEVICE))
    run = run_backward(spec, *given, deterministic=deterministic, **how)
    paths = {report.kernel.plan.kernel: report.kernel.plan.path for report in run.reports}
    assert {kernel for kernel, taken in paths.items() if taken != "sm_90a"} <= {"minmax_table"}
    found = tuple(each.cpu() for each in (run.dq, run.dk, run.dv, *run.captured))
    verdicts = reference.judge_gradients(found, spec, q, k, v, dout, dlse, **values)
    for each, verdict in verdicts.items():
        assert verdict.ok, f"{each}: {verdict}"
    for _ in range(gpu.pick(20, 1)):
        again = run_backward(spec, *given, deterministic=deterministic, **how)
        assert torch.equal(again.dk, run.dk)
        assert torch.equal(again.dv, run.dv)
        if "dq" in paths:
            assert torch.equal(again.dq, run.dq)


@pytest.mark.parametrize("name", gpu.pick(("causal", "document", "packed_causal"), ("causal",)))
def test_blocks_that_take_jobs_give_the_bits_of_one_block_each(name):
    spec, _, _, given, how = example(name, 64, gpu.pick((4000, 4000), (300, 200)))
    one_each = run_forward(spec, *given, blocks=1 << 30, **how)
    for blocks in gpu.pick((1, 7, 132, 264), (3,)):
        run = run_forward(spec, *given, blocks=blocks, **how)
        assert run.report.blocks.persistent
        assert torch.equal(run.out, one_each.out)
        assert torch.equal(run.lse, one_each.lse)
