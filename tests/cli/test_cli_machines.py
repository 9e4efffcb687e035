"""The machines of a wallet in the terminal: one line for each, and an exit code for programs."""

from __future__ import annotations

from typing import Any

import pytest

from neuroshard.api.rendering import as_python
from neuroshard.cli import remote
from neuroshard.cli.remote import machine_line
from neuroshard.errors import NeuroShardError
from neuroshard.status.board import ListMachines, OrderMachines
from neuroshard.status.machines import MachineList
from tests.worlds.api import among
from tests.worlds.commands import Command
from tests.worlds.run_commands import machines_of


def answer_of(machines: MachineList) -> Any:
    return as_python(machines)


def test_each_machine_has_a_line_with_its_state() -> None:
    here, attic, absent = answer_of(machines_of(among(2), ListMachines()))["machines"]
    speed = "900 tokens/s, 0 tokens in 24 hours"
    assert machine_line(here) == f"KooWtest  training     laptop: {speed}, 0.0.1, this computer"
    assert machine_line(attic) == f"ooWattic  training     attic: {speed}, 0.0.1"
    assert "unreachable  cellar: last seen 19" in machine_line(absent)
    assert machine_line(absent).endswith(": training. No answer.")
    unknown = {**absent, "status": None, "seen_at": None}
    assert machine_line(unknown).split(maxsplit=1)[1] == "unreachable  No answer."


def test_a_machine_that_did_not_obey_gives_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    class Node:
        """Stands in for the running node."""

        def post(self, path: str) -> Any:
            asked.append(path)
            return answer_of(machines_of(among(2), OrderMachines("pause")))

        def get(self, path: str) -> Any:
            asked.append(path)
            return answer_of(machines_of(among(2), ListMachines()))

    monkeypatch.setattr("neuroshard.cli.client.connect", lambda *_, **__: Node())
    with pytest.raises(NeuroShardError, match="2 of 3 did it"):
        remote.pause(every_machine=True)
    with pytest.raises(NeuroShardError):
        remote.resume(every_machine=True, as_json=True)
    remote.machines()
    assert asked == ["/api/machines/pause", "/api/machines/resume", "/api/machines"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 1 + 3
    assert "It did not answer." in lines[2]


def test_a_pause_of_all_machines_has_no_end(neuroshard: Command) -> None:
    refused = neuroshard("pause", "--all", "--for", "60")
    assert refused.code == 2
    assert "--all and --for exclude each other" in refused.err
