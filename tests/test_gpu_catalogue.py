import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore import gpu_catalogue
from memexplore.gpu_catalogue import find, gpus

GIB = 1024**3
ENTRIES = gpu_catalogue._CATALOGUE


@pytest.mark.parametrize("text", ["T4", "t4", " T 4 ", "Tesla T4", "tesla-t4", "NVIDIA T4"])
def test_case_spaces_and_brand_do_not_matter(text):
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
    ],
)
def test_names_and_aliases(text, key):
    assert find(text).key == key


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_every_entry_is_found_by_its_key_and_aliases(gpu):
    assert all(find(text) is gpu for text in (gpu.key, *gpu.aliases))


def test_no_two_entries_share_a_key_or_alias():
    texts = [gpu_catalogue._normal(text) for gpu in ENTRIES for text in (gpu.key, *gpu.aliases)]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_a_catalogue_name_that_torch_reports_finds_a_gpu_of_that_name(gpu):
    # The RTX 3060 exists twice under one name, so the entry may be its sibling.
    assert find(gpu.name).name == gpu.name


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_every_number_has_a_source(gpu):
    assert all(gpu.sources)


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_capacity_is_total_without_outside(gpu):
    assert gpu.capacity == gpu.total - gpu.outside
    assert 0.9 * gpu.total < gpu.capacity < gpu.total


@pytest.mark.parametrize(
    ("text", "printed"),
    # Totals in GiB as OutOfMemoryError texts of recent drivers print them.
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
def test_totals_print_as_out_of_memory_texts_do(text, printed):
    assert f"{find(text).total / GIB:.2f}" == printed


def test_the_catalogue_spans_8_to_192_gib():
    totals = sorted(gpu.total for gpu in ENTRIES)
    assert totals[0] < 8 * GIB
    assert 178 * GIB < totals[-1] < 192 * GIB
    assert len(ENTRIES) >= 25


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_bf16_and_tf32_units_came_with_compute_capability_8(gpu):
    has_both = gpu.flops.tf32 is not None and gpu.flops.bf16 is not None
    assert has_both == (gpu.compute_capability >= (8, 0))


@pytest.mark.parametrize("gpu", ENTRIES, ids=lambda gpu: gpu.key)
def test_fp32_rate_agrees_with_multiprocessors(gpu):
    # 2 FLOP a cycle and core; 64 cores on 6.0, 7.x and 8.0, 128 on the rest: the clock that is left is a real one.
    cores = 64 if gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)} else 128
    clock = gpu.flops.fp32 / (2 * cores * gpu.multiprocessors)
    assert 1.2e9 < clock < 2.8e9


def test_a_size_is_all_capacity_and_assumes_compute_capability_8():
    gpu = find("24GiB")
    assert (gpu.total, gpu.capacity, gpu.compute_capability) == (24 * GIB, 24 * GIB, (8, 0))
    assert "Compute capability 8.0 is assumed" in gpu.note


@given(st.integers(1, 2000))
def test_any_size_in_gib_is_a_gpu(count):
    assert find(f"{count} GiB").capacity == count * GIB


def test_an_unknown_name_names_its_neighbours():
    with pytest.raises(ValueError, match=r"no GPU 'RTX 4091'.*RTX 4090.*24GiB"):
        find("RTX 4091")


@pytest.mark.parametrize("text", ["", "banana", "24", "0GiB", "RTX 4090 48GB"])
def test_nonsense_is_refused_in_one_line(text):
    with pytest.raises(ValueError) as caught:
        find(text)
    assert "\n" not in str(caught.value)


def test_the_table_is_sorted_by_total_and_says_what_is_estimated():
    table = gpus()
    assert table["total"].is_monotonic_increasing
    assert table.loc["T4", "estimated"] == ""
    assert table.loc["RTX 3060 8GB", "estimated"] == "total, outside"
    assert (table["capacity"] == table["total"] - table["outside"]).all()
    assert ((table["outside_low"] <= table["outside"]) & (table["outside"] <= table["outside_high"])).all()


def test_the_table_is_that_under_a_release():
    assert gpus("2.11").loc["T4", "outside"] == find("T4").for_release("2.11").outside == 151 * 1024**2


def test_a_card_under_a_release_differs_in_what_lies_outside_alone():
    card, under = find("T4"), find("T4").for_release("2.11")
    assert under.outside != card.outside
    assert (
        dataclasses.replace(under, outside=card.outside, outside_range=card.outside_range, sources=card.sources) == card
    )


def test_a_size_is_the_same_under_every_release():
    assert find("24GiB").for_release("2.11") == find("24GiB")


def test_a_card_given_other_memory_keeps_it_under_a_release():
    assert dataclasses.replace(find("T4"), total=2 * GIB).for_release("2.11").total == 2 * GIB


def test_importing_the_catalogue_loads_neither_torch_nor_pandas():
    code = "import sys, memexplore.gpu_catalogue; print([m for m in ('torch', 'pandas', 'plotly') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
