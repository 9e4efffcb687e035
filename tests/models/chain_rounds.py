"""Exhaustive exploration of the chain within bounds: each view of each height as one nondeterministic layer.

Votes of one view depend on earlier views only through view-changes, and heights depend on earlier heights only
through certificates. So every execution with arbitrary delays, losses and sleep is equivalent to one that finishes
view after view and height after height ("communication-closed rounds"). In each view every honest seat takes part or
not, and votes for any value that the rules allow. A liar votes for everything, shows any proven lock, and is the
proposer of every view. Honest seats in the same state are interchangeable, except for the first seat.

Kinds of seats: H honest, L liar, G honest with a second instance that does not know the votes of the first (a restored
backup, or a lost log where the rules allow a vote too early), K honest without its log, waiting for a new key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, groupby, pairwise, product
from typing import NamedTuple, TypeVar

from tests.models.chain_rules import (
    LEAST_OF_STRANGERS,
    NO_LOCK,
    Entry,
    InvariantError,
    Ledger,
    Lock,
    Rules,
    Seat,
    changed,
    completes,
    founded,
    is_quorum,
    may_propose,
)

PLAIN, OTHER, CHANGE = 0, 1, 2  # two aggregates of different contributions, and a value with an entry
PARENT = 0
ADMITTED = 100  # name of the first new seat


class Boundary(NamedTuple):
    """The run between two heights."""

    height: int
    epoch: int
    kinds: str
    ledger: Ledger  # wallets are positions, so equal committees have equal ledgers
    faults_used: int


class Change(NamedTuple):
    """The committee change that a value of this height may carry."""

    entry: Entry | None
    kinds: str
    ledger: Ledger


class Instance(NamedTuple):
    """An honest seat's log at this height. `saved`: its disk has the bytes of the lock. `past`: values committed."""

    lock: Lock = NO_LOCK
    saved: bool = True
    past: tuple[int, ...] = ()


class Layer(NamedTuple):
    """A height before a view (`prepared` is None) or between its two phases."""

    kinds: str
    ledger: Ledger
    change: Change
    view: int
    instances: tuple[Instance, ...]
    proven: tuple[Lock, ...]  # locks that q PREPAREs prove, whether or not an honest seat knows them
    certified: tuple[int, ...]
    prepared: tuple[int, ...] | None = None  # between the phases: NOTHING (took part) or ABSENT per instance


NOTHING, ABSENT = -1, -2
State = TypeVar("State", Boundary, Layer)
ANY_ENTRY = Entry("admit", 99, 0)


@dataclass(frozen=True)
class Bounds:
    """Limits of an exploration."""

    seats: int = 4
    heights: int = 3
    views: int = 3  # views 0, 1 and 2
    faults_per_run: int = 3  # at most one per height
    epochs: int = 2


@dataclass
class Report:
    """The result of an exploration. `states`: distinct ones. `unfolded`: an equal height counts at each place."""

    states: int = 0
    unfolded: int = 0
    transitions: int = 0
    boundaries: int = 0
    violation: str = ""
    trace: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class HeightReport:
    """The exploration of one height with one committee: which values can be certified."""

    states: int
    transitions: int
    certified: frozenset[int]
    violation: str = ""
    trace: tuple[str, ...] = ()


def ledger_of(kinds: str, friends: bool, faults: int, most: int) -> Ledger:
    seats = tuple(Seat(place, 0, kind == "L") for place, kind in enumerate(kinds))
    return Ledger(seats, friends, faults, most)


def start(kinds: str, friends: bool) -> Boundary:
    """A run just founded with these seats."""
    fresh = founded([Seat(place, 0, kind == "L") for place, kind in enumerate(kinds)], friends)
    return Boundary(0, 0, kinds, fresh, 0)


