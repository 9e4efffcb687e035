"""`neuroshard wallet`: make a wallet phrase, show a token's wallet, revoke a node, back up and restore an identity."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, TokenFile, given

if TYPE_CHECKING:
    from neuroshard.identity.backup import Identity
    from neuroshard.types import NodeId

LEAST_DIGITS = 6  # at the end of a node id: the dashboard shows 6, and `neuroshard machines` 8

app = typer.Typer(help="Create, show, back up and restore a wallet, and revoke its nodes.", no_args_is_help=True)

TokenOption = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help="The token; NEUROSHARD_TOKEN is safer.")
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="File with the passphrase. (default: ask for it)"),
]


@app.command("new")
def new(
    words: Annotated[int, typer.Option(metavar="N", help="Length of the phrase: 12 or 24 words.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Print a new wallet phrase. It is not stored anywhere: write it down."""
    from neuroshard.errors import UsageError
    from neuroshard.identity import Wallet, new_phrase, parse_token

    if words not in (12, 24):
        raise UsageError(f"A wallet phrase has 12 or 24 words, not {words}.", "Use --words 12 or --words 24.")
    phrase = new_phrase(words)
    wallet = Wallet.from_secret(parse_token(phrase))
    if as_json:
        typer.echo(json.dumps({"phrase": phrase, "wallet_id": wallet.wallet_id}))
        return
    typer.echo(phrase)
    typer.echo(f"\nWallet {wallet.wallet_id}. Write the words down and keep them secret:", err=True)
    typer.echo("they are the only key to this wallet, and this computer does not store them.", err=True)
    typer.echo("Start with: NEUROSHARD_TOKEN='<the words>' neuroshard", err=True)


