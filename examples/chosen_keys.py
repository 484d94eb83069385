"""Two small models whose queries choose their keys, trained with flashgen and with eager attention.

    python examples/chosen_keys.py            # 40 steps of each; a minute
    python examples/chosen_keys.py --steps 20

NSA: each query attends to compressed blocks of keys, to a few whole blocks, and to a window; gates
mix the three. The blocks are those to which the compressed branch gives the most mass, over all
query heads of a key head, and always the first one and the query's own.

DSA: an indexer scores all keys for each query, and the keys of the highest scores are the ones
that multi-head latent attention sees. Its many query heads share one row for each position, whose
first columns are the values. The indexer learns the weights that attention gives to these keys.

Both learn the text of coriolanus.txt in float32, from the same weights and batches, once with
flashgen operators and once with eager attention, which has the matrix of all scores. The second
training sees the keys that the first one chose: a rounding error can exchange two keys of nearly
the same score, or turn off a ReLU of an indexer, and later losses then differ as those of any two
trainings. The table has the share of lists that the second one would have made otherwise. Losses
may differ by 1 part in 10,000 at every step, and gradients of the first step by as much of a
parameter's largest element, else the exit status is 1. Both are about 1 part in a million.

Sources: Yuan et al., "Native Sparse Attention", 2025, arXiv 2502.11089; DeepSeek-AI,
"DeepSeek-V3.2", 2025, arXiv 2512.02556, in its sparse stage, without the dense warm-up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional
from train_char_model import Sizes, Text

import flashgen as fg

Tensor = torch.Tensor

BOUND = 1e-4
LEARNING_RATE = 3e-3
WIDTH, LAYERS = 64, 2
SIZES = Sizes(context=128, batch=4)

# NSA: 16 blocks of 8 keys, of which a query sees 4.
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16
BLOCK, BLOCKS, WINDOW = 8, 4, 16

# DSA: a query sees 16 keys, whose rows have 64 columns of values and 32 that turn.
CONTENT, VALUES, TURNED, KEYS = 16, 64, 32, 16
INDEX_HEADS, INDEX_DIM = 4, 16
SCALE = (CONTENT + TURNED) ** -0.5

NEVER = -1e9  # the score of a key that a query does not see


def causal(b, h, q, k):
    return q >= k


def complete(b, h, q, k):  # k is a block, whose last key is not later than the query
    return BLOCK * k + BLOCK - 1 <= q


def near(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def operator(mask, head_dim: int = HEAD_DIM, **options):
    return fg.attention(fg.AttentionSpec(mask, head_dim=head_dim, dtype="float32", **options))


to_means = operator(complete, name="to_means")
to_window = operator(near, name="to_window")
to_blocks = operator(
    causal,
    block_sparse=fg.BlockSparse(block_q=1, block_k=BLOCK, heads="kv"),
    name="to_blocks",
)
to_latents = operator(
    causal,
    VALUES + TURNED,
    head_dim_v=VALUES,
    shared_kv=True,
    block_sparse=fg.BlockSparse(block_q=1, block_k=1, heads="kv"),
    name="to_latents",
)


def listed(blocks: Tensor):
    """Lists [batch, heads_kv, queries, most], in which -1 is no block."""
    counts = torch.full(blocks.shape[:3], blocks.shape[3], dtype=torch.int32, device=blocks.device)
    return fg.Layout.from_lists(counts, blocks)


class Attention(Protocol):
    """The attention of both models. Masses are weights [batch, heads, queries, keys or blocks]."""

    def means(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor: ...

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def latents(self, q: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]: ...

    def choose(self, lists: Tensor) -> Tensor:
        """The lists that are used, given those of the model: int32 [batch, heads_kv, seq, most]."""
        ...


class Flashgen:
    """By flashgen operators.

    Attributes:
        choices: the lists of all calls, in order.
    """

    def __init__(self) -> None:
        self.choices: list[Tensor] = []

    def choose(self, lists: Tensor) -> Tensor:
        self.choices.append(lists)
        return lists

    def means(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = to_means(q, k, v, return_aux=fg.AuxRequest(block_mass=1))
        return out, aux.block_mass

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        return to_blocks(q, k, v, layout=listed(blocks))

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return to_window(q, k, v)

    def latents(self, q: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        request = fg.AuxRequest(block_mass=1)
        out, aux = to_latents(q, rows, layout=listed(keys), scale=SCALE, return_aux=request)
        return out, aux.block_mass


class Eager:
    """By PyTorch operations, with a mask of all scores.

    Attributes:
        others: for each call, the share of lists with other keys than the lists in use.

    Args:
        choices: the lists that the calls use, in order.
    """

    def __init__(self, choices: Sequence[Tensor]) -> None:
        self._choices = iter(choices)
        self.others: list[float] = []

    def choose(self, lists: Tensor) -> Tensor:
        used = next(self._choices)
        differ = lists.sort(3).values != used.sort(3).values
        self.others.append(float(differ.any(3).float().mean()))
        return used

    def means(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        i, j = positions_of(q, k)
        return weighed(q, k, v, BLOCK * j + BLOCK - 1 <= i)

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        i, j = positions_of(q, k)
        seen = marked(blocks, k.shape[2] // BLOCK).repeat_interleave(BLOCK, 3)
        return weighed(q, k, v, seen.repeat_interleave(HEADS // KV_HEADS, 1) & (i >= j))[0]

    def window(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = positions_of(q, k)
        return weighed(q, k, v, (i >= j) & (i - j < WINDOW))[0]

    def latents(self, q: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        i, j = positions_of(q, rows)
        seen = marked(keys, rows.shape[2]) & (i >= j)
        return weighed(q, rows, rows[..., :VALUES], seen, SCALE)


def positions_of(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])


def marked(blocks: Tensor, count: int) -> Tensor:
    """Lists as bools [batch, heads_kv, queries, count]."""
    marks = torch.zeros((*blocks.shape[:3], count + 1), dtype=torch.bool)
    return marks.scatter(3, blocks.long().where(blocks >= 0, count), True)[..., :count]


def weighed(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float = HEAD_DIM**-0.5
) -> tuple[Tensor, Tensor]:
    """The output and the weights; a query that sees no key has zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, NEVER)
    mass = torch.softmax(scores, 3) * seen
    return mass @ v, mass


