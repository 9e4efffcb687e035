"""The members of a run, as one node sees them: the wallet behind each node, and the passes of the wallets.

Among friends a node is refused if its wallet has no valid pass, and in an organised run if it has neither a live
admission nor a pass. There the organiser's word ends a pass, too, and the owner's word an admission. In every run a
node is refused if its wallet has revoked it. The membership gate asks here for every request. Nodes become known by the
claims that they sign.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity
from neuroshard.identity.admissions import (
    MAX_ADMISSIONS,
    MAX_REVOKED,
    Admission,
    AdmissionBytes,
    AdmissionError,
    AdmissionRegister,
    AdmissionRevocation,
)
from neuroshard.identity.invitations import InvitationError, PassBytes, RevocationBytes
from neuroshard.identity.node_revocations import (
    MAX_NODE_REVOCATIONS,
    NodeRevocationBytes,
    RevokedNodes,
    revoked_sentence,
)
from neuroshard.identity.pass_register import ASK_FOR_ONE, MAX_MEMBERS, MAX_REVOCATIONS, PassRegister
from neuroshard.membership.download_rights import Readers
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.limits import UploadPacer
from neuroshard.types import NodeId, WalletId
from neuroshard.waiting import Signal

MAX_NODES = 8192
MOST_NEWEST = 4  # papers of a kind that every handshake contains: the other side may not have heard of them
PASS_SECONDS = 5.0  # in which the pass of a newcomer comes after its first report
MOST_UNKNOWN = 64  # wallets for which peers are greeted again, so that no number of free names causes more handshakes
_LOG = logging.getLogger(__name__)


class Papers(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Passes, admissions, and signed revocations of passes, nodes and admissions, as they are stored and sent."""

    passes: Annotated[tuple[PassBytes, ...], Meta(max_length=MAX_MEMBERS)] = ()
    revocations: Annotated[tuple[RevocationBytes, ...], Meta(max_length=MAX_REVOCATIONS)] = ()
    revoked_nodes: Annotated[tuple[NodeRevocationBytes, ...], Meta(max_length=MAX_NODE_REVOCATIONS)] = ()
    admissions: Annotated[tuple[AdmissionBytes, ...], Meta(max_length=MAX_ADMISSIONS)] = ()
    ended: Annotated[tuple[AdmissionBytes, ...], Meta(max_length=MAX_REVOKED)] = ()  # revocations of admissions

    def part(self, max_bytes: int, random: Random) -> Papers:
        """Papers of at most `max_bytes`, revocations first: of each kind the newest ones, and random others."""
        left = max_bytes
        chosen: list[list[bytes]] = []
        for papers in (self.revocations, self.revoked_nodes, self.ended, self.passes, self.admissions):
            chosen.append([])
            older, newest = papers[:-MOST_NEWEST], papers[-MOST_NEWEST:]
            for paper in (*newest, *random.sample(older, len(older))):
                if len(paper) > left:
                    break
                chosen[-1].append(paper)
                left -= len(paper)
        revocations, revoked_nodes, ended, passes, admissions = map(tuple, chosen)
        return Papers(passes, revocations, revoked_nodes, admissions, ended)


NOTHING_SHOWN = Papers()