def explore(rules: Rules, starts: list[Boundary], bounds: Bounds) -> Report:
    """Breadth-first exploration, height by height. It ends at the first violation.

    A height depends on the run before it only through committee and F. So each of these is explored once.
    """
    report = Report()
    origin: dict[Boundary, Boundary | None] = dict.fromkeys(starts)
    queue = deque(starts)
    explored = dict[tuple[str, Ledger, Change], HeightReport]()
    while queue:
        at = queue.popleft()
        following = list(faults(rules, bounds, at))
        for change in changes(rules, bounds, at) if at.height < bounds.heights else ():
            key = (at.kinds, at.ledger, shape_of(rules, at, change))
            if key not in explored:
                explored[key] = explore_height(rules, bounds, *key)
                report.states += explored[key].states
                report.transitions += explored[key].transitions
            inner = explored[key]
            report.unfolded += inner.states
            if inner.violation:
                report.violation, report.trace = inner.violation, [*trace_to(at, origin), *inner.trace]
                return report
            following += [next_boundary(at, change, value) for value in inner.certified]
        for after in following:
            if after not in origin:
                origin[after] = at
                queue.append(after)
    report.boundaries = len(origin)
    return report


def shape_of(rules: Rules, at: Boundary, change: Change) -> Change:
    """The part of a change that matters inside its height: none, unless the committee after it has to vote as well."""
    if rules.quorum_after_certifies or change.entry is None:
        return change
    return Change(ANY_ENTRY, at.kinds, at.ledger)


def explore_height(rules: Rules, bounds: Bounds, kinds: str, ledger: Ledger, change: Change) -> HeightReport:
    """Breadth-first exploration of the views of one height."""
    blank = tuple(Instance() for _ in instance_seats(kinds))
    first = Layer(kinds, ledger, change, 0, blank, (), ())
    origin: dict[Layer, Layer | None] = {first: None}
    queue = deque([first])
    certified, transitions = set[int](), 0
    while queue:
        layer = queue.popleft()
        certified.update(layer.certified)
        try:
            check(rules, layer)
        except InvariantError as violation:
            trace = tuple(trace_to(layer, origin))
            return HeightReport(len(origin), transitions, frozenset(certified), str(violation), trace)
        following = commits(rules, layer) if layer.prepared is not None else prepares(rules, layer)
        for after in following if layer.view < bounds.views else ():
            transitions += 1
            if after not in origin:
                origin[after] = layer
                queue.append(after)
    return HeightReport(len(origin), transitions, frozenset(certified))


# ------------------------------------------------------------------------------------------------ between the heights


def changes(rules: Rules, bounds: Bounds, at: Boundary) -> Iterator[Change]:
    """The committee changes that the rules allow at a height, one per class of equal seats."""
    groups = list(admissions(bounds, at))
    entries: list[tuple[Entry, str]] = []
    if at.ledger.friends and len(at.kinds) < bounds.seats:
        entries += [(Entry("admit", -1, PARENT), "H" + at.kinds)]
    for place, kind in enumerate(at.kinds):
        if place > 0 and at.kinds[place - 1] == kind and (place > 1 or at.ledger.faults > 0):
            continue  # the seat before it is in the same class
        rest = at.kinds[:place] + at.kinds[place + 1 :]
        if kind == "L":
            entries += [(Entry("expel", place, PARENT), rest)]
        elif kind in "KG":
            entries += [(Entry("key", place, PARENT, key=1), at.kinds[:place] + "H" + at.kinds[place + 1 :])]
        entries += [(Entry("leave", place, PARENT), rest)]
        if not at.ledger.friends:
            groups += [([Entry("remove", place, PARENT), *group], rest + kinds) for group, kinds in replacements(rest)]
    groups += [([entry], kinds) for entry, kinds in entries]
    results = [(group[0], kinds, changed(rules, at.ledger, group, PARENT, owner=-1)) for group, kinds in groups]
    valid = [Change(entry, kinds, after) for entry, kinds, after in results if after is not None]
    yield from valid or [Change(None, at.kinds, at.ledger)]


def admissions(bounds: Bounds, at: Boundary) -> Iterator[tuple[list[Entry], str]]:
    """New seats at the end: one, or among strangers as many as lead to four. Some of them may be liars."""
    counts = {1} if at.ledger.friends else {1, max(1, LEAST_OF_STRANGERS - len(at.kinds))}
    may_lie = not at.ledger.friends and "L" not in at.kinds and "G" not in at.kinds
    for count in sorted(counts):
        for liars in range(count + 1) if may_lie else (0,):
            kinds = "H" * (count - liars) + "L" * liars
            if len(at.kinds) + count <= bounds.seats:
                group = [
                    Entry("admit", ADMITTED + place, PARENT, is_mistake=kind == "L") for place, kind in enumerate(kinds)
                ]
                yield group, at.kinds + kinds


