"""What batch-invariant calls cost against the free choice of splits: predictions and counted bytes.

No tensor is made and nothing runs. `python -m benchmarks.batch_invariance` prints the table of
docs/batch_invariance.md.
"""

from __future__ import annotations

import flashgen as fg
from flashgen.kernels.planner import invariant_splits
from flashgen.kernels.planner.traffic import LaunchSizes
from flashgen.tools.profile.decoding import plan_decoding

CALLS = {
    "decoding": (1, 32, 8, 1, 131_072),
    "of 4 ranks": (1, 8, 2, 1, 131_072),
    "of 8 ranks": (1, 4, 1, 1, 131_072),
    "a batch": (64, 32, 8, 1, 4_096),
    "a chunk": (1, 32, 8, 2_048, 32_768),
    "training, 2k": (1, 32, 8, 2_048, 2_048),
    "training, 8k": (1, 32, 8, 8_192, 8_192),
    "training, 32k": (1, 32, 8, 32_768, 32_768),
}
"""Batch, query heads, key heads, queries and keys of calls; those of training have no pages."""

HEAD = (
    "| call | sizes | split_size | bytes | predicted us | invariant split_size | bytes "
    "| predicted us | ratio | parts |\n" + "| --- " * 10 + "|"
)


def causal(b, h, q, k):
    return k <= q


def row(name: str, sizes: tuple[int, ...], arch: str) -> str:
    spec = fg.AttentionSpec(causal, head_dim=128, dtype="bfloat16")
    invariant = invariant_splits(spec, arch).size
    cells, seconds = [], []
    page = 0 if name.startswith("training") else 16
    for size in (None, invariant):
        found = plan_decoding(spec, arch, LaunchSizes(*sizes), page_size=page, split_size=size)
        assert found.predicted is not None, "no tensor decides on the tiles"
        over = found.predicted.traffic.over_bound
        seconds.append(found.predicted.seconds)
        cells += [f"{found.split_size:,}", f"{over:.3f}", f"{seconds[-1] * 1e6:,.0f}"]
    batch, heads, _, rows, _ = sizes
    parts = -(-found.splits // found.run) if found.run else 0
    bytes_of_parts = batch * heads * rows * parts * 4 * 128
    shape = " x ".join(f"{each:,}" for each in sizes)
    cells += [f"{seconds[1] / seconds[0]:.2f}", f"{bytes_of_parts / 2**20:,.0f} MiB"]
    return f"| {name} | {shape} | " + " | ".join(cells) + " |"


def main() -> None:
    for arch in ("sm_90a", "sm_80"):
        print(f"{arch}, bfloat16, head dim 128, causal\n\n{HEAD}")
        for name, sizes in CALLS.items():
            print(row(name, sizes, arch))
        print()


if __name__ == "__main__":
    main()
