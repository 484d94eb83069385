"""The user's lines and names in the graph that torch.compile has made of a mod.

The graph takes the tensors that the mod captures as arguments, whose names torch makes of the way
to each of them. That way ends in a cell of a closure, whose number is its place among the free
variables of the code, or in a global name or an attribute, in lower case.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

import torch
from torch import fx


class UserLine(NamedTuple):
    """Where the user's code made a node.

    Attributes:
        name: the name of the function.
    """

    file: str
    line: int
    name: str


def user_line(node: fx.Node) -> UserLine | None:
    """The innermost line of a node's stack that is not torch's."""
    locations = re.findall(r'File "(.*)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    users = [location for location in locations if not location[0].startswith(torch.__path__[0])]
    return UserLine(users[-1][0], int(users[-1][1]), users[-1][2]) if users else None


def name_of(placeholder: fx.Node) -> str:
    """The variable or attribute with which the user's code reads an argument; "" if unknown."""
    lines = (user_line(user) for user in placeholder.users)
    location = next((line for line in lines if line is not None), None)
    names = {name for code in _codes(location) for name in _names_in(code, str(placeholder.target))}
    return names.pop() if len(names) == 1 else ""


def _codes(location: UserLine | None) -> Iterator[CodeType]:
    """The functions of this name that have the line: several where lambdas share it."""
    if location is not None:
        for code in _codes_of(location.file):
            if code.co_name == location.name and any(
                line == location.line for *_, line in code.co_lines()
            ):
                yield code


@functools.lru_cache(maxsize=64)
def _codes_of(file: str) -> tuple[CodeType, ...]:
    """All functions of a file or of a cell of a notebook."""
    try:
        waiting = [compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):  # no Python alone, such as a cell with magic commands
        return ()
    codes = []
    while waiting:
        codes.append(waiting.pop())
        waiting += [constant for constant in codes[-1].co_consts if isinstance(constant, CodeType)]
    return tuple(codes)


def _names_in(code: CodeType, target: str) -> Iterator[str]:
    """The name of the code that the name of an argument ends in."""
    cell = re.search(r"closure_(\d+)_cell_contents_*$", target)
    if cell is not None:
        yield from code.co_freevars[int(cell[1]) :][:1]
        return
    ending = f"_{target.strip('_')}"
    names = (*code.co_freevars, *code.co_varnames, *code.co_names)
    fitting = [name for name in names if name and ending.endswith(f"_{_as_torch(name)}")]
    yield from sorted(fitting, key=len)[-1:]


def _as_torch(name: str) -> str:
    """A name as it is in names of nodes."""
    return re.sub(r"[^0-9a-z]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).strip("_")
