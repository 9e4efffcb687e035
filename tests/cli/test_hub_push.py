"""An export that is pushed to a hub: one that accepts it, and all the ways in which one refuses.

Real: the hub's client library, HTTP, the exported files. Simulated: the hub, which speaks its protocol on loopback.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.worlds.commands import Command, Outcome

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed: pip install '.[export]'"
    ),
]
TOKEN = "hf_notARealTokenAtAll"


@dataclass
class Hub:
    """A hub in memory: repositories and their files. `refusals` has the status to answer for a part of an address."""

    url: str = ""
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    private: dict[str, bool] = field(default_factory=dict[str, bool])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    large: dict[str, bytes] = field(default_factory=dict[str, bytes])
    tokens: set[str] = field(default_factory=set[str])

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        path = path.partition("?")[0]
        refused = next((status for part, status in self.refusals.items() if part in path), None)
        if refused is not None:
            return refused, {"error": "The quota of this account is used up."}
        if method == "GET":
            return 404, {"error": "There is no such repository."}
        if method == "PUT":
            self.large[path.rsplit("/", 1)[1]] = body
            return 200, {}
        if path.endswith("/commit/main"):
            return self._commit([json.loads(line) for line in body.splitlines()])
        return 200, self._found(path, json.loads(body or b"{}"))

    def _found(self, path: str, asked: dict[str, Any]) -> object:
        if path == "/api/repos/create":
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            return {"url": f"{self.url}/{name}"}
        if path.endswith("/preupload/main"):
            modes = [("lfs" if file["size"] > 10_000 else "regular", file["path"]) for file in asked["files"]]
            return {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for mode, name in modes]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/upload/{one['oid']}"}}} for one in asked["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        return {}

    def _commit(self, lines: list[dict[str, Any]]) -> tuple[int, object]:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                self.files[value["path"]] = content
        oid = "1" * 40
        return 200, {"commitUrl": f"{self.url}/somebody/model/commit/{oid}", "commitOid": oid, "success": True}


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_PUT(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization", ""))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = hub.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def export(neuroshard: Command, trained: Path, out: Path, hub: str, *options: object) -> Outcome:
    command = neuroshard.having(HF_TOKEN=TOKEN, HF_HOME=str(out.parent / "hf"), NO_PROXY="127.0.0.1")
    push = ("--push", "somebody/model", "--hub", hub)
    return command("checkpoint", "export", "--data-dir", trained, "--out", out, *push, *options)


def test_a_folder_is_pushed_with_its_card(neuroshard: Command, trained: Path, tmp_path: Path, hub: Hub) -> None:
    outcome = export(neuroshard, trained, tmp_path / "model", hub.url)
    assert outcome.code == 0, outcome.err
    assert f"Pushed to {hub.url}/somebody/model." in outcome.out
    assert hub.private == {"somebody/model": True}
    written = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert hub.files == written
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= written.keys()
    assert hub.tokens <= {f"Bearer {TOKEN}", ""}  # an upload of bytes needs none


def test_a_file_is_pushed_with_its_modelfile(neuroshard: Command, trained: Path, tmp_path: Path, hub: Hub) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    options = ("--format", "gguf", "--public", "--hub-token-file", tmp_path / "token", "--json")
    outcome = export(neuroshard, trained, tmp_path / "m.gguf", hub.url, *options)
    assert outcome.code == 0, outcome.err
    assert outcome.json()["pushed"] == f"{hub.url}/somebody/model"
    assert hub.private == {"somebody/model": False}
    assert hub.files.keys() == {"m.gguf", "Modelfile", "README.md"}


REFUSALS = (("/repos/create", 401), ("/repos/create", 403), ("/preupload/", 413), ("/lfs/", 507), ("/upload/", 403))


@pytest.mark.parametrize("refusal", [*REFUSALS, ("/commit/", 400), ("/commit/", 409)], ids=str)
def test_a_hub_that_refuses(
    neuroshard: Command, trained: Path, tmp_path: Path, hub: Hub, refusal: tuple[str, int]
) -> None:
    hub.refusals = dict([refusal])
    outcome = export(neuroshard, trained, tmp_path / "model", hub.url)
    assert outcome.code == 4
    assert f"{hub.url} did not accept somebody/model: " in outcome.err
    assert "The export is complete and was kept" in outcome.err
    assert TOKEN not in outcome.out + outcome.err
    assert "Traceback" not in outcome.err
    assert hub.files == {}
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_no_hub_no_token_and_no_sense(neuroshard: Command, trained: Path, tmp_path: Path) -> None:
    with running_hub() as gone:
        pass
    outcome = export(neuroshard, trained, tmp_path / "model", gone.url)
    assert outcome.code == 4
    assert (tmp_path / "model" / "model.safetensors").exists()
    classic = export(neuroshard, trained, tmp_path / "x.pt", gone.url, "--format", "torch")
    assert (classic.code, (tmp_path / "x.pt").exists()) == (2, False)
    readable = export(neuroshard, trained, tmp_path / "y", "http://hub.example.org")
    assert (readable.code, (tmp_path / "y").exists()) == (2, False)
    assert "https" in readable.err
    without = neuroshard("checkpoint", "export", "--data-dir", trained, "--out", tmp_path / "y", "--push", "a/b")
    assert (without.code, (tmp_path / "y").exists()) == (2, False)
    assert "HF_TOKEN" in without.err
