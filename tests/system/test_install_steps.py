"""What an install writes, keeps and refuses, below a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuschedd.system import install

BIN = install.BIN_DIR
PAM = Path("etc/pam.d/gpusched")
UNIT = Path("etc/systemd/system/gpuschedd.service")


def put_in_place(root: Path) -> list[str]:
    """All steps; what they said."""
    return run(install.install_steps(root, install.share_dir(), BIN))


def run(steps: object) -> list[str]:
    """Do them; what they say."""
    said = []
    for step in steps:  # type: ignore[attr-defined]
        if step.act is not None:
            step.act()
        said.append(step.text)
    return said


def test_a_second_install_leaves_all_as_it_is(tmp_path: Path) -> None:
    assert all(not text.startswith(("same", "keep")) for text in put_in_place(tmp_path))
    assert all(text.startswith(("same", "keep")) for text in put_in_place(tmp_path))


@pytest.mark.parametrize("path", [PAM, UNIT])
def test_what_was_edited_stays_in_force_and_the_new_one_is_beside_it(
    tmp_path: Path, path: Path
) -> None:
    put_in_place(tmp_path)
    written = (tmp_path / path).read_bytes()
    edited = b"account required pam_access.so\n" + written
    (tmp_path / path).write_bytes(edited)
    beside = tmp_path / f"{path}.new"
    assert f"keep {tmp_path / path}: it was edited; the new one is {beside}: compare them" in (
        put_in_place(tmp_path)
    )
    assert (tmp_path / path).read_bytes() == edited
    assert beside.read_bytes() == written
    gone = run(install.uninstall_steps(tmp_path, install.share_dir(), BIN))
    assert f"keep {tmp_path / path}: it was edited" in gone
    assert (tmp_path / path).read_bytes() == edited


def test_what_an_earlier_version_wrote_is_replaced(tmp_path: Path) -> None:
    """Its stamp says that nobody has edited it."""
    target = tmp_path / UNIT
    put_in_place(tmp_path)
    target.write_bytes(install._stamped(b"[Unit]\nDescription=of an earlier version\n"))
    assert f"replace {target}" in put_in_place(tmp_path)
    assert b"earlier" not in target.read_bytes()


def test_commands_of_another_program_are_named(tmp_path: Path) -> None:
    """Links and files; a link into another venv of ours, or to nothing, is none of them."""
    bin_dir = tmp_path / BIN.relative_to("/")
    bin_dir.mkdir(parents=True)
    assert install.foreign_commands(tmp_path, BIN) == []
    for venv, daemon in (("gflow", False), ("old", True)):
        scripts = tmp_path / venv / "bin"
        scripts.mkdir(parents=True)
        (scripts / "gcancel").touch()
        if daemon:
            (scripts / "gpuschedd").touch()
    (bin_dir / "gcancel").symlink_to(tmp_path / "gflow/bin/gcancel")
    (bin_dir / "gctl").write_text("another's")
    (bin_dir / "gsub").symlink_to(tmp_path / "old/bin/gcancel")
    (bin_dir / "gq").symlink_to(tmp_path / "gone/bin/gq")
    assert install.foreign_commands(tmp_path, BIN) == [
        f"{bin_dir / 'gcancel'} -> {tmp_path}/gflow/bin/gcancel",
        str(bin_dir / "gctl"),
    ]


def test_a_shell_that_finds_another_command_first_is_warned_of(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place, name in ((first, "gcancel"), (second, "gcancel"), (second, "gsub")):
        place.mkdir(exist_ok=True)
        (place / name).touch(mode=0o755)
    found = install.shadowed_commands(second, f"{first}:{second}")
    assert found == [f"gcancel is {first}/gcancel, not ours"]
