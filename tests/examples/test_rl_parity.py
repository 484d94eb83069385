"""The example of reinforcement learning: its layers row by row, and its program."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from flashgen.shared.paths import PATHS

Tensor = torch.Tensor


EXAMPLE = "rl_parity"


@pytest.mark.parametrize("name", ["product", "norm", "log_softmax"])
def test_rows_of_a_layer_have_the_same_bits_alone_and_beside_others(
    example: ModuleType, name: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 37, generator=generator) for n in (19, 24))
    layer: Callable[..., Tensor] = getattr(example, name)
    rest = (weight,) if name == "product" else ()
    together = layer(x, *rest)
    for first, last in ((0, 1), (3, 4), (2, 9), (11, 19)):
        assert torch.equal(layer(x[first:last].clone(), *rest), together[first:last])
    exact = {
        "product": lambda: x.double() @ weight.double().T,
        "norm": lambda: x.double() / (x.double().square().mean(1, True) + 1e-6).sqrt(),
        "log_softmax": lambda: x.double().log_softmax(1),
    }[name]()
    torch.testing.assert_close(together.double(), exact, atol=2e-5, rtol=0)


def test_no_log_probability_differs(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--updates", "3"]) == 0
    counted, differing = capsys.readouterr().out.splitlines()[-2:]
    assert differing == "log-probabilities that differ: 0, by 0.0e+00 at most"
    numbers = [int(word) for word in counted.split() if word.isdigit()]
    assert len(numbers) == 4
    assert min(numbers) > 0, "tokens, calls, tokens of shared prefixes, accepted drafts"


def test_without_the_mode_some_differ(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--updates", "2", "--ordinary"]) == 0
    assert "differ: 0," not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_no_log_probability_differs_on_emitted_kernels(example: ModuleType, arch: str) -> None:
    assert example.main(["--updates", "1", "--backend", "emulator", "--arch", arch]) == 0


@pytest.mark.slow
def test_no_log_probability_differs_over_fifty_updates(example: ModuleType) -> None:
    assert example.main([]) == 0
