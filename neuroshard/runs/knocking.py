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
from neuroshard.identity.invitations import MAX_LABEL_CHARACTERS, PassBytes, is_pass_of
from neuroshard.identity.wallet import key_words, wallet_id_of
from neuroshard.membership.connectivity import Networking
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Network, RequestRefusedError
from neuroshard.network.libp2p.addresses import Scope, is_near, scope_of
from neuroshard.types import NamedRun, NodeId, RunId

KNOCK_KIND = "run/knock"
MOST_WAITING = 3
PAUSE_SECONDS = 60.0  # between two new knocks of one host
FORGOTTEN_SECONDS = 120.0  # a knock that is not repeated for this time has left
REMEMBERED_SECONDS = 600.0  # an answer of the owner
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
    host: str

    @property
    def sentence(self) -> str:
        """The question to the owner."""
        return f"{self.name or 'A computer'} asks to join ({key_words(self.wallet)}). Answer it under Friends."


@dataclass
class KnockList:
    """The knocks at one node: at most MOST_WAITING wait, one per host, which may knock again after PAUSE_SECONDS."""

    waiting: dict[bytes, WaitingKnock] = field(default_factory=dict[bytes, WaitingKnock])
    # the owner's answers by wallet, and when the wallet got the answer first; None until then
    _answers: dict[bytes, tuple[KnockAnswer, float | None]] = field(
        default_factory=dict[bytes, tuple[KnockAnswer, float | None]]
    )
    _hosts: dict[str, float] = field(default_factory=dict[str, float])  # time of each host's last new knock

    def knock(self, host: str, knock: Knock, now: float) -> KnockAnswer:
        """Take a knock, or its repetition, and return the answer so far."""
        self.forget(now)
        if (found := self._answers.get(knock.wallet)) is not None:
            answer, since = found
            self._answers[knock.wallet] = answer, now if since is None else since
            return answer
        if (known := self.waiting.get(knock.wallet)) is not None:
            known.seen_at = now
            return KnockAnswer("waiting")
        is_early = now - self._hosts.get(host, float("-inf")) < PAUSE_SECONDS
        waits = any(one.host == host for one in self.waiting.values())
        if len(self.waiting) >= MOST_WAITING or is_early or waits:
            return KnockAnswer("full")
        self._hosts[host] = now
        self.waiting[knock.wallet] = WaitingKnock(knock.wallet, knock.name, now, host)
        return KnockAnswer("waiting")

    def forget(self, now: float) -> None:
        """Forget computers that stopped knocking, hosts that may knock again, and answers that were given long ago."""
        self._answers = {
            wallet: (answer, since)
            for wallet, (answer, since) in self._answers.items()
            if since is None or now - since < REMEMBERED_SECONDS
        }
        self.waiting = {key: one for key, one in self.waiting.items() if now - one.seen_at < FORGOTTEN_SECONDS}
        self._hosts = {host: at for host, at in self._hosts.items() if now - at < PAUSE_SECONDS}

    def find(self, wallet_id: str) -> WaitingKnock | None:
        """The waiting knock of a wallet."""
        return next((one for one in self.waiting.values() if wallet_id_of(one.wallet) == wallet_id), None)

    def answer(self, wallet: bytes, member_pass: bytes | None) -> None:
        """Record the owner's answer: a pass, or None for a refusal. The next knock of the wallet gets it."""
        self.waiting.pop(wallet, None)
        answer = KnockAnswer("refused") if member_pass is None else KnockAnswer("allowed", member_pass)
        self._answers[wallet] = answer, None


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
        host = near_host(network, sender)
        if knock.run != self._run_id or not host:
            raise RequestRefusedError("Only computers on the same local network may knock here.")
        answer = self.knocks.knock(host, knock, anyio.current_time())
        self._changed()
        return answer


def _has_pass(answer: KnockAnswer, knock: Knock, owner: bytes) -> bool:
    data, wallet = answer.member_pass, wallet_id_of(knock.wallet)
    return data is not None and is_pass_of(data, wallet, RunId(knock.run), owner)


def near_host(network: Network, peer: NodeId) -> str:
    """IP address of a peer on the local network; "" for any other.

    A public IPv4 address is never near: the network of a server may contain half a city.
    """
    hosts = [_host_of(one.address) for one in network.transport.connections() if one.peer == peer]
    is_local = all(host and is_near(host) and (":" in host or scope_of(host) is not Scope.WORLD) for host in hosts)
    return hosts[0] if hosts and is_local else ""


def _host_of(address: str) -> str:
    """IP address of a direct connection; "" for one through a relay."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in {"ip4", "ip6"} and "p2p-circuit" not in parts else ""


async def knock_at_all(networking: Networking, knock: Knock, owner: bytes) -> KnockAnswer | None:
    """Knock at every connected node of the local network; the answer that says most, or None without any.

    Other nodes do not learn the name of this computer. Any of them may answer: an answer with a pass that the run's
    owner, given by the public key, has not signed for this wallet counts for nothing.
    """
    network = networking.current
    if network is None:
        return None
    found: list[KnockAnswer] = []

    async def ask(peer: NodeId) -> None:
        try:
            frame = await network.transport.request(
                peer, Frame(KNOCK_KIND, knock), reply=FrameLimits(message=KnockAnswer), timeout_seconds=ASK_SECONDS
            )
            answer = frame.read(KnockAnswer)
            if answer.state != "allowed" or _has_pass(answer, knock, owner):
                found.append(answer)
        except NeuroShardError:
            return  # it is not the owner's

    async with anyio.create_task_group() as tasks:  # one that is silent delays no other
        for peer in sorted(network.transport.peers()):
            if near_host(network, peer):
                tasks.start_soon(ask, peer)
    order: tuple[State, ...] = ("allowed", "waiting", "refused", "full")
    return min(found, key=lambda one: order.index(one.state), default=None)
