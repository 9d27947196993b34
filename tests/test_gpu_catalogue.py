import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.hardware import catalogue, cloud, mig
from memexplore.hardware.catalogue import find, gpus

GIB = 1024**3
ENTRIES = catalogue._CATALOGUE
AMD = [gpu for gpu in ENTRIES if gpu.name.startswith("AMD")]
NVIDIA = [gpu for gpu in ENTRIES if gpu not in AMD]


@pytest.mark.parametrize("text", ["T4", "t4", " T 4 ", "Tesla T4", "tesla-t4", "NVIDIA T4"])
def test_find_ignores_case_spaces_and_brand(text):
    assert find(text).key == "T4"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("A6000", "RTX A6000"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("RTX PRO 6000 Blackwell", "RTX PRO 6000"),
        ("A100-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100", "A100 40GB"),
        ("V100", "V100 16GB"),
        ("H100", "H100 SXM"),
        ("RTX 3060 12GB", "RTX 3060"),
        ("RTX 3060 8GB", "RTX 3060 8GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("T4 16GB", "T4"),
        ("rtx-4090-24gb", "RTX 4090"),
        ("H200 141GB", "H200"),
        ("B200 192GB", "B200"),
        ("H100 NVL 94GB", "H100 NVL"),
        ("A800", "A800 SXM"),
        ("NVIDIA A800-SXM4-80GB", "A800 SXM"),
        ("H800", "H800 SXM"),
        ("NVIDIA H800 PCIe", "H800 PCIe"),
        ("H20 96GB", "H20"),
        ("RTX PRO 6000 Blackwell Max-Q", "RTX PRO 6000 Max-Q"),
        ("RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("MI300X", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("instinct mi250x", "MI250X"),
        ("8xH100", "H100 SXM"),
        ("T4 x2", "T4"),
        ("A100:4", "A100 40GB"),
        ("A100 80GB GPU", "A100 80GB"),
        ("p4d.24xlarge", "A100 40GB"),
        ("g5.xlarge", "A10G"),
        ("Standard_NC24ads_A100_v4", "A100 PCIe 80GB"),
        ("nvidia-tesla-v100", "V100 16GB"),
        ("NVIDIA_H100_80GB", "H100 SXM"),
        ("nvidia-h200-141gb", "H200"),
        ("RTX 2060 6GB", "RTX 2060"),
        ("RTX 2060 12GB", "RTX 2060 12GB"),
        ("2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce GTX TITAN X", "GTX TITAN X"),
        ("TITAN X", "TITAN X Pascal"),
        ("GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("NVIDIA GB200", "GB200"),
        ("A100 MIG 1g.5gb", "A100 40GB MIG 1g.5gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100 80GB MIG 3g.40gb"),
        ("h100-1g.10gb", "H100 SXM MIG 1g.10gb"),
    ],
)
def test_find_accepts_names_and_aliases(text, key):
    assert find(text).key == key


def test_every_entry_is_found_by_its_key_and_aliases():
    assert [gpu.key for gpu in ENTRIES for text in (gpu.key, *gpu.aliases) if find(text) is not gpu] == []


def test_keys_and_aliases_are_unique():
    texts = [catalogue._normalised(text) for gpu in ENTRIES for text in (gpu.key, *gpu.aliases)]
    assert len(texts) == len(set(texts))


def test_torch_name_finds_a_gpu_of_that_name():
    # Two entries have the name of the RTX 3060.
    assert [gpu.key for gpu in ENTRIES if find(gpu.name).name != gpu.name] == []


def test_every_number_has_a_source():
    assert [gpu.key for gpu in ENTRIES if not all(gpu.sources)] == []


def test_capacity_is_total_minus_outside():
    for gpu in ENTRIES:
        assert gpu.capacity == gpu.total - gpu.outside, gpu.key
        assert 0.9 * gpu.total < gpu.capacity < gpu.total, gpu.key


@pytest.mark.parametrize(
    ("text", "printed"),
    # Totals in GiB from OutOfMemoryError texts of recent drivers.
    [
        ("T4", "14.56"),
        ("RTX 2060", "5.61"),
        ("RTX 2060 SUPER", "7.60"),
        ("RTX 2080 Ti", "10.57"),
        ("GTX 1080 Ti", "10.90"),
        ("Quadro RTX 6000", "23.46"),
        ("RTX 3080", "9.64"),
        ("RTX 3090", "23.56"),
        ("RTX 4090", "23.52"),
        ("RTX 5090", "31.37"),
        ("RTX PRO 6000", "94.97"),
        ("A10G", "22.06"),
        ("L4", "22.03"),
        ("L40S", "44.53"),
        ("A100 40GB", "39.49"),
        ("A100 80GB", "79.25"),
        ("H100", "79.18"),
        ("H100 NVL", "93.09"),
        ("H200", "139.80"),
        ("B200", "178.35"),
        ("GB200", "184.31"),
        ("B300", "267.69"),
        ("A100 MIG 1g.5gb", "4.75"),
        ("A100 MIG 3g.20gb", "19.62"),
        ("H100 MIG 1g.10gb", "9.75"),
        ("H100 MIG 4g.40gb", "39.50"),
    ],
)
def test_totals_agree_with_out_of_memory_texts(text, printed):
    assert f"{find(text).total / GIB:.2f}" == printed


def test_catalogue_spans_8_to_288_gib():
    totals = sorted(gpu.total for gpu in ENTRIES)
    assert totals[0] < 8 * GIB
    assert 287 * GIB < totals[-1] < 288 * GIB
    assert len(ENTRIES) >= 25


@pytest.mark.parametrize("gpu", NVIDIA, ids=lambda gpu: gpu.key)
def test_bf16_and_tf32_need_compute_capability_8(gpu):
    has_both = gpu.flops.tf32 is not None and gpu.flops.bf16 is not None
    assert has_both == (gpu.compute_capability >= (8, 0))


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_fp32_rate_agrees_with_multiprocessors(gpu):
    # 2 FLOP per cycle and core; 192 cores on 3.7, 64 on 6.0, 7.x and 8.0, else 128: the resulting clock is a realistic
    # one. A compute unit of the MI200 series has 64, of the MI300 series 128.
    few = gpu.key.startswith("MI2") if gpu in AMD else gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)}
    cores = 64 if few else 192 if gpu.compute_capability == (3, 7) else 128
    clock = gpu.flops.fp32 / (2 * cores * gpu.multiprocessors)
    assert (0.85e9 if gpu.compute_capability < (6, 0) else 1.2e9) < clock < 2.8e9