def replacements(rest: str) -> Iterator[tuple[list[Entry], str]]:
    """One new seat for one that is removed in the same value."""
    for kind in "HL" if not set("LG") & set(rest) else "H":
        yield [Entry("admit", ADMITTED, PARENT, is_mistake=kind == "L")], kind


def next_boundary(at: Boundary, change: Change, value: int) -> Boundary:
    kinds, ledger = (change.kinds, change.ledger) if value == CHANGE else (at.kinds, at.ledger)
    return Boundary(at.height + 1, at.epoch, *canonical(kinds, ledger), at.faults_used)


def canonical(kinds: str, ledger: Ledger) -> tuple[str, Ledger]:
    """Name the seats by their places again. With F > 0 their order has no meaning."""
    ordered = kinds if ledger.faults == 0 else "".join(sorted(kinds))
    return ordered, ledger_of(ordered, ledger.friends, ledger.faults, ledger.most_faults)


def faults(rules: Rules, bounds: Bounds, at: Boundary) -> Iterator[Boundary]:
    """One fault or one foundation between two heights: a lost log, a restored backup, a foundation."""
    if at.faults_used >= min(bounds.faults_per_run, at.height + 1):
        return
    used = at.faults_used + 1
    for place, kind in enumerate(at.kinds):
        if kind != "H":
            continue
        # A lost log is harmless at a height in which the seat cannot have voted before the loss.
        early = rules.after_loss == "at once" or (rules.after_loss == "next certificate" and at.height >= 2)
        kinds = at.kinds[:place] + ("G" if early else "K") + at.kinds[place + 1 :]
        yield Boundary(at.height, at.epoch, *canonical(kinds, at.ledger), used)
        if at.ledger.faults > 0 and not set("LG") & set(at.kinds):
            twin = at.kinds[:place] + "G" + at.kinds[place + 1 :]
            yield Boundary(at.height, at.epoch, *canonical(twin, at.ledger), used)
    if at.epoch + 1 < bounds.epochs:
        for shown in range(at.height + 1):
            for seats in range(1, bounds.seats + 1):
                fresh = start(
                    "H" * seats if at.ledger.friends or seats < 4 else "H" * (seats - 1) + "L", at.ledger.friends
                )
                yield fresh._replace(height=shown, epoch=at.epoch + 1, faults_used=used)


# --------------------------------------------------------------------------------------------------- inside one height


@cache
def instance_seats(kinds: str) -> tuple[int, ...]:
    """The seat of each honest instance. A seat of kind G has two."""
    return tuple(place for place, kind in enumerate(kinds) for _ in range({"H": 1, "G": 2}.get(kind, 0)))


@cache
def liars(kinds: str) -> frozenset[int]:
    return frozenset(place for place, kind in enumerate(kinds) if kind == "L")


@cache
def instance_classes(kinds: str, has_first: bool, leaver: int) -> tuple[tuple[bool, bool, int], ...]:
    """Instances of one class are interchangeable: the first seat with F = 0 and a leaving seat have their own."""
    return tuple(
        (has_first and seat == 0, seat == leaver, seat if kinds[seat] == "G" else -1) for seat in instance_seats(kinds)
    )


def classes_of(layer: Layer) -> tuple[tuple[bool, bool, int], ...]:
    entry = layer.change.entry
    leaver = entry.wallet if entry is not None and entry.kind != "admit" else -1
    return instance_classes(layer.kinds, layer.ledger.faults == 0, leaver)


def sorted_layer(layer: Layer) -> Layer:
    """The canonical form: instances of one class in order of their state."""
    marks = layer.prepared or (0,) * len(layer.instances)
    rows = list(zip(classes_of(layer), layer.instances, marks, strict=True))
    ordered: list[tuple[Instance, int]] = []
    for _, group in groupby(rows, key=lambda row: row[0]):
        ordered += sorted((row[1], row[2]) for row in group)
    prepared = None if layer.prepared is None else tuple(mark for _, mark in ordered)
    return layer._replace(instances=tuple(instance for instance, _ in ordered), prepared=prepared)


