"""Whether this process can start jobs the way it is told to: through PID 1, or by itself."""

from __future__ import annotations

import sys
from pathlib import Path

from gpusched_client.terms import Launch
from gpuschedd.system.state_dir import Unusable

SYSTEMD, INIT = Path("/run/systemd/system"), Path("/proc/1/stat")

#: What becoming another user, and ending what is left of its job, takes (capabilities(7)).
DIRECT_CAPABILITIES = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SYS_PTRACE": 19}


def check_launch(launch: Launch, *, is_system: bool, state_dir: Path) -> None:
    """Refuse a way of starting jobs that this process cannot go. Raises Unusable."""
    if launch is Launch.PID1:
        if not is_system:
            raise Unusable("--launch=pid1 is for --system; leave it out")
        if not SYSTEMD.is_dir():
            raise Unusable(
                "systemd is not PID 1 here; use --system --launch=direct, or leave out --system"
            )
        if "$" in f"{state_dir}{sys.executable}":
            raise Unusable(
                f"{state_dir} or {sys.executable} has a $, which PID 1 would expand; "
                "choose another place"
            )
        if not INIT.exists():
            raise Unusable(
                "/proc hides other users' processes (hidepid), and the daemon must see those of "
                "all jobs; give its unit the group of that mount's gid= (SupplementaryGroups=)"
            )
    elif is_system:
        held = _effective_capabilities()
        missing = [name for name, bit in DIRECT_CAPABILITIES.items() if not held >> bit & 1]
        if missing:
            raise Unusable(
                f"--launch=direct lacks {', '.join(missing)}: a unit with an empty capability set "
                "cannot start jobs itself; leave out --launch=direct to have PID 1 start them"
            )


def _effective_capabilities() -> int:
    """The mask of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
