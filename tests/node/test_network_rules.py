"""The owner's quota and schedule for the network: decided, obeyed in mid-transfer, kept through restarts and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from neuroshard.config.weekly_schedule import Schedule
from neuroshard.data.source import MeteredSource
from neuroshard.data.transfer import OpenedFile
from neuroshard.errors import DataUnavailableError, StorageError
from neuroshard.host.owner_limits import LEDGER_FILE, NetworkRules, TransferLedger, decide_network
from neuroshard.host.owner_policy import Rules, Unknown
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.handshake import HANDSHAKE
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import InMemoryNetwork, Network, PeerRefusedError
from neuroshard.network.transfer_policy import BULK_BYTES, PolicyTransport, TransferPolicy, TransfersStoppedError
from neuroshard.status.owner_policy import NetworkAction
from neuroshard.status.snapshot import NetworkState
from neuroshard.types import NodeId

A, B = NodeId("a"), NodeId("b")
NOON = datetime(2026, 11, 25, 12)  # noqa: DTZ001 - a Wednesday on the owner's clock
LARGE = FrameLimits(max_body_bytes=10 * BULK_BYTES)
VOTE = TensorPart(TensorSpec("vote", "uint8", (4,)), b"vote")
STATE = TensorPart(TensorSpec("state", "uint8", (2 * BULK_BYTES,)), bytes(2 * BULK_BYTES))


@given(st.integers(0, 10**13), st.floats(0.001, 1000), st.integers(0, 6), st.integers(0, 23))
def test_the_first_rule_that_holds_is_told(moved: int, quota: float, day: int, hour: int) -> None:
    local = NOON.replace(day=23 + day, hour=hour)
    rules = Rules(network_schedule=Schedule.of(["mon-fri 18:00-08:00"]), monthly_quota=quota)
    decision = decide_network(rules, moved, local)
    if not rules.network_schedule.allows(local):
        assert (decision.action, decision.rule) == (NetworkAction.OFF, "network_schedule")
    elif moved >= quota * 1e9:
        assert (decision.action, decision.rule) == (NetworkAction.SMALL_ONLY, "monthly_quota")
        assert decision.until == datetime(2026, 12, 1).timestamp()  # noqa: DTZ001 - as above
    else:
        assert (decision.action, decision.rule) == (NetworkAction.OPEN, "")
    assert decide_network(Rules(), moved, local).action is NetworkAction.OPEN


@pytest.mark.parametrize(
    ("metered", "spares", "action"),
    [
        (True, True, NetworkAction.SMALL_ONLY),
        (True, False, NetworkAction.OPEN),
        (False, True, NetworkAction.OPEN),
        (None, True, NetworkAction.OPEN),
        (Unknown("there is no gdbus here"), True, NetworkAction.OPEN),
    ],
)
def test_nothing_large_is_sent_over_a_connection_that_the_system_calls_metered(
    metered: bool | Unknown | None, spares: bool, action: NetworkAction
) -> None:
    decision = decide_network(Rules(spare_metered=spares), 0, NOON, metered)
    assert decision.action is action
    assert (decision.rule == "spare_metered") == (action is NetworkAction.SMALL_ONLY)


def test_the_words_of_the_network() -> None:
    spent = decide_network(Rules(monthly_quota=50), 50_000_000_000, NOON)
    assert spent.reason == "The month's 50 GB are used up: nothing large is transferred until 1 December."
    off = decide_network(Rules(network_schedule=Schedule.of(["22:00-06:00"])), 0, NOON)
    assert off.reason == "The network is off until 22:00: that is outside the network schedule."


def test_the_ledger_counts_on_after_a_kill_and_anew_in_another_month(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from neuroshard.host.owner_limits import TransferLedger\n"
        "ledger = TransferLedger(Path(sys.argv[1])); ledger.note(1_000, '2026-11'); ledger.save()\n"
        "print('saved', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    ledger = TransferLedger(tmp_path)
    assert ledger.note(0, "2026-11") == 1_000
    assert ledger.note(500, "2026-11") == 1_500
    assert ledger.note(700, "2026-12") == 200
    assert not ledger.is_saved
    ledger.save()
    assert TransferLedger(tmp_path).note(0, "2026-12") == 200


@pytest.mark.parametrize("content", ["", "[]", '{"month": 1}', '{"month": "2026-11", "bytes": -5}', "x" * 20_000])
def test_a_damaged_ledger_is_put_aside_and_counts_from_now_on(tmp_path: Path, content: str) -> None:
    (tmp_path / LEDGER_FILE).write_text(content)
    ledger = TransferLedger(tmp_path)
    assert ledger.note(5, "2026-11") == 5
    assert ["counted from now on" in warning for warning in ledger.warnings] == [True]
    assert (tmp_path / f"{LEDGER_FILE}.damaged").read_text() == content


def test_a_quota_reached_in_mid_transfer_stops_what_is_large_and_nothing_else(tmp_path: Path) -> None:
    async def scenario(world: InMemoryNetwork) -> None:
        gate, moved, other = TransferPolicy(), [0], world.join(B)
        networking = Networking(A, None, peers_file=tmp_path / "peers.json", gate=gate)
        rules = NetworkRules(TransferLedger(tmp_path), gate, networking, lambda: moved[0])
        node = PolicyTransport(world.join(A), gate)
        other.serve("state", answer_slowly, LARGE)
        other.serve(HANDSHAKE, answer)
        node.serve("mine", answer_large)
        node.serve(HANDSHAKE, answer)
        node.serve("part", answer, LARGE)
        ended: list[float] = []

        async def fetch() -> None:
            with pytest.raises(TransfersStoppedError, match="50 GB are used up"):
                await node.request(B, Frame("state"), reply=LARGE, timeout_seconds=1e6)
            ended.append(anyio.current_time())

        limited = Rules(monthly_quota=50)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await anyio.sleep(10)
            assert ended == []
            moved[0] = 50_000_000_000
            await rules.look(limited, NOON)
        assert ended[0] < 20
        assert (await node.request(B, Frame(HANDSHAKE), timeout_seconds=10)).kind == HANDSHAKE
        assert (await other.request(A, Frame(HANDSHAKE), timeout_seconds=10)).kind == HANDSHAKE
        with pytest.raises(PeerRefusedError, match="used up"):
            await other.request(A, Frame("mine"), reply=LARGE, timeout_seconds=10)
        assert (await other.request(A, Frame("part", {}, (VOTE,)), timeout_seconds=10)).kind == "part"
        with pytest.raises(PeerRefusedError, match="used up"):
            await other.request(A, Frame("part", {}, (STATE,)), timeout_seconds=10)
        assert TransferLedger(tmp_path).note(0, "2026-11") == 50_000_000_000
        await rules.look(limited, NOON.replace(month=12))
        assert (await other.request(A, Frame("mine"), reply=LARGE, timeout_seconds=10)).kind == "mine"

    with InMemoryNetwork() as world:
        trio.run(scenario, world, clock=MockClock(autojump_threshold=0))


def test_the_network_is_left_outside_its_schedule_and_comes_back(tmp_path: Path) -> None:
    async def scenario(world: InMemoryNetwork) -> None:
        opened = list[str]()

        @asynccontextmanager
        async def open_network() -> AsyncGenerator[Network]:
            transport = world.join(A)
            opened.append("in")
            yield world.network_of(A)
            await transport.close()
            opened.append("out")

        networking = Networking(A, open_network, peers_file=tmp_path / "peers.json")
        rules = NetworkRules(TransferLedger(tmp_path), networking.gate, networking, lambda: 0)
        nights = Rules(network_schedule=Schedule.of(["18:00-08:00"]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(networking.run)
            await networking.up()
            decision, _ = await rules.look(nights, NOON)
            await anyio.sleep(30)
            assert networking.current is None
            assert networking.state() == (NetworkState.OFF, decision.reason)
            assert opened == ["in", "out"]
            await rules.look(nights, NOON.replace(hour=19))
            await networking.up()
            assert networking.state()[0] is NetworkState.ALONE
            tasks.cancel_scope.cancel()

    with InMemoryNetwork() as world:
        trio.run(scenario, world, clock=MockClock(autojump_threshold=0))


class TenPieces(AsyncIterator[bytes]):
    """Of a hundred bytes each."""

    left = 10

    async def __anext__(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return b"x" * 100


class Pieces:
    """A source of ten pieces."""

    description = "somewhere"

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        del name, validator, known

        yield OpenedFile(offset, 1000, None, TenPieces())

    async def aclose(self) -> None:
        """Nothing is held."""


def test_a_download_is_counted_and_stops_when_the_gate_closes() -> None:
    async def main() -> None:
        gate, counted = TransferPolicy(), list[int]()

        def count(moved: int) -> None:
            counted.append(moved)
            if len(counted) == 4:
                gate.close("Used up.")

        source = MeteredSource(Pieces(), lambda: gate.reason, count)
        for _ in range(2):  # the second time it does not even begin
            with pytest.raises(DataUnavailableError, match="Used up"):
                await read_all(source)
            assert counted == [100] * 4

    trio.run(main)


async def read_all(source: MeteredSource) -> None:
    async with source.open("shard") as opened:
        async for _ in opened.chunks:
            pass


async def answer(_: NodeId, request: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    return Frame(request.kind)


async def answer_slowly(_: NodeId, request: Frame) -> Frame:
    await anyio.sleep(1000)
    return Frame(request.kind)


async def answer_large(_: NodeId, request: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    return Frame(request.kind, {}, (STATE,))


def test_a_ledger_that_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / LEDGER_FILE).mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        TransferLedger(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER_FILE]
