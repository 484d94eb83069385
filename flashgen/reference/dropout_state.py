"""The seed and the offset of random numbers as the reference takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.shared.dropout import kept_levels
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

State = Sequence[int] | Tensor


def state_of(
    spec: AttentionSpec, p: float, rng: State | None, offsets: tuple[int | Tensor, int | Tensor]
) -> tuple[int, int] | None:
    """Seed and offset as integers; None when nothing is dropped."""
    kept_levels(p)
    if p == 0:
        return None
    if not spec.dropout:
        raise InputError(
            "dropout_p is given to a spec without dropout",
            where=f"reference of {spec.name}",
            numbers=f"dropout_p {p!r}, spec.dropout False",
            way_out="AttentionSpec(..., dropout=True), or dropout_p=0",
        )
    if any(isinstance(offset, Tensor) for offset in offsets):
        raise InputError(
            "dropout is not defined for offsets that are tensors",
            where=f"reference of {spec.name}, arguments q_offset and k_offset",
            numbers=f"given {offsets[0]!r} and {offsets[1]!r}; dropout_p {p!r}",
            way_out="offsets that are Python ints, or dropout_p=0",
        )
    return numbers_of(spec, rng, f"dropout_p {p!r}")


def numbers_of(spec: AttentionSpec, rng: State | None, use: str) -> tuple[int, int]:
    """Seed and offset as integers, which a call needs for a ``use``."""
    if isinstance(rng, Tensor):
        fits = rng.dtype == torch.int64 and rng.shape == (2,)
        numbers = [int(number) for number in rng.tolist()] if fits else []
    else:
        numbers = [] if rng is None else list(rng)
    if len(numbers) != 2 or any(type(number) is not int for number in numbers):
        shown = f"{rng.dtype} {tuple(rng.shape)}" if isinstance(rng, Tensor) else repr(rng)
        raise InputError(
            "the random state is not a seed and an offset",
            where=f"reference of {spec.name}, argument rng",
            numbers=f"given {shown}; {use}",
            way_out="rng=(seed, offset), or an int64 tensor of both",
        )
    return numbers[0], numbers[1]
