"""The fields of a tensor map that tensormap.replace writes; `machine.map_bytes` has all bytes."""

# Of each field of tensormap.replace: its offset, the bytes of one entry, and how many there are.
FIELDS = {
    "rank": (4, 4, 1),
    "elemtype": (8, 4, 1),
    "interleave_layout": (12, 4, 1),
    "swizzle_mode": (16, 4, 1),
    "fill_mode": (20, 4, 1),
    "global_address": (24, 8, 1),
    "global_stride": (32, 8, 4),
    "global_dim": (64, 4, 5),
    "box_dim": (84, 4, 5),
}
