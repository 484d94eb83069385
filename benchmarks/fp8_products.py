"""What products of 8-bit floats would gain in a prefill on sm_90a: predictions of the planner.

The terms of the forward kernel's cost model, changed for wgmma with e4m3 operands, over all tiles
that fit. No kernel has such products: nothing runs. `python -m benchmarks.fp8_products` prints the
table of docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import flashgen as fg
from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.models.forward_sm90 import FORWARD
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK

ARCH = "sm_90a"
PANEL = 64  # columns of O that are promoted together


@dataclass(frozen=True)
class Products:
    """How the products of e4m3 would be computed.

    Attributes:
        promotes: whether the sums of P V over a tile, of 13 bits of fraction in the tensor cores,
            are added to O in float32.
        by_token: whether each key and value has a scale of its own; else scales are factors of the
            softmax and of the result.
    """

    promotes: bool
    by_token: bool

    @property
    def rest(self) -> str:
        """More instructions of a score."""
        terms = ["1/4"]  # two pairs of codes of P become one register
        # The second operand of wgmma is K-major for 8 bits: the producer transposes V, 512 codes
        # by a load, a store, 8 exchanges of bytes and their addresses.
        terms.append("d_v/block_q*12*32/512")
        if self.promotes:
            terms.append("d_v/block_k")
        if self.by_token:
            terms.append("2")
        return " + ".join(terms)


def _steps(products: Products) -> FormulaSequence:
    steps = []
    for formula in FORWARD.cost_steps:
        text = formula.text
        if formula.name == "rest":
            text = f"{text} + {products.rest}"
        elif formula.name == "products":
            text = text.replace("/16)", "/32)")
        elif formula.name == "shared":  # V is read and written once more
            text = f"{text} + 2*e*depth_v/block_q/{SMEM_BYTES_PER_CLOCK}"
        steps.append(Formula(formula.name, text, formula.unit))
    return FormulaSequence(*steps)


def costs(head_dim: int, products: Products) -> tuple[float, float, tuple[int, int]]:
    """Clocks per score with 16 and with 8 bits, and the tile of the latter with the least."""
    spec = fg.AttentionSpec(head_dim=head_dim, dtype="bfloat16")
    now = fg.plan(spec, ARCH)
    base = dict(now.quantities)
    found = []
    for warps in FORWARD.warp_counts:
        at = {**base, "e": 1, "tensor_rate": 2 * base["tensor_rate"], "warps": warps}
        at["block_q"] = 16 * warps
        for formula in FORWARD.sizes:
            at[formula.name] = formula(at)
        at["register_limit"] = FORWARD.register_limit(at)
        for block_k in range(32, 257, 32):
            at["block_k"] = block_k
            more = products.promotes * min(PANEL, head_dim) / 2
            fits = FORWARD.registers(at) + more <= at["register_limit"]
            smem = FORWARD.smem(at) + at["stages"] * block_k * at["depth_v"]  # V, transposed
            if not fits or smem > at["M"]:
                continue
            own = dict(at)
            _steps(products)(own)
            found.append((float(own["cost"]), (16 * warps, block_k)))
    least, tile = min(found)
    return float(base["cost"]), least, tile


def main() -> None:
    print("| head dim | promotes | scales | tile | clocks, 16 bits | clocks, e4m3 | gain |")
    print("| --- " * 7 + "|")
    for head_dim in (64, 128, 256):
        for promotes in (False, True):
            for by_token in (False, True):
                now, then, tile = costs(head_dim, Products(promotes, by_token))
                scales = "of tokens" if by_token else "of heads"
                cells = f"{head_dim} | {'yes' if promotes else 'no'} | {scales}"
                size = f"{tile[0]} x {tile[1]}"
                print(f"| {cells} | {size} | {now:.4f} | {then:.4f} | {now / then:.2f} |")


if __name__ == "__main__":
    main()
