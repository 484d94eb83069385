"""Tensors sent between ranks, with errors that name the peer and the step."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashgen.shared.errors import FlashgenError, InputError

Tensor = torch.Tensor


class DistributedError(FlashgenError):
    """A transfer between ranks did not complete."""


def group_of(group: Any, where: str) -> Any:
    """The process group that an argument ``group`` of the function ``where`` means.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the default group.
    """
    what, numbers, way_out = "", "", ""
    if not dist.is_available() or not dist.is_initialized():
        what = "no process group has been made"
        numbers = "torch.distributed is not initialised"
        way_out = "torch.distributed.init_process_group(...), under torchrun"
    elif hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim == 1:
            return group.get_group()
        what, numbers, way_out = "a mesh has one dimension here", f"{group}", 'mesh["cp"]'
    if what:
        raise InputError(what, where=f"argument group of {where}", numbers=numbers, way_out=way_out)
    return dist.group.WORLD if group is None else group


class Transfer(NamedTuple):
    """A tensor that is sent to or received from a rank of the group."""

    peer: int
    tensor: Tensor


class Pending:
    """Transfers that are under way."""

    def __init__(
        self, works: list[tuple[Any, str]], group: Any, step: str, transfers: Sequence[Transfer]
    ) -> None:
        """
        Args:
            transfers: those under way; their tensors live as long as this object.
        """
        self._works = works
        self._transfers = transfers
        self._group = group
        self._step = step

    def wait(self) -> None:
        """Returns when all are done.

        Raises:
            DistributedError: a peer is gone, or the time limit of the group has passed.
        """
        for work, what in self._works:
            try:
                work.wait()
            except (RuntimeError, ValueError) as error:
                raise failed(self._group, self._step, what, error) from error


def failed(group: Any, step: str, what: str, error: Exception) -> DistributedError:
    """The error of a transfer; of torch's message, the first sentence without its source file."""
    reason = re.sub(r"^\[[^\]]*\] *", "", (str(error).splitlines() or [type(error).__name__])[0])
    return DistributedError(
        f"a transfer of rank {dist.get_rank(group)} of {dist.get_world_size(group)} failed",
        where=f"flashgen.distributed.attention, {step}",
        numbers=f"{what}: {reason.partition('. ')[0]}",
        way_out="look for the error of the peer that is named: it ended or raised first",
    )


class Exchange:
    """Point-to-point transfers within a group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def start(self, sent: Sequence[Transfer], received: Sequence[Transfer], step: str) -> Pending:
        """Starts all transfers; both sides list those between them in the same order."""
        operations, what = [], []
        for verb, function, transfers in (
            ("send to", dist.isend, sent),
            ("receive from", dist.irecv, received),
        ):
            for peer, tensor in transfers:
                if tensor.numel():
                    operations.append(
                        dist.P2POp(function, tensor, group=self.group, group_peer=peer)
                    )
                    what.append(f"{verb} rank {peer}, {tensor.numel() * tensor.itemsize:,} B")
        if not operations:
            return Pending([], self.group, step, ())
        try:
            works = dist.batch_isend_irecv(operations)
        except (RuntimeError, ValueError) as error:
            raise failed(self.group, step, what[0], error) from error
        if len(works) != len(what):  # NCCL has one work for all
            what = ["; ".join(what)] * len(works)
        named = list(zip(works, what, strict=True))
        return Pending(named, self.group, step, (*sent, *received))

    def sum(self, tensors: Sequence[Tensor], step: str, *, in_order: bool = False) -> None:
        """Replaces each tensor by its sum over the ranks.

        Args:
            in_order: whether terms are added in the order of the ranks, bitwise reproducible, which
                takes the memory of all terms; all_reduce may add them in any order.
        """
        for tensor in tensors:
            try:
                if in_order:
                    terms = [torch.empty_like(tensor) for _ in range(self.world)]
                    dist.all_gather(terms, tensor, group=self.group)
                    tensor.copy_(functools.reduce(torch.add, terms))
                else:
                    dist.all_reduce(tensor, group=self.group)
            except (RuntimeError, ValueError) as error:
                raise failed(self.group, step, "sum over all ranks", error) from error

    def from_first(self, tensor: Tensor, step: str) -> None:
        """Replaces the tensor by that of rank 0 of the group."""
        try:
            dist.broadcast(tensor, group=self.group, group_src=0)
        except (RuntimeError, ValueError) as error:
            raise failed(self.group, step, "receive from rank 0", error) from error

    def everyones(self, value: Any, step: str) -> list[Any]:
        """A small value of each rank."""
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, value, group=self.group)
        except (RuntimeError, ValueError) as error:
            raise failed(self.group, step, "receive from all ranks", error) from error
        return found
