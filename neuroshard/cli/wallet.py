"""`neuroshard wallet`: make a wallet phrase and show what a token stands for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, given

app = typer.Typer(help="Make or show a wallet.", no_args_is_help=True)


@app.command("new")
def new(
    words: Annotated[int, typer.Option(help="Length of the phrase: 12 or 24 words.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Print a new wallet phrase. It is stored nowhere: write it down."""
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
    typer.echo("they are the only way to this wallet, and nothing on this computer stores them.", err=True)
    typer.echo("Start with: NEUROSHARD_TOKEN='<the words>' neuroshard", err=True)


@app.command("show")
def show(
    token: Annotated[str | None, typer.Option(help="The token; NEUROSHARD_TOKEN is better.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the wallet of a token, and the node identity that this computer has in the data folder."""
    from neuroshard.config.loading import load_settings
    from neuroshard.identity import NodeKey
    from neuroshard.node.identity import wallet_of

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    wallet, kind, warnings = wallet_of(loaded)
    key = loaded.settings.paths.node_key
    facts = {
        "wallet_id": wallet.wallet_id,
        "public_key": wallet.public_key.hex(),
        "token_kind": kind,
        "node_id": NodeKey.load_or_create(key).node_id if key.exists() else None,  # showing makes no key
        "node_key": str(key),
    }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:12} {value or 'none yet: the first start makes it'}")
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
