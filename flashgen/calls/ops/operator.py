"""One spec as an operator: its checked calls, and its overloads in torch.ops.

A call runs directly, or through torch's dispatcher. Checked calls are cached by all values on which
checks and choices depend, so that a repeated call does little work before the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flashgen.calls.native import calls as native_calls
from flashgen.calls.native.calls import NativeCalls
from flashgen.calls.runtime import backends, backward, derivatives, forward, tangent
from flashgen.calls.runtime.arguments.options import (
    check_rng,
    is_deterministic,
    number_in,
    probability_of,
)
from flashgen.calls.runtime.arguments.refusals import runs_while_traced
from flashgen.calls.runtime.prepared_call import DerivativeOutcome
from flashgen.calls.runtime.programs import CallProgram, program_of
from flashgen.kernels.compile import override
from flashgen.shared import config
from flashgen.shared.call import (
    DEFAULT_OPTIONS,
    CallOptions,
    Operands,
    OutputGradients,
    ResultTangents,
    Tangents,
)
from flashgen.shared.errors import PlanError

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

NUMBERS = ("q_offset", "k_offset", "backend", "arch", "deterministic", "split_size")
"""The keyword arguments that operators have, in the order of `CallOptions`; an offset that is a
tensor is one of the positional arguments instead."""

FLOATS = ("dropout_p", "scale")
"""The floats that operators have as tensors, before the run-time scalars that are floats."""

NEEDED = "_needed"
"""The argument of the backward operator with a bool for each learned tensor: whether its gradient
is needed; None for all. Other gradients are tensors without elements. No capture has this name."""

_MAX_CACHED = 512
"""Checked calls that an operator caches; the cache is cleared when it is full."""


class Operator:
    """A registered operator.

    Attributes:
        name: the name in torch.ops.flashgen.
        numbers: the keyword arguments besides the scalars: the names in `NUMBERS` of no tensors.
        scalars, tensors: the names of the run-time scalars and of the captured tensors.
        floats: indices of the scalars that are floats, which registered operators have as tensors.
        arguments: the names of the scalars in torch's schema: "_self" for "self", because methods
            of torch that take the arguments of any operator have a "self" of their own.
        learned: indices of the learned tensors among the captured tensors.
        overload, overload_backward, overload_tangent, overload_backward_tangent: the operators in
            torch.ops; set by `registration`.
        kernels: the functions of the overloads for ordinary tensors; set by `registration`.
        differentiate: `flashgen.calls.ops.autograd.differentiate_native`; set by `registration`.
        serves_dtensors: whether the operator has the rules of `flashgen.calls.ops.dtensors`.
        parts: the work of this rank in calls of each kind, by these rules.
        local_overload: ``overload`` for calls of DTensors; set by these rules.
        done, done_backward: records of the last calls in Python; None before the first.
        latest: shared with the operators of its variants; ``used``: the operator of the last call.
        native: the calls that need no Python; None before the first call on a GPU, where the
            native part is not used, and where calls have a third result.
    """

    overload: Any
    overload_backward: Any
    overload_tangent: Any
    overload_backward_tangent: Any
    local_overload: Any
    kernels: tuple[Any, Any]
    differentiate: Any

    def __init__(self, spec: AttentionSpec | CallProgram, name: str) -> None:
        signature = program_of(spec).signature
        self.spec = spec
        self.signature = signature
        self.name = name
        self.dropout = signature.dropout
        self.scalars = tuple(scalar.name for scalar in signature.scalars)
        self.tensors = tuple(tensor.name for tensor in signature.tensors)
        self.floats = tuple(i for i, x in enumerate(signature.scalars) if x.dtype == "float32")
        self.arguments = tuple("_self" if name == "self" else name for name in self.scalars)
        self.learned = tuple(i for i, tensor in enumerate(signature.tensors) if tensor.grad)
        self.numbers = tuple(name for name in NUMBERS if name not in signature.offsets)
        self.captures = bool(self.scalars or self.tensors)
        self.serves_dtensors = False
        self.parts: dict[Any, Any] = {}
        self.done: tuple[Any, ...] | None = None
        self.done_backward: DerivativeOutcome | None = None
        self.native: NativeCalls | None = None
        self.latest = SimpleNamespace(used=self)
        self._last: tuple[Any, Any] = (None, None)  # the key and the checked call used last
        self._forwards: dict[Any, forward.ForwardCall] = {}
        self._backwards: dict[Any, backward.BackwardCall] = {}
        self._tangents: dict[Any, tangent.TangentCall] = {}

    # Values of torch's schema.

    def keywords(self, options: CallOptions) -> dict[str, Any]:
        """The keyword arguments of the registered operator."""
        names = (*NUMBERS, *self.arguments)
        values = dict(zip(names, (*options[1:7], *options.scalars), strict=True))
        floats = [self.arguments[index] for index in self.floats]
        return {n: values[n] for n in (*self.numbers, *self.arguments) if n not in floats}

    def options(self, keywords: dict[str, Any], floats: Sequence[Any]) -> CallOptions:
        """The options from the arguments of the registered operator.

        Args:
            keywords: the keyword arguments, from which torch omits those with defaults.
            floats: the values of `FLOATS` and of the scalars that are floats.
        """
        numbers = [keywords.get(n, 0 if n.endswith("offset") else None) for n in NUMBERS]
        scalars = tuple([keywords.get(name) for name in self.arguments])
        return self.with_floats(CallOptions(None, *numbers, scalars), floats)  # type: ignore[arg-type,call-arg]

    def floats_of(self, options: CallOptions) -> tuple[Any, ...]:
        """The values of `FLOATS` and of the scalars that are floats."""
        values = [options.scalars[index] for index in self.floats]
        return (options.dropout_p, options.scale, *values)

    def with_floats(self, options: CallOptions, floats: Sequence[Any]) -> CallOptions:
        """``options`` with other values for what `floats_of` returns."""
        p, scale, *values = floats
        scalars = list(options.scalars)
        for index, value in zip(self.floats, values, strict=True):
            scalars[index] = value
        return options._replace(dropout_p=p, scale=scale, scalars=tuple(scalars))

    def numbers_in(self, options: CallOptions) -> CallOptions:
        """``options`` with the numbers that tensors hold in their place.

        Raises:
            InputError: a tensor is not one number on the CPU.
        """
        names = (*FLOATS, *(self.scalars[index] for index in self.floats))
        pairs = zip(names, self.floats_of(options), strict=True)
        floats = [number_in(n, x) if isinstance(x, Tensor) else x for n, x in pairs]
        return self.with_floats(options, floats)

    def float_tensors(self, options: CallOptions) -> tuple[Tensor | None, ...]:
        """The floats of `floats_of` as arguments of the registered operator."""
        p, *scalars = self.floats_of(options)
        if p is not None and not isinstance(p, Tensor):
            p = probability_of(p) or None
        return (as_tensor(p), *map(as_tensor, scalars))

    # Calls through torch's dispatcher.

    def dispatch(self, operands: Operands, options: CallOptions) -> tuple[Tensor, ...]:
        q, k, v, captured, rng = operands
        p, scale, *floats = self.float_tensors(options)
        result: tuple[Tensor, ...] = self.overload(
            q, k, v, *captured, *floats, rng, p, scale, **self.keywords(options)
        )
        return result

    def dispatch_backward(
        self,
        operands: Operands,
        gradients: OutputGradients,
        options: CallOptions,
        needed: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:
        keywords = self.keywords(options)
        if not all(needed):
            keywords[NEEDED] = list(needed)
        q, k, v, captured, rng = operands
        p, scale, *floats = self.float_tensors(options)
        result: tuple[Tensor, ...] = self.overload_backward(
            q, k, v, *captured, *floats, *gradients, rng, p, scale, **keywords
        )
        return result

    def dispatch_tangent(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor],
        moving: Tangents,
        options: CallOptions,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._dispatch_moving(self.overload_tangent, operands, results, moving, options)
        return out, lse

    def dispatch_backward_tangent(
        self,
        operands: Operands,
        gradients: OutputGradients,
        moving: Tangents,
        result_tangents: ResultTangents,
        options: CallOptions,
    ) -> tuple[Tensor, ...]:
        results = *gradients, *result_tangents
        overload = self.overload_backward_tangent
        return self._dispatch_moving(overload, operands, results, moving, options)

    def _dispatch_moving(
        self,
        overload: Any,
        operands: Operands,
        results: Sequence[Any],
        moving: Tangents,
        options: CallOptions,
    ) -> tuple[Tensor, ...]:
        q, k, v, captured, rng = operands
        p, scale, *floats = self.float_tensors(options)
        operand_tangents = [*moving[:3], *(moving.captured or (None,) * len(self.learned))]
        arguments = (q, k, v, *captured, *floats, operand_tangents, list(results), rng, p, scale)
        tangents: tuple[Tensor, ...] = overload(*arguments, **self.keywords(options))
        return tangents

    # Direct calls.

    def compute(self, operands: Operands, options: CallOptions) -> tuple[Tensor, ...]:
        """Computes the results of ordinary tensors; each combination of options is checked once."""
        if type(options.dropout_p) is not float:
            options = _with_probability(options)
        key = _key(operands, options)
        # Most calls are like the one before, and a comparison takes half of the time of a look-up.
        last, call = self._last
        if key != last:
            call = self._forwards.get(key)
            if call is not None:
                self._last = key, call
        if call is None:
            # Wrong values must not wait for the backward call.
            is_deterministic(options.deterministic)
            call = forward.prepare(self.spec, operands, options)
            if call.target.is_final and key is not None:
                _cache(self._forwards, key, call)
            serves = call.target.backend == "gpu" and not self.signature.returns_maxima
            if self.native is None and serves:
                self.native = native_calls.attach(self.differentiate)
        elif operands.rng is not None:
            check_rng(operands.rng, operands.q.device)
        *results, self.done = call.run(operands)
        self.latest.used = self
        if self.native is not None:
            self.native.forget_forward()
        return tuple(results)

    def compute_backward(
        self,
        operands: Operands,
        gradients: OutputGradients,
        options: CallOptions,
        needed: tuple[bool, ...] = (),
    ) -> tuple[Tensor, ...]:
        """Computes dq, dk, dv and the gradients of learned tensors, for ordinary tensors.

        Args:
            needed: for each learned tensor, whether its gradient is needed. A gradient that is not
                needed is returned as a tensor without elements.
        """
        options = _with_probability(options)
        deterministic = is_deterministic(options.deterministic)
        key = (deterministic, _key(operands, options), _key_of_gradients(gradients), needed)
        call = self._backwards.get(key)
        if call is None:
            options = options._replace(deterministic=deterministic)
            call = backward.prepare(self.spec, operands, gradients, options, needed=needed)
            if call.target.is_final:
                _cache(self._backwards, key, call)
        elif operands.rng is not None:
            check_rng(operands.rng, operands.q.device)
        results, self.done_backward = call.run(operands, gradients)
        if self.native is not None:
            self.native.forget_backward()
        if all(needed):
            return results
        computed = dict(zip((x.name for x in call.signature.learned), results[3:], strict=True))
        captured = operands.captured
        learned = zip(self.learned, needed, strict=True)
        learned_gradients = (
            computed[self.tensors[i]] if wanted else captured[i].new_empty(0)
            for i, wanted in learned
        )
        return (*results[:3], *learned_gradients)

    def compute_tangent(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor],
        moving: Tangents,
        options: CallOptions,
    ) -> tuple[Tensor, Tensor]:
        """Computes the tangents of out and lse, for ordinary tensors."""
        options = _with_probability(options)
        arguments = operands, results, moving, options
        key = _key(operands, options), tuple(x is None for x in (*moving[:3], *moving.captured))
        call = self._tangents.get(key)
        if call is None:
            call = tangent.prepare(self.spec, *arguments)
            if call.target.is_final and key[0] is not None:
                _cache(self._tangents, key, call)
        elif operands.rng is not None:
            check_rng(operands.rng, operands.q.device)
        try:
            out, lse, _ = call.run(operands, results, moving)
        except PlanError:  # no tile of the kernel fits
            if call.target.backend != "gpu":
                raise
            return derivatives.tangents(self.spec, *arguments)
        return out, lse

    def compute_backward_tangent(
        self,
        operands: Operands,
        gradients: OutputGradients,
        moving: Tangents,
        result_tangents: ResultTangents,
        options: CallOptions,
    ) -> tuple[Tensor, ...]:
        """Computes the tangents of out, lse and of all gradients, for ordinary tensors."""
        options = _with_probability(options)
        arguments = operands, gradients, moving, result_tangents, options
        return derivatives.gradient_tangents(self.spec, *arguments)

    # The learned tensors among the captured tensors.

    def select_learned(self, captured: Sequence[Any]) -> tuple[Any, ...]:
        """The values of the learned tensors, from the values of all captured tensors."""
        return tuple([captured[index] for index in self.learned])

    def among_captured(self, learned: Sequence[Any]) -> list[Any]:
        """Values for the learned tensors, with None for the other captured tensors."""
        values: list[Any] = [None] * len(self.tensors)
        for index, value in zip(self.learned, learned, strict=True):
            values[index] = value
        return values

    # Calls without Python.

    def learn(self, operands: Operands, options: CallOptions, rng: Tensor | None) -> None:
        """After a call in Python that `native` did not make: the next ones need no Python.

        Args:
            operands: with the rng that was used.
            rng: the rng that was passed; None where it was drawn.
        """

        def prepared() -> forward.PreparedForward | None:
            call = self._forwards.get(_key(operands, _with_probability(options)))
            if not isinstance(call, forward.PreparedForward) or call.in_parts:
                return None
            return call

        if self.native is not None:
            self.native.learn(operands, options, rng, prepared)

    def backward_plan(
        self,
        operands: Operands,
        gradients: OutputGradients,
        options: CallOptions,
        needs: Sequence[bool],
    ) -> Any:
        """The plan of a backward call that `compute_backward` has made; None where it has none.

        Args:
            needs: for q, k, v and each captured tensor, whether its gradient is needed.
        """
        needed = tuple([needs[3 + index] for index in self.learned])
        key = _key(operands, _with_probability(options)), _key_of_gradients(gradients), needed
        call = self._backwards.get((is_deterministic(options.deterministic), *key))
        if not isinstance(call, backward.PreparedBackward) or call.in_parts:
            return None
        if self.native is None:
            return None

        def in_place(results: Sequence[Tensor]) -> list[Tensor | None]:
            names = ("q", "k", "v", *(tensor.name for tensor in call.signature.learned))
            gradients_by_name = dict(zip(names, results, strict=True))
            wanted = zip(("q", "k", "v", *self.tensors), needs, strict=True)
            return [gradients_by_name[name] if need else None for name, need in wanted]

        return self.native.backward_plan(call, operands, gradients, in_place)

    def last_forward(self) -> tuple[Any, ...] | None:
        """The record of the last forward call, for reports."""
        return (self.native and self.native.last_forward()) or self.done

    def last_backward(self) -> DerivativeOutcome | None:
        """The record of the last backward call, for reports."""
        return (self.native and self.native.last_backward()) or self.done_backward


def _with_probability(options: CallOptions) -> CallOptions:
    p = options.dropout_p
    return options._replace(dropout_p=0.0 if p is None else probability_of(p))


@runs_while_traced
def check_choices(backend: Any, arch: Any, deterministic: Any) -> None:
    """Raises InputError unless each is None or a value that calls accept."""
    if backend is not None and config.split_backend(backend) is None:
        backends.choose(backend, torch.device("cpu"))
    if arch is not None:
        backends.arch_of(arch, "tiled", torch.device("cpu"))
    if deterministic is not None:
        is_deterministic(deterministic)


_DEFAULT_NUMBERS = DEFAULT_OPTIONS[:8]


def _key(operands: Operands, options: CallOptions) -> Any:
    """The values on which checks and choices depend; the values of rng are not read.

    The key is None for tensors that have no shape or strides, as nested ones; sparse tensors of
    some layouts have strides, and could pass for expanded ones.
    """
    q, k, v, captured, rng = operands
    try:
        # Written out, because a loop takes longer than the rest of the function.
        return (
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            q.layout,
            k.shape,
            k.stride(),
            k.dtype,
            k.device,
            k.layout,
            v.shape,
            v.stride(),
            v.dtype,
            v.device,
            v.layout,
            rng is None,
            options.dropout_p,
            _numbers_key(options),
            _environment(options) if config.is_any_set_for_calls() else None,
            tuple([(t.shape, t.stride(), t.dtype, t.device, t.layout) for t in captured])
            if captured
            else None,
        )
    except RuntimeError:
        return None


def _environment(options: CallOptions) -> tuple[str | None, str | None, str]:
    """The variables that a call follows, and the contents of an edited kernel."""
    return (
        config.backend() if options.backend is None else None,
        config.arch() if options.arch is None else None,
        override.state(),
    )


def _numbers_key(options: CallOptions) -> str | None:
    """All options except dropout_p as text, because True == 1 == 1.0; None for default values."""
    if options is DEFAULT_OPTIONS:
        return None
    numbers = options[:8]
    try:
        if (
            numbers == _DEFAULT_NUMBERS
            and type(options.q_offset) is int
            and type(options.k_offset) is int
        ):
            return None
    except (ValueError, RuntimeError):
        pass  # an array or a tensor, which the checks refuse
    return repr(numbers)


def _key_of_gradients(gradients: OutputGradients) -> Any:
    try:
        return tuple(
            [
                None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.layout)
                for t in gradients
            ]
        )
    except RuntimeError:
        return None


def _cache(cached: dict[Any, Any], key: Any, call: Any) -> None:
    if len(cached) >= _MAX_CACHED:
        cached.clear()
    cached[key] = call


def as_tensor(number: Any) -> Tensor | None:
    """A float as an argument of the registered operator."""
    if number is None or isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device="cpu")
