"""The last line of an error message: what to write instead, from the user's own source line."""

from __future__ import annotations

import ast
import linecache
from functools import reduce
from types import FrameType

from flashgen.spec.language import float_functions
from flashgen.spec.language.user_source import parsed, user_frame

FUNCTIONS = (
    *("where", "minimum", "maximum", "abs", "sqrt", "rsqrt", "exp2", *float_functions.FUNCTIONS),
    *("floor", "round", "sign", "clamp", "isfinite", "popcount"),
)

LANGUAGE = f"operators and the functions of flashgen: fg.{', '.join(FUNCTIONS)}"

_ALIASES = {
    "max": "maximum",
    "min": "minimum",
    "fabs": "abs",
}


_AS_IT_IS = ("item", "detach", "clone", "contiguous")
"""The methods of torch's tensors that a traced value does without."""


def for_attribute(name: str) -> str:
    """What to write instead of a method ``name`` of a traced value."""
    function = _ALIASES.get(name, name)
    for node in _nodes_of_line(*_user_line()):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == name and name in _AS_IT_IS:
            return f"{ast.unparse(node.func.value)} instead of {ast.unparse(node)}"
        if node.func.attr == name and function in FUNCTIONS:
            return _function(function, [node.func.value, *node.args], node)
    if function in FUNCTIONS:
        return f"fg.{function}({', '.join(_parameters(function))})"
    return f"a function of flashgen ({', '.join(FUNCTIONS)})"


def for_type(value: object) -> str:
    """What to use instead of a value of an unsupported type."""
    kind = type(value).__name__
    if kind in ("Tensor", "ndarray", "Parameter"):
        return (
            'capture it: t = fg.Tensor("t", dims, dtype), an element such as t[h] in the mod, and '
            "op(q, k, v, t=...); or .item() for a constant"
        )
    if isinstance(value, str | bytes | None.__class__ | list | tuple | dict | set):
        return "an int, a float, a bool, an fg.Scalar or another traced value"
    if isinstance(value, complex):
        return "a real number"
    return "a Python number, or fg.Scalar for a number given at run time"


def for_truth_value() -> str:
    """How to rewrite the construct of the user's line that needs a truth value."""
    for rewrite in (_rewrite, _searched):
        for node in _nodes_of_line(*_user_line()):
            rewritten = rewrite(node)
            if rewritten:
                return rewritten
    return (
        "fg.where(condition, a, b) for if; & | ~ for and, or, not; "
        "(a <= b) & (b < c) for a <= b < c; fg.minimum and fg.maximum for min and max"
    )


