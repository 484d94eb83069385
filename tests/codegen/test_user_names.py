"""Names of a user's scalars and tensors never collide with those of the templates."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.kernels.codegen.functions import FIELDS, PARAMETERS
from flashgen.kernels.compile import nvrtc
from flashgen.shared.paths import PATHS
from flashgen.spec.language.capture_names import check_name
from flashgen.spec.language.spec_file import load
from tests.support.paths import ROOT


def accepted(name: str) -> bool:
    try:
        check_name("Scalar", name)
    except fg.SpecError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_no_scalar_equals_a_symbol_of_the_emitted_functions(dtype: str) -> None:
    for symbol in (*PARAMETERS, *FIELDS):
        if accepted(symbol.name):
            assert fg.Scalar(symbol.name, dtype).expr != symbol
    for text in (*PARAMETERS.values(), *FIELDS.values()):
        name = re.split(r"[ .]", text)[-1]
        if accepted(name):
            assert fg.Scalar(name, dtype).expr not in {*PARAMETERS, *FIELDS}


CUDA = """
    __global__ __device__ __host__ __shared__ __constant__ __managed__ __restrict__ __noinline__
    __forceinline__ __launch_bounds__ __grid_constant__ __maxnreg__ __align__ threadIdx blockIdx
    blockDim gridDim warpSize dim3 uint3 int2 int4 float2 float4 double2 half half2 clock clock64
    cudaError_t cudaStream_t cudaMalloc cudaMemcpy atomicAdd atomicCAS atomicMax __syncthreads
    __syncwarp __threadfence __shfl_sync __ballot_sync __activemask __ldg __ldcg __clz __ffs __popc
    __expf __float2half __half2float __uint_as_float __cvta_generic_to_shared __CUDA_ARCH__
    __CUDACC__ __CUDACC_RTC__ __nanosleep __trap __brkpt __assertfail __LINE__ __FILE__ __DATE__
    __TIME__ __func__ __cplusplus __FILE_
"""
C = """
    alignas alignof asm auto bool case catch char char8_t char16_t char32_t class_ compl concept
    const consteval constexpr constinit const_cast co_await co_return co_yield decltype default
    delete do double dynamic_cast enum explicit export extern false float friend goto inline int
    long mutable namespace new noexcept nullptr operator private protected public register
    reinterpret_cast requires restrict short signed sizeof static static_assert static_cast struct
    switch template this thread_local throw true typedef typeid typename typeof typeof_unqual union
    unsigned using virtual void volatile wchar_t xor xor_eq and_eq bitand bitor not_eq or_eq final
    override import_ module _Alignas _Alignof _Atomic _Bool _Complex _Generic _Imaginary _Noreturn
    _Static_assert _Thread_local _BitInt _Decimal32 __int128 __attribute__ __declspec __typeof__
    __builtin_expect __builtin_memcpy __asm__ __extension__ NULL EOF INFINITY NAN HUGE_VAL CHAR_BIT
    INT_MAX INT_MIN UINT_MAX FLT_MAX FLT_EPSILON DBL_MAX SIZE_MAX INT32_MAX UINT64_C RAND_MAX BUFSIZ
    EXIT_FAILURE M_PI I linux unix errno stdin stdout stderr near far small interface assert main
    printf sprintf fprintf scanf puts putchar getchar malloc calloc realloc free memcpy memset
    memmove memcmp strlen strcpy strcmp strcat strtol atoi atof abs labs llabs fabs fabsf min max
    fmin fmaxf exp expf exp2 exp2f log logf log2f log1p expm1 pow powf sqrt sqrtf rsqrt sin sinf cos
    cosf tan tanh tanhf atan2 atan2f erf erff floor floorf ceil round rint rintf trunc fma fmod
    signbit isnan isinf isfinite copysign time exit abort qsort rand srand size_t ptrdiff_t
    int8_t int32_t uint64_t intptr_t va_list va_arg va_start offsetof setjmp longjmp signal raise_
    std string vector swap move forward pair tuple
"""
HARDEST = """
    p NULL int threadIdx printf min assert linux __global__ __FILE_ typeof tile score_mod Params i j
    inside place score_head ScoreHead a a_size_0 a_size_0_ a_stride_0 least_a_0 greatest_a_0 read_a
    sum_of_a by0 by0_first_0 mask_query rcp W_q
