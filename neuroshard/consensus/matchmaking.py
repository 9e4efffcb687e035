"""Matchmaking of a stage's replicas: when this node enters the next step, with whom, and whether it is behind. Pure.

Nobody calls anybody. Each node counts the work that the replicas of its line report and enters when the step is due;
the intent of a seat brings the others in. Only replicas that answered lately are expected, so a silent one costs the
others nothing. Where strangers take part, only the work of established members counts, and nobody waits for others.

    this node's state                       what it does
    is the chain's newest, step not due     trains
    is the chain's newest, step due         enters, if a quorum of the seats is here and it may take part
    a seat has sent its intent for the step enters
    a replica reports a greater height      asks for its chain, and adopts what the chain proves
    the chain proves a newer state          catches up by aggregates, or downloads the state
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from torch import Tensor

from neuroshard.consensus.chain import Chain, ChainLedger, Step
from neuroshard.consensus.committee import ChangeParameters, GroupMember, Seat, has_one_node_per_wallet
from neuroshard.consensus.effects import AnyBody
from neuroshard.consensus.foundation import SignedFoundation
from neuroshard.consensus.round_messages import VerifiedBody
from neuroshard.consensus.sync_strategies import Abandoned, StageRounds
from neuroshard.identity.node_revocations import RevokedPairs
from neuroshard.optim.outer import CertifiedWork
from neuroshard.state.outer_state import round_is_due
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.rounds import Voter
from neuroshard.types import NodeId, WalletId

ASKED_AT_ONCE = 16  # replicas that have not answered lately
NEWCOMER_SHARE = 0.1  # of the time since the last step, for which an open run waits for strangers
SILENT_SECONDS, SILENT_HEIGHTS = 600.0, 6  # without an answer of a seat, both: then the others may remove it


@dataclass(frozen=True)
class WorkToRound:
    """This replica's work towards the next round."""

    done: int  # sequences since the round before
    share: float  # sequences after which its part is done
    elapsed_seconds: float  # since the round before
    usual_seconds: float = 0.0  # per sequence, before the round; 0 if unknown

    @property
    def seconds_per_sequence(self) -> float:
        """Pace since the round before, or the usual one while nothing is done."""
        return self.elapsed_seconds / self.done if self.done else self.usual_seconds

    @property
    def seconds_left(self) -> float:
        """Expected seconds until the share is done; negative: since when it is.

        Nothing done for longer than usual will take at least as long again: the replica may be paused.
        """
        if not self.done:
            return max(self.share * self.usual_seconds - self.elapsed_seconds, self.elapsed_seconds)
        return (self.share - self.done) * self.seconds_per_sequence


@dataclass(frozen=True)
class RoundTimes:
    """Times of matchmaking, in seconds."""

    look_seconds: float = 10.0  # between two status queries
    near_seconds: float = 1.0  # between two status queries when a step is near
    quick_seconds: float = 0.2  # the same when this replica's share of the work is done
    query_seconds: float = 0.02  # per replica: the least time between two of its status queries, for all of them
    probe_seconds: float = 10.0  # between two queries of replicas that have not answered lately
    absent_seconds: float = 30.0  # since the last answer of a replica: nobody waits for it any longer
    patience_seconds: float = 30.0  # for which a lone seat waits for a replica with another state
    newcomer_seconds: float = 180.0  # for a node that downloads the state of a lone replica, per outer step
    stranger_share: float = 0.5  # of the time since the last step: instead, if the node may be a stranger's
    retry_seconds: float = 5.0  # after an abandoned round; doubles each time
    longest_retry_seconds: float = 300.0
    behind_seconds: float = 15.0  # of failed attempts to catch up, before the state is downloaded

    def pause(self, work: WorkToRound, replicas: int) -> float:
        """Seconds until the next status query of this number of other replicas.

        A step may be due after two inner steps. So the next query comes when this replica should have done its share,
        and soon again while only others are missing.
        """
        quick = min(self.near_seconds, max(self.quick_seconds, self.query_seconds * replicas))
        left = work.seconds_left
        if left <= 0:
            return min(self.near_seconds, max(quick, -left / 10))  # the others may be much slower, or paused
        return min(self.near_seconds if 2 * work.done >= work.share else self.look_seconds, max(quick, left))


