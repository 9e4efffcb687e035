"""Starts a node that lies in the rounds of its run: the real program, of which one behaviour is another one.

`liar_process.py FILE python -m neuroshard ...`: the file names a lie, or nothing. The node tells it in the next step in
which it can, and in no other one, and then notes the lie and the number of the step in `FILE.told`.
"""

from __future__ import annotations

import runpy
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import AnyBody, Effect, Say, Sign
from neuroshard.consensus.round_machine import RoundStateMachine
from neuroshard.consensus.round_messages import (
    Intent,
    Quorum,
    StatementSaid,
    StatisticsDigests,
    VerifiedBody,
)
from neuroshard.consensus.round_runner import RoundRunner
from neuroshard.consensus.slices import digest_of
from tests.worlds.rounds import LIARS, Liar, Twist

OMISSION = "omitted_contribution"
NUMBER_BYTES = 8


def two_statistics(one: Liar, effect: Effect) -> list[Effect]:
    """The first of those that it tells sees another last number of each slice than the others."""
    match effect:
        case Say(to, StatementSaid(signed, statistics)) if statistics:
            lies = {index: _with_another_number(bytes(made)) for index, made in statistics.items()}
            digests = tuple((index, digest_of(made).hex()) for index, made in sorted(lies.items()))
            lie = StatementSaid(one.signed(StatisticsDigests(signed.body.round_id, digests)), lies)
            deceived = frozenset(sorted(to)[:1])
            return [Say(deceived, lie), Say(to - deceived, effect.message)]
        case _:
            return [effect]


def _with_another_number(statistics: bytes) -> bytes:
    (last,) = struct.unpack("<d", statistics[-NUMBER_BYTES:])
    return statistics[:-NUMBER_BYTES] + struct.pack("<d", last + 1.0)


LIES: Mapping[str, Twist] = {
    "withheld_contribution": LIARS["withheld_contribution"],
    "two_statistics": two_statistics,
    "wrong_results": LIARS["wrong_results"],
    "both_votes": LIARS["both_votes"],
}


@dataclass
class _Author:
    """Who lies in a step, as the lies need it."""

    member: GroupMember
    machines: dict[str, RoundStateMachine]
    _sign: Sign

    @classmethod
    def of(cls, machine: RoundStateMachine) -> _Author:
        return cls(machine.setting.member, {machine.setting.step.id: machine}, machine.setting.sign)

    def signed(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        return self._sign(body)


class LieFile:
    """The lie that is to be told, and what was told."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._steps: dict[str, int] = {}  # in which each lie was told

    def wanted_in(self, step: int) -> str:
        """The lie to tell in a step; "" for none."""
        name = self._file.read_text()
        return name if self._steps.get(name, step) == step else ""

    def note(self, name: str, step: int) -> None:
        """Record that a lie was told."""
        if name not in self._steps:
            self._steps[name] = step
            with told_in(self._file).open("a") as file:
                file.write(f"{name} {step}\n")


def told_in(file: Path) -> Path:
    """Where a node with this file notes its lies."""
    return file.with_suffix(".told")


def tell_lies(lies: LieFile) -> None:
    """From now on the rounds of this process lie as the file says."""
    put, propose = RoundRunner._put, RoundStateMachine._say_proposal  # pyright: ignore[reportPrivateUsage]

    def put_lies(self: RoundRunner, running: Any, effects: Sequence[Effect]) -> None:
        step = running.member.setting.step.number
        name = lies.wanted_in(step)
        author, twist, said = _Author.of(running.member), LIES.get(name), list[Effect]()
        for effect in effects:
            twisted = [effect] if twist is None else twist(author, effect)
            if twisted != [effect]:
                lies.note(name, step)
            said += twisted
        put(self, running, said)

    def propose_fewer(
        self: RoundStateMachine, intents: tuple[VerifiedBody[Intent], ...], lock: Quorum | None, now: float
    ) -> list[Effect]:
        step = self.setting.step
        others = [intent for intent in intents if intent.member != self.setting.member]
        if lies.wanted_in(step.number) == OMISSION and step.is_quorum({one.member.node_id for one in intents[1:]}):
            lies.note(OMISSION, step.number)
            intents = tuple(intent for intent in intents if intent is not others[0])
        return propose(self, intents, lock, now)

    RoundRunner._put = put_lies  # type: ignore[method-assign, assignment]
    RoundStateMachine._say_proposal = propose_fewer  # type: ignore[method-assign]


if __name__ == "__main__":
    tell_lies(LieFile(Path(sys.argv[1])))
    sys.path[0] = ""  # as for a module that is run
    _python, _m, module, *arguments = sys.argv[2:]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
