"""Private names of torch that flashgen uses: each one is there and does what flashgen expects.

A new release of torch fails here first. The sentence says what a name is for.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.paths import ROOT

UNSTABLE = ("torch.fx.experimental.",)
"""Public by their names, without a promise of torch."""


def private_names() -> dict[str, str]:
    """The dotted names, each with a module that uses it."""
    paths = sorted((ROOT / "flashgen").rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    found = {
        name: path.relative_to(ROOT).as_posix()
        for path, text in texts.items()
        if "import torch" in text or "from torch" in text
        for name in _names_in(ast.parse(text))
        if name.startswith(UNSTABLE) or any(_is_private(part) for part in name.split("."))
    }
    prefixes = {name.rpartition(".")[0] for name in found}
    return {name: path for name, path in found.items() if name not in prefixes}


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _names_in(module: ast.Module) -> Iterator[str]:
    """The names that begin with torch: those that are imported, and chains of attributes."""
    aliases: dict[str, str] = {}
    nodes = list(ast.walk(module))
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases |= {each.name: each.name for each in node.names if each.name == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            imported = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            aliases |= imported
            yield from imported.values()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            chain = _chain(node.value, aliases)
            if isinstance(target, ast.Name) and chain:
                aliases[target.id] = chain
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from filter(None, [_chain(node, aliases)])


def _chain(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The dotted name of a chain of attributes; None where it does not begin with an alias."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    before = _chain(node.value, aliases) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if before else None


C = torch._C
ONE = torch.ones(2)


class Use(NamedTuple):
    """What flashgen does with a name, and a call with the name's value that is true."""

    purpose: str
    holds: Callable[[Any], Any]


def fake() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def computed_under_fakes(unset: Any) -> bool:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), unset():
        return bool(torch.ones(2).sum() == 2)


def inside(transform: Callable[..., Any], question: Callable[[Any], Any]) -> Any:
    """The answer to a question about the tensor that a transform of torch.func passes."""
    answers = []
    transform(lambda x: (answers.append(question(x)), x.sum())[1])(ONE)
    return answers[0]


def traced(question: Callable[[], Any]) -> Any:
    """The answer to a question while make_fx traces."""
    from torch.fx.experimental.proxy_tensor import make_fx

    answers: list[Any] = []
    make_fx(lambda x: (answers.append(question()), x + 1)[1])(ONE)
    return answers[0]


