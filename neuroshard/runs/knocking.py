"""Knocking: a computer on the local network asks the owner of a run to let it in. The owner answers it.

A knock names a wallet and proves nothing: the pass that the owner gives is worth something to that wallet only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import anyio
from msgspec import Meta, Struct

from neuroshard.errors import NeuroShardError
from neuroshard.identity.claims import PublicKey
from neuroshard.identity.invitations import MAX_LABEL_CHARACTERS, PassBytes
from neuroshard.identity.wallet import key_words, wallet_id_of
from neuroshard.membership.connectivity import Networking
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Network, RequestRefusedError
from neuroshard.network.libp2p.addresses import is_near
from neuroshard.types import NamedRun, NodeId, RunId

KNOCK_KIND = "run/knock"
MOST_WAITING = 3
PAUSE_SECONDS = 60.0  # between two new knocks of one host
FORGOTTEN_SECONDS = 120.0  # a knock that is not repeated for this time has left
MOST_HOSTS = 256
ASK_SECONDS = 10.0
State = Literal["waiting", "allowed", "refused", "full"]


class Knock(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a pass of a run."""

    run: NamedRun
    wallet: PublicKey
    name: Annotated[str, Meta(max_length=MAX_LABEL_CHARACTERS)]  # of the computer, for the owner

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError("name must be printable text")


class KnockAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer so far. A pass comes with "allowed"."""

    state: State
    member_pass: PassBytes | None = None


@dataclass
class WaitingKnock:
    """A computer that waits for the owner's answer."""

    wallet: bytes
    name: str
    seen_at: float

    @property
    def sentence(self) -> str:
        """The question to the owner."""
        return f"{self.name or 'A computer'} asks to join ({key_words(self.wallet)}). Answer it under Friends."


@dataclass
class KnockList:
    """The knocks at one node: at most MOST_WAITING wait, and a host may knock again once per PAUSE_SECONDS. No I/O."""

    waiting: dict[bytes, WaitingKnock] = field(default_factory=dict[bytes, WaitingKnock])
    passes: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    refused: set[bytes] = field(default_factory=set[bytes])
    _hosts: dict[str, float] = field(default_factory=dict[str, float])  # time of each host's last new knock

    def knock(self, host: str, knock: Knock, now: float) -> KnockAnswer:
        """Take a knock, or its repetition, and return the answer so far."""
        self.forget(now)
        if (member_pass := self.passes.get(knock.wallet)) is not None:
            return KnockAnswer("allowed", member_pass)
        if knock.wallet in self.refused:
            return KnockAnswer("refused")
        if (known := self.waiting.get(knock.wallet)) is not None:
            known.seen_at = now
            return KnockAnswer("waiting")
        is_early = now - self._hosts.get(host, float("-inf")) < PAUSE_SECONDS
        if len(self.waiting) >= MOST_WAITING or is_early or len(self._hosts) >= MOST_HOSTS:
            return KnockAnswer("full")
        self._hosts[host] = now
        self.waiting[knock.wallet] = WaitingKnock(knock.wallet, knock.name, now)
        return KnockAnswer("waiting")

    def forget(self, now: float) -> None:
        """Forget computers that stopped knocking, and hosts that may knock again."""
        self.waiting = {key: one for key, one in self.waiting.items() if now - one.seen_at < FORGOTTEN_SECONDS}
        self._hosts = {host: at for host, at in self._hosts.items() if now - at < PAUSE_SECONDS}

    def find(self, wallet_id: str) -> WaitingKnock | None:
        """The waiting knock of a wallet."""
        return next((one for one in self.waiting.values() if wallet_id_of(one.wallet) == wallet_id), None)

    def answer(self, wallet: bytes, member_pass: bytes | None) -> None:
        """Record the owner's answer: a pass, or None for a refusal. The next knock of the wallet gets it."""
        self.waiting.pop(wallet, None)
        if member_pass is None:
            self.refused.add(wallet)
        else:
            self.passes[wallet] = member_pass


class KnockDoor:
    """Answers knocks at a node whose owner may invite, from its local network only."""

    def __init__(self, run_id: RunId, changed: Callable[[], None]) -> None:
        """`changed` is called after every knock: the list of those that wait may have changed."""
        self.knocks = KnockList()
        self._run_id = run_id
        self._changed = changed

    async def live(self, network: Network) -> None:
        """Answer until cancelled."""

        async def answer(sender: NodeId, frame: Frame) -> Frame:
            return Frame(KNOCK_KIND, self._take(network, sender, frame.read(Knock)))

        network.transport.serve(KNOCK_KIND, answer, FrameLimits(message=Knock), for_anyone=True)
        await anyio.sleep_forever()

    def _take(self, network: Network, sender: NodeId, knock: Knock) -> KnockAnswer:
        """Raises RequestRefusedError for another run, and for a computer that is not on the local network."""
        hosts = [_host_of(one.address) for one in network.transport.connections() if one.peer == sender]
        if knock.run != self._run_id or not hosts or not all(host and is_near(host) for host in hosts):
            raise RequestRefusedError("Only computers on the same local network may knock here.")
        answer = self.knocks.knock(hosts[0], knock, anyio.current_time())
        self._changed()
        return answer


def _host_of(address: str) -> str:
    """IP address of a direct connection; "" for one through a relay."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in {"ip4", "ip6"} and "p2p-circuit" not in parts else ""


async def knock_at_all(networking: Networking, knock: Knock) -> KnockAnswer | None:
    """Knock at every connected node; the answer that says most, or None if no node has an owner that may invite."""
    network = networking.current
    if network is None:
        return None
    found: list[KnockAnswer] = []
    for peer in sorted(network.transport.peers()):
        try:
            frame = await network.transport.request(
                peer, Frame(KNOCK_KIND, knock), reply=FrameLimits(message=KnockAnswer), timeout_seconds=ASK_SECONDS
            )
            found.append(frame.read(KnockAnswer))
        except NeuroShardError:
            continue  # it is not the owner's, or not on this network
    order: tuple[State, ...] = ("allowed", "waiting", "refused", "full")
    return min(found, key=lambda one: order.index(one.state), default=None)
