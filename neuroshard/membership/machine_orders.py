"""Orders between the machines of one wallet: the messages, their signatures, and the rule which order counts. Pure.

A request contains an order that the wallet signed for one sender and one receiver, and the delegation that shows that
the sender is a node of the wallet. There are three orders: report the status, pause, and resume. No message carries
settings, updates or a shutdown.

Pauses and resumptions have rising numbers. If two machines send at once, the order with the higher number counts
everywhere, and of two equal numbers that of the node with the higher id. So all machines end in the same state,
whichever order arrives first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, Struct

from neuroshard.errors import DataError
from neuroshard.identity import Delegation, KnownDelegations, NodeIdentity, Signed, Signer
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS, DelegationGrant, MalformedClaimError, sign_message
from neuroshard.identity.node_revocations import RevokedNodes, revoked_sentence
from neuroshard.messages import FrameLimits
from neuroshard.network.transport import RequestRefusedError
from neuroshard.status.machines import MAX_SENTENCE_CHARACTERS, MachineStatus
from neuroshard.types import MAX_NODE_ID_CHARACTERS, NodeId, UnixSeconds

MACHINE_KIND = "machines"
MAX_ORDER_NUMBER = 2**53  # every JSON reader represents integers up to this one exactly
MAX_REQUEST_BYTES = 2048
MAX_ANSWER_BYTES = 8192
NamedNode = Annotated[NodeId, Meta(max_length=MAX_NODE_ID_CHARACTERS)]
OrderKind = Literal["status", "pause", "resume"]


class MachineOrder(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of a request that the wallet signs."""

    kind: OrderKind
    number: Annotated[int, Meta(ge=0, le=MAX_ORDER_NUMBER)]  # rises from order to order; 0 for a status
    time: UnixSeconds
    sender: NamedNode
    receiver: NamedNode


class MachineRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request to a machine of the same wallet."""

    delegation: Signed[DelegationGrant]  # of the sender
    order: Signed[MachineOrder]  # by the wallet


class MachineAnswer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer: the machine's status, the number of its newest order, and what became of this one."""

    delegation: Signed[DelegationGrant]  # of the machine that answers
    status: MachineStatus
    newest: Annotated[int, Meta(ge=0, le=MAX_ORDER_NUMBER)]
    has_obeyed: bool = True
    message: Annotated[str, Meta(max_length=MAX_SENTENCE_CHARACTERS)] = ""


REQUEST_LIMITS = FrameLimits(max_header_bytes=MAX_REQUEST_BYTES, message=MachineRequest)
ANSWER_LIMITS = FrameLimits(max_header_bytes=MAX_ANSWER_BYTES, message=MachineAnswer)


@dataclass(frozen=True, order=True)
class OrderMark:
    """The place of an order among all orders of a wallet."""

    number: int
    sender: str


@dataclass
class WalletOrders:
    """Signs this node's requests, and checks requests and answers of other nodes of its wallet."""

    wallet: Signer = field(repr=False)
    identity: NodeIdentity
    newest: OrderMark  # of the orders that this node has accepted, its own included
    revoked_nodes: RevokedNodes = field(default_factory=RevokedNodes)
    _known: KnownDelegations = field(default_factory=KnownDelegations, init=False)

    def request(self, kind: OrderKind, receiver: NodeId, number: int, now: float) -> MachineRequest:
        """Sign a request of this node."""
        order = MachineOrder(kind, number, now, self.identity.node_id, receiver)
        return MachineRequest(self.identity.delegation_at(now).signed, sign_message(self.wallet, MACHINE_KIND, order))

    def next_mark(self, heard: int, now: float) -> OrderMark:
        """The mark of a new order of this node: above all that it knows, `heard` from other machines included."""
        number = max(self.newest.number + 1, heard + 1, int(now * 1000))
        return OrderMark(min(number, MAX_ORDER_NUMBER), self.identity.node_id)

    def check(self, sender: NodeId, request: MachineRequest, now: float) -> MachineOrder:
        """Return the order in a request that an authenticated peer sent. Raises RequestRefusedError.

        A peer of another wallet is refused before any signature is verified, so a flood costs it more than this node.
        """
        self._check_delegation(sender, request.delegation, now)
        try:
            request.order.verify(self.wallet.public_key, MACHINE_KIND)
            order = request.order.read(MachineOrder)
        except DataError as error:
            raise RequestRefusedError(f"The order is not one of this wallet: {error.message}") from None
        if (order.sender, order.receiver) != (sender, self.identity.node_id):
            raise RequestRefusedError("The order is for another node, or another node has sent it.")
        if abs(order.time - now) > MAX_CLOCK_SKEW_SECONDS:
            raise RequestRefusedError("The order is too old, or dated in the future: compare the computers' clocks.")
        return order

    def accepts(self, mark: OrderMark) -> bool:
        """Whether a pause or a resumption is newer than all that this node has accepted."""
        return mark > self.newest

    def accept(self, mark: OrderMark) -> None:
        """Accept no older pause or resumption from now on. The caller has stored the mark."""
        self.newest = mark

    def is_own(self, machine: NodeId, answer: MachineAnswer, now: float) -> bool:
        """Whether an answer of an authenticated peer shows that the peer is a node of this wallet."""
        try:
            self._check_delegation(machine, answer.delegation, now)
        except RequestRefusedError:
            return False
        return True

    def _check_delegation(self, node: NodeId, signed: Signed[DelegationGrant], now: float) -> None:
        try:
            delegation = Delegation.read(signed)
            # Both comparisons cost nothing. Only a delegation that names this wallet and this peer is verified.
            if delegation.grant.wallet_public_key != self.wallet.public_key:
                raise RequestRefusedError("This node answers machines of its own wallet only.")
            if delegation.node_id != node:
                raise RequestRefusedError("The delegation is that of another node.")
            if self.revoked_nodes.has(node, self.identity.wallet_id):
                raise RequestRefusedError(revoked_sentence(node, self.identity.wallet_id))
            delegation.verify(now, self._known)
        except MalformedClaimError:
            raise RequestRefusedError("The delegation cannot be read.") from None
        except DataError as error:
            raise RequestRefusedError(f"The delegation is not valid: {error.message}") from None
