"""On a GPU: streams, no waiting inside a call, CUDA graphs with dropout that changes.

A dry run makes the same calls in sequence. It cannot show that anything runs at the same time, that
a kernel went to the right stream, that nothing waits, or that a graph can be captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import flashgen as fg
from flashgen.calls.native import build
from tests.support import gpu_device as gpu
from tests.support.gpu_problems import NAMES, Mode, Problem, path_of, problem, same_bits
from tests.support.shapes import Case

Tensor = torch.Tensor
Results = tuple[Tensor, ...]


SIZES = gpu.pick((1023, 1024, 2, 4, 2), (70, 100, 1, 4, 2))


def one_of(p: float, deterministic: bool = True, seq_q: int = SIZES[0]) -> Problem:
    case = Case(seq_q, *SIZES[1:], "float16", 64)
    return problem(path_of("causal"), case, Mode(p, deterministic))


def differing(left: Results, right: Results) -> list[str]:
    """Names of the results that differ in a bit."""
    return [
        name
        for name, one, other in zip(NAMES, left, right, strict=True)
        if not same_bits(one, other)
    ]


def prepared(one: Problem) -> tuple[Callable[[], Results], Results]:
    """The call, and what it gives when it is alone; kernels are compiled and loaded then."""
    call = one.operator()
    results = call()
    gpu.synchronize()
    return call, results


@pytest.mark.parametrize("p", [0.0, 0.17])
def test_a_call_runs_on_the_current_stream_and_waits_for_no_other(p: float) -> None:
    call, expected = prepared(one_of(p))
    stream = gpu.Stream()
    with stream.current():
        call()  # memory of this stream
    gpu.synchronize()
    end = gpu.occupy(500)  # the default stream
    with stream.current():
        results = call()
    stream.wait()
    assert gpu.DRY or not end.reached, "the call waited for the default stream"
    assert not differing(results, expected)
    gpu.synchronize()


def test_a_call_comes_after_what_its_stream_does_before_it() -> None:
    """Operands that are written late on the same stream are read late."""
    one = one_of(0.0)
    call, expected = prepared(one)
    operands = (one.q, one.k, one.v)
    kept = [tensor.clone() for tensor in operands]
    stream = gpu.Stream()
    for tensor in operands:
        tensor.zero_()
    gpu.synchronize()
    with stream.current():
        gpu.occupy(50)
        for tensor, values in zip(operands, kept, strict=True):
            tensor.copy_(values)
        results = call()
    stream.wait()
    assert not differing(results, expected)


def test_two_streams_at_once_do_not_disturb_each_other() -> None:
    """Two problems of one spec, and so of one kernel; every result of both is looked at."""
    problems = [one_of(0.17), one_of(0.17, seq_q=SIZES[0] - 30)]
    alone = [prepared(one) for one in problems]
    streams = [gpu.Stream(), gpu.Stream()]
    repeats = gpu.pick(100, 1)
    found: list[list[Results]] = [[], []]
    for _ in range(repeats):
        for place, stream in enumerate(streams):
            with stream.current():
                found[place].append(alone[place][0]())
    gpu.synchronize()
    for results, (_, expected) in zip(found, alone, strict=True):
        wrong = [
            (turn, names) for turn, r in enumerate(results) if (names := differing(r, expected))
        ]
        assert not wrong, f"{len(wrong)} of {repeats} differ, the first: {wrong[0]}"


def test_two_threads_with_a_stream_each_do_not_disturb_each_other() -> None:
    problems = [one_of(0.17), one_of(0.0)]
    alone = [prepared(one) for one in problems]
    wrong: list[str] = []

    def work(place: int) -> None:
        call, expected = alone[place]
        try:
            stream = gpu.Stream()
            with stream.current():
                for turn in range(gpu.pick(50, 1)):
                    results = call()
                    stream.wait()
                    wrong.extend(f"{turn} {name}" for name in differing(results, expected))
        except Exception as error:
            wrong.append(gpu.in_one_line(error))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.17])
def test_a_call_does_not_wait_for_the_gpu(p: float, deterministic: bool) -> None:
    """With a random state drawn inside the call; a first call may wait, to load kernels."""
    one = one_of(p, deterministic)
    drawing = Problem(**{**vars(one), "numbers": {**one.numbers, "rng": None}})
    call, _ = prepared(drawing)
    with gpu.no_waiting():
        results = call()
    gpu.synchronize()
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_graph_draws_new_dropout_at_every_replay(deterministic: bool) -> None:
    """Results of a replay are those of an eager call with the state that the replay drew."""
    one = one_of(0.17, deterministic)
    state = one.numbers["rng"].clone()
    numbers = {**one.numbers, "rng": state}
    call = Problem(**{**vars(one), "numbers": numbers}).operator()

    def draw_and_call() -> Results:
        state.random_(0, 2**63 - 1)
        return (*call(), state.clone())

    graph = gpu.Graph(draw_and_call)
    states = []
    for _ in range(3):
        *results, drawn = graph.replay()
        states.append(tuple(drawn.tolist()))
        eager = Problem(**{**vars(one), "numbers": {**numbers, "rng": drawn}}).operator()()
        wrong = differing(tuple(results), eager)
        assert wrong in ([[]] if deterministic else [[], ["dq"]]), wrong
        torch.testing.assert_close(results[2], eager[2], atol=2e-3, rtol=1e-3)
    assert len(set(states)) == 3, f"replays drew the same: {states}"


def test_a_graph_replayed_after_new_operands_sees_them() -> None:
    one = one_of(0.0)
    call = one.operator()
    graph = gpu.Graph(call)
    for scale in (1.0, 0.5):
        for tensor in (one.q, one.k, one.v):
            tensor.mul_(scale)
        assert not differing(graph.replay(), call())


def test_a_graph_replayed_after_new_offsets_uses_them() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=64, name="causal")
    q, k, v = (x.to(gpu.DEVICE) for x in Case(*SIZES, "float16", 64).tensors())
    offsets = torch.zeros(len(q), dtype=torch.int32, device=gpu.DEVICE)
    attend = fg.attention(spec)
    graph = gpu.Graph(lambda: (attend(q, k, v, q_offset=offsets, backend=gpu.BACKEND),))
    for first in (5, 40):
        offsets.copy_(torch.arange(first, first + len(q)))
        (found,) = graph.replay()
        for i in range(len(q)):
            entry = (x[i : i + 1] for x in (q, k, v))
            wanted = attend(*entry, q_offset=first + i, backend=gpu.BACKEND)
            assert same_bits(found[i : i + 1], wanted)


def test_a_graph_of_decoding_with_split_keys_uses_new_positions() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=64, name="causal")
    batch, heads_q, heads_kv = 2, *SIZES[3:]
    q, k, v = (
        x.to(gpu.DEVICE) for x in Case(1, SIZES[1], batch, heads_q, heads_kv, "float16").tensors()
    )
    places = torch.zeros(batch, dtype=torch.int32, device=gpu.DEVICE)
    attend = fg.attention(spec)
    how = {"split_size": 64, "backend": gpu.BACKEND}
    graph = gpu.Graph(lambda: (attend(q, k, v, q_offset=places, **how),))
    for first in (0, 63, SIZES[1] - batch):
        places.copy_(torch.arange(first, first + batch))
        (found,) = graph.replay()
        for i in range(batch):
            keys = (x[i : i + 1, :, : first + i + 1] for x in (k, v))
            wanted = attend(q[i : i + 1], *keys, q_offset=first + i, **how)
            assert same_bits(found[i : i + 1], wanted)


def test_a_graph_in_which_the_operator_draws_follows_torch_generator() -> None:
    """The same seed gives the same replays, and each replay drops other elements.

    q and k are 0 and v the identity, so that out shows what was dropped.
    """
    side = 64
    spec = fg.AttentionSpec(head_dim=side, dtype="float16", dropout=True)
    zeros = torch.zeros(1, 2, side, side, dtype=torch.float16, device=gpu.DEVICE)
    identity = torch.eye(side, dtype=torch.float16, device=gpu.DEVICE).expand(1, 2, side, side)
    attend = fg.attention(spec)
    graph = gpu.Graph(lambda: (attend(zeros, zeros, identity, dropout_p=0.5, backend=gpu.BACKEND),))

    def drops() -> list[Tensor]:
        torch.manual_seed(1234)
        return [graph.replay()[0] != 0 for _ in range(3)]

    first, again = drops(), drops()
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left, right)
        assert 0.45 < float(left.float().mean()) < 0.55
    shared = float((first[0] == first[1]).float().mean())
    assert 0.45 < shared < 0.55, "replays drop the same elements"


def test_graphed_callables_give_the_results_of_calls() -> None:
    """torch.cuda.make_graphed_callables captures both passes, made with or without Python."""
    one = one_of(0.0)
    attend = fg.attention(one.spec)
    learnt = [x.detach().clone().requires_grad_() for x in (one.q, one.k, one.v)]

    def call(*tensors: Tensor) -> Tensor:
        return attend(*tensors, deterministic=True, backend=gpu.BACKEND)

    def both(function: Callable[..., Tensor]) -> Results:
        out = function(*learnt)
        return (out.detach(), *torch.autograd.grad(out, learnt, one.dout))

    expected = both(call)
    graphed = gpu.graphed(call, learnt)
    for _ in range(2):
        found = both(graphed)
        assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.17])
def test_native_calls_give_the_bits_of_python(p: float) -> None:
    """Where `flashgen build-native` has been run; a dry run has no calls on a GPU."""
    one = one_of(p)
    call = one.operator()
    expected = call()
    for _ in range(4):
        found = call()
    assert not differing(found, expected)
    if not gpu.DRY and not build.missing():
        assert not fg.attention(one.spec).native_calls.startswith(("no call", "0 forward"))