"""

AT_ONCE = 40
"""Names of one spec: more of them, in these forms, are refused as too large for a kernel."""


def words(*texts: str) -> list[str]:
    found = {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
    return sorted(filter(accepted, found))


def joined(values: list[Any]) -> Any:
    """The sum of values, added in pairs."""
    while len(values) > 1:
        pairs = zip(values[::2], [*values[1::2], None], strict=False)
        values = [a if b is None else a + b for a, b in pairs]
    return values[0]


def assert_compiled(names: list[str], arch: str = "sm_80", forms: int = 4) -> None:
    """Compiles kernels with learned numbers, indices, scalars and windows of these names.

    Args:
        forms: how many of these forms are compiled, in this order.
    """
    scalars = [fg.Scalar(name) for name in names]
    learned = [fg.Tensor(name, (), grad=True) for name in names]
    read = [fg.Tensor(name, ("tokens",), "uint8") for name in names]
    windows = [fg.Tensor(name, ("places",), grad=True) for name in names[::10]]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < joined(scalars)

    def scores(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * joined([fg.exp(number) for number in learned])

    def bytes_of(b: Any, h: Any, q: Any, k: Any) -> Any:
        return joined([x[x[q] + k] * x[q] + x[h] * x[k] for x in read]) > 0

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + joined([x[q - k + 64] for x in windows])

    for mods in ((None, scores), (bytes_of, None), (mask, None), (None, biased))[:forms]:
        spec = fg.AttentionSpec(*mods)
        emitted = fg.emit(spec, arch=arch)
        source = emitted.backward[-1] if mods[1] is biased else emitted.forward
        nvrtc.run(source.text, program=source.filename, arch=arch.replace("sm_", "compute_"))


def test_the_hardest_names_compile() -> None:
    assert_compiled(words(HARDEST), forms=2)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_every_word_of_c_and_cuda_names_a_capture(arch: str) -> None:
    names = words(C, CUDA, HARDEST)
    assert len(words(C)) >= 200
    for first in range(0, len(names), AT_ONCE):
        assert_compiled(names[first : first + AT_ONCE], arch)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
def test_every_word_of_an_emitted_file_names_a_capture(share: int) -> None:
    texts = [path.read_text() for path in (ROOT / "generated").rglob("*.cu*")]
    for path in sorted((ROOT / "specs").glob("*.py")):
        for arch in PATHS:
            emitted = fg.emit(load(path), arch=arch)
            texts += [source.text for source in (emitted.forward, *emitted.backward)]
    names = words(*texts)
    assert {"p", "tile", "tile_end", "row_sum", "threadIdx", "Params", "BLOCK_K"} <= set(names)
    names = names[share::8]
    for first in range(0, len(names), AT_ONCE):
        assert_compiled(names[first : first + AT_ONCE])


def test_no_capture_has_the_name_of_an_argument_of_the_operator() -> None:
    given = inspect.signature(type(fg.attention(fg.AttentionSpec())).__call__).parameters.values()
    by_name = [
        each.name for each in given if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    assert {"q", "scale", "rng"} <= set(by_name)
    assert not any(map(accepted, by_name))


def alike() -> fg.AttentionSpec:
    """A spec whose tensors have names like the fields of others."""
    a, size, more = (fg.Tensor(x, ("heads",), grad=True) for x in ("a", "a_size_0", "a_size_0_"))
    return fg.AttentionSpec(
        None, lambda s, b, h, q, k: s * a[h] + size[h] * k - more[h] * q * k, name="alike"
    )


def test_tensors_named_like_fields_of_another_have_their_own_fields() -> None:
    for source in fg.emit(alike(), arch="sm_80").backward:
        assert len({param.field for param in source.params}) == len(source.params)
    assert {"c_a_size_0", "c_a_size_0_", "dc_a_size_0__"} <= {x.field for x in source.params}


@pytest.mark.slow
def test_tensors_named_like_fields_of_another_have_their_own_values_and_gradients() -> None:
    spec, draw = alike(), torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 24, 64, generator=draw).half()
    values = {
        x.name: torch.randn(2, generator=draw).mul_(0.1).requires_grad_() for x in spec.tensors
    }
    found = []
    for backend in ("tiled", "emulator"):
        out = fg.attention(spec)(q, q, q, backend=backend, **values)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), values.values())])
    for tiled, emulated in zip(*found, strict=True):
        torch.testing.assert_close(emulated.float(), tiled.float(), rtol=1e-2, atol=1e-2)


def test_a_tensor_that_is_named_like_a_function_leaves_its_calls_alone() -> None:
    erff = fg.Tensor("erff", (), "float32")
    spec = fg.AttentionSpec(None, lambda score, b, h, q, k: fg.erf(score * erff) + erff)
    body = fg.emit(spec, arch="sm_80").forward.text
    assert "float erff" not in body
    assert "erff(product * " in body
