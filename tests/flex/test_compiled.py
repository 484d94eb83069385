"""flex_attention under torch.compile: torch's own function, and fg.flex_attention, as one node.

torch's function refuses gradients, and log-sum-exps that are returned, on CPU tensors, in Python
and before its operator. Tests of torch's function replace that check, `_validate_device`, and take
the way of a user's code otherwise; those of fg.flex_attention replace nothing.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

import flashgen as fg
from flashgen.frontends.flex import compiled, torch_hop
from flashgen.integrations.torch import FlashOperatorWarning, register_flex, unregister_flex
from flashgen.shared.errors import InputError, SpecError
from tests.support.compiled_flex import assert_same, compile, expected, operands
from tests.support.flex_mods import causal_mask, noise
from tests.support.tiers import one_in, slow

pytestmark = pytest.mark.filterwarnings("error::flashgen.integrations.torch.FlashOperatorWarning")

Tensor = torch.Tensor
HOP = torch.ops.higher_order.flex_attention


# ---- torch's function ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [slow("eager"), "aot_eager", slow("inductor")])
def test_captured_tensors_have_gradients_and_lengths_are_dynamic(registered, backend):
    bias = torch.nn.Parameter(noise(4, 96))
    documents = torch.arange(96) // 20

    def mask(b, h, q, k):
        return (q >= k) & (documents[q] == documents[k])

    def score(s, b, h, q, k):
        return 5 * torch.tanh(s / 5) + bias[h, k]

    def user(q, k, v, block_mask):
        return flex_attention(q * 1.0, k, v, score, block_mask, return_lse=True)

    function, counter = compile(user, backend)
    for seq in (40, 64, 56, 72):
        q, k, v = operands(seq=seq)
        block_mask = create_block_mask(mask, None, None, seq, seq, device="cpu", BLOCK_SIZE=32)
        inputs = [q, k, v, bias]
        assert_same(function(q, k, v, block_mask), expected(q, k, v, score, mask), inputs)
    assert counter.frame_count <= 3  # one length, any length, another number of blocks


def graph_of(function: Any, *arguments: Any) -> list[str]:
    """The operators of the forward graph that AOTAutograd makes, without views and numbers."""
    graphs: list[Any] = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append(module.graph)
        return module

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda m, i: make_boxed_func(keep(m, i)))
    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return [str(n.target) for n in graphs[0].nodes if n.op == "call_function"]


def test_a_call_is_one_operator_of_flashgen(registered):
    q, k, v = operands()
    names = graph_of(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, q, k: s * 2), q, k, v)
    assert sum(name.startswith("flashgen.") for name in names) == 1
    assert not any("flex_attention" in name for name in names)


def scored(ofHeads):
    return lambda s, b, h, q, k: s + ofHeads[h]


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(noise(3))

    def forward(self, s, b, h, q, k):
        return s * self.gate[h] - 0.125  # a mod of its own: equal mods share their names


SHORT = noise(3)


@pytest.mark.parametrize(
    ("score", "name"),
    [
        (scored(noise(3)), "ofHeads"),
        (lambda s, b, h, q, k: s - SHORT[h], "SHORT"),
        (Gate(), "gate"),
    ],
)
def test_errors_name_the_variable_of_a_captured_tensor(registered, score, name):
    q, k, v = operands(seq=24)
    function = torch.compile(flex_attention, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(InputError, match=rf"\b{name}\b") as caught:
        function(q, k, v, score)
    assert "3" in caught.value.numbers


def test_layers_with_numbers_and_parameters_of_their_own_share_kernels(registered):
    class Layer(torch.nn.Module):
        def __init__(self, slope: float, seed: int):
            super().__init__()
            self.slope, self.bias = slope, torch.nn.Parameter(noise(4, 40, seed=seed))

        def score(self, s, b, h, q, k):
            return s * self.slope + self.bias[h, k]

        def forward(self, q, k, v):
            return flex_attention(q, k, v, self.score)

    layers = [Layer(slope, seed) for seed, slope in enumerate((1.5, 1.25, 0.75))]
    q, k, v = operands()

    def user(q, k, v):
        return [layer(q, k, v) for layer in layers]

    names = [name for name in graph_of(user, q, k, v) if name.startswith("flashgen.")]
    assert len(names) == 3
    assert len(set(names)) == 2  # the first value is a constant, the others are scalars
    torch._dynamo.reset()
    wanted = [expected(q, k, v, layer.score)[0] for layer in layers]
    biases = [layer.bias for layer in layers]
    assert_same(compile(user)[0](q, k, v), wanted, [q, k, v, *biases])


def test_an_integer_that_changes_is_a_scalar_of_one_kernel(registered):
    def user(q, k, v, window):
        def score(s, b, h, q, k):
            return torch.where(q - k < 2 * window, s, -torch.inf)

        return flex_attention(q, k, v, score)

    function, counter = compile(user, dynamic=True)
    for window in (3, 5, 9):
        q, k, v = operands()
        wanted = expected(q, k, v, mask=lambda b, h, q, k, end=2 * window: q - k < end)[:1]
        assert_same([function(q, k, v, window)], wanted, [q, k, v])
    assert counter.frame_count == 1


@pytest.mark.slow
def test_an_integer_that_can_only_be_a_constant_is_guarded(registered):
    table = noise(8)

    def user(q, k, v, start):
        return flex_attention(q, k, v, lambda s, b, h, q, k: s + table[start:][h])

    function, _ = compile(user, dynamic=True)
    for start in (2, 3, 4):
        q, k, v = operands()
        wanted = expected(q, k, v, lambda s, b, h, q, k, rest=table[start:]: s + rest[h])[:1]
        assert_same([function(q, k, v, start)], wanted, [q, k, v])


COMPUTED = {
    "compared": (lambda n: lambda s, b, h, q, k: s * 2 if n > 8 else s + k, 3),
    "divided": (lambda n: lambda s, b, h, q, k: s * (1.0 / n), 2),
    "a root": (lambda n: lambda s, b, h, q, k: s * math.sqrt(n) + n // 2 * k, 2),
    "a float compared": (lambda n: lambda s, b, h, q, k: s if 1.0 / n > 0.1 else s * 2, 3),
    "a half of a mask": (
        lambda n: lambda s, b, h, q, k: torch.where(q - k < n / 2, s, -torch.inf),
        2,
    ),
}


@pytest.mark.parametrize("attention", [flex_attention, slow(fg.flex_attention)])
@pytest.mark.parametrize(("mod", "graphs"), one_in(5, COMPUTED.values(), 3), ids=COMPUTED)
def test_what_python_computes_of_an_integer_that_changes(registered, attention, mod, graphs):
    function, counter = compile(lambda q, k, v, n: attention(q, k, v, mod(n)))
    for number in (7, 11, 4, 13):
        q, k, v = operands()
        assert_same([function(q, k, v, number)], expected(q, k, v, mod(number))[:1], [q, k, v])
    assert counter.frame_count == graphs


def test_a_float_that_changes_is_read_from_a_tensor(registered):
    def user(q, k, v, cap):
        return flex_attention(q, k, v, lambda s, b, h, q, k: cap * torch.tanh(s / cap))

    function, counter = compile(user, dynamic=True)
    for cap in (0.5, 0.75, 1.5):
        q, k, v = operands()
        wanted = expected(q, k, v, lambda s, b, h, q, k, c=cap: c * torch.tanh(s / c))[:1]
        assert_same([function(q, k, v, cap)], wanted, [q, k, v])
    assert counter.frame_count <= 2


def two_blocks(mask_mod: Any = None) -> BlockMask:
    """Blocks on the diagonal alone, which no mask implies."""
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, mask_mod=mask_mod)


def on_diagonal(b, h, q, k):
    return q // 32 == k // 32


@pytest.mark.parametrize("mask_mod", [None, causal_mask])
def test_blocks_that_no_mask_implies_are_followed(registered, mask_mod):
    q, k, v = operands(seq=64)
    block_mask = two_blocks(mask_mod)
    function, _ = compile(lambda q, k, v, m: flex_attention(q, k, v, None, m))
    masks = [mask for mask in (on_diagonal, mask_mod) if mask is not None]
    keep = lambda *places: torch.stack([mask(*places) for mask in masks]).all(0)  # noqa: E731
    assert_same([function(q, k, v, block_mask)], expected(q, k, v, mask=keep)[:1], [q, k, v])


def test_block_lists_are_left_out_on_a_promise(registered):
    register_flex(block_lists=False)
    q, k, v = operands(seq=64)

    def user(q, k, v, block_mask):
        return flex_attention(q, k, v, None, block_mask)

    block_mask = create_block_mask(causal_mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    assert not any("argsort" in name for name in graph_of(user, q, k, v, block_mask))

    def removing(q, k, v, block_mask):  # a mask of the kernels, but not of the BlockMask
        score = lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf)  # noqa: E731
        return flex_attention(q, k, v, score, block_mask)

    for function in (user, removing):
        torch._dynamo.reset()
        assert any("sort" in name for name in graph_of(function, q, k, v, two_blocks()))


def test_heads_in_groups_and_a_scale(registered):
    q, k, v = operands(heads_kv=2)

    def user(q, k, v):
        return flex_attention(q, k, v, scale=0.5, enable_gqa=True)

    function, _ = compile(user)
    wanted = expected(q * 2, k, v)[:1]  # 0.5 is twice the default at head_dim 16
    assert_same([function(q, k, v)], wanted, [q, k, v])


def test_head_dims_that_no_kernel_has_are_padded(registered):
    q, k, v = (x[..., :12].detach().requires_grad_() for x in operands())
    function, _ = compile(flex_attention)
    assert_same([function(q, k, v)], expected(q, k, v)[:1], [q, k, v])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", [slow("eager"), "aot_eager", None])
def test_inference_tensors_take_the_same_kernels(registered, backend, monkeypatch):
    calls: list[Any] = []
    attend = compiled._attend
    monkeypatch.setattr(compiled, "_attend", lambda *a: (calls.append(a), attend(*a))[1])

    def user(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, q, k: s * 2)

    with torch.inference_mode():
        q, k, v = (x.clone() for x in operands(learn=False))
        out = (compile(user, backend)[0] if backend else user)(q, k, v)
        torch.testing.assert_close(out.double(), expected(q * 2, k, v)[0], atol=1e-5, rtol=1e-5)
    assert calls


def test_auxiliary_results_are_those_of_torch(registered):
    q, k, v = operands()
    function, _ = compile(lambda q, k, v: flex_attention(q, k, v, return_aux=AuxRequest(lse=True)))
    out, aux = function(q, k, v)
    assert aux.max_scores is None
    assert_same([out, aux.lse], expected(q, k, v), [q, k, v])


@pytest.mark.parametrize("own", [False, slow(True)])
def test_the_largest_score_of_each_row_is_that_after_score_mod(registered, own):
    q, k, v = operands()
    mask = lambda b, h, q, k: (q > 3) & (q >= k)  # noqa: E731
    score = lambda s, b, h, q, k: 2 * torch.tanh(s) + k * 0.01  # noqa: E731
    block_mask = create_block_mask(mask, None, None, 40, 40, device="cpu")

    def user(q, k, v):
        if own:
            request = AuxRequest(max_scores=True)
            return fg.flex_attention(q, k, v, score, block_mask, return_aux=request)[1].max_scores
        # below torch's Python, which refuses the request on CPU tensors
        given = q, k, v, score, block_mask.as_tuple(), 0.25
        return HOP(*given, {"BACKEND": "AUTO", "OUTPUT_MAX": True})[2] * math.log(2)

    found = compile(user)[0](q, k, v)
    rows, keys = torch.arange(40)[:, None], torch.arange(40)
    scores = score((q @ k.mT) * 0.25, 0, 0, rows, keys)
    wanted = scores.masked_fill(~mask(0, 0, rows, keys), -torch.inf).amax(-1)
    torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=1e-5)


def test_rows_without_keys_are_zeros(registered):
    q, k, v = operands()
    mask = lambda b, h, q, k: (q > 3) & (q >= k)  # noqa: E731
    function, _ = compile(lambda *t: flex_attention(*t, return_lse=True))
    block_mask = create_block_mask(mask, None, None, 40, 40, device="cpu")
    out, lse = function(q, k, v, None, block_mask)
    assert (out[:, :, :4] == 0).all()
    assert (lse[:, :, :4] == -torch.inf).all()


@pytest.mark.parametrize("mod", ["mask", "score"])
def test_tensors_that_a_mod_makes_are_constants_of_the_graph(registered, mod):
    def slopes(s, b, h, q, k):
        return s + torch.tensor([0.5, 0.25, 0.125, 0.0])[h] * (k - q)

    def stripes(b, h, q, k):
        return torch.tensor([True, False, True])[k % 3] | (q == k)

    q, k, v = operands()
    score, mask = (slopes, None) if mod == "score" else (None, stripes)
    block_mask = mask and create_block_mask(mask, None, None, 40, 40, device="cpu")
    function, _ = compile(lambda q, k, v, m: flex_attention(q, k, v, score, m))
    assert_same([function(q, k, v, block_mask)], expected(q, k, v, score, mask)[:1], [q, k, v])


@pytest.mark.slow
def test_autocast_casts_before_the_operator(registered):
    q, k, v = operands()
    function, _ = compile(flex_attention)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected(q, k, v)[0], atol=3e-2, rtol=3e-2)


@pytest.mark.slow
def test_checkpoints_compute_a_call_again(registered):
    from torch.utils.checkpoint import checkpoint

    bias = noise(4, 40).requires_grad_()

    def block(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[h, k])

    function, _ = compile(lambda q, k, v: checkpoint(block, q, k, v, use_reentrant=False))
    q, k, v = operands()
    score = lambda s, b, h, q, k: s + bias[h, k]  # noqa: E731
    assert_same([function(q, k, v)], expected(q, k, v, score)[:1], [q, k, v, bias])


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_an_exported_program_contains_the_operator(registered):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(noise(4, 40))

        def forward(self, q, k, v):
            return flex_attention(q, k, v, lambda s, b, h, q, k: s + self.bias[h, k])

    layer, tensors = Layer(), tuple(operands(learn=False))
    program = torch.export.export(layer, tensors).run_decompositions()
    names = [str(node.target) for node in program.graph.nodes]
    assert sum(name.startswith("flashgen.") for name in names) == 1
    torch.testing.assert_close(program.module()(*tensors), layer(*tensors))


@pytest.mark.slow
def test_torchs_caches_of_graphs_do_not_mix_the_kernels(registered, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    calls: list[Any] = []
    attend = compiled._attend
    monkeypatch.setattr(compiled, "_attend", lambda *a: (calls.append(a), attend(*a))[1])

    def count() -> int:
        torch._dynamo.reset()
        calls.clear()
        compile(lambda q, k, v: flex_attention(q, k, v), "inductor")[0](*operands(learn=False))
        return len(calls)

    for registering, counted in ((False, False), (True, True), (False, False), (True, True)):
        (register_flex if registering else unregister_flex)()
        assert bool(count()) == counted


def test_a_call_on_a_gpu_is_traced_without_one():
    """Tensors without contents: torch's function and its checks as they are."""
    from torch._subclasses import FakeTensorMode

    torch._dynamo.reset()
    register_flex(block_lists=False)  # this torch cannot index lists of blocks on a GPU
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        bias, documents = (torch.empty(4, 64, device="cuda", dtype=t) for t in (q.dtype, torch.int))
        lists = [
            torch.empty(shape, device="cuda", dtype=torch.int) for shape in ((1,) * 3, (1,) * 4)
        ]

        def mask(b, h, q, k):
            return documents[h, q] == documents[h, k]

        def score(s, b, h, q, k):
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=s.device)
            return s + bias[h, k] + slopes[h] * (k - q)

        block_mask = BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=64, mask_mod=mask, seq_lengths=(64, 64), compute_q_blocks=False
        )

        def user(q, k, v):
            out, aux = flex_attention(q, k, v, score, block_mask, return_aux=AuxRequest(lse=True))
            return out, aux.lse

        names = graph_of(user, q, k, v)
    unregister_flex()
    torch._dynamo.reset()
    assert sum(name.startswith("flashgen.") for name in names) == 1


