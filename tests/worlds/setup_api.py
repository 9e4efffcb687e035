"""The wizard of the first run in this process: it stores into lists, and runs of the local network are made up."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
from fastapi import FastAPI

from neuroshard.api.access import ENTRY_SECONDS, FRAGMENT, SessionKeys
from neuroshard.api.app import SetupContext, create_setup_app
from neuroshard.api.arrival import ArrivalDraft, FolderListBody, TextFolder
from neuroshard.api.presets import line_body
from neuroshard.api.server import ApiServer, bind
from neuroshard.api.setup import Finished, SetupChoices, SetupDraft, SetupFacts
from neuroshard.config.loading import load_settings
from neuroshard.config.saving import FirstSettings
from neuroshard.dataset.text_folders import list_text_folders
from neuroshard.errors import StorageError
from neuroshard.network.lan_runs import LanRuns
from neuroshard.runs.chosen_run import ChosenRun

SECRET = "a-secret-of-the-tests-that-is-long-enough"
PORT = 8000
HERE = {"Origin": f"http://127.0.0.1:{PORT}"}


@dataclass
class SetupApi:
    """A wizard that stores into a list."""

    folder: Path
    flags: dict[str, object] = field(default_factory=dict[str, object])
    stored: list[tuple[FirstSettings, bool]] = field(default_factory=list[tuple[FirstSettings, bool]])
    stopped: list[str] = field(default_factory=list[str])
    now: float = 1_000.0
    failure: StorageError | None = None
    port: int = PORT
    beats: float = 0.0
    is_given: bool = True  # the start names a run or data: the first question is not asked
    runs: list[ChosenRun | None] = field(default_factory=list["ChosenRun | None"])
    nearby: LanRuns = field(default_factory=LanRuns)  # those that the local network announces
    demos: int = 0
    app: FastAPI = field(init=False)

    def __post_init__(self) -> None:
        loaded = load_settings(self.flags, {}, self.folder)
        surroundings = SetupFacts(
            {"memory": 12_000, "cpu_threads": 6}, line_body(None, None), [], True, "desktop autostart entry"
        )
        purpose = "given" if self.is_given else None
        arrival = ArrivalDraft(self.text_in, self.folders_in, is_local=False, nearby=self.nearby, purpose=purpose)
        self.desk = SetupDraft(loaded, surroundings, arrival, self.finish, self.demo, clock=lambda: self.beats)
        self.app = create_setup_app(
            SetupContext(self.desk, SECRET, "127.0.0.1", self.port, self.stopped.append, lambda: self.now)
        )

    @contextmanager
    def served(self) -> Generator[str]:
        """Serve the wizard at `port`; the address that opens its page."""
        server = ApiServer(self.app, bind("127.0.0.1", self.port))
        server.start()
        try:
            key = SessionKeys(SECRET, self.port).new_entry_key(self.now, ENTRY_SECONDS)
            yield f"http://127.0.0.1:{self.port}/#{FRAGMENT}{key}"
        finally:
            server.stop()

    def finish(self, choices: SetupChoices) -> Finished:
        if self.failure is not None:
            raise self.failure
        self.stored.append((choices.first, choices.starts_with_computer))
        self.runs.append(choices.run)
        return Finished(f"http://localhost:{PORT}")

    def demo(self) -> Finished:
        if self.failure is not None:
            raise self.failure
        self.demos += 1
        return Finished(f"http://localhost:{PORT}")

    def folders_in(self, folder: Path) -> FolderListBody:
        return FolderListBody.model_validate(list_text_folders(folder))

    def text_in(self, folder: Path) -> TextFolder:
        return TextFolder(folder, 2, 200_000)

    def call(
        self, method: str, path: str, json: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}") as client:
                return await client.request(method, path, headers=headers, json=json)

        return anyio.run(request)

    def owner(self, method: str, path: str, json: object = None) -> httpx.Response:
        return self.call(method, path, json, {"Authorization": f"Bearer {SECRET}"})

    def faults(self, path: str, json: object) -> dict[str, str]:
        """What the node finds wrong, by field."""
        answer = self.owner("POST", path, json)
        assert answer.status_code == 422, answer.text
        return {item["location"]: item["message"] for item in answer.json()["errors"]}
