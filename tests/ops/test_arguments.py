"""Kernel arguments by name, for tensors on any device, and as the bytes that CUDA expects."""

from __future__ import annotations

import struct

import pytest
import torch

import flashgen as fg
from flashgen.calls import launch
from flashgen.calls.ops import check, run_backward, run_forward
from flashgen.calls.runtime.kernel_arguments import KernelArguments, numbers_of
from flashgen.calls.runtime.memory_layout import empty_rows, in_memory_order_of
from flashgen.kernels import pipeline
from flashgen.shared.dropout import keep_scale, kept_levels
from flashgen.shared.errors import LaunchError
from tests.support.fake_driver import Field, unpacked
from tests.support.tiers import slow

window, slope, on = (
    fg.Scalar("window", "int32"),
    fg.Scalar("slope", "float32"),
    fg.Scalar("on", "bool"),
)
SPEC = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: on & (q - k < window),
    score_mod=lambda score, b, h, q, k: score * slope,
    head_dim=16,
    dropout=True,
)
GIVEN = {"window": -7, "slope": 0.5, "on": True}


def tensors():
    return {
        "q": torch.zeros(2, 5, 4, 16).half().transpose(1, 2),
        "k": torch.zeros(1, 2, 9, 16).half().expand(2, -1, -1, -1),
        "v": torch.zeros(2, 2, 9, 16).half(),
        "rows": torch.zeros(2, 4, 5, 2),
        "dlse": None,
    }


def numbers(p=0.25, **more):
    t = tensors() | more
    call = {"scale": None, "q_offset": 16, "k_offset": -32, "scalars": GIVEN, "dropout_p": p}
    problem = check(SPEC, *(t[name] for name in "qkv"), **call, rng=torch.tensor([1, 2]))
    return numbers_of(problem, t)


def test_numbers_have_the_names_of_the_kernels_fields():
    found = numbers()
    sizes = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 5, "seq_k": 9}
    strides = {"q_stride_b": 320, "q_stride_h": 16, "q_stride_n": 64}
    strides |= {"k_stride_b": 0, "k_stride_h": 144, "k_stride_n": 16}
    scalars = {"s_window": -7, "s_slope": 0.5, "s_on": True}
    wanted = sizes | strides | scalars | {"q_offset": 16, "k_offset": -32, "scale": 0.25}
    assert found.items() >= wanted.items()
    assert "dlse_stride_b" not in found


def test_an_axis_of_length_1_has_no_stride():
    q = torch.zeros(128).half().as_strided((1, 1, 8, 16), (3, 5, 16, 1))
    found = numbers(q=q, k=q, v=q)
    assert (found["q_stride_b"], found["q_stride_h"], found["q_stride_n"]) == (0, 0, 16)


@pytest.mark.parametrize("p", [0.0, 2**-16, 0.1, 0.5, 0.9, 1 - 2**-16])
def test_the_limit_of_dropout_is_32_bits_in_an_int(p):
    found = numbers(p)
    bits = struct.unpack("<I", struct.pack("<i", found["dropout_limit"]))[0]
    assert bits == (kept_levels(p) << 16) - 1
    assert found["dropout_scale"] == keep_scale(p)
    # The kernel compares 16 random bits in the high half of a word with the limit.
    for level in (0, kept_levels(p) - 1, kept_levels(p), 65535):
        if level < 65536:
            assert ((level << 16) <= bits) == (level < kept_levels(p))


FIELDS = [
    Field("q", "pointer"),
    Field("k", "pointer"),
    Field("seq_q", "int32"),
    Field("rows", "pointer"),
    Field("q_stride_h", "int64"),
    Field("scale", "float32"),
    Field("dlse", "pointer"),
    Field("s_window", "int32"),
    Field("dropout_limit", "int32"),
    Field("s_on", "int32"),
]


