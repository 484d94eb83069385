"""What a kernel does not use is removed from its file; test_generated.py has the specs' files."""

from __future__ import annotations

from flashgen.kernels.codegen.source import Param
from flashgen.kernels.codegen.tidy import used

TEXT = """\
constexpr int USED = 1;
constexpr int UNUSED =
    2;  // USED

// The two halves.
DEVICE int low(int x) { return x; }
DEVICE int high(int x) {
  return low(x) + USED;
}

// A pair.
template <int N>
struct Pair {
  int x[N];
};

struct Params {
  int* data;  // [size]
  int size;
};

extern "C" __global__ void kernel(const __grid_constant__ Params p) {
  *p.data = {};  // high(p.size)
}
"""
PARAMS = (
    Param("data", "int*", "[size]"),
    Param("size", "int"),
)


def test_what_the_kernel_cannot_reach_is_removed_with_its_comment() -> None:
    text, params = used(TEXT, PARAMS)
    assert params == PARAMS[:1]
    for gone in ("USED", "halves", "low", "Pair", "int size"):
        assert gone not in text.partition("extern")[0]


def test_what_is_used_by_something_used_stays_and_the_comment_of_a_group_too() -> None:
    text, params = used(TEXT.replace("= {};  //", "="), PARAMS)
    assert params == PARAMS
    assert "// The two halves.\nDEVICE int low" in text
    assert "UNUSED" not in text
    without_low = TEXT.replace("= {};  //", "=").replace("low(x) + ", "")
    assert "// The two halves.\nDEVICE int high" in used(without_low, PARAMS)[0]


def test_a_local_stays_where_a_later_line_of_its_block_mentions_it() -> None:
    kernel = """\
extern "C" __global__ void kernel(const __grid_constant__ Params p) {
  const int gone = p.size;
  const int chain =
      p.size;
  const int* outer = p.data;  // used by first
  {
    const int outer = 1;
    *p.data = outer;
  }
  const int hidden = 2;
  {
    const int first = *outer, hidden = chain;
    *p.data = first + hidden;  // gone
  }
}
"""
    text, _ = used(TEXT.partition("extern")[0] + kernel, PARAMS)
    assert "gone =" not in text
    assert "const int hidden = 2" in text  # a second name of a statement is not followed
    for stays in ("chain =\n      p.size;", "const int* outer", "const int outer = 1"):
        assert stays in text
    assert "outer" not in used(text.replace("*outer", "0"), PARAMS)[0].partition("{\n    const")[0]
