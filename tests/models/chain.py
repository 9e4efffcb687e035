"""Explore the model of the chain: `python -m tests.models.chain` (seconds) or `--full` (the stated bounds, minutes).

In random schedules a seed decides who acts, sleeps, joins, leaves, restarts, lies and founds. Each height has a wild
phase of random events and a calm one. In the calm phase a quorum of honest seats is connected and must complete a
height within one tour of the proposers. Liars and free names act in both phases.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from tests.models.chain_rounds import Boundary, Bounds, Report, explore, start
from tests.models.chain_rules import (
    DEPUTY,
    LEAST_OF_STRANGERS,
    NO_LOCK,
    NOBODY,
    OWNER,
    Archive,
    Entry,
    Hash,
    Height,
    InvariantError,
    Ledger,
    Lock,
    Member,
    Place,
    Proposal,
    Rules,
    Seat,
    Statement,
    Value,
    Wire,
    founded,
    is_quorum,
)

FREE_NAMES = range(1000, 1200)  # keys without a seat
MOST_SEATS = 7
SILENT_HEIGHTS, SILENT_MINUTES = 2, 10
DAY_MINUTES = 1440


@dataclass
class World:
    """One run under one schedule."""

    rules: Rules
    random: Random
    friends: bool
    heights: int = 10
    wire: Wire = field(init=False)
    members: list[Member] = field(default_factory=list[Member])
    liars: dict[int, int] = field(default_factory=dict[int, int])  # wallet: key
    leaving: set[int] = field(default_factory=set[int])
    signed_entries: list[Entry] = field(default_factory=list[Entry])  # every entry ever signed; anybody may show it
    held: dict[tuple[int, int], Hash] = field(default_factory=dict[tuple[int, int], Hash])
    seen: Counter[str] = field(default_factory=Counter[str])
    backups: list[Member] = field(default_factory=list[Member])
    copied: set[int] = field(default_factory=set[int])  # wallets with two instances
    keys: int = 100

    def __post_init__(self) -> None:
        archive = Archive(self.rules)
        self.wire = Wire(self.rules, archive)
        size = self.random.randint(1, 5) if self.friends else self.random.choice((4, 4, 5, 7))
        liars = self.random.randint(0, (size - 1) // 3) if not self.friends else 0
        seats = tuple(Seat(wallet, self.new_key(), wallet >= size - liars) for wallet in range(size))
        statement = archive.found(Statement(0, OWNER, NOBODY, NOBODY, founded(seats, self.friends)))
        self.liars = {seat.wallet: seat.key for seat in seats if seat.is_mistake}
        origin = archive.origin(statement)
        honest = [*(seat for seat in seats if not seat.is_mistake), *(Seat(20 + n, self.new_key()) for n in range(2))]
        self.members = [Member(seat.wallet, seat.key, self.rules, self.wire, statement, origin) for seat in honest]

    def new_key(self) -> int:
        self.keys += 1
        return self.keys

    # ------------------------------------------------------------------------------------------------------- phases

    def run(self) -> None:
        """Play all heights. Raises InvariantError."""
        for _ in range(self.heights):
            for _ in range(self.random.randint(4, 40)):
                self.wild_event()
            self.calm()
        self.seen["values"] += len(self.held)

    def wild_event(self) -> None:
        member = self.random.choice(self.members)
        draw = self.random.random()
        if draw < 0.58:
            self.act(member)
        elif draw < 0.68:
            self.lie()
        elif draw < 0.71:
            self.free_names(member.place)
        elif draw < 0.77:
            member.asleep = not member.asleep
        elif draw < 0.80:
            member.restart()
        elif draw < 0.83:
            member.clock += self.random.choice((-DAY_MINUTES, 1, 30, DAY_MINUTES))
        elif draw < 0.85:
            self.lose_log(member)
        elif draw < 0.91:
            self.back_up(member)
        elif draw < 0.93:
            self.leaving.symmetric_difference_update({member.wallet})
            self.sign_leave(member)
        elif draw < 0.945:
            self.refound(member)
        else:
            self.hear(member)
        self.check_double_votes()

    def calm(self) -> None:
        """A quorum of honest seats is connected, messages arrive: a height must complete."""
        newest = max(
            range(len(self.wire.archive.statements)), key=lambda n: (self.wire.archive.statements[n].number, n)
        )
        for member in self.members:
            member.asleep = member.asleep and self.random.random() < 0.7
        rivals = [one for one in self.statements_of(self.wire.archive.statements[newest].number) if one != newest]
        owner = next(member for member in self.members if member.wallet == OWNER and not member.ghost)
        if rivals or not self.connected(newest):
            for member in self.members:
                member.asleep = False
                self.adopt_all(member)
            self.found(owner, (*rivals, newest))
            newest = len(self.wire.archive.statements) - 1
        for member in self.members:
            if not member.asleep:
                member.hear(newest)
                self.adopt_all(member)
        seats = self.connected(newest)
        if not seats:
            raise InvariantError("a foundation leaves no quorum of seats that may vote")
        tip = max((seat.tip for seat in seats), key=lambda tip: self.wire.archive.values[tip].height)
        before = self.wire.archive.values[tip].height
        for _ in range(2 * len(self.wire.archive.ledgers[tip].seats) + 1):
            self.calm_view(seats)
            if any(seat.place.height > before + 1 for seat in seats):
                self.seen["calm heights"] += 1
                return
        raise InvariantError(f"{len(seats)} connected honest seats complete nothing at {seats[0].place}")

    def calm_view(self, seats: list[Member]) -> None:
        view = max(seat.view for seat in seats) + 1
        for seat in seats:
            seat.change_view(view)
        place, height = seats[0].place, self.wire.heights[seats[0].place]
        shown = tuple(seat.key for seat in seats)
        for seat in seats:
            fresh = self.fresh_value(seat)
            if fresh is not None:
                seat.propose(fresh, shown)
        if self.random.random() < 0.3:
            self.lie()
        for proposal in height.proposals[view]:
            for seat in seats:
                if seat.place == place:
                    seat.accept(proposal, proposal.value)
        for seat in seats:
            seat.count()
        for seat in seats:
            self.adopt_all(seat)

    def connected(self, statement: int) -> list[Member]:
        """Honest seats that are awake, if they are a quorum of the newest committee that any of them knows."""
        awake = [one for one in self.members if not one.asleep and not one.ghost]
        for member in awake:
            member.hear(statement)
            self.adopt_all(member)
        here = [one for one in awake if one.statement == statement and not one.halted]
        highest = max((one.place.height for one in here), default=0)
        seats = [one for one in here if one.place.height == highest and one.may_vote()]
        wallets = {seat.wallet for seat in seats}
        return seats if seats and is_quorum(self.rules, seats[0].ledger, wallets) else []

    # ------------------------------------------------------------------------------------------------------- events

    def act(self, member: Member) -> None:
        """One step of an honest member, with the part of the wire that has reached it."""
        if member.asleep or member.halted:
            return
        chance = self.random.random
        if chance() < 0.6:
            self.adopt_all(member, most=1)
        height = self.wire.heights[member.place]
        if chance() < 0.12:
            views = [view for view in height.changes if view > member.view]
            member.change_view(self.random.choice([*views, member.view + 1]))
        if member.proposer_key(member.view) == member.key and chance() < 0.7:
            arrived = tuple(key for key in height.changes[member.view] if chance() < 0.8)
            fresh = self.fresh_value(member)
            if fresh is not None:
                member.propose(fresh, arrived)
        if height.proposals[member.view] and chance() < 0.8:
            proposal = self.random.choice(height.proposals[member.view])
            member.accept(proposal, self.faulty_result(proposal.value))
        if chance() < 0.8:
            member.count()

    def faulty_result(self, value: Hash) -> Hash:
        """The result at a member whose reducer has bad memory."""
        content = self.wire.archive.values[value]
        if content.aggregate == NOBODY or self.random.random() < 0.7:
            return value
        other = self.wire.archive.offer(content._replace(aggregate=content.aggregate + 1000))
        return value if other is None else other

    def fresh_value(self, member: Member) -> Hash | None:
        """A value of this member's choice: a list of contributions, some valid entries, or entries only."""
        value = Value(member.statement, member.place.height, member.tip, self.random.randrange(3))
        entries = [entry for entry in self.entries_for(member) if self.random.random() < 0.5][:1]
        lacking = 0 if self.friends else LEAST_OF_STRANGERS - len(member.ledger.seats)
        if lacking > 0:
            entries = [entry for entry in self.entries_for(member) if entry.kind == "admit"][:lacking]
        if entries and (with_entry := self.wire.archive.offer(value._replace(entries=tuple(entries)))) is not None:
            if self.random.random() < 0.4:
                return self.wire.archive.offer(value._replace(aggregate=NOBODY, entries=tuple(entries)))
            return with_entry
        return self.wire.archive.offer(value)

    def entries_for(self, member: Member) -> list[Entry]:
        """Entries that a proposer on this member's tip may know."""
        parent, ledger = member.tip, member.ledger
        seated = {seat.wallet: seat.key for seat in ledger.seats}
        found = list(self.signed_entries[-6:])
        for other in self.members:
            if other.ghost:
                continue
            if other.wallet in self.copied and other.wallet not in seated:
                continue  # more than F faulty seats are outside the assumption
            if other.wallet not in seated and len(seated) < MOST_SEATS and other.wallet not in self.leaving:
                found.append(Entry("admit", other.wallet, parent, other.key))
            elif other.wallet in seated and seated[other.wallet] != other.key:
                found.append(Entry("key", other.wallet, parent, other.key))
            elif other.wallet in self.leaving and other.wallet in seated:
                found.append(Entry("leave", other.wallet, parent))
        if ledger.faults:
            found += [
                Entry("expel", wallet, parent) for wallet, key in seated.items() if key in self.wire.proven_double
            ]
        elif silent := self.silent(member):
            found += [Entry("remove", wallet, parent) for wallet in silent]
            self.signed_entries += found[-1:]
        if not self.friends and len(seated) < MOST_SEATS:
            wallet = 50 + len(self.liars)
            if len(self.liars) + len(self.copied) < ledger.faults or not self.rules.mistakes_bounded:
                found.append(Entry("admit", wallet, parent, 500 + wallet, is_mistake=True))
        self.random.shuffle(found)
        return found

    def silent(self, member: Member) -> list[int]:
        """Seats that this member's clock and heights call silent. A clock jump may make it early, never unsafe."""
        here = member.place.height
        for other in self.members:
            if not other.asleep or other is member:
                member.last_heard[other.wallet] = (here, member.clock)
        heard = {
            seat.wallet: member.last_heard.setdefault(seat.wallet, (here, member.clock)) for seat in member.ledger.seats
        }
        return [
            wallet
            for wallet, (height, clock) in heard.items()
            if here - height >= SILENT_HEIGHTS and member.clock - clock >= SILENT_MINUTES
        ]

    def adopt_all(self, member: Member, most: int = 100) -> None:
        for _ in range(most):
            parent = member.tip
            value = member.catch_up()
            if value is None:
                return
            if not member.ghost:
                self.note_adoption(member, value, parent)

    def note_adoption(self, member: Member, value: Hash, parent: Hash) -> None:
        """Agreement, the root, and the reasons of entries."""
        archive, content = self.wire.archive, self.wire.archive.values[value]
        epoch = content.statement if self.rules.statement_names_epoch else archive.statements[content.statement].number
        if self.held.setdefault((epoch, content.height), value) != value:
            raise InvariantError(f"two honest members hold different values at epoch {epoch}, height {content.height}")
        expected = (
            archive.roots[parent] if content.aggregate == NOBODY else hash((archive.roots[parent], content.aggregate))
        )
        if archive.roots[value] != expected or content.parent != parent:
            raise InvariantError("the root does not follow from the value before")
        for entry in content.entries:
            self.seen[entry.kind] += 1
            if entry.kind == "admit" and entry.is_mistake:
                self.liars[entry.wallet] = entry.key
            if entry.kind in {"leave", "remove"} and entry.parent != parent:
                raise InvariantError(f"an old signed {entry.kind} takes the seat of {entry.wallet} away")
        self.seen["entries only"] += content.aggregate == NOBODY

    def sign_leave(self, member: Member) -> None:
        if self.friends and member.wallet in self.leaving:
            self.signed_entries.append(Entry("leave", member.wallet, member.tip))

    def lose_log(self, member: Member) -> None:
        """The disk is gone, and the wallet is not."""
        if member.ghost or member.asleep:
            return
        self.seen["lost log"] += 1
        tips = [other.tip for other in self.members if other.statement == member.statement and not other.ghost]
        member.begin(member.statement, self.random.choice(tips))
        if self.rules.after_loss == "new key":
            member.key = self.new_key()
        elif self.rules.after_loss == "next certificate":
            member.may_vote_above = member.place.height

    def back_up(self, member: Member) -> None:
        """Keep a copy of a disk, or start an older copy next to the seat. A copy counts as one of the F.

        It does so at its own height, too: before the committee has grown there may be no F.
        """
        faulty = len(self.liars) + len(self.copied)
        old = [copy for copy in self.backups if copy.wallet == member.wallet and copy.key == member.key]
        old = [copy for copy in old if min(copy.ledger.faults, member.ledger.faults) > faulty]
        if not old or member.ghost:
            self.backups.append(replace(member, log=dict(member.log), ghost=True, last_heard={}))
            return
        self.copied.add(member.wallet)
        self.seen["restored backup"] += 1
        copy = self.random.choice(old)
        self.members.append(replace(copy, log=dict(copy.log), asleep=False))

    def refound(self, member: Member) -> None:
        if member.wallet in {OWNER, DEPUTY} and not member.ghost and not member.asleep and not member.halted:
            self.found(member, ())

    def found(self, issuer: Member, names: tuple[int, ...]) -> None:
        """The owner or a deputy founds the next epoch from its own standing, in isolation or not."""
        archive = self.wire.archive
        last = max((archive.statements[one].number for one in (issuer.statement, *names)), default=0)
        mine = [other for other in self.statements_of(last + 1) if archive.statements[other].issuer == issuer.wallet]
        if mine:
            return  # an honest issuer signs one statement per epoch; its log remembers
        honest = [one for one in self.members if not one.ghost and one.wallet not in self.copied]
        if issuer.wallet in self.copied:
            issuer.key = self.new_key()
        size = self.random.randint(1, len({issuer.wallet, *(one.wallet for one in honest)}))
        chosen = [issuer, *self.random.sample([one for one in honest if one.wallet != issuer.wallet], size - 1)]
        seats = [Seat(one.wallet, one.key) for one in sorted(chosen, key=lambda one: one.wallet)]
        if not self.friends and len(self.liars) == 1 and len(seats) >= 3:
            seats += [Seat(wallet, key, True) for wallet, key in self.liars.items()]
        ledger = founded(seats[:MOST_SEATS], self.friends)
        self.hear_all(
            [archive.found(Statement(last + 1, issuer.wallet, issuer.statement, issuer.tip, ledger, names))], issuer
        )
        self.seen["foundation"] += 1

    def hear_all(self, statements: list[int], member: Member) -> None:
        for statement in statements:
            member.hear(statement)

    def hear(self, member: Member) -> None:
        member.hear(self.random.randrange(len(self.wire.archive.statements)))

    def statements_of(self, number: int) -> list[int]:
        return [index for index, one in enumerate(self.wire.archive.statements) if one.number == number]

    # --------------------------------------------------------------------------------------------- hostile messages

    def lie(self) -> None:
        """A liar with a seat: equivocating proposer, double votes, false locks, in any view of any height."""
        if not self.liars or not self.wire.heights:
            return
        key = self.random.choice(list(self.liars.values()))
        place, height = self.random.choice(list(self.wire.heights.items()))
        values = {value for _, _, value in height.votes} | {
            one.value for all_ in height.proposals.values() for one in all_
        }
        view = self.random.choice([0, 1, 2, *height.changes])
        self.seen["lies"] += 1
        for value in values:
            for phase in ("prepare", "commit"):
                self.wire.vote(place, phase, view, value, key)
        victim = next((one for one in self.members if one.place == place), None)
        if victim is None:
            return
        locks = [NO_LOCK, *self.wire.proven(place, victim.ledger)]
        height.changes[view][key] = self.random.choice([lock for lock in locks if lock.view < view])
        if victim.proposer_key(view) == key:
            self.equivocate(victim, height, view, key)

    def equivocate(self, victim: Member, height: Height, view: int, key: int) -> None:
        """Two proposals in one view, each with the view-changes that suit it."""
        for _ in range(2):
            fresh = self.fresh_value(victim)
            keys = list(height.changes[view])
            shown = tuple(self.random.sample(keys, self.random.randint(0, len(keys))))
            if fresh is not None:
                height.proposals[view].append(Proposal(fresh, key, shown))

    def free_names(self, place: Place) -> None:
        """Two hundred names without a seat vote, change the view, propose and found."""
        height = self.wire.heights[place]
        values = {value for _, _, value in height.votes} | {
            one.value for all_ in height.proposals.values() for one in all_
        }
        self.seen["free names"] += 1
        view = self.random.randrange(3)
        for value in values:
            for phase in ("prepare", "commit"):
                height.votes[phase, view, value].update(FREE_NAMES)
        height.changes[view].update(dict.fromkeys(FREE_NAMES[:20], Lock(view, self.random.choice([*values, 0]))))
        if self.random.random() < 0.1:
            forged = Statement(50 + self.random.randrange(5), 999, 0, NOBODY, Ledger((Seat(999, 999),), True, 0, 0))
            for member in self.members:
                before = member.statement
                self.wire.archive.statements.append(forged)
                member.hear(len(self.wire.archive.statements) - 1)
                self.wire.archive.statements.pop()
                if member.statement != before:
                    raise InvariantError("a stranger's statement founds an epoch")

    def check_double_votes(self) -> None:
        for member in self.members:
            if member.key in self.wire.proven_double and member.wallet not in self.copied:
                raise InvariantError(f"the honest seat {member.wallet} can be expelled for a double vote")


