"""A node in the organiser's queue reads with its own live right, and does nothing else before its admission."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from neuroshard.config.settings import Settings
from neuroshard.consensus.stage_chain import CHAIN
from neuroshard.exchange.data_files import DATA, DataPartRequest
from neuroshard.identity.admissions import (
    DOWNLOAD_RIGHT_SECONDS,
    AdmissionRevocation,
    DownloadRight,
    sign_admission_revocation,
    sign_download_right,
)
from neuroshard.identity.signing import SigningKey
from neuroshard.membership.download_rights import (
    BUDGET_SECONDS,
    READERS_AT_ONCE,
    READING,
    UNLIMITED_UPLOAD,
    Readers,
    signed_reading,
)
from neuroshard.membership.handshake import HANDSHAKE_LIMITS, HandshakeMessage, ReaderClient
from neuroshard.membership.swarm_view import Membership
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Network, PeerRefusedError, RequestRefusedError
from neuroshard.network.transport import Transport
from neuroshard.node.data_sharing import DataSharing, open_data_store
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.state.replica_status import REPLICA_STATUS
from neuroshard.state.transfer_messages import ANY, CHUNK, MANIFEST, ManifestRequest, StageName
from neuroshard.types import LayerRange, RunId
from tests.node.test_closed_run import RecordingTransport
from tests.node.test_organised_run import AUTHORITY, OFFER, STRANGER, Organised, members_at, now, play, renew
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once

READS = {REPLICA_STATUS, MANIFEST, CHUNK, CHAIN, DATA}
ME, OTHER = identity_of(STRANGER), identity_of(8)
MEMBER = identity_of(1).node_id
LAYERS = LayerRange(0, 2)
ENOUGH = FrameLimits(max_body_bytes=1 << 20, max_header_bytes=1 << 15)


def right(signer: SigningKey = AUTHORITY, **facts: Any) -> bytes:
    """The right of the stranger, as an organiser signs it now."""
    at = int(now())
    made = DownloadRight(OFFER.run_id, ME.node_id, ME.wallet_id, "head-0", LAYERS, at, at + DOWNLOAD_RIGHT_SECONDS)
    return sign_download_right(signer, msgspec.structs.replace(made, **facts))


@dataclass
class Queue(Organised):
    """An organised run of one member with data and stages, and nodes outside it that only have connections."""

    kinds: set[str] = field(default_factory=set[str])

    def node(self, number: int) -> PeerNetwork:
        me = identity_of(number)

        @asynccontextmanager
        async def opened() -> AsyncGenerator[Network]:
            self.network.join(me.node_id)
            found = self.network.network_of(me.node_id)
            yield replace(found, transport=RecordingTransport(found.transport, self.kinds))

        chosen = Settings(data_dir=self.folder / f"node-{number}", p2p_host="127.0.0.1")
        chosen.data_dir.mkdir(parents=True, exist_ok=True)
        made = PeerNetwork.of(chosen, me, opened, now, offload=at_once)
        made.networking.attach(DataSharing(made, open_data_store(chosen)).live)
        return made

    async def outside(self, number: int = STRANGER) -> Transport:
        await anyio.sleep(1)  # the member opens its network
        self.network.join(identity_of(number).node_id)
        found = self.network.network_of(identity_of(number).node_id).transport
        await found.connect(f"/memory/p2p/{MEMBER}")
        return found

    async def refused(self, line: Transport) -> set[str]:
        """The kinds of requests that the member refuses because their sender is not a member."""
        found = set[str]()
        for kind in sorted(self.kinds):
            try:
                await line.request(MEMBER, Frame(kind), reply=ENOUGH, timeout_seconds=60)
            except PeerRefusedError as error:
                if "has not shown an admission" in str(error) or "does not know you as a member" in str(error):
                    found.add(kind)
        return found


async def show(line: Transport, shown: bytes, number: int = STRANGER, run: RunId = OFFER.run_id) -> HandshakeMessage:
    claim = signed_reading(identity_of(number), run, shown, now())
    answer = await line.request(MEMBER, Frame(READING, claim), reply=HANDSHAKE_LIMITS, timeout_seconds=60)
    return answer.read(HandshakeMessage)


def test_a_right_opens_the_requests_that_read_and_no_others(tmp_path: Path) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        (member,) = await world.started(1)
        line = await world.outside()
        closed = await world.refused(line)
        assert closed >= READS
        message = await show(line, right())
        assert closed - await world.refused(line) == READS
        assert message.papers.admissions == ()
        assert ME.node_id not in members_at(member).refused_nodes()  # nobody counts it as a node of the run
        assert members_at(member).refusal(ME.node_id)

    play(tmp_path, scenario)


def ended(named: str) -> bytes:
    node, wallet = (ME.node_id, None) if named == "node" else (None, ME.wallet_id)
    return sign_admission_revocation(AUTHORITY, AdmissionRevocation(OFFER.run_id, node, wallet, "proof", int(now())))


@pytest.mark.parametrize("fault", ["organiser", "run", "node", "wallet", "expired", "too long", "node ended"])
def test_a_right_that_is_not_valid_for_its_sender_opens_nothing(tmp_path: Path, fault: str) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        (member,) = await world.started(1)
        line = await world.outside()
        if fault == "node ended":
            renew(member, members_at(member).own_admission or b"", (ended("node"),))
        at = int(now()) - DOWNLOAD_RIGHT_SECONDS - 1
        false = {
            "organiser": lambda: right(SigningKey.from_seed(bytes(32))),
            "run": lambda: right(run_id="ab" * 32),
            "node": lambda: right(node=OTHER.node_id),
            "wallet": lambda: right(wallet=OTHER.wallet_id),
            "expired": lambda: right(issued_at=at, expires_at=at + DOWNLOAD_RIGHT_SECONDS),
            "too long": lambda: right(expires_at=int(now()) + DOWNLOAD_RIGHT_SECONDS + 1),
            "node ended": right,
        }
        closed = await world.refused(line)
        with pytest.raises(PeerRefusedError):
            await show(line, false[fault]())
        assert await world.refused(line) == closed

    play(tmp_path, scenario)


def test_the_statement_of_another_node_opens_nothing(tmp_path: Path) -> None:
    """A peer that heard how a waiting node showed its right repeats the same bytes, or shows the right as its own."""

    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        await world.started(1)
        thief = await world.outside(8)
        closed, stolen = await world.refused(thief), right()
        with pytest.raises(PeerRefusedError, match="in the name of"):
            await show(thief, stolen, STRANGER)
        with pytest.raises(PeerRefusedError, match="another node or wallet"):
            await show(thief, stolen, 8)
        assert await world.refused(thief) == closed

    play(tmp_path, scenario)


def test_a_right_ends_with_its_time_or_with_the_word_of_the_organiser(tmp_path: Path) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        (member,) = await world.started(1)
        line = await world.outside()
        closed = await world.refused(line)
        await show(line, right())
        await anyio.sleep(DOWNLOAD_RIGHT_SECONDS - 5)
        assert closed - await world.refused(line) == READS
        await anyio.sleep(6)
        assert await world.refused(line) == closed
        await show(line, right())
        renew(member, members_at(member).own_admission or b"", (ended("wallet"),))
        assert not READS - await world.refused(line)

    play(tmp_path, scenario)


def test_a_reader_learns_whom_to_ask(tmp_path: Path) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        await world.started(1)
        waiting = world.node(STRANGER)
        world.tasks.start_soon(waiting.networking.run)
        network = await waiting.networking.up()
        await anyio.sleep(1)
        await network.transport.connect(f"/memory/p2p/{MEMBER}")
        known, shown = Membership(ME.node_id, ME.wallet_id), list[bytes | None]([None])
        client = ReaderClient(ME, OFFER.run_id, known, now, lambda: shown[0])
        world.tasks.start_soon(client.run, waiting.networking)
        await anyio.sleep(30)
        assert not known.view.members
        shown[0] = right()
        await anyio.sleep(30)
        assert known.view.members[MEMBER].report.layers == LAYERS
        assert known.knows(MEMBER)

    play(tmp_path, scenario)


def readers_at(member: PeerNetwork) -> Readers:
    found = members_at(member).readers
    assert found is not None
    return found


def test_a_reader_gets_its_bytes_once_in_half_an_hour_however_often_its_right_is_renewed(tmp_path: Path) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        (member,) = await world.started(1)
        line = await world.outside()
        readers = readers_at(member)
        for _ in range(2):
            await show(line, right())
            await readers.spend(ME.node_id, "state", 50, 100)
        await show(line, right())
        with pytest.raises(RequestRefusedError, match="as much as a waiting node may"):
            await readers.spend(ME.node_id, "state", 1, 100)
        await readers.spend(ME.node_id, "data", 100, 100)
        await anyio.sleep(BUDGET_SECONDS)
        await readers.spend(ME.node_id, "state", 100, 100)

    play(tmp_path, scenario)


@pytest.mark.parametrize("limit", [None, 1e6])
def test_readers_share_a_small_part_of_the_upload(tmp_path: Path, limit: float | None) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        (member,) = await world.started(1)
        readers = readers_at(member)
        member.upload.limit(limit)
        rate = UNLIMITED_UPLOAD if limit is None else 0.1 * limit
        for number in range(3):  # the first one may leave at once
            await readers.spend(identity_of(number).node_id, "state", int(10 * rate), 10**12)
        began = anyio.current_time()
        await readers.spend(ME.node_id, "state", 1, 10**12)
        assert 9.5 <= anyio.current_time() - began <= 10.5
        refusals = list[str]()

        async def ask(number: int) -> None:
            try:
                await readers.spend(identity_of(number).node_id, "data", int(10 * rate), 10**12)
            except RequestRefusedError as error:
                refusals.append(str(error))

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(ask, number)
        assert len(refusals) == 4 - READERS_AT_ONCE

    play(tmp_path, scenario)


def test_a_data_file_is_refused_only_because_it_is_not_here(tmp_path: Path) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        await world.started(1)
        line = await world.outside()
        wanted = Frame(DATA, DataPartRequest(OFFER.run_id, "manifest.json", "ab" * 32))
        for reason in ("has not shown an admission", "manifest.json is not here"):
            with pytest.raises(PeerRefusedError, match=reason):
                await line.request(MEMBER, wanted, reply=ENOUGH, timeout_seconds=60)
            await show(line, right())

    play(tmp_path, scenario)


def test_the_stage_of_the_right_is_the_only_one(tmp_path: Path) -> None:
    async def scenario(organised: Organised) -> None:
        world = Queue(tmp_path, organised.network, organised.tasks)
        await world.started(1)
        line = await world.outside()
        await show(line, right(layers=LayerRange(0, 1)))
        asked = Frame(MANIFEST, ManifestRequest(StageName(OFFER.run_id, LAYERS), 1.0, ANY))
        with pytest.raises(PeerRefusedError, match="is for other layers"):
            await line.request(MEMBER, asked, reply=ENOUGH, timeout_seconds=60)

    play(tmp_path, scenario)
