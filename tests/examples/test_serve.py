"""The serving example: texts of a small model, pages, drafts; and its program as a user runs it."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen.shared.paths import PATHS
from tests.support.paths import ROOT
from tests.support.processes import run_python

FOLDER = ROOT / "examples"
EXAMPLE = "serve"

Tensor = torch.Tensor

PROMPTS = (
    ("All:\nSpeak, speak.\n\nFirst Citizen:\n", 14),
    ("All:\nSpeak, speak.\n\nAll:\n", 8),
    ("First", 14),
    ("All:\nSpeak, speak.\n\nFirst Citizen:\nYou", 6),
    ("All:\nSpeak, speak.\n\nFirst Ci", 12),
)


@pytest.fixture(scope="module")
def engine(example: ModuleType) -> ModuleType:
    return sys.modules["serve_engine"]


class Served:
    """A small model that has learned a few lines, and the plain texts of the prompts."""

    def __init__(self, example: ModuleType) -> None:
        self.example = example
        self.page = sys.modules["serve_engine"].PAGE
        self.error = {torch.float32: 1e-4, torch.float16: 1e-2}
        self.sizes = example.Sizes(context=64, batch=2, layers=2, heads=2, head_dim=8)
        self.text = example.Text(example.TEXT.read_text(encoding="utf-8")[:400])
        self.model = example.train(self.text, self.sizes, 50, "cpu")
        self.plain = [example.plain(self.model, request) for request in self.requests()]

    def requests(self) -> list[Any]:
        numbers = {character: number for number, character in enumerate(self.text.characters)}
        return [
            self.example.Request([numbers[each] for each in prompt], len(prompt) + more)
            for prompt, more in PROMPTS
        ]

    def by(self, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
        """The engine that has served all. Texts, keys and values are those of plain generation."""
        made = self.example.Engine(self.model, self.sizes, dtype, **how)
        served = self.requests()
        made.serve(served)
        assert [request.tokens for request in served] == self.plain
        for request in made.finished:  # those whose pages no other request has needed since
            assert request.cached == request.length - 1
            places = torch.arange(request.cached)
            pages = torch.tensor(request.pages)[places // self.page]
            found = made.cache[:, :, pages, :, places % self.page].float()
            torch.testing.assert_close(found, self.rows(request), atol=self.error[dtype], rtol=0)
        return made

    def rows(self, request: Any) -> Tensor:
        """Keys and values without a cache, [positions, layers, 2, heads, head_dim]."""
        seen: list[Tensor] = []
        model = copy.deepcopy(self.model)
        for block in model.blocks:
            block.to_qkv.register_forward_hook(lambda *args: seen.append(args[-1][0, :, None]))
        with torch.no_grad():
            model(torch.tensor([request.tokens[:-1]]))
        shape = (3, self.sizes.heads, self.sizes.head_dim)
        return torch.cat(seen, 1).unflatten(2, shape)[:, :, 1:]


@pytest.fixture(scope="module")
def served(example: ModuleType) -> Served:
    return Served(example)


def test_texts_of_all_engines_are_those_of_plain_generation(
    example: ModuleType, served: Served
) -> None:
    assert len({tuple(text[-8:]) for text in served.plain}) > 2, "the texts differ"
    engines = {name: served.by(**how) for name, how in example.ENGINES.items()}
    alone, batched, sharing, drafting = (each.counts for each in engines.values())
    # Each token of a text but the last is computed once; a call gives each request one token.
    assert sum(alone.tokens) == sum(batched.tokens) == sum(map(len, served.plain)) - len(PROMPTS)
    assert len(batched.tokens) < len(alone.tokens)
    assert max(batched.tokens) > engines["batched"].batch

    assert sharing.pages < batched.pages
    assert sum(sharing.tokens) == sum(batched.tokens) - sharing.shared
    assert sharing.shared % served.page, "a page is shared in part"

    assert len(drafting.tokens) < len(sharing.tokens)
    assert sum(drafting.accepted) > 0
    assert max(drafting.accepted) > 1


def test_keys_of_accepted_drafts_are_moved_to_their_places(
    engine: ModuleType, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong draft stands before each right one, so that no right one is at its place."""
    right_ones: list[int] = []

    def drafted(request: Any) -> Any:
        tokens, left = request.tokens, request.length - len(request.tokens)
        same = (text for text in served.plain if text[: len(tokens)] == tokens)
        text = next(each for each in same if len(each) == request.length)
        right = text[len(tokens) :][: min(4, left - 1)]
        found = engine.Tree(tokens[-1])
        for depth, token in enumerate(right):
            found.add([*right[:depth], (token + 1) % len(served.text.characters)])
        found.add(right)
        if right:
            right_ones.append(len(right))
        return found

    monkeypatch.setattr(engine, "drafted", drafted)
    assert served.by().counts.accepted == right_ones
    assert max(right_ones) == 4


def test_requests_wait_where_pages_are_few(served: Served) -> None:
    made = served.by(pages=5)
    assert made.counts.preempted > 0
    assert made.counts.pages == 5
    for request in made.finished:
        made.pages.release(request.pages)
    assert sorted(made.pages.free) == list(range(5)), "every page is free, and free once"
    with pytest.raises(ValueError, match="in a cache of 32"):
        served.by(pages=2)


def test_drafts_are_a_tree_of_what_followed_before(engine: ModuleType) -> None:
    # "ab" is followed by "cd" and by "ce"; the latest comes first.
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2]
    found = engine.drafted(engine.Request(tokens, 15))
    assert found.tokens == [2, 3, 5, 4]
    assert found.parents == [0, 0, 1, 1]
    assert found.depths == [0, 1, 2, 2]
    seen = found.mask()[:3, :3].int().tolist()
    assert seen == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert found.accepted([3, 4, 7, 6]) == ([1, 3], [3, 4, 6])
    assert found.accepted([3, 9, 7, 6]) == ([1], [3, 9])
    assert found.accepted([7, 7, 7, 7]) == ([], [7])


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_emitted_kernels_serve_the_same_texts(served: Served, arch: str) -> None:
    made = served.by(torch.float16, pages=16, backend="emulator", arch=arch)
    assert sum(made.counts.accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--backend", "emulator", "--arch", "sm_90a")], ids=["tiled", "emulator"]
)
def test_the_program_serves_its_requests(options: tuple[str, ...]) -> None:
    done = run_python(FOLDER / "serve.py", *options)
    assert "Every text equals that of plain generation: pass" in done.stdout
    names = ("one by one", "batched", "with shared prefixes", "with drafts too")
    rows = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines()}
    calls, pages = ([int(rows[name][column]) for name in names] for column in (0, 4))
    assert calls[0] > calls[1] > calls[3], done.stdout
    assert pages[1] > pages[2], done.stdout
    assert float(rows[names[3]][5]) > 0, done.stdout


@pytest.mark.parametrize("option", ["--steps", "--requests", "--tokens"])
def test_a_wrong_option_is_reported_before_anything_is_trained(
    example: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main([option, "0"])
    assert ended.value.code == 2
    assert "are at least 1" in capsys.readouterr().err
