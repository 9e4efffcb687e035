"""`neuroshard organise`: admit nodes to a run, count them by stage, and keep the queue of those that wait."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, LogJson, P2pPort, Peers, TokenFile, Verbose, given

if TYPE_CHECKING:
    from neuroshard.runs.offer import RunOffer

RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="FILE-OR-ID", help="The run: a signed file, or the id of a run known here."),
]
TokenText = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help="Token of the owner's wallet; NEUROSHARD_TOKEN is safer.")
]
WalletArgument = Annotated[str, typer.Argument(metavar="WALLET", help="All 32 digits of the wallet's id.")]
ListenOption = Annotated[
    str | None,
    typer.Option("--listen", metavar="HOST:PORT", help="Address that the organiser serves. (default: 127.0.0.1:8800)"),
]
PublicUrl = Annotated[
    str | None,
    typer.Option("--public-url", metavar="URL", help="https address of the proxy in front; the organiser prints it."),
]
CapacityFile = Annotated[
    Path | None,
    typer.Option(
        "--capacity",
        metavar="FILE",
        help="TOML file with the nodes wanted per stage. (default: 4, and 1,000 trainers)",
    ),
]
NoMonitor = Annotated[
    bool, typer.Option("--no-monitor", help="Do not observe the run: the page shows places and queue only.")
]

TrustProxy = Annotated[
    bool,
    typer.Option(
        "--trust-proxy",
        help="The proxy on this computer writes X-Forwarded-For itself: joiners behind it are checked from outside.",
    ),
]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def organise(
    context: typer.Context,
    run: RunOption = None,
    listen: ListenOption = None,
    public_url: PublicUrl = None,
    capacity: CapacityFile = None,
    peer: Peers = None,
    p2p_port: P2pPort = None,
    no_monitor: NoMonitor = False,
    trust_proxy: TrustProxy = False,
    data_dir: DataDir = None,
    log_json: LogJson = False,
    verbose: Verbose = False,
) -> None:
    """Admit nodes to a run with `admission = "admitted"`. It needs no token, no GPU and little memory.

    It counts the nodes of each stage and names a stage in every admission, with which a node begins.

    Its page shows the run: rounds and work that certificates prove, and losses that nodes report. A second process
    reads them as a member without parameters; it needs 300 MB of memory, and the address of a node: --peer, or that of
    the node that runs on this data folder. Joiners get this address, too, and those of nodes that joined.

    Its database and its key are in the folder `organiser` of the data folder. For nodes on other computers, put a proxy
    with https in front of it.
    """
    if context.invoked_subcommand is not None:
        return
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.organiser.service import (
        DEFAULT_LISTEN,
        Capacity,
        OrganiserOptions,
        checked_url,
        listen_address,
        read_capacity,
        run_organiser,
    )

    folder = resolve_data_dir(data_dir)
    host, port = listen_address(listen or DEFAULT_LISTEN)
    offer = _offer(run, folder)
    peers = tuple(peer or _own_addresses(offer, folder))
    options = OrganiserOptions(
        folder,
        host,
        port,
        None if public_url is None else checked_url(public_url),
        Capacity() if capacity is None else read_capacity(capacity),
        verbose,
        log_json,
        None if no_monitor else partial(_observer_command, peers, p2p_port or 0),
        peers,
        trust_proxy,
    )

    def announce(url: str) -> None:
        typer.echo(f"Organiser of run {offer.run_id}: {url}")

    raise typer.Exit(run_organiser(offer, options, announce))


def _own_addresses(offer: RunOffer, folder: Path) -> Sequence[str]:
    """Addresses of the node of this data folder, if it runs and serves the run."""
    from neuroshard.cli.invitations import node_status

    status = node_status(folder)
    is_of_run = status is not None and status.get("run") and status["run"]["run_id"] == offer.run_id
    return status["network"]["addresses"] if status is not None and is_of_run else ()


def _observer_command(peers: Sequence[str], p2p_port: int, place: Path) -> list[str]:
    """Command line of the process that observes the run in a folder for its organiser."""
    from neuroshard.config.folders import this_program
    from neuroshard.organiser.service import RUN_FILE

    given_peers = [part for address in peers for part in ("--peer", address)]
    options = ("--run", str(place / RUN_FILE), "--data-dir", str(place), "--p2p-port", str(p2p_port))
    return [*this_program(), "organise", "observe", *options, *given_peers]


@app.command("allow")
def allow(
    wallet: Annotated[
        str | None, typer.Argument(metavar="[WALLET]", help="All 32 digits of the wallet's id, or --anyone.")
    ] = None,
    anyone: Annotated[bool, typer.Option("--anyone", help="Drop the list: any wallet may join again.")] = False,
    run: RunOption = None,
    token: TokenText = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
) -> None:
    """Put a wallet on the list of a run, or drop the list. Without one any wallet may join; invited wallets always may.

    The owner's signed statement about each change is stored with the list.
    """
    from neuroshard.errors import UsageError

    if anyone == (wallet is not None):
        raise UsageError("Name either a wallet or --anyone.", "For example: neuroshard organise allow --anyone")
    _change(wallet, run, given(token=token, token_file=token_file, data_dir=data_dir), is_allowed=True)


@app.command("deny")
def deny(
    wallet: WalletArgument,
    run: RunOption = None,
    token: TokenText = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
) -> None:
    """Take a wallet off the list of a run. Its nodes keep their places; `revoke` ends these.

    After the last wallet the list is empty, and the run stays closed: only invited wallets may join.
    """
    _change(wallet, run, given(token=token, token_file=token_file, data_dir=data_dir), is_allowed=False)


@app.command("revoke")
def end_place(
    named: Annotated[str, typer.Argument(metavar="NODE|WALLET", help="A node id, or all 32 digits of a wallet's id.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="The reason, which members see.")] = "",
    run: RunOption = None,
    data_dir: DataDir = None,
) -> None:
    """End the place of a node, or those of a wallet, for ever. Members learn it within half an hour."""
    import time

    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.organiser.service import end_places

    folder = resolve_data_dir(data_dir)
    end_places(_offer(run, folder), folder, named, reason, time.time())
    typer.echo(f"{named} gets no admission any more. Members learn it when they refresh theirs.")


@app.command("set")
def set_value(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name of the run's file that may change: docs/RUNS.md.")
    ],
    value: Annotated[str, typer.Argument(metavar="VALUE", help='As in the file: 3e-4, linear, true or ["a", "b"].')],
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="STEP", min=0, help="First outer step of the change. (default: soon)"),
    ] = None,
    run: RunOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    token: TokenText = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Change a parameter of a live run, also of a run of friends. Only the owner's wallet can do this.

    The signed version reaches the members through the owner's node or organiser on this data folder: a running one
    sends it within seconds, a stopped one when it starts. A voting node hands it in with the next step, and it applies
    from the second outer step after that, or from STEP if that is later. All members then change at the same outer
    step; a member that is away changes when it comes back.

    Model, plan, data, admission and precisions never change.
    """
    import json

    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.runs.creation import Owner, differences, newest_offer, next_version, sign_version
    from neuroshard.runs.run_file import entry_of

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    folder = loaded.settings.data_dir
    owner = Owner(wallet_of(loaded)[0], folder)
    newest = newest_offer(owner, _offer(run, folder))
    entries = entry_of(name, value) | ({} if start is None else {"holds_from_outer_step": start})
    after = next_version(newest, entries)
    changes = differences(newest.parameters, after)
    if not as_json:
        typer.echo(f"Run {newest.parameters.name}, {newest.run_id[:16]}, version {after.version}:")
        for change in changes:
            typer.echo(f"  {change.name}: {change.old} -> {change.new}")
        first = after.holds_from_outer_step
        typer.echo(f"It applies from outer step {first:,}, or from the second one after its entry if that is later.")
    if not yes:
        typer.confirm("Sign it?", abort=True, err=True)
    choice = sign_version(owner, newest, after)
    _give_to_observer(choice.offer, folder)
    if as_json:
        changed = {change.name: [change.old, change.new] for change in changes}
        facts = {
            "run_id": newest.run_id,
            "version": after.version,
            "holds_from_outer_step": after.holds_from_outer_step,
        }
        typer.echo(json.dumps({**facts, "changed": changed}))
    else:
        typer.echo("Signed. Your running node or organiser sends it to the members; otherwise start one of them.")