def prepares(rules: Rules, layer: Layer) -> Iterator[Layer]:
    """First phase of a view: who enters it, and which values get the votes of a quorum (F = 0: all votes)."""
    seats, bad, ledger = instance_seats(layer.kinds), liars(layer.kinds), layer.ledger
    seen = set[Layer]()
    for entered in product((False, True), repeat=len(layer.instances)):
        if twice(layer, entered):
            continue
        allowed = proposable(rules, layer, entered)
        if ledger.faults == 0:
            after = (finished(rules, layer, votes, (True,) * len(votes)) for votes in votes_of(rules, entered, allowed))
            seen.update(after)
            continue
        marks = tuple(NOTHING if here else ABSENT for here in entered)
        present = tuple(seat for seat, here in zip(seats, entered, strict=True) if here)
        for values in provable(rules, ledger, present, frozenset(allowed), bad):
            proven = tuple(sorted({*layer.proven, *(Lock(layer.view, value) for value in values)}))
            if values:
                seen.add(sorted_layer(layer._replace(prepared=marks, proven=proven)))
            else:
                seen.add(layer._replace(view=layer.view + 1))
    yield from seen


def votes_of(rules: Rules, entered: tuple[bool, ...], allowed: set[int]) -> Iterator[tuple[int, ...]]:
    """Votes of a view with F = 0. No liar is tolerated, so a proposer that logs its value sends only one."""
    for values in [(value,) for value in allowed] if rules.proposer_names_value else [tuple(allowed)]:
        yield from product(*[(NOTHING, *values) if here else (ABSENT,) for here in entered])


@cache
def provable(
    rules: Rules, ledger: Ledger, present: tuple[int, ...], allowed: frozenset[int], bad: frozenset[int]
) -> frozenset[tuple[int, ...]]:
    """Sets of values that can all have a quorum's PREPAREs in one view."""
    found = set[tuple[int, ...]]()
    for votes in product((NOTHING, *sorted(allowed)), repeat=len(present)):
        voters = {
            value: {seat for seat, vote in zip(present, votes, strict=True) if vote == value} for value in allowed
        }
        found.add(
            tuple(sorted(value for value in allowed if voters[value] and is_quorum(rules, ledger, voters[value] | bad)))
        )
    return frozenset(found)


def twice(layer: Layer, entered: tuple[bool, ...]) -> bool:
    """Whether an equal choice, with interchangeable instances the other way round, is explored as well."""
    rows = list(zip(classes_of(layer), layer.instances, entered, strict=True))
    return any(a[:2] == b[:2] and a[2] > b[2] for a, b in pairwise(rows))


def proposable(rules: Rules, layer: Layer, entered: tuple[bool, ...]) -> set[int]:
    """Values that some quorum of the view-changes that can exist justifies."""
    everything = {PLAIN, OTHER} | ({CHANGE} if layer.change.entry else set[int]())
    if layer.view == 0:
        return everything
    seats = instance_seats(layer.kinds)
    here = [place for place, is_in in enumerate(entered) if is_in]
    bad = liars(layer.kinds)
    found = set[int]()
    for size in range(len(here) + 1):
        for shown in combinations(here, size):
            if not is_quorum(rules, layer.ledger, {seats[place] for place in shown} | bad):
                continue
            locks = [layer.instances[place].lock for place in shown]
            # A liar whose view-change belongs to the quorum shows any proven lock, or none.
            for extra in (None, *(layer.proven if bad else ())):
                choice = may_propose(rules, locks if extra is None else [*locks, extra])
                found |= everything if choice is None else choice
    return found


def commits(rules: Rules, layer: Layer) -> Iterator[Layer]:
    """Second phase of a view with F > 0: which seats see the PREPAREs of a quorum, lock, and send COMMIT."""
    assert layer.prepared is not None
    proven = [lock.value for lock in layer.proven if lock.view == layer.view]
    votes = [(NOTHING, True), *((value, True) for value in proven)]
    votes += [] if rules.lock_needs_bytes else [(value, False) for value in proven]
    options = [votes if mark == NOTHING else votes[:1] for mark in layer.prepared]
    for choice in product(*options):
        yield finished(rules, layer, tuple(value for value, _ in choice), tuple(saved for _, saved in choice))


