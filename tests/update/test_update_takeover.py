"""A program of another user, or a sandboxed one, that wants to run as the owner at the next update: each step fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from neuroshard.api.access import new_entrance
from neuroshard.config.folders import prepare_data_dir
from neuroshard.config.settings import Settings, note_of
from tests.worlds.api import SECRET, ServedNode
from tests.worlds.file_servers import HostileServer
from tests.worlds.publishers import Publisher, ReleasePlace
from tests.worlds.releases import Computer, installed, publish
from tests.worlds.statuses import training_status

pytestmark = pytest.mark.process
NOBODY = 65_534
OWNER_SETTINGS = {key for key in Settings.model_fields if note_of(key).owner}
TAKEOVER: dict[str, object] = {"update_url": "https://evil.example", "update_check": True}
# All that a user can try without a key: files, processes, and every request of the dashboard's page.
ATTACK = """
import encodings.idna, json, os, sys, urllib.error, urllib.request
folder, url, takeover, user = sys.argv[1:]
if user:  # from here on, all that this user may do; the modules may lie where only the owner reads
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
found = {}
for name in ("", "api-secret", "dashboard.html", "config.toml"):
    try:
        path = os.path.join(folder, name)
        found[name] = os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError as error:
        found[name] = type(error).__name__
for method, path, body in (
    ("GET", "/api/session", None), ("POST", "/api/session", '{"secret": ""}'), ("GET", "/api/status", None),
    ("POST", "/api/session", '{"secret": "123.guessed.key"}'), ("GET", "/api/config", None),
    ("PATCH", "/api/config", takeover),
):
    headers = {"Origin": url, "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, body and body.encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            found[method + path + (body or "")[-9:]] = [answer.status, answer.headers.get("set-cookie")]
    except urllib.error.HTTPError as error:
        found[method + path + (body or "")[-9:]] = [error.code, error.headers.get("set-cookie")]
print(json.dumps({"user": os.getuid(), "found": found}))
"""


class Evil(ReleasePlace):
    """A publisher whose keys the program does not know, and whom the owner's environment does not name."""

    def variables(self) -> dict[str, str]:
        return {}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A data folder whose own mode is all that keeps other users out."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o711)
        yield Path(place) / "data"


@pytest.fixture
def node(folder: Path) -> Iterator[ServedNode]:
    """A node in front of its real settings and API, in a data folder that was open to all before."""
    folder.mkdir()
    folder.chmod(0o755)
    prepare_data_dir(folder)
    (folder / "api-secret").write_text(SECRET)
    served = ServedNode(training_status(), folder=folder)
    new_entrance(folder, served.url.rstrip("/"), time.time())
    served.start()
    yield served
    served.stop()


def attack(node: ServedNode, folder: Path, user: int | None) -> dict[str, object]:
    """What the attacker's program finds, as this user."""
    arguments = [str(folder), node.url.rstrip("/"), json.dumps(TAKEOVER), "" if user is None else str(user)]
    command = [sys.executable, "-I", "-c", ATTACK, *arguments]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert said["user"] == (os.getuid() if user is None else user)
    return dict(said["found"])


def test_the_first_step_fails_without_a_key(node: ServedNode, folder: Path, tmp_path: Path) -> None:
    found = attack(node, tmp_path / "nothing", None)  # as a sandboxed program of the owner, without the owner's files
    answers = {what: answer for what, answer in found.items() if "/" in what}
    assert len(answers) == 6
    assert {tuple(answer) for answer in answers.values() if isinstance(answer, list)} <= {(401, None), (422, None)}
    assert answers["GET/api/session"] == answers[f"PATCH/api/config{json.dumps(TAKEOVER)[-9:]}"] == [401, None]
    assert node.taken == []
    assert not (folder / "config.toml").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_computer_reads_no_key_either(node: ServedNode, folder: Path) -> None:
    found = attack(node, folder, NOBODY)
    assert {found[name] for name in ("", "api-secret", "dashboard.html", "config.toml")} == {"PermissionError"}
    assert found["GET/api/session"] == found[f"PATCH/api/config{json.dumps(TAKEOVER)[-9:]}"] == [401, None]
    assert node.taken == []


def test_the_second_step_fails_even_with_a_session(node: ServedNode, folder: Path) -> None:
    with httpx.Client(base_url=node.url, headers={"Origin": node.url.rstrip("/")}, trust_env=False) as page:
        session = page.post("/api/session", json={"secret": SECRET}).raise_for_status().json()
        page.headers["X-NeuroShard-CSRF"] = session["csrf_token"]
        assert {
            "update_check",
            "update_url",
            "host",
            "genesis",
            "run",
            "peer",
            "data_dir",
        } <= OWNER_SETTINGS
        for key in sorted(OWNER_SETTINGS):
            refused = page.patch("/api/config", json={key: TAKEOVER.get(key, "x"), "memory": 900})
            assert refused.status_code == 422, key
            assert f"{key} cannot be changed through the dashboard" in refused.json()["detail"]
            action = refused.json()["action"]
            assert "`neuroshard --" in action or str(folder / "config.toml") in action
        assert not (folder / "config.toml").exists()  # also not the harmless part
        assert page.patch("/api/config", json={"memory": 900}).status_code == 202


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in program is a script with a #! line")
def test_the_third_step_fails_even_with_the_settings_stored(tmp_path: Path) -> None:
    honest = Publisher()
    with HostileServer() as server:
        computer = Computer(tmp_path, Evil(server), installed(tmp_path / "program"), anchor=honest.anchor)
        publish(computer, "0.2.0")
        computer.data.mkdir()
        stored = computer.data / "config.toml"
        stored.write_text(f'update_url = "{computer.place.url}"\n')
        done = computer.update("apply", "--yes")
        assert done.returncode == 1, done.stderr
        assert "not signed by enough of the publisher's keys" in done.stderr
        assert computer.working_version() == "0.1.0"
        named = computer.update("apply", "--yes", NEUROSHARD_UPDATE_URL=computer.place.url)  # also by the owner's word
        assert named.returncode == 1, named.stderr
        assert computer.working_version() == "0.1.0"
        assert not (computer.installation.root / "downloads").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in program is a script with a #! line")
@pytest.mark.parametrize("as_variable", [False, True])
def test_no_setting_names_another_root_of_trust(tmp_path: Path, as_variable: bool) -> None:
    with HostileServer() as server:
        computer = Computer(tmp_path, Evil(server), installed(tmp_path / "program"), anchor=Publisher().anchor)
        publish(computer, "0.2.0")
        computer.data.mkdir()
        lines = f'update_url = "{computer.place.url}"\n' + ("" if as_variable else f'update_key = "{"ab" * 32}"\n')
        (computer.data / "config.toml").write_text(lines)
        variables = {"NEUROSHARD_UPDATE_KEY": "ab" * 32} if as_variable else {}
        done = computer.update("apply", "--yes", **variables)
        assert done.returncode == 2, done.stderr
        assert "update_key is no longer a setting: remove it." in done.stderr
        assert (computer.data / "config.toml").read_text() == lines  # nothing is lost
        assert computer.working_version() == "0.1.0"
