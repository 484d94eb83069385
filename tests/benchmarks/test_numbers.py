"""The benchmarks' arithmetic: quantiles, operations, windows, turns, and other tools' output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.suite.cases import Case, flops, grid, llama, make
from benchmarks.suite.device import Device, Span
from benchmarks.suite.ncu import raw
from benchmarks.suite.parts.sanitizer import errors_in
from benchmarks.suite.parts.sparsity import window_of
from benchmarks.suite.statistics import quantile, timing_of
from benchmarks.suite.timing import measure, sets_needed
from benchmarks.variants import FORMS, Mods, live_elements


def test_percentiles_of_a_sample() -> None:
    timing = timing_of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert (timing.p20, timing.p50, timing.p80, timing.samples) == (2.0, 3.5, 5.0, 6)
    assert quantile([7.0], 0.2) == 7.0
    with pytest.raises(ValueError, match="empty"):
        timing_of([])


def live(case: Case) -> int:
    sizes = (case.batch, case.heads_q, case.seq_q, case.seq_k)
    return live_elements(case.mods, *sizes, torch.device("cpu"))


def test_operations_of_shapes_counted_by_hand() -> None:
    # 2 heads, 4 queries, 6 keys, d 8: 48 elements; a product of d is 16 operations.
    full = make("x", "full", 1, 2, 1, 4, 6, 8)
    assert live(full) == 48
    assert flops("forward", 48, 8) == 48 * 2 * 16 == 1536
    assert flops("backward", 48, 8) == 48 * 5 * 16
    assert flops("both", 48, 8) == 48 * 7 * 16
    # 4 x 4 causal: 1 + 2 + 3 + 4 elements.
    assert live(make("x", "causal", 1, 1, 1, 4, 4, 8)) == 10
    # Q.K^T with d 192, P.V with d_v 128; of the five products of backward, three are of d.
    assert flops("forward", 1, 192, 128) == 2 * (192 + 128)
    assert flops("backward", 1, 192, 128) == 2 * (3 * 192 + 2 * 128)


def test_operations_follow_the_usual_convention_for_long_sequences() -> None:
    case = llama("causal", 8192)
    usual = 4 * 64 * 8192 * 8192 * 128 / 2
    kept = 64 * 8192 * 8193 // 2
    assert flops("forward", kept, 128) == pytest.approx(usual, rel=2e-4)
    assert flops("backward", kept, 128) == 2.5 * flops("forward", kept, 128)
    assert case.scores == 64 * 8192 * 8192


def test_bytes_of_a_case_are_each_operand_once() -> None:
    case = make("x", "full", 2, 4, 1, 3, 5, 8, dtype="float16")
    assert case.bytes == 2 * 2 * 8 * (4 * 3 + 5 + 5 + 4 * 3)


def test_grid_has_16k_tokens_and_heads_times_head_dim_2048() -> None:
    for head_dim in (64, 128, 256):
        case = grid("causal", 512, head_dim)
        assert case.batch * case.seq_q == 16384
        assert case.heads_q * head_dim == 2048


@pytest.mark.parametrize("seq", [1, 7, 128, 1000])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.99, 1.0])
def test_a_window_is_the_narrowest_of_the_wanted_density(seq: int, share: float) -> None:
    def kept(window: int) -> int:
        mods = FORMS["symmetric_window"].mods(seq, seq, 1, {"window": window})
        return live_elements(mods, 1, 1, seq, seq, torch.device("cpu"))

    window = window_of(seq, share)
    assert kept(window) >= share * seq * seq - 1e-9
    assert window == 0 or kept(window - 1) < share * seq * seq


@pytest.mark.slow
def test_live_elements_of_a_large_mask_are_counted_in_parts() -> None:
    seq = 8200  # more than is looked at at once
    mods = Mods(mask=lambda b, h, q, k: q >= k)
    assert live_elements(mods, 1, 1, seq, seq, torch.device("cpu")) == seq * (seq + 1) // 2


def test_inputs_are_rotated_unless_they_are_larger_than_the_cache() -> None:
    assert sets_needed(1 << 30, 60 << 20) == 2
    assert sets_needed(30 << 20, 60 << 20) == 7
    assert sets_needed(1, 60 << 20) == 32
    assert sets_needed(1, 0) == 1


class _Fixed:
    def __init__(self, ms: float) -> None:
        self._ms = ms

    def ms(self) -> float:
        return self._ms


class _Told(Device):
    """A device whose clock is the sum of what the calls say they take."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.order: list[tuple[float, int]] = []

    def taking(self, ms: float) -> Callable[[int], None]:
        """A call that says it takes so long."""

        def run(index: int) -> None:
            self.order.append((ms, index))
            self.clock += ms

        return run

    def record(self, run: Callable[[], object]) -> Span:
        before = self.clock
        run()
        return _Fixed(self.clock - before)


