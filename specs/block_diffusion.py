"""Training a block diffusion model: the noised sequence, then the clean one, L tokens per block.

With x(p) = p < N (the token is noised) and i(p) = (p % N) // L (its block):

    keep = (i(q) == i(k) and x(q) == x(k))                  a block attends to itself,
        or (i(q) > i(k) and x(q) and not x(k))              noised blocks: to earlier clean ones,
        or (i(q) >= i(k) and not x(q) and not x(k))         clean blocks: to clean ones up to theirs

N and L are given at run time.

Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion
Language Models", 2025.
"""

import flashgen as fg

clean = fg.Scalar("clean", "int32", minimum=1)  # N: where the clean sequence starts
block = fg.Scalar("block", "int32", minimum=1)


def block_diffusion(b, h, q, k):
    q_noised, k_noised = q < clean, k < clean
    i, j = (q % clean) // block, (k % clean) // block
    itself = (i == j) & (q_noised == k_noised)
    before = (i > j) & q_noised & ~k_noised
    among_clean = (i >= j) & ~q_noised & ~k_noised
    return itself | before | among_clean


spec = fg.AttentionSpec(mask_mod=block_diffusion, head_dim=64, dtype="float16")
example_scalars = {"clean": 128, "block": 16}
