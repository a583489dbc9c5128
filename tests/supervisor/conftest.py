"""A host for real supervisors, without a daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.jobs import Host


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as made:
        yield made
