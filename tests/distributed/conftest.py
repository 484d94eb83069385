"""What two ranks returned for each case, which all workers of a test run share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import returned_by, run_ranks_once


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def of_two(folder_of_run: Path) -> Callable[[str], list[Any]]:
    """What each of two ranks returned for a case of this folder; fails with a rank's traceback.

    One group of processes executes all cases, because its imports take seconds.
    """
    from tests.distributed import test_dtensors, test_ranks

    cases = (*test_dtensors.OF_TWO, *test_ranks.OF_TWO)

    def of(case: str) -> list[Any]:
        ranks = run_ranks_once(folder_of_run, 2, cases)
        return returned_by(ranks[:1] if case == test_ranks.LAST else ranks, case)

    return of
