"""Amounts: what people write is what is understood, and nothing is guessed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched_client.errors import Invalid
from gpusched_client.units import (
    bytes_short,
    bytes_text,
    duration_about,
    duration_short,
    duration_text,
    format_duration,
    parse_asked_bytes,
    parse_bytes,
    parse_duration,
    parse_seconds,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20G", 20 * GIB),
        ("20g", 20 * GIB),
        ("20GiB", 20 * GIB),
        ("20 GB", 20 * GIB),
        ("1.5T", 1536 * GIB),
        ("512", 512 * 2**20),
        ("512M", 512 * 2**20),
        ("1K", 1024),
        ("7B", 7),
        ("0.5K", 512),
        ("0.0001K", 1),
    ],
)
def test_memory_is_read_in_powers_of_1024_and_a_bare_number_is_mib(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-5G", "20X", "1e3", "20GG", "1.G", ".5G", "٣G", "9" * 99]
)
def test_memory_that_is_none_is_refused_with_the_value_and_the_legal_forms(text: str) -> None:
    with pytest.raises(Invalid, match=r"20G, 512M or 1\.5T") as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.message


def test_of_a_person_a_size_has_a_unit() -> None:
    assert parse_asked_bytes("18G") == 18 * GIB
    assert parse_asked_bytes("7 B") == 7
    with pytest.raises(Invalid, match=r"'18' has no unit; did you mean 18G\?"):
        parse_asked_bytes("18")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("30:00", 1800),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:00:00", 129_600),
        ("2h", 7200),
        ("90s", 90),
        ("1h30m", 5400),
        ("1.5 hours", 5400),
        ("1d", 86_400),
        ("unlimited", None),
        ("0", 0),
    ],
)
def test_durations_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1:99", "1:2:3:4", "-5", "2x", "h", "1-", "99999999999999999d"]
)
def test_durations_that_are_none_are_refused_with_the_legal_forms(text: str) -> None:
    with pytest.raises(Invalid, match="1-12:00:00"):
        parse_duration(text)


@given(st.integers(0, 2**38) | st.none())
def test_formatted_durations_are_read_back_exactly(seconds: int | None) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(1, 2**38))
def test_durations_in_words_are_read_back_exactly(seconds: int) -> None:
    assert parse_duration(duration_text(seconds)) == seconds


@given(st.integers(1, 2**38))
def test_durations_as_typed_are_read_back_exactly(seconds: int) -> None:
    assert parse_duration(duration_short(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("2.5", 2.5), ("90", 90.0), ("90s", 90.0), ("1:30", 90.0), ("1h", 3600.0)]
)
def test_a_bare_number_of_a_setting_is_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["unlimited", "", "-1", "1e3", "x"])
def test_a_setting_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not a duration"):
        parse_seconds(text)


@given(st.text())
def test_any_text_is_an_amount_or_refused_as_invalid(text: str) -> None:
    with contextlib.suppress(Invalid):
        assert parse_bytes(text) >= 0
    with contextlib.suppress(Invalid):
        assert (parse_duration(text) or 0) >= 0
    with contextlib.suppress(Invalid):
        assert parse_seconds(text) >= 0.0


def test_amounts_in_sentences_and_tables_are_short() -> None:
    assert bytes_text(18 * GIB) == "18 GiB"
    assert bytes_text(17 * GIB + GIB // 2) == "17.5 GiB"
    assert bytes_text(7) == "7 bytes"
    assert bytes_short(18 * GIB) == "18G"
    assert duration_text(1800) == "30 min"
    assert duration_text(86_400) == "24 h"
    assert duration_text(7 * 86_400) == "7 d"
    assert duration_text(None) == "unlimited"
    assert format_duration(65.9) == "1:05"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (39.6, "40 s"),
        (60, "1 min"),
        (90, "90 s"),
        (900, "15 min"),
        (5400, "90 min"),
        (9000, "2.5 h"),
    ],
)
def test_a_rounded_duration_has_one_unit(seconds: float, text: str) -> None:
    assert duration_about(seconds) == text


def test_durations_of_one_kind_stand_beside_each_other_in_one_unit() -> None:
    assert duration_about(6840, beside_s=7560) == "1.9 h"
    assert duration_about(180, beside_s=7200) == "3 min"
