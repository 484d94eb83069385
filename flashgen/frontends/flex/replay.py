"""Running the operations of a record on traced tensors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch.utils import _pytree as pytree

from flashgen.frontends.flex.operation_results import name_of
from flashgen.frontends.flex.recorded_mods import Record, RecordedMod
from flashgen.frontends.flex.recorder import Operation
from flashgen.frontends.flex.traced_array import TracedArray, literal
from flashgen.frontends.flex.tracer import DTYPES, TracedTensor, Tracer
from flashgen.shared.errors import FlashgenError, SpecError
from flashgen.spec.language.integer_limits import promoted
from flashgen.spec.language.symbols import SCORE, B, H, K, Q


def replay(
    tracer: Tracer, record: Record, varying: frozenset[int]
) -> tuple[TracedArray | None, TracedArray | None]:
    """What the mask_mod and the score_mod of a record return; None where there is no mod.

    Args:
        varying: the places of numbers that become run-time scalars.

    Raises:
        SpecError: kernels cannot express an operation, or not with a run-time scalar.
    """
    running = _Replay(tracer, record, varying)
    mask, score = record.key.mods
    return running.mod(mask, (B, H, Q, K)), running.mod(score, (SCORE, B, H, Q, K))


class _Replay:
    def __init__(self, tracer: Tracer, record: Record, varying: frozenset[int]) -> None:
        assert record.notes is not None, "errors name the user's lines"
        self.tracer = tracer
        self.record = record
        self.varying = varying
        self.notes = record.notes
        self.done = 0  # operations
        self.number_index = 0  # of the next number
        self.next = 0  # the number of the next argument or result
        self.beside: torch.dtype | None = None  # of the narrow integers of the operation
        self.created: set[int] = set()  # constants that depend on a number that varies
        readings = enumerate(record.key.reads)
        self.read = {reading.number: record.tensors[index] for index, reading in readings}
        self.values: dict[int, Any] = {}  # arguments and results by their numbers

    def mod(
        self, recorded: RecordedMod | None, arguments: Sequence[sympy.Symbol]
    ) -> TracedArray | None:
        if recorded is None:
            return None
        for symbol in arguments:
            dtype = torch.float32 if symbol is SCORE else torch.int64
            self._keep(self.tracer.symbol(symbol, dtype))
        for operation in self.record.key.operations[self.done : recorded.end]:
            self.tracer.where = self.notes.line(self.done)
            try:
                self._run(operation)
            except FlashgenError:
                raise
            except Exception as error:
                raise SpecError(
                    f"torch.{name_of(operation.function)} raised {type(error).__name__}",
                    where=self.tracer.where,
                    numbers=f"{error}, while it was traced with symbols in place of numbers",
                    way_out="a mod that torch's flex_attention runs too: functions of torch on "
                    "tensors without dimensions",
                ) from error
            self.done += 1
        returned = self._value(recorded.returned)
        if isinstance(returned, TracedTensor):
            return returned.array
        if isinstance(returned, torch.Tensor):
            return self.tracer.traced(returned).array
        dtype = torch.bool if isinstance(returned, bool) else torch.float32
        return TracedArray((), dtype, lambda _: literal(returned))

    def _run(self, operation: Operation) -> None:
        first, operands = self.number_index, _tensors_in((operation.args, operation.kwargs))
        self.beside = self._narrow(operation.function, operands)
        args, kwargs = self._value(operation.args), self._value(operation.kwargs)
        if operation.function is torch._C._set_grad_enabled:
            self.tracer.learns = args[0]
            return
        varies = not self.varying.isdisjoint(range(first, self.number_index))
        if all(number in self.record.created_tensors for number in operands) and (
            varies or not self.created.isdisjoint(operands)
        ):
            # The results of an operation on constants come from each call's own record.
            for _ in range(operation.results):
                while self.next in self.read:
                    self.next += 1
                self.created.add(self.next)
                self._keep(self.tracer.created(self.record.created_tensors[self.next], self.next))
            return
        with self.tracer:
            results = self._applied(operation.function, args, kwargs, varies)
            if varies and self.beside is not None and results[0].is_floating_point():
                self.number_index, self.beside = first, None  # floats hold the number itself
                args, kwargs = self._value(operation.args), self._value(operation.kwargs)
                results = self._applied(operation.function, args, kwargs, varies)
        for leaf in results:
            self._keep(leaf if self.tracer.learns else leaf.detach())

    def _applied(
        self, function: Callable[..., Any], args: Any, kwargs: Any, varies: bool
    ) -> list[torch.Tensor]:
        """The tensors that an operation returns."""
        try:
            result = function(*args, **kwargs)
        except Exception:  # some functions take no mixture of tensors and numbers
            if not varies:
                raise
            args = tuple(map(self._as_tensor, args))
            kwargs = {name: self._as_tensor(value) for name, value in kwargs.items()}
            result = function(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def _narrow(self, function: Callable[..., Any], operands: Sequence[int]) -> torch.dtype | None:
        """The dtype that torch gives to an integer beside tensors of narrow ones."""
        tensors = [self.values[x] if x in self.values else self.read[x] for x in operands]
        dtypes = {DTYPES.get(tensor.dtype, "") for tensor in tensors} - {"bool"}
        name = "" if function is torch.Tensor.__getitem__ else promoted(dtypes)
        return getattr(torch, name) if name else None

    def _keep(self, value: Any) -> None:
        while self.next in self.read:
            self.next += 1
        self.values[self.next] = value
        self.next += 1

    def _as_tensor(self, value: Any) -> Any:
        """An operand beside a run-time scalar: torch allows no mixture in some functions."""
        if type(value) in (int, float):
            dtype = torch.int64 if type(value) is int else torch.float64
            return self.tracer.constant(torch.tensor(value, dtype=dtype))
        return value

    def _value(self, noted: Any) -> Any:
        """The operand that a record notes."""
        if type(noted) is int:
            return self.values[noted] if noted in self.values else self.read[noted]
        if noted in ("int", "float"):
            index, self.number_index = self.number_index, self.number_index + 1
            value = self.record.numbers[index]
            if index not in self.varying:
                return value
            scalar = self.tracer.number(value, index)
            return scalar if noted == "float" or self.beside is None else scalar.to(self.beside)
        kind, *parts = noted
        if kind == "plain":
            return parts[0]
        if kind == "fixed":
            return _FIXED[parts[0]](parts[1])
        if kind == "array":
            dtype, shape, data = parts
            return np.frombuffer(data, dtype).reshape(ast.literal_eval(shape)).copy()
        if kind == "dict":
            return {name: self._value(part) for name, part in parts}
        values = [self._value(part) for part in parts]
        return values if kind == "list" else slice(*values) if kind == "slice" else tuple(values)


_FIXED: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "complex": complex,
    "bool": lambda text: text == "True",
    "str": ast.literal_eval,
    "range": lambda text: range(*ast.literal_eval(text.removeprefix("range"))),
}
"""The values that a record notes as text, by their types."""


def _tensors_in(noted: Any) -> list[int]:
    """The numbers of the tensors among operands."""
    if type(noted) is int:
        return [noted]
    if type(noted) is tuple and noted and noted[0] != "array":
        return [number for part in noted for number in _tensors_in(part)]
    return []