@dataclass
class Summary:
    """The result of many schedules."""

    schedules: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])
    violation: str = ""
    seed: int = -1


def explore_schedules(rules: Rules, seeds: range, heights: int = 10) -> Summary:
    """Run one schedule per seed, half of them among friends. Ends at the first violation."""
    summary = Summary()
    for seed in seeds:
        world = World(rules, Random(seed), friends=seed % 2 == 0, heights=heights)
        summary.schedules += 1
        try:
            world.run()
        except InvariantError as error:
            summary.violation, summary.seed = str(error), seed
            return summary
        finally:
            summary.seen += world.seen
    return summary


SMALL, FULL = Bounds(heights=2, faults_per_run=2), Bounds()
FEW, MANY = 300, 10_000


def starts() -> list[Boundary]:
    """Foundations of friends with one to four seats, and of strangers with and without a liar."""
    friends = [start("H" * seats, friends=True) for seats in range(1, 5)]
    return friends + [start(kinds, friends=False) for kinds in ("H", "HHH", "HHHH", "HHHL")]


def explore_all(bounds: Bounds) -> Report:
    """The exhaustive exploration of the proposed rules."""
    return explore(Rules(), starts(), bounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the stated bounds and 10,000 schedules")
    full = parser.parse_args().full
    began = time.process_time()
    report = explore_all(FULL if full else SMALL)
    trace = "".join(f"  {line}\n" for line in report.trace)
    sys.stdout.write(
        f"exhaustive: {report.states} states of heights ({report.unfolded} unfolded),\n"
        f"  {report.transitions} transitions, {report.boundaries} states between heights, "
        f"{time.process_time() - began:.0f} s of CPU; "
        f"{report.violation or 'no violation'}\n{trace}"
    )
    began = time.process_time()
    summary = explore_schedules(Rules(), range(MANY if full else FEW))
    found = f"{summary.violation} (seed {summary.seed})" if summary.violation else "no violation"
    seen = ", ".join(f"{count} {name}" for name, count in sorted(summary.seen.items()))
    sys.stdout.write(
        f"random: {summary.schedules} schedules, {time.process_time() - began:.0f} s of CPU; {found}\n  {seen}\n"
    )
    return bool(report.violation or summary.violation)


if __name__ == "__main__":
    raise SystemExit(main())
