"""torch.vmap of the operator gives what a loop gives, with gradients and captured tensors too."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops.registration import operator_of
from tests.support.tiers import one_in


def spec_of(mask_mod=None, score_mod=None, **options):
    return fg.AttentionSpec(mask_mod, score_mod, head_dim=8, dtype="float32", **options)


def captured(dims, index):
    """A score that adds an element of a learned tensor."""
    shared = fg.Tensor("shared", dims, grad=True)
    return spec_of(score_mod=lambda s, b, h, q, k: s + shared[index(b, h), k])


DROPS = spec_of(lambda b, h, q, k: q >= k, dropout=True)
SPECS = {
    "blind": DROPS,
    "looks at b": spec_of(
        lambda b, h, q, k: k + 2 * b < fg.seq_k, lambda s, b, h, q, k: s * (b + 1) / fg.batch
    ),
    "shared": captured(("heads", "seq_k"), lambda b, h: h),
    "own entries": captured(("batch", "seq_k"), lambda b, h: b),
    "first entry": captured(("batch", "seq_k"), lambda b, h: 0),
}
PLAIN = ("blind", "looks at b")
CAPTURED = ("shared", "own entries", "first entry")


def samples(name, *lead):
    """Operands, and what the spec captures."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8)]
    shapes += [(4 if name == "shared" else 2, 12)] if name in CAPTURED else []
    return [torch.randn(*lead, *shape, generator=generator) for shape in shapes]


def through_op(name):
    op = fg.attention(SPECS[name])
    return lambda q, k, v, *shared: op(q, k, v, **dict(zip(("shared",), shared, strict=False)))


def through_torch_ops(name):
    overload = operator_of(SPECS[name]).overload
    return lambda *tensors: overload(*tensors)[0]


@pytest.fixture(params=[through_op, through_torch_ops])
def make(request):
    return request.param


def of_sample(tensors, dims, i):
    return [t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)]


def assert_mapped(call, tensors, dims):
    """vmap gives what a loop over three samples gives."""
    looped = [call(*of_sample(tensors, dims, i)) for i in range(3)]
    mapped = torch.vmap(call, in_dims=dims)(*tensors)
    torch.testing.assert_close(mapped, torch.stack(looped), atol=1e-6, rtol=1e-5)


OF_OPERANDS = [(0, 0, 0), (1, 0, 3), (0, None, None), (None, 1, 1), (None, None, 0)]
OF_CAPTURES = [(0, 0, 0, 0), (0, 0, 0, None), (None, None, None, 0), (0, None, None, 1)]


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        *((name, dims) for name in PLAIN for dims in OF_OPERANDS),
        *((name, dims) for name in CAPTURED for dims in OF_CAPTURES),
    ],
)
def test_vmap_is_a_loop_over_samples(make, name, dims):
    # The last dimension stays contiguous: no mapped dimension goes behind it.
    tensors = [
        t[0] if d is None else t.movedim(0, d) for t, d in zip(samples(name, 3), dims, strict=True)
    ]
    assert_mapped(make(name), tensors, dims)


@pytest.mark.parametrize("name", PLAIN)
def test_vmap_nests(make, name):
    q, k, v = samples(name, 2, 3)
    call = make(name)
    got = torch.vmap(torch.vmap(call), in_dims=(0, None, 0))(q, k[0], v)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(got[i, j], call(q[i, j], k[0, j], v[i, j]))


@pytest.mark.parametrize(
    ("name", "dims"),
    one_in(
        4,
        [
            *((name, (0, None, None)) for name in PLAIN),
            *(
                (name, dims)
                for name in CAPTURED
                for dims in ((0, 0, 0, 0), (0, None, 0, None), (None, None, None, 0))
            ),
        ],
    ),
)
def test_gradients_of_samples(make, name, dims):
    """One for each sample, of a tensor that all of them share too; and their sum."""
    call = make(name)
    tensors = [t[0] if d is None else t for t, d in zip(samples(name, 3), dims, strict=True)]

    def loss(*tensors):
        return call(*tensors).square().sum()

    last = len(tensors) - 1
    for places in (tuple(range(last + 1)), (last,), (1,)):
        gradient = torch.func.grad(loss, argnums=places)
        looped = [gradient(*of_sample(tensors, dims, i)) for i in range(3)]
        mapped = torch.vmap(gradient, in_dims=dims)(*tensors)
        for place, found, wanted in zip(places, mapped, zip(*looped, strict=True), strict=True):
            wanted = torch.stack(wanted)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

            def total(tensor, place=place):
                given = [*tensors[:place], tensor, *tensors[place + 1 :]]
                return torch.vmap(loss, in_dims=dims)(*given).sum()

            whole = torch.func.grad(total)(tensors[place])
            wanted = wanted.sum(0) if dims[place] is None else wanted
            torch.testing.assert_close(whole, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_an_empty_mapping_gives_nothing(name):
    tensors, op = samples(name, 0), through_op(name)
    assert torch.vmap(op)(*tensors).shape == (0, 2, 4, 9, 8)
    rest = [t[0] for t in samples(name, 1)[1:]]
    mapped = torch.vmap(op, in_dims=(0, *(None for _ in rest)))(tensors[0], *rest)
    assert mapped.shape == (0, 2, 4, 9, 8)


def test_dropout_of_samples_is_that_of_calls():
    q, k, v = samples("blind", 3)
    op = fg.attention(DROPS)
    states = torch.tensor([[1, 2], [3, 4], [5, 6]])

    def call(x, y, z, rng):
        return op(x, y, z, dropout_p=0.4, rng=rng)

    assert_mapped(call, [q, k, v, states], (0, 0, 0, 0))
    assert_mapped(call, [q, k, v, states[0]], (0, 0, 0, None))
    assert_mapped(call, [q[0], k[0], v[0], states], (None, None, None, 0))


def test_drawing_within_vmap_follows_its_randomness():
    q, k, v = (t[:1].expand(3, -1, -1, -1, -1) for t in samples("blind", 1))
    op = fg.attention(DROPS)

    def call(*t):
        return op(*t, dropout_p=0.4)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q, k, v)
    same = torch.vmap(call, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(call, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])


def test_a_mapped_tensor_for_a_scalar_is_refused_with_the_tensor_that_can_be_mapped():
    """Its samples have no Python number that .item() could return."""
    q, k, v = (t[0] for t in samples("blind", 1))

    def windowed(window):
        spec = fg.AttentionSpec(
            lambda b, h, q, k: q - k < window, head_dim=q.shape[-1], dtype="float32"
        )
        return lambda size: fg.attention(spec)(q, k, v, window=size)

    with pytest.raises(fg.InputError) as refused:
        torch.vmap(windowed(fg.Scalar("window", "int32")))(torch.tensor([1, 3]))
    way_out = "fg.Tensor('window', (), 'int64') in the spec, a number in a tensor"
    assert refused.value.way_out == way_out
    assert_mapped(windowed(fg.Tensor("window", (), "int64")), [torch.tensor([1, 3, 7])], (0,))
