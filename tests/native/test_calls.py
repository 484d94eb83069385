"""Calls without Python launch what the Python path launches, with the same parameters.

The library is compiled once for all runs of the tests with the same source, which takes half a
minute: these tests are in the slow tier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.launch.params import field_bytes
from tests.support.masks import causal
from tests.support.native_driver import CAUSAL, NativeDriver, native_gpu
from tests.support.parts_of_groups import divide_groups

pytestmark = pytest.mark.slow

Tensor = torch.Tensor
Call = Callable[[], dict[str, Tensor]]


@pytest.fixture(params=["sm_80", "sm_90a"])
def gpu(request: pytest.FixtureRequest) -> Iterator[NativeDriver]:
    with native_gpu(request.param) as driver:
        yield driver


@pytest.fixture
def one_gpu() -> Iterator[NativeDriver]:
    with native_gpu() as driver:
        yield driver


def operands(
    seq_q: int = 70,
    seq_k: int = 70,
    heads: tuple[int, int] = (2, 2),
    batch: int = 1,
    *,
    rows_first: bool = False,
    misaligned: bool = False,
    learn: bool = True,
) -> list[Tensor]:
    torch.manual_seed(0)
    made = []
    for count, rows in ((heads[0], seq_q), (heads[1], seq_k), (heads[1], seq_k)):
        shape = (batch, rows, count, 64) if rows_first else (batch, count, rows, 64)
        if misaligned:
            flat = torch.randn(batch * count * rows * 64 + 1).half()
            tensor = flat[1:].view(shape)
        else:
            tensor = torch.randn(shape).half()
        tensor = tensor.transpose(1, 2) if rows_first else tensor
        made.append(tensor.detach().requires_grad_(learn))
    return made


def spec_with(name: str, **options: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(**{"mask_mod": causal, "head_dim": 64, "name": name, **options})


def a_learned_bias() -> tuple[Any, dict[str, Any]]:
    bias = fg.Tensor("bias", ("heads", 70), "float32", grad=True)
    spec = spec_with("native_bias", score_mod=lambda s, b, h, q, k: s + bias[h, k])
    return spec, {"bias": torch.randn(2, 70).requires_grad_()}


def exact_sums() -> tuple[Any, dict[str, Any]]:
    spec, options = a_learned_bias()
    return spec, {**options, "deterministic": True}


def documents() -> tuple[Any, dict[str, Any]]:
    ids = fg.Tensor("ids", ("batch", "tokens"), "int32")
    spec = spec_with("native_documents", mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k])
    return spec, {"ids": (torch.arange(70, dtype=torch.int32) // 20)[None]}


def a_sink() -> tuple[Any, dict[str, Any]]:
    sink = fg.Tensor("sink", ("heads",), "float32", grad=True)
    return spec_with("native_sink", sink=sink), {"sink": torch.randn(2).requires_grad_()}


def packed() -> tuple[Any, dict[str, Any]]:
    spec = spec_with("native_packed", packed=True)
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    return spec, {"cu_seqlens_q": ends, "cu_seqlens_k": ends}


def dropped() -> tuple[Any, dict[str, Any]]:
    spec = spec_with("native_dropout", dropout=True)
    return spec, {"dropout_p": 0.25, "rng": torch.tensor([3, 5])}


def drawn() -> tuple[Any, dict[str, Any]]:
    return dropped()[0], {"dropout_p": 0.25}


def offset() -> tuple[Any, dict[str, Any]]:
    return CAUSAL, {"q_offset": torch.tensor([3], dtype=torch.int32)}


def windowed(width: int = 30) -> tuple[Any, dict[str, Any]]:
    size = fg.Scalar("size", "int32")
    spec = spec_with("native_window", mask_mod=lambda b, h, q, k: (q >= k) & (q - k < size))
    return spec, {"size": width}


def alibi() -> tuple[Any, dict[str, Any]]:
    return spec_with("native_alibi", score_mod=lambda s, b, h, q, k: s - 0.1 * (q - k)), {}


def blocks() -> tuple[Any, dict[str, Any]]:
    sparse = fg.BlockSparse(lambda b, h, q, k: (q // 64 + k // 64) % 2 == 0, 64, 64)
    return spec_with("native_blocks", block_sparse=sparse), {}


CASES: dict[str, Any] = {
    "causal": (lambda: (CAUSAL, {}), {}),
    "a scale of its own": (lambda: (CAUSAL, {"scale": 0.25}), {}),
    "positions": (lambda: (CAUSAL, {"q_offset": 30}), {"seq_q": 40}),
    "a window by a number": (windowed, {}),
    "alibi": (alibi, {}),
    "grouped heads": (lambda: (CAUSAL, {}), {"heads": (4, 2)}),
    "parts of a group": (lambda: (CAUSAL, {}), {"heads": (4, 1)}),
    "rows before heads": (lambda: (CAUSAL, {}), {"rows_first": True}),
    "misaligned": (lambda: (CAUSAL, {}), {"misaligned": True}),
    "deterministic": (lambda: (CAUSAL, {"deterministic": True}), {}),
    "a learned bias": (a_learned_bias, {}),
    "exact sums of a learned bias": (exact_sums, {}),
    "documents": (documents, {}),
    "a sink": (a_sink, {}),
    "packed": (packed, {}),
    "dropout": (dropped, {}),
    "drawn dropout": (drawn, {}),
    "offsets on the device": (offset, {}),
    "a block layout": (blocks, {"seq_q": 256, "seq_k": 256}),
    "no keys": (lambda: (CAUSAL, {}), {"seq_k": 0}),
}


def hits(op: Any) -> tuple[int, int]:
    native = op._used.native
    return (0, 0) if native is None else native.hits


def both_paths(driver: NativeDriver, call: Call, hits: Callable[[], tuple[int, int]]) -> Any:
    """The launches of the first call, by Python, and of the fifth, and how it was made."""
    found = []
    for turn in range(5):
        driver.reset()
        torch.manual_seed(7)
        before = hits()
        named = call()
        after = hits()
        if turn in (0, 4):
            addresses = {tensor.data_ptr(): name for name, tensor in named.items()}
            found.append(driver.launched(addresses))
    made = tuple(b - a for a, b in zip(before, after, strict=True))
    return *found, made


@pytest.mark.parametrize("dlse", ["no dlse", "dlse", "dlse alone"])
@pytest.mark.parametrize("case", CASES)
def test_native_and_python_launch_the_same(
    gpu: NativeDriver, case: str, dlse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sizes = CASES[case]
    if case == "parts of a group":
        divide_groups(monkeypatch, 2)
    spec, options = make()
    op = fg.attention(spec)
    tensors = operands(**sizes)
    learned = [x for x in (*tensors, *options.values()) if getattr(x, "requires_grad", False)]
    given = {f"argument {name}": x for name, x in options.items() if isinstance(x, Tensor)}

    def call() -> dict[str, Tensor]:
        out, lse = op(*tensors, return_lse=True, **options)
        named = dict(zip("qkv", tensors, strict=True)) | given | {"out": out, "lse": lse}
        gpu.end_pass(named)
        results = {"no dlse": [out], "dlse": [out, lse], "dlse alone": [lse]}[dlse]
        gradients = [torch.ones_like(x) for x in results]
        found = torch.autograd.grad(results, learned, gradients, allow_unused=True)
        named |= {f"gradient {i}": x for i, x in enumerate(gradients)}
        return named | {f"result {i}": x for i, x in enumerate(found) if x is not None}

    in_python, without, made = both_paths(gpu, call, lambda: hits(op))
    assert made == (1, 1), op._used.native.reasons
    assert without == in_python
    assert in_python or case == "no keys"
    if case == "parts of a group":  # on Hopper, whose launches overlap
        in_parts = any("convert_dk" in each.kernel for each in in_python)
        assert in_parts == any(each.overlaps for each in in_python)


def paged() -> tuple[Any, dict[str, Any], list[Tensor]]:
    spec = spec_with("native_paged", paged=True)
    q, _, _ = operands(1, 1, batch=2, learn=False)
    _, k, v = operands(1, 32, batch=6, learn=False)
    table = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
    lengths = torch.tensor([40, 33], dtype=torch.int32)
    return spec, {"page_table": table, "cache_seqlens": lengths, "split_size": 32}, [q, k, v]


def paged_sink() -> tuple[Any, dict[str, Any], list[Tensor]]:
    spec, options, (q, k, v) = paged()
    ends = torch.tensor([0, 1, 2], dtype=torch.int32)
    options |= {"cu_seqlens_q": ends, "sink": torch.randn(2)}
    rows = torch.cat([*q, q[0]], 1)[None]  # the last one is of no sequence
    return spec.replace(sink=True, name="native_paged_sink"), options, [rows, k, v]


INFERENCE: dict[str, Any] = {
    "pages and split keys": paged,
    "split keys": lambda: (CAUSAL, {"split_size": 32}, operands(learn=False)),
    "a split sink": lambda: (*a_sink(), operands(learn=False)),
    "a split sink of packed rows": paged_sink,
}


@pytest.mark.parametrize("case", INFERENCE)
def test_native_and_python_launch_the_same_in_inference(gpu: NativeDriver, case: str) -> None:
    spec, options, tensors = INFERENCE[case]()
    if case == "a split sink":
        options |= {"split_size": 32}
    op = fg.attention(spec)
    given = {name: x for name, x in options.items() if isinstance(x, Tensor)}

    def call() -> dict[str, Tensor]:
        out, lse = op(*tensors, return_lse=True, **options)
        return dict(zip("qkv", tensors, strict=True)) | given | {"out": out, "lse": lse}

    with torch.inference_mode():
        in_python, without, made = both_paths(gpu, call, lambda: hits(op))
    assert made == (1, 0), op._used.native.reasons
    assert without == in_python


def test_autocast_needs_no_python_after_its_casts(gpu: NativeDriver) -> None:
    op = fg.attention(CAUSAL)
    tensors = [tensor.float().detach().requires_grad_() for tensor in operands()]

    def call() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = op(*tensors)
        torch.autograd.grad(out.sum(), tensors)
        return {"out": out}

    in_python, without, made = both_paths(gpu, call, lambda: hits(op))
    assert made == (1, 1)
    assert [(x.kernel, x.grid) for x in without] == [(x.kernel, x.grid) for x in in_python]


def variants() -> dict[str, Any]:
    """Calls that differ from the first in one thing, each with the arguments of the call."""
    q, k, v = operands(learn=False)
    wide = torch.zeros(1, 2, 70, 128, dtype=torch.float16)[..., :64]
    return {
        "the first": ([q, k, v], {}),
        "other keys": ([q, k[:, :, :64], v[:, :, :64]], {}),
        "other strides": ([wide, k, v], {}),
        "another order in memory": ([q.transpose(1, 2).contiguous().transpose(1, 2), k, v], {}),
        "another dtype": ([x.bfloat16() for x in (q, k, v)], {}),
        "another alignment": (operands(misaligned=True, learn=False), {}),
        "a scale of 1": ([q, k, v], {"scale": 1.0}),
        "a scale of 2": ([q, k, v], {"scale": 2.0}),
        "an offset": ([q, k, v], {"q_offset": 1}),
        "another offset": ([q, k, v], {"q_offset": 2}),
        "an offset of the keys": ([q, k, v], {"k_offset": 1}),
        "gradients": ([x.detach().requires_grad_() for x in (q, k, v)], {}),
    }


def test_calls_that_differ_in_one_thing_are_told_apart(one_gpu: NativeDriver) -> None:
    op = fg.attention(spec_with("native_of_any_dtype", dtype=None))
    calls = variants()

    def launches(name: str) -> Any:
        tensors, options = calls[name]
        one_gpu.reset()
        out, lse = op(*tensors, return_lse=True, **options)
        named = dict(zip("qkv", tensors, strict=True)) | {"out": out, "lse": lse}
        return one_gpu.launched({x.data_ptr(): name for name, x in named.items()}), out.stride()

    in_python = {name: launches(name) for name in calls}
    for _ in range(2):
        for name in calls:
            launches(name)
    before = hits(op)[0]
    assert {name: launches(name) for name in calls} == in_python
    assert hits(op)[0] - before == len(calls)
    tensors = calls["the first"][0]
    for wrong in ({"scale": True}, {"q_offset": 1.0}, {"deterministic": 1}, {"arch": 80}):
        with pytest.raises(fg.InputError):
            op(*tensors, **wrong)


def test_what_is_refused_in_python_is_refused_after_a_known_call(one_gpu: NativeDriver) -> None:
    spec, options = dropped()
    op = fg.attention(spec)
    q, k, v = operands(learn=False)
    for _ in range(4):
        op(q, k, v, **options)
    assert hits(op)[0] > 0
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v), {**options, "rng": torch.tensor([3, 5], dtype=torch.int32)}),
        ((q, k, v), {**options, "rng": torch.tensor([3, 5, 7])}),
        ((q, k, v), {**options, "dropout_p": 1.0}),
        ((q, k, v), {**options, "return_lse": 1}),
        ((q, k, v[:, :, :60]), options),
        ((q, k, v.float()), options),
        ((q, k, v[..., ::2]), options),
        ((q, k, None), options),
        ((q, k, v, q), options),
    ]
    for arguments, given in wrong:
        with pytest.raises(fg.InputError):
            op(*arguments, **given)


def test_a_call_without_python_draws_what_python_draws(one_gpu: NativeDriver) -> None:
    op = fg.attention(dropped()[0])
    tensors = operands()
    states, drawn = [], []
    for _ in range(4):
        torch.manual_seed(11)
        out = op(*tensors, dropout_p=0.25)
        states.append(torch.get_rng_state())
        (address,) = {
            int.from_bytes(bytes(record.params)[at : at + 8], "little")
            for record in one_gpu.records[-1:]
            for at in [field_offset(one_gpu, record, "rng")]
        }
        drawn.append(list((ctypes.c_int64 * 2).from_address(address)))
        del out
    assert hits(op)[0] > 0
    assert all(torch.equal(state, states[0]) for state in states)
    torch.manual_seed(11)
    expected = torch.randint(2**63 - 1, (2,)).tolist()
    assert drawn == [expected] * 4


def field_offset(driver: NativeDriver, record: Any, name: str) -> int:
    at = 0
    for param in driver.arguments[driver.binaries[record.function].key].params:
        width = field_bytes(param.ctype)
        at += -at % width
        if param.name == name:
            return at
        at += width
    raise KeyError(name)
