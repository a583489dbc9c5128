"""Putting the service in place, taking it away, its configuration and its backup."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.support.box import BIN
from tests.support.host import CONFIG, Host

pytestmark = [pytest.mark.root, pytest.mark.systemd]


def gpuschedd(host: Host, *words: str, user: str | None = None) -> tuple[int, str]:
    """Status and words of the command."""
    done = host.box.run(BIN / "gpuschedd", *words, user=user, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_second_install_changes_nothing_and_says_so(host: Host) -> None:
    status, said = gpuschedd(host, "install")
    assert status == 0
    assert "write" not in said
    assert "replace" not in said
    assert said.count("same ") >= 10
    assert f"keep {CONFIG}" in said


def test_links_of_another_program_are_refused_with_the_list(host: Host) -> None:
    """gflow has gcancel and gctl too; the files of an administrator are never replaced silently."""
    link = "/usr/local/bin/gcancel"
    ours = host.box.sh(f"readlink {link}").strip()
    host.box.sh(
        f"mkdir -p /opt/gflow/bin && cp /bin/true /opt/gflow/bin/gcancel && "
        f"ln -sf /opt/gflow/bin/gcancel {link}"
    )
    status, said = gpuschedd(host, "install")
    assert status == 78
    assert f"{link} -> /opt/gflow/bin/gcancel" in said
    assert "--force-links" in said
    assert host.box.sh(f"readlink {link}").strip() == "/opt/gflow/bin/gcancel"
    status, said = gpuschedd(host, "install", "--bindir", "/opt/ours")
    assert status == 0
    assert f"warning: by your PATH gcancel is {link}, not ours" in said
    assert gpuschedd(host, "install", "--force-links")[0] == 0
    assert host.box.sh(f"readlink {link}; rm -r /opt/ours /opt/gflow").strip() == ours


def test_an_upgrade_of_a_running_service_says_restart(host: Host) -> None:
    said = gpuschedd(host, "install")[1]
    assert "next: systemctl restart gpuschedd.service\n" in said
    host.systemctl("stop", "gpuschedd.socket", "gpuschedd.service")
    said = gpuschedd(host, "install")[1]
    assert "next: systemctl enable --now gpuschedd.socket gpuschedd.service\n" in said
    host.systemctl("start", "gpuschedd.socket", "gpuschedd.service")


def test_a_dry_run_and_a_prefix_touch_nothing_else(host: Host) -> None:
    status, said = gpuschedd(host, "install", "--prefix", "/tmp/image", "--dry-run")
    assert status == 0
    assert "write /tmp/image/etc/systemd/system/gpuschedd.service" in said
    assert not host.box.inside("/tmp/image").exists()
    assert gpuschedd(host, "install", "--prefix", "/tmp/image")[0] == 0
    made = host.box.sh("cd /tmp/image && find . -type f -o -type l | sort")
    assert "./etc/pam.d/gpusched" in made
    assert "./usr/local/bin/gsub" in made
    assert gpuschedd(host, "install", "--prefix", "/tmp/image", "--uninstall")[0] == 0
    assert host.box.sh("find /tmp/image -type f -o -type l; rm -r /tmp/image") == ""


def test_ordinary_users_cannot_install(host: Host) -> None:
    status, said = gpuschedd(host, "install", user="alice")
    assert status != 0
    assert "root" in said


@pytest.mark.parametrize(
    ("prepare", "venv", "words"),
    [
        ("", "/home/alice/venv", "ProtectHome"),
        ("", "/tmp/venv", "a folder of its own"),
        ("mkdir -m 700 /opt/closed", "/opt/closed/venv", "cannot be read by everybody"),
        ("mkdir /opt/hers && chown alice /opt/hers", "/opt/hers/venv", "changed by others"),
    ],
)
def test_a_venv_that_cannot_serve_is_refused_with_the_reason(
    host: Host, prepare: str, venv: str, words: str
) -> None:
    host.box.sh(prepare or "true")
    site = f"{venv}/lib/python3*/site-packages"
    host.box.sh(
        f"/usr/bin/python3 -m venv --without-pip {venv} && "
        f"cp -r {BIN.parent}/lib/python3*/site-packages/. {site} && "
        f"cp -r {BIN.parent}/share {venv}/"
    )
    done = host.box.run(f"{venv}/bin/python", "-I", "-m", "gpuschedd.main", "install", check=False)
    host.box.sh(f"rm -rf {venv} /opt/closed /opt/hers")
    assert done.returncode == 78
    assert words in done.stderr
    assert "/usr/bin/python3 -m venv /opt/gpuschedd" in done.stderr


def test_a_bad_configuration_is_refused_with_line_and_cure(host: Host) -> None:
    target = host.box.disk(CONFIG)
    good = target.read_text()
    target.write_text("# a comment\n[limits]\nmax_gpu = 4\n")
    status, said = gpuschedd(host, "check-config", "--system")
    assert status != 0
    assert f"{CONFIG}:3: unknown key limits.max_gpu; known here: " in said
    # A running daemon keeps what it has; both ways of asking say so.
    host.systemctl("reload", "gpuschedd.service")
    reload = host.box.run("gctl", "reload", check=False)
    assert reload.returncode == 2
    assert f"{CONFIG}:3" in reload.stderr
    assert "reload_refused" in host.journal()
    assert host.systemctl("is-active", "gpuschedd.service") == "active"
    target.write_text(good)
    assert gpuschedd(host, "check-config", "--system")[0] == 0


def test_names_in_the_configuration_that_are_nobody_s_are_pointed_out(host: Host) -> None:
    """Not refused: an account may be yet to come, and must not keep the daemon from its start."""
    more = 'admin_group = "operaters"\n[limits.alcie]\nmax_gpus = 1\n[limits."@shared"]\n'
    host.box.disk(CONFIG).write_text(f'simulate = "4x24G"\n{more}')
    status, said = gpuschedd(host, "check-config", "--system")
    assert status == 0
    notes = [line for line in said.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: there is no group operaters (admin_group)",
        "note: there is no user alcie",
    ]
    host.admin(lambda client: client.reload())
    logged = host.admin(lambda client: client.status()).last_errors
    assert {note.removeprefix("note: ") for note in notes} <= {
        problem.text.partition("text=")[2] for problem in logged
    }


@pytest.mark.parametrize(
    ("spoil", "words"),
    [("chmod g+w", "others may write it"), ("chown alice", "belongs to uid")],
)
def test_a_configuration_that_others_may_write_is_refused(
    host: Host, spoil: str, words: str
) -> None:
    host.box.sh(f"{spoil} {CONFIG}")
    reload = host.box.run("gctl", "reload", check=False)
    host.box.sh(f"chown root {CONFIG}; chmod 644 {CONFIG}")
    assert reload.returncode == 2
    assert words in reload.stderr


def test_exit_78_is_not_followed_by_a_restart(host: Host) -> None:
    target = host.box.disk(CONFIG)
    good = target.read_text()
    host.systemctl("stop", "gpuschedd.socket", "gpuschedd.service")
    target.write_text("nonsense = 1\n")
    host.systemctl("start", "gpuschedd.service", check=False)
    assert host.show("gpuschedd.service", "ExecMainStatus") == "78"
    assert host.show("gpuschedd.service", "ActiveState") == "failed"
    assert host.show("gpuschedd.service", "NRestarts") == "0"
    target.write_text(good)


def test_a_backup_is_a_whole_database(host: Host, tmp_path: Path) -> None:
    host.wait(host.sh("alice", "true", name="in-the-copy"))
    host.box.run("gctl", "backup", "/var/copy.sqlite3")
    assert host.box.sh("stat -c '%a %U' /var/copy.sqlite3") == "600 root\n"
    copy = tmp_path / "copy.sqlite3"
    copy.write_bytes(host.box.disk("/var/copy.sqlite3").read_bytes())
    with sqlite3.connect(copy) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        names = database.execute("SELECT name FROM jobs_v ORDER BY job_id DESC LIMIT 1").fetchone()
    assert names == ("in-the-copy",)
    assert host.box.run("gctl", "backup", "/home/bob/x", user="bob", check=False).returncode == 77
    assert host.box.sh("ls -A /var/lib/gpuschedd/backup; rm /var/copy.sqlite3") == ""


def test_the_status_is_well_and_owners_hold_and_release(host: Host) -> None:
    said = host.box.run("gctl", "status", user="alice")
    assert "through PID 1" in said.stdout
    assert "All is well." in said.stdout
    job_id = str(host.sh("alice", "true", gpus=4, hold=True))
    assert host.box.run("gctl", "hold", job_id, user="bob", check=False).returncode == 77
    assert host.box.run("gctl", "update", job_id, "--nice", "5", user="alice").returncode == 0
    assert host.box.run("gctl", "release", job_id, user="alice").returncode == 0
    assert host.wait(int(job_id)).state == "COMPLETED"


def test_an_uninstall_takes_away_what_was_put_there_and_leaves_the_books(host: Host) -> None:
    job_id = host.sh("alice", "sleep 60", gpus=1)
    host.until_state(job_id, "RUNNING")
    status, said = gpuschedd(host, "install", "--uninstall")
    assert status == 0
    assert "keep /var/lib/gpuschedd" in said
    assert f"keep {CONFIG}" in said
    left = host.box.sh("ls /etc/systemd/system /etc/pam.d /usr/local/bin | grep -c gpusched; true")
    assert left.strip() == "0"
    assert host.box.run("pgrep", "-u", "alice", "sleep", check=False).returncode == 0
    assert gpuschedd(host, "install")[0] == 0
    host.systemctl("enable", "--now", "gpuschedd.socket", "gpuschedd.service")
    assert host.job(job_id).state == "RUNNING"
