"""A seed's settings, and real seeds: what they keep, how they end, and that nodes find each other through them."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.identity import sign_claim
from neuroshard.membership.announcements import Announcement, directory_namespace
from neuroshard.membership.claim_intake import signed_announcement
from neuroshard.messages import Frame
from neuroshard.network import Connection, Network, PeerRefusedError, PeerUnreachableError
from neuroshard.network.libp2p import NetworkOptions, libp2p_network
from neuroshard.network.limits import UploadPacer
from neuroshard.network.line import ASSUMED_UPLOAD, UploadLine
from neuroshard.network.transport import RECORD_KIND
from neuroshard.node.seed import DEFAULT_PORT, pace_upload, seed_settings
from neuroshard.runs.exchange import RUN_KIND
from neuroshard.runs.offer import RunRequest
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.claims import identity_of
from tests.worlds.processes import running_seed

RUN = RunId("ab" * 32)
PLACE = directory_namespace(RUN)
MEETING_SECONDS = 20.0
FAR = Connection(NodeId("far"), "", ConnectionKind.DIRECT, is_outbound=True, since=0.0, is_far=True)


def test_a_seed_has_a_folder_and_a_port_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("p2p_port = 4100\n")  # of the node beside it
    loaded = seed_settings({}, tmp_path, {"NEUROSHARD_TOKEN_FILE": str(tmp_path / "nothing")})
    assert loaded.settings.data_dir == tmp_path / "seed"
    assert loaded.settings.p2p_port == DEFAULT_PORT == 4001
    assert loaded.settings.token is None
    assert seed_settings({"p2p_port": 0}, tmp_path, {}).settings.p2p_port == 0
    assert seed_settings({}, tmp_path, {"NEUROSHARD_P2P_PORT": "5000"}).settings.p2p_port == 5000
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "config.toml").write_text("p2p_port = 4200\n")
    assert seed_settings({}, tmp_path, {}).settings.p2p_port == 4200


def test_a_seed_sends_at_most_the_owners_share_of_its_line(tmp_path: Path) -> None:
    settings = seed_settings({}, tmp_path, {"NEUROSHARD_UPLOAD_PERCENT": "25"}).settings
    line, clock = UploadLine(settings.data_dir), MockClock(autojump_threshold=0)

    def sending() -> list[Connection]:
        sent = int(clock.current_time() * 4e6)
        return [replace(FAR, bytes_sent=sent, bytes_arrived=sent, busy_seconds=clock.current_time())]

    async def main() -> list[float | None]:
        upload = UploadPacer(line.limit(settings))
        before = upload.bytes_per_second
        with anyio.move_on_after(10):
            await pace_upload(settings, line, upload, sending, clock.current_time)
        return [before, upload.bytes_per_second]

    assert trio.run(main, clock=clock) == [ASSUMED_UPLOAD / 4, pytest.approx(1e6, rel=0.01)]  # pyright: ignore


@pytest.mark.process
def test_a_seed_keeps_its_address_and_ends_at_once_without_pytorch(tmp_path: Path) -> None:
    with running_seed(tmp_path) as seed:
        first = checked_multiaddr(seed.address)
        assert_ends_well(seed.end(SIGTERM), SIGTERM)
    port = int(first.split("/")[4])
    with running_seed(tmp_path, port=port) as seed:
        assert seed.address == first
        assert_ends_well(seed.end(SIGINT), SIGINT)
    assert sorted(path.name for path in (tmp_path / "seed" / "keys").iterdir()) == ["node-key"]


@pytest.mark.process
def test_nodes_find_each_other_through_two_seeds_and_through_either_of_them(tmp_path: Path) -> None:
    with running_seed(tmp_path / "a") as a, running_seed(tmp_path / "b", ["--peer", a.address]) as b:

        async def main() -> None:
            with anyio.fail_after(MEETING_SECONDS):
                async with node(1) as known, node(2) as looking:
                    await known.transport.connect(a.address)
                    await known.directory.announce(PLACE, record_of(1, known))
                    b_id = await looking.transport.connect(b.address)
                    await found(looking, 1)
                    with pytest.raises(PeerRefusedError, match="This is a seed"):
                        await looking.transport.request(b_id, Frame(RUN_KIND, RunRequest(RUN)), timeout_seconds=10)
                    b.kill()
                    async with node(3) as late:
                        await late.transport.connect(a.address)
                        await found(late, 1)

        trio.run(main)


@pytest.mark.process
def test_a_seed_keeps_no_record_that_is_no_announcement(tmp_path: Path) -> None:
    with running_seed(tmp_path) as seed:

        async def main() -> None:
            with anyio.fail_after(MEETING_SECONDS):
                async with node(1) as talker:
                    await talker.transport.connect(seed.address)
                    with pytest.raises(PeerUnreachableError, match="No other node keeps"):
                        await talker.directory.announce(PLACE, no_announcement_of(1))

        trio.run(main)


def node(number: int) -> AbstractAsyncContextManager[Network]:
    return libp2p_network(identity_of(number), NetworkOptions(host="127.0.0.1"))


def record_of(number: int, network: Network) -> bytes:
    announcement = Announcement(
        RUN, 1, LayerRange(0, 2), None, 0.0, 500, is_relay=False, version="1", addresses=network.transport.addresses()
    )
    return signed_announcement(identity_of(number), announcement, time.time())


def no_announcement_of(number: int) -> bytes:
    """A record that is signed well and says nothing."""
    return sign_claim(identity_of(number), RECORD_KIND, {"words": "here I am"}, time.time()).encode()


async def found(network: Network, number: int) -> None:
    """Wait until the directory gives the record of a node."""
    records = await network.directory.find(PLACE)
    while not any(identity_of(number).node_id.encode() in record for record in records):
        await anyio.sleep(0.1)
        records = await network.directory.find(PLACE)


def assert_ends_well(ended: tuple[int, float, str], number: Signals) -> None:
    code, seconds, said = ended
    assert code == 0, said
    assert seconds < 10  # it waits for nobody
    assert f"{number.name} received" in said
    assert "torch: False" in said
    assert "Traceback" not in said
