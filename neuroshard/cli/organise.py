"""`neuroshard organise`: admit nodes to a run, count them by stage, and keep the queue of those that wait."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import DataDir, LogJson, P2pPort, Peers, TokenFile, Verbose, given

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
