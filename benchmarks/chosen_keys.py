"""Queries that choose their keys: work counted in the emulator, and predicted times.

`python -m benchmarks.chosen_keys` prints two tables. The first runs small calls in the emulator:
the scores that are listed, those that the tiles compute, which are the listed ones of all rows of a
group, padded to tiles, and the sectors of the gathered keys beyond the fewest. The second is a
prediction of the planner for long calls. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import flashgen as fg
from flashgen.calls.runtime.arguments.call import Call
from flashgen.calls.runtime.chosen_keys import ChosenCall
from flashgen.calls.runtime.chosen_lists import FEWEST_ROWS, MOST_ROWS
from flashgen.calls.runtime.prepared_call import Setup
from flashgen.calls.runtime.programs import program_of
from flashgen.kernels.planner import (
    BackwardPlanRequest,
    Plan,
    columns_of_launch,
    plan,
    plan_schemes,
)
from flashgen.shared.arch import facts, portable
from flashgen.shared.call import DEFAULT_OPTIONS, Operands
from flashgen.shared.dtypes import ITEMSIZE
from flashgen.spec.language.chosen_specs import (
    by_groups,
    by_keys,
    by_listed_keys,
    value_gradients,
)
from flashgen.spec.language.signature import with_columns
from flashgen.tools.profile.run import profile_forward

ARCHS = ("sm_80", "sm_90a")


@dataclass(frozen=True)
class Choice:
    """One call.

    Attributes:
        heads, heads_kv: query heads and key heads.
        most: the keys that a group lists, at most.
        queries: queries and keys of the predicted call; the emulated call has `QUERIES` and
            `KEYS`.
    """

    name: str
    head_dim: int
    head_dim_v: int
    heads: int
    heads_kv: int
    block_q: int
    block_k: int
    most: int
    queries: int
    shared_kv: bool = False

    @property
    def spec(self) -> fg.AttentionSpec:
        return fg.AttentionSpec(
            mask_mod=lambda b, h, q, k: q >= k,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype="bfloat16",
            shared_kv=self.shared_kv,
            block_sparse=fg.BlockSparse(block_q=self.block_q, block_k=self.block_k, heads="kv"),
            name=self.name,
        )


CHOICES = (
    Choice("nsa", 192, 128, 64, 4, 1, 64, 1024, 65_536),
    Choice("nsa_groups_of_4", 192, 128, 64, 4, 4, 64, 1024, 65_536),
    Choice("moba", 128, 128, 32, 8, 64, 128, 4096, 65_536),
    Choice("keys_of_128", 128, 128, 32, 2, 1, 1, 2048, 65_536),
    Choice("dsa", 576, 512, 128, 1, 1, 1, 2048, 131_072, shared_kv=True),
)
QUERIES, KEYS, LISTED = 8, 512, 128


def counted(choice: Choice, arch: str) -> tuple[int, int, float, int]:
    """Listed scores, computed scores, both of the emulated call, the predicted number of the
    latter, and sectors in excess."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, choice.heads_kv
    queries = max(QUERIES, choice.block_q)
    groups, blocks = -(-queries // choice.block_q), -(-KEYS // choice.block_k)
    most = max(LISTED // choice.block_k, 1)
    counts = torch.randint(1, most + 1, (*shape, groups), generator=generator).int()
    listed = torch.rand(*shape, groups, blocks, generator=generator).argsort(-1)[..., :most].int()
    q = torch.randn(1, choice.heads, queries, choice.head_dim, generator=generator).bfloat16()
    k = torch.randn(*shape, KEYS, choice.head_dim, generator=generator).bfloat16()
    v = torch.randn(*shape, KEYS, choice.head_dim_v, generator=generator).bfloat16()
    v = k[..., : choice.head_dim_v] if choice.shared_kv else v
    program = program_of(choice.spec)
    captures = {"layout": fg.Layout.from_lists(counts, listed)}
    options = DEFAULT_OPTIONS._replace(arch=arch, backend="emulator", q_offset=KEYS)
    _, operands, options = Call.from_arguments(
        program, lambda *_: program, Operands(q, k, v), options, captures
    )
    chosen = ChosenCall(Setup.for_call(program, operands, options), operands, options)
    spec, group_operands, options = chosen.by_groups(operands, chosen.read(operands))
    signature = program_of(spec).signature
    tensors = dict(zip((x.name for x in signature.tensors), group_operands.captured, strict=True))
    scalars = dict(zip((x.name for x in signature.scalars), options.scalars, strict=True))
    run, profiles = profile_forward(
        spec, *group_operands[:3], arch=arch, tensors=tensors, scalars=scalars, split_size=0
    )
    profile = next(x for x in profiles if x.plan.kernel == "forward")
    rows = choice.block_q * choice.heads // choice.heads_kv
    tile = run.report.kernel.plan
    keys = counts.flatten().long() * choice.block_k
    padded = (
        (-(-keys // tile.block_k) * tile.block_k).sum() * -(-rows // tile.block_q) * tile.block_q
    )
    depth = tile.head_dim + tile.head_dim_v
    computed = profile.totals.tensor_multiply_adds / depth
    return int(keys.sum()) * rows, int(padded), computed, profile.sectors_in_excess


def predicted(choice: Choice, arch: str) -> tuple[float, float, dict[str, float]]:
    """Clocks of a score that the forward kernel computes, the share of computed scores that are
    listed, and the milliseconds of each kernel, by the names of its results. "rows" are the copies
    of rows of keys and the sums of their gradients: their bytes at the bandwidth of memory.

    All lists are long: those of the first queries are shorter under a causal mask.
    """
    spec, even = choice.spec, (False, False)
    rows = choice.block_q * choice.heads // choice.heads_kv
    groups = choice.heads_kv * -(-choice.queries // choice.block_q)
    by_group = groups, rows, choice.most
    query_spec = by_groups(spec, even)
    forward = cheapest(query_spec, arch, "forward", few_rows=rows)
    kernels = {
        "forward": (forward, by_group),
        "dq": (cheapest(query_spec, arch, "queries", few_rows=rows), by_group),
    }
    if choice.block_k < FEWEST_ROWS:
        list_spec = by_listed_keys(spec, (False, True))
        kernels["dk, dv"] = cheapest(list_spec, arch, "keys", few_rows=rows), by_group
    else:  # as many lists as blocks of keys, all equally long
        blocks = choice.heads_kv * choice.queries // choice.block_k
        by_key = blocks, choice.block_k, groups * choice.most // choice.block_k * rows // blocks
        value_spec = value_gradients(spec, even)
        key_spec = with_columns(by_keys(spec, even), choice.head_dim_v + 8)
        kernels["dv"] = cheapest(value_spec, arch, "forward", few_rows=by_key[1]), by_key
        kernels["dk"] = cheapest(key_spec, arch, "queries", few_rows=by_key[1]), by_key
    machine, milliseconds = facts(arch), {}
    for name, ((parts, kernel), (sequences, rows_q, rows_k)) in kernels.items():
        tiles = -(-rows_q // kernel.block_q), -(-rows_k // kernel.block_k)
        scores = parts * sequences * tiles[0] * kernel.block_q * tiles[1] * kernel.block_k
        milliseconds[name] = 1e3 * scores * kernel.cost / (machine.sms * machine.clock_hz)
    milliseconds["rows"] = 1e3 * bytes_of_rows(choice) / machine.hbm_bytes_per_s
    clocks = milliseconds["forward"] / 1e3 * machine.sms * machine.clock_hz
    computed = clocks / forward[1].cost / forward[0]
    return forward[0] * forward[1].cost, groups * rows * choice.most / computed, milliseconds


def bytes_of_rows(choice: Choice) -> int:
    """What the gradients of keys and values move beside the operands of kernels: copies of keys and
    values, their gradients, and sums of these, of any key once for the rows of a part."""
    keys = choice.heads_kv * choice.queries
    rows = keys
    if choice.block_k < FEWEST_ROWS:
        rows *= choice.most // choice.block_q
    summed = min(rows, -(-rows // MOST_ROWS) * keys)
    columns = choice.head_dim + choice.head_dim_v
    copied = choice.head_dim if choice.shared_kv else columns
    itemsize = ITEMSIZE[str(choice.spec.dtype)]
    return rows * itemsize * 2 * (copied + columns) + summed * 8 * columns


def cheapest(spec: fg.AttentionSpec, arch: str, which: str, few_rows: int) -> tuple[int, Plan]:
    """How many launches have some columns of V each, and the plan of the kernel of one; on the path
    of all architectures where no tile of the architecture's own fits."""
    columns = columns_of_launch(spec, arch, which).columns
    if not columns:
        return cheapest(spec, portable(arch), which, few_rows)
    part = spec if columns == spec.head_dim_v else with_columns(spec, columns)
    parts = -(-int(spec.head_dim_v or 0) // columns)
    if which == "forward":
        return parts, plan(part, arch, few_rows=few_rows)
    request = BackwardPlanRequest(part, arch, alone=which, few_rows=few_rows)
    return parts, plan_schemes(request).kernels[-1]


def lines(archs: tuple[str, ...], choices: tuple[Choice, ...]) -> Iterator[str]:
    yield f"counted: {QUERIES} queries, {KEYS} keys, lists of 1 to {LISTED} keys"
    yield f"{'':16}{'':8}{'listed':>10}{'computed':>10}{'padded':>10}{'sectors in excess':>19}"
    for choice in choices:
        for arch in archs:
            listed, padded, computed, sectors = counted(choice, arch)
            yield f"{choice.name:16}{arch:8}{listed:10,}{computed:10,.0f}{padded:10,}{sectors:19,}"
    yield "predicted: clocks of a score of the forward kernel, and milliseconds of each kernel"
    yield f"{'':16}{'':8}{'clk/score':>10}{'listed':>10}  milliseconds"
    for choice in choices:
        for arch in archs:
            cost, share, ms = predicted(choice, arch)
            times = ", ".join(f"{name} {x:.1f}" for name, x in ms.items())
            yield f"{choice.name:16}{arch:8}{cost:10.3f}{share:10.0%}  {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choice", action="append", help="only these calls")
    parser.add_argument("--arch", action="append", choices=ARCHS)
    arguments = parser.parse_args()
    choices = tuple(x for x in CHOICES if not arguments.choice or x.name in arguments.choice)
    for line in lines(tuple(arguments.arch or ARCHS), choices):
        print(line)


if __name__ == "__main__":
    main()
