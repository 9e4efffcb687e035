"""`neuroshard run invite`, `run revoke`, `run remove` and `run members`: the wallets that take part in a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuroshard.cli.options import AsJson, DataDir, GenesisSource, OrganiserUrl, Peers, TokenFile, given
from neuroshard.types import DAY_SECONDS

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings
    from neuroshard.identity import Wallet
    from neuroshard.identity.invitations import Invitation
    from neuroshard.runs.foundations import StoredFoundations
    from neuroshard.runs.offer import RunOffer


RunName = Annotated[
    str | None,
    typer.Option("--run", metavar="FILE-OR-ID", help="The run. (default: that of the running node, or the only one)"),
]
OwnerToken = Annotated[
    str | None, typer.Option("--token", metavar="TOKEN", help="Your wallet's token; NEUROSHARD_TOKEN is safer.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands to those of `neuroshard run`."""
    app.command("invite")(invite_friend)
    app.command("revoke")(revoke)
    app.command("remove")(remove)
    app.command("members")(members)


def invite_friend(
    run: RunName = None,
    uses: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Number of wallets that can join.")] = 1,
    days: Annotated[float, typer.Option(min=0.01, max=3650, metavar="D", help="Days until it expires.")] = 7,
    label: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Name of the invitation, as `run members` shows it.")
    ] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the link to this file.")] = None,
    qr: Annotated[
        Path | None, typer.Option("--qr", metavar="FILE", help="Also write a QR code of the link to this SVG file.")
    ] = None,
    may_invite: Annotated[bool, typer.Option("--may-invite", help="Let invited wallets invite others.")] = False,
    peer: Peers = None,
    genesis: GenesisSource = None,
    organiser: OrganiserUrl = None,
    token: OwnerToken = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make an invitation to a closed or organised run and print its link. Anyone with it can join until it expires."""
    from neuroshard.config.loading import load_settings
    from neuroshard.errors import UsageError
    from neuroshard.host.identity import wallet_of
    from neuroshard.identity.invitations import LINK, InvitationTerms, date_of, to_code
    from neuroshard.node.invited_tip import verified_tip
    from neuroshard.runs.admission_keeper import organiser_to_name
    from neuroshard.runs.invitation_making import invited_places, qr_svg
    from neuroshard.runs.stored_passes import StoredPasses
    from neuroshard.runs.stored_runs import named_offer

    flags = given(token=token, token_file=token_file, data_dir=data_dir, genesis=genesis, peer=peer or None)
    loaded = load_settings(flags | given(organiser=organiser), os.environ)
    wallet, folder = wallet_of(loaded)[0], loaded.settings.data_dir
    status = node_status(folder)
    offer = named_offer(run or only_run(folder, status), folder)
    if offer.parameters.admission == "strangers":
        raise UsageError("Any node may join this run: it needs no invitations.", "Give others the run id and a peer.")
    stored = StoredPasses(folder, offer)
    label = label or f"invitation {len(stored.issued().issued) + 1}"
    tip = verified_tip(folder, offer, wallet.wallet_id)
    terms = InvitationTerms(time.time() + days * DAY_SECONDS, uses, label, may_invite, tip)
    peers, organiser_url = _peers(loaded, status, offer), organiser_to_name(loaded.settings, offer)
    places = invited_places(offer.parameters, peers, loaded.settings.genesis, organiser_url)
    made = stored.issue(wallet, terms, places)
    link = LINK + to_code(made)
    if file is not None:
        _write(file, f"{link}\n".encode())
    if qr is not None:
        _write(qr, qr_svg(link))
    if as_json:
        facts: dict[str, Any] = {"run_id": offer.run_id, "label": made.label, "uses": uses, "link": link}
        facts |= {"not_after": int(terms.not_after), "peers": made.peers, "data": made.data}
        typer.echo(json.dumps(facts | {"organiser": made.organiser}))
        return
    what = f"Invitation {made.label!r} to run {offer.parameters.name}: for {uses} wallet{'s' * (uses > 1)}"
    typer.echo(f"{what}, until {date_of(terms.not_after)}. Send it privately: anyone with it can join.")
    typer.echo(link)
    _print_hints(made, is_organised=offer.parameters.admission == "admitted")


def revoke(
    label: Annotated[
        str, typer.Argument(metavar="LABEL", help="Label of the invitation, or the first 8 digits of its key.")
    ],
    run: RunName = None,
    token: OwnerToken = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
) -> None:
    """End an invitation, and the membership of the wallets that joined with it. Only the run's owner can do this."""
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.runs.stored_passes import StoredPasses
    from neuroshard.runs.stored_runs import named_offer

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    wallet, folder = wallet_of(loaded)[0], loaded.settings.data_dir
    status = node_status(folder)
    offer = named_offer(run or only_run(folder, status), folder)
    revoked = StoredPasses(folder, offer).revoke(wallet, label)
    typer.echo(f"Invitation {revoked!r} is revoked. {_when_learned(status)}")


