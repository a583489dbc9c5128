"""Golden values as JSON that people can read, and how one differs from what is there now."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from tests.face.normal import dumped

PLACE = Path(__file__).parent.parent / "golden" / "face"


def difference(name: str, value: Any) -> str:
    """What is not as in the golden file, line by line; "" where nothing is.

    GPUSCHED_UPDATE_GOLDEN=1 writes the file instead.
    """
    path = PLACE / f"{name}.json"
    text = dumped(value) + "\n"
    if os.environ.get("GPUSCHED_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert path.exists(), f"{path} is missing; GPUSCHED_UPDATE_GOLDEN=1 writes it"
    before, now = path.read_text().splitlines(), text.splitlines()
    return "\n".join(difflib.unified_diff(before, now, f"{name}.json", "now", lineterm=""))
