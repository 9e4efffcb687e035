"""`neuroshard doctor`: looks at everything a node needs and says what to do about what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from neuroshard.cli import doctor_looks, doctor_network
from neuroshard.cli.doctor_looks import Case, Finding
from neuroshard.cli.exit_codes import ExitCode
from neuroshard.cli.options import AsJson, DataDir, GenesisSource, Host, Port, given

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings


def doctor(
    data_dir: DataDir = None,
    port: Port = None,
    host: Host = None,
    genesis: GenesisSource = None,
    as_json: AsJson = False,
) -> None:
    """Check all that a node needs, from Python to its peers, and every setting. Exit code 1 when something is wrong.

    With a running node it tells what that node knows; without one, and without a network, it looks by itself.
    """
    import logging

    from neuroshard.config.loading import load_settings

    logging.getLogger("neuroshard").addHandler(logging.NullHandler())  # what goes wrong is told as a finding, once
    loaded = load_settings(given(data_dir=data_dir, port=port, host=host, genesis=genesis))
    case = Case(loaded, _status_of_running_node(loaded))
    findings = [_examined(name, look, case) for name, look in _LOOKS]
    if as_json:
        facts = {"findings": [asdict(finding) for finding in findings], "settings": loaded.describe()}
        typer.echo(json.dumps(facts))
    else:
        for finding in findings:
            typer.echo(f"{'ok ' if finding.is_well else 'BAD'} {finding.subject:9} {finding.detail}")
            if finding.action:
                typer.echo(f"              {finding.action}")
        typer.echo("\nsettings:")
        for key, facts in loaded.describe().items():
            if isinstance(facts, dict):
                typer.echo(f"    {key:28} {facts['value']!s:40} {facts['source']}")
    if not all(finding.is_well for finding in findings):
        raise typer.Exit(ExitCode.REFUSED)


def _status_of_running_node(loaded: LoadedSettings) -> Mapping[str, Any] | None:
    from neuroshard.cli.client import connect
    from neuroshard.errors import NeuroShardError

    try:
        return connect(loaded.settings.data_dir, None).get("/api/status")
    except NeuroShardError:
        return None  # no node, or none that answers: the look at the port tells


def _examined(name: str, look: Callable[[Case], Finding], case: Case) -> Finding:
    """What a look found; an error is a finding, too."""
    from neuroshard.errors import NeuroShardError

    try:
        return look(case)
    except NeuroShardError as error:
        return Finding(name, is_well=False, detail=error.message, action=error.action)
    except ImportError as error:
        return Finding(name, is_well=False, detail=f"cannot be looked at: {error}", action="Install NeuroShard anew.")


_LOOKS: tuple[tuple[str, Callable[[Case], Finding]], ...] = (
    ("python", doctor_looks.python),
    ("torch", doctor_looks.torch),
    ("device", doctor_looks.device),
    ("memory", doctor_looks.memory),
    ("disk", doctor_looks.disk),
    ("port", doctor_network.port),
    ("p2p port", doctor_network.p2p_port),
    ("nat", doctor_network.nat),
    ("peers", doctor_network.peers),
    ("autostart", doctor_looks.autostart),
    ("token", doctor_looks.token),
    ("data", doctor_looks.data),
    ("clock", doctor_network.clock),
)
