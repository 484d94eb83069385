"""Dtypes of a call: specs that follow q, captured floats of any dtype, tensors without data."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

import flashgen as fg
from flashgen.shared.errors import FlashgenError, InputError
from flashgen.shared.paths import PATHS
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

BIAS = fg.Tensor("bias", ("heads", "seq_k"), "float32", grad=True)
GATE = fg.Tensor("gate", ("heads",), "bfloat16", grad=True)
SPEC = fg.AttentionSpec(
    lambda b, h, q, k: q >= k,
    lambda s, b, h, q, k: s * GATE[h] + BIAS[h, k],
    head_dim=16,
    dtype=None,
    sink=True,
    dropout=True,
    name="follows",
)
OP = fg.attention(SPEC)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def operands(dtype=torch.float32, device="cpu", learned=True):
    given = Case(8, 8, 1, 4, 2, "float32", 16).tensors()
    return [x.to(device, dtype).requires_grad_(learned) for x in given]


def captured(dtype=torch.float32, learned=True):
    generator = torch.Generator().manual_seed(1)
    sizes = {"bias": (4, 8), "gate": (4,), "sink": (4,)}
    return {
        name: torch.randn(size, generator=generator).bfloat16().to(dtype).requires_grad_(learned)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("compiles", [False, slow(True)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("of_captured", [*FLOATS, torch.float64])
def test_q_and_captured_floats_have_any_dtype_and_gradients_have_theirs(
    dtype, of_captured, compiles
):
    torch._dynamo.reset()
    op = torch.compile(OP, backend="aot_eager", fullgraph=True) if compiles else OP
    fixed = fg.attention(SPEC.replace(dtype=dtype, name="follows_none"))
    found, wanted = [], []
    for function, given, results in (
        (op, captured(of_captured), found),
        (fixed, {**captured(), "gate": captured(torch.bfloat16)["gate"]}, wanted),
    ):
        tensors = [*operands(dtype), *given.values()]
        out = function(*tensors[:3], **given)
        results += [out, *torch.autograd.grad(out.float().square().sum(), tensors)]
    assert [x.dtype for x in found] == [dtype] * 4 + [of_captured] * 3
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype))


@pytest.mark.parametrize(("arch", "dtype"), one_in(6, product(PATHS, FLOATS), 1))
def test_kernels_are_those_of_the_dtype_of_q(arch, dtype):
    given = captured(torch.float64, learned=False)
    out = OP(*operands(dtype, learned=False), **given, backend="emulator", arch=arch)
    assert out.dtype == dtype
    assert OP.report.kernel.plan.itemsize == dtype.itemsize


def test_a_spec_without_a_dtype_has_one_operator_for_all():
    assert fg.attention(SPEC.replace()) is OP
    calls = [OP(*operands(dtype), **captured()) for dtype in FLOATS]
    assert [out.grad_fn is not None for out in calls] == [True] * 3
    (q, k, v), given = operands(), captured()
    assert torch.equal(torch.vmap(lambda q: OP(q, k, v, **given))(q[None])[0], calls[0])
    assert OP(*operands(torch.float16, learned=False), **captured(), split_size=16).dtype == (
        torch.float16
    )


class Layer(torch.nn.Module):
    """Projections, and attention with a bias, a gate and sinks that are parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(64, 3 * 64)
        for name, value in captured(learned=False).items():
            setattr(self, name, torch.nn.Parameter(value))

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return OP(q, k, v, bias=self.bias, gate=self.gate, sink=self.sink)


@pytest.fixture
def mesh():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def half(layer, x):
    return layer.bfloat16()(x.bfloat16())


