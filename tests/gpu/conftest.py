"""The tests of a real GPU: collected where one is, or for FLASHGEN_GPU_DRY=1."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support import gpu_device as gpu
from tests.support.compiled_flex import registered

__all__ = ["live_gpu", "registered"]

collect_ignore_glob = ["test_*.py"] if gpu.MISSING else []


@pytest.fixture(autouse=True)
def live_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A working device, synchronised after the test; torch's products in full precision.

    After an error such as an invalid address a process cannot use its GPU any more: the tests that
    follow are skipped with the name of the test in which it happened.
    """
    if gpu.MISSING:  # a file named on the command line is collected all the same
        pytest.skip(gpu.MISSING)
    if gpu.lost is not None:
        pytest.skip(f"the GPU cannot be used any more after {gpu.lost}")
    # Torch in half precision is the yardstick of the error rule.
    products = torch.backends.cuda.matmul
    options = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    before = [getattr(products, option) for option in options]
    for option in options:
        setattr(products, option, False)
    threads = torch.get_num_threads()  # one, for parallel test processes; GPU tests run alone
    torch.set_num_threads(gpu.pick(min(8, os.cpu_count() or 1), threads))
    yield
    torch.set_num_threads(threads)
    for option, value in zip(options, before, strict=True):
        setattr(products, option, value)
    if gpu.lost is None and gpu.note_loss(request.node.name):
        pytest.fail(f"the GPU cannot be used any more after {gpu.lost}", pytrace=False)
    if gpu.lost is None and not gpu.DRY:
        torch.cuda.empty_cache()
