"""Models of diffusers on flashgen: the backend's arguments, specs of the user, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="the integration's models: pip install diffusers")

import diffusers
from diffusers.models import attention_dispatch as table
from diffusers.models.attention_dispatch import dispatch_attention_fn

import flashgen as fg
from flashgen.frontends.diffusers import dispatcher
from flashgen.integrations import diffusers as integration
from tests.support.kept_attention import from_rounded
from tests.support.tiers import slow
from tests.support.transformers_models import InFloat64, meet_the_rule

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


# ---- the arguments of a call ---------------------------------------------------------------------

Q, KV = (2, 30, 4, 20), (2, 33, 2, 20)
KEPT = drawn(2, 33) > -0.5
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.1},
    "padding": {"attn_mask": KEPT},
    "rows": {"attn_mask": drawn(30, 33) > -0.5},
    "heads": {"attn_mask": drawn(4, 30, 33)},
    "whole": {"attn_mask": drawn(2, 1, 1, 33)},
}


def attended(backend: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """The output and the gradients of q, k, v, and of a mask that is added to the scores."""
    inputs = [drawn(*shape, seed=at).to(dtype) for at, shape in enumerate((Q, KV, KV))]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(dtype)
        inputs.append(options["attn_mask"])
    inputs = [each.detach().requires_grad_() for each in inputs]
    if len(inputs) > 3:
        options["attn_mask"] = inputs[3]
    with diffusers.attention_backend(backend):
        out = dispatch_attention_fn(*inputs[:3], enable_gqa=True, **options)
    return [out, *torch.autograd.grad(out, inputs, drawn(*out.shape, seed=9).to(dtype))]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_that_of_the_native_backend(name: str) -> None:
    found = attended("flashgen", **CALLS[name])
    expected = attended("native", torch.float64, **CALLS[name])
    assert len(found) == len(expected)
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", CALLS)
def test_emitted_kernels_compute_a_call(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attended("native", torch.float64, **CALLS[name])
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    monkeypatch.setenv("FLASHGEN_ARCH", arch)
    found = attended("flashgen", torch.float16, **CALLS[name])
    assert integration.operators()[-1].report.backend == "emulator"
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, atol=2e-2, rtol=2e-2)


def test_dropout_is_that_of_the_operator() -> None:
    torch.manual_seed(3)
    found = attended("flashgen", dropout_p=0.25)[0]
    (op,) = integration.operators()
    assert op.spec.dropout
    q, k, v = (drawn(*shape, seed=at).transpose(1, 2) for at, shape in enumerate((Q, KV, KV)))
    q, k, v = (torch.nn.functional.pad(each, (0, 4)) for each in (q, k, v))
    torch.manual_seed(3)
    expected = op(q, k, v, scale=20**-0.5, dropout_p=0.25)
    assert torch.equal(found, expected[..., :20].transpose(1, 2))


def test_dynamic_floats_and_sizes_of_a_call_are_one_graph() -> None:
    q, k, v = (drawn(*shape) for shape in (Q, KV, KV))

    def call(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float) -> Tensor:
        options = {"dropout_p": dropout_p, "scale": scale}
        with diffusers.attention_backend("flashgen"):
            out: Tensor = dispatch_attention_fn(q, k, v, **options)
        return out

    torch._dynamo.reset()
    graph = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for scale in (0.1, 0.2):
        torch.testing.assert_close(graph(q, k, v, 0.0, scale), call(q, k, v, 0.0, scale))
    assert not torch.equal(graph(q, k, v, 0.5, 0.1), call(q, k, v, 0.0, 0.1))


def test_kinds_of_calls_that_are_new_in_a_graph_do_not_break_it() -> None:
    q, k, v = (drawn(*shape) for shape in (Q, KV, KV))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with diffusers.attention_backend("flashgen"):
            outs = [dispatch_attention_fn(q, k, v, is_causal=causal) for causal in (False, True)]
        return torch.stack(outs)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))


def test_the_log_sum_exp_has_a_column_for_each_head() -> None:
    q, k, v = (drawn(*shape) for shape in (Q, Q, Q))
    with diffusers.attention_backend("flashgen"):
        out, lse = dispatch_attention_fn(q, k, v, attention_kwargs={"return_lse": True})
    assert out.shape == Q
    exact = torch.einsum("bqhd,bkhd->bqhk", q, k).mul(20**-0.5).logsumexp(-1)
    torch.testing.assert_close(lse, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"attn_mask": torch.ones(2, 33, dtype=torch.int64)}, "a mask of integers"),
        ({"attn_mask": torch.ones(2, 40, dtype=torch.bool)}, "a mask for other sizes"),
        ({"attn_mask": drawn(3, 30, 33)}, "does not broadcast"),
        ({"parallel_config": object()}, "divided over processes"),
        ({"scale": -0.5}, r"scale is not a positive number below 2\^127"),
    ],
)
def test_what_has_no_kernel_is_refused_with_a_reason(options: dict[str, Any], what: str) -> None:
    with pytest.raises(fg.InputError, match=what):
        attended("flashgen", **options)


def test_a_head_without_a_kernel_is_refused_with_a_reason() -> None:
    q = drawn(1, 4, 1, 584)
    with diffusers.attention_backend("flashgen"), pytest.raises(fg.InputError, match="no kernel"):
        dispatch_attention_fn(q, q, q)


# ---- models --------------------------------------------------------------------------------------


def flux() -> tuple[Any, dict[str, Tensor]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": drawn(2, 36, 4),
        "encoder_hidden_states": drawn(2, 9, 32),
        "pooled_projections": drawn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.cartesian_prod(torch.arange(1.0), torch.arange(6.0), torch.arange(6.0)),
        "txt_ids": torch.zeros(9, 3),
    }
    return model, inputs


def wan() -> tuple[Any, dict[str, Tensor]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": drawn(2, 4, 3, 8, 8),
        "timestep": torch.tensor([3.0, 7.0]),
        "encoder_hidden_states": drawn(2, 9, 16),
    }
    return model, inputs


def qwen_image() -> tuple[Any, dict[str, Any]]:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    kept = torch.ones(2, 9, dtype=torch.bool)
    kept[1, 5:] = False
    inputs = {
        "hidden_states": drawn(2, 36, 16),
        "encoder_hidden_states": drawn(2, 9, 16),
        "encoder_hidden_states_mask": kept,
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 6, 6)]] * 2,
    }
    return model, inputs


MODELS = {"flux": flux, "wan": wan, "qwen_image": qwen_image}


def made(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():  # some parameters begin as 0, behind which nothing has a gradient
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model, inputs


def trained(
    name: str, backend: str, exact: bool = False, checkpoints: bool = False, graph: bool = False
) -> Any:
    """The output, and the gradients of all parameters for a fixed linear function of it."""
    model, inputs = made(name)
    model.set_attention_backend(backend)
    if checkpoints:
        model.enable_gradient_checkpointing()
    if exact:
        model.double()
        inputs = {
            name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in inputs.items()
        }
    with InFloat64() if exact else nullcontext():
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if graph else model
        out = call(**inputs).sample
        (out * drawn(*out.shape)).sum().backward()
    model.reset_attention_backend()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


def kept(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if attn_mask is not None:
        attn_mask = attn_mask[:, None, None] if attn_mask.dim() == 2 else attn_mask
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return from_rounded(scores, v).transpose(1, 2)


@pytest.mark.parametrize("name", ["qwen_image", slow("wan"), slow("flux")])
def test_a_model_meets_the_error_rule_in_training(name: str) -> None:
    found, same = trained(name, "flashgen"), trained(name, "native")
    assert len(integration.operators()) >= 1
    dispatcher.add("kept", kept)
    try:
        exact, of_kept = (trained(name, each, exact=True) for each in ("native", "kept"))
    finally:
        dispatcher.remove("kept")
    meet_the_rule(found, exact, [same], of_kept)


@pytest.mark.parametrize("name", [slow("flux"), "wan"])
def test_a_checkpointed_model_has_the_same_gradients(name: str) -> None:
    whole, again = trained(name, "flashgen"), trained(name, "flashgen", checkpoints=True)
    assert all(torch.equal(again[key], value) for key, value in whole.items())


@pytest.mark.parametrize("name", [slow("qwen_image"), slow("wan"), "flux"])
def test_a_model_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = made(name)
    model.set_attention_backend("flashgen")
    graph = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = graph(**inputs).sample
        assert torch.equal(found, model(**inputs).sample)
    model.reset_attention_backend()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_has_the_same_gradients(name: str) -> None:
    torch._dynamo.reset()
    expected, found = trained(name, "flashgen"), trained(name, "flashgen", graph=True)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-4, rtol=1e-4)


# ---- specs of the user ---------------------------------------------------------------------------


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keys at most one row and one column away, in frames of 4 x 4 tokens."""
    row, column = q // 4 % 4 - k // 4 % 4, q % 4 - k % 4
    return (fg.abs(row) <= 1) & (fg.abs(column) <= 1)


