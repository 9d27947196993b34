import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore.hardware import catalogue, cloud
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
        ("RTX 3080", "9.64"),
        ("RTX 3090", "23.56"),
        ("RTX 4090", "23.52"),
        ("RTX 5090", "31.37"),
        ("RTX PRO 6000", "94.97"),
        ("A10G", "22.06"),
        ("L4", "22.03"),
        ("L40S", "44.40"),
        ("A100 40GB", "39.49"),
        ("A100 80GB", "79.25"),
        ("H100", "79.18"),
        ("H100 NVL", "93.09"),
        ("H200", "139.80"),
        ("B200", "178.35"),
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
    # 2 FLOP per cycle and core; 64 cores on 6.0, 7.x and 8.0, else 128: the resulting clock is a realistic one.
    # A compute unit of the MI200 series has 64, of the MI300 series 128.
    few = gpu.key.startswith("MI2") if gpu in AMD else gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)}
    cores = 64 if few else 128
    clock = gpu.flops.fp32 / (2 * cores * gpu.multiprocessors)
    assert 1.2e9 < clock < 2.8e9


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
