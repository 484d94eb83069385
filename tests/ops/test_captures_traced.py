"""Operators with captured tensors under torch's dispatcher, torch.func, compile and export."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops.registration import operator_of
from flashgen.shared.errors import InputError
from tests.ops.test_captures import (
    CASE,
    LEARNED,
    OP,
    SPEC,
    assert_near,
    captured,
    exact_gradients,
    operands,
)
from tests.ops.test_compile import counting
from tests.support.opchecks import passes_opcheck
from tests.support.shapes import Case
from tests.support.tiers import slow

pytestmark = pytest.mark.usefixtures("nothing_compiled")


# ---- the dispatcher ----------------------------------------------------------------------------


def test_captures_stand_behind_the_operands_in_the_schemas():
    operator = operator_of(SPEC)
    forward, backward = operator.overload._schema, operator.overload_backward._schema
    operands = ["q", "k", "v", "ids", "gate", "bias", "table"]
    assert [a.name for a in forward.arguments][:9] == [*operands, "rng", "dropout_p"]
    assert [a.name for a in backward.arguments][:7] == operands
    assert [r.name for r in backward.returns] == ["dq", "dk", "dv", "d_gate", "d_bias", "d_table"]
    with pytest.raises(RuntimeError, match="missing"):
        operator.overload(*CASE.tensors(), window=2)


@pytest.mark.parametrize("learned", [slow(False), True])
@pytest.mark.parametrize("drops", [slow(False), True])
def test_opcheck_passes_all_its_tests(drops, learned):
    spec = SPEC.replace(dropout=drops)
    state = (torch.tensor([3, 4]), torch.tensor(0.3)) if drops else ()
    given = (*operands(learned), *captured(learned).values(), *state)
    assert passes_opcheck(operator_of(spec).overload, given, window=2)


@pytest.mark.slow
def test_opcheck_passes_where_sums_must_be_exact():
    operator = operator_of(SPEC)
    options = {"window": 2, "backend": "emulator", "deterministic": True}
    given = (*operands(False), *captured(False).values())
    out, lse = operator.overload(*given, window=2)
    backward = (*given, out, lse, out, lse)
    assert passes_opcheck(operator.overload_backward, backward, **options)


@pytest.mark.parametrize("needed", [slow(None), [True, False, True], slow([False, False, False])])
def test_opcheck_passes_for_the_backward_operator(needed):
    operator = operator_of(SPEC)
    given = (*operands(False), *captured(False).values())
    out, lse = operator.overload(*given, window=2)
    options = {"window": 2} | ({} if needed is None else {"_needed": needed})
    backward = (*given, out, lse, out, lse)
    assert passes_opcheck(operator.overload_backward, backward, **options)
    gradients = operator.overload_backward(*backward, **options)[3:]
    tensors = [captured()[name] for name in LEARNED]
    for gradient, tensor, wanted in zip(gradients, tensors, needed or [True] * 3, strict=True):
        assert gradient.shape == (tensor.shape if wanted else (0,))


@pytest.mark.parametrize("name", ["self", "p", "info", "tensors", "func", "captured"])
def test_captures_may_have_names_of_python_s_own_functions(name):
    tensor, scalar = fg.Tensor(name, ("heads",), grad=True), fg.Scalar(f"{name}_", "float32")
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: s + tensor[h] * scalar * k, head_dim=16, dtype="float32"
    )
    swapped = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: (
            s + fg.Tensor(f"{name}_", ("heads",), grad=True)[h] * fg.Scalar(name, "float32") * k
        ),
        head_dim=16,
        dtype="float32",
    )
    values = torch.rand(4, requires_grad=True)
    q, k, v = operands()
    first = fg.attention(spec)(q, k, v, **{name: values, f"{name}_": 0.5})
    second = fg.attention(swapped)(q, k, v, **{f"{name}_": values, name: 0.5})
    assert torch.equal(first, second)
    overload = operator_of(swapped).overload
    mapped = torch.vmap(lambda x: overload(x, k, v, values, torch.tensor(0.5))[0])
    assert torch.equal(mapped(q[None])[0], first)
    traced = torch.compile(fg.attention(swapped), backend="eager", fullgraph=True)
    assert torch.equal(traced(q, k, v, **{f"{name}_": values, name: 0.5}), first)


def test_autocast_leaves_captured_tensors_as_they_are():
    given = captured()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = OP(*operands(), **given, window=2)
    assert out.dtype == torch.bfloat16
    narrow = [t.detach().bfloat16() for t in operands()]
    same = fg.attention(SPEC.replace(dtype="bfloat16"))(*narrow, **captured(), window=2)
    assert torch.equal(out, same)
    out.float().sum().backward()
    assert all(given[name].grad.dtype == given[name].dtype for name in LEARNED)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="dtype"):
        OP(*operands(), **given | {"bias": given["bias"].int()}, window=2)


# ---- torch.func --------------------------------------------------------------------------------


def test_torch_func_gives_gradients_of_captures():
    qkv, given = operands(False), captured(False)

    def loss(bias, gate):
        return OP(*qkv, **given | {"bias": bias, "gate": gate}, window=2).square().sum()

    out = OP(*qkv, **given, window=2)
    wanted = exact_gradients(qkv, given, 2 * out)
    found = torch.func.grad(loss, argnums=(0, 1))(given["bias"], given["gate"])
    assert_near(found[0], wanted["bias"])
    assert_near(found[1], wanted["gate"])


# ---- torch.compile and torch.export ------------------------------------------------------------


def attend(q, k, v, ids, gate, bias, table, window):
    return OP(q, k, v, ids=ids, gate=gate, bias=bias, table=table, window=window)


def problem(seq_q, seq_k, seed=0, distances=11):
    """No two lengths are equal: torch.compile takes sizes that once were for one number."""
    generator = torch.Generator().manual_seed(seed)
    qkv = [t.requires_grad_() for t in Case(seq_q, seq_k, 2, 4, 2, "float32", 16).tensors(seed)]
    return (
        *qkv,
        torch.randint(0, 3, (2, max(seq_q, seq_k) + 1), generator=generator, dtype=torch.int32),
        torch.rand((), generator=generator).requires_grad_(),
        torch.randn(4, seq_k + 3, generator=generator).requires_grad_(),
        torch.randn(distances, 2, generator=generator).bfloat16().requires_grad_(),
    )


def same_as_eager(compiled, tensors, window):
    results = []
    for function in (compiled, attend):
        out = function(*tensors, window)
        leaves = [t for t in tensors if t.requires_grad]
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.stride() == other.stride()


def test_one_graph_serves_all_lengths_and_contents_of_captures():
    torch._dynamo.utils.counters.clear()  # of what other tests compiled
    compiled, counter = counting(attend, dynamic=True)
    graphs = set()
    for turn, (seq_q, seq_k, distances, window) in enumerate(
        [(20, 24, 11, 3), (20, 24, 11, 3), (33, 50, 17, 4), (47, 29, 70, 100)]
    ):
        same_as_eager(compiled, problem(seq_q, seq_k, turn, distances), window)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1  # those that the first call made
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.slow
def test_only_captures_are_learned_in_a_compiled_function():
    compiled, _ = counting(attend, dynamic=True)
    tensors = [t.detach() for t in problem(20, 24)]
    tensors[5].requires_grad_()
    same_as_eager(compiled, tensors, 3)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = OP
        given = captured(learned=False)
        self.register_buffer("ids", given["ids"])
        self.gate = torch.nn.Parameter(given["gate"])
        self.bias = torch.nn.Parameter(given["bias"])
        self.table = torch.nn.Parameter(given["table"])

    def forward(self, q, k, v):
        return self.attend(
            q, k, v, ids=self.ids, gate=self.gate, bias=self.bias, table=self.table, window=2
        )


def test_a_module_learns_its_captures_when_compiled():
    found = []
    for wrap in (lambda layer: layer, lambda layer: counting(layer)[0]):
        layer = Layer()
        wrap(layer)(*operands()).square().sum().backward()
        found.append([p.grad for p in layer.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


WRONG = {
    "dtype": {"ids": lambda t: t.long()},
    "dimensions": {"bias": lambda t: t[0]},
    "heads": {"bias": lambda t: t[:3]},
    "keys": {"bias": lambda t: t[:, :5]},
    "declared length": {"table": lambda t: t[:, :1]},
    "no dtype": {"ids": lambda t: [1]},
    "number": {"gate": lambda t: 1.5},
    "unknown": {"biass": lambda t: 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_capture_is_the_same_error_in_a_compiled_function(name):
    given = captured()
    for tensor, function in WRONG[name].items():
        given[tensor] = function(given.get(tensor))
    compiled = torch.compile(lambda q, k, v: OP(q, k, v, **given, window=2), backend="eager")
    with pytest.raises(InputError):
        compiled(*operands())


def test_an_undeclared_gradient_is_the_same_error_in_a_compiled_function():
    slope = fg.Tensor("slope", ("heads",))
    op = fg.attention(
        fg.AttentionSpec(
            score_mod=lambda s, b, h, q, k: s + slope[h] * k, head_dim=16, dtype="float32"
        )
    )
    compiled = torch.compile(lambda *t, slope: op(*t, slope=slope), backend="aot_eager")
    with pytest.raises(InputError, match="does not declare"):
        compiled(*operands(), slope=torch.rand(4, requires_grad=True))
    compiled(*operands(), slope=torch.rand(4))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_its_captures_and_serves_other_lengths(strict, tmp_path):
    layer = Layer()
    length = torch.export.Dim("length", min=2, max=12)
    tensors = tuple(operands(False))
    program = torch.export.export(
        layer, tensors, dynamic_shapes=({2: length}, None, None), strict=strict
    )
    torch.export.save(program, tmp_path / "layer.pt2")
    again = torch.export.load(tmp_path / "layer.pt2").module()
    for seq in (9, 5):
        q = tensors[0][:, :, :seq]
        torch.testing.assert_close(again(q, *tensors[1:]), layer(q, *tensors[1:]))
