"""An organised run whose observer is played by the test: made-up certificates and reports reach the real monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from neuroshard.organiser.application import OrganiserContext, create_organiser_app
from neuroshard.organiser.database import DATABASE
from neuroshard.organiser.desk import RunPlan
from neuroshard.organiser.history import RunHistory
from neuroshard.organiser.monitor import RunMonitor
from neuroshard.organiser.observations import CertifiedValue, ObserverStarted, RunSight, StageSight
from neuroshard.organiser.observer_process import OBSERVER
from neuroshard.organiser.public import NewestRun
from neuroshard.types import NodeId, WalletId
from tests.organiser.desks import OFFER, START, Desk

FOUNDATION, LATER_FOUNDATION = "f0" * 32, "f1" * 32
ADA, BOB = (WalletId(digits * 16) for digits in ("ad", "b0"))
STAGES = 3
TOKENS = 8  # of a sequence, by the parameters of the desk's run
VALUE = CertifiedValue(
    0, FOUNDATION, 0, 1, 1, int(START), "aggregate", sequences=100, seconds=60, members=2, accepted=(ADA, BOB)
)
SIGHT = RunSight(
    START, 3, 2, 1, (StageSight(2, 1),) * STAGES, 500, 4000, 5, 100.0, 3.5, 3.0, held_out_loss=3.25, held_out_step=7
)


@dataclass
class Watched:
    """The monitor of the desk's run. `again` opens the same folder as a new process does."""

    folder: Path
    desk: Desk = field(init=False)

    def __post_init__(self) -> None:
        self.desk = Desk(self.folder)
        self._open()

    def _open(self) -> None:
        self.history = RunHistory(self.folder / DATABASE)
        plan = RunPlan(OFFER, self.desk.places)
        self.monitor = RunMonitor(plan, self.history, lambda: self.desk.now)
        self.app = create_organiser_app(
            OrganiserContext(
                *(plan, self.desk.desk, lambda: self.desk.now, lambda: self.desk.now),
                monitor=self.monitor,
                newest=NewestRun(OFFER, (self.folder, self.folder / OBSERVER)),
            )
        )

    def again(self) -> None:
        self.history.close()
        self._open()

    def value(self, height: int, stage: int = 0, **facts: Any) -> None:
        """A certificate of a height, one minute after the one before."""
        at = int(START) + 60 * height
        given = {"stage": stage, "height": height, "outer_step": height, "at": at, **facts}
        self.monitor.note(msgspec.structs.replace(VALUE, **given))

    def sight(self, **facts: Any) -> None:
        """The reports of the nodes at the time of the desk's clock."""
        self.monitor.note(msgspec.structs.replace(SIGHT, **{"at": self.desk.now, **facts}))

    def start_observer(self) -> None:
        self.monitor.note(ObserverStarted(NodeId("12D3KooWobserver"), ADA))

    def close(self) -> None:
        self.history.close()
        self.desk.database.close()