def test_capacity_of_a_size_is_the_whole_size():
    gpu = find("24GiB")
    assert (gpu.total, gpu.capacity, gpu.compute_capability) == (24 * GIB, 24 * GIB, (8, 0))
    assert "Compute capability 8.0 is assumed" in gpu.note


@given(st.integers(1, 2000))
def test_any_size_in_gib_is_a_gpu(count):
    assert find(f"{count} GiB").capacity == count * GIB


@pytest.mark.parametrize("gpu", AMD, ids=lambda gpu: gpu.key)
def test_amd_gpus_say_what_is_not_proven(gpu):
    assert "not proven: kernels, hipBLAS and MIOpen" in gpu.note
    assert "compute_capability" in gpu.estimated


# --- older GPUs, laptops and parts of a GPU --------------------------------------------------------------------------


def test_gpus_below_compute_capability_7_5_say_which_builds_run_on_them():
    assert [gpu.key for gpu in NVIDIA if bool(gpu.note) != (gpu.compute_capability < (7, 5))] == []
    assert "only the builds for CUDA 12.6 have kernels for compute capability 6.1" in find("GTX 1080 Ti").note
    assert find("K80").note == "No build of torch 2.11 or later has kernels for compute capability 3.7."


def test_no_run_is_moved_to_a_laptop_or_to_a_gpu_without_kernels():
    keys = [gpu.key for gpu in catalogue.offered()]
    assert not {"V100 16GB", "GTX 1080 Ti", "RTX 4090 Laptop"} & set(keys)
    assert {"RTX 4090", "T4", "B300", "MI300X"} <= set(keys)
    assert [find(key).total for key in keys] == sorted(find(key).total for key in keys)


@pytest.mark.parametrize(
    ("text", "mib", "multiprocessors"),
    [
        ("A100 80GB MIG 1g.10gb", 9728, 14),  # total_memory=9728MB, multi_processor_count=14 printed by torch
        ("A100 40GB MIG 3g.20gb", 20096, 42),
        ("H100 PCIe MIG 1g.10gb", 9984, 14),  # 9984 MiB in nvidia-smi, R570
        ("H100 NVL MIG 3g.47gb", 47488, 60),  # 47488 MiB in nvidia-smi, R560
        ("H200 MIG 1g.18gb", 16384, 16),
    ],
)
def test_mig_slice_has_the_memory_that_the_driver_gives_it(text, mib, multiprocessors):
    gpu = find(text)
    assert (gpu.total, gpu.multiprocessors) == (mib * 1024**2, multiprocessors)
    assert gpu.capacity < gpu.total