def test_layers_of_one_kind_take_a_spec_of_the_user() -> None:
    model, inputs = made("wan")
    bias = fg.Tensor("bias", ("heads",), "float32", grad=True)
    spec = fg.AttentionSpec(
        mask_mod=near,
        score_mod=lambda s, b, h, q, k: s + fg.where(q // 16 == k // 16, bias[h], 0.0),
    )
    learned = drawn(2).requires_grad_()
    integration.register("near", spec, bias=learned)
    try:
        for block in model.blocks:  # and not attn2, which attends to the text
            block.attn1.set_attention_backend("near")
        out = model(**inputs).sample
        (op,) = integration.operators()
        torch._dynamo.reset()
        graph = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(graph(**inputs).sample, out)
    finally:
        integration.unregister("near")
    assert op.spec.mask == spec.mask
    (found,) = torch.autograd.grad(out.square().sum(), learned)

    at = torch.arange(48)
    places = at // 4 % 4, at % 4
    mask = torch.stack([(x[:, None] - x).abs() <= 1 for x in places]).all(0)
    own = learned.detach().double().requires_grad_()

    def native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        added = own[:, None, None] * (at[:, None] // 16 == at // 16)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).double() + added
        p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (p @ v.double()).transpose(1, 2).float()

    dispatcher.add("near", native)
    try:
        expected = model(**inputs).sample
    finally:
        dispatcher.remove("near")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(expected.square().sum(), own)
    torch.testing.assert_close(found.double(), gradient, atol=1e-3, rtol=1e-3)


def test_the_mask_of_a_call_joins_that_of_the_spec() -> None:
    spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: fg.abs(q - k) <= 5)
    at = torch.arange(33)
    window = (at[:30, None] - at).abs() <= 5
    integration.register("window", spec)
    try:
        for mask in (KEPT, drawn(30, 33)):
            found = attended("window", attn_mask=mask, is_causal=True)[0]
            both = window & (at[:30, None] >= at)
            if mask.dtype == torch.bool:
                whole = both & mask[:, None, None]
            else:
                whole = mask.masked_fill(~both, -torch.inf)
            expected = attended("native", attn_mask=whole)[0]
            # A row without a key is 0 here and the mean of all values there, or NaN.
            rows = (whole if whole.dtype == torch.bool else whole > -torch.inf).any(-1)
            rows = rows.expand(2, 4, 30).transpose(1, 2)
            torch.testing.assert_close(found[rows], expected[rows], atol=1e-5, rtol=1e-5)
            assert not found[~rows].any()
    finally:
        integration.unregister("window")


def test_a_unet_takes_a_spec_by_a_processor() -> None:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        block_out_channels=(32,),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    inputs = drawn(2, 4, 8, 8), torch.tensor([1, 5]), drawn(2, 9, 16)
    expected = model(*inputs).sample
    op = fg.attention(fg.AttentionSpec(head_dim=8, dtype=None))

    class Processor:
        def __call__(
            self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **_: Any
        ) -> Tensor:
            others = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            each = attn.to_q(hidden_states), attn.to_k(others), attn.to_v(others)
            q, k, v = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in each)
            out: Tensor = attn.to_out[0](op(q, k, v, scale=attn.scale).transpose(1, 2).flatten(2))
            return out

    model.set_attn_processor(Processor())
    torch.testing.assert_close(model(*inputs).sample, expected, atol=1e-4, rtol=1e-4)


