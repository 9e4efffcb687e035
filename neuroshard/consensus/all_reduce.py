"""The butterfly all-reduce of one view at one member: parts to reducers, statistics, one verdict, results. Pure.

This file makes no decision. A completed exchange yields an aggregate to vote on.

The parts decide, never a majority of reducers. A member that must know the truth about a slice *checks* it: it fetches
the parts, which the intents name by their hash, and computes the slice itself. Its own result then counts for it. The
section "The parts decide" of docs/ROUNDS.md lists when it does so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter

from neuroshard.aggregation import GateVerdict, Reduction, statistics_size
from neuroshard.consensus.effects import (
    Accuse,
    CompareBlocks,
    CompareNorms,
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
    BlocksSent,
    BlocksWanted,
    ContributionSent,
    Intent,
    PartsWanted,
    ResultDigests,
    ResultSaid,
    StatementSaid,
    StatisticsDigests,
    VerifiedBody,
    commitment_of,
)
from neuroshard.consensus.slices import (
    Block,
    Encoded,
    SliceState,
    by_themselves,
    digest_of,
    draw_blocks,
    in_messages,
    reducers_of,
)
from neuroshard.consensus.views import facts_of
from neuroshard.identity import hash_parts
from neuroshard.types import NodeId

ANSWER_SECONDS = 5.0  # for a part or a block that was asked for
FREE_PARTS = 2  # slices that a member may ask for without a reason that is known here
SERVED = 2  # times that a part is sent to the same member


class AllReduce:
    """The exchange of one view at one member: what it has received, and the messages and jobs that follow from it."""

    def __init__(
        self,
        setting: RoundConfig,
        round_id: str,
        intents: Sequence[VerifiedBody[Intent]],
        own: EncodedContribution | None,
        *,
        compares_norms: bool = True,
    ) -> None:
        """`own` is this node's contribution, which takes part if the node's intent promises it."""
        self.round_id = round_id
        self.members = tuple(sorted(map(attrgetter("member"), intents)))  # in the order of the rows
        self.verdict: GateVerdict | None = None
        self._setting = setting
        self._self_id = setting.member.node_id
        self._compares_norms = compares_norms
        self.intents = {one.member.node_id: one.body for one in intents}
        promised = self.intents.get(self._self_id)
        is_own = own is not None and promised is not None and promised.commitment == commitment_of(own.digests)
        self.own = own if is_own else None
        self._order = [member.node_id for member in self.members]
        # the other participants, which get all public messages
        self.others = (setting.others | set(self._order)) - {self._self_id}
        step = setting.step
        self.facts = facts_of(step, intents)
        upload = {node: intent.upload for node, intent in self.intents.items() if step.may_reduce(node)}
        barred = set(map(attrgetter("node_id"), step.ledger.barred))
        reducers = reducers_of(setting.plan, upload, barred, step.ledger.seed, is_open=step.committee.is_open)
        self._slices = [SliceState(some, self._self_id) for some in reducers]
        self._is_stating = self._is_judging = False
        self._contradicted = set[int]()  # slices in which this node has computed other statistics than the verdict's
        self.skipped = 0  # audits that ended without an answer
        self._reduction: Reduction | None = None
        self._digests: dict[NodeId, tuple[bytes, ...]] = {}  # of all slices of a member, by author
        # what members have signed about a slice, by author, slice and digest
        self._claims: dict[tuple[NodeId, int, str], bytes] = {}
        self._accused: set[NodeId] = set()
        self._disputed: set[int] = set()  # slices about which members disagree
        self._wrong: set[NodeId] = set()  # reducers that contradict what this node has computed
        self._doubts: dict[NodeId, int] = {}  # the slice in which a member contradicts the reducers
        self._judged_on: dict[int, Encoded] = {}  # the statistics of the slices
        self._blocks: tuple[Block, ...] | None = None  # that this node compares, once it has drawn them
        # blocks by the row of their member, while this node waits for all of them and for the aggregate
        self._blocks_of_rows: dict[int, bytes] | None = None
        self.is_audited = True  # False until the blocks are compared
        self._bases: dict[NodeId, str] = {}  # digests of the statistics on which members have judged
        # statements that count here and were not shown to the others yet, by their claims
        self._statements: dict[bytes, VerifiedBody[StatisticsDigests]] = {}
        self._is_split = False  # whether a reducer has signed different statistics of one slice
        self._asked_for_blocks = set[NodeId]()  # the members that this node has sent its blocks
        self._asked_at: float | None = None  # for parts
        self._redo_at = -inf
        self.late: frozenset[NodeId] | None = None  # reducers without a result when half of the view was over
        self._waiting = set[NodeId]()  # reducers that others keep from their work
        self.lied = set[NodeId]()  # members whose statistics are false
        # number of times that parts were sent, by the member that asked and the author
        self._served = defaultdict[tuple[NodeId, NodeId], Counter[int]](Counter)

    @property
    def aggregate(self) -> tuple[Encoded, ...] | None:
        """The encoded aggregate, once every slice is certain here and its bytes have come."""
        found = [result for one in self._slices if (result := one.content.get(one.agreed(one.results))) is not None]
        return tuple(found) if len(found) == len(self._slices) and not self._contradicted else None

    @property
    def is_void(self) -> bool:
        """Whether the verdict follows from false statistics, so that the view comes to nothing.

        Among friends a quorum must say so: the memory of one computer may be bad.
        """
        step, own = self._setting.step, self._self_id
        for said in (self._slices[index].statements for index in self._contradicted):
            if step.committee.is_open or step.is_quorum([node for node in said if said[node] == said[own]]):
                return True
        return self._is_split

    @property
    def contents(self) -> Mapping[str, Encoded]:
        """The results that have come, right or wrong, by their digests (hex); statistics, too."""
        return {digest: content for one in self._slices for digest, content in one.content.items()}

    @property
    def expects_results(self) -> bool:
        """Whether missing results are under way: the statistics, which precede them, have come, and nothing is late."""
        return self.late is None and self.verdict is not None

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the aggregate's slices, hex, for the slices that are certain here."""
        return tuple(digest for one in self._slices if (digest := one.agreed(one.results)))

    def missing(self) -> tuple[NodeId, ...]:
        """Members that broke the protocol, or whose part of a slice that this node computes has not arrived."""
        mine = [one for one in self._slices if self._self_id in one.reducers or one.is_overdue]
        wrong = self._wrong if self._setting.step.committee.is_open else self.lied if self.is_void else set[NodeId]()
        liars = self._accused | wrong
        return tuple(node for node in self._order if node in liars or any(node not in one.parts for one in mine))

    def begin(self) -> list[Effect]:
        """Send this node's parts to their reducers."""
        own, self_id = self.own, self._self_id
        if own is None:
            return []
        self._digests[self_id] = own.digests
        by_reducer, effects = defaultdict[NodeId, dict[int, Encoded]](dict), list[Effect]()
        for index, one in enumerate(self._slices):
            for to in one.reducers:
                by_reducer[to][index] = own.parts[index]
        for index, part in by_reducer.pop(self_id, {}).items():
            self._slices[index].parts[self_id] = part
        for to, slices in sorted(by_reducer.items()):
            effects += self._hand_over(to, self_id, slices)
        return [*effects, *self._state()]

    def _hand_over(self, to: NodeId, author: NodeId, slices: Mapping[int, Encoded]) -> Iterable[Effect]:
        """Send parts of one contribution to a member that computes their slices."""
        for some in in_messages(slices):
            yield Say(frozenset({to}), ContributionSent(self.round_id, author, self._digests[author], some))

    # Reducers that fail

    def explain(self) -> list[Effect]:
        """Report to the seats once, by a statement without digests, if others keep this reducer from its work.

        A member that sends it no parts or no statistics could otherwise have it called silent.
        """
        mine = [one for one in self._slices if self._self_id in one.reducers]
        is_busy = self._is_stating and all(len(one.parts) == len(self._order) for one in mine)
        if not mine or is_busy or self._is_judging or self._self_id in self._waiting:
            return []
        self._waiting.add(self._self_id)
        said = StatementSaid(self._setting.sign(StatisticsDigests(self.round_id, ())), {})
        return [Say(self._setting.step.seats - {self._self_id}, said)]

    @property
    def silent(self) -> frozenset[NodeId]:
        """Reducers that had all they needed, and from which this node has not got all results.

        In a round with a dispute these are none: its checks take the time of all members.
        """
        late = self.late if self.late is not None and not self._disputed else frozenset[NodeId]()
        return (late & self._without_result()) - self._waiting - {self._self_id}

    def wrong(self, certified: tuple[str, ...]) -> set[NodeId]:
        """Members whose statistics or results are false, if these are the certified digests of this round.

        An honest reducer never contradicts what is certified of its slice. A seat that has checked the slice may,
        if two lying reducers were faster. Where members were shown different statistics, honest results differ.
        """
        if self._is_split:
            return set(self.lied)
        found = self.lied | (self._wrong if self.digests == certified else set[NodeId]())
        found |= self._judged_otherwise() - self._doubts.keys()  # nobody has shown it what it has judged on
        for one, digest in zip(self._slices, certified, strict=True):
            found.update(node for node in one.reducers if one.results.get(node, digest) != digest)
        return found

    def _without_result(self) -> frozenset[NodeId]:
        return frozenset(node for one in self._slices for node in one.reducers if node not in one.results)

    # Checks

    def redo(self, now: float) -> list[Effect]:
        """Half of the view is over, so a reducer is slow, dead or lies: this node computes the slices without a result.

        Without a verdict nobody has a result. Then these are the slices without statistics, and the reducers of the
        others have as much time as they would have had since the verdict.
        """
        is_judged = self.verdict is not None
        if self.late is None:
            self.late = self._without_result()
        if now < self._redo_at:
            return []
        on_time = [one.agreed(one.results if is_judged else one.statements) in one.content for one in self._slices]
        late = [one for one, is_here in zip(self._slices, on_time, strict=True) if not (is_here or one.is_overdue)]
        for one in late:
            one.is_overdue, one.is_checked = True, self._self_id not in one.reducers
        if not is_judged:
            self._redo_at = now + self._setting.timing.gather_seconds
        return [*self._ask(), *self._state()] if late else []

    def audit(self) -> list[Effect]:
        """Begin this seat's audit of its secret choice once all results are signed. It ends when they have come.

        Nobody knows the choice before the reducers have signed their results. Results travel for longer than blocks.
        """
        setting = self._setting
        if self._blocks is not None:
            return self._compare()
        if self.verdict is None or len(self.digests) < len(self._slices) or not setting.is_seat:
            return []
        others = [index for index, one in enumerate(self._slices) if self._self_id not in one.reducers]
        choice, self._blocks = hash_parts("neuroshard/audit", setting.secret, self.round_id), ()
        if setting.step.committee.is_open:
            return self.check([others[int.from_bytes(choice) % len(others)]] if others else [])
        if not others or setting.excerpts is None or not (blocks := draw_blocks(setting.plan, others, choice)):
            return []
        self._blocks = blocks
        self.is_audited, self._blocks_of_rows, effects = False, {}, list[Effect]()
        if self.own is not None:
            own = BlocksSent(self.round_id, setting.excerpts(self.own.parts, self._blocks))
            effects = self.take_blocks(self._self_id, own)
        asked = frozenset(self._order) - {self._self_id}
        return [Say(asked, BlocksWanted(self.round_id, self._blocks)), *effects]

    def take_blocks(self, sender: NodeId, sent: BlocksSent) -> list[Effect]:
        """Store a member's blocks. They prove nothing by themselves."""
        rows, verdict = self._blocks_of_rows, self.verdict
        if rows is None or verdict is None or sender not in self._order:
            return []
        row = self._order.index(sender)
        if row in rows or row not in verdict.accepted:
            return []
        rows[row] = sent.content
        return self._compare()

    def _compare(self) -> list[Effect]:
        """Compare the blocks with the aggregate once all of both have come."""
        rows, verdict, reduction, aggregate = self._blocks_of_rows, self.verdict, self._reduction, self.aggregate
        if rows is None or verdict is None or len(rows) < len(verdict.accepted):
            return []
        if self._blocks is None or reduction is None or aggregate is None:
            return []
        self._blocks_of_rows = None
        return [CompareBlocks(self.round_id, self._blocks, rows, aggregate, reduction)]

    def compared(self, differing: frozenset[int] | None) -> list[Effect]:
        """Check the slices in which blocks differ: the member that sent the blocks may be wrong, or the reducer."""
        self.is_audited = True
        self.skipped += differing is None
        return self.check(sorted(differing)[:FREE_PARTS]) if differing else []

    def blocks_for(self, sender: NodeId, wanted: BlocksWanted) -> list[Effect]:
        """Send a seat blocks of this node's contribution, once per round."""
        own, setting, blocks = self.own, self._setting, self._setting.plan.blocks
        are_fit = sender in setting.step.seats and all(block < blocks(index) for index, block in wanted.blocks)
        if own is None or setting.excerpts is None or not are_fit or sender in self._asked_for_blocks:
            return []
        self._asked_for_blocks.add(sender)
        return [Say(frozenset({sender}), BlocksSent(self.round_id, setting.excerpts(own.parts, wanted.blocks)))]

    def remind(self, now: float) -> list[Effect]:
        """Ask again for parts that have not come: their authors, and then the reducers, which have them, too.

        An audit of blocks ends without the answers. A check does not: this node does not vote without the parts.
        """
        waiting = [one for one in self._slices if (one.is_checked or one.is_overdue) and not one.is_stated]
        blocks, accepted = self._blocks_of_rows, () if self.verdict is None else self.verdict.accepted
        lacks_blocks = blocks is not None and len(blocks) < len(accepted)
        if not waiting and not lacks_blocks:
            self._asked_at = None
            return []
        if self._asked_at is None:
            self._asked_at = now
        if now - self._asked_at < ANSWER_SECONDS:
            return []
        for one in waiting:
            one.is_overdue = True
        if lacks_blocks:
            self.skipped, self.is_audited, self._blocks_of_rows = self.skipped + 1, True, None
        self._asked_at = now
        return self._ask(of_reducers=True)

    def check(self, indices: Iterable[int]) -> list[Effect]:
        """Begin to compute slices that others reduce."""
        fresh = [one for index in indices if not (one := self._slices[index]).is_computed]
        for one in fresh:
            one.is_checked = True
        return [*self._ask(), *self._state()] if fresh else []

    def _ask(self, *, of_reducers: bool = False) -> list[Effect]:
        """Ask the authors of missing parts for them. The author of a part may be gone: its reducers have it, too."""
        wanted: dict[tuple[NodeId, NodeId], list[int]] = {}
        for index, one in enumerate(self._slices):
            if one.is_checked and self.own is not None:
                one.parts.setdefault(self._self_id, self.own.parts[index])
            for author in self._order if one.is_checked or one.is_overdue else ():
                for to in {author, *(one.reducers if of_reducers else ())} if author not in one.parts else ():
                    wanted.setdefault((to, author), []).append(index)
        return [
            Say(frozenset({to}), PartsWanted(self.round_id, author, tuple(indices)))
            for (to, author), indices in sorted(wanted.items())
            if to != self._self_id
        ]

    def parts_for(self, sender: NodeId, wanted: PartsWanted) -> list[Effect]:
        """Send the parts that a member checks. Without a reason that this node knows, it gets a few of them only."""
        author, given = wanted.author, dict[int, Encoded]()
        if sender not in self.others or author not in self._digests:
            return []
        disputed = [self._slices[index] for index in sorted(self._disputed)]
        doubtful = {node for one in disputed for node in (*one.reducers, *one.statements, *one.results)}
        doubtful |= self._judged_otherwise()
        for index in wanted.slices:
            served, is_own = self._served[sender, author], author == self._self_id
            one = self._slices[index] if index < len(self._slices) else None
            if one is None or served[index] >= SERVED or not (is_own or author in one.parts):
                continue
            is_late = self.late is not None
            has_reason = is_late or one.is_checked or index in self._disputed or doubtful & {*one.reducers}
            if has_reason or len(served.keys() | {index}) <= FREE_PARTS:
                served[index] += 1
                given[index] = self.own.parts[index] if is_own and self.own is not None else one.parts[author]
        return list(self._hand_over(sender, author, given))

    def take_contribution(self, sender: NodeId, message: ContributionSent) -> list[Effect]:
        """Store a member's parts. Parts that differ from the author's intent count as absent."""
        intent, digests = self.intents.get(message.author), message.digests
        if intent is None:
            return []
        if len(digests) != len(self._slices) or commitment_of(digests) != intent.commitment:
            return self._accuse(sender, "It sent another contribution than was promised.")
        self._digests[message.author] = digests
        parts = message.slices
        wanted = {index: parts[index] for index, one in enumerate(self._slices) if one.is_computed and index in parts}
        for index, part in by_themselves(wanted, parts).items():
            if digest_of(part) != digests[index] or not self._setting.is_part(index, part):
                return self._accuse(sender, "It sent a part that is not the one that was promised.")
            self._slices[index].parts[message.author] = part
        return self._state()

    def take_statement(self, message: StatementSaid) -> list[Effect]:
        """Store a reducer's statistics."""
        reducer = message.signed.member.node_id
        if not message.signed.body.digests:
            self._waiting.add(reducer)
        effects = list[Effect]()
        for index, one, digest in self._said_by(reducer, message.signed.body):
            statistics, known = message.statistics.get(index, b""), one.statements.get(reducer, digest)
            claim = self._claims.get((reducer, index, known))  # none for this node's own statistics
            if known != digest and claim is not None:
                self._is_split, proof = True, (claim, message.signed.claim)
                self.lied.add(reducer)
                effects += self._accuse(reducer, f"It has signed two statistics of slice {index}.", proof)
            is_short = len(statistics) <= statistics_size(len(self._order), with_gram=True)
            if is_short and reducer not in one.statements and digest_of(statistics).hex() == digest:
                one.content[digest] = statistics
                self._note(one.statements, reducer, index, digest)
                self._claims[reducer, index, digest] = message.signed.claim
                self._statements[message.signed.claim] = message.signed
        return [*effects, *self._look_for_lies(), *self._judge()]

    def _note(self, said: dict[NodeId, str], author: NodeId, index: int, digest: str) -> None:
        """Store what a member says about a slice, the first time."""
        said.setdefault(author, digest)
        if len(set(said.values())) > 1:
            self._disputed.add(index)

    def take_result(self, message: ResultSaid) -> list[Effect]:
        """Store a reducer's results: the digests of all of them, and the content of those that it sends."""
        fitting = dict[int, Encoded]()
        said = dict(message.signed.body.digests)
        for index, content in message.slices.items():
            is_slice = index in said and index < len(self._slices) and self._setting.is_result(index, content)
            if is_slice and digest_of(content).hex() == said[index]:
                fitting[index] = content
        reducer, contents = message.signed.member.node_id, by_themselves(fitting, message.slices)
        for index, one, digest in self._said_by(reducer, message.signed.body):
            self._note(one.results, reducer, index, digest)
            self._bases.setdefault(reducer, message.signed.body.basis)
            if one.results[reducer] == digest:
                self._claims[reducer, index, digest] = message.signed.claim
                if index in contents:
                    one.content[digest] = contents[index]
        return self._look_for_lies()

    def made_statistics(self, statistics: Mapping[int, Encoded]) -> list[Effect]:
        """Continue with this node's finished statistics, and send those of checked slices that contradict others."""
        self._is_stating = False
        if not statistics:
            return []
        said, digests = dict[int, Encoded](), list[tuple[int, str]]()
        for index, made in sorted(statistics.items()):
            one, digest = self._slices[index], digest_of(made).hex()
            if self._judged_on.get(index, made) != made:
                self._contradicted.add(index)
            one.content[digest] = made
            self._note(one.statements, self._self_id, index, digest)
            if not one.is_checked or index in self._disputed:
                said[index] = made
                digests.append((index, digest))
        signed = self._setting.sign(StatisticsDigests(self.round_id, tuple(digests)))
        effects: list[Effect] = [Say(self.others, StatementSaid(signed, said))] if said else []
        return [*effects, *self._look_for_lies(), *self._judge(), *self._reduce(statistics), *self._state()]

    def judged(self, judged: Judged) -> list[Effect]:
        """Continue with the finished verdict."""
        self.verdict, self._reduction = judged.verdict, judged.reduction
        stated = [index for index, one in enumerate(self._slices) if self._self_id in one.statements]
        effects, own = self._reduce(stated), self.own
        if own is not None and self._compares_norms and judged.reduction is not None:
            parts, row = dict(enumerate(own.parts)), self._order.index(self._self_id)
            for index in stated:
                del parts[index]
            effects.append(CompareNorms(self.round_id, row, parts, self._judged_on, self.facts))
        return effects

    def reduced(self, results: Mapping[int, Encoded]) -> list[Effect]:
        """Continue with this node's finished results, and send those of checked slices that contradict others.

        When the last of several jobs is done, all digests go ahead, so that audits begin while the results travel.
        """
        self_id, said, sent = self._self_id, dict[int, str](), dict[int, Encoded]()
        for index, made in results.items():
            one, digest = self._slices[index], digest_of(made).hex()
            one.content[digest] = made
            self._note(one.results, self_id, index, digest)
            if one.reducers[0] == self_id:
                sent[index] = made
            elif self_id in one.reducers or index in self._disputed:
                said[index] = digest
        own = {i: one.results.get(self_id, "") for i, one in enumerate(self._slices) if self_id in one.reducers}
        if len(results) < len(own) and all(own.values()) and own.keys() & results.keys():
            said |= own
        effects = self._say_results(said, {}) if said else []
        for some in in_messages(sent):
            effects += self._say_results({index: own[index] for index in some}, some)
        return [*effects, *self._look_for_lies()]

    def _say_results(self, digests: Mapping[int, str], contents: Mapping[int, Encoded]) -> list[Effect]:
        """Sign digests and send them, with the contents to the members that do not compute these slices themselves."""
        basis = self._bases[self._self_id]
        signed = self._setting.sign(ResultDigests(self.round_id, tuple(sorted(digests.items())), basis))
        receivers, effects = defaultdict[tuple[int, ...], set[NodeId]](set), list[Effect]()
        for node in sorted(self.others):
            receivers[tuple(index for index in contents if node not in self._slices[index].reducers)].add(node)
        for wanted, to in receivers.items():
            effects.append(Say(frozenset(to), ResultSaid(signed, {index: contents[index] for index in wanted})))
        return effects

    def _state(self) -> list[Effect]:
        """Start the statistics of own slices whose parts are complete, while other parts are under way.

        One such job runs at a time, so there are few messages: slices that complete meanwhile go into the next one.
        """
        rows = dict[int, Sequence[Encoded]]()
        for index, one in enumerate(self._slices if not self._is_stating else ()):
            if not one.is_stated and len(one.parts) == len(self._order):
                one.is_stated, rows[index] = True, one.rows(self._order)
        if not rows:
            return []
        self._is_stating = True
        return [MakeStatistics(self.round_id, rows, self.facts)]

    def _judge(self) -> list[Effect]:
        if self._is_judging:
            return []
        agreed = [one.content.get(one.agreed(one.statements)) for one in self._slices]
        statistics = [one for one in agreed if one is not None]
        if len(statistics) < len(agreed):
            return []
        self._bases[self._self_id] = digest_of(b"".join(statistics)).hex()
        self._is_judging, self._judged_on = True, dict(enumerate(statistics))
        return [Judge(self.round_id, statistics, self.facts)]

    def _reduce(self, indices: Iterable[int]) -> list[Effect]:
        """A job for each message of results that this node sends, so that one travels while the next is computed.

        Slices of which it only sends the digests come last.
        """
        if self._reduction is None:
            return []
        sent, signed = dict[int, Encoded](), dict[int, Encoded]()
        for index in indices:
            one = self._slices[index]
            (sent if one.reducers[0] == self._self_id else signed)[index] = one.parts[self._order[0]]
        effects = list[Effect]()
        for some in (*in_messages(sent), signed):
            if rows := {index: self._slices[index].rows(self._order) for index in some}:
                effects.append(Reduce(self.round_id, rows, self._reduction))
        return effects

    def _said_by(
        self, author: NodeId, body: StatisticsDigests | ResultDigests
    ) -> Iterable[tuple[int, SliceState, str]]:
        """The slices on which a member may speak: those that it reduces, and one more if it counts."""
        may_doubt = author in self.others and self._setting.step.ledger.counts(author)
        for index, digest in body.digests:
            one = self._slices[index] if index < len(self._slices) else None
            if one is not None and (
                author in {*one.reducers, self._self_id}
                or (may_doubt and self._doubts.setdefault(author, index) == index)
            ):
                yield index, one, digest

    def _look_for_lies(self) -> list[Effect]:
        """Check the slices about which members disagree, and all slices of members that contradict this node's results.

        Members that have judged on different statistics show each other what the reducers have signed. Their results
        differ without a lie, and count for nothing here.
        """
        effects, elsewhere = list[Effect](), set[NodeId]()
        if len(set(self._bases.values())) > 1 and (elsewhere := self._judged_otherwise()):
            effects += [Say(self.others, StatementSaid(signed, {})) for signed in self._statements.values()]
            self._statements.clear()
        elif not self._disputed:
            return effects
        is_malice = self._setting.step.committee.is_open  # among friends it is bad memory, of that node or of this one
        for index in sorted(self._disputed):
            one = self._slices[index]
            what = f"Its computation of slice {index} does not follow from the parts."
            for said in (one.statements, one.results):
                own = said.get(self._self_id)
                for node, digest in said.items() if own is not None else ():
                    if digest == own or (said is one.results and node in elsewhere):
                        continue
                    if node not in self._wrong:
                        effects.append(Accuse(node, what, (self._claims[node, index, digest],), is_malice=is_malice))
                    self._wrong.add(node)
                    if said is one.statements:
                        self.lied.add(node)
        others = self._wrong | elsewhere
        doubtful = (index for index, one in enumerate(self._slices) if others.intersection(one.reducers))
        return [*effects, *self.check(sorted(self._disputed.union(doubtful)))]

    def _judged_otherwise(self) -> set[NodeId]:
        """Members whose results follow from other statistics than those on which this node has judged."""
        own = self._bases.get(self._self_id)
        return {node for node, basis in self._bases.items() if own not in {None, basis}}

    def _accuse(self, node: NodeId, what: str, proof: tuple[bytes, ...] = ()) -> list[Effect]:
        if node in self._accused:
            return []
        self._accused.add(node)
        return [Accuse(node, what, proof)]
