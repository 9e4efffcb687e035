"""Entry point of the `neuroshard` command. Imports nothing heavy: --help must answer at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, NoReturn

import typer

from neuroshard import __version__
from neuroshard.cli import (
    autostart,
    checkpoint,
    demo,
    doctor,
    folders,
    genesis,
    remote,
    run,
    seed,
    text,
    trainer,
    tray,
    update,
    wallet,
)
from neuroshard.cli.command_line import hide_token
from neuroshard.cli.exit_codes import exit_code, exit_codes_line, tell
from neuroshard.cli.failed_start import shown_at_a_desktop
from neuroshard.cli.help_texts import HELP_NAMES, command_of
from neuroshard.cli.options import (
    DataDir,
    DeviceOption,
    EndWithStdin,
    GenesisSource,
    Headless,
    Host,
    InnerSteps,
    LogJson,
    MaxStages,
    MaxStorage,
    MaxUpload,
    MemoryLimit,
    MonthlyQuota,
    NoLanDiscovery,
    NoNetwork,
    NoPortMapping,
    NoRelay,
    NoTraining,
    P2pHost,
    P2pPort,
    Peers,
    Port,
    RunId,
    SpareStages,
    Threads,
    Token,
    TokenFile,
    TrainWhen,
    Verbose,
    settings_given,
)
from neuroshard.errors import NeuroShardError, StorageError, UsageError

LONGEST_NAME = 300  # of a path that is told

app = typer.Typer(
    name="neuroshard",
    help="Train one language model together with other computers, at home.",
    epilog=f"Try `neuroshard demo`: it needs no token, no network and no data. {exit_codes_line()}",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_NAMES},
)
app.add_typer(wallet.app, name="wallet")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(genesis.app, name="genesis")
app.add_typer(run.app, name="run")
app.add_typer(update.app, name="update")
app.add_typer(autostart.app, name="autostart")
app.command("demo")(demo.demo)
app.command("seed")(seed.seed)
app.command("trainer")(trainer.trainer)
app.command("tray")(tray.tray)
app.command("doctor")(doctor.doctor)
app.command("folders")(folders.folders)
app.command("generate")(text.generate)
remote.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neuroshard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def node(
    context: typer.Context,
    token: Token = None,
    token_file: TokenFile = None,
    port: Port = None,
    host: Host = None,
    genesis_source: GenesisSource = None,
    data_dir: DataDir = None,
    run_id: RunId = None,
    peer: Peers = None,
    p2p_port: P2pPort = None,
    p2p_host: P2pHost = None,
    max_upload: MaxUpload = None,
    monthly_quota: MonthlyQuota = None,
    max_stages: MaxStages = None,
    spare_stages: SpareStages = None,
    no_network: NoNetwork = False,
    no_lan_discovery: NoLanDiscovery = False,
    no_port_mapping: NoPortMapping = False,
    no_relay: NoRelay = False,
    device: DeviceOption = None,
    memory: MemoryLimit = None,
    cpu_threads: Threads = None,
    max_storage: MaxStorage = None,
    inner_steps: InnerSteps = None,
    train_when: TrainWhen = None,
    no_training: NoTraining = False,
    headless: Headless = False,
    log_json: LogJson = False,
    verbose: Verbose = False,
    end_with_stdin: EndWithStdin = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run a node: derive the wallet from the token, load data, train, and show it at http://localhost:8000."""
    if context.invoked_subcommand is not None:
        _refuse_lost_options(context, context.invoked_subcommand)
        return
    # Every parameter but these two is a setting.
    flags = {name: value for name, value in context.params.items() if name not in {"version", "end_with_stdin"}}
    settings = settings_given(flags)
    with shown_at_a_desktop(settings, ends_with_stdin=end_with_stdin):
        code = _run_with(settings, ends_with_stdin=end_with_stdin)
    raise typer.Exit(code)


def _run_with(flags: Mapping[str, object], *, ends_with_stdin: bool) -> int:
    """Run a node with these flags; the exit code."""
    from neuroshard.config.loading import load_settings

    loaded = load_settings(flags, os.environ)
    from neuroshard.node.first_run import asks_first, run_first  # only now: mistakes are told before
    from neuroshard.node.launch import run_node

    if not asks_first(loaded, ends_with_stdin=ends_with_stdin):
        return run_node(loaded, ends_with_stdin=ends_with_stdin)
    ready = run_first(loaded, lambda: load_settings(flags, os.environ))
    return 0 if ready is None else run_node(ready.loaded, ends_with_stdin=ends_with_stdin, seat=ready.seat)


def _refuse_lost_options(context: typer.Context, command: str) -> None:
    """Options before a command belong to no command: a limit that is silently not obeyed would be a trap."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    lost = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if lost:
        option = next(item.opts[0] for item in context.command.params if item.name in lost)
        action = f"Put it after the command: neuroshard {command} {option} ..."
        raise UsageError(f"{option} stands before `{command}`, where nobody reads it.", action)


def main() -> None:
    """Run the command line and exit with the code that fits the outcome."""
    hide_token(sys.argv)
    try:
        command_of(app)(prog_name="neuroshard")
    except NeuroShardError as error:
        _end_with(error)
    except OSError as error:  # of a file or folder that somebody named; others are defects, and their trace helps
        if error.filename is None:
            raise
        named = str(error.filename)[:LONGEST_NAME]
        _end_with(
            StorageError(f"{named} cannot be used: {error.strerror or error}.", "Check the path and who owns it.")
        )


def _end_with(error: NeuroShardError) -> NoReturn:
    tell(error)
    sys.exit(exit_code(error))
