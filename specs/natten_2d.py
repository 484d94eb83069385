"""Each pixel of an image attends to a square around it, which is shifted inwards at the border.

    keep(q, k) = |row(k) - mid(row(q))| <= R and |column(k) - mid(column(q))| <= R

where position = row * width + column, and mid moves a pixel's row or column at least R away from
both borders. R, width and height are given at run time.

Source: Hassani et al., "Neighborhood Attention Transformer", 2023.
"""

import flashgen as fg

width = fg.Scalar("width", "int32", minimum=1)
height = fg.Scalar("height", "int32", minimum=1)
radius = fg.Scalar("radius", "int32", minimum=0)


def middle(place, length):
    return fg.minimum(fg.maximum(place, radius), length - 1 - radius)


def natten_2d(b, h, q, k):
    row = fg.abs(k // width - middle(q // width, height)) <= radius
    column = fg.abs(k % width - middle(q % width, width)) <= radius
    return row & column


spec = fg.AttentionSpec(mask_mod=natten_2d, head_dim=64, dtype="float16")
example_scalars = {"width": 17, "height": 16, "radius": 3}
