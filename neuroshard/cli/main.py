"""Entry point of the `neuroshard` command. It imports nothing heavy: --help must answer at once.

It also hides the token from the process list, and sets the layout of the help texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from neuroshard import __version__
from neuroshard.cli import checkpoint, desktop, doctor, genesis, organise, remote, run, start, talk, update, wallet
from neuroshard.cli.failures import ExitCode, exit_code, exit_codes_line, print_error, show_failure_on_desktop
from neuroshard.cli.options import (
    Archive,
    CompileOption,
    DataDir,
    DeviceOption,
    EndWithStdin,
    GenesisSource,
    GpuShare,
    Headless,
    Host,
    InnerSteps,
    Invite,
    LogJson,
    MaxGpuMemory,
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
    OptimizerMemoryOption,
    OrganiserUrl,
    OwnText,
    P2pHost,
    P2pPort,
    Peers,
    Port,
    PublicName,
    RunId,
    SiteOption,
    SpareStages,
    Threads,
    Token,
    TokenFile,
    TrainWhen,
    Verbose,
    given,
    settings_given,
)
from neuroshard.errors import NeuroShardError, StorageError, UsageError

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings

_HIDDEN = "***"
_SECRET_OPTIONS = ("--token", "--invite")
_LINK_COMMAND = "link"


def redacted(arguments: Sequence[str]) -> list[str]:
    """Replace the values of --token and --invite in a command line by ***, so that others may see it."""
    shown: list[str] = []
    hide_next = False
    is_link = list(arguments[1:2]) == [_LINK_COMMAND]
    for argument in arguments:
        if hide_next or (is_link and argument not in {arguments[0], _LINK_COMMAND, "--", "--help", "-h"}):
            shown.append(_HIDDEN)
            hide_next = False
        elif argument in _SECRET_OPTIONS:
            shown.append(argument)
            hide_next = True
        elif argument.startswith(tuple(f"{option}=" for option in _SECRET_OPTIONS)):
            shown.append(f"{argument.partition('=')[0]}={_HIDDEN}")
        else:
            shown.append(argument)
    return shown


def hide_token(arguments: Sequence[str]) -> None:
    """Overwrite the visible command line of this process if it contains a token or an invitation."""
    shown = redacted(arguments)
    if shown != list(arguments):
        from setproctitle import setproctitle

        setproctitle(" ".join([Path(shown[0]).name, *shown[1:]]))


HELP_NAMES = ["-h", "--help"]


def command_of(app: typer.Typer) -> TyperCommand | TyperGroup:
    """Make the command of an application, with the layout of its help texts corrected."""
    command = typer.main.get_command(app)  # unlike get_group, it adds the options for shell completion
    assert isinstance(command, TyperCommand | TyperGroup)
    _put_in_order(command)
    return command


def _put_in_order(command: TyperCommand | TyperGroup) -> None:
    command.help = None if command.help is None else _wrapped(command.help)
    # A command creates its --help option at the first call of get_help_option and keeps it.
    for option in [*command.params, command.get_help_option(typer.Context(command, help_option_names=HELP_NAMES))]:
        if isinstance(option, TyperOption) and option.is_flag and option.metavar is None:
            option.metavar = ""  # otherwise help shows <bool>, and users type `--headless true`
    if isinstance(command, TyperGroup):
        for part in command.commands.values():
            if isinstance(part, TyperCommand | TyperGroup):
                _put_in_order(part)


def _wrapped(text: str) -> str:
    """Join each paragraph to one line: the terminal breaks it, not the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


