"""torch.compile and torch.export: one node, no graph breaks, no recompiling without a reason."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config

import flashgen as fg
from flashgen.shared.errors import InputError
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

WINDOW = fg.Scalar("window", "int32")
SPEC = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
    head_dim=16,
    dtype="float32",
    dropout=True,
    name="compiled",
)
OP = fg.attention(SPEC)


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def operands(seq=20, learnt=True):
    return [t.requires_grad_(learnt) for t in Case(seq, seq + 3, 2, 4, 2, "float32", 16).tensors()]


def counting(function, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def attend(q, k, v, p, offset, window, rng=None):
    return OP(q, k, v, dropout_p=p, q_offset=offset, window=window, rng=rng)


def same_as_eager(compiled, seq, p, offset, window, rng=None):
    """Output and gradients of the compiled function are those of the plain one."""
    results = []
    for function in (compiled, attend):
        tensors = operands(seq)
        torch.manual_seed(seq)
        out = function(*tensors, p, offset, window, rng)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.stride() == other.stride()


# Lengths of 0 and 1 are left out: torch compiles those apart, whatever the graph is.
CALLS = [
    (20, 0.1, 16, 5),
    (33, 0.2, 32, 6),
    (47, 0.5, 96, 17),
    (64, 0.17, -16, 1000),
    (129, 0.9, 48, 3),
]


def test_one_graph_serves_all_lengths_probabilities_offsets_and_scalars():
    torch._dynamo.utils.counters.clear()  # of what other tests compiled
    compiled, counter = counting(attend, dynamic=True)
    for call in CALLS:
        same_as_eager(compiled, *call)
    assert counter.frame_count == 1
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_by_default_the_second_length_makes_the_graph_general():
    compiled, counter = counting(attend)
    for call in CALLS:
        same_as_eager(compiled, *call)
    assert counter.frame_count == 2


@pytest.mark.parametrize("p", [slow(0.3), torch.tensor(0.3)])
def test_states_and_seeds_do_not_recompile(p):
    compiled, counter = counting(attend, dynamic=True)
    outs = []
    for seed in range(4):
        same_as_eager(compiled, 20, p, 0, 9, torch.tensor([seed, 7]))
        torch.manual_seed(seed)
        with torch.no_grad():
            outs.append(compiled(*operands(), p, 0, 9, torch.tensor([seed, 7])))
    assert counter.frame_count <= 2  # with gradients and without
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("first", [0.0, slow(0.2)])
def test_a_probability_of_0_needs_no_graph_of_its_own(first):
    compiled, counter = counting(attend, dynamic=True)
    state = torch.tensor([3, 4])
    for p in (first, 0.0, 0.4, 0.0, 0.5):
        same_as_eager(compiled, 20, p, 0, 9, state)
    assert counter.frame_count == 1


def test_a_call_without_a_probability_draws_no_numbers_in_a_graph_of_any_sizes():
    compiled, counter = counting(lambda q, k, v: OP(q, k, v, window=9), dynamic=True)
    tensors, before = operands(learnt=False), torch.get_rng_state()
    torch.testing.assert_close(compiled(*tensors), OP(*tensors, window=9))
    assert torch.equal(torch.get_rng_state(), before)
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_are_compared_when_the_graph_runs():
    def chosen(q, k, v, of_k, of_v):
        return OP(q, k[:, :, of_k.nonzero()[:, 0]], v[:, :, of_v.nonzero()[:, 0]], window=9)

    compiled, counter = counting(chosen)
    tensors, places = operands(learnt=False), torch.arange(23)
    for of_k, of_v in ((places < 9, places > 13), (places < 12, places % 2 == 0)):
        expected = chosen(*tensors, of_k, of_v)
        torch.testing.assert_close(compiled(*tensors, of_k, of_v), expected)
    with pytest.raises(InputError, match="k and v"):
        compiled(*tensors, places < 9, places < 8)
    assert counter.frame_count == 1


class Layer(torch.nn.Module):
    def __init__(self, op=OP):
        super().__init__()
        self.attend = op
        self.project = torch.nn.Linear(16, 16)
        self.p = 0.1

    def forward(self, q, k, v):
        p = self.p if self.training else 0.0
        return self.attend(self.project(q), k, v, dropout_p=p, window=9)


@pytest.mark.slow
def test_a_module_holds_the_operator_and_its_probability():
    layer = Layer()
    compiled, counter = counting(layer, dynamic=True)
    for seq, layer.p in ((20, 0.1), (30, 0.2), (40, 0.5)):
        torch.manual_seed(0)
        mine = compiled(*operands(seq))
        torch.manual_seed(0)
        torch.testing.assert_close(mine, layer(*operands(seq)))
    assert counter.frame_count == 1
    layer.eval()
    torch.testing.assert_close(compiled(*operands()), layer(*operands()))
    assert counter.frame_count == 2


def test_lse_and_options_are_traced():
    def both(q, k, v, state):
        return OP(
            q, k, v, window=9, return_lse=True, scale=0.5, backend="tiled", arch="sm_80",
            deterministic=True, dropout_p=0.5, rng=state, k_offset=-16,
        )  # fmt: skip

    compiled, counter = counting(both, backend="eager")
    state = torch.tensor([1, 2])
    for mine, other in zip(compiled(*operands(), state), both(*operands(), state), strict=True):
        torch.testing.assert_close(mine, other)
    nodes = [str(n.target) for n in counter.graphs[0].graph.nodes if n.op == "call_function"]
    assert nodes.count(f"flashgen.{OP.name}.default") == 1


def test_the_emulator_runs_in_a_compiled_function():
    spec = SPEC.replace(dtype="float16", name="compiled_half")
    op = fg.attention(spec)
    compiled, _ = counting(lambda q, k, v: op(q, k, v, window=9, backend="emulator"))
    tensors = [t.detach().half().requires_grad_() for t in operands()]
    out = compiled(*tensors)
    assert op.report.backend == "emulator"
    out.sum().backward()
    assert {report.backend for report in op.backward_reports} == {"emulator"}
    assert torch.equal(out, op(*tensors, window=9, backend="emulator"))


def test_autocast_around_and_inside_a_compiled_function():
    def inside(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return OP(q, k, v, window=9)

    def plain(q, k, v):
        return OP(q, k, v, window=9)

    wanted = inside(*operands())
    assert torch.equal(counting(inside)[0](*operands()), wanted)
    compiled, _ = counting(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(*operands()), wanted)
    assert compiled(*operands()).dtype == torch.float32


def test_transforms_of_torch_func_compile():
    tensors = operands(learnt=False)

    def loss(q, k, v):
        return OP(q, k, v, window=9).square().sum()

    def gradient(q, k, v):
        return torch.func.grad(loss)(q, k, v)

    def mapped(q, k, v):
        return torch.vmap(loss, in_dims=(0, None, None))(q, k, v)

    for function, q in ((gradient, tensors[0]), (mapped, torch.stack([tensors[0]] * 3))):
        compiled, _ = counting(function)
        torch.testing.assert_close(compiled(q, *tensors[1:]), function(q, *tensors[1:]))


CAP, ON = fg.Scalar("cap", "float32"), fg.Scalar("on", "bool")
CAPPED = fg.attention(
    fg.AttentionSpec(
        lambda b, h, q, k: (q >= k) | ON,
        lambda s, b, h, q, k: CAP * fg.tanh(s / CAP),
        head_dim=16,
        dtype="float32",
        name="capped_while_compiled",
    )
)


@pytest.mark.parametrize("dynamic", [None, slow(True)])
def test_scales_and_scalars_that_are_floats_share_a_graph(dynamic):
    def call(q, k, v, scale, cap):
        return CAPPED(q, k, v, scale=scale, cap=cap, on=False)

    compiled, counter = counting(call, dynamic=dynamic)
    for place in range(10):
        tensors, numbers = operands(), (0.12 + place / 10, 3.1 + place)
        results = []
        for function in (compiled, call):
            out = function(*tensors, *numbers)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other)
    assert counter.frame_count <= 2


WRONG = [
    (lambda q, k, v: (q, k[:1], v), {}),
    (lambda q, k, v: (q[0], k, v), {}),
    (lambda q, k, v: (q, k, v.half()), {}),
    (lambda q, k, v: (q, [k], v), {}),
    (lambda q, k, v: (q, k[:, :, 1:], v), {}),
    *(
        (lambda q, k, v: (q, k, v), options)
        for options in (
            {"windw": 3},
            {"is_causal": True},
            {"unheard_of": 3},
            {"window": True},
            {"q_offset": 0.5},
            {"scale": -1.0},
            {"scale": "small"},
            {"scale": torch.tensor(0.5)},
            {"dropout_p": 1.5},
            {"dropout_p": "some"},
            {"dropout_p": 0.5, "rng": torch.tensor([1])},
            {"backend": "cudnn"},
            {"arch": 80},
            {"deterministic": "yes"},
            {"return_lse": "yes"},
            {"h_offset": -1},
        )
    ),
]
WHEN_RUN = [
    (lambda q, k, v: (q.transpose(2, 3).contiguous().transpose(2, 3), k, v), {}),
    (lambda q, k, v: (q, k, v), {"backend": "gpu"}),
]
"""Mistakes that are found when the graph runs."""


@pytest.mark.parametrize(("wrong", "options"), one_in(6, [*WRONG, *WHEN_RUN]))
def test_wrong_input_is_the_same_error_in_a_compiled_function(wrong, options):
    given = {"window": 9, **options}
    compiled = torch.compile(lambda q, k, v: OP(q, k, v, **given), backend="eager")
    with pytest.raises(InputError):
        compiled(*wrong(*operands()))


@pytest.mark.parametrize(("wrong", "options"), one_in(7, WRONG))
def test_with_fullgraph_the_error_is_that_of_the_call(wrong, options):
    given = {"window": 9, **options}
    arguments = wrong(*operands())
    with pytest.raises(InputError) as plain:
        OP(*arguments, **given)
    compiled, _ = counting(lambda q, k, v: OP(q, k, v, **given), backend="eager")
    with pytest.raises(InputError) as traced:
        compiled(*arguments)
    assert (traced.value.what, traced.value.way_out) == (plain.value.what, plain.value.way_out)


def test_with_fullgraph_and_symbols_the_error_has_the_numbers():
    compiled, _ = counting(lambda q, k, v: OP(q, k, v, window=9), dynamic=True)
    q, k, v = operands()
    with pytest.raises(InputError, match="differ in length") as caught:
        compiled(q, k[:, :, 1:], v)
    assert "k (2, 2, 22, 16), v (2, 2, 23, 16)" in caught.value.numbers


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_draws_from_the_seed_of_torch():
    """Its random numbers are its own: the same seed gives the same call, not that of eager mode."""
    found = []
    compiled = torch.compile(
        lambda q, k, v: OP(q, k, v, dropout_p=0.3, window=9), fullgraph=True, dynamic=True
    )
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        tensors = operands()
        out = compiled(*tensors)
        found.append((out, *torch.autograd.grad(out.sum(), tensors)))
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])
    # Elements are dropped for all that: the gradient of V has rows of less than all of P.
    kept = OP(*operands(), window=9)
    assert not torch.allclose(found[0][0], kept)


@pytest.mark.parametrize("training", [True, slow(False)])
@pytest.mark.parametrize("strict", [True, slow(False)])
def test_an_exported_program_serves_other_lengths(strict, training):
    layer = Layer().train(training)
    length = torch.export.Dim("length", min=2, max=4096)
    keys = torch.export.Dim("keys", min=2, max=4096)
    program = torch.export.export(
        layer,
        tuple(operands(learnt=False)),
        dynamic_shapes=({2: length}, {2: keys}, {2: keys}),
        strict=strict,
    )
    nodes = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert nodes.count(f"flashgen.{OP.name}.default") == 1
    for seq in (20, 55):
        tensors = operands(seq, learnt=False)
        torch.manual_seed(seq)
        mine = program.module()(*tensors)
        torch.manual_seed(seq)
        torch.testing.assert_close(mine, layer(*tensors))


def mass_of_blocks(q, k, v):
    return OP(q, k, v, window=40, return_aux=fg.AuxRequest(block_mass=4))[1].block_mass


def test_one_graph_serves_all_numbers_of_blocks():
    compiled, counter = counting(mass_of_blocks, dynamic=True)
    for seq in (20, 33, 64, 129):
        tensors = operands(seq, learnt=False)
        torch.testing.assert_close(compiled(*tensors), mass_of_blocks(*tensors))
    assert counter.frame_count == 1


def test_an_exported_program_serves_other_numbers_of_blocks():
    class Masses(torch.nn.Module):
        def forward(self, q, k, v):
            return mass_of_blocks(q, k, v)

    tensors = operands(learnt=False)
    length, keys = (torch.export.Dim(name, min=5, max=1020) for name in ("length", "keys"))
    shapes = ({2: length}, {2: keys}, {2: keys})
    program = torch.export.export(Masses(), tuple(tensors), dynamic_shapes=shapes)
    for seq in (9, 55):
        tensors = operands(seq, learnt=False)
        torch.testing.assert_close(program.module()(*tensors), mass_of_blocks(*tensors))


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", slow("inductor")])
@pytest.mark.parametrize("budget", [slow(1.0), 0.5, slow(0.1), slow(0.01)])
def test_both_passes_drop_the_same_elements_under_a_memory_budget(budget, backend):
    """out is linear in v: its sum is that of dv * v where both passes drop alike."""
    with functorch_config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        compiled = torch.compile(
            lambda q, k, v: OP(q.sin().exp(), k, v, dropout_p=0.5, window=30),
            backend=backend,
            fullgraph=True,
        )
        q, k, v = operands()
        out = compiled(q, k, v)
        (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum(), rtol=1e-4, atol=1e-4)


def test_a_memory_budget_of_0_takes_no_random_state_made_in_the_graph():
    def drop(q, k, v, rng=None):
        return OP(q.sin().exp(), k, v, dropout_p=0.5, window=30, rng=rng)

    backend = "aot_eager_decomp_partition"
    with functorch_config.patch(activation_memory_budget=0, enable_autograd_cache=False):
        compiled = torch.compile(drop, backend=backend, fullgraph=True)
        with pytest.raises(BackendCompilerFailed, match="would drop other elements") as caught:
            compiled(*operands())
        # torch wraps whatever a backend raises; ours is inside of it, and all that it says is read.
        inner = caught.value.inner_exception
        assert isinstance(inner, InputError)
        assert str(inner) in str(caught.value)
        q, k, v = operands()
        out = compiled(q, k, v, torch.tensor([3, 4]))
        (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_compiled_autograd_has_one_node_for_the_backward_pass(p):
    rng, targets, found = torch.tensor([3, 4]), [], []

    def compiler(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def compiled():
        return compiled_autograd._enable(torch.compile(backend=compiler, fullgraph=True))

    for context in (nullcontext, compiled):
        tensors = operands()
        out = attend(*tensors, p, 16, 5, rng)
        with context():
            out.square().sum().backward()
        found.append([tensor.grad for tensor in tensors])
    assert [name for name in targets if "flashgen" in name] == [
        f"flashgen.{OP.name}_backward.default"
    ]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_an_exported_program_can_be_saved(tmp_path):
    layer = Layer().eval()
    tensors = tuple(operands(learnt=False))
    torch.export.save(torch.export.export(layer, tensors), tmp_path / "layer.pt2")
    again = torch.export.load(tmp_path / "layer.pt2")
    torch.testing.assert_close(again.module()(*tensors), layer(*tensors))


def test_lengths_that_depend_on_data_are_traced():
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:

        def packed(q, k, v, keep):
            return OP(q[:, :, keep.nonzero().flatten()], k, v, window=9)

        compiled, counter = counting(packed)
        q, k, v = operands(learnt=False)
        for count in (5, 11):
            keep = torch.arange(20) < count
            torch.testing.assert_close(compiled(q, k, v, keep), packed(q, k, v, keep))
        assert counter.frame_count == 1
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


def test_reports_are_of_the_last_call_also_where_it_was_compiled() -> None:
    op = fg.attention(fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=16, name="reported"))
    q, k, v = Case(16, 16, 1, 2, 1, "float16", 16).tensors(seed=3)
    how = {"backend": "emulator", "arch": "sm_80"}
    compiled = torch.compile(lambda *x: op(*x, **how), backend="aot_eager", fullgraph=True)
    names = []
    for _ in range(2):
        compiled(q, k, v)
        names.append(op.report.kernel.source.name)
        op(q[:, 1:], k, v, h_offset=1, whole={"heads": 2}, **how)
        names.append(op.report.kernel.source.name)
    assert names == 2 * names[:2]
    assert names[0] != names[1]