def remove(
    member: Annotated[
        str, typer.Argument(metavar="WALLET", help="A wallet from `run members`, or its first 8 digits.")
    ],
    run: RunName = None,
    token: OwnerToken = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
) -> None:
    """End the membership of one wallet for good, and its vote. Only the run's owner can do this.

    The other voting nodes remove its seat in the next steps. If too few of them are left, use `run refound`. In a run
    that is open to strangers, this also revokes `run trust` for the wallet.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.host.identity import wallet_of
    from neuroshard.runs.foundations import StoredFoundations
    from neuroshard.runs.stored_passes import StoredPasses
    from neuroshard.runs.stored_runs import named_offer

    loaded = load_settings(given(token=token, token_file=token_file, data_dir=data_dir), os.environ)
    wallet, folder = wallet_of(loaded)[0], loaded.settings.data_dir
    status = node_status(folder)
    offer = named_offer(run or only_run(folder, status), folder)
    foundations = StoredFoundations(folder)
    if offer.parameters.admission != "friends":
        typer.echo(name_voter(foundations, offer, wallet, member, withdraw=True))
        return
    removed, is_revoked = StoredPasses(folder, offer).remove(wallet, member)
    if removed.statement.wallet in foundations.read(offer).deputies:
        foundations.withdraw_deputies(offer, wallet, [removed.statement.wallet])
    typer.echo(f"Wallet {removed.wallet_id} is no longer a member. {_when_learned(status)}")
    if not is_revoked:
        typer.echo(
            f"Others joined with its invitation {removed.label!r}, too. While that is valid and not used up, its link "
            "admits new wallets: `neuroshard run revoke` ends it, and the membership of all who joined with it."
        )


def name_voter(stored: StoredFoundations, offer: RunOffer, owner: Wallet, member: str, *, withdraw: bool) -> str:
    """Name a wallet of a run that is open to strangers, or take the name back. Returns a sentence about it."""
    if withdraw:
        wallet = stored.withdraw_voter(offer, owner, member)
        return f"Wallet {wallet} is no longer named. Its seat ends when other named wallets can replace it."
    names = ", ".join(wallet[:8] for wallet in stored.name_voter(offer, owner, member))
    run = offer.parameters.name
    return (
        f"Wallets that may vote on run {run}, in addition to yours: {names}. They get seats when they have worked for "
        "30 minutes, the first three together. Nodes that are online learn it within seconds."
    )


def _when_learned(status: dict[str, Any] | None) -> str:
    return (
        "Other members are informed within a minute." if status else "Other members are informed when your node runs."
    )


def members(run: RunName = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the members of a run: labels, deputies, the wallets that vote, and those that are online.

    For a run of friends, the list ends with the invitations of this computer that have places left. For a run open to
    strangers, the list contains the owner and the wallets named with `run trust`.
    """
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.identity.invitations import date_of
    from neuroshard.identity.wallet import wallet_id_of
    from neuroshard.runs.foundations import StoredFoundations
    from neuroshard.runs.stored_passes import KEY_DIGITS, StoredPasses
    from neuroshard.runs.stored_runs import named_offer

    folder = resolve_data_dir(data_dir)
    status = node_status(folder)
    offer = named_offer(run or only_run(folder, status), folder)
    stored = StoredPasses(folder, offer)
    online, seats = _online(folder, status), _seats(folder, status, offer.run_id)
    foundations = StoredFoundations(folder).read(offer)
    deputies = {wallet_id_of(key) for key in foundations.deputies}
    named = {offer.owner: "owner", **dict.fromkeys(foundations.trusted, "named")}
    rows: list[dict[str, Any]] = [
        {"wallet_id": wallet, "label": label, "key": "", "online": wallet in online} for wallet, label in named.items()
    ]
    for known in stored.register().passes():
        key = known.grants[0].invitation.hex()[:KEY_DIGITS]
        is_online = known.wallet_id in online
        rows.append({"wallet_id": known.wallet_id, "label": known.label, "key": key, "online": is_online})
    for row in rows:
        votes = None if seats is None else [stage for stage, wallet in seats if wallet == row["wallet_id"]]
        row |= {"is_deputy": row["wallet_id"] in deputies, "seats": votes}
    left = [one for one in stored.invitations(time.time()) if one.state == "valid" and one.left]
    if as_json:
        invitations = [
            {"label": one.issued.label, "uses": one.issued.uses, "left": one.left, "not_after": one.issued.not_after}
            for one in left
        ]
        typer.echo(json.dumps({"run_id": offer.run_id, "members": rows, "invitations": invitations}))
        return
    for row in rows:
        seen = ("online" if row["online"] else "offline") if status else "unknown: your node is not running"
        roles = ", ".join([*(["deputy"] if row["is_deputy"] else []), *(["votes"] if row["seats"] else [])])
        line = f"wallet {row['wallet_id']}  {seen:8} {row['key']:8}  {roles:14}  {row['label']}"
        typer.echo(line)
    for one in left:
        places, until = f"{one.left} of {one.issued.uses}", date_of(one.issued.not_after)
        typer.echo(f"places left: {places}, until {until}: {one.issued.label} ({one.key})")


