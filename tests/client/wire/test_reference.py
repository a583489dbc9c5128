"""The wire's reference: what the declarations say, and true for a client that has only it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpusched_client.wire import reference
from gpusched_client.wire.catalog import METHODS
from gpusched_client.wire.message import specs_of
from tests.support.daemon import DaemonProcess

README = Path(reference.__file__).with_name("README.md")


def test_the_committed_reference_is_what_the_declarations_make() -> None:
    cure = "python -m gpusched_client.wire.reference > gpusched_client/wire/README.md"
    assert README.read_text() == reference.reference(), cure


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_in_it_with_its_right_its_errors_and_its_fields(method: str) -> None:
    kind = METHODS[method]
    (section,) = re.findall(rf"^### `{method}`\n(.*?)^##", README.read_text(), re.M | re.S)
    assert f"Right: `{kind.right}`." in section
    assert {error.code for error in kind.errors} <= set(re.findall(r"`(\w+)`", section))
    request = section.partition("Response:")[0]
    assert set(specs_of(kind)) <= set(re.findall(r"^\| `(\w+)` \|", request, re.M))


def test_its_client_of_ten_lines_runs_a_job(daemon: DaemonProcess) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "GPUSCHED_SOCKET": str(daemon.socket)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "COMPLETED\n"
