"""Checksums of rows: those that older databases hold are to stay what they were."""

from __future__ import annotations

import zlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuschedd.store.rows import crc

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False).map(lambda value: value + 0.0),  # SQLite has no negative zero
    st.text(),
    st.binary(),
)


@given(st.lists(VALUES))
def test_a_checksum_is_of_the_text_of_the_list(values: list[Any]) -> None:
    """With each number as float, so that it is the same before it is stored and after."""
    plain = [float(value) if isinstance(value, int | float) else value for value in values]
    text = repr(plain).encode("utf-8", "backslashreplace")
    assert crc(values) == crc(values) == zlib.crc32(text)
