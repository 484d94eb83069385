"""On a GPU: training steps through torch.compile and autocast, and more than one device.

Dry, torch.compile stops after its graph of forward and backward ("aot_eager"): inductor's kernels
for a GPU are what it does not show. Nothing is said about a second device then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashgen as fg
from tests.support import gpu_device as gpu
from tests.support.compiled_flex import assert_same, compile, expected, operands
from tests.support.flex_mods import noise
from tests.support.gpu_problems import Mode, Problem, path_of, problem
from tests.support.judged import judge_forward
from tests.support.shapes import Case

Tensor = torch.Tensor


COMPILER = gpu.pick("inductor", "aot_eager")
SIZES = gpu.pick((250, 300, 2, 8, 2), (60, 80, 2, 2, 1))


def one_of(p: float, dtype: str = "bfloat16") -> Problem:
    return problem(path_of("causal"), Case(*SIZES, dtype, 64), Mode(p, True))


def stepped(one: Problem, compiled: bool) -> tuple[Tensor, ...]:
    """Out, lse and gradients of a step whose operands and loss have arithmetic of their own."""
    attend = fg.attention(one.spec)
    numbers = {n: value for n, value in one.numbers.items() if n not in ("scalars", "tensors")}
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (one.q, one.k, one.v)]

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = attend(
            *(q * 1, k * 1, v * 1),
            return_lse=True,
            deterministic=True,
            backend=gpu.BACKEND,
            **numbers,
        )
        return out, lse, (out.float() * dout.float()).sum()

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend=COMPILER) if compiled else step
    out, lse, loss = run(*leaves, one.dout)
    loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return (out.detach(), lse.detach(), *[g for g in gradients if g is not None])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.17])
def test_a_training_step_gives_right_gradients(p: float, compiled: bool) -> None:
    one = replace(one_of(p), dlse=None)
    wrong = one.wrong(stepped(one, compiled))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_under_autocast_runs_the_kernels_of_its_dtype(compiled: bool) -> None:
    """Operands in float32, kernels in bfloat16, gradients in float32 again."""
    one = replace(one_of(0.17, "float32"), dlse=None)
    low = torch.bfloat16
    with torch.autocast(gpu.DEVICE.type, dtype=low):
        out, lse, *gradients = stepped(one, compiled)
    assert out.dtype == low
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    operands = {name: getattr(one, name).to(low) for name in ("q", "k", "v", "dout")}
    rounded = replace(one, spec=one.spec.replace(dtype="bfloat16"), **operands)
    wrong = rounded.wrong((out, lse, *[gradient.to(low) for gradient in gradients]))
    assert not wrong, "\n".join(wrong)


def test_one_compiled_graph_serves_other_lengths_and_other_dropout() -> None:
    """Marked dynamic, one graph; every call against the oracle."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes long to import

    one = one_of(0.17)
    attend = fg.attention(one.spec)
    compiles = CompileCounterWithBackend(COMPILER)
    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v, p, rng: attend(
            q, k, v, dropout_p=p, rng=rng, return_lse=True, backend=gpu.BACKEND
        ),
        fullgraph=True,
        dynamic=True,
        backend=compiles,
    )
    for length, p in ((SIZES[0], 0.17), (SIZES[0] - 7, 0.3), (SIZES[0] - 30, 0.5)):
        q = one.q[:, :, :length].clone()
        rng = one.numbers["rng"] + length
        out, lse = run(q, one.k, one.v, p, rng)
        judge_forward((out, lse), one.spec, q, one.k, one.v, dropout_p=p, rng=rng)
    assert compiles.frame_count == 1


def losses(attend: fg.Attention | None, steps: int) -> list[float]:
    """Of a small model that learns to give back its input, under autocast; None: torch's own."""
    torch.manual_seed(0)
    width, heads = 128, 2
    model = torch.nn.ModuleDict(
        {"project": torch.nn.Linear(width, 3 * width), "back": torch.nn.Linear(width, width)}
    ).to(gpu.DEVICE)
    x = torch.randn(2, SIZES[0], width, device=gpu.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss_of(x: Tensor) -> Tensor:
        packed = model["project"](x).unflatten(-1, (3, heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        if attend is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = attend(q, k, v, backend=gpu.BACKEND)
        return (model["back"](out.transpose(1, 2).flatten(2)) - x).square().mean()

    torch._dynamo.reset()
    step = torch.compile(loss_of, backend=COMPILER, fullgraph=True) if attend else loss_of
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(gpu.DEVICE.type, dtype=torch.bfloat16):
            loss = step(x)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_compiled_model_learns_as_with_the_attention_of_torch() -> None:
    attend = fg.attention(fg.load(path_of("causal")).replace(dtype="float32", head_dim=64))
    steps = gpu.pick(20, 3)
    ours, theirs = losses(attend, steps), losses(None, steps)
    assert ours == pytest.approx(theirs, rel=5e-3)
    assert ours[-1] < ours[0]


@pytest.mark.skipif(gpu.DRY, reason="a dry run has one device")
def test_a_call_runs_on_the_device_of_its_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    there = torch.device("cuda", 1)
    one = one_of(0.17).to(there)
    with torch.cuda.device(0):
        wrong = one.wrong(one.operator()())
        torch.cuda.synchronize(there)
    assert not wrong, "\n".join(wrong)


def test_torchs_flex_attention_trains_on_flashgens_kernels(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learned bias, documents, block lists, and dry without torch's refusal of the CPU."""
    if gpu.DRY:
        monkeypatch.setenv("FLASHGEN_BACKEND", gpu.BACKEND)
    seq = gpu.pick(500, 60)
    bias, documents = noise(4, seq).requires_grad_(), torch.arange(seq) // 33
    inputs = operands(seq=seq)

    def score_of(bias: Tensor) -> Any:
        return lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + bias[h, k]

    def mask_of(documents: Tensor) -> Any:
        return lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])

    score, mask = score_of(bias.to(gpu.DEVICE)), mask_of(documents.to(gpu.DEVICE))
    block_mask = create_block_mask(mask, None, None, seq, seq, device=gpu.DEVICE)
    function, _ = compile(
        lambda q, k, v, m: flex_attention(q, k, v, score, m, return_lse=True), COMPILER
    )
    found = function(*[x.to(gpu.DEVICE) for x in inputs], block_mask)
    wanted = expected(*inputs, score_of(bias), mask_of(documents))
    assert_same([x.cpu() for x in found], wanted, [*inputs, bias])
