"""The run, the addresses and the name: what a node takes from its organiser, and what it believes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import pytest

from neuroshard.config.loading import load_settings
from neuroshard.config.settings import Settings
from neuroshard.errors import NeuroShardError, StorageError, UsageError
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.identity.admissions import ADMISSION_SECONDS, REFRESH_SECONDS, JoinClaim
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, invite
from neuroshard.membership.connectivity import KnownAddresses
from neuroshard.network import Network
from neuroshard.node.peer_network import PeerNetwork, join_line, own_report
from neuroshard.runs import admission_keeper
from neuroshard.runs.admission_keeper import AdmissionKeeper, admission_file, learn_seeds, organiser_to_name
from neuroshard.runs.finding import KEEP_UP_SECONDS, FoundRun
from neuroshard.runs.offer import OfferChoice, RunOffer
from neuroshard.runs.organiser_client import OrganiserClient, fetch_offer, organiser_url
from neuroshard.status.computer import AccelerationStatus
from tests.node.test_closed_run import status as some_status
from tests.node.test_closed_run import until
from tests.node.test_organised_run import OFFER, OWNER, PARAMETERS, Organised, Organiser, members_at, now, play
from tests.worlds.claims import identity_of
from tests.worlds.clock import run_virtually
from tests.worlds.lan import move, network_at

URL = "https://organiser.example"
OTHER = RunOffer.of_new_run(SignedRunParameters.sign(Wallet.from_secret(TokenSecret("hex", bytes(32))), PARAMETERS))


def at(number: int, host: str) -> str:
    kind = "ip4" if host[0].isdigit() else "dns4"
    return f"/{kind}/{host}/tcp/4001/p2p/{identity_of(number).node_id}"


def test_the_run_of_an_organiser_counts_only_if_it_leads_to_the_run_id() -> None:
    answers = [
        httpx.ConnectError("refused"),
        httpx.Response(503),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, content=bytes(10**5)),
        httpx.Response(200, content=OTHER.to_json()),
        httpx.Response(200, content=OTHER.to_json().replace(OTHER.run_id.encode(), OFFER.run_id.encode())),
        httpx.Response(200, content=OFFER.to_json()),
    ]
    left, notes = list(answers), list[str]()

    def respond(request: httpx.Request) -> httpx.Response:
        assert request.url == f"{URL}/api/parameters"
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scenario() -> None:
        found = await fetch_offer(
            URL, OFFER.run_id, notes.append, lambda _: httpx.AsyncClient(transport=httpx.MockTransport(respond))
        )
        assert found == OFFER

    run_virtually(scenario)
    assert left == []
    assert len(notes) == len(answers) - 1
    assert "refused" in notes[0]
    assert all(note.startswith(f"The organiser at {URL} does not send the run: ") for note in notes)


@pytest.mark.parametrize(
    ("url", "trusted"),
    [
        (URL, {"node.example"}),
        ("https://203.0.113.1", {"node.example"}),
        ("https://192.168.1.1:8800", {"node.example", "192.168.1.5"}),
        ("http://127.0.0.1:8800", {"node.example", "192.168.1.5", "127.0.0.1"}),
        ("http://localhost:8800", {"node.example", "192.168.1.5", "127.0.0.1"}),
    ],
)
def test_a_distant_organiser_leads_to_no_private_address(url: str, trusted: set[str]) -> None:
    book = KnownAddresses(identity_of(1).node_id)
    hosts = ("198.51.100.1", "192.168.1.5", "127.0.0.1", "169.254.169.254", "node.example")
    learn_seeds(book, url, [*(at(2 + number, host) for number, host in enumerate(hosts)), "nonsense", at(1, "1.2.3.4")])
    due = book.due(0.0, ())
    assert {address.host for address in due} == trusted | {"198.51.100.1"}
    # a public address is a peer's word; the network does not dial others on that
    assert {address.host for address in due if address.is_trusted} == trusted


def test_a_run_that_cannot_be_stored_is_an_error_for_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: RunOffer) -> OfferChoice:
        raise StorageError("The disk is full.", "Free some space.")

    async def sent(*_: object) -> RunOffer:
        await anyio.lowlevel.checkpoint()
        return OFFER

    async def scenario(world: Organised) -> None:
        node = world.node(1)
        node.finder._settings = node.settings.model_copy(update={"organiser": URL, "run": OFFER.run_id})
        node.exchange.store = replace(node.exchange.store, keep=full)
        monkeypatch.setattr("neuroshard.runs.finding.fetch_offer", sent)
        world.tasks.start_soon(node.networking.run)
        with pytest.raises(StorageError, match="The disk is full"):
            await node.finder.first(lambda _: None)

    play(tmp_path, scenario)


def keeper_of(node: PeerNetwork, organiser: httpx.AsyncBaseTransport, name: str = "") -> AdmissionKeeper:
    client = OrganiserClient(
        URL,
        node.identity,
        lambda: OFFER,
        JoinClaim(OFFER.run_id, memory_mb=4000, name=name),
        now,
        open_http=lambda: httpx.AsyncClient(transport=organiser),
    )
    file = admission_file(node.settings.data_dir, OFFER)
    return AdmissionKeeper(client, URL, file, now, node.networking)


def test_a_joiner_announces_itself_and_learns_the_others(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        first, second = await world.started(1, 2, admitted=False)
        await keeper_of(first, organiser).admit(lambda _: None)
        known = organiser.database.addresses()[first.identity.node_id]
        assert known == tuple((await first.networking.up()).transport.addresses())
        joining = keeper_of(second, organiser)
        await joining.admit(lambda _: None)
        assert joining.reachable is None
        organiser.database.close()

    play(tmp_path, scenario)


class AtHome:
    """The part of a node's networking that a keeper uses: a computer behind a router, at first without a port."""

    is_wanted = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.inside, self.mapped = at(number, "192.168.1.5"), at(number, "198.51.100.7")
        self.book = KnownAddresses(identity_of(number).node_id)
        self.current = network_at(identity_of(number).node_id, self.inside)

    async def up(self) -> Network:
        """Open at once."""
        await anyio.lowlevel.checkpoint()
        return self.current