def finished(rules: Rules, layer: Layer, votes: tuple[int, ...], saved: tuple[bool, ...]) -> Layer:
    """The layer before the next view. `votes` are locks; those with their bytes on the disk are COMMITs as well."""
    seats, bad = instance_seats(layer.kinds), liars(layer.kinds)
    instances = list(layer.instances)
    for place, value in enumerate(votes):
        if value >= 0:
            past = () if rules.one_view_per_certificate else tuple(sorted({*instances[place].past, value}))
            instances[place] = Instance(Lock(layer.view, value), saved[place], past)
    certified = set(layer.certified)
    for value in (PLAIN, OTHER, CHANGE):
        now = {seats[place] for place, vote in enumerate(votes) if vote == value and saved[place]}
        ever = {seats[place] for place, instance in enumerate(instances) if value in instance.past}
        after = layer.change.ledger if value == CHANGE else layer.ledger
        voters = now | ever
        if voters and completes(rules, layer.ledger, after, voters | bad):
            certified.add(value)
    following = layer._replace(
        view=layer.view + 1, instances=tuple(instances), certified=tuple(sorted(certified)), prepared=None
    )
    return sorted_layer(following)


# ---------------------------------------------------------------------------------------------------------- invariants


def check(rules: Rules, layer: Layer) -> None:
    """Agreement, and progress of every connected quorum of honest seats. Raises InvariantError."""
    if len(layer.certified) > 1:
        raise InvariantError("two values of one height have certificates")
    if layer.certified or "G" in layer.kinds or layer.prepared is not None:
        return
    seats = instance_seats(layer.kinds)
    for size in range(1, len(seats) + 1):
        for connected in combinations(range(len(seats)), size):
            wallets = {seats[place] for place in connected}
            if is_quorum(rules, layer.ledger, wallets):
                check_progress(rules, layer, [layer.instances[place] for place in connected], wallets)


def check_progress(rules: Rules, layer: Layer, connected: list[Instance], wallets: set[int]) -> None:
    """An honest proposer, a connected quorum and delivered messages complete the next view."""
    choice = may_propose(rules, [instance.lock for instance in connected])
    if choice is None:
        return
    if len(choice) > 1:
        raise InvariantError("the locks of a quorum contradict each other")
    (value,) = choice
    if not any(instance.lock.value == value and instance.saved for instance in connected):
        raise InvariantError("a quorum is bound to a value whose bytes it does not have")
    after = layer.change.ledger if value == CHANGE else layer.ledger
    if not completes(rules, layer.ledger, after, wallets):
        raise InvariantError("a quorum is bound to a value that it cannot complete")


def trace_to(state: State, origin: Mapping[State, State | None]) -> list[str]:
    """The steps that lead to a state, first to last."""
    steps: list[str] = []
    current: State | None = state
    while current is not None:
        steps.append(described(current))
        current = origin[current]
    return steps[::-1]


def described(state: Boundary | Layer) -> str:
    """One line about a state."""
    names = {PLAIN: "X", OTHER: "Y", CHANGE: "E", NOTHING: "+", ABSENT: "."}
    if isinstance(state, Boundary):
        group = "friends" if state.ledger.friends else "strangers"
        return f"epoch {state.epoch} height {state.height}: {group} {state.kinds}, F {state.ledger.faults}"
    entry = state.change.entry
    changed_by = f" (E = {entry.kind} {entry.wallet})" if entry not in {None, ANY_ENTRY} and entry else ""
    if state.prepared is not None:
        return f"  view {state.view}{changed_by}: {''.join(names[mark] for mark in state.prepared)} took part"
    locks = [f"{names[one.lock.value]}{one.lock.view}" if one.lock != NO_LOCK else "--" for one in state.instances]
    certified = "".join(names[value] for value in state.certified) or "none"
    return f"  before view {state.view}{changed_by}: locks {' '.join(locks)}; certified {certified}"