def by_autocast(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def by_fsdp(layer, x):
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(layer, mesh=mesh, mp_policy=policy)(x)


@pytest.mark.parametrize("run", [half, by_autocast, by_fsdp])
def test_one_module_serves_every_way_to_lower_the_precision(run, mesh):
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2))
    layer, plain = Layer(), Layer()
    wanted = plain(x)
    wanted.square().sum().backward()
    out = run(layer, x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.05, rtol=0.05)
    out.float().square().sum().backward()
    for name, mine in layer.named_parameters():
        assert mine.grad.dtype == mine.dtype
        grad = mine.grad.to_local() if isinstance(mine.grad, DTensor) else mine.grad
        other = plain.get_parameter(name).grad
        assert (grad.float() - other).norm() < 0.05 * other.norm(), name


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what", "way_out"),
    [
        (lambda q, k, v: (q.double(), k, v), "q does not have the dtype", "q.to(torch.float16)"),
        (lambda q, k, v: (q, k.half(), v), "k does not have the dtype of q", "k.to(torch.float32)"),
        (lambda q, k, v: (q, k, v.int()), "v does not have the dtype of q", "v.to(torch.float32)"),
        (lambda q, k, v: (1.0, k, v), "q is not a torch tensor", "torch.as_tensor"),
    ],
)
def test_dtypes_that_differ_are_named(change, what, way_out):
    for function in (OP, torch.compile(OP, backend="eager", fullgraph=True)):
        with pytest.raises(InputError, match=what) as caught:
            function(*change(*operands()), **captured())
        assert way_out in caught.value.way_out


@pytest.mark.parametrize(
    "make", [fg.plan, fg.emit, fg.build, lambda spec: fg.visualize(spec, (1, 2, 64))]
)
def test_plans_and_files_need_one_dtype(make):
    with pytest.raises(FlashgenError, match="for one dtype") as caught:
        make(SPEC)
    assert 'spec.replace(dtype="bfloat16")' in caught.value.way_out
    make(fg.AttentionSpec(dtype=None).replace(dtype="bfloat16"))


def test_dtensors_beside_ordinary_tensors_are_refused_with_their_way_out(mesh):
    q, k, v = operands(learned=False)
    given = captured(learned=False)
    spread = DTensor.from_local(q, mesh, [Replicate()])
    bias = DTensor.from_local(given["bias"], mesh, [Replicate()])
    for function in (OP, torch.compile(OP, backend="eager")):
        with pytest.raises(InputError, match="k is an ordinary tensor beside DTensors") as caught:
            function(spread, k, v, **given)
        assert "k=distribute_tensor(k, q.device_mesh" in caught.value.way_out
        with pytest.raises(InputError, match="q is an ordinary tensor beside DTensors"):
            function(q, k, v, **{**given, "bias": bias})
    assert torch.equal(OP(spread.to_local(), k, v, **given), OP(q, k, v, **given))


# ---- tensors without data ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_meta_tensors_give_meta_results_and_gradients(dtype):
    tensors = operands(dtype, "meta")
    given = {name: x.detach().to("meta").requires_grad_() for name, x in captured().items()}
    out, lse = OP(*tensors, **given, return_lse=True, dropout_p=0.1)
    plain = OP(*operands(dtype), **captured())
    assert (out.device.type, out.shape, out.dtype) == ("meta", plain.shape, dtype)
    assert out.stride() == plain.stride()
    assert (lse.shape, lse.dtype) == (plain.shape[:3], torch.float32)
    found = torch.autograd.grad(out.sum() + lse.sum(), [*tensors, *given.values()])
    for mine, other in zip(found, [*tensors, *given.values()], strict=True):
        assert (mine.device.type, mine.shape, mine.dtype) == ("meta", other.shape, other.dtype)
    with torch.no_grad():
        assert OP(
            *tensors, **given, q_offset=torch.zeros(1, dtype=torch.int32, device="meta")
        ).is_meta


def test_a_model_on_meta_is_traced_without_data():
    with torch.device("meta"):
        assert Layer()(torch.empty(2, 8, 64)).is_meta
    with pytest.raises(InputError, match="on different devices"):
        OP(operands(device="meta")[0], *operands()[1:], **captured())
    with pytest.raises(InputError, match="has 3 dimensions"):
        OP(*(x[0] for x in operands(device="meta")), **captured())
