"""Find the GPU of an instance type under which cloud providers rent it."""

from __future__ import annotations

import functools
import re

_WHOLE: tuple[tuple[str, str], ...] = (
    # Amazon EC2, "Accelerated computing instance types"; SageMaker writes ml. before the type.
    (r"(ml\.)?p3\.\d*xlarge", "V100 16GB"),
    (r"(ml\.)?p3dn\.24xlarge", "V100 32GB"),
    (r"(ml\.)?p4d\.24xlarge", "A100 40GB"),
    (r"(ml\.)?p4de\.24xlarge", "A100 80GB"),
    (r"(ml\.)?p5\.(4|48)xlarge", "H100 SXM"),
    (r"(ml\.)?p5en?\.48xlarge", "H200"),
    (r"(ml\.)?p6-b200\.48xlarge", "B200"),
    (r"(ml\.)?p6-b300\.48xlarge", "B300"),
    (r"(ml\.)?p6e-gb200\.36xlarge", "GB200"),
    (r"(ml\.)?g4dn\.(\d*xlarge|metal)", "T4"),
    (r"(ml\.)?g5\.\d*xlarge", "A10G"),
    (r"(ml\.)?gr?6\.\d*xlarge", "L4"),
    (r"(ml\.)?g6e\.\d*xlarge", "L40S"),
    (r"(ml\.)?g7e\.\d*xlarge", "RTX PRO 6000 Server"),
    # Google Compute Engine, "GPU machine types".
    (r"a2-(high|mega)gpu-\d+g", "A100 40GB"),
    (r"a2-ultragpu-\d+g", "A100 80GB"),
    (r"a3-(high|mega|edge)gpu-\d+g(-nolssd)?|nvidia-h100-mega-80gb", "H100 SXM"),
    (r"a3-ultragpu-8g(-nolssd)?", "H200"),
    (r"a4-highgpu-8g(-nolssd)?", "B200"),
    (r"a4x-highgpu-4g(-nolssd)?", "GB200"),
    (r"g2-standard-\d+", "L4"),
    (r"g4-standard-(48|96|192|384)", "RTX PRO 6000 Server"),
    # Azure, "GPU accelerated virtual machine sizes".
    (r"(standard_)?nc\d+r?s_v2", "P100"),
    (r"(standard_)?nc\d+r?s_v3", "V100 16GB"),
    (r"(standard_)?nd40rs_v2", "V100 32GB"),
    (r"(standard_)?nc\d+as_t4_v3", "T4"),
    (r"(standard_)?nv(36|72)adm?s_a10_v5", "A10"),
    (r"(standard_)?nc\d+ads_a100_v4", "A100 PCIe 80GB"),
    (r"(standard_)?nd96asr(_a100)?_v4", "A100 40GB"),
    (r"(standard_)?nd96amsr_a100_v4", "A100 80GB"),
    (r"(standard_)?ncc?(40|80)adi?s_h100_v5", "H100 NVL"),
    (r"(standard_)?nd96isr_h100_v5", "H100 SXM"),
    (r"(standard_)?nd96isr_h200_v5", "H200"),
    (r"(standard_)?nd96isr?_mi300x_v5", "MI300X"),
    # Oracle Cloud Infrastructure, "Compute shapes".
    (r"(vm|bm)\.gpu2\.\d", "P100"),
    (r"(vm|bm)\.gpu3\.\d", "V100 16GB"),
    (r"(vm|bm)\.gpu\.a10\.\d", "A10"),
    (r"bm\.gpu4\.8", "A100 40GB"),
    (r"(vm|bm)\.gpu\.a100-v2\.\d", "A100 80GB"),
    (r"bm\.gpu\.l40s(-nc)?\.4", "L40S"),
    (r"bm\.gpu\.h100\.8", "H100 SXM"),
    (r"bm\.gpu\.h200\.8", "H200"),
    (r"bm\.gpu\.b200\.8", "B200"),
    (r"bm\.gpu\.mi300x\.8", "MI300X"),
    # Lambda Cloud, instance types of its API.
    (r"gpu_\dx_a10", "A10"),
    (r"gpu_\dx_a6000", "RTX A6000"),
    (r"gpu_\dx_a100(_sxm4)?", "A100 40GB"),
    (r"gpu_\dx_a100_80gb_sxm4", "A100 80GB"),
    (r"gpu_\dx_h100_pcie", "H100 PCIe"),
    (r"gpu_\dx_h100_sxm5", "H100 SXM"),
    (r"gpu_\dx_gh200", "GH200"),
    (r"gpu_\dx_b200_sxm6", "B200"),
    # Hugging Face, "Spaces hardware".
    (r"t4-(small|medium)", "T4"),
    (r"l4x\d", "L4"),
    (r"l40sx\d", "L40S"),
    (r"a10g-(small|large(x\d)?)", "A10G"),
    (r"a100-large|a100x\d", "A100 80GB"),
    # Alibaba Cloud, "GPU-accelerated compute-optimized instance families".
    (r"ecs\.gn6i-\S+", "T4"),
    (r"ecs\.gn6v-\S+", "V100 16GB"),
    (r"ecs\.gn7i-\S+", "A10"),
    (r"ecs\.gn7e-\S+", "A100 80GB"),
    (r"ecs\.gn7-\S+", "A100 40GB"),
)
"""Pattern of a name in lower case -> key of the catalogue entry of its GPUs. A comment names the provider's page."""

_PARTIAL: tuple[tuple[str, str], ...] = (
    (r"(standard_)?nv(6|12|18)ads_a10_v5", "A10"),
    (r"(ml\.)?gr?6f\.\d*xlarge", "L4"),
    (r"g4-standard-(6|12|24)", "RTX PRO 6000 Server"),
)
"""Instance types with a part of a GPU."""

_COUNT = re.compile(
    r"\d+\s*[x×]\s*(?P<after>\D.*)|(?P<before>.+?)(\s+[x×]\s*|\s*:\s*)\d+|(?P<only>.+?)(\s+gpus?|!)", re.I
)


@functools.lru_cache(maxsize=256)
def key_of(text: str) -> str | None:
    """Return the key of the catalogue entry of an instance type's GPUs, None for another text.

    >>> key_of("p4d.24xlarge"), key_of("Standard_NC24ads_A100_v4"), key_of("a2-highgpu-1g"), key_of("p9.large")
    ('A100 40GB', 'A100 PCIe 80GB', 'A100 40GB', None)

    Raises ValueError for an instance type that has a part of a GPU.
    """
    name = text.strip().lower()
    for pattern, key in _PARTIAL:
        if re.fullmatch(pattern, name):
            raise ValueError(f"{text} has a part of one {key}: give the size of its memory instead, such as 4GiB")
    return next((key for pattern, key in _WHOLE if re.fullmatch(pattern, name)), None)


def one_of(text: str) -> str | None:
    """Return the name of one GPU from a text with a count or the word GPU, None for a text without them.

    >>> one_of("8xH100"), one_of("A100:4"), one_of("T4 x2"), one_of("L4 GPU"), one_of("T4")
    ('H100', 'A100', 'T4', 'L4', None)
    """
    match = _COUNT.fullmatch(text.strip())
    return next(part for part in match.groupdict().values() if part) if match else None
