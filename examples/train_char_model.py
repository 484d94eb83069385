"""A small causal transformer over characters, and the text that it learns.

The layers of GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019):
layer norm before attention and before the MLP, learned positions. The caller gives the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

STD = 0.06
"""Standard deviation of the initial weights; GPT-2's 0.02 suits larger widths, not this one."""

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""q, k, v [batch, heads, seq, head_dim] and the probability of dropping an element of the softmax
-> out of the same shape, causal, scale 1 / sqrt(head_dim)."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its batches.

    Attributes:
        context: the most characters that the model sees.
        batch: the number of pieces of the text in one step.
    """

    context: int = 128
    batch: int = 16
    layers: int = 2
    heads: int = 4
    head_dim: int = 32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Text:
    """A text as numbers: the first nine tenths are learned, the last tenth is held out.

    Attributes:
        characters: the characters that occur, in order; a character's number is its index.
        training, held_out: int64 [length].
    """

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        everything = torch.tensor([numbers[character] for character in text], dtype=torch.int64)
        border = len(text) * 9 // 10
        self.training, self.held_out = everything[:border], everything[border:]

    def batches(self, sizes: Sizes, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random pieces of the training part, from a random generator of their own.

        Yields:
            characters and the ones that follow them, both int64 [batch, context], on the CPU.
        """
        generator = torch.Generator().manual_seed(seed)
        last = len(self.training) - sizes.context - 1
        for _ in range(steps):
            starts = torch.randint(last + 1, (sizes.batch, 1), generator=generator)
            pieces = self.training[starts + torch.arange(sizes.context + 1)]
            yield pieces[:, :-1], pieces[:, 1:]

    def held_out_pieces(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """The held-out part cut into pieces: int64 [pieces, context] twice, as in `batches`."""
        count = (len(self.held_out) - 1) // sizes.context
        length = count * sizes.context
        shape = count, sizes.context
        return self.held_out[:length].view(shape), self.held_out[1 : length + 1].view(shape)

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.characters[number] for number in numbers)


class Block(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self, sizes: Sizes, attention: Attention, dropout: float) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.attention = attention
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.from_heads = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same shape."""
        qkv = self.to_qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # views, no copies
        mixed = self.attention(q, k, v, self.dropout if self.training else 0.0)
        x = x + self.from_heads(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class CharTransformer(nn.Module):
    """Scores for the next character.

    Args:
        characters: the number of different characters.
        sizes: the sizes of the model.
        attention: the function that all layers call.
        dropout: the dropout of attention while training; otherwise it is 0.
    """

    def __init__(
        self, characters: int, sizes: Sizes, attention: Attention, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.context = sizes.context
        self.characters = nn.Embedding(characters, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(
            *(Block(sizes, attention, dropout) for _ in range(sizes.layers))
        )
        self.last_norm = nn.LayerNorm(sizes.width)
        self.to_scores = nn.Linear(sizes.width, characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2: the more layers add to the residual stream, the smaller the weights.
                adds = name.endswith(("from_heads.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=STD / (2 * sizes.layers) ** 0.5 if adds else STD)

    def forward(self, numbers: Tensor, positions: Tensor | None = None) -> Tensor:
        """int64 [batch, seq], seq at most the context -> [batch, seq, characters].

        Args:
            positions: the position of each character, [seq]; from 0 on if None.
        """
        if positions is None:
            positions = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.characters(numbers) + self.positions(positions)
        return self.to_scores(self.last_norm(self.blocks(x)))

    def loss(self, numbers: Tensor, following: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats per character."""
        scores = self(numbers, positions).flatten(0, 1).float()
        return functional.cross_entropy(scores, following.flatten())

    @torch.no_grad()
    def continued(self, start: list[int], length: int, seed: int) -> list[int]:
        """``length`` characters after ``start``, drawn at temperature 0.8."""
        self.eval()
        device = self.to_scores.weight.device
        generator = torch.Generator().manual_seed(seed)
        numbers = list(start)
        for _ in range(length):
            seen = torch.tensor([numbers[-self.context :]], device=device)
            chances = torch.softmax(self(seen)[0, -1].float().cpu() / 0.8, dim=0)
            numbers.append(int(torch.multinomial(chances, 1, generator=generator)))
        return numbers[len(start) :]
