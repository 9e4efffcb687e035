"""`neuroshard run`: create a run that others can join, sign later versions, show it, make it a data set's default."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from neuroshard.cli import committee, invitations, run_plan
from neuroshard.cli.genesis import build_from_folder, summary_of_built
from neuroshard.cli.options import AsJson, DataDir, GenesisSource, TokenFile, given

if TYPE_CHECKING:
    from neuroshard.config.run_parameters import RunParameters
    from neuroshard.runs.creation import Owner
    from neuroshard.runs.offer import OfferChoice, RunOffer
    from neuroshard.runs.run_file import RunConfig


app = typer.Typer(help="Create a run, invite friends to it, and manage it.", no_args_is_help=True)
invitations.add_to(app)
app.command("plan")(run_plan.plan)
app.command("refound")(committee.refound)
app.command("trust")(committee.trust)
app.command("branch")(committee.branch)
app.command("rollback")(committee.roll_run_back)


@app.command("create")
def create(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="run.toml or run.yaml: the parameters of the run.")
    ],
    genesis: GenesisSource = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FOLDER", help="First make the data set, in --genesis, from these text files."),
    ] = None,
    num_stages: Annotated[
        int | None, typer.Option(metavar="S", help="Cut the model into S parts. (default: as in the file)")
    ] = None,
    inner_optimizer: Annotated[
        str | None, typer.Option(metavar="adamw|muon", help="Optimizer of the inner steps. (default: as in the file)")
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(metavar="FILE-OR-ID", help="Sign a higher version of this run; --config names only the changes."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The signed file to write. (default: run-<id>.json, or --update's)"),
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token of the owner's wallet; NEUROSHARD_TOKEN is safer.")
    ] = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Sign the parameters of a run with your wallet, store them for your nodes, and print the command to join it."""
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.runs.creation import Owner, update_run, write_offer
    from neuroshard.runs.run_file import read_run_config
    from neuroshard.runs.stored_runs import named_offer

    if text is not None:
        genesis = genesis or "genesis"
        _check_text(genesis, update)
    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir, genesis=genesis), os.environ)
    source, owner = loaded.settings.genesis, Owner(wallet_of(loaded)[0], loaded.settings.data_dir)
    changes: RunConfig = {"num_stages": num_stages, "inner_optimizer": inner_optimizer}
    entries = {**read_run_config(config), **{name: value for name, value in changes.items() if value is not None}}
    if update is not None:
        offer = named_offer(update, owner.data_dir)
        file = out or (Path(update) if Path(update).is_file() else _file_of(offer))
        _check_file(file, offer)
        choice = update_run(owner, offer, entries)
    else:
        if out is not None:
            _check_file(out)  # before anything is signed
        choice = _new_run(owner, entries, source, text)
        file = out or _file_of(choice.offer)
        _check_file(file, choice.offer)
    write_offer(choice.offer, file)
    _print_made(choice, file, owner, source, str(data_dir) if data_dir else None, as_json=as_json)