LONGEST_NAME = 300  # limit of a path in an error message

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
app.add_typer(organise.app, name="organise")
app.add_typer(desktop.autostart_app, name="autostart")
app.command("demo")(start.demo)
app.command("seed")(start.seed)
app.command("trainer")(start.trainer)
app.command("tray")(desktop.tray)
app.command("doctor")(doctor.doctor)
app.command("folders")(desktop.folders)
app.command("generate")(talk.generate)
app.command("chat")(talk.chat)
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
    text: OwnText = None,
    data_dir: DataDir = None,
    run_id: RunId = None,
    invite: Invite = None,
    organiser: OrganiserUrl = None,
    public_name: PublicName = None,
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
    compile: CompileOption = None,
    optimizer_memory: OptimizerMemoryOption = None,
    max_gpu_memory: MaxGpuMemory = None,
    gpu_share: GpuShare = None,
    site: SiteOption = None,
    memory: MemoryLimit = None,
    cpu_threads: Threads = None,
    max_storage: MaxStorage = None,
    inner_steps: InnerSteps = None,
    archive: Archive = False,
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
    """Run a node: derive the wallet from the token, load data, train, and show progress at http://localhost:8000."""
    if context.invoked_subcommand is not None:
        _refuse_lost_options(context, context.invoked_subcommand)
        return
    # Every parameter except these two is a setting.
    flags = {name: value for name, value in context.params.items() if name not in {"version", "end_with_stdin"}}
    settings = settings_given(flags)
    with show_failure_on_desktop(settings, ends_with_stdin=end_with_stdin):
        code = _run_with(settings, ends_with_stdin=end_with_stdin)
    raise typer.Exit(code)


def _run_with(flags: Mapping[str, object], *, ends_with_stdin: bool, link: str | None = None) -> int:
    """Run a node with these flags, after the first-run set-up if it is needed. Returns the exit code.

    `link` is an invitation that was opened: a page shows it first.
    """
    from neuroshard.config.loading import load_settings

    loaded = load_settings(flags, os.environ)
    if (code := start.followed_as_rank(loaded)) is not None:
        return code
    from neuroshard.node.first_run import asks_first, run_first  # slow import: wrong settings are reported before it
    from neuroshard.node.launch import run_node

    def reload() -> LoadedSettings:
        return load_settings(flags, os.environ)

    if not asks_first(loaded, ends_with_stdin=ends_with_stdin):
        return run_node(loaded, ends_with_stdin=ends_with_stdin, reload=reload, link=link)
    ready = run_first(loaded, reload, link)
    if ready is None:
        return 0
    if ready.demo_folder is not None:
        return start.run_wizard_demo(ready.demo_folder, ready.handover)
    return run_node(ready.loaded, ends_with_stdin=ends_with_stdin, handover=ready.handover, reload=reload)


@app.command(_LINK_COMMAND)
def open_link(
    link: Annotated[str, typer.Argument(metavar="LINK|FILE", help="A neuroshard:// link, or an invitation file.")],
    data_dir: DataDir = None,
) -> None:
    """Show an invitation in the page of the running node, or in that of a new one. This joins nothing.

    Desktops run this command when somebody clicks a link.
    """
    flags = given(data_dir=data_dir)
    with show_failure_on_desktop(flags):
        text = remote.link_text(link)
        code = 0 if remote.show_link(data_dir, text) else _run_with(flags, ends_with_stdin=False, link=text)
    raise typer.Exit(code)


def _refuse_lost_options(context: typer.Context, command: str) -> None:
    """Raise UsageError for options before a command, which would be ignored silently, such as a limit."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    lost = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if lost:
        option = next(item.opts[0] for item in context.command.params if item.name in lost)
        action = f"Put it after the command: neuroshard {command} {option} ..."
        raise UsageError(f"{option} is before `{command}`, where it has no effect.", action)


def main() -> None:
    """Run the command line and exit with the code that fits the outcome."""
    hide_token(sys.argv)
    try:
        command_of(app)(prog_name="neuroshard")
    except NeuroShardError as error:
        _end_with(error)
    except OSError as error:  # one with a file name is the user's to repair; any other is a defect: show its traceback
        if error.filename is None:
            raise
        named = str(error.filename)[:LONGEST_NAME]
        _end_with(
            StorageError(f"{named} cannot be used: {error.strerror or error}.", "Check the path and who owns it.")
        )


def _end_with(error: NeuroShardError) -> NoReturn:
    print_error(error)
    code = exit_code(error)
    if code is ExitCode.RESTART:
        # A transfer with the lost rank may still be alive in a C++ thread of the process group. In a normal shutdown
        # this thread destroys the transfer, asks for Python's lock to do so, and Python ends the thread there. C++ then
        # aborts the process, and its exit code is another one. The state is saved, and the log is closed.
        with suppress(OSError):  # nobody reads the output any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
