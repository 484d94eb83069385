"""The properties of a code path, which follow from the instructions that its kernels use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodePath:
    """The properties of the kernels that compute scores on one code path.

    Kernels that compute no scores, which are bound by memory, are the same on every path.

    Attributes:
        name: the name of the path, which is that of the first architecture that has it.
        only_on: the architectures whose kernels take this path because its instructions exist on
            them alone; () for the path of all others.
        fallback: the name of the path that serves where this one cannot: operands of another size,
            or not aligned for TMA; "" where there is none.
        templates: the folder of its templates in ``templates/``.
        instructions: the instructions of its kernels, in words.
        models: the modules of `kernels.planner.models` with the cost models of its kernels.
        constants: the key of the fitted constants of their times in
            `kernels.planner.models.fitted_time.CONSTANTS`.
        template_fields: the module of `kernels.codegen` with the fields that only its templates
            have; "" where there are none.
        itemsizes: bytes per element of the operands that its kernels take.
        copies_by_tma: whether TMA copies the tiles of operands to shared memory, so that operands
            are tensor maps, aligned to 16 bytes.
        persistent: the kernels whose blocks compute one work tile after another.
        dependents: pairs of kernels that follow each other in a call, whose second one may be
            launched while the first still runs (programmatic dependent launch). This table alone
            decides which launches overlap: in the kernels, in every launcher, in the time model.
            The first kernel of a call is second in no pair, and the last one is first in none, so
            that a call as a whole keeps its place in the stream. The second executes
            griddepcontrol.wait before it accesses what the first writes, and in blocks without work
            too; only then it lets a third one start. So at most two run at once: when C of A, B, C
            starts, B has seen the end of A, and C waits for that of B.
        tensor_rate: the field of `flashgen.shared.arch.Arch` with the rate of its matrix products.
        group_rows: query rows that one instruction or one box of TMA takes together, at least: the
            rows that a forward tile has of one head, or whole numbers of heads, divide them.
        fragment: C++ of the accumulators of scores n, [2 rows][2 columns] of a lane.
        dq_sums: the order of the float32 sums of dQ in global memory, in words.
        dq_strips: whether these are strips of dQ^T, 16 columns of dQ each, the last one padded.
    """

    name: str
    only_on: tuple[str, ...]
    fallback: str
    templates: str
    instructions: str
    models: tuple[str, ...]
    constants: str
    template_fields: str
    itemsizes: tuple[int, ...]
    copies_by_tma: bool
    persistent: tuple[str, ...]
    dependents: tuple[tuple[str, str], ...]
    tensor_rate: str
    group_rows: int
    fragment: str
    dq_sums: str
    dq_strips: bool

    def __str__(self) -> str:
        return self.name
