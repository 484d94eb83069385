"""What a kernel does not use is removed from its file; test_generated.py has the specs' files."""

from __future__ import annotations

from flashgen.codegen.source import Param
from flashgen.codegen.unused import used

TEXT = """\
constexpr int USED = 1;
constexpr int UNUSED =
    2;  // USED

// The two halves.
__device__ __forceinline__ int low(int x) { return x; }
__device__ __forceinline__ int high(int x) {
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
    Param("data", "pointer", "int* data;", "[size]"),
    Param("size", "int32", "int size;", ""),
)


def test_what_the_kernel_cannot_reach_is_removed_with_its_comment() -> None:
    text, params = used(TEXT, PARAMS)
    assert params == PARAMS[:1]
    for gone in ("USED", "halves", "low", "Pair", "int size"):
        assert gone not in text.partition("extern")[0]


def test_what_is_used_by_something_used_stays_and_the_comment_of_a_group_too() -> None:
    text, params = used(TEXT.replace("= {};  //", "="), PARAMS)
    assert params == PARAMS
    assert "// The two halves.\n__device__ __forceinline__ int low" in text
    assert "UNUSED" not in text
    without_low = TEXT.replace("= {};  //", "=").replace("low(x) + ", "")
    assert "// The two halves.\n__device__ __forceinline__ int high" in used(without_low, PARAMS)[0]