@app.command("show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="FILE-OR-ID", help="A signed file, or the id of a run known here.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Verify a run and print its owner, version and parameters. Exit code 6 if it differs from the signed run."""
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.runs.offer import changed_fields
    from neuroshard.runs.stored_runs import named_offer

    offer = named_offer(run, resolve_data_dir(data_dir))
    changed = changed_fields(offer.initial.parameters, offer.parameters)
    if as_json:
        facts = {"run_id": offer.run_id, "owner_wallet_id": offer.owner, "verified": True, "changed": changed}
        owner_key, version = offer.initial.owner_public_key.hex(), offer.parameters.version
        both = {"parameters": asdict(offer.parameters), "initial": asdict(offer.initial.parameters)}
        versions = [{"version": each.version, "from_outer_step": start} for start, each in _holding(offer)]
        typer.echo(
            json.dumps({**facts, "owner_public_key": owner_key, "version": version, "versions": versions, **both})
        )
        return
    typer.echo(f"run id     {offer.run_id}")
    typer.echo(f"owner      wallet {offer.owner}, key {offer.initial.owner_public_key.hex()}")
    for start, holding in reversed(_holding(offer)):
        name = "version" if holding is offer.parameters else "before"
        typer.echo(f"{name:10} {holding.version}, from outer step {start}")
    typer.echo("verified   the id matches the first version, and the owner signed every version shown here\n")
    initial = _flat(asdict(offer.initial.parameters))
    for name, value in _flat(asdict(offer.parameters)).items():
        was = f"   (first: {initial[name]})" if name in changed else ""
        typer.echo(f"{name:34} {value}{was}")


@app.command("publish")
def publish(
    run: Annotated[str, typer.Argument(metavar="FILE-OR-ID", help="A signed file, or the id of a run known here.")],
    genesis: Annotated[Path, typer.Option(metavar="FOLDER", help="The Genesis folder of the run, which you signed.")],
    seed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MULTIADDR", help="A node to connect to first. Can be repeated. (default: those of the run)"
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token of the wallet that signed the data; NEUROSHARD_TOKEN is safer."),
    ] = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a run the default of its data set, which nodes without --run join.

    The command writes a signed run.json next to the manifest.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.runs.default_run import publish_run
    from neuroshard.runs.stored_runs import named_offer

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    wallet = wallet_of(loaded)[0]
    done = publish_run(wallet, named_offer(run, loaded.settings.data_dir), genesis, seed or ())
    if as_json:
        replaced = None if done.replaced is None else done.replaced.run_id
        facts = {"run_id": done.run.run_id, "seeds": done.run.seeds, "file": str(done.file), "replaced": replaced}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"{done.file}: run {done.run.run_id} is now the default run of these data.")
    if done.replaced is not None:
        typer.echo(f"The previous default was run {done.replaced.run_id}.")
    for address in done.run.seeds:
        typer.echo(f"Seed: {address}")
    if not done.run.seeds:
        typer.echo("No seed is named, so only nodes on its local network will find it: add --seed.")


def _check_text(genesis: str, update: str | None) -> None:
    """Raise UsageError for options that --text excludes."""
    from neuroshard.errors import UsageError

    if update is not None:
        raise UsageError("--text and --update exclude each other.", "A run keeps its data set: leave --text out.")
    if "://" in genesis:
        raise UsageError(f"--text cannot write to {genesis}.", "Name a folder with --genesis, or leave it out.")


def _new_run(owner: Owner, entries: RunConfig, source: str | None, text: Path | None) -> OfferChoice:
    """Sign a new run, and first make its data if they are to be made. Standard output is left to the run."""
    from neuroshard.dataset import BuildOptions
    from neuroshard.errors import UsageError
    from neuroshard.runs.creation import create_run
    from neuroshard.runs.run_file import model_warnings

    if source is None:
        raise UsageError("A run needs training data.", "Name them: --genesis PLACE, or --text FOLDER.")
    for warning in model_warnings(entries):  # while nothing is signed yet
        typer.echo(f"Warning: {warning}", err=True)
    if text is not None:
        built = build_from_folder(text, Path(source), owner.wallet, BuildOptions())
        typer.echo(summary_of_built(built, owner.wallet), err=True)
    return create_run(owner, entries, source)


def _file_of(offer: RunOffer) -> Path:
    return Path(f"run-{offer.run_id[:16]}.json")


def _check_file(file: Path, offer: RunOffer | None = None) -> None:
    """Raise UsageError if writing would overwrite anything other than a run; with an offer, other than that run."""
    from neuroshard.errors import DataError, UsageError
    from neuroshard.runs.stored_runs import read_offer_file

    if not file.exists():
        return
    try:
        found = read_offer_file(file).run_id
    except DataError:
        found = None
    if found is None or (offer is not None and found != offer.run_id):
        holds = "is not the file of a run" if found is None else f"holds the run {found[:16]}"
        raise UsageError(f"{file} {holds} and is not overwritten.", "Name another file with --out.")


def _print_made(
    choice: OfferChoice, file: Path, owner: Owner, source: str | None, data_dir: str | None, *, as_json: bool
) -> None:
    from neuroshard.runs.run_file import recipe_warnings

    offer = choice.offer
    seeds, warnings = offer.parameters.seeds, recipe_warnings(offer.parameters.outer)
    admission, folder = offer.parameters.admission, ["--data-dir", data_dir] if data_dir else []
    is_local = source is not None and not source.startswith(("https://", "http://"))
    data = ["--genesis", source] if source else []
    here = ["neuroshard", "--run", offer.run_id, *folder, *data]
    organise = ["neuroshard", "organise", "--run", offer.run_id, *folder] if admission == "admitted" else []
    place = ["--organiser", "URL"] if organise else ["--peer", seeds[0] if seeds else "ADDR"]
    found = ["--invite", "LINK"] if admission == "friends" else ["--run", offer.run_id, *place]
    join = ["neuroshard", *found, *([] if is_local else data)]
    if as_json:
        facts: dict[str, Any] = {"run_id": offer.run_id, "version": offer.parameters.version, "file": str(file)}
        facts |= {"is_new": choice.is_new, "reason": choice.reason, "warnings": warnings}
        commands = {"serve": here, "organise": organise, "join": join}
        typer.echo(json.dumps(facts | {name: shlex.join(words) for name, words in commands.items() if words}))
        return
    verb = "Signed" if choice.is_new else "Known already"
    typer.echo(f"{verb}: run {offer.run_id}, version {offer.parameters.version}, of wallet {owner.wallet.wallet_id}.")
    if choice.reason:
        typer.echo(choice.reason)
    for warning in warnings:
        typer.echo(f"Warning: {warning}")
    if choice.is_new and len(_holding(offer)) > 1:
        (_, before), (start, _) = _holding(offer)[-2:]
        typer.echo(f"It applies from outer step {start}, or from the second one after its entry in the chain if that")
        typer.echo(f"is later, at all nodes together. Until then version {before.version} applies.")
    typer.echo(f"Signed file: {file}\n")
    typer.echo(f"Start it here:  {shlex.join(here)}")
    if organise:
        typer.echo(f"Organise it:    {shlex.join(organise)}")
    typer.echo(f"Others join:    {shlex.join(join)}")
    if admission == "friends":
        typer.echo("LINK is an invitation: `neuroshard run invite` makes one for each friend while your node runs.")
    elif not seeds and not organise:
        typer.echo("ADDR is the address of a node of the run: `neuroshard status` shows it while your node runs.")
    if organise:
        typer.echo("URL is the address of your organiser, as other computers see it.")
    if is_local:
        typer.echo("Other computers get the data from your node.")


def _holding(offer: RunOffer) -> list[tuple[int, RunParameters]]:
    """The versions that apply at some outer step, each with its first outer step, in order."""
    starts = {signed.parameters.holds_from_outer_step for signed in offer.versions}
    return [(start, offer.parameters_at(start)) for start in sorted(starts)]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested values: {"outer": {"momentum": 0.9}} becomes {"outer.momentum": "0.9"}."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
            flat[f"{prefix}{name}"] = " ".join(map(str, items))
    return flat
