"""`neuroshard wallet`: make a wallet phrase, show the wallet of a token, back up an identity and restore it."""

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


app = typer.Typer(help="Create, show, back up and restore a wallet.", no_args_is_help=True)

TokenOption = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help="The token; NEUROSHARD_TOKEN is safer.")
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="File with the passphrase. (default: ask for it)"),
]


@app.command("new")
def new(
    words: Annotated[int, typer.Option(help="Length of the phrase: 12 or 24 words.")] = 12,
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


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
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
    file: Annotated[Path, typer.Argument(help="File that `wallet backup` wrote.")],
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
