"""The machines of a wallet in the terminal: one line for each, and a pause of all of them has no end."""

from __future__ import annotations

from typing import Any

from neuroshard.api.rendering import as_python
from neuroshard.cli.remote import machine_line
from neuroshard.status.board import ListMachines
from tests.worlds.commands import Command
from tests.worlds.run_commands import machines_of
from tests.worlds.statuses import among


def test_each_machine_has_a_line_with_its_state() -> None:
    answers: Any = as_python(machines_of(among(2), ListMachines()))
    here, attic, absent = answers["machines"]
    speed = "900 tokens/s, 0 tokens in 24 hours"
    assert machine_line(here) == f"KooWtest  training     laptop: {speed}, 0.0.1, this computer"
    assert machine_line(attic) == f"ooWattic  training     attic: {speed}, 0.0.1"
    assert "unreachable  cellar: last seen 19" in machine_line(absent)
    assert machine_line(absent).endswith(": training. No answer.")
    unknown = {**absent, "status": None, "seen_at": None}
    assert machine_line(unknown).split(maxsplit=1)[1] == "unreachable  No answer."


def test_a_pause_of_all_machines_has_no_end(neuroshard: Command) -> None:
    refused = neuroshard("pause", "--all", "--for", "60")
    assert refused.code == 2
    assert "--all and --for exclude each other" in refused.err
