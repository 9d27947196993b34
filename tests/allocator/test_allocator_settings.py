"""Allocator settings, parsed as PyTorch parses the same texts."""

from __future__ import annotations

import pytest

from memexplore.allocator import Settings
from memexplore.tape.allocator_settings import settings_of_environment

MIB = 1024**2


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, 512), (512, 512), (513, 1024), (1200, 1536), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_a_request_is_rounded_to_512_bytes(size: int, block: int) -> None:
    assert Settings().round_size(size) == block


@pytest.mark.parametrize(
    ("divisions", "size", "block"),
    [
        (4, 2049, 2560),  # 2048 to 4096 in four parts: 2048, 2560, 3072, ...
        (4, 2048, 2048),  # at most 512 * 4 bytes: plain rounding
        (4, 1200, 1536),
        (2, 5 * MIB, 6 * MIB),  # 4 to 8 MiB in two parts: 4, 6, 8
        (8, 5 * MIB, 5 * MIB),  # 4 to 8 MiB in eight parts of 512 KiB
        (8, 64 * MIB, 64 * MIB),  # a power of two stays
        (1, 5 * MIB + 1, 5 * MIB + 512),  # one division is none
    ],
)
def test_roundup_power2_divisions(divisions: int, size: int, block: int) -> None:
    assert Settings.parse(f"roundup_power2_divisions:{divisions}").round_size(size) == block


@pytest.mark.parametrize(
    ("text", "table"),
    [
        # What libc10.so of torch 2.13.0 answers for the intervals 1 MiB, 2 MiB, ... of these texts.
        ("[256:1,512:2,1024:4,>:8]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8)),
        ("[128:8,256:16,512:1,2048:8,>:2]", (8, 8, 8, 8, 8, 8, 8, 8, 16, 1, 0, 8, 2, 2, 2, 2)),
        ("[4:2,>:8]", (2, 2, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)),
        ("[1:2]", (2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
        ("[>:4]", (0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4)),
        ("4", (4,) * 16),
    ],
)
def test_divisions_are_parsed_as_torch_parses_them(text: str, table: tuple[int, ...]) -> None:
    assert Settings.parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions == table


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_non_split_rounding_mb:3",
        "large_segment_size_mb:4",
        "large_segment_size_mb:40,max_split_size_mb:30",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[4:3]",
        "garbage_collection_threshold:1.0",
        "expandable_segments:yes",
        "expandable_segments",
        "backend:cudaMallocAsync",
        "no_such_option:1",
    ],
)
def test_settings_that_torch_refuses_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Settings.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:64,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:8]",
        "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True,large_segment_size_mb:32,max_split_size_mb:40"
        ",max_non_split_rounding_mb:40",
    ],
)
def test_settings_written_as_text_parse_to_the_same(text: str) -> None:
    read = Settings.parse(text)
    assert Settings.parse(str(read)) == read


def test_host_options_are_accepted_without_effect() -> None:
    assert Settings.parse("pinned_use_background_threads:True,release_lock_on_cudamalloc:True") == Settings()


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        # parseArgs sets three options to their defaults that a string does not name: c10/core/AllocatorConfig.cpp.
        ("max_split_size_mb:64,roundup_power2_divisions:4,garbage_collection_threshold:0.8", "", ""),
        ("expandable_segments:True,large_segment_size_mb:40", "", "expandable_segments:True,large_segment_size_mb:40"),
        ("expandable_segments:True", "max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64"),
        ("expandable_segments:True,max_split_size_mb:64", "expandable_segments:False", ""),
        ("per_process_memory_fraction:0.5", "max_split_size_mb:64,max_split_size_mb:32", "per_process_memory_fraction:"
         "0.5,max_split_size_mb:32"),
    ],
)  # fmt: skip
def test_a_later_string_changes_what_it_names_and_resets_three_options(before: str, text: str, after: str) -> None:
    assert Settings.parse(before).changed_by(text) == Settings.parse(after)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        # What `torch._C._accelerator_getAllocatorSettings` of torch 2.13.0 answers under these environments.
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:40"},
         "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:40"}, "max_split_size_mb:40"),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_first_variable_that_is_set_counts(environment: dict[str, str], text: str) -> None:
    assert settings_of_environment(environment) == text
