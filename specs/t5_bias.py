"""T5's learned bias: a number for each head and each of 32 buckets of distance.

    s' = s + table[h, bucket(k - q)]

Half of the buckets are for keys after the query. Of the 16 of each side, the first 8 hold one
distance each, and the others reach logarithmically to 128; 8 + floor(log(n / 8) / log(16) * 8) is
written as the distances at which it grows, which no rounding of a logarithm can move.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", 2020, section 2.1, and the buckets of its implementation.
"""

import flashgen as fg

table = fg.Tensor("table", ("heads", 32), "float32", grad=True)
STARTS = (12, 16, 23, 32, 46, 64, 91)  # ceil(8 * 16^(i / 8)) for i from 1 on


def bucket(distance):
    size = fg.abs(distance)
    far = 8 + sum(fg.where(size >= start, 1, 0) for start in STARTS)
    return fg.where(distance > 0, 16, 0) + fg.where(size < 8, size, far)


def t5_bias(score, b, h, q, k):
    return score + table[h, bucket(k - q)]


spec = fg.AttentionSpec(score_mod=t5_bias, head_dim=64, dtype="float16")
