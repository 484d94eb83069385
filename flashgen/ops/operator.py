"""One spec as an operator of torch: called through torch's dispatcher, or around it.

Around it, what checks and choices depend on is the key of a dictionary, so that a call like an
earlier one has little left to do before the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from flashgen import config
from flashgen.ops import backends, backward, forward
from flashgen.ops.numbers import (
    check_rng,
    offset_of,
    probability_of,
    scalar_value,
    scale_of,
)
from flashgen.ops.registry import NEEDED, free_name, register
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor
Numbers = tuple[Any, ...]

NUMBERS = ("scale", "q_offset", "k_offset", "backend", "arch", "deterministic")
"""The arguments by name that every operator has, in the order in which they are handed on."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

_MOST_KEPT = 512
"""Problems kept in mind per operator; beyond that all are forgotten and seen anew."""

_operators: dict[AttentionSpec, Operator] = {}
_lock = threading.RLock()


def operator_of(spec: AttentionSpec) -> Operator:
    """The operator of a spec, registered when first asked for; equal specs share one."""
    with _lock:
        found = _operators.get(spec)
        if found is None:
            found = _operators[spec] = Operator(spec)
        return found


class Operator:
    """A registered operator: what torch calls, and the way around torch's dispatcher.

    Attributes:
        name: in torch.ops.flashgen.
        scalars, tensors: names of what the spec captures.
        learned: places among the tensors of those with grad=True.
        walks: a call gives the layout of its blocks.
        done, done_backward: what the last calls did, for reports; None before.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.dropout = spec.dropout
        self.scalars = tuple(scalar.name for scalar in spec.scalars)
        self.tensors = tuple(tensor.name for tensor in spec.tensors)
        self.learned = tuple(place for place, t in enumerate(spec.tensors) if t.grad)
        self.captures = bool(self.scalars or self.tensors)
        self.walks = spec.block_sparse is not None and not spec.block_sparse.is_static
        self.done: Any = None
        self.done_backward: Any = None
        self._forwards: dict[Any, forward.Forward] = {}
        self._backwards: dict[Any, backward.Backward] = {}
        self.name = free_name(spec)
        self.overload, self.overload_backward = register(self)

    def normal(self, numbers: Numbers) -> Numbers:
        """``numbers`` as torch's schema takes them: symbols as they are, numpy's as Python's.

        Raises:
            InputError: one is wrong, before torch says so in its own words.
        """
        scale, q_offset, k_offset, backend, arch, deterministic, *scalars = numbers
        if scale is not None and not isinstance(scale, _SYMBOLS):
            scale = scale_of(self.spec, scale)
        if backend is not None and backend not in config.BACKENDS:
            backends.choose(backend, torch.device("cpu"))
        if arch is not None:
            backends.target_of(arch, "tiled", torch.device("cpu"))
        if deterministic is not None:
            backward.settled(deterministic)
        return (
            scale,
            q_offset if isinstance(q_offset, _SYMBOLS) else offset_of("q_offset", q_offset, 0),
            k_offset if isinstance(k_offset, _SYMBOLS) else offset_of("k_offset", k_offset, 0),
            *(backend, arch, deterministic),
            *(
                value if isinstance(value, _SYMBOLS) else scalar_value(scalar, value)
                for scalar, value in zip(self.spec.scalars, scalars, strict=True)
            ),
        )

    def keywords(self, numbers: Numbers) -> dict[str, Any]:
        """``numbers`` by name."""
        return dict(zip((*NUMBERS, *self.scalars), numbers, strict=True))

    def numbers(self, keywords: dict[str, Any]) -> Numbers:
        """The same in the order in which they are handed on; torch leaves defaults out."""
        return tuple(keywords.get(n, 0 if n.endswith("offset") else None) for n in NUMBERS) + tuple(
            keywords[name] for name in self.scalars
        )

    # Through torch's dispatcher.

    def dispatch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        p: Any,
        numbers: Numbers,
        captured: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.overload(
            q, k, v, *captured, rng, as_tensor(p), **self.keywords(numbers)
        )
        return result

    def dispatch_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        rng: Tensor | None,
        p: Any,
        numbers: Numbers,
        needed: Sequence[bool] = (),
        captured: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        named = self.keywords(numbers)
        if not all(needed):
            named[NEEDED] = list(needed)
        given = (out, lse, dout, dlse, rng, as_tensor(p))
        result: tuple[Tensor, ...] = self.overload_backward(q, k, v, *captured, *given, **named)
        return result

    # Around it.

    def compute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        p: Any,
        numbers: Numbers,
        captured: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """out and lse of ordinary tensors; everything is checked, once for each problem."""
        if type(p) is not float:
            p = 0.0 if p is None else probability_of(p)
        key = _key(q, k, v, rng, p, numbers)
        if captured:
            key = (key, _key_captured(captured))
        call = self._forwards.get(key)
        if call is None:
            backward.settled(numbers[5])  # wrong now or never: the backward call would be too late
            call = forward.prepare(
                self.spec, q, k, v, dropout_p=p, rng=rng, **self._arguments(numbers, captured)
            )
            _keep(self._forwards, key, call)
        elif rng is not None:
            check_rng(rng, q.device)
        out, lse, self.done = call.run(q, k, v, rng, captured)
        return out, lse

    def compute_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        rng: Tensor | None,
        p: Any,
        numbers: Numbers,
        needed: tuple[bool, ...] = (),
        captured: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """The gradients, in the same way: dq, dk, dv, then those of captured tensors.

        Args:
            needed: for each captured tensor with grad=True, whether its gradient is; of the others
                it is a tensor without elements.
        """
        if type(p) is not float:
            p = 0.0 if p is None else probability_of(p)
        deterministic = backward.settled(numbers[5])
        rest = _key_backward(out, lse, dout, dlse)
        key: Any = (deterministic, _key(q, k, v, rng, p, numbers), rest)
        if captured:
            key = (*key, _key_captured(captured), needed)
        call = self._backwards.get(key)
        if call is None:
            call = backward.prepare(
                self.spec,
                q,
                k,
                v,
                out,
                lse,
                dout,
                dlse,
                dropout_p=p,
                rng=rng,
                deterministic=deterministic,
                needed=needed,
                **self._arguments(numbers, captured),
            )
            _keep(self._backwards, key, call)
        elif rng is not None:
            check_rng(rng, q.device)
        found, self.done_backward = call.run(q, k, v, out, lse, dout, dlse, rng, captured)
        if all(needed):
            return found
        computed = iter(found[3:])
        learned = zip(self.learned, needed, strict=True)
        rest = (next(computed) if wanted else captured[i].new_empty(0) for i, wanted in learned)
        return (*found[:3], *rest)

    def _arguments(self, numbers: Numbers, captured: Sequence[Tensor]) -> dict[str, Any]:
        scale, q_offset, k_offset, backend, arch, _, *scalars = numbers
        return {
            "scale": scale,
            "q_offset": q_offset,
            "k_offset": k_offset,
            "backend": backend,
            "arch": arch,
            "scalars": dict(zip(self.scalars, scalars, strict=True)),
            "tensors": dict(zip(self.tensors, captured, strict=True)),
        }


_DEFAULTS = (None, 0, 0, None, None, None)
"""scale, q_offset, k_offset, backend, arch, deterministic: of a call that says nothing of them."""


def _key(q: Tensor, k: Tensor, v: Tensor, rng: Tensor | None, p: float, numbers: Numbers) -> Any:
    """Everything that checks and choices depend on, but for the contents of rng.

    None for tensors that have no shape or strides: they are nested or sparse, and refused.
    """
    backend, arch = numbers[3], numbers[4]
    try:
        # Spelt out: a loop takes longer than all of the rest.
        return (
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            k.shape,
            k.stride(),
            k.dtype,
            k.device,
            v.shape,
            v.stride(),
            v.dtype,
            v.device,
            rng is None,
            p,
            _told(numbers),
            config.backend() if backend is None else None,
            config.arch() if arch is None else None,
        )
    except RuntimeError:
        return None


def _told(numbers: Numbers) -> str | None:
    """The numbers as text, because True == 1 == 1.0; None for the defaults of most calls."""
    if numbers == _DEFAULTS and type(numbers[1]) is int and type(numbers[2]) is int:
        return None
    return repr(numbers)


def _key_captured(captured: Sequence[Tensor]) -> Any:
    try:
        return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in captured])
    except RuntimeError:
        return None


def _key_backward(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
    try:
        return (
            out.shape,
            out.stride(),
            out.dtype,
            out.device,
            lse.shape,
            lse.stride(),
            lse.dtype,
            lse.device,
            dout.shape,
            dout.stride(),
            dout.dtype,
            dout.device,
            None if dlse is None else (dlse.shape, dlse.stride(), dlse.dtype, dlse.device),
        )
    except RuntimeError:
        return None


def _keep(kept: dict[Any, Any], key: Any, call: Any) -> None:
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = call


def as_tensor(p: Any) -> Tensor | None:
    """The probability as the registered operator takes it: None for 0."""
    if p is None or isinstance(p, Tensor):
        return p
    probability = probability_of(p)
    return torch.tensor(probability, dtype=torch.float64, device="cpu") if probability else None
