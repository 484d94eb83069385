"""Operators and specs survive pickling and copying, whatever their functions are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import flashgen as fg
from flashgen.shared.errors import SpecError
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.shapes import Case

WINDOW = fg.Scalar("window", "int32", minimum=1)


def causal(b, h, q, k):
    return q >= k


def windowed(width):
    def mask(b, h, q, k):
        return (q >= k) & (q - k < width)

    return mask


SPECS = {
    "function": fg.AttentionSpec(mask_mod=causal, head_dim=16, dtype="float32"),
    "closure": fg.AttentionSpec(mask_mod=windowed(7), head_dim=16, dtype="float32"),
    "scalar": fg.AttentionSpec(mask_mod=windowed(WINDOW), head_dim=16, dtype="float32"),
    "lambda": fg.AttentionSpec(
        mask_mod=lambda b, h, q, k: fg.where(q < k, (k - q) % 3 == 0, q // 4 >= fg.minimum(k, 5)),
        score_mod=lambda s, b, h, q, k: fg.where(q > k, fg.tanh(s), s / (1 + fg.sigmoid(s) * k)),
        head_dim=16,
        dtype="float32",
        name="of_lambdas",
        scale=0.3,
        dropout=True,
    ),
    "none": fg.AttentionSpec(head_dim=16, dtype="float32"),
    **{path.stem: fg.load(path) for path in sorted((ROOT / "specs").glob("*.py"))},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_survives_with_everything_that_was_read(name):
    """And can be changed, and pickled again."""
    spec = SPECS[name]
    changes = {"dtype": "bfloat16", "head_dim": 32}
    for found in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert found == spec
        assert hash(found) == hash(spec)
        assert (found.named, found.file) == (spec.named, spec.file)
        assert [s.key for s in found.scalars] == [s.key for s in spec.scalars]
        assert (found.mask_line, found.score_line) == (spec.mask_line, spec.score_line)
        again = pickle.loads(pickle.dumps(found))
        assert again.replace() == spec.replace()
        assert again.replace(**changes) == spec.replace(**changes)


def test_a_restored_mod_is_identified_by_its_expression_alone():
    spec = SPECS["scalar"]
    found = pickle.loads(pickle.dumps(spec))
    again = fg.AttentionSpec(
        mask_mod=lambda b, h, q, k: found.mask_mod(b, h, q, k) & (k != 3), head_dim=16
    )
    direct = fg.AttentionSpec(
        mask_mod=lambda b, h, q, k: spec.mask_mod(b, h, q, k) & (k != 3), head_dim=16
    )
    assert again.mask == direct.mask
    assert [s.name for s in again.scalars] == ["window"]
    with pytest.raises(SpecError, match="only be called with its own symbols"):
        fg.AttentionSpec(mask_mod=lambda b, h, q, k: found.mask_mod(b, h, q + 1, k), head_dim=16)
    assert "test_pickle.py" in repr(found.mask_mod)


@pytest.mark.parametrize("name", ["function", "closure", "lambda", "causal"])
def test_an_operator_survives_as_the_same_operator(name):
    op = fg.attention(SPECS[name])
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.copy(op) is op
    assert copy.deepcopy(op) is op


class Layer(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.attend = op
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.attend(self.project(x), x, x)


@pytest.mark.parametrize("name", ["function", "closure", "lambda"])
def test_a_module_that_holds_an_operator_survives(name):
    layer = Layer(fg.attention(SPECS[name]))
    x, _, _ = Case(20, 20, 2, 2, 2, "float32", 16).tensors()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for found in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert found.attend is layer.attend
        assert torch.equal(found(x), layer(x))


@pytest.mark.slow
def test_another_process_gets_the_same_operator_by_the_same_name(tmp_path):
    spec = SPECS["lambda"]
    q, k, v = Case(20, 20, 1, 2, 2, "float32", 16).tensors()
    path = tmp_path / "call.pickle"
    path.write_bytes(pickle.dumps((fg.attention(spec), q, k, v, fg.attention(spec)(q, k, v))))
    causal_spec = SPECS["causal"]
    fg.attention(causal_spec)
    name = fg.attention(causal_spec.replace(dtype="float32")).name
    assert name.startswith("causal_")  # the plain name is taken: a hash of the content follows it
    program = f"""
import pickle, torch
import flashgen as fg
op, q, k, v, wanted = pickle.load(open({str(path)!r}, "rb"))
assert torch.equal(op(q, k, v), wanted)
assert torch.equal(torch.ops.flashgen.of_lambdas(q, k, v)[0], wanted)
spec = fg.load("specs/causal.py")
assert fg.attention(spec).name == "causal"
assert fg.attention(spec.replace(dtype="float32")).name == {name!r}
"""
    run_python("-c", program)