def node_status(folder: Path) -> dict[str, Any] | None:
    """Status of the node that runs on a data folder; None if none runs."""
    from neuroshard.cli.client import connect
    from neuroshard.errors import NeuroShardError

    try:
        return connect(folder, None).get("/api/status")
    except NeuroShardError:
        return None


def _online(folder: Path, status: dict[str, Any] | None) -> set[str]:
    from neuroshard.cli.client import connect

    if status is None:
        return set()
    peers = connect(folder, None).get("/api/peers")["peers"]
    return {status["wallet_id"], *(peer["wallet_id"] for peer in peers)}


def _seats(folder: Path, status: dict[str, Any] | None, run_id: str) -> list[tuple[int, str]] | None:
    """Stage and wallet of each seat, as the run's node knows them; None if it does not run."""
    from neuroshard.cli.client import connect

    if status is None or not status.get("run") or status["run"]["run_id"] != run_id:
        return None
    return [(seat["stage"], seat["wallet_id"]) for seat in connect(folder, None).get("/api/rounds")["voters"]]


def only_run(folder: Path, status: dict[str, Any] | None) -> str:
    """Id of the running node's run, or of the only run that is known. Raises UsageError."""
    from neuroshard.errors import UsageError

    if status is not None and status.get("run"):
        return str(status["run"]["run_id"])
    stored = sorted((folder / "runs" / "joined").glob("*.json"))
    if len(stored) == 1:
        return stored[0].stem
    problem = "No run is" if not stored else f"{len(stored)} runs are"
    raise UsageError(f"{problem} known in {folder}.", "Name the run with --run, or start its node first.")


def _peers(loaded: LoadedSettings, status: dict[str, Any] | None, offer: RunOffer) -> Sequence[str]:
    """Addresses for the invitation: those given, otherwise those of the running node or the run's seeds.

    An organiser knows the addresses, too.
    """
    from neuroshard.errors import UsageError
    from neuroshard.runs.admission_keeper import organiser_to_name

    if loaded.settings.peer:
        return loaded.settings.peer
    found = status["network"]["addresses"] if status else ()
    if not found and not offer.parameters.seeds and not organiser_to_name(loaded.settings, offer):
        raise UsageError(
            "No address of a node of the run is known, so invited nodes could not find it.",
            "Start your node first, or name an address with --peer.",
        )
    return found or offer.parameters.seeds


def _write(file: Path, content: bytes) -> None:
    from neuroshard.config.state_file import write_atomically
    from neuroshard.errors import StorageError

    try:
        write_atomically(file, content)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}.", "Name another file.") from error


def _print_hints(made: Invitation, *, is_organised: bool) -> None:
    typer.echo("Your friend opens it with a click, or runs: neuroshard --invite LINK")
    if is_organised and made.organiser is None:
        typer.echo(
            "The link names no organiser: start yours with --public-url, or name its https:// address: --organiser. "
            "Without one, invited nodes take part by their pass, and the organiser does not count them. "
            "For an organiser on the same computer, add --organiser http://127.0.0.1:PORT to the friend's command."
        )
    if not made.data:
        typer.echo(
            "The link names no place of the data, so your nodes send them. "
            "An https:// address in --genesis here puts it into the link."
        )