def test_contenders_are_timed_in_turns_and_each_begins_a_turn() -> None:
    device = _Told()
    calls = {name: device.taking(ms) for name, ms in (("a", 5.0), ("b", 7.0), ("c", 9.0))}
    found = measure(device, calls, 2, seconds=0.0, rounds=(6, 6))
    assert {name: m.timing.p50 for name, m in found.items()} == {"a": 5.0, "b": 7.0, "c": 9.0}
    assert {m.timing.samples for m in found.values()} == {6}
    assert {m.method for m in found.values()} == {"host clock"}
    turns = [ms for ms, _ in device.order][-18:]
    assert turns == [5.0, 7.0, 9.0, 7.0, 9.0, 5.0, 9.0, 5.0, 7.0] * 2
    assert {index for _, index in device.order} == {0, 1}


def test_short_calls_share_a_sample_and_the_time_is_still_per_call() -> None:
    device = _Told()
    found = measure(device, {"a": device.taking(0.01)}, 1, seconds=0.0, rounds=(3, 3))["a"]
    assert found.timing.p50 == pytest.approx(0.01)
    assert len(device.order) > 3 * 20  # 0.3 ms a sample are 30 calls


def test_the_time_that_there_is_decides_how_many_samples_are_taken() -> None:
    device = _Told()
    calls = dict.fromkeys("ab", device.taking(10.0))
    found = measure(device, calls, 1, seconds=0.4, rounds=(3, 100))
    assert found["a"].timing.samples == 20


def test_a_slow_contender_is_in_fewer_rounds_and_never_in_too_few() -> None:
    device = _Told()
    calls = {"fast": device.taking(1.0), "slow": device.taking(100.0)}
    found = measure(device, calls, 1, seconds=1.0, rounds=(7, 300))
    assert found["slow"].timing.samples >= 7
    assert found["fast"].timing.samples > 15 * found["slow"].timing.samples / 2


def test_a_contender_that_fails_in_its_warm_up_is_reported_and_the_others_are_timed() -> None:
    def broken(index: int) -> None:
        raise MemoryError("90 GiB")

    failures: dict[str, str] = {}
    found = measure(_Told(), {"a": broken, "b": int}, 1, 0.0, rounds=(3, 3), failures=failures)
    assert list(found) == ["b"]
    assert failures == {"a": "MemoryError: 90 GiB"}
    with pytest.raises(MemoryError):
        measure(_Told(), {"a": broken}, 1, 0.0, rounds=(3, 3))


NCU = """\
==PROF== Connected to process 77
{"kernel": "x"}
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum","unwanted"
"","","","byte","nsecond",""
"0","77","causal_forward_bf16_d64","1,048,576","12345","7"
"1","77","causal_backward_fused_bf16_d64(Params)","2048","n/a","7"
"""


def test_the_raw_page_of_ncu_is_read_by_name_with_units() -> None:
    assert raw(NCU) == [
        {
            "kernel": "causal_forward_bf16_d64",
            "dram__bytes_read.sum": (1048576.0, "byte"),
            "gpu__time_duration.sum": (12345.0, "nsecond"),
        },
        {"kernel": "causal_backward_fused_bf16_d64", "dram__bytes_read.sum": (2048.0, "byte")},
    ]
    assert raw("==ERROR== Failed to initialize the profiler") == []


def test_the_last_line_of_a_sanitizer_is_counted_and_its_absence_is_no_zero() -> None:
    assert errors_in("========= ERROR SUMMARY: 0 errors") == 0
    assert errors_in("========= ERROR SUMMARY: 1 error") == 1
    assert errors_in("== RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)") == 3
    assert errors_in("Device not supported") is None
