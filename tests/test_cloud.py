"""Instance types of cloud providers: one of each family, with the GPU that its provider's page names."""

from __future__ import annotations

import re

import pytest

from memexplore.hardware import cloud

NAMES = {
    "p3.2xlarge": "V100 16GB",
    "p3dn.24xlarge": "V100 32GB",
    "p4d.24xlarge": "A100 40GB",
    "p4de.24xlarge": "A100 80GB",
    "p5.48xlarge": "H100 SXM",
    "p5en.48xlarge": "H200",
    "p6-b200.48xlarge": "B200",
    "g4dn.12xlarge": "T4",
    "ml.g5.xlarge": "A10G",
    "g6.48xlarge": "L4",
    "gr6.4xlarge": "L4",
    "g6e.xlarge": "L40S",
    "g7e.2xlarge": "RTX PRO 6000 Server",
    "a2-highgpu-1g": "A100 40GB",
    "a2-ultragpu-8g": "A100 80GB",
    "a3-megagpu-8g": "H100 SXM",
    "a3-ultragpu-8g": "H200",
    "a4-highgpu-8g": "B200",
    "g2-standard-4": "L4",
    "g4-standard-48": "RTX PRO 6000 Server",
    "Standard_NC6s_v2": "P100",
    "Standard_NC24rs_v3": "V100 16GB",
    "Standard_ND40rs_v2": "V100 32GB",
    "Standard_NC4as_T4_v3": "T4",
    "NC96ads_A100_v4": "A100 PCIe 80GB",
    "Standard_ND96asr_v4": "A100 40GB",
    "Standard_ND96amsr_A100_v4": "A100 80GB",
    "Standard_NC40ads_H100_v5": "H100 NVL",
    "Standard_ND96isr_H100_v5": "H100 SXM",
    "Standard_ND96isr_H200_v5": "H200",
    "Standard_ND96isr_MI300X_v5": "MI300X",
    "Standard_NV36ads_A10_v5": "A10",
    "VM.GPU.A10.1": "A10",
    "BM.GPU4.8": "A100 40GB",
    "BM.GPU.A100-v2.8": "A100 80GB",
    "BM.GPU.H100.8": "H100 SXM",
    "BM.GPU.MI300X.8": "MI300X",
    "gpu_1x_a10": "A10",
    "gpu_8x_a100_80gb_sxm4": "A100 80GB",
    "gpu_1x_gh200": "GH200",
    "t4-small": "T4",
    "a10g-largex4": "A10G",
    "l40sx8": "L40S",
    "ecs.gn6i-c4g1.xlarge": "T4",
}


@pytest.mark.parametrize("name", NAMES)
def test_each_instance_type_has_the_gpu_of_its_provider(name: str) -> None:
    assert cloud.key_of(name) == NAMES[name]
    assert cloud.key_of(f"  {name.upper()} ") == NAMES[name]


def test_no_name_has_two_meanings() -> None:
    for name in NAMES:
        assert sum(re.fullmatch(pattern, name.lower()) is not None for pattern, _ in cloud._WHOLE) == 1


@pytest.mark.parametrize("name", ["", "T4", "p4d", "g5", "p9.large", "a2-highgpu", "24GiB", "Standard_D2s_v5"])
def test_other_texts_are_no_instance_type(name: str) -> None:
    assert cloud.key_of(name) is None


@pytest.mark.parametrize("name", ["RTX 4090", "H100 NVL 94GB", "24GiB", "A100-80GB", "x4", ""])
def test_a_name_without_a_count_is_left_alone(name: str) -> None:
    assert cloud.one_of(name) is None