# ---- what is not served --------------------------------------------------------------------------


def not_served() -> dict[str, Any]:
    def bessel(s, b, h, q, k):
        return torch.special.bessel_j0(s)

    return {
        "BACKEND TRITON": lambda t: flex_attention(*t, kernel_options={"BACKEND": "TRITON"}),
        "torch.float64": lambda t: flex_attention(*[x.double() for x in t]),
        "bessel_j0": lambda t: flex_attention(*t, bessel),
        "head_dim 640": lambda t: flex_attention(*[x.repeat(1, 1, 1, 40) for x in t]),
    }


def test_heads_without_a_tile_on_a_gpu_are_not_served_there() -> None:
    assert not compiled.why_no_tile(512, 512, torch.bfloat16, (9, 0))
    wide = compiled.why_no_tile(576, 576, torch.float32, (9, 0))
    assert wide.startswith("no tile fits in")
    assert "attention(head_dim=576" in wide
    assert "float32" in compiled.why_no_tile(320, 320, torch.float32, (8, 6))
    for dims in ((320, 320), (317, 100)):
        assert not compiled.why_no_tile(*dims, torch.float16, (8, 0))


@pytest.mark.parametrize("reason", one_in(4, not_served(), 3))
def test_what_is_not_served_takes_torchs_kernel_with_one_warning(registered, reason):
    call, given = not_served()[reason], operands(learn=False)
    with pytest.warns(FlashOperatorWarning, match=reason) as told:
        out = compile(call, "eager")[0](given)
    assert [each.filename for each in told if each.category is FlashOperatorWarning] == [__file__]
    unregister_flex()
    torch._dynamo.reset()
    torch.testing.assert_close(out, compile(call, "eager")[0](given))
    torch._dynamo.reset()
    register_flex()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlashOperatorWarning)
        compile(call, "eager")[0](given)
        call(given)