def test_mig_slice_has_the_shares_of_its_gpu():
    whole, part = find("H100"), find("H100 MIG 2g.20gb")
    # A quarter of the memory slices, 32 of 132 multiprocessors.
    assert part.bandwidth == whole.bandwidth / 4
    assert part.flops.bf16 == pytest.approx(whole.flops.bf16 * 32 / 132)
    assert part.compute_capability == whole.compute_capability
    # The context is that of 32 multiprocessors: 27 MiB and 2048 threads of 1.874 KiB on each; kernels take 158 MiB.
    assert part.outside / 1024**2 == pytest.approx(27 + 32 * 2048 * 1.874 / 1024 + 158, abs=1)
    assert part.for_release("2.12") == part


def test_every_mig_profile_is_smaller_than_its_share_of_the_gpu():
    for key, profiles in mig.PROFILES.items():
        for profile, part in profiles.items():
            gpu = find(f"{key} MIG {profile}")
            assert 0.9 * part.memory_share < gpu.total / find(key).total <= part.memory_share, gpu.key
            assert 0.12 * int(profile[0]) < gpu.multiprocessors / find(key).multiprocessors < int(profile[0]) / 7 + 0.06


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A100 MIG 1g.7gb", "A100 40GB has no MIG profile 1g.7gb: its profiles are 1g.5gb, 1g.10gb"),
        ("RTX 4090 MIG 1g.5gb", "the MIG profiles of RTX 4090 are not known: name the size of the memory instead"),
    ],
)
def test_unknown_mig_profile_raises(text, message):
    with pytest.raises(ValueError, match=message):
        find(text)


def test_every_cloud_name_is_an_entry():
    keys = {key for _, key in (*cloud._WHOLE, *cloud._PARTIAL)}
    assert keys <= {gpu.key for gpu in ENTRIES}


def test_a_part_of_a_gpu_is_refused():
    with pytest.raises(ValueError, match="NV6ads_A10_v5 has a part of one A10: give the size of its memory"):
        find("Standard_NV6ads_A10_v5")


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("MI300A", "MI300X"), ("H800 NVL", "H800"), ("RTX PRO 5000 Blackwell", "RTX PRO 6000"), ("L40", "L40S")],
)
def test_a_card_outside_the_catalogue_suggests_the_nearest(text, nearest):
    with pytest.raises(ValueError, match=f"no GPU '{text}' in the catalogue: did you mean .*{nearest}"):
        find(text)


def test_unknown_name_raises_with_similar_names():
    with pytest.raises(ValueError, match=r"no GPU 'RTX 4091'.*RTX 4090.*24GiB"):
        find("RTX 4091")


@pytest.mark.parametrize("text", ["", "banana", "24", "0GiB", "RTX 4090 48GB"])
def test_text_that_is_no_gpu_raises_one_line(text):
    with pytest.raises(ValueError) as error:
        find(text)
    assert "\n" not in str(error.value)


def test_table_is_sorted_by_total_and_lists_estimates():
    table = gpus()
    assert table["total"].is_monotonic_increasing
    assert table.loc["T4", "estimated"] == ""
    assert table.loc["RTX 3060 8GB", "estimated"] == "total, outside"
    assert (table["capacity"] == table["total"] - table["outside"]).all()
    assert ((table["outside_low"] <= table["outside"]) & (table["outside"] <= table["outside_high"])).all()


def test_table_has_the_values_of_a_release():
    assert gpus("2.11").loc["T4", "outside"] == find("T4").for_release("2.11").outside == 151 * 1024**2


def test_release_changes_only_memory_outside_the_allocator():
    gpu, of_release = find("T4"), find("T4").for_release("2.11")
    assert of_release.outside != gpu.outside
    assert (
        dataclasses.replace(of_release, outside=gpu.outside, outside_range=gpu.outside_range, sources=gpu.sources)
        == gpu
    )


def test_size_is_the_same_for_every_release():
    assert find("24GiB").for_release("2.11") == find("24GiB")


def test_changed_total_is_kept_for_a_release():
    assert dataclasses.replace(find("T4"), total=2 * GIB).for_release("2.11").total == 2 * GIB


def test_importing_the_catalogue_loads_neither_torch_nor_pandas():
    code = "import sys, memexplore.hardware.catalogue; print({'torch', 'pandas', 'plotly'} & set(sys.modules) or [])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
