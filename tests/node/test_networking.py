"""The life of a node's network: whom it dials, what it remembers, and how it ends; over libp2p on loopback."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import trio

from neuroshard.config.settings import Settings
from neuroshard.errors import NetworkRefusedError
from neuroshard.membership import connectivity as address_book
from neuroshard.membership import connectivity as networking
from neuroshard.membership.connectivity import SLEPT_SECONDS, Networking, NetworkOpener, SleepDetector
from neuroshard.membership.network_opening import libp2p_opener
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Gossip, MessageTooLargeError, Network
from neuroshard.network.libp2p import NetworkFailedError, NetworkOptions, libp2p_network
from neuroshard.network.limits import UploadPacer
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until

TOPIC = "test"
LONGEST_SECONDS = 40


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with anyio.fail_after(LONGEST_SECONDS):
            await main()

    trio.run(limited)


def opener(number: int, port: int = 0, data_dir: Path = Path("no-data-folder")) -> NetworkOpener:
    return libp2p_opener(Settings(p2p_host="127.0.0.1", p2p_port=port, data_dir=data_dir), identity_of(number))


def node(number: int, folder: Path, *given: str, port: int = 0) -> Networking:
    file = folder / f"peers-{number}.json"
    return Networking(
        identity_of(number).node_id, opener(number, port), peers_file=file, given=given, loopback_only=True
    )


def connected(one: Networking) -> int:
    return 0 if one.current is None else len(one.current.transport.connections())


@asynccontextmanager
async def running(one: Networking) -> AsyncGenerator[Network]:
    """Run it as a node does: cancelled at the end."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        yield await one.up()
        tasks.cancel_scope.cancel()


async def say_goodbye(network: Network) -> None:
    subscription = network.gossip.subscribe(TOPIC, lambda *_: True)
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            subscription.close()
            await network.gossip.publish(TOPIC, b"good-bye")


def test_the_last_words_of_a_cancelled_node_arrive(tmp_path: Path) -> None:
    async def main() -> None:
        first = node(1, tmp_path)
        async with running(first) as network:
            heard = network.gossip.subscribe(TOPIC, lambda *_: True)
            second = node(2, tmp_path, network.transport.addresses()[0])
            second.attach(say_goodbye)
            async with running(second):
                await until(lambda: connected(first) == 1)
                await anyio.sleep(1)  # gossip gets acquainted once a second
            assert second.current is None
            with anyio.fail_after(60):
                assert await heard.receive() == b"good-bye"
            await until(lambda: connected(first) == 0)

    run(main)


def test_given_peers_are_dialled_again_whatever_else_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networking, "WANTED_CONNECTIONS", 1)
    monkeypatch.setattr(address_book, "GIVEN_AGAIN_SECONDS", 0.0)

    async def main() -> None:
        async with running(node(1, tmp_path)) as other:
            seed = node(2, tmp_path)
            async with running(seed) as network:
                address = network.transport.addresses()[0]
            port = int(address.split("/")[4])
            one = node(3, tmp_path, address)
            one.book.add([other.transport.addresses()[0]])
            async with running(one):
                await until(lambda: connected(one) == 1)
                for _ in range(2):
                    async with running(node(2, tmp_path, port=port)):
                        await until(lambda: connected(one) == 2)
                    await until(lambda: connected(one) == 1)
                stranger = node(4, tmp_path)
                async with running(stranger) as network:
                    one.book.add(network.transport.addresses())
                    await anyio.sleep(2.5)  # two looks at the book
                    assert connected(stranger) == 0

    run(main)


def test_addresses_that_work_are_remembered_soon_and_over_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networking, "REMEMBER_SECONDS", 0.1)

    async def main() -> None:
        async with running(node(1, tmp_path)) as network:
            address = network.transport.addresses()[0]
            file = tmp_path / "peers-2.json"
            async with running(node(2, tmp_path, address)):
                await until(lambda: file.exists() and address in json.loads(file.read_bytes())["addresses"])
                kept = file.read_bytes()
            file.write_bytes(kept)  # as a power cut left it
            again = node(2, tmp_path)
            async with running(again):
                await until(lambda: connected(again) == 1)

    run(main)


def test_who_must_open_ends_with_what_refused_it_and_others_try_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with running(node(1, tmp_path)) as network:
            port = int(network.transport.addresses()[0].split("/")[4])
            with pytest.raises(NetworkRefusedError, match=str(port)):
                await node(2, tmp_path, port=port).run(must_open=True)
            patient = node(2, tmp_path, port=port)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(patient.run)
                await until(lambda: patient.state()[0] == "failed")
                assert str(port) in patient.state()[1]
                tasks.cancel_scope.cancel()

    run(main)


def test_a_network_that_breaks_is_opened_anew_with_all_that_lives_on_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    breaking = [anyio.Event(), anyio.Event()]
    opened: list[Gossip] = []
    began: list[Gossip] = []
    ended: list[Gossip] = []

    @asynccontextmanager
    async def fragile() -> AsyncGenerator[Network]:
        async def fail() -> None:
            await breaking[len(opened) - 1].wait()
            raise NetworkFailedError("A defect.")

        async with opener(1)() as network, anyio.create_task_group() as tasks:
            opened.append(network.gossip)
            tasks.start_soon(fail)
            yield network
            tasks.cancel_scope.cancel()

    async def work(network: Network) -> None:
        began.append(network.gossip)
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(network.gossip)

    async def main() -> None:
        one = Networking(identity_of(1).node_id, fragile, peers_file=tmp_path / "peers.json", loopback_only=True)
        one.attach(work)
        async with running(one):
            await until(lambda: len(began) == 1)
            breaking[0].set()
            await until(lambda: one.state()[0] == "failed")
            assert "A defect." in one.state()[1]
            await until(lambda: len(began) == 2)
            assert one.state()[0] == "alone"
            assert (ended, opened) == (opened[:1], began)
        assert ended == opened

    run(main)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_node_that_ends_while_its_network_opens_ends(tmp_path: Path, is_open: bool) -> None:
    closed: list[bool] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:

            @asynccontextmanager
            async def opened() -> AsyncGenerator[Network]:
                if not is_open:
                    tasks.cancel_scope.cancel()
                async with opener(1)() as network:
                    tasks.cancel_scope.cancel()
                    yield network
                closed.append(True)

            one = Networking(identity_of(1).node_id, opened, peers_file=tmp_path / "peers.json", loopback_only=True)
            await one.run()
        assert one.current is None

    run(main)
    assert len(closed) == is_open