def test_unregistering_restores_torchs_kernels(monkeypatch):
    monkeypatch.setattr(compiled._state, "marked", False)
    if torch_hop.is_replaced():
        torch_hop.restore()
    before = dict(HOP.py_kernels), HOP._cacheable
    register_flex()
    register_flex()
    assert HOP.py_kernels != before[0]
    assert not HOP._cacheable
    unregister_flex()
    assert (HOP.py_kernels, HOP._cacheable) == before
    unregister_flex()
    assert (HOP.py_kernels, HOP._cacheable) == before


def test_a_torch_without_the_operator_is_named_with_what_it_lacks(monkeypatch):
    missing = (*torch_hop._NAMES, "torch.utils._python_dispatch._gone")
    monkeypatch.setattr(torch_hop, "_NAMES", missing)
    with pytest.raises(InputError, match=r"lacks torch\.utils\._python_dispatch\._gone"):
        register_flex()


def test_this_torch_has_all_private_names():
    torch_hop.check()
    assert torch_hop.example_of(3) == 3


# ---- fg.flex_attention ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_flashgens_own_function_is_one_node(backend):
    torch._dynamo.reset()
    bias = noise(4, 40).requires_grad_()

    def score(s, b, h, q, k):
        return s + bias[h, k]

    def user(q, k, v, block_mask):
        return fg.flex_attention(q, k, v, score, block_mask, return_lse=True)

    q, k, v = operands()
    block_mask = create_block_mask(causal_mask, None, None, 40, 40, device="cpu")
    function, counter = compile(user, backend)
    wanted = expected(q, k, v, score, causal_mask)
    assert_same(function(q, k, v, block_mask), wanted, [q, k, v, bias])
    assert counter.frame_count == 1


