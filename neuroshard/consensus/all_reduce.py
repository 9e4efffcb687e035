"""The butterfly all-reduce of one view at one member: parts to reducers, statistics, one verdict, results. Pure.

This file makes no decision. A completed exchange yields an aggregate to vote on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median_low

from neuroshard.aggregation import GateVerdict, MemberFacts, Reduction, statistics_size
from neuroshard.consensus.chain import Step
from neuroshard.consensus.effects import (
    Accuse,
    Effect,
    EncodedContribution,
    Judge,
    Judged,
    MakeStatistics,
    Reduce,
    RoundConfig,
    Say,
)
from neuroshard.consensus.round_messages import (
    ContributionSent,
    Intent,
    ResultDigests,
    ResultSaid,
    StatementSaid,
    StatisticsDigests,
    VerifiedBody,
    commitment_of,
    members_of,
)
from neuroshard.consensus.slices import Encoded, Reducers, assign, digest_of, draw, in_messages
from neuroshard.optim.outer import CertifiedWork
from neuroshard.types import NodeId

AMONG_STRANGERS = 2  # reducers of a slice that must return the same bytes; among friends there is one


@dataclass
class _Slice:
    """The state of one slice."""

    reducers: Reducers
    parts: dict[NodeId, Encoded] = field(default_factory=dict[NodeId, Encoded])  # encoded parts by member
    statements: dict[NodeId, str] = field(default_factory=dict[NodeId, str])  # digests by reducer
    statistics: dict[str, Encoded] = field(default_factory=dict[str, Encoded])  # content by digest
    results: dict[NodeId, str] = field(default_factory=dict[NodeId, str])
    content: dict[str, Encoded] = field(default_factory=dict[str, Encoded])  # encoded results by digest
    is_stated: bool = False  # whether this node has made its statistics or started to
    is_redone: bool = False

    @property
    def agreed_statistics(self) -> Encoded | None:
        digest = _agreed(self.statements, len(self.reducers.active))
        return None if digest is None else self.statistics.get(digest)

    @property
    def agreed_digest(self) -> str | None:
        return _agreed(self.results, len(self.reducers.active))

    @property
    def agreed_result(self) -> Encoded | None:
        digest = self.agreed_digest
        return None if digest is None else self.content.get(digest)


class AllReduce:
    """The exchange of one view at one member: received parts and results, and the messages and jobs that follow from
    them.
    """

    def __init__(
        self,
        setting: RoundConfig,
        round_id: str,
        intents: Sequence[VerifiedBody[Intent]],
        own: EncodedContribution | None,
    ) -> None:
        """`own` is this node's contribution, None if it is not a member of the round."""
        self.round_id = round_id
        self.members = members_of(intents)
        self.verdict: GateVerdict | None = None
        self._setting = setting
        self._own = own
        self._intents = {one.member.node_id: one.body for one in intents}
        self._order = list(map(attrgetter("node_id"), self.members))
        self._everybody = setting.everybody | set(self._order)
        step = setting.step
        self._facts = _facts(step, intents)
        upload = {node: intent.upload for node, intent in self._intents.items() if step.may_reduce(node)}
        if step.committee.is_open:
            reducers = draw(setting.plan, upload, step.ledger.seed, AMONG_STRANGERS)
        else:
            reducers = assign(setting.plan, upload, step.ledger.seed)
        self._slices = list(map(_Slice, reducers))
        self._is_stating = self._is_judging = False
        self._reduction: Reduction | None = None
        self._digests: dict[NodeId, tuple[bytes, ...]] = {}  # of all slices of a member, by author
        self._claims: dict[tuple[NodeId, int], bytes] = {}  # digests of results
        self._accused: set[NodeId] = set()

    @property
    def others(self) -> frozenset[NodeId]:
        """The other participants, which get all public messages."""
        return frozenset(self._everybody - {self._setting.self_id})

    @property
    def aggregate(self) -> tuple[Encoded, ...] | None:
        """The encoded aggregate, once enough reducers of every slice agree and its bytes are here."""
        found = [result for one in self._slices if (result := one.agreed_result) is not None]
        return tuple(found) if len(found) == len(self._slices) else None

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the aggregate's slices, hex, for the slices where enough reducers agree."""
        return tuple(digest for one in self._slices if (digest := one.agreed_digest) is not None)

    def missing(self) -> tuple[NodeId, ...]:
        """Members that broke the protocol, or whose part of a slice that this node reduces has not arrived."""
        mine = [one for one in self._slices if self._setting.self_id in one.reducers or (one.is_redone and one.parts)]
        return tuple(
            node for node in self._order if node in self._accused or any(node not in one.parts for one in mine)
        )

    def begin(self) -> list[Effect]:
        """Send this node's parts to their reducers."""
        own, self_id = self._own, self._setting.self_id
        if own is None:
            return []
        self._digests[self_id] = own.digests
        by_reducer: dict[NodeId, dict[int, Encoded]] = {}
        for index, one in enumerate(self._slices):
            for to in one.reducers.active:
                by_reducer.setdefault(to, {})[index] = own.parts[index]
        effects = list[Effect]()
        for to, slices in sorted(by_reducer.items()):
            if to != self_id:
                effects += self._hand_over(to, self_id, slices)
            for index, part in slices.items() if to == self_id else ():
                self._slices[index].parts[self_id] = part
        return [*effects, *self._state()]

    def redo(self) -> list[Effect]:
        """A member is slow, dead or lies: spare reducers take over, and every holder of a result sends it."""
        effects, again = list[Effect](), dict[int, Encoded]()
        to_hand_on: dict[tuple[NodeId, NodeId], dict[int, Encoded]] = {}
        for index, one in enumerate(self._slices):
            if one.agreed_result is not None or one.is_redone:
                continue
            one.is_redone = True
            spare, result = one.reducers.spare, one.results.get(self._setting.self_id)
            if result is not None:
                again[index] = one.content[result]
            if spare is not None and spare != self._setting.self_id:
                # The reducers forward what they have. A lone reducer may be dead, so each member sends its part again.
                held = one.parts if self._setting.self_id in one.reducers else self._own_part(index)
                for author, part in held.items():
                    to_hand_on.setdefault((spare, author), {})[index] = part
            elif spare is not None:
                one.parts |= {author: part for author, part in self._own_part(index).items() if author not in one.parts}
        for (spare, author), slices in sorted(to_hand_on.items()):
            effects += self._hand_over(spare, author, slices)
        effects += self._state()
        return [*effects, *self._say_results(again, again)] if again else effects

    def _own_part(self, index: int) -> Mapping[NodeId, Encoded]:
        return {} if self._own is None else {self._setting.self_id: self._own.parts[index]}

    def _hand_over(self, to: NodeId, author: NodeId, slices: Mapping[int, Encoded]) -> Iterable[Effect]:
        """Forward the parts of one contribution to another reducer."""
        for some in in_messages(slices):
            yield Say(frozenset({to}), ContributionSent(self.round_id, author, self._digests[author], some))

    def take_contribution(self, sender: NodeId, message: ContributionSent) -> list[Effect]:
        """Store a member's parts. Parts that differ from the author's intent count as absent."""
        intent = self._intents.get(message.author)
        count, digests = self._setting.plan.count, message.digests
        if intent is None:
            return []
        if len(digests) != count or commitment_of(digests) != intent.commitment:
            return self._accuse(sender, "It sent another contribution than was promised.")
        self._digests[message.author] = digests
        parts = message.slices
        wanted = {index: part for index, part in parts.items() if index < count and self._reduces(self._slices[index])}
        for index, part in _by_themselves(wanted, parts).items():
            if digest_of(part) != digests[index] or not self._setting.is_part(index, part):
                return self._accuse(sender, "It sent a part that is not the one that was promised.")
            self._slices[index].parts[message.author] = part
        return self._state()

    def take_statement(self, message: StatementSaid) -> list[Effect]:
        """Store a reducer's statistics."""
        reducer = message.signed.member.node_id
        for index, one, digest in self._reduced_by(reducer, message.signed.body):
            statistics = message.statistics.get(index, b"")
            is_short = len(statistics) <= statistics_size(len(self._order), with_gram=True)
            if is_short and reducer not in one.statements and digest_of(statistics).hex() == digest:
                one.statements[reducer], one.statistics[digest] = digest, statistics
        return self._judge()

    def take_result(self, message: ResultSaid) -> list[Effect]:
        """Store a reducer's results: the digests of all of them, and the content of those that it sends."""
        fitting = dict[int, Encoded]()
        said = dict(message.signed.body.digests)
        for index, content in message.slices.items():
            is_slice = index in said and index < len(self._slices) and self._setting.is_result(index, content)
            if is_slice and digest_of(content).hex() == said[index]:
                fitting[index] = content
        return self._note_result(message.signed, _by_themselves(fitting, message.slices))

    def _note_result(self, signed: VerifiedBody[ResultDigests], contents: Mapping[int, Encoded]) -> list[Effect]:
        reducer = signed.member.node_id
        for index, one, digest in self._reduced_by(reducer, signed.body):
            if one.results.setdefault(reducer, digest) == digest:
                self._claims[reducer, index] = signed.claim
                if index in contents:
                    one.content[digest] = contents[index]
        return self._liars()

    def made_statistics(self, statistics: Mapping[int, Encoded]) -> list[Effect]:
        """Continue with this node's finished statistics."""
        self._is_stating = False
        if not statistics:
            return []
        digests = tuple((index, digest_of(made).hex()) for index, made in sorted(statistics.items()))
        said = StatementSaid(self._setting.sign(StatisticsDigests(self.round_id, digests)), statistics)
        return [Say(self.others, said), *self.take_statement(said), *self._reduce(statistics), *self._state()]

    def judged(self, judged: Judged) -> list[Effect]:
        """Continue with the finished verdict."""
        self.verdict, self._reduction = judged.verdict, judged.reduction
        stated = [index for index, one in enumerate(self._slices) if self._setting.self_id in one.statements]
        return self._reduce(stated)

    def reduced(self, results: Mapping[int, Encoded]) -> list[Effect]:
        """Continue with this node's finished results."""
        sent = {index: made for index, made in results.items() if self._sends(self._slices[index])}
        return self._say_results(results, sent)

    def _say_results(self, results: Mapping[int, Encoded], sent: Mapping[int, Encoded]) -> list[Effect]:
        """Send the results in `sent` in as many messages as needed, and one more message with the digests of the
        others.
        """
        effects = list[Effect]()
        digests_only = {index: made for index, made in results.items() if index not in sent}
        for some in (*([digests_only] if digests_only else []), *in_messages(sent)):
            digests = tuple((index, digest_of(made).hex()) for index, made in sorted(some.items()))
            signed = self._setting.sign(ResultDigests(self.round_id, digests))
            content = {} if some is digests_only else some
            effects += [Say(self.others, ResultSaid(signed, content)), *self._note_result(signed, some)]
        return effects

    def _reduces(self, one: _Slice) -> bool:
        return self._setting.self_id in one.reducers or one.reducers.spare == self._setting.self_id

    def _sends(self, one: _Slice) -> bool:
        return one.is_redone or one.reducers.active[0] == self._setting.self_id

    def _state(self) -> list[Effect]:
        """Start the statistics of own slices whose parts are complete, while other parts are under way.

        Only one such job runs at a time. Slices that complete meanwhile go into the next job, so there are few
        messages.
        """
        whole = [
            (index, one)
            for index, one in enumerate(self._slices)
            if not one.is_stated and self._reduces(one) and len(one.parts) == len(self._order)
        ]
        if not whole or self._is_stating:
            return []
        self._is_stating = True
        for _, one in whole:
            one.is_stated = True
        return [MakeStatistics(self.round_id, {index: self._rows(one) for index, one in whole}, self._facts)]

    def _rows(self, one: _Slice) -> Sequence[Encoded]:
        return tuple(map(one.parts.__getitem__, self._order))

    def _judge(self) -> list[Effect]:
        if self._is_judging:
            return []
        agreed = [one.agreed_statistics for one in self._slices]
        statistics = [one for one in agreed if one is not None]
        if len(statistics) < len(agreed):
            return []
        self._is_judging = True
        return [Judge(self.round_id, statistics, self._facts)]

    def accepted_work(self, rows: Collection[int], choices: Collection[tuple[NodeId, int]]) -> CertifiedWork:
        """The lower medians of the claims that the established members make in these rows, and of the seats' choices.

        So no minority can raise it. At least one of the rows must be established.
        """
        intents = [self._intents[self._order[row]] for row in rows if self._facts.established[row]]
        return CertifiedWork(
            median_low([intent.sequences for intent in intents]),
            _median([intent.exchange for intent in intents]),
            _median([intent.sequence for intent in intents]),
            _median([choice for _, choice in choices]),
        )

    def uploads_and_seconds(self) -> tuple[tuple[tuple[NodeId, int], ...], int]:
        """The members' claims: their upload rates in bytes per second, and the seats' lower median of the seconds."""
        uploads, seconds = list[tuple[NodeId, int]](), list[int]()
        for node in self._order:
            uploads.append((node, self._intents[node].upload))
            if node in self._setting.step.seats:
                seconds.append(self._intents[node].seconds)
        return tuple(uploads), median_low(seconds or [0])

    def _reduce(self, indices: Iterable[int]) -> list[Effect]:
        """A job for each message of results that this node sends, so that one travels while the next is computed.

        Slices of which it only sends the digests come last.
        """
        if self._reduction is None:
            return []
        sizes = {index: self._slices[index].parts[self._order[0]] for index in indices}
        sent = {index: part for index, part in sizes.items() if self._sends(self._slices[index])}
        told = {index: part for index, part in sizes.items() if index not in sent}
        return [
            Reduce(self.round_id, {index: self._rows(self._slices[index]) for index in some}, self._reduction)
            for some in (*in_messages(sent), told)
            if some
        ]

    def _reduced_by(
        self, reducer: NodeId, body: StatisticsDigests | ResultDigests
    ) -> Iterable[tuple[int, _Slice, str]]:
        for index, digest in body.digests:
            if index < len(self._slices):
                one = self._slices[index]
                if reducer in one.reducers or reducer == one.reducers.spare:
                    yield index, one, digest

    def _liars(self) -> list[Effect]:
        """The reducers whose result differs from that of two others. One alone proves nothing against another."""
        effects = list[Effect]()
        for index, one in enumerate(self._slices):
            agreed = one.agreed_digest if len(one.reducers.active) > 1 else None
            for node, digest in one.results.items():
                if agreed is not None and digest != agreed:
                    proof = tuple(self._claims[other, index] for other in one.results if (other, index) in self._claims)
                    effects += self._accuse(node, "It sent a different result than two other reducers.", proof)
        return effects

    def _accuse(self, node: NodeId, what: str, proof: tuple[bytes, ...] = ()) -> list[Effect]:
        if node in self._accused:
            return []
        self._accused.add(node)
        return [Accuse(node, what, proof)]


def _facts(step: Step, intents: Sequence[VerifiedBody[Intent]]) -> MemberFacts:
    commitments = list(map(attrgetter("body.commitment"), intents))
    return MemberFacts(
        work=tuple(map(float, map(attrgetter("body.sequences"), intents))),
        established=tuple(map(step.ledger.counts, map(attrgetter("member.node_id"), intents))),
        originals=tuple(map(commitments.index, commitments)),
        are_friends=not step.committee.is_open,
    )


def _agreed(said: Mapping[NodeId, str], needed: int) -> str | None:
    """The digest on which at least `needed` reducers of a slice agree, or None."""
    common = Counter(said.values()).most_common(1)
    return common[0][0] if common and common[0][1] >= needed else None


def _by_themselves(wanted: Mapping[int, Encoded], sent: Mapping[int, Encoded]) -> Mapping[int, Encoded]:
    """Copies of the slices, which do not keep the rest of their message in memory."""
    return wanted if len(wanted) == len(sent) else {index: bytes(part) for index, part in wanted.items()}


def _median(numbers: Iterable[int | None]) -> int | None:
    """Lower median of the known numbers; None without one."""
    known = [number for number in numbers if number is not None]
    return median_low(known) if known else None