def at_home(number: int, organiser: Organiser, node: PeerNetwork) -> tuple[AtHome, AdmissionKeeper]:
    home, keeper = AtHome(number), keeper_of(node, organiser)
    keeper._networking = cast("Any", home)
    return home, keeper


def test_a_joiner_waits_a_moment_for_the_port_that_its_router_maps(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        mapped, closed = await world.started(1, 2, admitted=False)
        home, keeper = at_home(1, organiser, mapped)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keeper.admit, list[str]().append)
            await anyio.sleep(1)
            assert organiser.database.addresses() == {}
            move(home.current, home.mapped, home.inside)
        assert organiser.database.addresses()[mapped.identity.node_id] == (home.mapped, home.inside)
        home, keeper = at_home(2, organiser, closed)
        before = anyio.current_time()
        await keeper.admit(lambda _: None)  # no port comes, and it joins all the same
        assert anyio.current_time() - before < 3
        assert organiser.database.addresses()[closed.identity.node_id] == (home.inside,)
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_node_that_moves_joins_again_and_keeps_its_place_also_if_it_may_not(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        (node,) = await world.started(1, admitted=False)
        me = node.identity.node_id
        home, keeper = at_home(1, organiser, node)
        await keeper.admit(lambda _: None)
        world.tasks.start_soon(keeper.run, members_at(node))
        await anyio.sleep(200)
        move(home.current, home.mapped, home.inside)
        await until(100, lambda: organiser.database.addresses()[me] == (home.mapped, home.inside))
        place = organiser.database.place_of(me)
        organiser.database.allow(identity_of(2).wallet_id)  # a list without this wallet
        move(home.current, home.inside)
        await anyio.sleep(100)
        assert keeper.trouble == ""  # the join was refused, and the place is refreshed
        await anyio.sleep(1.5 * ADMISSION_SECONDS)
        kept = organiser.database.place_of(me)
        assert place is not None
        assert kept is not None
        assert kept.expires_at > now() + REFRESH_SECONDS - 60
        assert organiser.database.addresses()[me] == (home.mapped, home.inside)
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_waiting_node_learns_its_turn_and_addresses_and_says_what_it_waits_for(tmp_path: Path) -> None:
    queued = {"status": "queued", "request_id": "one", "session_token": "two", "position": 2, "next_poll_seconds": 10}
    soon = {"is_waitlisted": False, "stage": "body-0", "state": {"outer_step": 1200, "certified_at": 1}, "more": 1}
    answers = [
        {**queued, "position": 12, "is_waitlisted": True, "stage": None},
        {**queued, **soon, "seeds": [at(4, "198.51.100.4"), at(5, "10.0.0.5")], "estimated_wait_seconds": 300.0},
    ]
    said = list[str]()

    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(202, json=answers.pop(0)) if answers else httpx.Response(403, json={"code": "revoked"})

    async def scenario(world: Organised) -> None:
        (node,) = await world.started(1, admitted=False)
        with pytest.raises(NeuroShardError, match="refused the request"):
            await keeper_of(node, httpx.MockTransport(respond)).admit(said.append)
        assert {each.host for each in node.networking.book.due(1e9, ())} == {"198.51.100.4"}

    play(tmp_path, scenario)
    waiting, likely = "Waiting for a place in the run: number", "The next free place is likely to be in stage body-0"
    assert said == [
        f"{waiting} 12 in the queue. The first ones of the queue learn their stage.",
        f"{waiting} 2 in the queue, about 5 minutes. {likely}, which is at outer step 1,200.",
    ]


def test_a_waiting_node_begins_with_the_version_that_it_got_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(PARAMETERS, version=2, inner=replace(PARAMETERS.inner, learning_rate=0.5))
    newer = OFFER.with_version(SignedRunParameters.sign(OWNER, changed))

    async def scenario(world: Organised) -> None:
        organiser, found, said = Organiser(wanted=1), list[FoundRun](), list[str]()
        monkeypatch.setattr(admission_keeper, "http_client", lambda _url: httpx.AsyncClient(transport=organiser))
        member, first, waiting = await world.started(0, 1, 2, admitted=False)
        keeper, scope = keeper_of(first, organiser), anyio.CancelScope()

        async def keep() -> None:
            with scope:
                await keeper.run(members_at(first))

        async def find() -> None:
            waiting.exchange.store.keep(OFFER)
            waiting.finder._settings = waiting.settings.model_copy(update={"organiser": URL, "memory": 4000})
            found.append(await waiting.finder.named(OFFER.run_id, said.append))

        world.tasks.start_soon(keep)
        await anyio.sleep(1)
        world.tasks.start_soon(find)
        await anyio.sleep(30)
        assert member.exchange.followed is not None
        member.exchange.followed.learn(newer)
        await until(2 * KEEP_UP_SECONDS, lambda: waiting.exchange.store.find(OFFER.run_id) == newer)
        assert found == []
        assert "number 1 in the queue" in said[-1]
        scope.cancel()
        await until(2 * ADMISSION_SECONDS, lambda: bool(found))
        assert found[0].offer == newer
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_changed_name_reaches_the_organiser_and_costs_no_place(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        (node,) = await world.started(1, admitted=False)
        me = node.identity

        def names() -> list[str]:
            rows = organiser.database._rows("SELECT name FROM names WHERE wallet = ?", me.wallet_id)
            return [str(row[0]) for row in rows]

        async def restarted(name: str) -> AdmissionKeeper:
            await anyio.sleep(1)  # each claim of a node is later than the one before
            keeper = keeper_of(node, organiser, name)
            assert keeper.restore(OFFER, me)
            world.tasks.start_soon(keeper.run, members_at(node))
            return keeper

        await keeper_of(node, organiser, "Ada").admit(lambda _: None)
        assert names() == ["Ada"]
        place = organiser.database.place_of(me.node_id)
        await restarted("Bo")
        await until(60, lambda: names() == ["Bo"])
        assert organiser.database.place_of(me.node_id) == place
        organiser.database.show_name(identity_of(2).wallet_id, "Eve")
        keeper = await restarted("Eve")  # of another wallet
        await until(60, lambda: "has the name 'Eve'" in keeper.trouble)
        await anyio.sleep(1.5 * ADMISSION_SECONDS)
        kept = organiser.database.place_of(me.node_id)
        assert kept is not None
        assert kept.expires_at > now() + REFRESH_SECONDS - 60
        assert "has the name 'Eve'" in keeper.trouble
        assert names() == ["Bo"]
        await restarted("")
        await until(60, lambda: names() == [])
        organiser.database.close()

    play(tmp_path, scenario)


def test_the_first_join_is_refused_if_another_wallet_has_the_name(tmp_path: Path) -> None:
    async def scenario(world: Organised) -> None:
        organiser = Organiser()
        (node,) = await world.started(1, admitted=False)
        organiser.database.show_name(identity_of(2).wallet_id, "Eve")
        with pytest.raises(Exception, match="Choose another name"):
            await keeper_of(node, organiser, "Eve").admit(lambda _: None)
        organiser.database.close()

    play(tmp_path, scenario)


def test_a_report_has_device_speed_and_reach() -> None:
    speed = AccelerationStatus("NVIDIA\u00ae H200", "bf16", 2_000, 1e15, "table", tokens_per_second=3_000.0)
    status = some_status()
    plain = own_report(replace(status, acceleration=None), OFFER.run_id)
    assert (plain.device, plain.flops_per_second, plain.reachable) == ("", 0.0, None)
    network = replace(status.network, reachable=True)
    report = own_report(replace(status, acceleration=speed, network=network), OFFER.run_id)
    assert (report.device, report.flops_per_second, report.reachable) == ("NVIDIA H200", 6e6, True)
    waiting = replace(status, acceleration=replace(speed, tokens_per_second=None))
    assert own_report(waiting, OFFER.run_id).flops_per_second == 0.0


def test_only_an_https_organiser_is_named_to_others(tmp_path: Path) -> None:
    def named(**settings: Any) -> str | None:
        return organiser_to_name(Settings(data_dir=tmp_path, **settings), OFFER)

    assert named() is None
    assert named(organiser="http://127.0.0.1:8800") is None
    assert named(organiser=URL) == URL
    assert join_line(OFFER, ["/ip4/..."], "", URL) == f"neuroshard --run {OFFER.run_id} --organiser {URL}"
    assert join_line(OFFER, ["/ip4/..."], "") == f"neuroshard --run {OFFER.run_id} --organiser URL"


def test_an_organiser_on_this_computer_is_typed_and_comes_before_that_of_a_link(tmp_path: Path) -> None:
    """A link names https addresses only: it comes from others (`tests/identity/test_invitations.py`)."""
    invited = invite(
        OWNER, OFFER.run_id, InvitationTerms(4e9, 1), InvitedPlaces("friends", organiser=URL), seed=bytes(32)
    )
    settings = Settings(data_dir=tmp_path)
    assert organiser_url(settings, OFFER.run_id, invited) == URL
    assert organiser_url(settings, OTHER.run_id, invited) is None
    here = load_settings({"organiser": "http://127.0.0.1:8800/"}, {}).settings
    assert organiser_url(here, OFFER.run_id, invited) == "http://127.0.0.1:8800"
    for far in ("http://192.168.1.5:8800", "http://organiser.example"):
        with pytest.raises(UsageError, match="not an https:// address"):
            load_settings({"organiser": far}, {})
