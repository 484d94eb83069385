"""transformers' cache of 8-bit floats: its attention, and its codes read by kernels themselves."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import cache_utils

import flashgen as fg
from tests.support.paged_specs import before
from tests.support.transformers_models import tiny


@pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="of transformers from 5.24 on"
)
@pytest.mark.parametrize("backend", [None, "emulator"])
def test_codes_of_a_quantized_cache_are_read_with_the_bits_of_its_copy(backend: str | None) -> None:
    model = tiny("llama").model("fg").half()
    cache = cache_utils.QuantizedCache("fp8", model.config)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
        logits = [model(part, past_key_values=cache).logits for part in ids.split(30, 1)]
    torch.testing.assert_close(torch.cat(logits, 1), exact, atol=0.3, rtol=0.1)
    layer = cache.layers[0]
    (k, k_scale), (v, v_scale) = layer._quantized_keys, layer._quantized_values
    assert k.dtype == v.dtype == torch.float8_e4m3fn
    copies = [layer._dequantize(pair) for pair in (layer._quantized_keys, layer._quantized_values)]
    pages = {
        "page_table": torch.arange(2, dtype=torch.int32)[:, None],
        "cache_seqlens": torch.full((2,), 40, dtype=torch.int32),
    }
    q = torch.randn(2, 4, 3, 16, generator=torch.Generator().manual_seed(4)).half()
    spec = fg.AttentionSpec(before, head_dim=16, paged=True, name="of_quantized_caches")
    coded = fg.attention(spec.replace(kv_dtype="float8_e4m3fn"))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    found = coded(q, k, v, **pages, **scales, backend=backend)
    assert torch.equal(found, fg.attention(spec)(q, *copies, **pages, backend=backend))
