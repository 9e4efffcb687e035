"""Applies the owner's policy: reads the sensors every second, decides, and pauses, throttles or limits the network.

Two facts survive a restart in the data folder: a requested pause, and the bytes transferred in the present month."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Protocol

import anyio
import anyio.to_thread
from msgspec import Meta, Struct

from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import DamagedFileError, StorageError
from neuroshard.host.live_settings import Configuration
from neuroshard.host.owner_policy import (
    HostReadings,
    Rules,
    UserPause,
    YesNo,
    clock_words,
    decide,
    next_gpu_share,
    readings,
)
from neuroshard.host.sensors import SensorThread
from neuroshard.membership.connectivity import Networking
from neuroshard.network.transfer_policy import TransferPolicy
from neuroshard.pipeline.control import PAUSED_BY_USER, RequestedPause, TimedPause
from neuroshard.status.board import Publisher
from neuroshard.status.owner_policy import USER, NetworkAction, NetworkDecision, OwnerPolicyStatus, TrainingDecision
from neuroshard.waiting import next_tick

LEDGER_FILE = "transfer.json"


class MonthlyTransfer(Struct, frozen=True):
    """Bytes transferred in one calendar month; `month` is written as "2026-11"."""

    month: str
    bytes: Annotated[int, Meta(ge=0)]


class TransferLedger:
    """Adds up the node's transferred bytes by calendar month. Has no clock: the month is an argument."""

    def __init__(self, folder: Path) -> None:
        """Read the count of earlier starts. Raises StorageError if the file cannot be read."""
        self._file: StateFile[MonthlyTransfer] = StateFile(
            folder / LEDGER_FILE,
            MonthlyTransfer,
            "set_aside",
            "this month's transfer is counted from now on",
            data_dir=folder,
        )
        warnings = list[str]()
        kept = self._file.read(warnings.append) or MonthlyTransfer("", 0)
        self.warnings = tuple(warnings)
        self._month: str = kept.month
        self._bytes: int = kept.bytes
        self._counted: int = 0
        self._saved: int = self._bytes

    @property
    def is_saved(self) -> bool:
        """Whether the file has the present count, so that a kill would lose nothing."""
        return self._saved == self._bytes

    def note(self, total: int, month: str) -> int:
        """Return the bytes of `month` ("2026-11"), given the `total` bytes transferred since the start."""
        if month != self._month:
            self._month, self._bytes, self._saved = month, 0, -1
        # bytes since the previous call belong to the month of this one; a total that fell adds nothing
        self._bytes += max(0, total - self._counted)
        self._counted = max(total, self._counted)
        return self._bytes

    def save(self) -> None:
        """Write the present count. Raises StorageError."""
        month, moved = self._month, self._bytes
        self._file.write(MonthlyTransfer(month, moved))
        self._saved = moved


_LOG = logging.getLogger(__name__)

SAVE_SECONDS = 5.0  # a kill may lose the count of this time
GIGABYTE = 1e9


def decide_network(rules: Rules, moved_bytes: int, local: datetime, metered: YesNo = None) -> NetworkDecision:
    """Decide which traffic is allowed at a local time (no time zone) after this month's `moved_bytes`. Pure.

    A connection counts as metered only if the system says so.
    """
    if not rules.network_schedule.allows(local):
        change = rules.network_schedule.next_change(local)
        when = "" if change is None else f" until {clock_words(change, local)}"
        until = None if change is None else change.timestamp()
        reason = f"The network is off{when}: that is outside the network schedule."
        return NetworkDecision(NetworkAction.OFF, reason, "network_schedule", until)
    quota = rules.monthly_quota
    if quota is not None and moved_bytes >= quota * GIGABYTE:
        month = first_of_next_month(local)
        reason = f"The month's {quota:g} GB are used up: nothing large is transferred until {month.day} {month:%B}."
        return NetworkDecision(NetworkAction.SMALL_ONLY, reason, "monthly_quota", month.timestamp())
    if rules.spare_metered and metered is True:
        reason = "The connection is metered: nothing large is transferred over it."
        return NetworkDecision(NetworkAction.SMALL_ONLY, reason, "spare_metered")
    return NetworkDecision()


def first_of_next_month(local: datetime) -> datetime:
    """Return midnight of the first day of the month after `local`."""
    later = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0) + timedelta(days=32)
    return later.replace(day=1)


class NetworkRules:
    """Counts the transfer, decides which traffic is allowed, and opens or closes the network. Used once per second."""

    def __init__(
        self, ledger: TransferLedger, gate: TransferPolicy, networking: Networking, moved: Callable[[], int]
    ) -> None:
        """`moved` returns the bytes since the start, in both directions."""
        self._ledger = ledger
        self._gate = gate
        self._networking = networking
        self._moved = moved
        self._saved_at = -SAVE_SECONDS
        self._decision = NetworkDecision()
        self._has_failed = False

    async def look(self, rules: Rules, local: datetime, metered: YesNo = None) -> tuple[NetworkDecision, int]:
        """Apply the rules at a local time (no time zone); return the decision and the bytes of this month."""
        moved = self._ledger.note(self._moved(), f"{local:%Y-%m}")
        decision = decide_network(rules, moved, local, metered)
        if decision != self._decision:
            self._obey(decision)
        now = anyio.current_time()
        if not self._ledger.is_saved and now - self._saved_at >= SAVE_SECONDS:
            self._saved_at = now
            await self.save()
        return decision, moved

    async def save(self) -> None:
        """Write the count to disk. A disk error is logged once and does not raise."""
        try:
            await anyio.to_thread.run_sync(self._ledger.save)
        except StorageError as error:
            if not self._has_failed:
                _LOG.warning("The bytes of this month cannot be stored: %s", error)
            self._has_failed = True

    def _obey(self, decision: NetworkDecision) -> None:
        _LOG.info("%s", decision.reason)
        self._decision = decision
        if decision.action is NetworkAction.OPEN:
            self._gate.open()
        else:
            self._gate.close(decision.reason)
        self._networking.forbid(decision.reason if decision.action is NetworkAction.OFF else "")


