"""Values that are the first columns of the keys: the forward kernels read both from one tile.

Where O has more columns than one warp, or one warpgroup, can hold, several share rows, and each has
some of these columns. On sm_80 such kernels copy panels of columns, those of values twice.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_forward
from flashgen.kernels.planner.models.kernel_model import STEP
from flashgen.shared.paths import PATHS
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.profile.run import profile_forward
from tests.support.examples import COVERING, spec_path, values_of
from tests.support.judged import Call, check_few_spills, check_gates, dropping, equal, sized
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_specs import SERVED
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

DIMS = ((64, 64), (128, 64), (192, 128), (576, 512))
WIDE = (576, 512)


def shared(name: str, case: Case, arch: str, dropout_p: float = 0.0, **how: Any) -> Call:
    """A call of the spec of a file, whose values are the first columns of its keys."""
    spec = sized(fg.load(spec_path(name)), case, dropout_p).replace(shared_kv=True)
    q, k, _ = case.tensors(seed=case.scores % 1000)
    numbers = values_of(spec_path(name), case) | dropping(dropout_p)
    return Call(spec, (q, k, k[..., : spec.head_dim_v]), numbers, arch=arch, **how)


def judged(call: Call) -> None:
    run = call.judged_forward()
    assert run.report.kernel is not None
    assert run.report.kernel.plan.one_tensor
    if run.report.kernel.plan.block_k == STEP:  # there is no smaller tile
        check_few_spills(run.report.kernel)
    else:
        check_gates(run.report.kernel)


@pytest.mark.parametrize(
    ("dims", "arch"),
    [
        *one_in(2, product(((64, 64), WIDE), PATHS)),
        *(
            slow(dims, arch)
            for dims in ((128, 64), (192, 128), (72, 24), (72, 72), (512, 512))
            for arch in PATHS
        ),
    ],
)
def test_the_error_rule_is_met(dims: tuple[int, int], arch: str) -> None:
    judged(shared("causal", Case(33, 70, 1, 4, 1, "bfloat16", *dims), arch))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 64), WIDE])
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", COVERING)
def test_covering_specs_meet_the_error_rule(name: str, arch: str, dims: tuple[int, int]) -> None:
    turn = list(COVERING).index(name)
    dtype, lengths = ("float16", "bfloat16")[turn % 2], ((70, 90), (33, 70))[turn // 2 % 2]
    judged(shared(name, Case(*lengths, 1, 2, 1, dtype, *dims), arch, COVERING[name]))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), WIDE])
def test_float32_meets_the_error_rule(dims: tuple[int, int]) -> None:
    judged(shared("causal", Case(40, 50, 1, 2, 1, "float32", *dims), "sm_80"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_heads_over_one_key_head_share_tiles(heads: int, arch: str) -> None:
    call = shared("causal", Case(2, 75, 1, heads, 1, "bfloat16", *WIDE), arch)
    call.numbers["q_offset"] = 73
    judged(call)


@pytest.mark.parametrize(
    ("arch", "dims"),
    [("sm_80", WIDE), slow("sm_90a", WIDE), *(slow(arch, (128, 64)) for arch in PATHS)],
)
def test_results_have_the_bits_of_keys_and_values_in_two_tensors(
    arch: str, dims: tuple[int, int]
) -> None:
    """In tiles of as many keys, where such tiles fit."""
    call = shared("causal", Case(33, 70, 1, 2, 1, "float16", *dims), arch)
    run = call.judged_forward()
    assert run.report.kernel is not None
    again = call.forward()
    assert equal(run, again)
    if dims != WIDE or arch == "sm_80":
        two = call.spec.replace(shared_kv=False)
        tile = run.report.kernel.plan.tile
        given: dict[str, Any] = {"backend": "emulator", "arch": arch, "tiles": {"forward": tile}}
        numbers: dict[str, Any] = call.numbers
        assert equal(run, run_forward(two, *call.qkv, **{**numbers, **given}))


SEQUENCES = Sequences.of((2, 2), (130, 47), heads=(16, 1), dims=WIDE, dtype="bfloat16")


def paged(name: str, arch: str, dims: tuple[int, int] = WIDE, page: int = 16, **how: Any) -> Paged:
    of = Sequences.of((2, 2), (130, 47), heads=(16, 1), dims=dims, dtype="bfloat16")
    of = Sequences(of.q, of.k, tuple(k[..., : dims[1]] for k in of.k))
    spec = SERVED[name].replace(
        head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16", shared_kv=True
    )
    return Paged(spec, of, page, how={"arch": arch, **how})


@pytest.mark.parametrize(
    ("name", "arch", "dims", "page", "split_size"),
    [
        ("causal", "sm_80", (128, 64), 16, 64),
        slow("causal", "sm_90a", (128, 64), 16, 64),
        *(slow("causal", arch, WIDE, page, 64) for arch in PATHS for page in (4, 16, 64)),
        *(slow(name, arch, WIDE, 16, 0) for arch in PATHS for name in ("window", "softcap")),
        *(slow("causal", arch, (72, 40), 16, 32) for arch in PATHS),
    ],
)
def test_pages_and_splits_meet_the_error_rule(
    name: str, arch: str, dims: tuple[int, int], page: int, split_size: int
) -> None:
    run = paged(name, arch, dims, page, split_size=split_size).judged()
    assert run.report.kernel is not None
    assert run.report.kernel.plan.one_tensor


def profiles(arch: str, dims: tuple[int, int], page: int) -> tuple[Profile, ...]:
    if page:
        call = paged("causal", arch, dims, page)
        q, k, _, tables = call.operands()
        given = call.spec, q, k, k[..., : dims[1]]
        return profile_forward(*given, tensors=tables, arch=arch, split_size=64)[1]
    of = shared("causal", Case(33, 150, 1, 4, 1, "bfloat16", *dims), arch)
    return profile_forward(of.spec, *of.qkv, q_offset=117, arch=arch)[1]


@pytest.mark.parametrize(
    ("arch", "dims", "page"),
    [
        ("sm_80", (128, 64), 0),
        slow("sm_90a", (128, 64), 0),
        *(slow(arch, WIDE, page) for arch in PATHS for page in (0, 16)),
        *(slow(arch, (128, 64), 16) for arch in PATHS),
    ],
)
def test_each_key_is_read_once_as_predicted(arch: str, dims: tuple[int, int], page: int) -> None:
    for profile in profiles(arch, dims, page):
        for tensor in profile.tensors:
            assert tensor.issued.counted == tensor.issued.predicted, (profile.kernel, tensor.name)
            if tensor.name in ("v", "v_cache"):
                assert tensor.issued.counted == 0


PLANTED = {
    "sm_80": [
        ("the next keys are copied into the tile that is read",
         "(buffer ^ K_BYTES);", "buffer;", "Race"),
        ("the other buffer is read", "    buffer ^= K_BYTES;\n", "", ""),
    ],
    "sm_90a": [
        ("values are given back before P V has read them", "      pin(s[0]);\n",
         "      pin(s[0]);\n"
         "      if (thread % WARPGROUP == 0) barrier_arrive(front_empty[k.index]);\n", ""),
        ("values are given back by those who do not read them",
         "barrier_init(k_empty[i], CONSUMERS);", "barrier_init(k_empty[i], 1);", ""),
        ("keys are never given back",
         "      if (thread % WARPGROUP == 0) barrier_arrive(read);\n", "", "Deadlock"),
        ("the columns that are copied last are not awaited",
         "barrier_wait(front_full[k.index], k.parity);", "", ""),
        ("both warpgroups have the first columns",
         "uniform(writer / WARPGROUP) * O_COLUMNS", "0", ""),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "bug", "old", "new", "kind"),
    [slow(arch, *each) for arch, bugs in PLANTED.items() for each in bugs],
)
def test_planted_bugs_are_caught(arch: str, bug: str, old: str, new: str, kind: str) -> None:
    dims = WIDE if arch == "sm_90a" else (128, 64)  # one tile of both, on either path
    call = shared("causal", Case(33, 300, 1, 2, 1, "bfloat16", *dims), arch)
    call.numbers["q_offset"] = 267
    if kind:
        with planted("forward", old, new), caught(kind):
            call.forward()
        return
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_forward()


def test_the_operator_runs_the_kernel_of_one_tensor() -> None:
    spec = fg.AttentionSpec(head_dim=64, head_dim_v=32, shared_kv=True, name="one_tensor")
    op = fg.attention(spec)
    q, kv = torch.randn(1, 4, 3, 64).half(), torch.randn(1, 1, 40, 64).half()
    out = op(q, kv, backend="emulator")
    assert op.report is not None
    assert op.report.kernel is not None
    assert "v" not in [param.name for param in op.report.kernel.source.params]
    torch.testing.assert_close(out, op(q, kv), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("arch", "dims"),
    [
        ("sm_80", (64, 64)),
        *(slow(arch, dims) for arch in PATHS for dims in ((128, 64), (192, 128), WIDE)),
    ],
)
def test_gradients_of_both_uses_add_in_one_tensor(arch: str, dims: tuple[int, int]) -> None:
    call = shared("causal", Case(33, 70, 1, 4, 1, "bfloat16", *dims), arch)
    q, kv, _ = call.qkv
    op, dout = fg.attention(call.spec), call.gradients[0]
    for deterministic in (False, True):
        given = q.requires_grad_(), kv.requires_grad_()
        how = {"backend": "emulator", "arch": arch, "deterministic": deterministic}
        found = torch.autograd.grad(op(*given, **how), given, dout)  # type: ignore[call-overload]
        q, kv = q.detach(), kv.detach()
        verdicts = reference.judge_gradients(found, call.spec, q, kv, None, dout)
        assert all(verdicts.values()), verdicts
