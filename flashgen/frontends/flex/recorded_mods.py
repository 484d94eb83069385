"""Records of the mods of a call, with the user's lines and names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from flashgen.frontends.flex.recorder import ModRecorder, Operation, Reading
from flashgen.shared.errors import FlashgenError, SpecError
from flashgen.spec.language.user_source import (
    lines_of,
    shown_path,
    user_frame,
    user_line_in,
)

Tensor = torch.Tensor
Mod = Callable[..., Any]

POSITIONS = (torch.int64,) * 4
"""The arguments of a mask_mod: the batch entry, the head, the query and the key."""

SCORE_AND_POSITIONS = (torch.float32, *POSITIONS)
"""The arguments of a score_mod."""


class RecordedMod(NamedTuple):
    """A mod in a record.

    Attributes:
        end: the number of operations up to its end.
        returned: the noted result of the mod.
    """

    end: int
    returned: Hashable


class RecordKey(NamedTuple):
    """All that determines what mods compute, except for numbers and tensors."""

    operations: tuple[Operation, ...]
    reads: tuple[Reading, ...]
    mods: tuple[RecordedMod | None, RecordedMod | None]
    device: torch.device
    default_dtype: torch.dtype


class Record(NamedTuple):
    """What the mask_mod and the score_mod of a call compute.

    Attributes:
        numbers: the numbers among the operands, in order.
        tensors: the tensors that are read, in order.
        created_tensors: the tensors that the mods make of numbers, by their numbers.
        notes: the user's lines; None where they have not been noted.
    """

    key: RecordKey
    numbers: tuple[int | float, ...]
    tensors: tuple[Tensor, ...]
    created_tensors: dict[int, Tensor]
    notes: Notes | None


class Notes:
    """The user's lines and names, for messages and for the names of captured tensors.

    Attributes:
        literals: the indices of the numbers that are written in the code which uses them.
        names: the names of the tensors that are read; "" where none is found.
    """

    def __init__(self) -> None:
        self.literals: set[int] = set()
        self.names: list[str] = []
        self._operations: list[tuple[str, int]] = []  # file and line of each
        self._numbers: list[tuple[str, int]] = []

    def line(self, operation: int) -> str:
        """The ``file:line`` of an operation."""
        file, line = self._operations[operation]
        return f"{shown_path(file)}:{line}"

    def line_of(self, number: int) -> str:
        """The ``file:line`` at which a number becomes an operand."""
        file, line = self._numbers[number]
        return f"{shown_path(file)}:{line}"

    def add(self, recorder: ModRecorder) -> None:
        """Notes the line that is running, for all that has been recorded since the last one."""
        frame = user_frame()
        location = ("<unknown>", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        constants = () if frame is None else frame.f_code.co_consts
        written = [
            *constants,
            *(x for constant in constants if isinstance(constant, tuple) for x in constant),
        ]
        self._operations += [location] * (len(recorder.operations) - len(self._operations))
        for index in range(len(self._numbers), len(recorder.numbers)):
            number = recorder.numbers[index]
            self._numbers.append(location)
            if any(type(x) is type(number) and x == number for x in written):
                self.literals.add(index)
        for tensor in recorder.read[len(self.names) :]:
            self.names.append("" if frame is None else _name_in(frame, tensor))

    def name(self, recorder: ModRecorder, names_by_id: Any) -> None:
        """Names the tensors of a graph by their ids: the code of a graph has no frame."""
        for index, tensor in enumerate(recorder.read if isinstance(names_by_id, dict) else ()):
            self.names[index] = self.names[index] or names_by_id.get(id(tensor), "")


def uncompiled(mod: Mod | None) -> Mod | None:
    """The function that torch.compile has turned into a mod, and which computes the same."""
    if mod is None or not hasattr(mod, "_torchdynamo_orig_callable"):
        return mod
    from torch._dynamo.eval_frame import innermost_fn

    function: Mod = innermost_fn(mod)
    return function


def record(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    device: torch.device,
    notes: Notes | None = None,
    learned: bool = False,
) -> Record:
    """Executes mods once and records their operations.

    Args:
        device: the device of the queries.
        notes: where to note the user's lines too.
        learned: whether scores require gradients.

    Raises:
        SpecError: a mod raises an exception, or does what cannot be recorded.
    """
    recorder = ModRecorder(device, notes, learned)
    mods = (
        _recorded(recorder, "mask_mod", mask_mod, POSITIONS),
        _recorded(recorder, "score_mod", score_mod, SCORE_AND_POSITIONS),
    )
    key = RecordKey(
        tuple(recorder.operations),
        tuple(recorder.reads),
        mods,
        device,
        torch.get_default_dtype(),
    )
    return Record(
        key, tuple(recorder.numbers), tuple(recorder.read), recorder.created_tensors, notes
    )


def _recorded(
    recorder: ModRecorder, role: str, mod: Mod | None, dtypes: Sequence[torch.dtype]
) -> RecordedMod | None:
    if mod is None:
        return None
    if not callable(mod):
        raise SpecError(
            f"{role} is not a function",
            where=f"argument {role}",
            numbers=f"given a {type(mod).__name__}",
            way_out=f"{role}=None, or a function of {len(dtypes)} tensors without dimensions",
        )
    arguments = recorder.arguments(dtypes)
    try:
        with recorder:
            returned = mod(*arguments)
    except FlashgenError:
        raise
    except Exception as error:
        location = user_line_in(error)
        raise SpecError(
            f"{role} raised {type(error).__name__}",
            where=str(lines_of(mod, ""))
            if location is None
            else f"{shown_path(location[0])}:{location[1]}",
            numbers=f"{error}, while it was recorded on tensors without elements",
            way_out="a mod that torch's flex_attention runs too: functions of torch on tensors "
            "without dimensions",
        ) from error
    if not isinstance(returned, (Tensor, bool, int, float)):
        refuse_result(role, mod, f"returned a {type(returned).__name__}")
    result = recorder.noted(returned)
    if recorder.notes is not None:
        recorder.notes.add(recorder)
        recorder.notes.name(recorder, getattr(mod, "captured_names", None))
    return RecordedMod(len(recorder.operations), result)


def refuse_result(role: str, mod: Mod, numbers: str) -> NoReturn:
    """Raises SpecError for a mod that returns something else than a condition or a number."""
    is_mask = role == "mask_mod"
    example = "q_idx >= kv_idx" if is_mask else "score + bias[h, kv_idx]"
    raise SpecError(
        f"{role} must return one {'condition' if is_mask else 'number'}",
        where=str(lines_of(mod, "")),
        numbers=numbers,
        way_out=f"a tensor without dimensions, as in return {example}",
    )


def _name_in(frame: FrameType, tensor: Tensor) -> str:
    """The name under which code refers to a tensor: of a variable, or of an attribute of one."""
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in scope.items():
            if value is tensor:
                return str(name)
    for value in frame.f_locals.values():
        attributes = getattr(value, "__dict__", {})
        for store in (attributes, attributes.get("_parameters"), attributes.get("_buffers")):
            for name, attribute in store.items() if isinstance(store, dict) else ():
                if attribute is tensor:
                    return str(name)
    return ""