LOOK_SECONDS = 1.0
PAUSED_LOOK_SECONDS = 5.0  # while the owner's pause, which has no end of its own, overrides every rule


class Throttled(Protocol):
    """The training loop, which carries out the owner's policy: a CommandLoop."""

    @property
    def gpu_uuid(self) -> str | None:
        """Id of the accelerator that trains, or None."""
        ...

    def obey(self, decision: TrainingDecision) -> None:
        """Apply the decision from now on."""
        ...

    async def until_commanded(self) -> None:
        """Wait for a command that may change the decision."""
        ...


class OwnerPolicyTask:
    """Reads the sensors every second, seldom during a pause without an end, and applies the owner's policy.

    `run` may be called once.
    """

    def __init__(
        self,
        configuration: Configuration,
        requested_pause: RequestedPause,
        loop: Throttled,
        publisher: Publisher,
        *,
        network: NetworkRules | None = None,
        observe: Callable[[Rules, str | None], Awaitable[HostReadings]] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`observe` reads the sensors that the rules require, and the accelerator with that id."""
        self._configuration = configuration
        self._requested_pause = requested_pause
        self._loop = loop
        self._publisher = publisher
        self._network = network
        self._lookout = SensorThread()
        self._observe = observe or self._lookout.look
        self._wall_clock = wall_clock
        self._rules: tuple[Settings, Rules] | None = None
        self._gpu_share = 1.0
        self._published: OwnerPolicyStatus | None = None

    async def run(self) -> None:
        """Look, decide and apply until cancelled; then close the sensors and save the transfer count."""
        try:
            while True:
                await self.look()
                asked = self._requested_pause.asked
                is_over_rules = asked is not None and asked.until is None
                seconds = PAUSED_LOOK_SECONDS if is_over_rules else LOOK_SECONDS
                with anyio.CancelScope(deadline=next_tick(seconds)):
                    await self._loop.until_commanded()
        finally:
            self._lookout.close()
            if self._network is not None:
                with anyio.CancelScope(shield=True):
                    await self._network.save()

    async def look(self) -> None:
        """Read the sensors, apply the decisions to training and network, and publish them."""
        rules = self._present_rules()
        observed = await self._observe(rules, self._loop.gpu_uuid)
        asked = None if self._requested_pause.seconds_left == 0.0 else self._requested_pause.asked
        user = None if asked is None else UserPause(asked.reason, asked.until)
        self._gpu_share = next_gpu_share(self._gpu_share, rules, observed.gpu)
        local = datetime.fromtimestamp(self._wall_clock()).astimezone().replace(tzinfo=None)
        # The trainer's loops read the requested pause themselves, so the loop receives the decision without it.
        # The published decision includes it.
        decision = decide(rules, observed, None, local, self._gpu_share)
        self._loop.obey(decision)
        full_decision = decision if user is None else decide(rules, observed, user, local)
        network, moved = NetworkDecision(), 0
        if self._network is not None:
            network, moved = await self._network.look(rules, local, observed.metered)
        self._publish(OwnerPolicyStatus(full_decision, readings(observed), network, moved // 1_000_000))

    def _present_rules(self) -> Rules:
        settings = self._configuration.settings
        if self._rules is None or self._rules[0] is not settings:
            self._rules = settings, Rules.of(settings)
        return self._rules[1]

    def _publish(self, status: OwnerPolicyStatus) -> None:
        if status == self._published:
            return
        decision, before = status.decision, self._published and self._published.decision
        is_new = before is None or (before.action, before.rule) != (decision.action, decision.rule)
        if is_new and decision.rule != USER and (before is not None or decision.rule):
            _LOG.info("%s", decision.reason)
        self._published = status
        self._publisher.change(owner_policy=status)


PAUSE_FILE = "pause.json"
Time = Annotated[float, Meta(gt=-1e12, lt=1e12)]  # seconds since the epoch


class StoredPause(Struct, frozen=True):
    """A requested pause: its beginning, and its end if it ends without a request to resume."""

    begun: Time
    until: Time | None


def keep_pause(folder: Path, asked: TimedPause | None) -> None:
    """Store a requested pause for the next start, or remove the stored one if `asked` is None. Raises StorageError."""
    file = _pause_file(folder)
    try:
        if asked is None:
            file.remove()
        else:
            file.write(StoredPause(time.time(), asked.until))
    except StorageError as error:
        raise StorageError(f"This does not survive a restart: {error.message}", error.action) from error


def restore_pause(requested_pause: RequestedPause, folder: Path) -> tuple[str, ...]:
    """Request the pause of an earlier start again, unless it is over; return warnings.

    A damaged file gives a pause without an end, because its owner did not want training to resume by itself. Raises
    StorageError if the file cannot be read.
    """
    try:
        pause = _pause_file(folder).read()
    except DamagedFileError as error:
        requested_pause.begin(PAUSED_BY_USER)
        return (f"{error.message} {error.action}",)
    if pause is not None:
        requested_pause.renew_request(PAUSED_BY_USER, pause.begun, pause.until)
    return ()


def _pause_file(folder: Path) -> StateFile[StoredPause]:
    return StateFile(
        folder / PAUSE_FILE, StoredPause, "fail", "The node stays paused until it is resumed.", data_dir=folder
    )