def for_call(file: str | None = None, line: int = 0) -> str:
    """The function of flashgen for a call on a line; by default the line that is running."""
    for node in _nodes_of_line(file, line) if file else _nodes_of_line(*_user_line()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = _ALIASES.get(node.func.attr, node.func.attr)
            if name in FUNCTIONS:
                return _function(name, node.args, node)
    return LANGUAGE


def _function(name: str, arguments: list[ast.expr], node: ast.Call) -> str:
    """A function of flashgen with these arguments instead of a call of the user's line."""
    written, parameters = ast.unparse(node), _parameters(name)
    call = f"fg.{name}({', '.join(map(ast.unparse, arguments))})"
    if node.keywords or len(arguments) != len(parameters) or call == written:
        return f"fg.{name}({', '.join(parameters)})"
    return f"{call} instead of {written}"


def _parameters(name: str) -> tuple[str, ...]:
    return _PARAMETERS.get(name, ("x",))


def for_key() -> str:
    """How to write a line that hashes a traced value to search a set or a dictionary."""
    for node in _nodes_of_line(*_user_line()):
        searched = _searched(node) if isinstance(node, ast.Compare) else None
        if searched is not None:
            return searched
    choice = "fg.where(condition, a, b) to choose between values; helpers without functools.cache"
    return for_index() or choice


def for_index() -> str | None:
    """How to capture the array that the user's line indexes; None where it indexes none."""
    frame = user_frame()
    for node in _nodes_of_line(*_user_line()):
        literal = ast.List | ast.Tuple | ast.Dict
        if not isinstance(node, ast.Subscript) or isinstance(node.value, literal):
            continue
        if not _is_captured(node.value, frame):
            name = node.value.id if isinstance(node.value, ast.Name) else "table"
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            dims = tuple(_DIMS.get(ast.unparse(index), "n") for index in indices)
            return (
                f"capture it: {name} = fg.Tensor({name!r}, {dims!r}, dtype), "
                f"{name}[{', '.join(map(ast.unparse, indices))}] in the mod, and "
                f"op(q, k, v, {name}=...)"
            )
    return None


def _is_captured(node: ast.expr, frame: FrameType | None) -> bool:
    """Whether an expression of the user's line is the name of an fg.Tensor."""
    if frame is None or not isinstance(node, ast.Name):
        return False
    value = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    return type(value).__module__.startswith("flashgen.")


_DIMS = {"b": "batch", "h": "heads", "q": "seq_q", "k": "seq_k"}
_PARAMETERS = {
    "where": ("condition", "a", "b"),
    **{"minimum": ("a", "b"), "maximum": ("a", "b")},
    **{"clamp": ("x", "low", "high"), "atan2": ("y", "x")},
}


def _user_line() -> tuple[str, int]:
    frame = user_frame()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _nodes_of_line(file: str, line: int) -> list[ast.AST]:
    """The syntax nodes that include this line, the shortest first."""
    nodes = [
        node
        for node in ast.walk(parsed("".join(linecache.getlines(file))))
        if isinstance(node, ast.expr | ast.If | ast.While | ast.Assert)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return sorted(nodes, key=lambda node: len(ast.unparse(node)))


def _rewrite(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return f"{_joined(node) or _unchained(node)} instead of {ast.unparse(node)}"
    if isinstance(node, ast.BoolOp):
        sign = " & " if isinstance(node.op, ast.And) else " | "
        return f"{sign.join(map(_bracketed, node.values))} instead of {ast.unparse(node)}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"~{_bracketed(node.operand)} instead of {ast.unparse(node)}"
    if isinstance(node, ast.IfExp):
        parts = (node.test, node.body, node.orelse)
        return f"fg.where({', '.join(map(ast.unparse, parts))}) instead of {ast.unparse(node)}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = {"min": "fg.minimum", "max": "fg.maximum"}.get(node.func.id)
        numbers = node.args
        if len(numbers) == 1 and isinstance(numbers[0], ast.List | ast.Tuple):
            numbers = numbers[0].elts
        if name and len(numbers) > 1:
            nested = reduce(lambda a, b: f"{name}({a}, {b})", map(ast.unparse, numbers))
            return f"{nested} instead of {ast.unparse(node)}"
        if node.func.id == "bool":
            return f"{ast.unparse(node.args[0])} as it is" if node.args else None
    if isinstance(node, ast.If | ast.While | ast.Assert):
        return f"fg.where({ast.unparse(node.test)}, a, b): both values are computed, one is kept"
    return None


def _searched(node: ast.AST) -> str | None:
    """``x in (a, b)``, and any() and all() of conditions, as conditions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        sign, values = {"any": "or_", "all": "and_"}.get(node.func.id), node.args[0]
        if sign is None:
            return None
        text = argument = ast.unparse(values)
        if isinstance(values, ast.GeneratorExp):
            text, argument = f"[{text[1:-1]}]", text[1:-1]
        return f"functools.reduce(operator.{sign}, {text}) instead of {node.func.id}({argument})"
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.In | ast.NotIn):
        return None
    x, items = _bracketed(node.left), node.comparators[0]
    if isinstance(items, ast.Tuple | ast.List | ast.Set) and items.elts:
        conditions = " | ".join(f"({x} == {ast.unparse(value)})" for value in items.elts)
    elif isinstance(items, ast.Call) and ast.unparse(items.func) == "range" and items.args:
        first, end = [*["0"][: len(items.args) == 1], *map(ast.unparse, items.args)][:2]
        conditions = f"({x} >= {first}) & ({x} < {end})"
        if len(items.args) == 3:
            conditions += f" & (({x} - {first}) % {ast.unparse(items.args[2])} == 0)"
    else:
        conditions = (
            f"functools.reduce(operator.or_, [{x} == each for each in {ast.unparse(items)}])"
        )
    if isinstance(node.ops[0], ast.NotIn):
        conditions = f"~({conditions})"
    return f"{conditions} instead of {ast.unparse(node)}"


def _joined(node: ast.Compare) -> str | None:
    """``a < b & c < d``, which Python reads as ``a < (b & c) < d``, with brackets."""
    middle = node.comparators[0]
    if len(node.ops) != 2 or not isinstance(middle, ast.BinOp):
        return None
    sign = {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}.get(type(middle.op))
    if sign is None:
        return None
    ends = ((node.left, node.ops[0], middle.left), (middle.right, node.ops[1], node.comparators[1]))
    links = (ast.unparse(ast.Compare(left=a, ops=[op], comparators=[b])) for a, op, b in ends)
    return f" {sign} ".join(f"({link})" for link in links)


def _unchained(node: ast.Compare) -> str:
    operands = [node.left, *node.comparators]
    links = [
        ast.unparse(ast.Compare(left=a, ops=[op], comparators=[b]))
        for a, op, b in zip(operands, node.ops, operands[1:], strict=False)
    ]
    return " & ".join(f"({link})" for link in links)


def _bracketed(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Call | ast.Constant) else f"({text})"
