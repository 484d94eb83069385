"""Every query attends to every key.

    keep(q, k) = true

Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2 (the encoder's attention).
"""

import flashgen as fg

spec = fg.AttentionSpec(head_dim=64, dtype="float16")