def test_a_network_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networking, "CLOSING_SECONDS", 0.1)

    async def main() -> None:
        @asynccontextmanager
        async def stuck() -> AsyncGenerator[Network]:
            async with opener(1)() as network:
                yield network
                await anyio.sleep_forever()

        async with running(Networking(identity_of(1).node_id, stuck, peers_file=tmp_path / "peers.json")):
            pass

    run(main)


def test_what_peers_may_fill_is_a_share_of_the_memory_the_owner_gives() -> None:
    async def main() -> None:
        settings = Settings(p2p_host="127.0.0.1", p2p_port=0, memory=800, data_dir=Path("no-data-folder"))
        async with libp2p_opener(settings, identity_of(1))() as network:
            budget = network.transport._exchange._budget
            budget.check(7_812_500)  # one peer's quarter of what tensors get of a sixteenth
            with pytest.raises(MessageTooLargeError):
                budget.check(7_812_501)

    trio.run(main)


def test_a_changed_upload_limit_holds_in_an_open_network() -> None:
    async def main() -> None:
        upload = UploadPacer()
        giver_settings = Settings(p2p_host="127.0.0.1", data_dir=Path("no-data-folder"))
        opened = libp2p_opener(giver_settings, identity_of(1), upload=upload)
        async with opened() as giver, opener(2)() as taker:
            await taker.transport.connect(giver.transport.addresses()[0])
            content = TensorPart(TensorSpec("x", "uint8", (1_000_000,)), bytes(1_000_000))

            async def answer(_: NodeId, __: Frame) -> Frame:
                return Frame("text", {}, (content,))

            giver.transport.serve("text", answer)
            spent = list[float]()
            for limit in (None, 1_000_000):
                upload.limit(limit)
                began = trio.current_time()
                for _ in range(2):
                    reply = FrameLimits(max_body_bytes=2_000_000)
                    await taker.transport.request(
                        giver.transport.local_id, Frame("text"), reply=reply, timeout_seconds=20
                    )
                spent.append(trio.current_time() - began)
            assert spent[0] < 1.0 < spent[1]  # 2 MB at 1 MB per second, less the burst

    run(main)


def test_a_computer_that_slept_is_noticed_once_and_a_calendar_set_back_is_no_sleep() -> None:
    calendar = 1_700_000_000.0
    slept = SleepDetector(lambda: calendar)
    noticed: list[bool] = []
    for passed in (1.0, 1.0, SLEPT_SECONDS + 1, 1.0, 5.0, 8 * 3600.0, 1.0, -86_400.0, 1.0):
        calendar += passed
        noticed.append(slept.has_slept())
    assert noticed == [False, False, True, False, False, True, False, False, False]


def test_after_a_sleep_no_address_waits_for_its_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nights = [0.0]
    monkeypatch.setattr(networking, "SleepDetector", lambda: SleepDetector(lambda: 86_400.0 * nights[0]))

    async def main() -> None:
        one = node(1, tmp_path)
        async with running(node(2, tmp_path)) as other, running(one):
            (address,) = other.transport.addresses()
            one.book.add([address])
            for _ in range(20):
                one.book.note_failure(address, anyio.current_time())  # its next try is minutes away
            await anyio.sleep(1.5)
            assert connected(one) == 0
            nights[0] += 1
            with anyio.fail_after(60):
                await until(lambda: connected(one) == 1)

    run(main)


class OfTheInternet(NetworkOptions):
    @property
    def is_local(self) -> bool:
        return False


def test_a_node_of_the_internet_dials_another_on_its_computer_when_its_owner_says_so(tmp_path: Path) -> None:
    options = OfTheInternet(host="127.0.0.1", lan_discovery=False, port_mapping=False, relay=False)

    async def main() -> None:
        async with running(node(1, tmp_path)) as network:
            given = network.transport.addresses()
            two = identity_of(2)
            one = Networking(two.node_id, lambda: libp2p_network(two, options), peers_file=tmp_path / "2", given=given)
            async with running(one):
                await until(lambda: connected(one) == 1)

    run(main)


def test_a_node_takes_the_port_of_its_last_start_unless_another_program_has_it(tmp_path: Path) -> None:
    """Its friends and its invitations have addresses with this port."""

    async def main() -> None:
        addresses = list[str]()
        for _ in range(2):
            async with opener(1, data_dir=tmp_path)() as network:
                addresses.append(network.transport.addresses()[0])
        assert addresses[0] == addresses[1]
        with socket.create_server(("127.0.0.1", int(addresses[0].split("/tcp/")[1].split("/")[0]))):
            async with opener(1, data_dir=tmp_path)() as network:
                assert network.transport.addresses()[0] != addresses[0]

    run(main)
