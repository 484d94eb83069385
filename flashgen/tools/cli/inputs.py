"""Specs, shapes and scalars from the arguments of a command."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH
from flashgen.shared.dtypes import OPERAND_DTYPES, POSITION_LIMIT, SCALAR_DTYPES, number_of_digits
from flashgen.shared.errors import InputError, SpecError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_file import file_and_variable, load
from flashgen.tools.cli.arguments import PlanArguments, SpecChanges, TuneArguments

Number = int | float | bool


def changed_spec(path: str, changes: SpecChanges) -> AttentionSpec:
    """The spec of a file, with another dtype, other head dims and dropout where they are given.

    With --page it is the spec of contiguous keys, which the command copies to pages of its own.

    Raises:
        SpecError: there is no such spec, or a change does not suit it.
    """
    spec = load(path)
    values, codes = _changed_values(changes), getattr(changes, "kv_dtype", None)
    if spec.dtype is None and "dtype" not in values:
        raise SpecError(
            "a command needs one dtype of q, k and v",
            where=path,
            numbers=f"spec {spec.name} has dtype None: each call has the dtype of its q",
            way_out=f"--dtype {', or '.join(OPERAND_DTYPES)}",
        )
    try:
        changed = spec.replace(**values) if values else spec
        if codes is not None:  # the plan makes the spec of such calls itself
            changed.replace(paged=True, kv_dtype=codes)
    except SpecError as error:
        options = [*options_of(changes), *([("--kv-dtype", codes)] if codes else [])]
        where = f"{path} with {', '.join(map(' '.join, options))}"
        raise SpecError(
            error.what, where=where, numbers=error.numbers, way_out=error.way_out
        ) from None
    if changed.kv_dtype is not None and hasattr(changes, "page"):
        raise InputError(
            "an option gives the codes of the caches that a command makes",
            where=path,
            numbers=f"spec {changed.name} has kv_dtype {changed.kv_dtype!r}",
            way_out="a spec without kv_dtype, and --decode --page 16 --kv-dtype "
            f"{changed.kv_dtype}",
        )
    if changed.paged and getattr(changes, "page", None):
        changed = changed.replace(paged=False)
    return changed.replace(dropout=True) if getattr(changes, "dropout", False) else changed


def _changed_values(changes: SpecChanges) -> dict[str, Any]:
    """The changes that the command line gives, by the names of the spec's attributes."""
    values = {field.name: getattr(changes, field.name) for field in fields(SpecChanges)}
    return {name: value for name, value in values.items() if value is not None}


def check_one_pass(arguments: PlanArguments | TuneArguments) -> None:
    """Checks that the options name at most one pass beside the forward one.

    Raises:
        InputError: they name two.
    """
    if arguments.backward and arguments.tangent:
        raise InputError(
            "the command shows one pass at a time",
            where="options --backward and --tangent",
            numbers="both are given, each instead of the forward kernel",
            way_out="leave one of them out",
        )


def options_of(changes: SpecChanges) -> list[tuple[str, str]]:
    """The options that give these changes, each with its value."""
    values = _changed_values(changes)
    return [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items()]


