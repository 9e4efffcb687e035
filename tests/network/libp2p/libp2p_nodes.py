"""Real libp2p nodes on loopback for tests."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import trio

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, Wallet, parse_token
from neuroshard.messages import Frame
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.types import NodeId

LOOPBACK = NetworkOptions(host="127.0.0.1")
TEST_SECONDS = 60


def identity(number: int, now: float | None = None) -> NodeIdentity:
    """Node `number` of a wallet made for tests."""
    key = NodeKey.from_seed(number.to_bytes(32, "big"))
    wallet = Wallet.from_secret(parse_token("11" * 32))
    delegation = Delegation.issue(wallet, key.public_key, (time.time() if now is None else now) + 30 * 86_400)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation)


def run(scenario: Callable[..., Awaitable[Any]], *arguments: Any, clock: trio.abc.Clock | None = None) -> None:
    """Run a scenario in trio, for a minute at most, with logs as a node has them."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())

    async def limited() -> None:
        with trio.fail_after(TEST_SECONDS if clock is None else 100_000):
            await scenario(*arguments)

    trio.run(limited, clock=clock)


@asynccontextmanager
async def nodes(
    count: int,
    options: NetworkOptions = LOOPBACK,
    parts: Callable[[int], NetworkParts] = lambda _: NetworkParts(),
    first: int = 1,
) -> AsyncIterator[tuple[Network, ...]]:
    """Networks of `count` nodes that do not know each other yet."""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(libp2p_network(identity(first + i), replace(options), parts=parts(i)))
            for i in range(count)
        ]
        yield tuple(opened)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds. Raises TimeoutError."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.01)


def address_of(network: Network) -> str:
    """Where a node on loopback is reached."""
    return network.transport.addresses()[0]


def port_of(network: Network) -> int:
    """Its TCP port."""
    return int(address_of(network).split("/")[4])


async def echo(_: NodeId, frame: Frame) -> Frame:
    """Answers with the question."""
    return frame


async def lives(asker: Network, asked: Network) -> None:
    """The node that was attacked still answers."""
    await asker.transport.connect(address_of(asked))
    reply = await asker.transport.request(asked.transport.local_id, Frame("echo", {"alive": True}), timeout_seconds=10)
    assert reply.header == {"alive": True}
