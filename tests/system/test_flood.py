"""One user's flood: the others are served, and their jobs have their turn."""

from __future__ import annotations

import pytest

from benchmarks.many_users import flood, queue_up, turn_of_bob
from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]

QUEUED = 2_000


def test_bob_is_served_and_his_job_starts_beside_alice_s_flood(host: Host) -> None:
    """What it costs him is in benchmarks/many_users.py; here it is that he is not shut out."""
    queue_up(host, QUEUED)
    with flood(host):
        for _ in range(20):
            with host.client("bob") as bob:  # a new connection each time
                bob.hello()
                bob.jobs(users=["bob"], limit=20)
        turn = turn_of_bob(host)
    # What she has sent and nobody has read yet would make jobs in the middle of the next test.
    host.systemctl("restart", "gpuschedd.service")
    assert turn["position"] <= 1  # before all of hers