@dataclass(frozen=True)
class Shape:
    """Sizes of a run: the operands' batch, heads and lengths."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int

    def __str__(self) -> str:
        heads = f"{self.heads_q}"
        if self.heads_kv != self.heads_q:
            heads += f" over {self.heads_kv}"
        return f"batch {self.batch}, heads {heads}, seq {self.seq_q} x {self.seq_k}"


def parse_shape(text: str, option: str = "--shape") -> Shape:
    """``B,H,N`` or ``B,Hq,Hkv,Nq,Nk``.

    Raises:
        InputError: another form.
    """
    numbers = [number_of_digits(part.strip()) for part in text.split(",")]
    sizes = [number for number in numbers if number is not None and number <= POSITION_LIMIT]
    if len(numbers) == len(sizes) == 3:
        batch, heads, seq = sizes
        return Shape(batch, heads, heads, seq, seq)
    if len(numbers) == len(sizes) == 5:
        return Shape(*sizes)
    raise InputError(
        "this is not a shape",
        where=f"option {option}",
        numbers=f"given {text[:80]!r}; each size is at most {POSITION_LIMIT:,}",
        way_out=f"{option} B,H,N as in 1,4,256, or {option} B,Hq,Hkv,Nq,Nk as in 1,8,2,128,512",
    )


def arch_of(option: str | None) -> str:
    """The architecture that is given, or else set by FLASHGEN_ARCH, or else the default."""
    return option or config.arch() or DEFAULT_ARCH


OWN_TILE = "plan"


def parse_tile(text: str) -> tuple[int, int] | None:
    """Query rows and keys of ``QxK``; None for ``plan``, the plan's own tile.

    Raises:
        InputError: another form.
    """
    if text == OWN_TILE:
        return None
    texts = text.split("x")
    rows, keys = map(number_of_digits, texts) if len(texts) == 2 else (None, None)
    if rows is not None and keys is not None:
        return rows, keys
    raise InputError(
        "this is not a tile",
        where="option --tile",
        numbers=f"given {text[:40]!r}",
        way_out="query rows x keys, as in --tile 64x32, or --tile plan for the plan's own",
    )


def scalar_values(
    spec: AttentionSpec, path: str, options: Sequence[str]
) -> tuple[dict[str, Number], list[str]]:
    """A value for each scalar: from ``--scalar name=value``, or else the spec file's example.

    A spec file may define ``example_scalars = {"window": 64}`` at its top level.

    Returns:
        The values, and the names of those that are the file's example.

    Raises:
        InputError: an option is malformed or names no scalar, or a scalar has no value.
    """
    # Loaded here, because it needs torch.
    from flashgen.calls.ops import scalar_value

    option_values = dict(_parse_option(spec, option) for option in options)
    examples = example_scalars(path)
    values: dict[str, Number] = {}
    for scalar in spec.scalars:
        if scalar.name in option_values:
            values[scalar.name] = scalar_value(scalar, option_values[scalar.name])
        elif scalar.name in examples:
            values[scalar.name] = scalar_value(scalar, examples[scalar.name])
        else:
            raise InputError(
                f"the scalar {scalar.name!r} of the spec has no value",
                where=f"{path}, option --scalar",
                numbers=f"{scalar!r}; the file has no example_scalars for it",
                way_out=f"--scalar {scalar.name}=...",
            )
    return values, [name for name in values if name not in option_values]


def _parse_option(spec: AttentionSpec, option: str) -> tuple[str, object]:
    name, equals, text = option.partition("=")
    scalar = next((scalar for scalar in spec.scalars if scalar.name == name.strip()), None)
    if not equals or scalar is None:
        names = ", ".join(scalar.name for scalar in spec.scalars) or "none"
        raise InputError(
            "the option --scalar takes the name of a scalar of the spec and a value",
            where=f"option --scalar {option}",
            numbers=f"scalars of {spec.name}: {names}",
            way_out="--scalar name=value" if spec.scalars else "leave --scalar out",
        )
    dtype = SCALAR_DTYPES[scalar.dtype]
    value = dtype.parse(text.strip())
    if value is None:
        raise InputError(
            f"the scalar {scalar.name!r} cannot take this value",
            where=f"option --scalar {option}",
            numbers=f"given {text!r}; dtype {scalar.dtype}",
            way_out=f"--scalar {name}={dtype.example}",
        )
    return scalar.name, value


def example_scalars(path: str) -> Mapping[str, Any]:
    """The file's ``example_scalars``, read without running the file again; empty when it has none.

    Raises:
        InputError: it is not a dictionary of literals.
    """
    file = Path(file_and_variable(path)[0])
    for node in ast.parse(file.read_bytes()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if "example_scalars" not in [getattr(target, "id", None) for target in targets]:
            continue
        try:
            scalars = ast.literal_eval(node.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            scalars = None
        if isinstance(scalars, dict):
            return scalars
        raise InputError(
            "example_scalars is not a dictionary of names and plain numbers",
            where=f"{file.as_posix()}:{node.lineno}",
            numbers=ast.unparse(node.value)[:80],
            way_out='example_scalars = {"window": 64}',
        )
    return {}


def example_of(path: str, name: str) -> tuple[str | None, bool]:
    """The line of a spec file's examples that names a scalar or a tensor, and whether a scalar.

    The line is None where the examples do not name it as they are written.
    """
    file = Path(file_and_variable(path)[0])
    for node in ast.parse(file.read_bytes()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        is_function = isinstance(node, ast.FunctionDef) and node.name == "example_tensors"
        if is_function:
            candidates: Sequence[ast.AST] = list(ast.walk(node))
        elif "example_scalars" in [getattr(target, "id", None) for target in targets]:
            candidates = getattr(getattr(node, "value", None), "keys", [])
        else:
            continue
        for candidate in candidates:
            if isinstance(candidate, ast.Constant) and candidate.value == name:
                return f"{file.as_posix()}:{candidate.lineno}", not is_function
    return None, False


def check_folder(folder: Path, option: str) -> None:
    """Checks that files can be written into a folder, before the work that makes them.

    Raises:
        InputError: it is no folder, it does not exist, or it cannot be written.
    """
    reason = next(
        (
            text
            for wrong, text in (
                (not os.path.lexists(folder), "it does not exist"),
                (not os.path.isdir(folder), "it is not a folder"),
                (not os.access(folder, os.W_OK | os.X_OK), "it cannot be written"),
            )
            if wrong
        ),
        None,
    )
    if reason is not None:
        raise InputError(
            "no file can be written into this folder",
            where=f"option {option}",
            numbers=f"{folder.as_posix()}: {reason}",
            way_out="a folder that exists and that you can write",
        )


def check_file(file: Path, option: str) -> None:
    """Checks that a file can be written, before the work that makes it.

    Raises:
        InputError: its folder is none, or the file is a folder or cannot be written.
    """
    check_folder(file.parent, option)
    folder = os.path.isdir(file)
    if folder or (os.path.lexists(file) and not os.access(file, os.W_OK)):
        raise InputError(
            "this file cannot be written",
            where=f"option {option}",
            numbers=f"{file.as_posix()}: " + ("it is a folder" if folder else "it is read-only"),
            way_out=f"{option} with the name of another file",
        )
