"""Commands for a running node: `status`, `open`, `pause`, `resume`, `machines`, `stop`, `logs` and `token`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuroshard.cli.options import AsJson, DataDir, Port, node_folder
from neuroshard.errors import NeuroShardError, UsageError

if TYPE_CHECKING:
    from neuroshard.api.model_tokens import ModelTokens
    from neuroshard.cli.client import NodeClient


STOP_SECONDS = 120.0  # time for a final checkpoint on a slow disk, the same as for a service
NODE_DIGITS = 8  # at the end of a node id, for people

AllMachines = Annotated[bool, typer.Option("--all", help="Apply to all machines of your wallet that can be reached.")]
DemoNode = Annotated[bool, typer.Option("--demo", help="Use the node started by `neuroshard demo`.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the application."""
    for command in (status, pause, resume, machines, stop, logs):
        app.command(command.__name__)(command)
    app.command("open")(open_dashboard)
    app.add_typer(token_app, name="token")


def status(
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every second, until Ctrl+C.")] = False,
    every_value: Annotated[bool, typer.Option("--all", help="Show every value, with its meaning.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the running node, and the paths that it uses."""
    from neuroshard.cli.client import ReconnectingClient, connect
    from neuroshard.cli.client import watch as watch_status
    from neuroshard.cli.status_text import StatusText
    from neuroshard.status.snapshot import NodeStatus

    text = StatusText(NodeStatus)
    if watch:
        if as_json:
            raise UsageError(
                "--watch and --json exclude each other.", "A program can repeat `neuroshard status --json`."
            )
        # The paths never change, and a terminal has no space for them.
        watch_status(
            ReconnectingClient(lambda: connect(data_dir, port, demo=demo)),
            lambda answer: text.lines({**answer, "paths": {}}, every_value=every_value),
        )
        return
    answer = connect(data_dir, port, demo=demo).get("/api/status")
    if as_json:
        typer.echo(json.dumps(answer))
        return
    for line in text.lines(answer, every_value=every_value):
        typer.echo(line)


LONGEST_LINK = 10_000  # characters that are handed over; a longer text cannot be an invitation, and the page says so


def link_text(link: str) -> str:
    """The text of a link, or of an invitation file. Raises InvitationError if the file cannot be read."""
    from neuroshard.runs.invited_settings import text_of

    return text_of(link)[:LONGEST_LINK]


def show_link(data_dir: Path | None, text: str) -> bool:
    """Hand an opened invitation to the node or the wizard that runs, and open its page; False if none runs."""
    from neuroshard.cli.client import connect, entrance_of
    from neuroshard.config.instance_lock import read_lock_owner
    from neuroshard.host.desktop import open_browser_at

    if read_lock_owner(node_folder(data_dir, demo=False)) is None:
        return False
    client = connect(data_dir, None)
    client.post("/api/link", {"text": text})
    entrance = entrance_of(client)
    if not open_browser_at(entrance.page.as_uri()):
        typer.echo(f"Open this page to see the invitation: {entrance.page}")
    return True


def open_dashboard(
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    print_address: Annotated[
        bool, typer.Option("--print", help="Print the address instead, for a browser on another computer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Open the running node's dashboard, or its wizard, in the browser, with the key that it needs.

    The key works once, within ten minutes. The browser then keeps its session for a week.
    """
    from neuroshard.cli.client import connect, entrance_of
    from neuroshard.host.desktop import open_browser_at

    entrance = entrance_of(connect(data_dir, port, demo=demo))
    url = entrance.address.partition("#")[0]
    if as_json:
        typer.echo(json.dumps({"url": url, "address": entrance.address, "page": str(entrance.page)}))
    elif not print_address and open_browser_at(entrance.page.as_uri()):
        typer.echo(f"Your browser opens {url}. If it does not, add --print to this command.")
    else:
        typer.echo("Open this address in a browser within ten minutes. It works once:")
        typer.echo(entrance.address)
        typer.echo(f"A browser on this computer can also open the file {entrance.page}", err=True)


token_app = typer.Typer(help="Create, list and remove tokens for programs that use a node.", no_args_is_help=True)


@token_app.command("read")
def print_read_token(data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False) -> None:
    """Print a token for programs such as Prometheus. With it they can read from the node, but change nothing.

    Send it as `Authorization: Bearer TOKEN`. It is valid until the file api-secret in the data folder is deleted.
    """
    from neuroshard.api.access import SessionKeys
    from neuroshard.cli.client import read_secret

    token = SessionKeys(read_secret(node_folder(data_dir, demo=demo), demo=demo), port=0).read_token
    typer.echo(json.dumps({"token": token}) if as_json else token)


TokenName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token, such as that of its program.")]


@token_app.command("model")
def make_model_token(
    name: TokenName, data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False
) -> None:
    """Make a token for a program that uses the model, such as the openai client, and print it. It opens nothing else.

    The node need not run. It stores only a hash, so the token is printed this once. `token remove NAME` ends it.
    """
    token = _model_tokens(data_dir, demo=demo).add(name, time.time())
    typer.echo(json.dumps({"name": name.strip(), "token": token}) if as_json else token)


@token_app.command("list")
def list_model_tokens(data_dir: DataDir = None, demo: DemoNode = False, as_json: AsJson = False) -> None:
    """List the names of the tokens made with `token model`."""
    tokens = _model_tokens(data_dir, demo=demo).all()
    if as_json:
        typer.echo(json.dumps([{"name": one.name, "made_at": one.made_at} for one in tokens]))
        return
    for one in tokens:
        typer.echo(f"{time.strftime('%Y-%m-%d', time.localtime(one.made_at))}  {one.name}")


@token_app.command("remove")
def remove_model_token(name: TokenName, data_dir: DataDir = None, demo: DemoNode = False) -> None:
    """End a token made with `token model`. A running node refuses it from now on."""
    _model_tokens(data_dir, demo=demo).remove(name)
    typer.echo(f"The token {name.strip()} is removed.")


def _model_tokens(data_dir: Path | None, *, demo: bool) -> ModelTokens:
    from neuroshard.api.model_tokens import ModelTokens

    return ModelTokens(node_folder(data_dir, demo=demo))


def pause(
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    seconds: Annotated[
        float | None,
        typer.Option("--for", metavar="SECONDS", help="Resume automatically after this time, at most a week."),
    ] = None,
    every_machine: AllMachines = False,
    as_json: AsJson = False,
) -> None:
    """Pause training. Finished steps are kept; a pause of more than ten seconds repeats at most one unfinished step."""
    from neuroshard.cli.client import connect

    if seconds is not None:
        from neuroshard.api.requests import LONGEST_PAUSE_SECONDS

        if not 0 < seconds <= LONGEST_PAUSE_SECONDS:  # NaN is refused, too
            raise UsageError(
                f"A pause cannot last {seconds:g} seconds.",
                f"Give at most {LONGEST_PAUSE_SECONDS:.0f} (a week); without --for it lasts until `neuroshard resume`.",
            )
    if every_machine:
        if seconds is not None:
            raise UsageError(
                "--all and --for exclude each other.", "A pause of all machines lasts until `neuroshard resume --all`."
            )
        _print_machines(connect(data_dir, port, demo=demo).post("/api/machines/pause"), as_json=as_json)
        return
    body = {} if seconds is None else {"duration_seconds": seconds}
    _print_answer(connect(data_dir, port, demo=demo).post("/api/training/pause", body), as_json=as_json)


def resume(
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    every_machine: AllMachines = False,
    as_json: AsJson = False,
) -> None:
    """Resume training after a pause."""
    from neuroshard.cli.client import connect

    if every_machine:
        _print_machines(connect(data_dir, port, demo=demo).post("/api/machines/resume"), as_json=as_json)
        return
    _print_answer(connect(data_dir, port, demo=demo).post("/api/training/resume"), as_json=as_json)


def machines(data_dir: DataDir = None, port: Port = None, demo: DemoNode = False, as_json: AsJson = False) -> None:
    """List the nodes of your wallet. The running node asks those that it can reach."""
    from neuroshard.cli.client import connect

    _print_machines(connect(data_dir, port, demo=demo).get("/api/machines"), as_json=as_json)


def _print_machines(answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one line for each machine. Raises NeuroShardError if one of them did not carry out a command."""
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        for machine in answer["machines"]:
            typer.echo(machine_line(machine))
    if any(machine["has_obeyed"] is False for machine in answer["machines"]):
        raise NeuroShardError(answer["message"], "`neuroshard machines` shows their state.")


def machine_line(machine: Mapping[str, Any]) -> str:
    """Format a machine of the wallet as one line."""
    from neuroshard.cli.status_text import local_time

    status, node = machine["status"], machine["node_id"][-NODE_DIGITS:]
    if status is None:
        return f"{node}  {'unreachable':11}  {machine['message']}".rstrip()
    state = str(status["state"]).replace("_", " ")
    speed = f"{status['tokens_per_second']:,.0f} tokens/s, {status['tokens_in_a_day']:,} tokens in 24 hours"
    shown, facts = state, [speed, status["version"], *(["this computer"] if machine["is_here"] else [])]
    if not machine["is_reachable"]:
        shown, facts = "unreachable", [f"last seen {local_time(machine['seen_at'])}: {state}"]
    line = f"{node}  {shown:11}  {status['name']}: {', '.join(facts)}"
    return f"{line}. {machine['message']}" if machine["message"] else line


def stop(data_dir: DataDir = None, port: Port = None, demo: DemoNode = False, as_json: AsJson = False) -> None:
    """Stop the node after a final checkpoint."""
    from neuroshard.cli.client import connect

    end_node(connect(data_dir, port, demo=demo), None if as_json else typer.echo)
    _print_answer({"state": "stopped", "message": "Stopped."}, as_json=as_json)


def end_node(client: NodeClient, say: Callable[[str], None] | None = None) -> None:
    """Stop the node and wait until its process has ended. Raises NetworkRefusedError after STOP_SECONDS."""
    from neuroshard.errors import NetworkRefusedError

    message = client.post("/api/shutdown")["message"]
    if say is not None:
        say(message)
    deadline = time.monotonic() + STOP_SECONDS
    while client.answers():
        if time.monotonic() > deadline:
            raise NetworkRefusedError("The node still answers.", "Look at `neuroshard logs`.")
        time.sleep(0.1)
    while client.holds_folder():  # otherwise a start right after this command would find the folder locked
        if time.monotonic() > deadline:
            raise NetworkRefusedError("The process has not ended yet.", "Look at its log.")
        time.sleep(0.1)


def _print_answer(answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command: the node's message, or the whole response as one line of JSON."""
    typer.echo(json.dumps(answer) if as_json else answer["message"])


def logs(
    data_dir: DataDir = None,
    port: Port = None,
    demo: DemoNode = False,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines until Ctrl+C, also after a restart.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the newest log lines of the running node."""
    from neuroshard.cli.client import ReconnectingClient, connect, log_records

    if follow:
        node = ReconnectingClient(lambda: connect(data_dir, port, demo=demo))
        records: Iterable[Mapping[str, Any]] = log_records(node)
    else:
        records = connect(data_dir, port, demo=demo).get("/api/logs")["records"]
    for record in records:
        typer.echo(json.dumps(record) if as_json else log_line(record))


def log_line(record: Mapping[str, Any]) -> str:
    """Format a log record as text, in local time."""
    from neuroshard.cli.status_text import local_time

    return f"{local_time(record['time'])} {record['level']:7} {record['message']}"