class NativeSparse(nn.Module):
    """Native sparse attention: compressed blocks, chosen blocks and a window."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.to_q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        # Keys and values of their own for each branch.
        self.to_kv = nn.Linear(WIDTH, 6 * KV_HEADS * HEAD_DIM, bias=False)
        self.compress = nn.ModuleList(
            nn.Linear(BLOCK * HEAD_DIM, HEAD_DIM, bias=False) for _ in range(2)
        )
        self.gates = nn.Linear(WIDTH, 3 * HEADS)
        self.from_heads = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, seq, WIDTH] -> the same shape, and a loss of the layer's own."""
        q = self.to_q(x).unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
        rows = self.to_kv(x).unflatten(2, (6, KV_HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        means = (
            compress(branch_rows.unflatten(2, (-1, BLOCK)).flatten(3))
            for compress, branch_rows in zip(self.compress, rows[:2], strict=True)
        )
        means_out, mass = self.attention.means(q, *means)
        chosen = self.attention.choose(chosen_blocks(mass.detach()))
        blocks_out = self.attention.blocks(q, rows[2], rows[3], chosen)
        branches = torch.stack([means_out, blocks_out, self.attention.window(q, rows[4], rows[5])])
        gates = torch.sigmoid(self.gates(x)).unflatten(2, (3, HEADS)).permute(2, 0, 3, 1)
        out = (branches * gates[..., None]).sum(0)
        return self.from_heads(out.transpose(1, 2).flatten(2)), x.new_zeros(())


def chosen_blocks(mass: Tensor) -> Tensor:
    """The blocks that each query sees: int32 [batch, heads_kv, queries, BLOCKS], -1 for none.

    Args:
        mass: [batch, heads, queries, blocks], the weight of each block in the compressed branch.
    """
    rank = mass.unflatten(1, (KV_HEADS, -1)).sum(2)
    own_block, block = torch.arange(mass.shape[2])[:, None] // BLOCK, torch.arange(mass.shape[3])
    rank = rank.masked_fill((block == 0) | (block == own_block), torch.inf).masked_fill(
        block > own_block, -1
    )
    best = rank.topk(BLOCKS, 3)
    return best.indices.masked_fill(best.values < 0, -1).int()


class LatentSparse(nn.Module):
    """Multi-head latent attention to the keys that an indexer chooses.

    Attention is in the form of decoding: queries are mapped to the columns of the latent rows, and
    the output, which has the columns of the values, to the heads.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.to_q = nn.Linear(WIDTH, HEADS * (CONTENT + TURNED), bias=False)
        self.to_latent = nn.Linear(WIDTH, VALUES, bias=False)
        self.latent_norm = nn.LayerNorm(VALUES)
        self.to_turned = nn.Linear(WIDTH, TURNED, bias=False)
        self.key_map = nn.Parameter(torch.randn(HEADS, CONTENT, VALUES) * CONTENT**-0.5)
        self.value_map = nn.Parameter(torch.randn(HEADS, VALUES, CONTENT) * VALUES**-0.5)
        self.from_heads = nn.Linear(HEADS * CONTENT, WIDTH, bias=False)
        self.index_q = nn.Linear(WIDTH, INDEX_HEADS * INDEX_DIM, bias=False)
        self.index_k = nn.Linear(WIDTH, INDEX_DIM, bias=False)
        self.index_weights = nn.Linear(WIDTH, INDEX_HEADS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, seq, WIDTH] -> the same shape, and a loss of the layer's own."""
        q = self.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        content, turning = q.split((CONTENT, TURNED), 3)
        q = torch.cat([content @ self.key_map, turned(turning)], 3)
        latents = self.latent_norm(self.to_latent(x))
        rows = torch.cat([latents, turned(self.to_turned(x))], 2)[:, None]

        index = self.index(x.detach())
        # Scores are exactly 0 where no index head is positive: the first of equal ones are taken.
        best, keys = (x[..., :KEYS] for x in index.sort(dim=2, descending=True, stable=True))
        keys = self.attention.choose(keys.masked_fill(best == NEVER, -1)[:, None].int())
        out, mass = self.attention.latents(q, rows, keys)
        head_rows = (out @ self.value_map).transpose(1, 2).flatten(2)
        return self.from_heads(head_rows), indexer_loss(index, mass.detach(), keys[:, 0])

    def index(self, x: Tensor) -> Tensor:
        """The indexer's scores [batch, queries, keys], which no gradient leaves."""
        q = self.index_q(x).unflatten(2, (INDEX_HEADS, -1)).transpose(1, 2)
        scores = torch.relu(q @ self.index_k(x)[:, None].mT)
        scores = (scores * self.index_weights(x).mT[..., None]).sum(1)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, NEVER)


def indexer_loss(index: Tensor, mass: Tensor, keys: Tensor) -> Tensor:
    """The divergence of the indexer's softmax from attention's weights, of the chosen keys.

    Args:
        index: [batch, queries, keys].
        mass: [batch, heads, queries, keys].
        keys: [batch, queries, KEYS], -1 for none.
    """
    none, indices = keys < 0, keys.clamp_min(0).long()
    scores = index.gather(2, indices).masked_fill(none, NEVER)
    target = mass.mean(1).gather(2, indices).masked_fill(none, 0)
    apart = functional.kl_div(scores.log_softmax(2), target, reduction="none")
    return apart.sum(2).mean()


def turned(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) of [..., seq, TURNED]."""
    half = TURNED // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


MODELS = {"NSA": NativeSparse, "DSA": LatentSparse}


class Model(nn.Module):
    """A transformer over characters.

    Args:
        name: a name of `MODELS`.
    """

    def __init__(self, name: str, attention: Attention, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(SIZES.context, WIDTH)
        self.mixers = nn.ModuleList(MODELS[name](attention) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS + 1))
        self.to_scores = nn.Linear(WIDTH, characters, bias=False)

    def forward(self, numbers: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy, and the sum of the layers' own losses."""
        x = self.characters(numbers) + self.positions.weight
        layer_losses = x.new_zeros(())
        for norm, mixer, mlp in zip(self.norms[:-1], self.mixers, self.mlps, strict=True):
            out, layer_loss = mixer(norm(x))
            x, layer_losses = x + out, layer_losses + layer_loss
            x = x + mlp(x)
        scores = self.to_scores(self.norms[-1](x))
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten()), layer_losses


