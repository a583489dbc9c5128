"""What scripts build on: keys, types, values, statuses, events, views and requests, as they were.

The golden files were taken at the version that the first users had. Words may change: what is for
people alone is not in them. A golden file that changes otherwise is a change for all who build on
it, and belongs into the changelog.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.face.golden import difference
from tests.face.scenario import play, write_config
from tests.support.daemon import daemon_in


def test_what_scripts_build_on_is_as_it_was(tmp_path: Path) -> None:
    """One daemon, one scenario, so one test: each of its golden files says what differs."""
    write_config(tmp_path)
    with daemon_in(tmp_path) as daemon:
        facts = play(daemon)
    differences = [difference(name, value) for name, value in facts.items()]
    if any(differences):
        pytest.fail("\n".join(filter(None, differences)), pytrace=False)
