"""The report for others: what is in it, what never is, how large it gets, and who may have it."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuroshard.api.app import create_app
from neuroshard.api.diagnostics import MOST_PART_BYTES
from neuroshard.status.computer import PathsStatus
from neuroshard.status.snapshot import NetworkStatus, PeerStatus
from neuroshard.telemetry.logs import FILE_NAME
from neuroshard.telemetry.redaction import Redactor
from neuroshard.types import NodeId, WalletId
from tests.worlds.api import SECRET, Api, FakeNode, make_api
from tests.worlds.statuses import training_status

TOKEN = "correct-horse-battery-staple-4711"
PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
PLANTED = f"{TOKEN} {SECRET} {PHRASE} {Path.home()}/data 93.184.216.34 https://ada:pass@host/"
HIDDEN = (TOKEN, SECRET, "sausage worth useful", f"{Path.home()}/", "93.184.216.34", "ada:pass", "JOINLINE", "PEERNODE")
PARTS = {"README.txt", "computer.json", "settings.json", "status.json", "counters.json", "log.txt", "node.log"}


def parts_of(api: Api) -> dict[str, str]:
    response = api.command("POST", "/api/diagnostics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/zip"
    assert response.headers["content-disposition"].startswith('attachment; filename="neuroshard-report-')
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        return {entry.removeprefix("neuroshard-report/"): archive.read(entry).decode() for entry in archive.namelist()}


@pytest.fixture
def planted(tmp_path: Path) -> Api:
    """A node that has its secrets wherever a report looks."""
    (tmp_path / FILE_NAME).write_text(f"earlier: {PLANTED}\n", encoding="utf-8")
    peer = PeerStatus(NodeId("PEERNODE"), WalletId("w"), (), None, None, 0.0, 0.0, address="93.184.216.34")
    status = replace(
        training_status(),
        state_reason=f"Because {PLANTED}",
        warnings=(PLANTED,),
        paths=PathsStatus(logs=str(tmp_path), api_secret=f"{Path.home()}/api-secret"),
        network=NetworkStatus(addresses=("/ip4/93.184.216.34/tcp/1",), join_line="JOINLINE"),
        peers=(peer,),
    )
    api = make_api(FakeNode(status))
    settings: Any = {"genesis": {"value": PLANTED, "source": "flag"}, "token": {"value": "(secret)"}}
    context = replace(api.context, redactor=Redactor(TOKEN), config_view=lambda: settings)
    api = Api(api.node, context, create_app(context))
    api.context.log_ring.append(1.0, "INFO", "neuroshard", f"said {PLANTED}")
    return api


def test_no_planted_secret_is_in_any_part(planted: Api) -> None:
    parts = parts_of(planted)
    assert set(parts) == PARTS
    for name, content in parts.items():
        assert [secret for secret in HIDDEN if secret in content] == [], name
    for name in ("settings.json", "status.json", "log.txt", "node.log"):
        assert "[secret]" in parts[name]


def test_what_helps_is_in_it(planted: Api) -> None:
    parts = parts_of(planted)
    status = json.loads(parts["status.json"])
    assert (status["state"], status["training"]["steps"], status["peer_count"]) == ("training", 20, 1)
    assert status["network"]["addresses"] == ["/ip4/[address]/tcp/1"]
    computer = json.loads(parts["computer.json"])
    assert computer["packages"]["fastapi"]
    assert computer["memory_bytes"] > 0
    assert parts["node.log"].startswith("earlier: ")


def test_it_stays_small_however_much_was_said(tmp_path: Path) -> None:
    line = "0123456789 " * 90 + "\n"
    (tmp_path / FILE_NAME).write_text(line * 3_000, encoding="utf-8")
    api = make_api(FakeNode(replace(training_status(), paths=PathsStatus(logs=str(tmp_path)))))
    for number in range(2_500):
        api.context.log_ring.append(1.0, "INFO", "neuroshard", f"{number} " + "x" * 1_000)
    parts = parts_of(api)
    assert max(len(content) for content in parts.values()) <= MOST_PART_BYTES
    assert parts["log.txt"].rstrip().endswith("x")
    assert "2499 xxx" in parts["log.txt"]
    assert parts["node.log"].startswith(line)


def test_without_a_log_file_it_says_so(api: Api) -> None:
    assert "cannot be read" in parts_of(api)["node.log"]


def test_it_needs_the_owner(api: Api) -> None:
    assert api.call("POST", "/api/diagnostics").status_code == 401
    assert api.get("/api/diagnostics").status_code == 405  # with the secret
    foreign = {**api.secret, "Origin": "http://evil.example"}
    assert api.call("POST", "/api/diagnostics", headers=foreign).status_code == 403