@dataclass
class RunMembers:
    """Which nodes may take part in a run. Belongs to the event loop.

    `trusted` are nodes that this node's owner or invitation named: they may show a pass whose invitation has expired.
    """

    register: PassRegister
    identity: NodeIdentity
    own_pass: bytes | None
    now: Callable[[], float]  # seconds since the epoch
    trusted: frozenset[NodeId] = frozenset()
    revoked_nodes: RevokedNodes = field(default_factory=RevokedNodes)
    # the wallets that the owner has named, in a run that is open to strangers; None among friends
    named: Callable[[], Collection[WalletId]] | None = None
    admissions: AdmissionRegister | None = None  # of an organised run; None: a node needs no admission
    upload: UploadPacer = field(default_factory=UploadPacer)  # with the owner's limit, of which readers get a share
    readers: Readers | None = field(default=None, init=False)  # of an organised run: waiting nodes that may download
    own_admission: bytes | None = field(default=None, init=False)
    changed: Signal = field(default_factory=Signal, init=False)  # a revocation, or an admission of this node
    _disputes: int = field(default=0, init=False)
    # wallets without a pass, since when members pass their reports on; infinite once that is a dispute
    _unknown: dict[WalletId, float] = field(default_factory=dict[WalletId, float], init=False)
    # wallet of each node and end of its delegation, the newest last; nodes without a pass displace only each other
    _wallets: dict[NodeId, tuple[WalletId, float]] = field(
        default_factory=dict[NodeId, "tuple[WalletId, float]"], init=False
    )
    _strangers: dict[NodeId, tuple[WalletId, float]] = field(
        default_factory=dict[NodeId, "tuple[WalletId, float]"], init=False
    )

    def __post_init__(self) -> None:
        if self.admissions is not None:
            self.readers = Readers(self.admissions, self.refusal, self._ending_of, self.now, self.upload)

    def may_read(self, peer: NodeId) -> bool:
        """Whether a peer that is refused otherwise may download as a waiting node. This is a check of the gate."""
        return self.readers is not None and self.readers.may_read(peer)

    def refusal(self, peer: NodeId) -> str:
        """The reason why a peer is not served; "" if its wallet may take part. This is the check of the gate."""
        if peer == self.identity.node_id:
            return ""
        wallet, until = self._wallets.get(peer) or self._strangers.get(peer, (None, 0.0))
        if self.is_closed and (wallet is None or self.now() >= until):
            return self._unknown_node(peer)
        if wallet is None:
            # free names can make this node forget a revoked one, which must not help it
            return f"Node {peer} has not said its wallet." if self.revoked_nodes.is_named(peer) else ""
        return self._refusal_of(peer, wallet)

    def _refusal_of(self, node: NodeId, wallet: WalletId) -> str:
        revoked = self.revoked_nodes.has(node, wallet)
        return revoked_sentence(node, wallet) if revoked else self._lacks_right(node, wallet)

    def _ending_of(self, node: NodeId, wallet: WalletId) -> str:
        """The sentence about a node or wallet that organiser, owner or wallet ended; otherwise ""."""
        if self.revoked_nodes.has(node, wallet):
            return revoked_sentence(node, wallet)
        ended = "" if self.admissions is None else self.admissions.ending(node, wallet)
        return ended or self.register.removal(wallet)

    @property
    def is_closed(self) -> bool:
        """Whether a node needs a pass or an admission."""
        return self.named is None or self.admissions is not None

    def _unknown_node(self, node: NodeId) -> str:
        if self.admissions is None:
            return f"This is a run of friends, and node {node} has not shown a pass. {ASK_FOR_ONE}"
        return f"This is an organised run, and node {node} has not shown an admission. It joins through the organiser."

    def _lacks_right(self, node: NodeId, wallet: WalletId) -> str:
        if self.admissions is None:
            return self.register.refusal(wallet) if self.named is None else ""
        if wallet == self.register.owner_id:
            return ""
        if ended := self.admissions.ending(node, wallet) or self.register.removal(wallet):
            return ended  # the word of the organiser ends a pass, too, and that of the owner an admission
        missing = self.admissions.refusal(node, wallet, self.now())
        return missing if missing and self.register.refusal(wallet) else ""

    def introduce(self, node: NodeId, wallet: WalletId, delegated_until: float, shown: Papers = NOTHING_SHOWN) -> str:
        """Record the wallet of a node from a verified claim, with the pass and the admission that the claim shows.

        Returns the reason why the node may not take part, or "".
        """
        self._take_admissions(shown.admissions)
        reason = self._lacks_right(node, wallet)
        if reason and shown.passes:
            reason = self._admit(wallet, shown.passes[0], is_vouched=node in self.trusted)
            reason = reason or self._lacks_right(node, wallet)
        elif reason:
            self._note_unknown(wallet)
        if not reason:
            self._unknown.pop(wallet, None)
        self._wallets.pop(node, None)
        self._strangers.pop(node, None)
        table = self._strangers if reason else self._wallets
        if len(table) >= MAX_NODES:
            del table[next(iter(table))]
        table[node] = (wallet, delegated_until)
        return reason or self._refusal_of(node, wallet)

    def learn(self, papers: Papers) -> None:
        """Record passes that a member vouches for, and revocations. Those that are not valid are ignored.

        A revocation of a node counts only if the wallet has a place in the run, so the passes come first. Honest nodes
        pass on no false one, so the first one ends the work for its sender.
        """
        before = self._endings
        for data in papers.revocations:
            self._try(lambda data=data: self.register.revoke(data))
        for data in papers.ended if self.admissions is not None else ():
            self._try(lambda data=data: self.admissions is not None and self.admissions.revoke(data))
        self._take_admissions(papers.admissions)
        for data in papers.passes if self.is_closed else ():
            self._try(lambda data=data: self.register.admit(data, self.now(), is_vouched=True))
        for data in papers.revoked_nodes:
            if not self._try(lambda data=data: self.revoked_nodes.learn(data, self._has_place)):
                break
        if self._endings > before:
            self.changed.notify()

    def _take_admissions(self, admissions: tuple[bytes, ...]) -> None:
        register = self.admissions
        for data in admissions if register is not None else ():
            self._try(lambda data=data: register is not None and register.admit(data, self.now()))

    async def restore(self, load: Callable[[], Papers], offload: BlockingRunner) -> None:
        """Record the admissions that this node stored before a restart: it knew them while they were live.

        The file is read and its signatures are checked outside the event loop. Raises StorageError of `load`.
        """
        register = self.admissions
        if register is None:
            return
        known, ended = await offload(partial(_verified, load, register))
        for data, admission in known:
            self._try(partial(register.admit, data, self.now(), is_stored=True, verified=admission))
        is_news = [register.revoke(data, revocation) for data, revocation in ended]
        if any(is_news):
            self.changed.notify()

    def renew(self, admission: bytes, ended: tuple[bytes, ...] = ()) -> None:
        """Show this admission of this node from now on. `ended` are the organiser's newest revocations."""
        self.own_admission = admission
        self.learn(Papers(admissions=(admission,), ended=ended))
        self.changed.notify()

    def _note_unknown(self, wallet: WalletId) -> None:
        if wallet in self._unknown or len(self._unknown) < MOST_UNKNOWN:
            since = self._unknown.setdefault(wallet, self.now())
            if self.now() - since > PASS_SECONDS:
                self._disputes += 1
                self._unknown[wallet] = inf

    @property
    def news(self) -> int:
        """Number of reasons to greet all connected peers again, with all papers.

        Among friends such a reason is a wallet without a pass whose reports members pass on: they know another pass,
        or other words of the owner. In a run that is open to strangers it is a revocation, which has no gossip there.
        """
        return self._disputes if self.named is None else self.changed.count + self._disputes

    @property
    def _endings(self) -> int:
        ended = 0 if self.admissions is None else len(self.admissions.revocations())
        return len(self.register.revocations()) + self.revoked_nodes.count + ended

    def _has_place(self, wallet: WalletId) -> bool:
        if wallet in (self.identity.wallet_id, self.register.owner_id):
            return True
        if self.admissions is not None and self.admissions.has_wallet(wallet):
            return True
        return wallet in self.named() if self.named is not None else not self.register.refusal(wallet)

    def papers(self) -> Papers:
        """All passes and revocations that this node knows."""
        passes = tuple(known.encoded for known in self.register.passes())
        known = self.admissions
        signed = ((), ()) if known is None else (known.admissions(), known.revocations())
        return Papers(passes, self.register.revocations(), self.revoked_nodes.statements(), *signed)

    def knows(self, data: bytes) -> bool:
        """Whether a pass or an admission is recorded, or a pass waits for the owner's word, which must hear of it."""
        if self.admissions is not None and self.admissions.has(data):
            return True
        return any(known.encoded == data for known in (*self.register.passes(), *self.register.excess))

    def refused_nodes(self) -> list[NodeId]:
        """The known nodes that may not take part: of such wallets, or revoked."""
        known = (*self._wallets.items(), *self._strangers.items())
        return [node for node, (wallet, _) in known if self._refusal_of(node, wallet)]

    def _admit(self, wallet: WalletId, data: bytes, *, is_vouched: bool) -> str:
        try:
            self.register.admit(data, self.now(), is_vouched=is_vouched)
        except InvitationError as error:
            return str(error)
        return self.register.refusal(wallet)  # the pass may be that of another wallet

    def _try(self, act: Callable[[], object]) -> bool:
        """Whether a paper is valid."""
        try:
            act()
        except (InvitationError, DataError) as error:
            _LOG.debug("A pass or revocation that a peer knows is not used: %s", error)
            return False
        return True


def _verified(
    load: Callable[[], Papers], register: AdmissionRegister
) -> tuple[list[tuple[bytes, Admission]], list[tuple[bytes, AdmissionRevocation]]]:
    """The stored admissions and revocations that are valid. Only reads, so any thread may call it."""
    papers = load()
    known, ended = list[tuple[bytes, Admission]](), list[tuple[bytes, AdmissionRevocation]]()
    for data in papers.admissions:
        try:
            known.append((data, register.verify(data)))
        except AdmissionError as error:
            _LOG.debug("A stored admission is not used: %s", error)
    for data in papers.ended:
        try:
            ended.append((data, register.verify_revocation(data)))
        except AdmissionError as error:
            _LOG.debug("A stored revocation is not used: %s", error)
    return known, ended
