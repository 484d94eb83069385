"""Which tests run: those of the changed files in `make quick`, and the cases of a product."""

from __future__ import annotations

import pytest

from tests.support.changed import TESTED_IN, folders
from tests.support.paths import ROOT
from tests.support.tiers import take_turns


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flashgen/kernels/planner/models/forward_sm80.py", ["tests/planner"]),
        ("flashgen/calls/runtime/merge.py", ["tests/ops"]),
        ("flashgen/wing/cpu/walk.py", ["tests/cpu"]),
        ("flashgen/shared/errors.py", ["tests/package"]),
        ("templates/common/softmax.cuh.j2", ["tests/codegen", "tests/kernels"]),
        ("templates/sm90/forward.cu.j2", ["tests/codegen", "tests/kernels/sm90"]),
        ("templates/export/checks.c.j2", ["tests/export"]),
        ("tests/kernels/sm80/test_forward.py", ["tests/kernels"]),
        ("tests/support/paths.py", ["tests/package"]),
        ("docs/gpu.md", ["tests/docs"]),
        ("benchmarks/suite/status.py", ["tests/benchmarks"]),
        ("examples/serve.py", ["tests/examples"]),
        ("Makefile", ["tests/docs", "tests/package"]),
    ],
)
def test_a_file_has_the_tests_of_its_folder(name: str, expected: list[str]) -> None:
    assert folders([name]) == expected


def test_every_folder_of_tests_that_is_named_exists_and_none_is_run_twice() -> None:
    for named in TESTED_IN.values():
        assert all((ROOT / "tests" / folder).is_dir() for folder in named)
    both = folders(["templates/sm90/forward.cu.j2", "templates/common/softmax.cuh.j2"])
    assert both == ["tests/codegen", "tests/kernels"]


def test_the_last_factor_takes_turns_and_meets_every_value_of_the_others() -> None:
    cases = take_turns("abc", range(4), (False, True))
    assert len(cases) == 12
    for place, values in ((0, "abc"), (1, range(4))):
        for value in values:
            assert {case[2] for case in cases if case[place] == value} == {False, True}
