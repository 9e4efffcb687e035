"""This node's way to others: brought up, kept up, dialled and told about. Whatever fails here, training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio
from anyio.abc import TaskGroup

from neuroshard.errors import NetworkRefusedError, NeuroShardError
from neuroshard.network import Network
from neuroshard.network.transfer_policy import PolicyTransport, TransferPolicy
from neuroshard.node.address_book import AddressBook, KnownAddress, remember_addresses, remembered_addresses
from neuroshard.node.supervisor import keep_running
from neuroshard.status.snapshot import NetworkState
from neuroshard.types import NodeId

log = logging.getLogger(__name__)

WANTED_CONNECTIONS = 8
DIALS_AT_ONCE = 4
DIAL_SECONDS = 20.0
LOOK_SECONDS = 1.0
CLOSING_SECONDS = 10.0  # a network that does not end by itself is ended
REMEMBER_SECONDS = 5.0  # a node that is killed soon after its start shall find the others again
SLEPT_SECONDS = 30.0  # a look that comes this much too late by the calendar: the computer slept

NetworkOpener: TypeAlias = Callable[[], AbstractAsyncContextManager[Network]]
NetworkWork: TypeAlias = Callable[[Network], Coroutine[Any, Any, None]]
"""Something that lives as long as one network does, and is begun anew with the next one."""


class Networking:
    """The life of a node's network. `open_network` None: the owner wants none."""

    def __init__(
        self,
        node_id: NodeId,
        open_network: NetworkOpener | None,
        *,
        peers_file: Path,
        given: Sequence[str] = (),
        loopback_only: bool = False,
        gate: TransferPolicy | None = None,
    ) -> None:
        """What is large passes `gate`."""
        self.book = AddressBook(node_id)
        self.book.add(given, is_given=True)
        self._has_given = bool(given)
        self._open = open_network
        self._peers_file = peers_file
        self._loopback_only = loopback_only
        self._network: Network | None = None
        self._changed = anyio.Event()
        self._works: list[NetworkWork] = []
        self._failure = ""
        self._was_up = False
        self.gate = gate or TransferPolicy()
        self._forbidden = ""
        self._living: anyio.CancelScope | None = None

    def forbid(self, reason: str) -> None:
        """Leave the network now and stay away from it, because the owner wants so; "": come back."""
        self._forbidden = reason
        if reason and self._living is not None:
            self._living.cancel()
        self._wake()

    @property
    def is_wanted(self) -> bool:
        """Whether this node meets others at all."""
        return self._open is not None

    @property
    def meets_strangers(self) -> bool:
        """Whether nodes that nobody named may be met: on the local network, or through given peers."""
        return self.is_wanted and (self._has_given or not self._loopback_only)

    @property
    def current(self) -> Network | None:
        """The network, while it is up."""
        return self._network

    def attach(self, work: NetworkWork) -> None:
        """Let `work` live with every network from now on; its failure restarts the network."""
        self._works.append(work)
        self._wake()

    async def run(self, *, must_open: bool = False) -> None:
        """Keep the network up until cancelled. `must_open`: raises NetworkRefusedError when it cannot open at first."""
        if self._open is None:
            return
        self.book.add(remembered_addresses(self._peers_file), is_remembered=True)

        def is_final(error: BaseException) -> bool:
            return must_open and not self._was_up and isinstance(error, NetworkRefusedError)

        while True:
            while self._forbidden:
                await self._changed.wait()
            with anyio.CancelScope() as self._living:
                await keep_running("The network", self._live, self._tell_failure, is_final=is_final)
            self._living = None

    async def up(self) -> Network:
        """The network, waiting until it is up. Never returns when the owner wants none."""
        while self._network is None:
            await self._changed.wait()
        return self._network

    def state(self) -> tuple[NetworkState, str]:
        """State and one sentence about it."""
        if self._open is None:
            return NetworkState.OFF, "The network is off; this computer trains alone."
        if self._forbidden:
            return NetworkState.OFF, self._forbidden
        if self._failure:
            return NetworkState.FAILED, f"The network does not work: {self._failure} Training goes on without it."
        if self._network is None:
            return NetworkState.STARTING, "Connecting."
        count = len(self._network.transport.peers())
        if count:
            words = f"Connected with {count} other node{'s' if count > 1 else ''}. {self.gate.reason}"
            return NetworkState.CONNECTED, words.strip()
        return NetworkState.ALONE, self._why_alone()

    async def _live(self) -> None:
        """One network, from its start to its end. It outlives those who use it, so that they can say good-bye."""
        leave = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hold, leave)
            try:
                await self._use(await self.up())
            finally:
                self._network = None
                leave.set()

    async def _hold(self, leave: anyio.Event) -> None:
        """Keep one network open until it is to be left; once open, cancelling this node does not reach it."""
        assert self._open is not None
        with anyio.CancelScope() as scope:
            async with self._open() as network:
                scope.shield = True
                if not leave.is_set():
                    gated = replace(network, transport=PolicyTransport(network.transport, self.gate))
                    self._network, self._failure, self._was_up = gated, "", True
                    self._wake()
                await leave.wait()
                scope.deadline = anyio.current_time() + CLOSING_SECONDS

    async def _use(self, network: Network) -> None:
        log.info("Other nodes can reach this one at %s", ", ".join(network.transport.addresses()) or "no address")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_dialling, network)
                tasks.start_soon(self._keep_remembering)
                await self._start_works(network, tasks)
        finally:
            remember_addresses(self._peers_file, self.book.working())

    async def _start_works(self, network: Network, tasks: TaskGroup) -> None:
        """Begin what was attached, and what will be."""
        begun = 0
        while True:
            changed = self._changed
            for work in self._works[begun:]:
                tasks.start_soon(work, network)
            begun = len(self._works)
            await changed.wait()

    async def _keep_dialling(self, network: Network) -> None:
        limiter = anyio.CapacityLimiter(DIALS_AT_ONCE)
        slept = SleepDetector()
        async with anyio.create_task_group() as tasks:
            dialling: set[str] = set()
            while True:
                if slept.has_slept():
                    self.book.try_all_again()
                now = anyio.current_time()
                connected = network.transport.peers()
                for address in self._to_dial(now, connected, dialling):
                    dialling.add(address.text)
                    tasks.start_soon(self._dial, network, address, limiter, dialling)
                await anyio.sleep(LOOK_SECONDS)

    def _to_dial(self, now: float, connected: frozenset[NodeId], dialling: set[str]) -> list[KnownAddress]:
        """Whom to dial now: anybody while connections are missing."""
        has_enough = len(connected) >= WANTED_CONNECTIONS
        due = self.book.given_due(now, connected) if has_enough else self.book.due(now, connected)
        return [address for address in due if address.text not in dialling][:DIALS_AT_ONCE]

    async def _dial(
        self, network: Network, address: KnownAddress, limiter: anyio.CapacityLimiter, dialling: set[str]
    ) -> None:
        try:
            async with limiter:
                with anyio.fail_after(DIAL_SECONDS):
                    is_given = address.is_given or address.is_remembered
                    await network.transport.connect(address.text, is_given=is_given)
        except (NeuroShardError, TimeoutError) as error:
            self.book.note_failure(address.text, anyio.current_time())
            level = logging.WARNING if address.is_given and address.failures == 0 else logging.DEBUG
            log.log(level, "%s does not answer and is tried again: %s", address.text, str(error) or "no answer in time")
        else:
            self.book.note_success(address.text, anyio.current_time())
        finally:
            dialling.discard(address.text)

    async def _keep_remembering(self) -> None:
        remembered: tuple[str, ...] = ()
        while True:
            await anyio.sleep(REMEMBER_SECONDS)
            working = self.book.working()
            if working != remembered:
                remember_addresses(self._peers_file, working)
                remembered = working

    def _tell_failure(self, reason: str, seconds: float) -> None:
        self._failure = f"{reason} Trying again in {seconds:.0f} s."

    def _why_alone(self) -> str:
        if self._has_given:
            return "No other node answers yet; trying again by itself."
        if self._loopback_only:
            return "No other node is known on this computer."
        return "No other node was found yet."

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class SleepDetector:
    """Notices that the computer slept: the calendar went on much further than from one look to the next."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._last = now()

    def has_slept(self) -> bool:
        """Whether more time than SLEPT_SECONDS passed since the last call."""
        before, self._last = self._last, self._now()
        return self._last - before > SLEPT_SECONDS
