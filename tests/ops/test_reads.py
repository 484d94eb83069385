"""An index outside of a captured tensor, where its element is used, is refused on CPU tensors."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen.calls.cpu import reads
from flashgen.calls.runtime.prepared_call import PreparedCall
from flashgen.shared.errors import FlashgenError, InputError
from tests.support.tiers import slow

LINE, OTHER = fg.Tensor("line", ("n",)), fg.Tensor("other", ("n",))
FLAG, PLACE = fg.Tensor("flag", ("m",), "int32"), fg.Tensor("place", ("seq_q",), "int32")
PAIR, ONE = fg.Tensor("pair", (2,)), fg.Tensor("one", (1,))
TABLE = fg.Tensor("table", ("heads", "n"), grad=True)
BATCH, HEADS, SEQ = 2, 2, 6


def causal(b, h, q, k):
    return q >= k


def operator(mask, score, **options):
    options = {"head_dim": 16, "dtype": "float32", "name": "reads"} | options
    return fg.attention(fg.AttentionSpec(mask, score, **options))


def operands(seq=SEQ, batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, HEADS, seq, 16, generator=generator) for _ in range(3)]


def given_to(op, length):
    """Tensors for all captures: ``line`` and its like have this length."""
    known = {
        "line": torch.ones(length),
        "other": torch.ones(length),
        "flag": torch.ones(length, dtype=torch.int32),
        "place": torch.arange(1, SEQ + 1).int(),
        "pair": torch.ones(2),
        "one": torch.ones(1),
        "table": torch.ones(HEADS, length),
    }
    return {tensor.name: known[tensor.name] for tensor in op.spec.tensors if tensor.name in known}


def large(q, k):
    total = q - k
    for _ in range(60):
        total = fg.minimum(total * 3 - k, total + q)
    return total * 0 + q - k


# The mask, the score, and the shortest length with which no read is outside; None if there is none.
CASES = {
    "everywhere": (None, lambda s, b, h, q, k: s + LINE[q], SEQ),
    "negative": (None, lambda s, b, h, q, k: s + LINE[q - k], None),
    "removed by the mask": (causal, lambda s, b, h, q, k: s + LINE[q - k], SEQ),
    "some removed": (lambda b, h, q, k: q >= k - 1, lambda s, b, h, q, k: s + LINE[q - k], None),
    "in a branch": (None, lambda s, b, h, q, k: fg.where(q > k, s + LINE[q - k], s), SEQ),
    "in the last branch": (None, lambda s, b, h, q, k: fg.where(q <= k, s, s + LINE[q - k]), SEQ),
    "in the wrong branch": (None, lambda s, b, h, q, k: fg.where(q > k, s, s + LINE[q - k]), None),
    "in a branch of the score": (
        None,
        lambda s, b, h, q, k: fg.where(s > 0, s + LINE[q + 1], s),
        SEQ + 1,
    ),
    "where the score and a position decide": (
        None,
        lambda s, b, h, q, k: fg.where(~((s < 0) | (q < k)), s + LINE[q - k], s),
        SEQ,
    ),
    "where a read beside the same position decides": (
        None,
        lambda s, b, h, q, k: fg.where((q >= k) & (FLAG[q - k] > 0), s + LINE[q - k], s),
        SEQ,
    ),
    "in a removed score": (
        None,
        lambda s, b, h, q, k: fg.where(q >= k, s + LINE[q - k], -math.inf),
        SEQ,
    ),
    "beside a condition": (lambda b, h, q, k: (q >= k) & (FLAG[q - k] > 0), None, SEQ),
    "beside a true one": (lambda b, h, q, k: (q >= k) | (FLAG[k - q] > 0), None, SEQ),
    "beside a wrong one": (lambda b, h, q, k: (q < k) | (FLAG[k - q] > 0), None, None),
    "beside a read": (
        lambda b, h, q, k: (FLAG[q + 1] > 0) & (FLAG[k + 1] > 3),
        None,
        SEQ + 1,
    ),
    "under a not": (lambda b, h, q, k: ~((q < k) | (FLAG[q - k] == 0)), None, SEQ),
    "by an element": (causal, lambda s, b, h, q, k: s + LINE[PLACE[q]], SEQ + 1),
    "an index of an index": (None, lambda s, b, h, q, k: s + LINE[FLAG[k - 1]], None),
    "of floats": (None, lambda s, b, h, q, k: s + LINE[fg.floor(fg.exp(q * 0.2))], 3),
    "of a number": (None, lambda s, b, h, q, k: s + PAIR[b + h], None),
    "of a number, 1": (None, lambda s, b, h, q, k: s + ONE[h], None),
    "of two dimensions": (causal, lambda s, b, h, q, k: s + TABLE[h, k + 1], SEQ + 1),
    "of a large expression": (causal, lambda s, b, h, q, k: s + LINE[large(q, k)], SEQ),
}


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
@pytest.mark.parametrize("name", CASES)
def test_a_read_outside_is_refused_where_its_element_is_used(name, backend):
    mask, score, shortest = CASES[name]
    op = operator(mask, score)
    if shortest is not None:
        op(*operands(), **given_to(op, shortest), backend=backend)
    too_short = given_to(op, 2 * SEQ if shortest is None else shortest - 1)
    for _ in range(2):
        with pytest.raises(InputError, match="uses an element outside of the captured tensor"):
            op(*operands(), **too_short, backend=backend)
    if mask is None and not name.startswith("of a number"):  # a named length of 1 is broadcast
        op(*operands(), **given_to(op, 1), backend=backend)


MADE_OF_SCORES = {
    "floor": (lambda s: fg.floor(s * 2), lambda s, flag: (s * 2).floor()),
    "clamped": (lambda s: fg.clamp(fg.floor(s), 0, 2), lambda s, flag: s.floor()),
    "a choice": (lambda s: fg.where(s > 0, 7, -7), lambda s, flag: torch.where(s > 0, 7, -7)),
    "an index of an index": (
        lambda s: FLAG[fg.floor(s * 2)],
        lambda s, flag: flag[(s * 2).floor().long().clamp(0, 3)],
    ),
}


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
@pytest.mark.parametrize("name", MADE_OF_SCORES)
def test_an_index_that_is_made_of_the_score_reads_the_nearest_element(name, backend):
    place, of_torch = MADE_OF_SCORES[name]
    op = operator(None, lambda s, b, h, q, k: s + LINE[place(s)])
    q, k, v = operands()
    known = {"line": torch.tensor([1.0, -2.0, 3.0]), "flag": torch.tensor([3, 0, 2, 1]).int()}
    given = {x.name: known[x.name] for x in op.spec.tensors}
    s = q @ k.mT / 4
    read = known["line"][of_torch(s, known["flag"]).long().clamp(0, 2)]
    out = op(q, k, v, **given, backend=backend)
    torch.testing.assert_close(out, torch.softmax(s + read, -1) @ v, atol=1e-5, rtol=1e-4)


def test_the_error_names_the_line_the_index_the_size_and_a_way_out_that_works():
    for place in (lambda q, k: fg.minimum(q, fg.seq_k) - k + 3, lambda q, k: q // fg.heads - k + 3):
        refused_until_typed_in(place)
    op = operator(None, lambda s, b, h, q, k: s + TABLE[h, q - k + 3])
    with pytest.raises(InputError) as caught:
        op(*operands(), table=torch.ones(2, 9))
    error = caught.value
    assert error.what == "score_mod uses an element outside of the captured tensor 'table'"
    assert "test_reads.py:" in error.where
    assert "table[h, q - k + 3]" in error.where
    wanted = "index -1 of dimension 1 (n), whose length is 9, at b=0, h=0, q=0, k=4"
    assert error.numbers == wanted
    assert error.way_out.startswith("table[h, fg.clamp(q - k + 3, 0, 8)] for the nearest")
    refused_until_typed_in(lambda q, k: q - k + 3)


ROW = fg.Tensor("row", ("heads", "seq_q"), "float32", grad=True)
ROW_OPTIONS = {
    "score_mod": {"score_mod": lambda s, b, h, q, k: s + ROW[h, q]},
    "weight_mod": {"weight_mod": lambda s, b, h, q, k: s * ROW[h, q], "normalize": "none"},
    "normalize": {"weight_mod": lambda s, b, h, q, k: s, "normalize": ROW},
    "sink": {"sink": ROW},
}


@pytest.mark.parametrize("name", ROW_OPTIONS)
def test_a_row_before_the_first_position_has_no_element(name):
    op = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float32", **ROW_OPTIONS[name]))
    q, k, v = operands()
    row = torch.ones(q.shape[1], q.shape[2])
    op(q, k, v, row=row)
    with pytest.raises(InputError, match=f"^{name} uses an element outside") as caught:
        op(q, k, v, row=row, q_offset=-1)
    assert caught.value.numbers.startswith("index -1 of dimension 1 (seq_q)")


def refused_until_typed_in(place):
    """A call with this index is refused, and one with the index of the way out is not."""
    op = operator(None, lambda s, b, h, q, k: s + TABLE[h, place(q, k)])
    with pytest.raises(InputError) as caught:
        op(*operands(), table=torch.ones(2, 9))
    text = caught.value.way_out.partition(" for the nearest")[0]
    mended = operator(None, eval(f"lambda s, b, h, q, k: s + {text}", {"table": TABLE, "fg": fg}))
    mended(*operands(), table=torch.ones(2, 9))


def test_the_way_out_names_functions_as_a_mod_does():
    op = operator(None, lambda s, b, h, q, k: s + LINE[fg.floor(fg.exp(q * 0.25))])
    with pytest.raises(InputError) as caught:
        op(*operands(), line=torch.ones(2))
    text = caught.value.way_out.partition(" for the nearest")[0]
    mended = operator(None, eval(f"lambda s, b, h, q, k: s + {text}", {"line": LINE, "fg": fg}))
    mended(*operands(), line=torch.ones(2))


def test_positions_are_those_of_offsets_sequences_and_pages():
    distance = operator(causal, lambda s, b, h, q, k: s + LINE[q - k])
    given = {"line": torch.ones(SEQ)}
    distance(*operands(), **given, q_offset=-1)
    for offset in (1, torch.tensor([0, 1])):
        with pytest.raises(InputError, match="outside"):
            distance(*operands(), **given, q_offset=offset)
    packed = operator(causal, lambda s, b, h, q, k: s + LINE[q - k] * PAIR[b], packed=True)
    qkv = operands(batch=1)
    for ends in ([0, 3, 6], [0, 2, 5]):
        ends = torch.tensor(ends, dtype=torch.int32)
        call = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "pair": torch.ones(2)}
        packed(*qkv, line=torch.ones(3), **call)
        with pytest.raises(InputError, match="'line'"):
            packed(*qkv, line=torch.ones(2), **call)
    ends = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    call = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "pair": torch.ones(2)}
    with pytest.raises(InputError, match="'pair'"):
        packed(*qkv, line=torch.ones(3), **call)
    paged = operator(causal, lambda s, b, h, q, k: s + LINE[k], paged=True)
    caches = [torch.randn(3, HEADS, 16, 16) for _ in range(2)]
    pages = {"page_table": torch.tensor([[0, 1]]).int(), "cache_seqlens": torch.tensor([20]).int()}
    q = operands(batch=1)[0]
    paged(q, *caches, **pages, line=torch.ones(20))
    with pytest.raises(InputError, match="outside"):
        paged(q, *caches, **pages, line=torch.ones(19))


def test_a_block_layout_removes_reads_too():
    layout = fg.BlockSparse(lambda i, j: i == j, block_q=16, block_k=16)
    op = operator(None, lambda s, b, h, q, k: s + LINE[q - k + 15], block_sparse=layout)
    op(*operands(40), line=torch.ones(31))
    with pytest.raises(InputError, match="outside"):
        op(*operands(40), line=torch.ones(30))


def test_new_contents_are_checked_and_right_calls_are_checked_once(monkeypatch):
    op = operator(causal, lambda s, b, h, q, k: s + LINE[PLACE[q]])
    given = given_to(op, SEQ + 1)
    op(*operands(), **given)
    given["place"][2] = 7
    with pytest.raises(InputError, match="index 7"):
        op(*operands(), **given)
    checked = []
    check = PreparedCall._check_reads
    monkeypatch.setattr(
        PreparedCall, "_check_reads", lambda *given: (checked.append(1), check(*given))
    )
    op = operator(causal, lambda s, b, h, q, k: s + LINE[q - k] + OTHER[k])
    for _ in range(3):
        op(*operands(), **given_to(op, SEQ))
    assert len(checked) == 1


def test_gradients_and_compiled_calls_are_refused_too():
    op = operator(causal, lambda s, b, h, q, k: s + TABLE[h, q - k])
    given = {"table": torch.ones(2, SEQ - 1, requires_grad=True)}
    with pytest.raises(InputError, match="outside"):
        op(*operands(), **given)
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    with pytest.raises(InputError, match="outside"):
        compiled(*operands(), **given)


def test_on_a_gpu_the_environment_decides(gpu, monkeypatch):
    op = operator(causal, lambda s, b, h, q, k: s + LINE[q - k], dtype="float16")
    qkv, given = [x.half() for x in operands()], {"line": torch.ones(SEQ - 1)}
    op(*qkv, **given, backend="gpu")  # clamped
    monkeypatch.setenv("FLASHGEN_CHECK_READS", "1")
    with pytest.raises(InputError, match="outside"):
        op(*qkv, **given, backend="gpu")
    monkeypatch.setenv("FLASHGEN_CHECK_READS", "0")
    op(*qkv, **given)
    monkeypatch.setenv("FLASHGEN_CHECK_READS", "yes")
    with pytest.raises(FlashgenError, match="FLASHGEN_CHECK_READS"):
        op(*qkv, **given)


CHAINS = {
    "choices by elements": lambda x, q, k, i: fg.where(
        (FLAG[q - i] > i) & (FLAG[k - i] < i), x + LINE[q - k], fg.where(LINE[k + i] > x, x, x - 1)
    ),
    "indices of elements": lambda x, q, k, i: fg.where(
        x > q + i, x + LINE[q - k - i], LINE[fg.floor(x)]
    ),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_finding_reads_takes_time_linear_in_nested_choices(kind, monkeypatch):
    steps = []
    combined = reads._combined
    monkeypatch.setattr(
        reads, "_combined", lambda *given: (steps.append(len(given[-1])), combined(*given))[1]
    )

    def work_of(count):
        def score_mod(score, b, h, q, k):
            x = LINE[q]
            for i in range(count):
                x = CHAINS[kind](x, q, k, i)
            return score + x

        steps.clear()
        found = reads.reads_of(fg.AttentionSpec(None, score_mod, head_dim=16, dtype="float32"))
        assert len(found) > count
        return sum(steps)

    assert work_of(16) < 2.5 * work_of(8)


def test_a_check_finds_what_tensors_do_not_change_once(monkeypatch):
    op = operator(causal, lambda s, b, h, q, k: s + LINE[PLACE[q]])
    given = given_to(op, SEQ + 1)
    bounds = []
    inside = reads._Positions._is_inside
    monkeypatch.setattr(
        reads._Positions, "_is_inside", lambda *given: (bounds.append(1), inside(*given))[1]
    )
    for _ in range(3):
        op(*operands(), **given)
    assert len(bounds) == len(reads.reads_of(op.spec))


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_integers_are_exact_at_an_index_that_is_made_of_floats(backend):
    ids = torch.tensor([2**24 + 1, 2**24 + 3, 5]).int()

    def score(s, b, h, q, k):
        return fg.where(FLAG[fg.floor(k * 0.5)] - 2**24 == 1, s, s * 2)

    q, k, v = operands(batch=1)
    s = q @ k.mT / 4
    wanted = torch.softmax(torch.where(torch.arange(SEQ) < 2, s, s * 2), -1) @ v
    out = operator(None, score)(q, k, v, flag=ids, backend=backend)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)


def steps(s):
    for i in range(60):  # a part of the index has a name
        s = fg.floor(s * 0.5 + i) + 1
    return s


# Expressions of floats without a fraction, and their values as torch computes them in integers.
WHOLE = {
    "a difference": (lambda q, k: fg.floor(q * 0.5) - 1 + k, lambda q, k: q // 2 - 1 + k),
    "a product": (lambda q, k: 2 * fg.floor(k * 0.5) + 1, lambda q, k: k // 2 * 2 + 1),
    "rounded up": (lambda q, k: -fg.floor(-k * 0.5) + q, lambda q, k: -(-k // 2) + q),
    "an absolute value": (lambda q, k: abs(q // 2.0 - fg.round(k)), lambda q, k: abs(q // 2 - k)),
    "a square": (lambda q, k: fg.floor(k * 0.5) ** 2, lambda q, k: (k // 2) ** 2),
    "a sign": (lambda q, k: fg.sign(q * 1.0 - k) + 1, lambda q, k: torch.sign(q - k) + 1),
    "a choice": (
        lambda q, k: fg.where(q > k, fg.maximum(fg.floor(q * 0.5) - 1, 0) + 1, k),
        lambda q, k: torch.where(q > k, (q // 2 - 1).clamp(min=0) + 1, k),
    ),
    "large": (lambda q, k: fg.maximum(steps(k * 0.0) - 115, 0) + k, lambda q, k: 3 + k),
}


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_an_index_may_be_any_expression_of_floats_without_a_fraction(backend):
    def score(s, b, h, q, k):
        for index, _ in WHOLE.values():
            s = s + fg.where(index(q, k) < 0, 0, TABLE[h, index(q, k)])
        return s

    q, k, v = operands(batch=1)
    table = torch.randn(HEADS, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    row, column = torch.arange(SEQ)[:, None], torch.arange(SEQ)
    s = q @ k.mT / 4
    for _, values in WHOLE.values():
        index = values(row, column).expand(SEQ, SEQ)
        s = s + torch.where(index < 0, 0, table[:, index.clamp(min=0)])
    wanted = torch.softmax(s, -1) @ v
    out = operator(None, score)(q, k, v, table=table, backend=backend)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    pairs = (torch.autograd.grad(x.square().sum(), table)[0] for x in (out, wanted))
    torch.testing.assert_close(*pairs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "index",
    [
        lambda s, q: s,
        lambda s, q: q * 1.0 + 1,
        lambda s, q: fg.floor(s) + 0.5,
        lambda s, q: fg.floor(s) + s,
        lambda s, q: fg.floor(s) / 2,
        lambda s, q: fg.floor(s) ** -1,
        lambda s, q: abs(s),
    ],
)
def test_an_index_with_a_fraction_is_refused_and_its_floor_is_not(index):
    with pytest.raises(fg.SpecError, match="is not an integer") as caught:
        operator(None, lambda s, b, h, q, k: s + LINE[index(s, q)])
    assert "fg.floor(x) for a float" in caught.value.way_out
    operator(None, lambda s, b, h, q, k: s + LINE[fg.floor(index(s, q))])
