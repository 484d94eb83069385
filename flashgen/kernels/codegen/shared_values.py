"""Functions in parts: what the scores of a head, a query or a key share is computed once.

The values of a level are fields of a struct, which a function of its own makes. A kernel calls it
before its loop over scores, and passes the struct to the function that each score calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.kernels.codegen.spec_function import PARAMETERS, SpecFunction
from flashgen.kernels.codegen.text import comment
from flashgen.spec.analysis.invariants import Level, LeveledCode
from flashgen.spec.language.operations import operations

_WORDS = {Level.HEAD: "head", Level.QUERY: "query", Level.KEY: "key"}
_MANY = {Level.HEAD: "heads", Level.QUERY: "queries", Level.KEY: "keys"}


@dataclass(frozen=True)
class SharedValues:
    """The values of one level.

    Attributes:
        kind: the name of the struct.
        name, names: the variable with the values of one query or key, and of several.
        function: the function that computes them.
        call: C++ of its call.
    """

    kind: str
    name: str
    names: str
    function: SpecFunction
    call: str


@dataclass(frozen=True)
class FunctionInParts:
    """A function that each score calls, and what it shares with other scores.

    Attributes:
        function: the function of a score.
        head, query, key: the values of each level; None where there are none.
    """

    function: SpecFunction
    head: SharedValues | None = None
    query: SharedValues | None = None
    key: SharedValues | None = None

    @property
    def shared(self) -> tuple[SharedValues, ...]:
        """The values of all levels, each after those that it is made from."""
        return tuple(values for values in (self.head, self.query, self.key) if values is not None)

    @property
    def functions(self) -> tuple[SpecFunction, ...]:
        """All functions, in the order of the file."""
        return (*(values.function for values in self.shared), self.function)

    def values_of(self, axis: str) -> SharedValues | None:
        """The values of a query, for the axis "q", or of a key, for "k"."""
        return self.query if axis == "q" else self.key

    def called_with(self, **replaced: str) -> FunctionInParts:
        """This function with other C++ for arguments of its calls, as in `DeviceFunction.call`."""

        def with_call(values: SharedValues | None) -> SharedValues | None:
            if values is None:
                return None
            return dataclasses.replace(values, call=values.function.call(**replaced))

        return dataclasses.replace(
            self, head=with_call(self.head), query=with_call(self.query), key=with_call(self.key)
        )


def in_parts(
    name: str,
    returns: str,
    why: Sequence[str],
    code: LeveledCode,
    printer: CPrinter,
    result: Callable[[], str],
) -> FunctionInParts:
    """The function of a score, with the values that it has in common with other scores.

    Args:
        name: its name, such as "score_mod"; names of values begin with its last word besides "mod".
        result: makes the C++ of the returned value; called when all shared values have names.
    """
    prefix = name.removesuffix("_mod").rpartition("_")[2]
    by_level = values_of(
        prefix, f"What {name} has in common for all scores of a {{one}}.", code, printer
    )
    for level, shared in by_level.items():
        count = operations(_computed(code, level), printer.multipliers, fast=printer.fast)
        large = dataclasses.replace(shared.function, operations=count)
        by_level[level] = dataclasses.replace(shared, function=large)
    values = dict(code.block.lets)
    body = [printer.let(symbol, values[symbol]) for symbol in code.needed(Level.SCORE)]
    function = SpecFunction.create(
        name,
        returns,
        why,
        [*body, f"return {result()};"],
        _symbols(code, Level.SCORE),
        extra_params=_extra_params(code, Level.SCORE, by_level),
        operations=operations(_computed(code, Level.SCORE), printer.multipliers, fast=printer.fast),
    )
    return FunctionInParts(function, *(by_level.get(level) for level in _WORDS))


def values_of(
    prefix: str, why: str, code: LeveledCode, printer: CPrinter
) -> dict[Level, SharedValues]:
    """The values of each level that has some; afterwards the printer reads them by their fields.

    Args:
        prefix: the first word of their names.
        why: the comment of their functions, with {one} or {many} for the words of the level.
    """
    values = dict(code.block.lets)
    printer.begin(code.block)
    by_level: dict[Level, SharedValues] = {}
    for level, word in _WORDS.items():
        symbols = code.values(level)
        if not symbols:
            continue
        body = [printer.let(symbol, values[symbol]) for symbol in code.needed(level)]
        names = [printer.names[symbol] for symbol in symbols]
        kind, variable = f"{prefix}_{word}".title().replace("_", ""), f"{prefix}_{word}"
        fields = [
            f"  {printer.let_type(s, values[s])} {n};" for s, n in zip(symbols, names, strict=True)
        ]
        function = SpecFunction.create(
            f"{variable}_values",
            kind,
            comment(why.format(one=word, many=_MANY[level])),
            [*body, f"return {{{', '.join(names)}}};"],
            _symbols(code, level),
            extra_params=_extra_params(code, level, by_level),
            struct="\n".join([f"struct {kind} {{", *fields, "};"]),
        )
        several = f"{prefix}_{_MANY[level]}"
        by_level[level] = SharedValues(kind, variable, several, function, function.call())
        printer.names |= {s: f"{variable}.{n}" for s, n in zip(symbols, names, strict=True)}
    return by_level


def _computed(code: LeveledCode, level: Level) -> list[sympy.Basic]:
    """The expressions that the code of a level computes."""
    values = dict(code.block.lets)
    exprs = [values[symbol] for symbol in code.needed(level)]
    return exprs + list(code.block.results if level is Level.SCORE else ())


def _read(code: LeveledCode, level: Level) -> set[sympy.Symbol]:
    """The symbols, names of other values included, that the code of a level reads."""
    return set().union(*(expr.free_symbols for expr in _computed(code, level)))


def _symbols(code: LeveledCode, level: Level) -> set[sympy.Symbol]:
    return _read(code, level) & PARAMETERS.keys()


def _extra_params(
    code: LeveledCode, level: Level, by_level: dict[Level, SharedValues]
) -> list[str]:
    """The parameters for the values of earlier levels that the code of a level reads."""
    read = _read(code, level)
    return [
        f"const {values.kind}& {values.name}"
        for earlier, values in by_level.items()
        if not read.isdisjoint(code.values(earlier))
    ]