# ---- the table -----------------------------------------------------------------------------------


def state() -> Any:
    names = table.AttentionBackendName
    registry = table._AttentionBackendRegistry
    return (
        list(names),
        dict(names._value2member_map_),
        dir(names),
        registry._active_backend,
        list(registry._backends),
    )


def test_unregister_restores_the_table_and_the_default() -> None:
    integration.unregister()
    before = state()
    integration.register()
    model, _ = made("flux")
    model.set_attention_backend("flashgen")
    assert table._AttentionBackendRegistry.get_active_backend()[0] == "flashgen"
    integration.register()  # again, which changes nothing
    integration.unregister()
    assert state() == before
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("flashgen")
    with pytest.raises(fg.InputError, match="no backend of this name"):
        integration.unregister()
    integration.register()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_is_left_on_a_former_backend_is_told_the_way_out(compiled: bool) -> None:
    model, inputs = made("flux")
    model.set_attention_backend("flashgen")
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    expected = call(**inputs).sample
    integration.unregister()
    with pytest.raises(fg.InputError, match="taken out of diffusers") as caught:
        call(**inputs)
    assert "model.reset_attention_backend()" in caught.value.way_out
    integration.register()
    assert torch.equal(call(**inputs).sample, expected)


@pytest.mark.parametrize("name", ["native", "flash", "Flash", "two words", 3])
def test_names_of_others_are_refused(name: Any) -> None:
    with pytest.raises(fg.InputError, match="argument name"):
        integration.register(name)


def test_a_forgotten_name_is_asked_for() -> None:
    with pytest.raises(fg.InputError, match="a backend has a name") as caught:
        integration.register(fg.AttentionSpec())  # type: ignore[arg-type]
    assert caught.value.way_out == 'register("near", spec)'


def test_a_spec_that_no_model_can_call_is_refused() -> None:
    bias = fg.Tensor("bias", ("heads",), "float32")
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s + bias[h])
    mask = fg.Tensor("attn_mask", ("seq_k",), "bool")
    named = fg.AttentionSpec(mask_mod=lambda b, h, q, k: mask[k])
    for wrong in (near, fg.AttentionSpec(packed=True), spec, named):
        with pytest.raises(fg.InputError):
            integration.register("other", wrong)
    with pytest.raises(fg.InputError, match="bias"):
        integration.register("other", spec, slopes=drawn(4))


def test_diffusers_has_every_private_name_that_the_backend_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher.check()
    monkeypatch.delattr(table._AttentionBackendRegistry, "_active_backend")
    with pytest.raises(fg.InputError, match="_active_backend"):
        dispatcher.check()
