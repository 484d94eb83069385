"""Every way to call an operator wrongly has one error that names the argument and the way out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import check, run_backward, run_forward
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime.arguments.options import check_names
from flashgen.calls.runtime.backends import choose
from flashgen.calls.runtime.memory_layout import base_obstacle, stride_obstacle
from flashgen.shared.errors import InputError, SpecError
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.spec import AttentionSpec

SPEC = AttentionSpec(head_dim=16, name="plain")


def operands(batch=2, heads_q=4, heads_kv=2, seq_q=5, seq_k=7, dim=16, dim_v=16, dtype="float16"):
    kind = getattr(torch, dtype)
    return (
        torch.zeros(batch, heads_q, seq_q, dim, dtype=kind),
        torch.zeros(batch, heads_kv, seq_k, dim, dtype=kind),
        torch.zeros(batch, heads_kv, seq_k, dim_v, dtype=kind),
    )


def checked(spec=SPEC, tensors=None, **options):
    q, k, v = tensors or operands()
    settings = {"scale": None, "q_offset": 0, "k_offset": 0, "scalars": {}, **options}
    return check(spec, q, k, v, **settings)


def replaced(name, change, **sizes):
    """The usual operands with one of them changed."""
    tensors = dict(zip("qkv", operands(**sizes), strict=True))
    tensors[name] = change(tensors[name])
    return tuple(tensors.values())


def refusal(**call) -> InputError:
    with pytest.raises(InputError) as caught:
        checked(**call)
    error = caught.value
    assert all((error.what, error.where, error.numbers, error.way_out))
    return error


def test_a_right_call_gives_its_sizes():
    problem = checked(tensors=operands(dim_v=16), q_offset=3, k_offset=-2)
    assert (problem.batch, problem.heads_q, problem.heads_kv) == (2, 4, 2)
    assert (problem.seq_q, problem.seq_k, problem.head_dim, problem.head_dim_v) == (5, 7, 16, 16)
    assert (problem.q_offset, problem.k_offset, problem.scale) == (3, -2, 0.25)
    assert not problem.is_empty


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize(
    ("change", "what", "way_out"),
    [
        (lambda t: t.tolist(), "is not a torch tensor", "torch.as_tensor"),
        (lambda t: t.to_sparse(), "is not an ordinary dense tensor", "to_dense"),
        (
            lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
            "is not an ordinary dense tensor",
            "dequantize",
        ),
        (lambda t: t.to("meta"), "it is a meta tensor", "on the CPU or on a CUDA device"),
        (lambda t: t[0], "has 3 dimensions, not 4", "unsqueeze(0)"),
        (lambda t: t.float(), "does not have the dtype of", ".to(torch.float16)"),
        (lambda t: t.to(torch.complex64), "does not have the dtype of", "float16"),
        (
            lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
            "is not contiguous",
            ".contiguous()",
        ),
        (
            lambda t: torch.zeros(2, t.shape[1], 7, 8).half(),
            "the last dimension of",
            "spec.replace",
        ),
    ],
)
def test_each_wrong_operand_is_refused(name, change, what, way_out):
    error = refusal(tensors=replaced(name, change))
    assert what in error.what
    assert name in error.what
    assert error.where == f"argument {name}"
    assert way_out in error.way_out


def test_a_jagged_tensor_is_attended_to_as_the_error_says() -> None:
    parts = [torch.randn(n, 2, 16) for n in (5, 9)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    spec = fg.AttentionSpec(head_dim=16, dtype="float32")
    with pytest.raises(InputError, match="not an ordinary dense tensor") as caught:
        fg.attention(spec)(q, q, q)
    assert "q.values()[None] for a spec with packed=True" in caught.value.way_out
    rows, ends = q.values()[None], q.offsets().int()
    out = fg.attention(spec.replace(packed=True))(
        rows, rows, rows, cu_seqlens_q=ends, cu_seqlens_k=ends
    )
    for found, part in zip(out.split([5, 9], 2), parts, strict=True):
        rows = part.transpose(0, 1)[None]
        expected = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ["q_offset", "k_offset", "scale", "split_size", "rng"])
def test_nested_tensors_are_no_numbers_either(name: str, layout: torch.layout) -> None:
    q, k, v = operands(heads_kv=4, seq_k=5)
    nested = torch.nested.nested_tensor([torch.ones(5, 16), torch.ones(3, 16)], layout=layout)
    with pytest.raises(InputError) as caught:
        fg.attention(SPEC)(q, k, v, **{name: nested})
    assert caught.value.where == f"argument {name}"


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*:UserWarning")
def test_tensors_without_strides_are_refused_by_the_operator_too():
    q, k, v = operands(heads_kv=4, seq_k=5)
    nested = torch.nested.nested_tensor([q[0], q[1, :, :3]])
    compressed = q.to_sparse_csr(dense_dim=0)
    for wrong in (nested, compressed, q.to_sparse()):
        for place in range(3):
            given = [q, k, v]
            given[place] = wrong
            with pytest.raises(InputError, match="not an ordinary dense tensor"):
                fg.attention(SPEC)(*given)
    run = run_forward(SPEC, q, k, v)
    with pytest.raises(InputError, match="does not belong"):
        run_backward(SPEC, q, k, v, run.out, run.lse, nested)


def test_inputs_that_require_a_gradient_are_fine():
    tensors = tuple(tensor.requires_grad_() for tensor in operands())
    assert checked(tensors=tensors).seq_q == 5


@pytest.mark.parametrize(
    ("name", "sizes", "what", "way_out"),
    [
        ("k", {"batch": 1}, "k does not have the batch of q", "k.expand(2, -1, -1, -1)"),
        ("v", {"batch": 1}, "v does not have the batch of q", "v.expand(2, -1, -1, -1)"),
        ("v", {"heads_kv": 1}, "k and v differ in number of heads", "heads_kv"),
        ("v", {"seq_k": 8}, "k and v differ in length", "seq_k"),
        ("q", {"heads_q": 3}, "cannot be divided", "multiple"),
    ],
)
def test_operands_that_do_not_fit_each_other_are_refused(name, sizes, what, way_out):
    index = "qkv".index(name)
    error = refusal(tensors=replaced(name, lambda _: operands(**sizes)[index]))
    assert what in error.what
    assert "q (2, " in error.numbers
    assert way_out in error.way_out


@pytest.mark.parametrize(
    ("dim", "way_out"),
    [
        (24, "spec.replace(head_dim=24)"),
        (13, "torch.nn.functional.pad(q, (0, 3)), and spec.replace(head_dim=16, scale=13**-0.5)"),
        (0, "q with 16 columns; head dims are from 8 to 576"),
        (584, "q with 16 columns; head dims are from 8 to 576"),
    ],
)
def test_the_way_out_of_a_head_dim_is_one_that_a_spec_takes(dim, way_out):
    tensors = replaced("q", lambda _: torch.zeros(2, 4, 5, dim).half())
    assert refusal(tensors=tensors).way_out.startswith(way_out)


def test_key_heads_of_zero_are_refused_unless_there_are_no_query_heads():
    error = refusal(tensors=operands(heads_kv=0))
    assert error.what == "k and v have no heads, and q has some"
    assert "k and v with 4 heads" in error.way_out
    assert checked(tensors=operands(heads_q=0, heads_kv=0)).is_empty


def test_sizes_and_offsets_have_limits():
    one = torch.zeros(1, 1, 1, 16).half()
    far = one.expand(1, 1, 2**28 + 1, 16)
    error = refusal(tensors=(far, one, one))
    assert error.what == "the length of q is larger than kernels support"
    assert "268,435,456" in error.numbers
    assert "the length of k" in refusal(tensors=(one, far, far)).what
    many = one.expand(1, 2**20 + 1, 1, 16)
    assert "the number of heads of q" in refusal(tensors=(many, one, one)).what
    wide = one.expand(2**20 + 1, 1, 1, 16)
    assert "the batch of q" in refusal(tensors=(wide, wide, wide)).what
    both = one.expand(2**20, 2**11, 1, 16)
    assert "the batch times heads of q" in refusal(tensors=(both, both, both)).what
    for name, value in (("q_offset", 2**28 - 3), ("q_offset", -(2**28) - 1), ("k_offset", 2**28)):
        error = refusal(**{name: value})
        assert name in error.what
        assert f"{value:,} to " in error.numbers
        assert "nearer origin" in error.way_out
    assert checked(q_offset=2**28 - 4, k_offset=-(2**28)).q_offset == 2**28 - 4


def test_rows_too_far_apart_for_32_bits_are_refused():
    # Never touched, so never in memory.
    space = torch.empty(2**30 + 16, dtype=torch.float16)
    far = space.as_strided((1, 1, 2, 16), (0, 0, 2**30, 1))
    near = torch.zeros(1, 1, 2, 16).half()
    error = refusal(tensors=(near, far, near))
    assert error.what == "the rows of k are too far apart"
    assert "2,147,483,648 B" in error.numbers
    assert error.way_out == "k.contiguous()"


@pytest.mark.parametrize("value", [1.0, True, "3", None])
def test_offsets_are_whole_numbers(value):
    error = refusal(q_offset=value)
    assert error.what == "q_offset is not a whole number"
    assert checked(q_offset=np.int64(3)).q_offset == 3


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), True, "1", 2.0**127])
def test_a_scale_is_positive_and_its_product_with_log2_of_e_is_finite(value):
    error = refusal(scale=value)
    assert error.what == "scale is not a positive number below 2^127"
    assert repr(value) in error.numbers


def test_scale_is_the_calls_then_the_specs_then_that_of_the_head_dim():
    assert checked(scale=2).scale == 2.0
    assert checked(spec=SPEC.replace(scale=0.5)).scale == 0.5
    assert checked(spec=SPEC.replace(scale=0.5), scale=3.0).scale == 3.0
    assert checked().scale == 16**-0.5


window = Scalar("window", "int32", minimum=1)
slope = Scalar("slope", "float32")
on = Scalar("on", "bool")
SCALARS = AttentionSpec(
    mask_mod=lambda b, h, q, k: on & (q - k < window),
    score_mod=lambda score, b, h, q, k: score * slope,
    head_dim=16,
    name="three",
)


def test_an_operator_needs_a_spec():
    with pytest.raises(SpecError, match="made from an AttentionSpec") as caught:
        fg.attention(lambda b, h, q, k: q >= k)
    assert "function" in caught.value.numbers


@pytest.mark.parametrize(
    ("more", "others"), [((), {}), ((3,), {}), ((), {"backend": "tiled"}), ((), {"causal": True})]
)
def test_an_operator_needs_a_spec_alone(more, others):
    given = (fg.AttentionSpec(head_dim=16), *more) if more or others else ()
    with pytest.raises(SpecError, match="made from an AttentionSpec") as caught:
        fg.attention(*given, **others)
    assert "fg.AttentionSpec(" in caught.value.way_out


def test_backends_are_chosen_by_call_then_environment_then_device(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)
    assert choose(None, cpu) == "tiled"
    assert choose(None, cuda) == "gpu"
    assert choose("emulator", cpu) == "emulator"
    assert choose("tiled", cpu) == "tiled"
    with pytest.raises(InputError, match="no such backend") as caught:
        choose("triton", cpu)
    assert "'triton'; available: gpu, emulator, tiled" in caught.value.numbers
    with pytest.raises(InputError, match="'gpu' takes cuda tensors") as caught:
        choose("gpu", cpu)
    assert "q.cuda()" in caught.value.way_out
    with pytest.raises(InputError, match="'tiled' takes cpu tensors"):
        choose("tiled", cuda)
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    assert choose(None, cpu) == "emulator"
    with pytest.raises(InputError, match="'emulator' takes cpu tensors") as caught:
        choose(None, cuda)
    assert "FLASHGEN_BACKEND" in caught.value.where
    assert choose("gpu", cuda) == "gpu"


def test_wide_access_needs_every_address_to_be_a_multiple_of_16_bytes():
    buffer = torch.zeros(2, 4, 8, 48).half()
    assert base_obstacle("k", buffer) is stride_obstacle("k", buffer[..., :16]) is None
    assert base_obstacle("k", buffer[..., 4:20]) == "k begins 8 B past a multiple of 16 B"
    narrow = torch.zeros(1, 1, 8, 20).half()[..., :16]
    assert stride_obstacle("v", narrow) == "the row stride of v is 40 B, not a multiple of 16 B"
    # The same stride in elements is 80 bytes in float32.
    narrow = torch.zeros(1, 1, 8, 20)[..., :16]
    assert stride_obstacle("v", narrow) is None
    assert base_obstacle("k", narrow[..., 1:9]) == "k begins 4 B past a multiple of 16 B"
    # Stepping along an axis of length 1 never happens, so its stride does not count.
    single = torch.zeros(128).half().as_strided((1, 1, 8, 16), (3, 5, 16, 1))
    assert stride_obstacle("q", single) is None


@pytest.mark.parametrize("split_size", [None, 64])
@pytest.mark.parametrize("backend", ["tiled", "emulator"])
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"seq_q": 0}, (2, 4, 0, 24)),
        ({"batch": 0}, (0, 4, 5, 24)),
        ({"heads_q": 0, "heads_kv": 0}, (2, 0, 5, 24)),
        ({"seq_k": 0}, (2, 4, 5, 24)),
    ],
)
def test_empty_problems_are_defined_without_a_launch(sizes, shape, backend, split_size):
    spec = SPEC.replace(head_dim_v=24)
    q, k, v = operands(dim_v=24, **sizes)
    run = run_forward(spec, q, k, v, backend=backend, split_size=split_size)
    assert run.backend == "none"
    assert run.binary is None
    assert run.out.shape == shape
    assert run.lse.shape == shape[:3]
    assert (run.out == 0).all()
    assert (run.lse == float("-inf")).all()
    back = run_backward(spec, q, k, v, run.out, run.lse, run.out, backend=backend)
    assert back.backend == "none"
    for gradient, operand in zip((back.dq, back.dk, back.dv), (q, k, v), strict=True):
        assert gradient.shape == operand.shape
        assert (gradient == 0).all()


def test_an_empty_problem_is_checked_like_any_other():
    q, k, v = operands(seq_k=0)
    with pytest.raises(InputError):
        run_forward(SPEC, q, k, v, scalars={"window": 1})
    with pytest.raises(InputError):
        run_forward(SPEC, q, k, v, backend="gpu")


DROPS = SPEC.replace(dropout=True)
STATE = torch.tensor([1, 2])


@pytest.mark.parametrize("bad", [1, "yes", 0.0])
def test_deterministic_is_true_false_or_none(bad):
    q, k, v = operands()
    run = run_forward(SPEC, q, k, v)
    with pytest.raises(InputError, match="deterministic is neither"):
        run_backward(SPEC, q, k, v, run.out, run.lse, run.out, deterministic=bad)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out", lambda t: t[:, :, 1:]),
        ("out", lambda t: t.float()),
        ("lse", lambda t: t.half()),
        ("lse", lambda t: t[0]),
        ("dout", lambda t: t[..., :8]),
        ("dout", lambda t: t.float()),
        ("dout", lambda t: None),
        ("dlse", lambda t: t[:, :1]),
        ("dlse", lambda t: t.double()),
        ("dlse", lambda t: t.to("meta")),
        ("dlse", lambda t: t.to_sparse()),
        ("dlse", lambda t: 0.0),
    ],
)
def test_tensors_of_a_backward_call_that_do_not_fit_are_refused(name, change):
    q, k, v = operands()
    run = run_forward(SPEC, q, k, v)
    given = {"out": run.out, "lse": run.lse, "dout": run.out, "dlse": run.lse}
    given[name] = change(given[name])
    with pytest.raises(InputError) as caught:
        run_backward(SPEC, q, k, v, **given)
    assert caught.value.where == f"argument {name}"


def test_a_call_after_a_good_one_is_checked_as_well():
    """Checks are remembered by shapes and numbers: what is equal but no number must not slip by."""
    op = fg.attention(SPEC)
    q, k, v = operands()
    op(q, k, v, q_offset=1, scale=1.0)
    for wrong in ({"q_offset": True}, {"q_offset": 1.0}, {"scale": True}, {"backend": "none"}):
        with pytest.raises(InputError):
            op(q, k, v, **{"q_offset": 1, "scale": 1.0, **wrong})
    for wrong in (q.float(), q.to("meta"), q.to_sparse(), q[0], [q], None, q[..., ::2]):
        with pytest.raises(InputError):
            op(wrong, k, v, q_offset=1, scale=1.0)
    scalars = fg.attention(SCALARS)
    scalars(q, k, v, window=1, slope=1.0, on=True)
    for wrong in ({"window": True}, {"window": 1.0}, {"on": 1}, {"slope": True}):
        with pytest.raises(InputError):
            scalars(q, k, v, **{"window": 1, "slope": 1.0, "on": True, **wrong})
    with_sink = fg.attention(SPEC.replace(sink=True))
    shared = torch.zeros(1).expand(q.shape[1])
    with_sink(q, k, v, sink=shared)
    for wrong in (shared.to_sparse(), shared.to_mkldnn()):  # the strides of sparse ones are 0 too
        with pytest.raises(InputError, match="not an ordinary dense tensor"):
            with_sink(q, k, v, sink=wrong)
    drops = fg.attention(DROPS)
    drops(q, k, v, dropout_p=0.5, rng=STATE)
    for wrong in (STATE.int(), STATE[:1], (1, 2)):
        with pytest.raises(InputError):
            drops(q, k, v, dropout_p=0.5, rng=wrong)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("bais", "bias"), ("dropout", "dropout_p"), ("q_ofset", "q_offset"), ("windw", "window")],
)
def test_a_misspelled_argument_is_named_with_what_is_meant(given, meant):
    bias, window = fg.Tensor("bias", ("heads",), "float32"), fg.Scalar("window", "int32")
    spec = AttentionSpec(
        mask_mod=lambda b, h, q, k: q - k < window,
        score_mod=lambda s, b, h, q, k: s + bias[h],
        head_dim=16,
    )
    captures = {"bias": torch.zeros(4), "window": 3}
    captures[given] = captures.pop(meant, 0)
    with pytest.raises(InputError, match=f"'{given}' is not .*; did you mean '{meant}'?") as caught:
        fg.attention(spec)(*operands(), **captures)
    assert caught.value.way_out == f"{meant}=... instead of {given}=..."


@pytest.mark.parametrize("dtype", ["float64", "int32", "complex64", "float8_e5m2"])
def test_a_way_out_proposes_only_dtypes_that_kernels_have(dtype):
    error = refusal(tensors=operands(dtype=dtype))
    assert error.way_out == "q.to(torch.float16)"
    assert "dtype='float32'" in refusal(tensors=operands(dtype="float32")).way_out


@pytest.mark.parametrize(
    ("given", "nearest"), [(2**31 - 1, 2**30), (-(2**40), -(2**30)), (2**30 + 1, 2**30)]
)
def test_a_scalar_that_is_too_large_is_told_the_largest(given, nearest):
    window = fg.Scalar("window", "int32")
    spec = AttentionSpec(mask_mod=lambda b, h, q, k: q - k < window, head_dim=16)
    error = refusal(spec=spec, scalars={"window": given})
    assert error.way_out.startswith(f"window={nearest}, ")
    checked(spec=spec, scalars={"window": nearest})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("return_lse", torch.tensor([1, 2])),
        ("return_lse", 1),
        ("backend", np.zeros(3)),
        ("backend", 3),
        ("scale", np.zeros(3)),
        ("scale", torch.tensor([1, 2])),
        ("arch", np.zeros(3)),
        ("deterministic", np.zeros(3)),
    ],
)
def test_an_option_of_another_type_is_refused(option, value):
    with pytest.raises(InputError) as caught:
        fg.attention(SPEC)(*operands(), **{option: value})
    assert caught.value.where == f"argument {option}"


def test_options_of_specs_and_plans_that_are_arrays_are_refused():
    for make in (
        lambda: AttentionSpec(head_dim=16, dtype=np.zeros(3)),
        lambda: fg.Tensor("t", (), np.zeros(3)),
        lambda: Scalar("s", np.zeros(3)),
    ):
        with pytest.raises(SpecError, match="dtype"):
            make()
    for arguments in ((5,), (SPEC, 80), (SPEC, None)):
        with pytest.raises(fg.PlanError, match="is not of type"):
            fg.plan(*arguments)
    with pytest.raises(fg.PlanError, match="policy"):
        fg.plan(SPEC, policy=np.zeros(3))


def test_an_option_that_a_function_does_not_have_is_no_misspelled_capture():
    with pytest.raises(InputError, match="'split_size' is an argument of op that") as caught:
        check_names(operator_of(SPEC).signature, {"split_size": 16})
    assert caught.value.way_out == "the call without split_size="