def test_flashgens_own_function_follows_blocks_that_no_mask_implies():
    torch._dynamo.reset()
    q, k, v = operands(seq=64)
    function, _ = compile(lambda q, k, v, m: fg.flex_attention(q, k, v, None, m))
    wanted = expected(q, k, v, mask=on_diagonal)[:1]
    assert_same([function(q, k, v, two_blocks())], wanted, [q, k, v])


def test_lengths_of_grouped_heads_and_of_block_masks_are_dynamic():
    torch._dynamo.reset()

    def user(q, k, v, block_mask):
        return fg.flex_attention(q * 1.0, k, v, None, block_mask, enable_gqa=True)

    function, counter = compile(user)
    for seq in (40, 64, 56, 72, 80):
        q, k, v = operands(seq=seq, heads_kv=2)
        block_mask = create_block_mask(causal_mask, None, None, seq, seq, device="cpu")
        wanted = expected(q, k, v, mask=causal_mask)[:1]
        assert_same([function(q, k, v, block_mask)], wanted, [q, k, v])
    assert counter.frame_count <= 2  # one length, any length


class Windowed(torch.nn.Module):
    """A layer with a learned slope and a mask of its own lengths, which it makes at each call."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(noise(4))

    def forward(self, q, k, v):
        def score(s, b, h, q, k):
            return s - self.slopes[h] * (q - k)

        def mask(b, h, q, k):
            return (q >= k) & (q - k < 17)

        lengths = q.shape[2], k.shape[2]
        block_mask = create_block_mask(mask, None, None, *lengths, device="cpu", BLOCK_SIZE=16)
        return fg.flex_attention(q, k, v, score, block_mask)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize("strict", [False, slow(True)])
def test_flashgens_own_function_is_exported_with_blocks_and_learned_tensors(strict):
    torch._dynamo.reset()
    layer, (q, k, v) = Windowed(), operands(seq=64, learn=False)
    batch = torch.export.Dim("batch", min=2, max=9)
    twice = [x.repeat(2, 1, 1, 1) for x in (q, k, v)]
    shapes = {name: {0: batch} for name in "qkv"}
    program = torch.export.export(layer, tuple(twice), strict=strict, dynamic_shapes=shapes)
    more = [x.repeat(3, 1, 1, 1) for x in (q, k, v)]
    loaded = saved_and_loaded(program)
    names = [str(node.target) for node in loaded.graph.nodes]
    assert sum(name.startswith("flashgen.") for name in names) == 1
    torch.testing.assert_close(loaded.module()(*more), layer(*more))


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_a_strict_export_holds_the_operator_in_the_dtype_of_autocast_and_can_be_saved():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return fg.flex_attention(q, k, v, lambda s, b, h, q, k: s * 2)

    torch._dynamo.reset()
    layer, tensors = Layer(), tuple(operands(learn=False))
    loaded = saved_and_loaded(torch.export.export(layer, tensors, strict=True))
    assert "flex_attention" not in str(loaded.graph_module.code).replace("flashgen.flex", "")
    found = loaded.module()(*tensors)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, layer(*tensors), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_blocks_with_elements_are_compared_while_an_export_is_traced():
    class Fixed(Windowed):
        def forward(self, q, k, v):
            return fg.flex_attention(q, k, v, None, block_mask)

    block_mask = create_block_mask(causal_mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    layer, tensors = Fixed(), tuple(operands(seq=64, learn=False))
    program = torch.export.export(layer, tensors)
    assert not any("layout" in node.name for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*tensors), layer(*tensors))


def test_flashgens_own_function_refuses_transforms_in_a_full_graph():
    def gradient(q, k, v):
        return torch.func.grad(lambda q: fg.flex_attention(q, k, v).sum())(q)

    torch._dynamo.reset()
    with pytest.raises(InputError, match=r"no rule for the transforms of torch\.func"):
        compile(gradient)[0](*operands(learn=False))


def test_mods_that_torch_cannot_trace_leave_a_break_in_the_graph(capsys):
    def told(s, b, h, q, k):
        print("executed")
        return s * 2

    def user(q, k, v):
        return fg.flex_attention(q, k, v, told) * 2

    torch._dynamo.reset()
    tensors = operands(learn=False)
    found = torch.compile(user, backend="eager")(*tensors)
    torch.testing.assert_close(found, user(*tensors))
    assert "executed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("same number of heads", lambda q: fg.flex_attention(q, q[:, :2], q[:, :2])),
        ("no argument 'is_causal'", lambda q: fg.flex_attention(q, q, q, is_causal=True)),
        ("4D tensors", lambda q: fg.flex_attention(q[0], q[0], q[0])),
    ],
)
def test_errors_of_symbolic_sizes_have_their_numbers(what, call):
    torch._dynamo.reset()
    with pytest.raises(InputError, match=what) as caught:
        torch.compile(call, backend="eager", fullgraph=True, dynamic=True)(operands()[0])
    assert "s0" not in caught.value.numbers


@pytest.mark.parametrize("fullgraph", [True, slow(False)])
def test_flashgens_own_function_raises_its_own_errors(fullgraph):
    def bessel(q, k, v):
        return fg.flex_attention(q, k, v, lambda s, b, h, q, k: torch.special.bessel_j0(s))

    torch._dynamo.reset()
    q, k, v = operands()
    with pytest.raises(SpecError, match="bessel_j0 cannot be expressed") as caught:
        torch.compile(bessel, backend="eager", fullgraph=fullgraph)(q, k, v)
    assert "test_compiled.py" in caught.value.where
    with pytest.raises(InputError, match="same number of heads"):
        torch.compile(fg.flex_attention, backend="eager", fullgraph=fullgraph)(q, k[:, :3], v)
