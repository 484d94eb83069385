"""The results of a call beside its output, and the request for them, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.shared.errors import called_by_users

if TYPE_CHECKING:
    from torch import Tensor


@called_by_users()
class AuxRequest(NamedTuple):
    """What a call returns beside the output: ``op(q, k, v, return_aux=fg.AuxRequest(lse=True))``.

    Each statistic but the log-sum-exp takes a pass of its own over the scores, of one product. The
    statistics that the spec itself names are always returned.

    Attributes:
        lse: the log-sum-exp of each row.
        max_scores: the largest score of each row.
        entropy: the entropy of each row's weights.
        key_mass: the weight that each key has in all queries.
        block_mass: the number of keys in a block, to return the weight that each block of keys has
            in each query; None for no such weights.
    """

    lse: bool = False
    max_scores: bool = False
    entropy: bool = False
    key_mass: bool = False
    block_mass: int | None = None


@called_by_users()
class AuxOutput(NamedTuple):
    """What a call returned beside the output; None where it was not asked for. All are float32.

    Weights are P of the softmax before dropout, or those of the spec's weight_mod. Removed scores
    add nothing, in whatever row and key they are.

    Attributes:
        lse: [batch, heads_q, seq_q]; with gradients.
        max_scores: [batch, heads_q, seq_q], the largest score after score_mod; -inf in a row
            without keys. It has no gradient.
        entropy: [batch, heads_q, seq_q], -sum(P log P) over the keys, in nats; 0 in a row without
            keys. With gradients.
        key_mass: [batch, heads_q, seq_k], the sum of the weights over the queries, for each query
            head. It has no gradient.
        block_mass: [batch, heads_q, seq_q, blocks], the sum of a query's weights over the keys
            j * block to (j + 1) * block - 1 of k, or of the sequence where sequences are packed.
            The weights are rounded to the dtype of q before they are added up. It has no gradient.
        statistics: the results of the spec's own statistics, by name. They have no gradients.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    entropy: Tensor | None = None
    key_mass: Tensor | None = None
    block_mass: Tensor | None = None
    statistics: dict[str, Any] = {}  # noqa: RUF012  # never changed