def _give_to_observer(offer: RunOffer, folder: Path) -> None:
    """Store a version where the observer of an organiser on this data folder finds it, if there is one."""
    from neuroshard.organiser.observer_process import OBSERVER
    from neuroshard.runs.authority_key import ORGANISER_FOLDER
    from neuroshard.runs.stored_runs import JoinedRuns

    place = folder / ORGANISER_FOLDER / offer.run_id[:16] / OBSERVER
    if place.is_dir():
        JoinedRuns(place).keep(offer)


@app.command("observe", hidden=True)
def observe(
    run: Annotated[Path, typer.Option(metavar="FILE", help="The signed run.")],
    data_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder of the observer's node.")],
    peer: Peers = None,
    p2p_port: P2pPort = None,
) -> None:
    """Observe a run for an organiser, which starts this process: lines of JSON, until standard input ends."""
    from neuroshard.node.run_observer import observe_run
    from neuroshard.runs.stored_runs import read_offer_file

    raise typer.Exit(observe_run(read_offer_file(run), data_dir, peer or (), p2p_port or 0, os.environ))


def _change(wallet: str | None, run: str | None, flags: Mapping[str, object], *, is_allowed: bool) -> None:
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.organiser.service import change_allow_list

    loaded = load_settings(flags, os.environ)
    folder = loaded.settings.data_dir
    length = change_allow_list(_offer(run, folder), folder, wallet_of(loaded)[0], wallet, is_allowed=is_allowed)
    wallets = "1 wallet" if length == 1 else f"{length or 0:,} wallets"
    if length is None:
        typer.echo("The run has no list: any wallet may join.")
    else:
        typer.echo(f"The list has {wallets}." if length else "The list is empty: only invited wallets may join.")


def _offer(run: str | None, folder: Path) -> RunOffer:
    from neuroshard.errors import UsageError
    from neuroshard.runs.stored_runs import named_offer

    if run is None:
        raise UsageError("No run is named.", "Name it: --run FILE-OR-ID.")
    return named_offer(run, folder)