class Step(NamedTuple):
    """One step of a training: the losses, and the gradients by parameter."""

    loss: float
    layer_loss: float
    gradients: dict[str, Tensor]


def train(name: str, attention: Attention, steps: int) -> Iterator[Step]:
    """Trains a model from the same weights and with the same batches each time."""
    text = Text((Path(__file__).resolve().parent / "coriolanus.txt").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    model = Model(name, attention, len(text.characters))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for numbers, following in text.batches(SIZES, steps, seed=1):
        loss, layer_loss = model(numbers, following)
        optimizer.zero_grad()
        (loss + layer_loss).backward()
        gradients = {key: x.grad.clone() for key, x in model.named_parameters()}
        yield Step(loss.item(), layer_loss.item(), gradients)
        optimizer.step()


class Comparison(NamedTuple):
    """Two trainings of a model.

    Attributes:
        losses: the losses of flashgen's training.
        layer_losses: the losses of its layers.
        loss_difference: the largest relative difference of a loss.
        gradient_difference: the largest difference of the first gradients, in units of the
            largest element of a parameter's gradient.
        other_choices: the share of lists in which the other training would have other keys.
    """

    losses: list[float]
    layer_losses: list[float]
    loss_difference: float
    gradient_difference: float
    other_choices: float

    @property
    def agrees(self) -> bool:
        return max(self.loss_difference, self.gradient_difference) <= BOUND


def compare(name: str, steps: int) -> Comparison:
    attention = Flashgen()
    own_steps = list(train(name, attention, steps))
    eager = Eager(attention.choices)
    eager_steps = list(train(name, eager, steps))
    first = own_steps[0].gradients, eager_steps[0].gradients
    return Comparison(
        [step.loss for step in own_steps],
        [step.layer_loss for step in own_steps],
        max(abs(a.loss - b.loss) / b.loss for a, b in zip(own_steps, eager_steps, strict=True)),
        max(float((x - first[1][key]).abs().max() / x.abs().max()) for key, x in first[0].items()),
        sum(eager.others) / len(eager.others),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print("      loss          of indexers   largest difference of    other")
    print("      first   last  first   last  losses  first gradients  choices  seconds")
    passed = True
    for name in MODELS:
        start = time.perf_counter()
        comparison = compare(name, options.steps)
        passed &= comparison.agrees
        print(
            f"{name}   {comparison.losses[0]:.3f}  {comparison.losses[-1]:.3f}  "
            f"{comparison.layer_losses[0]:.3f}  {comparison.layer_losses[-1]:.3f}  "
            f"{comparison.loss_difference:.0e}   {comparison.gradient_difference:.0e}"
            f"{comparison.other_choices:15.3%}  {time.perf_counter() - start:7.1f}",
            flush=True,
        )
    print(f"allowed differences {BOUND:.0e}: {'pass' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