@app.command("show")
def show_wallet(
    token: TokenOption = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the wallet of a token, and the identity of the node in the data folder."""
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.identity import NodeKey

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    wallet, kind, warnings = wallet_of(loaded)
    key = loaded.settings.paths.node_key
    facts = {
        "wallet_id": wallet.wallet_id,
        "public_key": wallet.public_key.hex(),
        "token_kind": kind,
        "node_id": NodeKey.load_or_create(key).node_id if key.exists() else None,  # `show` must not create a key
        "node_key": str(key),
    }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:12} {value or 'none yet: the first start creates it'}")
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)


@app.command("revoke")
def revoke_node(
    node: Annotated[
        str,
        typer.Argument(metavar="NODE", help="A node from `neuroshard machines`: its last digits, or the whole id."),
    ],
    token: TokenOption = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a node of your wallet permanently. Use this when a computer or its node key was stolen.

    All nodes of your runs then refuse it: it joins nothing, gets no data, and its contributions and votes do not count.
    Another node of your wallet takes over its right to vote. A computer that you find again can take part with a new
    node key.

    This does not protect your token. If the thief has it, too, your wallet is lost: create a new one.
    """
    from neuroshard.cli.invitations import node_status
    from neuroshard.config.loading import load_settings
    from neuroshard.errors import UsageError
    from neuroshard.host.identity import StoredRevocations, wallet_of
    from neuroshard.identity import NodeKey

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    wallet, folder, key = wallet_of(loaded)[0], loaded.settings.data_dir, loaded.settings.paths.node_key
    status = node_status(folder)
    revoked = _named_node(folder, node, is_running=status is not None)
    if key.exists() and NodeKey.load_or_create(key).node_id == revoked:
        raise UsageError(
            "This is the node of this computer.",
            f"If its key was copied: stop the node, move {key} away, start again, and repeat this command.",
        )
    if status is not None and status["wallet_id"] != wallet.wallet_id:
        raise UsageError(
            f"The token is that of wallet {wallet.wallet_id[:8]}, and your node uses {status['wallet_id'][:8]}.",
            "Use the token of the wallet that the node was stolen from, and the data folder of one of its nodes.",
        )
    is_new = StoredRevocations(folder).revoke(wallet, revoked)
    if as_json:
        typer.echo(json.dumps({"node_id": revoked, "wallet_id": wallet.wallet_id, "is_new": is_new}))
        return
    when = "Others are informed within a minute." if status else "Others are informed when your node runs."
    typer.echo(f"Node {revoked} may not act for wallet {wallet.wallet_id[:8]} any more. {when}")
    typer.echo(
        "If the token was stored on that computer, for example by the wizard, this does not help: a thief with the "
        "token acts as your wallet. Create a new one with `neuroshard wallet new`, and ask the owner of each run to "
        f"end the old one: neuroshard run remove {wallet.wallet_id}"
    )


def _named_node(folder: Path, named: str, *, is_running: bool) -> NodeId:
    """The node with this id, or the one in the list of machines whose id ends so. Raises UsageError."""
    from neuroshard.cli.client import connect
    from neuroshard.errors import UsageError
    from neuroshard.identity import public_key_of
    from neuroshard.node.own_machines import stored_machines
    from neuroshard.types import NodeId

    try:
        public_key_of(named)
    except ValueError:
        end = named.rpartition("…")[2]  # as the dashboard shortens an id
        known = [one.node_id for one in stored_machines(folder)]
        if is_running:
            known += [one["node_id"] for one in connect(folder, None).get("/api/machines")["machines"]]
        found = {node for node in known if len(end) >= LEAST_DIGITS and node.endswith(end)}
        if len(found) == 1:
            return NodeId(found.pop())
        problem = "Several nodes of your wallet end" if found else "No node of your wallet that is known here ends"
        raise UsageError(
            f"{problem} with {named!r}.",
            "`neuroshard machines` lists them while your node runs; give at least 6 digits, or the whole id.",
        ) from None
    return NodeId(named)


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; it must not exist.")],
    passphrase_file: PassphraseFile = None,
    token: TokenOption = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Write the wallet's token and this computer's node key to a file encrypted with a passphrase."""
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import back_up

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    identity = back_up(loaded, file, lambda: _passphrase(passphrase_file, is_new=True))
    sentence = f"{file} holds wallet {identity.wallet_id}{_and_key(identity)}. Keep it apart from its passphrase."
    _print_identity(identity, sentence, as_json=as_json)


@app.command("restore")
def restore_wallet(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `wallet backup` wrote.")],
    passphrase_file: PassphraseFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Restore an identity from a backup into the data folder. Another identity there is never overwritten."""
    from neuroshard.config.instance_lock import read_lock_owner
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.errors import UsageError
    from neuroshard.host.identity import restore_identity

    folder = resolve_data_dir(data_dir)
    if read_lock_owner(folder) is not None:
        raise UsageError("A node is running on this data folder.", "Stop it first: `neuroshard stop`.")
    identity = restore_identity(file, lambda: _passphrase(passphrase_file, is_new=False), folder)
    sentence = f"{folder} has wallet {identity.wallet_id}{_and_key(identity)}: start with `neuroshard`."
    _print_identity(identity, sentence, as_json=as_json)


def _passphrase(file: Path | None, *, is_new: bool) -> str:
    """Read the passphrase from a file, or from the terminal without echo. Raises TokenError without either."""
    from neuroshard.config.loading import read_token_file
    from neuroshard.errors import TokenError

    if file is None and not sys.stdin.isatty():
        raise TokenError(
            "There is no terminal to ask for the passphrase.", "Use a file that contains it: --passphrase-file FILE."
        )
    if file is None:
        return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new, err=True))
    try:
        return read_token_file(file)[0].get_secret_value()
    except TokenError as error:
        raise TokenError(error.message.replace("token file", "passphrase file"), "Check the file.") from error


def _print_identity(identity: Identity, sentence: str, *, as_json: bool) -> None:
    facts = {"wallet_id": identity.wallet_id, "has_node_key": identity.node_key is not None}
    typer.echo(json.dumps(facts) if as_json else sentence)


def _and_key(identity: Identity) -> str:
    return "" if identity.node_key is None else " and the node's key"
