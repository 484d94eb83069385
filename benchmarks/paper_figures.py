"""The figures of `paper.py`: traffic by block size and by sparsity, memory by length, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the figures; gives their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []

    def save(figure: Any, name: str) -> None:
        path = folder / f"{name}.png"
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)
        made.append(path)

    figure, axes = plt.subplots(figsize=(6, 4))
    names = ["standard", "flash"]
    bars = {"standard": "standard", "flash, fused": "fused", "flash, split": "split"}
    measured = [record["paper"][name.partition(",")[0]]["gb"] for name in bars]
    counted = [record["gpt2"][name]["hbm_gb"] for name in bars.values()]
    places = range(len(bars))
    axes.bar([x - 0.2 for x in places], measured, 0.4, label="the paper, measured")
    axes.bar([x + 0.2 for x in places], counted, 0.4, label="counted, model of L2")
    axes.set_xticks(list(places), list(bars))
    axes.set_ylabel("HBM traffic, GB")
    axes.set_title("GPT-2 medium, forward and backward")
    axes.legend()
    save(figure, "paper_gpt2")

    figure, axes = plt.subplots(figsize=(6, 4))
    rows = record["block_size"]
    axes.plot([r["block_q"] for r in rows], [r["issued"] / 1e6 for r in rows], "o-", label="issued")
    axes.axhline(rows[0]["compulsory"] / 1e6, ls="--", color="gray", label="each byte once")
    axes.set_xlabel("block_q, from the SRAM that is planned for")
    axes.set_ylabel("MB per head, forward")
    axes.set_ylim(bottom=0)
    axes.legend()
    save(figure, "paper_block_size")

    figure, axes = plt.subplots(figsize=(6, 4))
    rows = sorted(record["sparsity"], key=lambda row: row["density"])
    whole = max(rows, key=lambda row: row["density"])
    for name, label in (("multiply_adds", "multiply-adds"), ("issued", "bytes issued")):
        axes.plot(
            [r["density"] for r in rows], [r[name] / whole[name] for r in rows], "o-", label=label
        )
    axes.plot([0, 1], [0, 1], ls="--", color="gray", label="proportional")
    axes.set_xlabel("share of live blocks")
    axes.set_ylabel("of the dense kernels' count")
    axes.legend()
    save(figure, "paper_sparsity")

    figure, axes = plt.subplots(figsize=(6, 4))
    rows = record["memory"]
    for name in names:
        axes.loglog([r["n"] for r in rows], [r[name] / 2**20 for r in rows], "o-", label=name)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("MiB per head, besides operands and results")
    axes.legend()
    save(figure, "paper_memory")
    return made
