"""`neuroshard organise` as its user types it: it serves, survives a kill, and names what keeps it from starting."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

import anyio
import httpx
import msgspec
import pytest
import trio

from benchmarks.organiser_process import OrganiserProcess, running_organiser
from neuroshard.config.settings import Settings
from neuroshard.identity import SignedRunParameters
from neuroshard.identity.claims import Signed
from neuroshard.identity.invitations import InvitationError, InvitationTerms, InvitedPlaces, invite
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.organiser.database import Database
from neuroshard.organiser.service import LIST_CHANGE, ListChange
from neuroshard.runs.admission_keeper import admission_file
from neuroshard.runs.authority_key import load_or_create_authority_key
from neuroshard.runs.creation import write_offer
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_runs import JoinedRuns
from tests.organiser.desks import OWNER, PARAMETERS, Desk
from tests.worlds.claims import identity_of
from tests.worlds.commands import Command

pytestmark = pytest.mark.process


def run_in(folder: Path) -> RunOffer:
    """A run whose authority is the key of a data folder, as `run create` makes it; its file is run.json."""
    from dataclasses import replace

    key = load_or_create_authority_key(folder).public_key.hex()
    offer = RunOffer.of_new_run(SignedRunParameters.sign(OWNER, replace(PARAMETERS, authority=(key,))))
    write_offer(offer, folder / "run.json")
    return offer


@contextmanager
def organiser(folder: Path, arguments: Sequence[str] = ()) -> Iterator[OrganiserProcess]:
    with running_organiser(folder, folder / "run.json", arguments) as process:
        yield process


def without_right(answer: httpx.Response) -> dict[str, Any]:
    """An answer without the right to download, which names the time."""
    return {name: value for name, value in answer.json().items() if name != "download_right"}


def test_a_place_survives_a_kill(tmp_path: Path) -> None:
    offer, desk = run_in(tmp_path), Desk()
    (tmp_path / "capacity.toml").write_text("replicas = 1\n[stages]\nbody-0 = 0\n")
    desk.now = time.time()
    with organiser(tmp_path, ["--capacity", str(tmp_path / "capacity.toml")]) as first:
        places = [
            httpx.put(f"{first.url}/api/join", content=desk.claim(number, run=offer.run_id)) for number in range(3)
        ]
        assert [place.status_code for place in places] == [200, 200, 202]
        assert [place.json()["stage"] for place in places] == ["head-0", "tail-0", "head-0"]
        first.kill()
    with organiser(tmp_path, ["--capacity", str(tmp_path / "capacity.toml")]) as second:
        again = [
            httpx.put(f"{second.url}/api/join", content=desk.claim(number, run=offer.run_id)) for number in range(3)
        ]
        assert [without_right(place) for place in again] == [without_right(place) for place in places]
        code, said = second.end(SIGTERM)
        assert code == 0, said
        assert "torch: False" in said


def test_a_node_enters_the_run_through_the_organiser_that_its_owner_names(tmp_path: Path) -> None:
    offer = run_in(tmp_path)
    folder = tmp_path / "node"
    folder.mkdir()
    JoinedRuns(folder).keep(offer)

    def node(**settings: Any) -> PeerNetwork:
        return PeerNetwork.of(Settings(data_dir=folder, network=False, run=offer.run_id, **settings), identity_of(1))

    async def enter(entering: PeerNetwork) -> list[str]:
        reports: list[str] = []
        assert (await entering.finder.first(reports.append)).offer == offer
        return reports

    with pytest.raises(InvitationError, match="Start with --organiser URL"):
        trio.run(enter, node())
    with organiser(tmp_path) as process:
        assert len(trio.run(enter, node(organiser=process.url))) == 1
        assert httpx.get(f"{process.url}/api/run").json()["stages"][0]["free"] == 3
        process.kill()
    assert trio.run(enter, node()) == []  # its admission is stored


@pytest.mark.parametrize("is_invited", [False, True])
def test_a_stranger_needs_the_organiser_only(tmp_path: Path, is_invited: bool) -> None:
    """It gets the run, a place, and the address of a member, which the operator named."""
    offer, other = run_in(tmp_path), identity_of(7).node_id
    peer = f"/ip4/127.0.0.1/tcp/9/p2p/{other}"
    folder = tmp_path / "node"
    folder.mkdir()

    async def scenario(url: str) -> None:
        places = InvitedPlaces("run", organiser=url)
        made = invite(OWNER, offer.run_id, InvitationTerms(time.time() + 600, 1, "Ada"), places, seed=bytes(32))
        named = {"run": offer.run_id} | ({} if is_invited else {"organiser": url})
        settings = Settings(data_dir=folder, p2p_host="127.0.0.1", **named)
        node = PeerNetwork.of(settings, identity_of(1), invitation=made if is_invited else None)
        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(node.networking.run)
                assert (await node.finder.first(lambda _: None)).offer == offer
                tasks.cancel_scope.cancel()
        assert JoinedRuns(folder).load(offer.run_id) == offer
        assert [address.text for address in node.networking.book.due(math.inf, ())] == [peer]

    with organiser(tmp_path, ["--peer", peer]) as process:
        trio.run(scenario, process.url)
        held = admission_file(folder, offer).read()
        assert held is not None
        assert (held.organiser, held.reachable) == (process.url, True)


def test_the_owner_changes_the_list_and_ends_places_next_to_the_running_organiser(neuroshard: Command) -> None:
    folder, desk = neuroshard.home, Desk()
    folder.mkdir(exist_ok=True)
    offer = run_in(folder)
    where = ("--run", folder / "run.json", "--data-dir", folder)
    one, two = (identity_of(number) for number in (1, 2))
    desk.now = time.time()
    with organiser(folder) as process:

        def join(number: int) -> str:
            return (
                httpx.put(f"{process.url}/api/join", content=desk.claim(number, run=offer.run_id))
                .json()
                .get("code", "")
            )

        allowed = neuroshard("organise", "allow", one.wallet_id, *where, "--token", bytes(32).hex())
        assert (allowed.code, allowed.out) == (0, "The list has 1 wallet.\n")
        assert [join(1), join(2)] == ["", "not_in_allowlist"]
        stranger = neuroshard("organise", "allow", two.wallet_id, *where, "--token", bytes([7] * 32).hex())
        assert (stranger.code, "Use the owner's token" in stranger.err) == (2, True)
        denied = neuroshard("organise", "deny", one.wallet_id, *where, "--token", bytes(32).hex())
        assert denied.out == "The list is empty: only invited wallets may join.\n"
        assert join(2) == "not_in_allowlist"
        owner = ("--token", bytes(32).hex())
        opened = neuroshard("organise", "allow", "--anyone", *where, *owner)
        assert (opened.code, opened.out) == (0, "The run has no list: any wallet may join.\n")
        assert join(3) == ""
        assert not httpx.get(f"{process.url}/api/run").json()["has_list"]
        for wrong in ((), (one.wallet_id, "--anyone")):
            assert neuroshard("organise", "allow", *wrong, *where, *owner).code == 2
        assert neuroshard("organise", "allow", "--anyone", *where, "--token", bytes([7] * 32).hex()).code == 2
        assert neuroshard("organise", "allow", identity_of(4).wallet_id, *where, *owner).code == 0
        assert neuroshard("organise", "allow", two.wallet_id, *where, "--token", bytes(32).hex()).code == 0
        assert join(2) == ""
        assert neuroshard("organise", "revoke", two.node_id, *where).code == 0
        assert [join(1), join(2)] == ["not_in_allowlist", "revoked"]
        assert neuroshard("organise", "revoke", "nobody", *where).code == 2
    (database,) = folder.glob("organiser/*/organiser.sqlite")
    with closing(Database(database)) as stored:
        signed = [msgspec.msgpack.decode(each, type=Signed[ListChange]) for each in stored.list_changes()]
    for each in signed:
        each.verify(OWNER.public_key, LIST_CHANGE)
    changes = [(change.change, change.wallet) for change in (each.read(ListChange) for each in signed)]
    four = identity_of(4).wallet_id
    assert changes == [
        ("allow", one.wallet_id),
        ("deny", one.wallet_id),
        ("anyone", None),
        ("allow", four),
        ("allow", two.wallet_id),
    ]


def test_an_invited_wallet_joins_a_run_whose_list_is_empty(neuroshard: Command) -> None:
    from neuroshard.identity.invitations import LINK, read_invitation

    folder, desk, me = neuroshard.home, Desk(), identity_of(1)
    folder.mkdir(exist_ok=True)
    offer = run_in(folder)
    token = ("--data-dir", folder, "--token", bytes(32).hex())
    where = ("--run", folder / "run.json", *token)
    for change in ("allow", "deny"):
        assert neuroshard("organise", change, me.wallet_id, *where).code == 0
    peer = f"/ip4/127.0.0.1/tcp/4001/p2p/{identity_of(3).node_id}"
    made = neuroshard("run", "invite", *where, "--genesis", "https://data.example/x", "--peer", peer)
    assert made.code == 0, made.err
    link = next(word for word in made.out.split() if word.startswith(LINK))
    desk.now = time.time()
    shown = read_invitation(link).pass_for(me.delegation.grant.wallet_public_key, desk.now)
    with organiser(folder) as process:
        joins = [desk.claim(1, run=offer.run_id, **facts) for facts in ({}, {"invitation": shown})]
        answers = [httpx.put(f"{process.url}/api/join", content=claim) for claim in joins]
    assert [answer.json().get("code", answer.status_code) for answer in answers] == ["not_in_allowlist", 200]


def test_what_keeps_it_from_starting_is_told(neuroshard: Command) -> None:
    folder = neuroshard.home
    folder.mkdir(exist_ok=True)
    run_in(folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for arguments, code, words in (
            (("--run", folder / "run.json", "--listen", busy), 4, "Choose another --listen"),
            (("--run", folder / "run.json", "--listen", "nowhere"), 2, "is not HOST:PORT"),
            (("--run", folder / "run.json", "--public-url", "http://example.org"), 2, "is not an https:// address"),
            (("--run", folder / "run.json", "--capacity", folder / "none.toml"), 5, "cannot be read"),
            (("--run", "ab" * 32), 2, "not known"),
        ):
            outcome = neuroshard("organise", *arguments, "--data-dir", folder)
            assert (outcome.code, outcome.out) == (code, ""), outcome
            assert words in " ".join(outcome.err.split())
    (folder / "other").mkdir()
    outcome = neuroshard("organise", "--run", folder / "run.json", "--data-dir", folder / "other")
    assert outcome.code == 2
    assert "does not name the key of this organiser" in outcome.err
