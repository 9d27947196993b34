"""Reserved memory of a series of changes to GPT-2, as published (docs/accuracy.md names the source)."""

import pytest

import memexplore as mx
from tests.fidelity.book_gpt import Version, train

GIB, MIB = 1024**3, 1024**2


def reserved(version: Version) -> int:
    with mx.virtual("A100", release="2.6"):
        return train(version)


@pytest.mark.parametrize(
    ("version", "published"),
    [
        (Version.ORIGINAL, "26.2617"),
        (Version.MASK_ON_THE_FLY, "26.2422"),
        (Version.FUSED_ADAMW, "26.2422"),
        (Version.FLASH_ATTENTION, "5.9004"),
    ],
)
def test_reserved_memory_is_the_published_one(version: Version, published: str) -> None:
    assert f"{reserved(version) / GIB:.4f}" == published


@pytest.mark.parametrize(("version", "published"), [(Version.BF16, "13.7871"), (Version.CLASSES_OF_PYTORCH, "11.5645")])
def test_where_the_code_is_not_published_six_segments_differ(version: Version, published: str) -> None:
    # 12 MiB: with a mask that is made as booleans the first differs by -8 MiB
    assert reserved(version) / MIB - float(published) * 1024 == pytest.approx(12, abs=0.1)
