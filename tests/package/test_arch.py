"""Facts about architectures: consistent with each other and with the data sheets they cite."""

from __future__ import annotations

import pytest

from flashgen.shared.arch import KIB, facts, known_archs, paths_of
from flashgen.shared.errors import PlanError

# Dense fp16 tensor TFLOPS with fp32 sums, as the cited data sheets print them.
DATASHEET_TFLOPS = {
    "sm_80": 312,
    "sm_86": 154.8,
    "sm_89": 364.2,
    "sm_90": 989.4,
    "sm_100": 2250,
    "sm_120": 503.8,
}


@pytest.mark.parametrize("name", known_archs())
def test_rates_per_clock_give_the_data_sheet_s_tflops(name):
    arch = facts(name)
    flops = 2 * arch.tensor_16bit * arch.sms * arch.clock_hz  # a multiply-add counts as two
    assert flops / 1e12 == pytest.approx(DATASHEET_TFLOPS[name], rel=0.01)


@pytest.mark.parametrize("name", known_archs())
def test_limits_agree_with_each_other(name):
    arch = facts(name)
    assert arch.smem_per_block == arch.smem_per_sm - 1 * KIB
    assert arch.threads_per_sm == 32 * arch.warps_per_sm
    assert arch.blocks_per_sm <= arch.warps_per_sm
    assert arch.mma_16bit <= arch.tensor_16bit


def test_a_suffix_names_the_same_chip():
    assert facts("sm_90a").name == "sm_90a"
    assert (facts("sm_90a").major, facts("sm_120").major, facts("sm_80").major) == (9, 12, 8)
    assert facts("sm_90a").smem_per_block == facts("sm_90").smem_per_block == 227 * KIB
    assert facts("sm_100f").product == facts("sm_100").product


@pytest.mark.parametrize("name", ["sm_80a", "sm_75", "sm_200", "80", "SM_80", "sm_8", "", "sm_90b"])
def test_an_unknown_architecture_is_refused_with_the_known_ones(name):
    with pytest.raises(PlanError) as caught:
        facts(name)
    assert "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120" in caught.value.numbers
    assert caught.value.where == f"arch={name!r}"


def test_the_way_out_is_an_architecture_whose_kernels_run_there():
    for unknown, known_one in (("sm_87", "sm_86"), ("sm_103", "sm_100"), ("sm_121a", "sm_120")):
        with pytest.raises(PlanError) as caught:
            facts(unknown)
        assert caught.value.way_out.startswith(f'arch="{known_one}"')


def test_the_way_out_of_a_known_architecture_with_a_letter_is_that_without_it():
    with pytest.raises(PlanError) as caught:
        facts("sm_80a")
    assert caught.value.way_out == 'arch="sm_80"'


def test_the_message_for_an_unknown_architecture():
    with pytest.raises(PlanError) as caught:
        facts("sm_87")
    assert str(caught.value) == (
        "flashgen has no facts about this architecture\n"
        "  where    arch='sm_87'\n"
        "  numbers  known: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, and from sm_90 on those "
        "with an a or f at the end, such as sm_90a\n"
        '  try      arch="sm_86"; its kernels also run on sm_87'
    )


@pytest.mark.parametrize(
    ("device", "archs"),
    [
        ("sm_80", ("sm_80",)),
        ("sm_87", ("sm_86",)),
        ("sm_90", ("sm_90a", "sm_90")),
        ("sm_103", ("sm_100",)),
        ("sm_121", ("sm_120",)),
    ],
)
def test_a_gpu_has_its_own_code_path_first_and_the_newest_portable_one_last(device, archs):
    assert paths_of(device) == archs


def test_a_gpu_of_an_unknown_generation_is_refused():
    with pytest.raises(PlanError, match="no facts"):
        paths_of("sm_75")