class RunSwarm(Protocol):
    """The run as this node sees it: who trains its stages, and what its owner has said."""

    @property
    def word(self) -> SignedFoundation | None:
        """The owner's newest statement, which names the wallets that may get seats among strangers."""
        ...

    @property
    def changes(self) -> Sequence[ChangeParameters]:
        """The later versions of the run's parameters that the owner has signed, in order."""
        ...

    @property
    def may_meet(self) -> bool:
        """Whether this node can take part in a round: it is awake, and may send large messages."""
        ...

    def replicas(self, stage: int) -> Sequence[NodeId]:
        """The other nodes that train a stage, as known here."""
        ...

    def newcomers(self) -> frozenset[NodeId]:
        """Nodes that are downloading a state from here to train it."""
        ...

    def wallet_of(self, node_id: NodeId) -> WalletId | None:
        """The wallet of a node; None if it is not known."""
        ...

    def is_removed(self, wallet: WalletId) -> bool:
        """Whether the owner has ended the membership of a wallet."""
        ...

    @property
    def revoked(self) -> RevokedPairs:
        """Nodes that may not act for these wallets any more: the wallets have revoked them."""
        ...

    def sign(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        """The body of a message together with its claim, signed by this node."""
        ...


class StageState(Protocol):
    """The outer state of a stage, which changes with each completed round."""

    def own_status(self) -> ReplicaStatus:
        """The status of this state: its outer step, its root, and the work since the last round and before it."""
        ...

    def sequences_due(self, members: int) -> int:
        """Sequences of this number of members together, after which the next round is due."""
        ...

    def measured_candidates(self) -> int:
        """Number of candidates for the next outer step that the seats measure; 1: they measure none."""
        ...

    async def root_after(self, aggregate: Tensor, outer_step: int, work: CertifiedWork) -> str:
        """The root after an aggregate (k,) of this work at an outer step; "" if the state is at another one."""
        ...

    def note_abandoned(self, outcome: Abandoned) -> None:
        """Count a round that was abandoned while training continued."""
        ...


class Hold(Protocol):
    """The requests to a trainer."""

    restarting: int  # number of its loops that cannot act until the ranks of a site have started again

    @property
    def must_hold(self) -> str | None:
        """The reason why training pauses or ends; None if it continues."""
        ...


class SavedStates(Protocol):
    """The checkpoints of a stage on this disk."""

    @property
    def saved_outer_step(self) -> int:
        """The outer step of the newest one."""
        ...


class AggregateVote(Protocol):
    """This node's vote on an aggregate, and its choice of the outer step."""

    async def objection(self, aggregate: Tensor, next_root: str, choice: int | None = None) -> str:
        """The reason not to vote for an aggregate (k,) that leads to this root; "" for none.

        `choice` is the measured outer step; None: the last one.
        """
        ...

    async def choice(self, aggregate: Tensor) -> int:
        """The place of the candidate for the outer step that this node chooses; 0 is the plain mean."""
        ...


class Replica(Protocol):
    """This node's replica of a stage: all that the rounds of the stage need of it."""

    @property
    def member(self) -> GroupMember:
        """This node."""
        ...

    @property
    def stage(self) -> StageName:
        """The stage, as messages name it."""
        ...

    @property
    def terms(self) -> StageRounds:
        """The properties that all rounds of the stage share."""
        ...

    @property
    def outer(self) -> StageState:
        """The state that the rounds change."""
        ...

    @property
    def vote(self) -> AggregateVote:
        """The judge of their aggregates."""
        ...

    @property
    def control(self) -> Hold:
        """The requests to the trainer of the stage."""
        ...

    @property
    def keeper(self) -> SavedStates:
        """The checkpoints of the stage."""
        ...

    @property
    def copy_keeper(self) -> NodeId | None:
        """The other node with the newest copy of the state."""
        ...


@dataclass(frozen=True)
class DueStep:
    """A step that this node enters, and the members that it expects there."""

    step: Step
    members: tuple[GroupMember, ...]  # with this node
    invited: frozenset[NodeId] = frozenset()  # strangers at this node's state, which may join
    newcomer_seconds: float = inf  # for which the step waits for what such members send


@dataclass(frozen=True)
class Look:
    """The answers of the replicas at one look."""

    own: ReplicaStatus
    others: Mapping[NodeId, ReplicaStatus]  # those that answered
    step: Step | None  # the step from this node's state; None: the chain does not lead to this state
    now: float  # seconds of a clock that only rises


class Matchmaking:
    """The decisions of one replica. Its owner asks the others and performs what follows."""

    def __init__(self, replica: Replica, swarm: RunSwarm, times: RoundTimes, now: float = 0.0) -> None:
        self.times = times
        self._replica = replica
        self._swarm = swarm
        self._node_id, self._stage = replica.member.node_id, replica.terms.stage
        self._answered: dict[NodeId, float] = {}  # when a replica answered last
        self._look: Look | None = None
        self._round_ended = now
        self._sequence_seconds = 0.0  # pace of this replica; 0 if unknown
        self._due_since: float | None = None
        self._entered = "", frozenset[NodeId]()  # seats that have sent an intent for a step
        self._retry_at = 0.0
        self._failures = 0
        self._awaited = "", 0.0  # newcomers, in the step from this root, since then
        # the states of replicas that answer, and since when: one that is behind may be about to follow
        self._seen: dict[NodeId, tuple[str, float]] = {}
        self._probed: dict[NodeId, ReplicaStatus] = {}  # newest answers to `unproven`
        self._newest: Mapping[NodeId, ReplicaStatus] = {}  # answers of the last look, and of the one before
        self._before: Mapping[NodeId, ReplicaStatus] = {}
        self.has_probed = False  # before, a replica that is online would look like one that is not
        self._turns = 0
        self.unheard: dict[NodeId, tuple[int, float]] = {}  # seats that do not answer, and since which height and time

    @property
    def may_take_part(self) -> bool:
        """Whether this node may enter a step now.

        No replica may wait for a node that has agreed to a round and then pauses, sleeps, ends, restarts its ranks or
        sends nothing.
        """
        control = self._replica.control
        return control.must_hold is None and not control.restarting and self._swarm.may_meet

    # Whom to ask

    def responsive(self, now: float) -> list[NodeId]:
        """Replicas that have answered lately."""
        within = self.times.absent_seconds
        return [node for node in self._swarm.replicas(self._stage) if now - self._answered.get(node, -within) < within]

    def asked(self, ledger: ChainLedger | None, now: float) -> list[NodeId]:
        """Replicas whose answers a look waits for: they have answered lately, and they count."""
        here = self.responsive(now)
        if ledger is None or not ledger.committee.is_open:
            return here
        return [node for node in here if ledger.awaits(node, self._swarm.wallet_of(node))]

    def unproven(self, ledger: ChainLedger | None, now: float) -> list[NodeId]:
        """Some of the other replicas, different ones each time: they are asked next to the others, never awaited."""
        return self._some(set(self._swarm.replicas(self._stage)).difference(self.asked(ledger, now)), ledger)

    def _some(self, nodes: Collection[NodeId], ledger: ChainLedger | None) -> list[NodeId]:
        """The seats among these nodes and some others, different ones each time: no number of names hides a seat.

        Neither does it hide a wallet that the owner has named.
        """
        seats = () if ledger is None else ledger.committee.seats
        first = {seat.node_id for seat in seats}.intersection(nodes)
        if ledger is not None and ledger.strangers is not None:
            first |= {node for node in nodes if ledger.awaits(node, self._swarm.wallet_of(node))}
        rest = sorted(set(nodes) - first)
        start = self._turns % max(1, len(rest))
        self._turns += ASKED_AT_ONCE
        return [*sorted(first), *(rest[start:] + rest[:start])[:ASKED_AT_ONCE]]

    def note_probed(self, found: Mapping[NodeId, ReplicaStatus], now: float) -> None:
        """Record the answers of `unproven` replicas."""
        self._probed |= found
        self.note_answers(list(found), now)

    def with_probed(
        self, asked: Sequence[NodeId], answers: Mapping[NodeId, ReplicaStatus], now: float
    ) -> Mapping[NodeId, ReplicaStatus]:
        """Record the answers of a look, and return them with the last ones of replicas that no look waits for."""
        self.note_answers(list(answers), now)
        for node in self._probed.keys() - set(self.responsive(now)).difference(asked):
            del self._probed[node]
        self._before, self._newest = self._newest, {**self._probed, **answers}
        return self._newest

    def note_answers(self, nodes: Sequence[NodeId], now: float) -> None:
        """Record that these replicas have answered."""
        self._answered |= dict.fromkeys(nodes, now)
        for node in self._answered.keys() - set(self._swarm.replicas(self._stage)):
            del self._answered[node]

    def pause_seconds(self, now: float, *, is_soon: bool) -> float:
        """Seconds until the next look."""
        if is_soon or self._look is None or self._due_since is not None:
            return self.times.near_seconds
        work = self.work(now)
        self._sequence_seconds = work.seconds_per_sequence
        step = self._look.step
        return self.times.pause(work, len(self.asked(None if step is None else step.ledger, now)))

    def work(self, now: float) -> WorkToRound:
        """This replica's work towards the next step."""
        done, share = self._replica.outer.own_status().sequences, self._replica.outer.sequences_due(2) / 2
        return WorkToRound(done, share, now - self._round_ended, self._sequence_seconds)

    # What follows

    def looked(self, look: Look) -> DueStep | None:
        """Take the answers in. Returns the step to enter now, if there is one."""
        self._look = look
        ready = self._ready(look)
        before, self._seen = self._seen, {}
        for node, other in look.others.items():
            seen = before.get(node)
            self._seen[node] = seen if seen is not None and seen[0] == other.root else (other.root, look.now)
        step = look.step
        if step is None or look.own.in_round or len(ready) < 2 or not step.is_quorum(ready):
            return None
        if not self._is_due(look, step, ready):
            self._due_since = None
            return None
        self._due_since = look.now if self._due_since is None else self._due_since
        if look.now < self._retry_at or not self.may_take_part:
            return None
        return self._due_step(step, ready, look.now)

    def heard_intent(self, sender: NodeId, step: Step, now: float) -> DueStep | None:
        """A member has entered this step. Returns the step to enter now, if its intent brings this node in.

        The intents of more seats than may lie do: liars alone cannot end everybody's interval.
        """
        look = self._look
        if look is None or sender not in step.seats:
            return None
        self._answered[sender] = now
        known = self._entered[1] if self._entered[0] == step.id else frozenset[NodeId]()
        self._entered = step.id, known | {sender}
        if len(self._entered[1]) <= step.committee.faults or not self.may_take_part:
            return None
        return self._due_step(step, [*self._ready(look), sender], now)

    def ahead(self, ledger: ChainLedger | None, look: Look) -> list[NodeId]:
        """Some of the replicas that report a greater height than this node's."""
        return self._some([node for node, other in look.others.items() if other.height > look.own.height], ledger)

    def has_newer(self, chain: Chain, look: Look, doubted: Collection[NodeId]) -> bool:
        """Whether a replica that counts reports the newest certified state, or one from which aggregates lead to it.

        Neither is true of a replica that makes several steps alone between two looks: this one learns the chain to a
        state after the look that reports the state. Such a replica was at a certified state and has continued since.
        """
        for node, other in look.others.items():
            if node in doubted or not chain.ledger.counts(node):
                continue
            after = chain.values_after(other.root, other.outer_step)
            if after is not None and not any(value.is_lone for value in after):
                return True
            before = self._before.get(node, other)
            has_moved = other.outer_step > before.outer_step
            if has_moved and chain.values_after(before.root, before.outer_step) is not None:
                return True
        return False

    def ended(self, now: float, *, completed: bool) -> None:
        """Record the end of a step, completed or abandoned."""
        self._due_since = None
        if completed:
            self._round_ended, self._failures, self._retry_at = now, 0, 0.0
            return
        pause = min(self.times.retry_seconds * 2.0**self._failures, self.times.longest_retry_seconds)
        self._failures, self._retry_at = self._failures + 1, now + pause

    def is_alone(self, step: Step | None, now: float) -> bool:
        """Whether a step of this node alone is allowed: it is a quorum, and no replica here could take part.

        A node that is downloading this state must find it unchanged; otherwise its first steps would belong to
        another state.
        """
        if step is None or not step.is_quorum({self._node_id}):
            return False
        look = self._look
        others: Mapping[NodeId, ReplicaStatus] = {} if look is None else look.others
        place = step.standing.height, step.root
        here = {node for node, other in others.items() if (other.height, other.root) == place}
        if self._swarm.newcomers() - here and self._may_wait_for_newcomers(step, now):
            return False
        waits = (
            self._is_awaited(node, others.get(node), now, is_here=node in here)
            for node in self.responsive(now)
            if node in here or step.ledger.counts(node)
        )
        return look is not None and self.has_probed and not any(waits)

    def _is_awaited(self, node: NodeId, other: ReplicaStatus | None, now: float, *, is_here: bool) -> bool:
        """Whether a replica that answers takes part in the next step, or may do so soon.

        One that is behind gets some time for each state that it shows, so one that is stuck costs the others nothing.
        One whose state is not live may be starting.
        """
        if other is None:
            return True  # the next look shows its state
        _, since = self._seen.get(node, ("", now))
        return other.is_ready and (is_here or now - since < self.times.patience_seconds)

    def obstacle(self, step: Step | None, now: float) -> str:
        """The absent seats without which the next step cannot complete, in words for people; "" if there are enough."""
        here = {self._node_id, *self.responsive(now)}
        if step is None or step.is_quorum(here):
            return ""
        missing = ", ".join(seat.wallet_id[:8] for seat in step.committee.seats if seat.node_id not in here)
        return (
            f"Training continues, but no step completes: too few voting nodes are online. Start those of {missing}. "
            "If they do not come back, the run's owner or a deputy can decide: `neuroshard run refound`. If these are "
            "gone, too, you can continue from your own state: `neuroshard run branch`."
        )

    def voters(self, chain: Chain | None, now: float) -> tuple[Voter, ...]:
        """The seats of the chain's newest committee. Notes which of them do not answer."""
        if chain is None:
            return ()
        here, found = {self._node_id, *self.responsive(now)}, list[Voter]()
        before, self.unheard = self.unheard, {}
        for seat in chain.ledger.committee.seats:
            # the votes of a revoked node do not count, also if it answers
            votes = seat.node_id in here and (seat.wallet_id, seat.node_id) not in self._swarm.revoked
            found.append(Voter(seat.node_id, seat.wallet_id, seat.wallet_id == chain.owner, votes))
            if not votes:
                self.unheard[seat.node_id] = before.get(seat.node_id, (chain.standing.height, now))
        return tuple(found)

    def silent_seats(self, step: Step, now: float) -> list[Seat]:
        """The seats that have not answered for long.

        While no step completes, no seat becomes silent. Neither does one while this computer sleeps.
        """
        silent = list[Seat]()
        for seat in step.committee.seats:
            height, since = self.unheard.get(seat.node_id, (step.height, now))
            if step.standing.height - height >= SILENT_HEIGHTS and now - since >= SILENT_SECONDS:
                silent.append(seat)
        return silent

    def _may_wait_for_newcomers(self, step: Step, now: float) -> bool:
        """Whether this step may still wait: without a limit, newcomers to a lone node could delay it for ever.

        The names of strangers cost nothing, so they delay it by a part of the time that it takes without them.
        """
        root = self._replica.outer.own_status().root
        if self._awaited[0] != root:
            self._awaited = root, now
        most = self.times.newcomer_seconds
        if step.committee.is_open:
            most = min(most, self.times.stranger_share * (self._awaited[1] - self._round_ended))
        return now - self._awaited[1] < most

    def _ready(self, look: Look) -> list[NodeId]:
        """The replicas on this node's line that could take part now, with this node."""
        if not look.own.root:
            return []
        here = [
            node
            for node, other in look.others.items()
            if other.is_live and other.is_ready and (other.height, other.root) == (look.own.height, look.own.root)
        ]
        return [self._node_id, *sorted(here)]

    def _is_due(self, look: Look, step: Step, ready: Sequence[NodeId]) -> bool:
        rounds, own = self._replica.terms, look.own
        statuses = {**look.others, self._node_id: own}
        work = [statuses[node].sequences for node in ready if step.ledger.counts(node)]
        members = max(1, sum(done > 0 for done in work))
        return round_is_due(
            counted_sequences=sum(work),
            enough_sequences=self._replica.outer.sequences_due(members),
            elapsed_seconds=look.now - self._round_ended,
            max_round_seconds=rounds.parameters_at(own.outer_step).max_round_seconds,
        )

    def _due_step(self, step: Step, nodes: Sequence[NodeId], now: float) -> DueStep:
        """The step with the members among these nodes for which the others wait and whose wallets are known.

        In an open run only one per wallet.
        """
        members = [self._replica.member]
        for node in dict.fromkeys(nodes):
            wallet = None if node == self._node_id else self._swarm.wallet_of(node)
            member = None if wallet is None or not step.ledger.awaits(node, wallet) else GroupMember(node, wallet)
            if member is not None and (not step.committee.is_open or has_one_node_per_wallet([*members, member])):
                members.append(member)
        due = DueStep(step, tuple(sorted(members)))
        if not step.committee.is_open:
            return due
        invited = frozenset(node for node in nodes if not step.ledger.awaits(node, self._swarm.wallet_of(node)))
        return replace(due, invited=invited, newcomer_seconds=NEWCOMER_SHARE * (now - self._round_ended))