def slot_of(get: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

    nodes: list[Any] = []

    def function(x: Any) -> Any:
        nodes.append(get(x, get_proxy_mode().tracer, None).proxy.node)
        return x + 1

    make_fx(function)(ONE)
    return nodes[0].op == "placeholder" and nodes[0].meta is not None


def functional(unwrap: Any) -> bool:
    wrapped = torch._to_functional_tensor(ONE)
    return torch.equal(unwrap(wrapped), ONE)


def skipped(set_strategy: Any) -> bool:
    frames = C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP

    def function() -> None: ...

    return set_strategy(function.__code__, frames._FrameExecStrategy(skip, skip)) is None


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def popped(pop: Any) -> bool:
    with Mode(), pop():
        return C._len_torch_function_stack() == 0


def cleared(clear: Any) -> Any:
    def question(_: Any) -> bool:
        with clear():
            return not C._are_functorch_transforms_active()

    return inside(torch.func.grad, question)


def without(context: Any, active: Callable[[], int]) -> bool:
    from torch._subclasses import FakeTensorMode

    with Mode(), FakeTensorMode(), context():
        return active() == 0


class Refusing(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError


def squeezed(context: Any) -> bool:
    wrapper = torch.Tensor._make_wrapper_subclass(Refusing, (1, 3))
    with context():
        wrapper.squeeze_()
    return wrapper.shape == (3,)


def calls_forward(code: Any) -> bool:
    class Asked(torch.nn.Module):
        def forward(self) -> Any:
            return sys._getframe(1).f_code

    return Asked()() is code


def counted_modes(modes: Any) -> bool:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        found = [getattr(mode, "counter", None) for mode in modes()]
    return counter in found and isinstance(counter.flop_registry, dict)


def level_of_dual(_: Any) -> bool:
    before = forward_ad._current_level
    with forward_ad.dual_level():
        return before < 0 <= forward_ad._current_level


ASK_THE_DISPATCHER = "asks whether a call may bypass torch's dispatcher"
KNOW_FAKES = "knows tensors without contents"
SYMBOLS = "compares symbolic sizes"
PROXIES = "marks the random state so that both passes of a compiled graph drop alike"
SUBCLASSES = "records mods by tensors of its own class"
UNWRAP = "reads the blocks of a BlockMask inside of transforms"
RECORDS = "records what a call does, for later calls without Python"
ALONE = "runs an operation of a mod without the modes and transforms around it"
GUARDS = "compiles a function anew where it is called in the other mode of batch invariance"
UNTRACED = "keeps Dynamo out of a function without the import of torch._dynamo"
REDISPATCH = "continues behind the keys of autograd"
OWN = "knows the operators that are torch's own"
FLEX = "replaces the kernels of torch's flex_attention"
TREES = "flattens the arguments of recorded operations"

USES = {
    "torch._C._dispatch_has_kernel_for_dispatch_key": Use(
        "looks for the kernels that its own replace",
        lambda has: (
            has("aten::add.Tensor", "CPU") and not has("aten::_flash_attention_forward", "CPU")
        ),
    ),
    "torch._C._get_cudnn_sdp_enabled": Use(
        "keeps the preference of cuDNN's attention", lambda enabled: enabled() in (True, False)
    ),
    "torch.Tensor._make_wrapper_subclass": Use(
        SUBCLASSES, lambda make: make(Wrapper, (2,), dtype=torch.int32).dtype == torch.int32
    ),
    "torch._C.DispatchKey": Use(FLEX, lambda key: key.Autograd != key.CompositeExplicitAutograd),
    "torch._C.DisableTorchFunction": Use(SUBCLASSES, lambda disable: disable().__enter__),
    "torch._C.DisableTorchFunctionSubclass": Use(
        "negates the mask of a head as torch negates a plain tensor",
        lambda disable: disable().__enter__,
    ),
    "torch._C._AutoDispatchBelowAutograd": Use(REDISPATCH, lambda below: below().__enter__),
    "torch._C._after_ADInplaceOrView_keyset": Use(
        REDISPATCH, lambda keys: keys.has(C.DispatchKey.CPU)
    ),
    "torch._C._after_autograd_keyset": Use(REDISPATCH, lambda keys: keys.has(C.DispatchKey.CPU)),
    "torch._C._are_functorch_transforms_active": Use(
        ASK_THE_DISPATCHER, lambda ask: not ask() and inside(torch.func.grad, lambda x: ask())
    ),
    "torch._C._cuda_getCurrentRawStream": Use(
        "launches on torch's current stream without making a Stream object", callable
    ),
    "torch._C._disabled_torch_function_impl": Use(SUBCLASSES, callable),
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": Use(UNTRACED, lambda skip: skip is not None),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Use(UNTRACED, callable),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Use(UNTRACED, skipped),
    "torch._dynamo.eval_frame.innermost_fn": Use(
        "records the function of which torch.compile has made a mod",
        lambda of: of(torch.compile(popped)) is of(popped) is popped,
    ),
    "torch._C._functorch.get_unwrapped": Use(
        UNWRAP, lambda unwrap: inside(torch.func.grad, lambda x: torch.equal(unwrap(x), ONE))
    ),
    "torch._C._functorch.is_batchedtensor": Use(
        UNWRAP, lambda ask: not ask(ONE) and inside(torch.vmap, ask)
    ),
    "torch._C._functorch.is_functorch_wrapped_tensor": Use(
        ASK_THE_DISPATCHER, lambda ask: not ask(ONE) and inside(torch.func.grad, ask)
    ),
    "torch._C._functorch.is_gradtrackingtensor": Use(
        UNWRAP, lambda ask: not ask(ONE) and inside(torch.func.grad, ask)
    ),
    "torch._C._functorch.is_legacy_batchedtensor": Use(
        "refuses gradients with is_grads_batched=True",
        lambda ask: not ask(ONE) and in_batched_backward(ask),
    ),
    "torch._C._functorch.peek_interpreter_stack": Use(
        ALONE, lambda peek: peek() is None and inside(torch.func.grad, lambda x: peek().level())
    ),
    "torch._C._get_tracing_state": Use(
        "refuses torch.jit.trace, which records sizes as constants", lambda ask: ask() is None
    ),
    "torch._C._is_any_autocast_enabled": Use(
        "asks whether operands are cast", lambda ask: not ask() and in_autocast(ask)
    ),
    "torch._C._len_torch_dispatch_stack": Use(ASK_THE_DISPATCHER, lambda ask: ask() == 0),
    "torch._C._len_torch_function_stack": Use(ASK_THE_DISPATCHER, lambda ask: ask() == 0),
    "torch._C._set_grad_enabled": Use(
        "knows the operation by which a mod switches gradients off", callable
    ),
    "torch._assert_async": Use(
        "checks packed sequences on a GPU without waiting for it",
        lambda check: check(torch.tensor(True), "true") is None,
    ),
    "torch._decomp.decomposition_table": Use(
        "computes operations of mods from simpler ones",
        lambda table: callable(table[torch.ops.aten.rsub.Scalar]),
    ),
    "torch._dynamo.exc.Unsupported": Use(
        "raises its own errors through Dynamo", lambda error: issubclass(error, RuntimeError)
    ),
    "torch._from_functional_tensor": Use(PROXIES, functional),
    "torch._functorch.config.activation_memory_budget": Use(
        PROXIES, lambda budget: 0 <= budget <= 1
    ),
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": Use(ALONE, cleared),
    "torch._functorch.utils.enable_single_level_autograd_function": Use(
        "calls its autograd functions once for each level of torch.func",
        lambda enable: enable().__enter__,
    ),
    "torch._dynamo.guards.install_guard": Use(GUARDS, callable),
    "torch._dynamo.source.GlobalStateSource": Use(
        GUARDS, lambda source: source().make_guard(print)
    ),
    "torch._guards.TracingContext.try_get": Use(
        "asks whether Dynamo traces", lambda get: get() is None
    ),
    "torch._subclasses.FakeTensor": Use(KNOW_FAKES, lambda kind: isinstance(fake(), kind)),
    "torch._subclasses.fake_tensor.is_fake": Use(
        KNOW_FAKES, lambda ask: ask(fake()) and not ask(ONE)
    ),
    "torch._subclasses.fake_tensor.unset_fake_temporarily": Use(
        "computes the numbers of mods also where a model has fake tensors", computed_under_fakes
    ),
    "torch._subclasses.functional_tensor.FunctionalTensor": Use(
        PROXIES, lambda kind: issubclass(kind, torch.Tensor)
    ),
    "torch.autograd.forward_ad._current_level": Use(
        "asks whether forward-mode derivatives are taken", level_of_dual
    ),
    "torch.autograd.forward_ad._set_fwd_grad_enabled": Use(
        "turns forward mode on again for outer transforms", lambda enable: enable(True).__enter__
    ),
    "torch.autograd.function._SingleLevelFunction": Use(
        "has functions that are called once for each level of torch.func",
        lambda base: not issubclass(base, torch.autograd.Function),
    ),
    "torch.nn.attention.varlen._should_use_cudnn": Use(
        "turns the preference of cuDNN in varlen_attn off", callable
    ),
    "torch.compiler._is_compiling_flag": Use(
        "reads graphs outside of the trace that asks", lambda flag: flag is False
    ),
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode": Use(
        "replaces the rule of flex_attention in traces",
        lambda mode: mode in torch.ops.higher_order.flex_attention.python_key_table,
    ),
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": Use(
        PROXIES, lambda get: get() is None and traced(get).tracer is not None
    ),
    "torch.fx.experimental.proxy_tensor.get_proxy_slot": Use(PROXIES, slot_of),
    "torch.fx.experimental.symbolic_shapes.guard_or_false": Use(SYMBOLS, lambda ask: ask(True)),
    "torch.fx.experimental.symbolic_shapes.statically_known_true": Use(
        SYMBOLS, lambda ask: ask(True)
    ),
    "torch._ops.OpOverload": Use(OWN, lambda kind: type(torch.ops.aten.add.Tensor) is kind),
    "torch._ops.OpOverloadPacket": Use(OWN, lambda kind: type(torch.ops.aten.add) is kind),
    "torch.ops.aten._to_copy": Use("reads conversions in graphs of ATen", lambda op: op.default),
    "torch.fx.experimental.symbolic_shapes.guard_scalar": Use(SYMBOLS, lambda ask: ask(3) == 3),
    "torch.fx.experimental.symbolic_shapes.optimization_hint": Use(
        SYMBOLS, lambda ask: ask(3) == 3
    ),
    "torch.nn.Module._call_impl.__code__": Use(
        "finds where the forward of a transformers model begins", calls_forward
    ),
    "torch.nn.attention.flex_attention._create_empty_block_mask": Use(
        FLEX, lambda make: make(*[torch.ones(1, 1, 2, 8)] * 2).as_tuple()[-2] == 2**30
    ),
    "torch.ops.higher_order.flex_attention._cacheable": Use(FLEX, lambda given: given in (0, 1)),
    "torch.ops.higher_order.flex_attention._dispatch_cache.clear": Use(FLEX, callable),
    "torch.overrides._pop_mode_temporarily": Use(ALONE, popped),
    "torch.utils._mode_utils.no_dispatch": Use(
        "changes the shape of a mod's tensor in place", squeezed
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Use(RECORDS, callable),
    "torch.utils._python_dispatch._disable_current_modes": Use(
        ALONE, lambda disable: without(disable, C._len_torch_dispatch_stack)
    ),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": Use(
        "gives its formulas to a FlopCounterMode that is active", counted_modes
    ),
    "torch.utils._pytree.TreeSpec": Use(TREES, callable),
    "torch.utils._pytree.tree_flatten": Use(TREES, lambda f: f([1, (2, 3)])[0] == [1, 2, 3]),
    "torch.utils._pytree.tree_leaves": Use(TREES, lambda f: f([1, (2, 3)]) == [1, 2, 3]),
    "torch.utils._pytree.tree_map_only": Use(
        TREES, lambda f: f(int, lambda x: x + 1, [1, "a"]) == [2, "a"]
    ),
    "torch.utils._pytree.tree_unflatten": Use(TREES, callable),
}


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func


