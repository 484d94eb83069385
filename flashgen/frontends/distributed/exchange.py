"""Tensors sent between ranks, with errors that name the peer and the step."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from flashgen.shared.errors import FlashgenError, InputError

Tensor = torch.Tensor

WHERE = "flashgen.distributed.attention"

REFUSAL = b"refused: "
"""The beginning of the note of a rank that has refused its arguments."""

NOTE_BYTES = 1024
"""The length of the notes that ranks exchange before a call of a new kind."""

_NOTES = 1
"""The tag of notes, which are no part of the transfers that a peer may wait for instead."""

_unread: deque[Pending] = deque(maxlen=256)
"""Notes of refusals, which peers may read later: a transfer ends with its object."""


class DistributedError(FlashgenError):
    """A transfer between ranks did not complete."""


def refuse(
    what: str, argument: str, numbers: str, way_out: str = "", function: str = WHERE
) -> NoReturn:
    raise InputError(
        what,
        where=f"argument {argument} of {function}",
        numbers=numbers,
        way_out=way_out or "the operator itself, on one device",
    )


def group_of(group: Any, where: str) -> Any:
    """The process group that an argument ``group`` of the function ``where`` means.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the default group.

    Raises:
        InputError: there is no such group, or this rank is not one of its ranks.
    """
    what, numbers, way_out = "", "", ""
    if not dist.is_available() or not dist.is_initialized():
        what = "no process group has been made"
        numbers = "torch.distributed is not initialised"
        way_out = "torch.distributed.init_process_group(...), under torchrun"
    elif hasattr(group, "get_group") and group.ndim != 1:  # a DeviceMesh
        what, numbers, way_out = "a mesh has one dimension here", f"{group}", 'mesh["cp"]'
    else:
        try:
            process_group = group.get_group() if hasattr(group, "get_group") else group
            process_group = dist.group.WORLD if process_group is None else process_group
            if dist.get_rank(process_group) >= 0:
                return process_group
        except (RuntimeError, ValueError, TypeError):
            pass  # what is no group
        what = "this rank has no such group"
        numbers = f"rank {dist.get_rank()} of {dist.get_world_size()}, group {group!r:.200}"
        way_out = "a process group or a mesh of which this rank is a member; None for all ranks"
    refuse(what, "group", numbers, way_out, where)


class Transfer(NamedTuple):
    """A tensor that is sent to or received from a rank of the group."""

    peer: int
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Pending:
    """Transfers that are under way; their tensors live as long as this object."""

    exchange: Exchange
    step: str
    works: list[tuple[Any, str]]
    transfers: Sequence[Transfer]

    def wait(self) -> None:
        """Returns when all are done.

        Raises:
            DistributedError: a peer is gone, or the time limit of the group has passed.
        """
        self.exchange.pending.remove(self)
        for work, description in self.works:
            with self.exchange.naming(self.step, description):
                work.wait()


class Exchange:
    """Transfers within a group.

    Attributes:
        device: "cuda" where the group sends tensors on GPUs, else "cpu".
        pending: the transfers that have been started and nobody has waited for.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        self.pending: list[Pending] = []

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Waits for transfers before an error passes: dropped transfers jam a group."""
        try:
            yield
        except DistributedError:
            raise
        except Exception:
            with contextlib.suppress(DistributedError):
                while self.pending:
                    self.pending[0].wait()
            raise

    @contextlib.contextmanager
    def naming(self, step: str, description: str) -> Iterator[None]:
        """Errors of torch are those of a transfer, with the first sentence of torch's message."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            reason = re.sub(r"^\[[^\]]*\] *", "", line)  # without torch's source file
            raise DistributedError(
                f"a transfer of rank {self.rank} of {self.world} failed",
                where=f"{WHERE}, {step}",
                numbers=f"{description}: {reason.partition('. ')[0]}",
                way_out="look for the error of the peer that is named: it ended or raised first",
            ) from error

    def start(
        self, sent: Sequence[Transfer], received: Sequence[Transfer], step: str, tag: int = 0
    ) -> Pending:
        """Starts all transfers; both sides list those between them in the same order."""
        operations, descriptions = [], []
        for verb, function, transfers in (
            ("send to", dist.isend, sent),
            ("receive from", dist.irecv, received),
        ):
            for peer, tensor in transfers:
                if tensor.numel():
                    peer_options = {"group": self.group, "group_peer": peer, "tag": tag}
                    operations.append(dist.P2POp(function, tensor, **peer_options))
                    descriptions.append(
                        f"{verb} rank {peer}, {tensor.numel() * tensor.itemsize:,} B"
                    )
        works: list[Any] = []
        if operations:
            with self.naming(step, descriptions[0]):
                works = dist.batch_isend_irecv(operations)
        if len(works) != len(descriptions):  # NCCL has one work for all
            descriptions = ["; ".join(descriptions)] * len(works)
        named = list(zip(works, descriptions, strict=True))
        self.pending.append(Pending(self, step, named, (*sent, *received)))
        return self.pending[-1]

    def swap(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], step: str, tag: int = 0
    ) -> Pending:
        """Starts to send each other rank its tensor of ``sent``, and to receive that rank's."""
        peers = [peer for peer in range(self.world) if peer != self.rank]
        to_send, to_receive = (
            [Transfer(peer, tensors[peer]) for peer in peers] for tensors in (sent, received)
        )
        return self.start(to_send, to_receive, step, tag)

    def notes(self, note: bytes, step: str) -> list[bytes]:
        """The note of each rank, of at most `NOTE_BYTES`."""
        pending, notes = self._start_notes(note, step)
        failure = None
        try:
            pending.wait()
        except DistributedError as error:
            failure = error
        notes_of_ranks = [bytes(other.tolist()).rstrip(b"\0") for other in notes]
        # A rank may end as soon as it has said that it refuses its arguments.
        if failure is not None and not any(other.startswith(REFUSAL) for other in notes_of_ranks):
            raise failure
        return notes_of_ranks

    def leave_note(self, note: bytes, step: str) -> None:
        """Sends a note to all ranks that exchange notes, and waits for none of them."""
        with contextlib.suppress(DistributedError):  # the others have ended
            _unread.append(self._start_notes(note, step)[0])

    def _start_notes(self, note: bytes, step: str) -> tuple[Pending, list[Tensor]]:
        padded = list(note[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0"))
        own_note = torch.tensor(padded, dtype=torch.uint8, device=self.device)
        notes = [
            own_note if r == self.rank else torch.zeros_like(own_note) for r in range(self.world)
        ]
        return self.swap([own_note] * self.world, notes, step, _NOTES), notes

    def sum(self, tensors: Sequence[Tensor], step: str, *, in_order: bool = False) -> None:
        """Replaces each tensor by its sum over the ranks.

        Args:
            in_order: whether terms are added in the order of the ranks, bitwise reproducible, which
                takes the memory of all terms; all_reduce may add them in any order.
        """
        for tensor in tensors:
            with self.naming(step, "sum over all ranks"):
                if in_order:
                    terms = [torch.empty_like(tensor) for _ in range(self.world)]
                    dist.all_gather(terms, tensor, group=self.group)
                    tensor.copy_(functools.reduce(torch.add, terms))
                else:
                    dist.all_reduce(tensor, group=self.group)

    def from_first(self, tensor: Tensor, step: str) -> None:
        """Replaces the tensor by that of rank 0 of the group."""
        with self.naming(step, "receive from rank 0"):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def values_of_ranks(self, value: Any, step: str) -> list[Any]:
        """The small values that the ranks give."""
        values: list[Any] = [None] * self.world
        with self.naming(step, "receive from all ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values
