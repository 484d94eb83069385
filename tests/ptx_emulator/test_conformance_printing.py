"""printf: what a kernel prints, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator.errors import OutOfBounds, UnknownInstruction
from tests.ptx_emulator.test_conformance import run

CUDA = r"""
extern "C" __global__ void numbers(int* out) {
    if (threadIdx.x % 16 != 3) return;
    out[threadIdx.x] = printf("%2d|%-5d|%05d|%+d|%x|%#o|%u|%hhd|%lld|%%|%c\n", threadIdx.x,
                              -7, 42, 5, 255u, 8, 4294967295u, 511, 1ll << 40, 'z');
}
extern "C" __global__ void floats(int* out) {
    if (threadIdx.x == 1) printf("%5.2f|%e|%g|%*.*f|", 3.14159, 1e10f, 0.5, 7, 3, 2.0);
}
extern "C" __global__ void texts(int* out) {
    if (threadIdx.x < 2) printf("%s|%5s|%.2s|%p;", threadIdx.x ? "yes" : "no", "a", "abc",
                                (void*)16);
}
extern "C" __global__ void divergent(int* out) {
    for (int i = 0; i < threadIdx.x % 3; ++i) out[i] = printf("%d:%d ", threadIdx.x, i);
    if (threadIdx.x == 5) printf("end");
}
extern "C" __global__ void hexadecimal_floats(int* out) { printf("%a", 1.0); }
extern "C" __global__ void endless(int* out, const char* text) { printf("%s", text); }
"""


@pytest.mark.parametrize(
    ("kernel", "printed"),
    [
        (
            "numbers",
            " 3|-7   |00042|+5|ff|010|4294967295|-1|1099511627776|%|z\n"
            "19|-7   |00042|+5|ff|010|4294967295|-1|1099511627776|%|z\n",
        ),
        ("floats", " 3.14|1.000000e+10|0.5|  2.000|"),
        ("texts", "no|    a|ab|0x10;yes|    a|ab|0x10;"),
        ("divergent", "1:0 2:0 4:0 5:0 2:1 5:1 end"),
    ],
)
def test_a_kernel_prints_what_c_prints(
    kernel: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = np.zeros(32, np.int32)
    run(CUDA, kernel, (1,), (6 if kernel == "divergent" else 32,), out, check=False)
    assert capsys.readouterr().out == printed
    if kernel == "numbers":
        assert out[3] == 10
    if kernel == "divergent":
        assert out[:2].tolist() == [2, 2]


def test_a_text_has_an_end() -> None:
    with pytest.raises(OutOfBounds, match=r"printf of a text that .* has no end"):
        run(CUDA, "endless", (1,), (1,), np.zeros(1, np.int32), np.ones(8, np.uint8))


def test_other_conversions_are_refused() -> None:
    with pytest.raises(UnknownInstruction, match="a conversion of this printf"):
        run(CUDA, "hexadecimal_floats", (1,), (1,), np.zeros(1, np.int32))