def in_batched_backward(ask: Callable[[torch.Tensor], bool]) -> bool:
    """The answer for a gradient of several outputs at once."""
    x, found = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda gradient: found.append(ask(gradient)))
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True)
    return found == [True]


def in_autocast(ask: Callable[[], bool]) -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return ask()


def resolved(name: str) -> Any:
    """The value of a dotted name, of which the longest part that is a module is imported."""
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


OF_CUDA = ("torch._C._cuda_getCurrentRawStream",)
"""The names that builds of torch without CUDA do not have."""


@pytest.mark.parametrize(
    "name", [name for name in USES if torch.version.cuda or name not in OF_CUDA]
)
def test_torch_has_the_private_name_and_it_does_what_it_is_used_for(name: str) -> None:
    sentence = f"flashgen {USES[name].purpose} with {name}, which torch {torch.__version__}"
    try:
        value = resolved(name)
    except (ImportError, AttributeError):
        pytest.fail(f"{sentence} does not have")
    assert USES[name].holds(value), f"{sentence} has changed"


def test_the_table_has_the_private_names_that_modules_use() -> None:
    assert sorted(USES) == sorted(private_names())


def test_functions_are_marked_for_dynamo_as_torch_marks_them() -> None:
    def function() -> None: ...

    assert torch.compiler.assume_constant_result(function)._dynamo_marked_constant
    disabled = torch.compiler.disable(function, reason="a reason")
    assert disabled._torchdynamo_disable
    assert disabled._torchdynamo_disable_msg == "a reason"