ORDERS = {
    "mixed": FIELDS,
    "pointers first": sorted(FIELDS, key=lambda field: field.ctype != "pointer"),
    "pointers last": sorted(FIELDS, key=lambda field: field.ctype == "pointer"),
    "int first": [FIELDS[2], *FIELDS[:2], *FIELDS[3:]],
    "one pointer": [FIELDS[7], FIELDS[0], FIELDS[2]],
    "none": [FIELDS[2], FIELDS[4]],
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_structure_is_that_of_launch_pack(order):
    t, fields = tensors(), ORDERS[order]
    arguments = KernelArguments(fields, numbers())
    assert arguments.pointers == tuple(f.name for f in fields if f.ctype == "pointer")
    addresses = [0 if t[name] is None else t[name].data_ptr() for name in arguments.pointers]
    by_name = {**arguments.numbers, **dict(zip(arguments.pointers, addresses, strict=True))}
    assert arguments.packed(addresses) == launch.pack(fields, by_name)
    assert arguments.numbers["seq_q"] == 5


@pytest.mark.parametrize("role", ["forward", "delta", "dkdv", "fused", "convert_dq", "dq"])
def test_every_field_of_every_kernel_is_known(role):
    from flashgen.kernels.codegen.params import params_of
    from flashgen.shared.paths import PATHS

    params = params_of(SPEC, role, PATHS["sm_80"])
    t = tensors()
    rest = {"o": t["q"], "do": t["q"], "dq": t["q"], "dk": t["k"], "dv": t["v"]}
    known = numbers(**rest) | {"sum_vectors": 0, "block_vectors": 0}
    arguments = KernelArguments(params, known)
    addresses = range(1, 1 + len(arguments.pointers))
    by_name = {**arguments.numbers, **dict(zip(arguments.pointers, addresses, strict=True))}
    assert arguments.packed(addresses) == launch.pack(params, by_name)


def test_an_unknown_field_is_refused():
    with pytest.raises(LaunchError, match="without a value") as caught:
        KernelArguments([Field("q", "pointer"), Field("block_mask", "int32")], numbers())
    assert "block_mask" in caught.value.where


def test_results_have_the_memory_order_of_their_model():
    model = torch.zeros(2, 5, 4, 16).transpose(1, 2)
    assert empty_rows(model, 24).shape == (2, 4, 5, 24)
    assert empty_rows(model, 24).transpose(1, 2).is_contiguous()
    assert empty_rows(model.contiguous(), 24).is_contiguous()
    assert empty_rows(model[:, :1].expand(2, 4, 5, 16), 24).is_contiguous()
    result = torch.randn(2, 4, 5, 24)
    assert in_memory_order_of(model.contiguous(), result) is result
    moved = in_memory_order_of(model, result)
    assert torch.equal(moved, result)
    assert moved.transpose(1, 2).is_contiguous()


def test_a_forward_call_launches_with_the_addresses_of_its_tensors(gpu):
    q, k, v = (torch.randn(2, 2, 40, 16).half() for _ in range(3))
    rng = torch.tensor([5, 6])
    spec = SPEC.replace(name="launched")
    run = run_forward(
        spec, q, k, v, scalars=GIVEN, dropout_p=0.5, rng=rng, backend="gpu", q_offset=48
    )
    assert run.backend == "gpu"
    (launched,) = gpu.started
    assert launched.stream == 77
    assert launched.grid == run.plan.grid(2, 2, 2, 40, 40, head_bits=1) == (2, 1, 2)
    assert launched.block == (run.plan.threads, 1, 1)
    given = unpacked(run.source.params, launched.packed)
    for name, tensor in zip(
        ("q", "k", "v", "o", "lse", "rng"), (q, k, v, run.out, run.lse, rng), strict=True
    ):
        assert given[name] == tensor.data_ptr()
    assert (given["q_offset"], given["s_window"], given["s_on"]) == (48, -7, 1)
    assert gpu.driver.calls.count("cuLaunchKernel") == 1


@pytest.mark.parametrize("deterministic", [slow(False), True])
def test_a_backward_call_launches_its_kernels_in_order(gpu, deterministic):
    q, k, v = (torch.randn(2, 2, 40, 16).half() for _ in range(3))
    spec = SPEC.replace(name="launched_back")
    options = {"scalars": GIVEN, "backend": "gpu", "dropout_p": 0.5, "rng": torch.tensor([5, 6])}
    run = run_forward(spec, q, k, v, **options)
    gpu.started.clear()
    back = run_backward(
        spec, q, k, v, run.out, run.lse, run.out, deterministic=deterministic, **options
    )
    assert len(gpu.started) == len(back.reports)
    shared = {"rows": set(), "dq_sum": set()}  # buffers that only kernels read and write
    for launched, report in zip(gpu.started, back.reports, strict=True):
        source = report.kernel.source
        assert launched.kernel.name == source.name
        given = unpacked(source.params, launched.packed)
        for name, tensor in (("q", q), ("k", k), ("v", v), ("o", run.out), ("do", run.out)):
            assert given.get(name, tensor.data_ptr()) == tensor.data_ptr()
        for name in ("dq", "dk", "dv"):
            assert given.get(name, getattr(back, name).data_ptr()) == getattr(back, name).data_ptr()
        assert given.get("dlse", 0) == 0
        for name, addresses in shared.items():
            addresses |= {given[name]} if name in given else set()
    assert all(len(addresses) == 1 for addresses in shared.values())
    assert 0 not in shared["rows"]
    assert (0 in shared["dq_sum"]) == deterministic


def test_groups_are_divided_by_the_memory_of_the_gpu_or_of_the_architecture(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(pipeline, "divides_groups", lambda *given: asked.append(given[2]))
    q, k, v = (torch.randn(1, heads, 40, 16).half() for heads in (2, 1, 1))
    spec = SPEC.replace(name="of_memory", dropout=False)
    for backend in ("gpu", "emulator"):
        options = {"scalars": GIVEN, "backend": backend}
        run = run_forward(spec, q, k, v, **options)
        run_backward(spec, q, k, v, run.out, run.lse, run.out, **options)
    assert asked == [launch.device_memory(driver=gpu.driver), None]


def test_a_kernel_is_loaded_once_and_a_call_is_prepared_once(gpu):
    op = fg.attention(SPEC.replace(name="loaded_once"))
    q, k, v = (torch.randn(1, 1, 40, 16).half() for _ in range(3))
    for _ in range(3):
        op(q, k, v, **GIVEN, backend="gpu")
    assert len(gpu.driver.images) == 1
    assert len({id(launched.kernel) for launched in gpu.started}) == 1
    assert len(gpu.started) == 3
    assert op.report.backend == "gpu"
    assert op.report.counters is None
