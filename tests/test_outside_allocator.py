"""Memory outside the allocator: readings by card and torch release, and what is said of a card without any."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memexplore import gpu_catalogue
from memexplore.outside_allocator import KERNEL_MIB, READINGS, Reading, Workload, bytes_outside, context_mib

MIB = 1024**2
CARDS = {gpu.key: gpu for gpu in gpu_catalogue._CATALOGUE}
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")


def of(key: str, release: str | None = None):
    return bytes_outside(key, CARDS[key].compute_capability, CARDS[key].multiprocessors, release)


def beyond_context(reading: Reading) -> float:
    card = CARDS[reading.gpu]
    return reading.mib - context_mib(card.compute_capability, card.multiprocessors)


def name(reading: Reading) -> str:
    return f"{reading.gpu} {reading.release} {reading.mib:.0f}"


@pytest.mark.parametrize("reading", READINGS, ids=name)
def test_a_reading_is_of_a_card_of_the_catalogue_and_says_where_it_is_from(reading):
    assert reading.gpu in CARDS
    assert reading.source


def test_the_t4_was_read_to_the_byte_under_two_releases_and_toolkits():
    # 140.875 MiB = 147 718 144 bytes.
    assert of("T4", "2.10").bytes == of("T4", "2.14").bytes == 147_718_144


def test_a_text_is_in_use_less_allocated_less_unallocated():
    # 22.01 GiB - 21.62 GiB - 135.82 MiB: 22538.24 - 22138.88 - 135.82 = 263.54 MiB, rounded.
    assert of("L4", "2.11").bytes == 264 * MIB


@pytest.mark.parametrize(("key", "mib"), [("RTX 4090", 471), ("RTX PRO 6000", 655)])
def test_the_cards_of_the_published_rows_under_their_release(key, mib):
    assert of(key, "2.11").bytes == mib * MIB


def test_the_nearest_release_answers_where_none_was_read():
    # The T4 was read under 2.10, 2.11 and 2.14: 2.12 is one from 2.11, 2.13 one from 2.14, 2.15 too.
    assert [of("T4", release).bytes for release in ("2.12", "2.13", "2.15")] == [
        of("T4", release).bytes for release in ("2.11", "2.14", "2.14")
    ]


def test_without_a_release_the_newest_reading_answers():
    assert of("T4").bytes == of("T4", "2.14").bytes


def test_training_comes_before_forward_passes_of_a_nearer_release():
    # Forward passes under 2.6 held 22.80 GiB - 22.10 GiB - 222.14 MiB = 495 MiB; training was read under 2.11 alone.
    assert of("RTX 4090", "2.6").bytes == 471 * MIB
    assert of("RTX 4090", "2.6").high >= 495 * MIB


@pytest.mark.parametrize("key", CARDS)
@pytest.mark.parametrize("release", [None, *RELEASES])
def test_every_answer_lies_within_its_range(key, release):
    said = of(key, release)
    assert 0 < said.low <= said.bytes <= said.high
    assert said.source.startswith("estimate") == said.estimated


def test_an_estimate_is_a_context_and_the_kernels_of_its_compute_capability():
    # RTX 3070: 46 multiprocessors of 1536 threads, 1.874 KiB each: 129.3 MiB, with 27 of the context 156.3; kernels
    # take 54 MiB on other GPUs of compute capability 8.6.
    assert of("RTX 3070").estimated
    assert of("RTX 3070").bytes / MIB == pytest.approx(27 + 46 * 1536 * 1.874 / 1024 + 54, abs=1e-6)


def test_a_context_that_was_read_is_the_start_of_an_estimate():
    # RTX 6000 Ada: 426 MiB were read before anything was computed; kernels take 69 to 90 MiB, 84 in the middle.
    said = of("RTX 6000 Ada")
    assert (said.low, said.bytes, said.high) == ((426 - 1 + 69) * MIB, (426 + 84) * MIB, (426 + 1 + 90) * MIB)


def test_a_text_that_is_no_release_is_refused():
    with pytest.raises(ValueError, match=r"not a torch release: write one such as 2\.11"):
        of("T4", "new")


# --- what the readings say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", [each for each in READINGS if each.workload is Workload.CONTEXT], ids=name)
def test_contexts_lie_within_8_per_cent_of_a_line_through_resident_threads(reading):
    card = CARDS[reading.gpu]
    line = context_mib(card.compute_capability, card.multiprocessors)
    assert abs(reading.mib - line) <= 0.08 * line + reading.tolerance


@pytest.mark.parametrize("reading", [each for each in READINGS if each.workload is not Workload.CONTEXT], ids=name)
def test_what_computed_holds_more_than_a_context(reading):
    assert beyond_context(reading) > 0


@pytest.mark.parametrize("capability", KERNEL_MIB, ids=str)
def test_kernels_are_those_of_the_readings(capability):
    found = []
    for key, card in CARDS.items():
        of_card = [each for each in READINGS if each.gpu == key and card.compute_capability == capability]
        training = [each for each in of_card if each.workload is Workload.TRAINING]
        forward = [each for each in of_card if each.workload is Workload.FORWARD]
        found += [beyond_context(each) for each in training or forward]
    assert KERNEL_MIB[capability] == pytest.approx((min(found), statistics.median(found), max(found)), abs=1)


def test_readings_of_one_card_overlap_whatever_the_release():
    # RTX 4090: 459, 471, 476, 483 and 495 MiB under 2.2 to 2.9, 2.6, 2.11 and later, each 15 MiB more or less.
    read = [each for each in READINGS if each.gpu == "RTX 4090" and each.workload is not Workload.CONTEXT]
    assert len({each.release for each in read}) >= 4
    middle = statistics.median(each.mib for each in read)
    assert all(abs(each.mib - middle) <= 20 for each in read)


def test_most_cards_were_read():
    assert sum(of(key).estimated for key in CARDS) < len(CARDS) / 2


@given(st.integers(0, 30), st.integers(0, 30))
def test_an_estimate_does_not_depend_on_the_release(one, other):
    assert of("RTX 3070", f"2.{one}") == of("RTX 3070", f"2.{other}")


@given(st.integers(1, 200))
def test_a_context_grows_with_the_multiprocessors(count):
    assert context_mib((8, 9), count) < context_mib((8, 9), count + 1)
