"""The task that decides every second, under a virtual clock, and pauses that outlive a restart or a sleep."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.config.loading import LoadedSettings
from neuroshard.config.settings import Settings
from neuroshard.errors import StorageError
from neuroshard.host.live_settings import Configuration
from neuroshard.host.owner_limits import PAUSE_FILE, PAUSED_LOOK_SECONDS, OwnerPolicyTask, keep_pause, restore_pause
from neuroshard.host.owner_policy import GpuReading, HostReadings, Rules
from neuroshard.pipeline.control import PAUSED_BY_USER, Control, RequestedPause
from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.owner_policy import TrainingAction, TrainingDecision
from neuroshard.status.snapshot import NodeStatus
from neuroshard.waiting import Signal

HOUR, DAY = 3600.0, 86_400.0


class Computer:
    """Its clocks, what is observed of it, and what the watch had obeyed."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.calendar_ahead = time.mktime((2026, 11, 25, 12, 0, 0, 0, 0, -1))  # a Wednesday at noon
        self.observed = HostReadings()
        self.obeyed: list[TrainingDecision] = []
        self.gpu_uuid: str | None = None
        self.commanded = Signal()
        self.looks = 0
        self.board = StatusBoard(NodeStatus("1", 0.0, 0.0))
        self.requested_pause = RequestedPause(anyio.current_time, self.calendar)
        loaded = Settings.model_validate({"data_dir": folder, **settings})
        self.configuration = Configuration(LoadedSettings(loaded, dict.fromkeys(Settings.model_fields, "default")))
        self.watch = OwnerPolicyTask(
            self.configuration,
            self.requested_pause,
            self,
            Publisher(self.board),
            observe=self.observe,
            wall_clock=self.calendar,
        )

    def calendar(self) -> float:
        """Seconds since the epoch; the clock of the event loop stands still while the computer sleeps."""
        return self.calendar_ahead + anyio.current_time()

    async def observe(self, _rules: Rules, _gpu_uuid: str | None) -> HostReadings:
        self.looks += 1
        return self.observed

    def obey(self, decision: TrainingDecision) -> None:
        self.obeyed.append(decision)
        self.requested_pause.expire()
        self.requested_pause.follow_rule(
            decision.reason if decision.action is TrainingAction.PAUSE else "", decision.until
        )

    async def until_commanded(self) -> None:
        await self.commanded.wait()

    @property
    def told(self) -> TrainingDecision:
        return self.board.current().owner_policy.decision


def living(computer: Computer, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(computer.watch.run)
            await scenario()
            tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_computer_that_sleeps_for_a_day_wakes_without_the_pause_that_ended_meanwhile(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        computer.requested_pause.begin(PAUSED_BY_USER, HOUR)
        await anyio.sleep(5)
        assert computer.told.rule == "user"
        assert computer.told.until == computer.requested_pause.until
        computer.calendar_ahead += DAY
        await anyio.sleep(2)
        assert not computer.requested_pause.holds
        assert computer.told.action is TrainingAction.RUN

    living(computer, scenario)


def test_a_pause_outlasts_a_sleep_that_is_shorter(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        computer.requested_pause.begin(PAUSED_BY_USER, 2 * DAY)
        computer.calendar_ahead += DAY
        await anyio.sleep(10)
        assert computer.requested_pause.holds
        left = computer.requested_pause.seconds_left
        assert left is not None
        assert left == pytest.approx(DAY - 10, abs=2)

    living(computer, scenario)


def test_a_calendar_that_is_set_back_does_not_prolong_a_pause(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        computer.requested_pause.begin(PAUSED_BY_USER, HOUR)
        computer.calendar_ahead -= 300 * DAY
        await anyio.sleep(HOUR - 5)
        assert computer.requested_pause.holds
        await anyio.sleep(10)
        assert not computer.requested_pause.holds

    living(computer, scenario)


def test_a_trainer_that_waits_for_the_end_of_a_pause_hears_of_it_after_a_sleep(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        control = Control(computer.requested_pause)
        control.pause(PAUSED_BY_USER, 10 * DAY)
        computer.obey = lambda _: control.look_again()  # type: ignore[method-assign]
        computer.calendar_ahead += 11 * DAY
        with anyio.fail_after(60):
            while control.requested_pause.holds:
                await control.changed()

    living(computer, scenario)


def test_the_schedule_is_right_after_a_sleep_and_over_days(tmp_path: Path) -> None:
    computer = Computer(tmp_path, training_schedule=("mon-fri 18:00-08:00",))

    async def scenario() -> None:
        await anyio.sleep(2)
        assert computer.told.reason == "Paused until 18:00: that is outside the training schedule."
        until = computer.told.until
        assert until is not None
        await anyio.sleep(until - computer.calendar() - 3)
        assert computer.told.action is TrainingAction.PAUSE
        await anyio.sleep(5)
        assert computer.told.action is TrainingAction.RUN
        computer.calendar_ahead += 15 * HOUR  # it sleeps until nine in the morning
        await anyio.sleep(2)
        assert computer.told.rule == "training_schedule"

    living(computer, scenario)


def test_changed_settings_and_observations_hold_at_the_next_look(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        await anyio.sleep(2)
        assert computer.told.action is TrainingAction.RUN
        computer.observed = HostReadings(on_battery=True)
        await anyio.sleep(2)
        assert computer.requested_pause.reason == "Paused: this computer runs on battery."
        assert [reading.value for reading in computer.board.current().owner_policy.readings] == ["on battery"]
        computer.configuration.change({"pause_on_battery": False, "cpu_percent": 25}, "paused")
        await anyio.sleep(2)
        assert not computer.requested_pause.holds
        assert (computer.told.action, computer.told.share) == (TrainingAction.THROTTLE, 0.25)

    living(computer, scenario)


def test_a_pause_by_hand_is_told_and_the_rule_below_it_is_kept(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        computer.observed = HostReadings(full_screen=True)
        computer.requested_pause.begin(PAUSED_BY_USER)
        await anyio.sleep(2)
        assert (computer.told.rule, computer.requested_pause.reason) == ("user", PAUSED_BY_USER)
        assert computer.requested_pause.rule_reason == "Paused while a program fills the screen."
        computer.requested_pause.end()
        computer.commanded.notify()
        assert computer.requested_pause.holds
        await anyio.sleep(2)
        assert computer.told.rule == "pause_on_full_screen"

    living(computer, scenario)


def test_sensors_are_read_seldom_while_a_pause_without_an_end_overrides_every_rule(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        computer.requested_pause.begin(PAUSED_BY_USER)
        await anyio.sleep(60)
        assert computer.looks <= 60 / PAUSED_LOOK_SECONDS + 1
        computer.observed = HostReadings(on_battery=True)
        computer.requested_pause.end()
        computer.commanded.notify()
        await anyio.sleep(0.1)  # a command is obeyed at once
        assert computer.told.rule == "pause_on_battery"
        before = computer.looks
        await anyio.sleep(60)
        assert computer.looks >= before + 59

    living(computer, scenario)


def test_a_hot_gpu_is_slowed_down_until_it_is_cool(tmp_path: Path) -> None:
    computer = Computer(tmp_path, gpu_max_temperature=70)

    async def scenario() -> None:
        computer.observed = HostReadings(gpu=GpuReading(80, None))
        await anyio.sleep(3)
        assert computer.told.action is TrainingAction.THROTTLE
        assert computer.told.share < 0.7
        share = computer.told.share
        computer.observed = HostReadings(gpu=GpuReading(69, None))
        await anyio.sleep(10)
        assert computer.told.share <= share
        computer.observed = HostReadings(gpu=GpuReading(60, None))
        await anyio.sleep(60)
        assert computer.told.action is TrainingAction.RUN

    living(computer, scenario)


def test_nothing_is_published_while_nothing_changes(tmp_path: Path) -> None:
    computer = Computer(tmp_path)

    async def scenario() -> None:
        await anyio.sleep(3)
        published = computer.board.current()
        await anyio.sleep(100)
        assert computer.board.current() is published
        assert len(computer.obeyed) > 50

    living(computer, scenario)


def test_pauses_survive_a_restart(tmp_path: Path) -> None:
    for duration in (None, HOUR):
        before, after = RequestedPause(), RequestedPause()
        before.begin(PAUSED_BY_USER, duration)
        keep_pause(tmp_path, before.asked)
        assert restore_pause(after, tmp_path) == ()
        assert (after.holds, after.reason) == (True, PAUSED_BY_USER)
        assert (after.until is None) is (duration is None)
        if duration is not None:
            assert after.until == pytest.approx(time.time() + duration, abs=60)
    keep_pause(tmp_path, None)
    gone = RequestedPause()
    assert restore_pause(gone, tmp_path) == ()
    assert not gone.holds


def test_a_pause_that_ended_while_the_node_was_away_is_over(tmp_path: Path) -> None:
    (tmp_path / PAUSE_FILE).write_text(f'{{"begun": {time.time() - DAY}, "until": {time.time() - HOUR}}}')
    requested_pause = RequestedPause()
    assert restore_pause(requested_pause, tmp_path) == ()
    assert not requested_pause.holds


def test_a_restored_pause_lasts_no_longer_than_was_asked(tmp_path: Path) -> None:
    """The calendar was wrong by years when it was asked for."""
    wrong = time.time() + 900 * DAY
    (tmp_path / PAUSE_FILE).write_text(f'{{"begun": {wrong}, "until": {wrong + HOUR}}}')
    requested_pause = RequestedPause()
    restore_pause(requested_pause, tmp_path)
    assert requested_pause.seconds_left == pytest.approx(HOUR, abs=60)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"begun": "x"}', b'{"begun": 1, "until": true}', b"\xff\xfe", b"[" * 9999]
)
def test_a_damaged_pause_holds_until_somebody_resumes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PAUSE_FILE).write_bytes(content)
    requested_pause = RequestedPause()
    (warning,) = restore_pause(requested_pause, tmp_path)
    assert PAUSE_FILE in warning
    assert requested_pause.holds
    assert requested_pause.seconds_left is None


def test_a_pause_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    requested_pause = RequestedPause()
    requested_pause.begin(PAUSED_BY_USER)
    with pytest.raises(StorageError, match="does not survive a restart"):
        keep_pause(tmp_path / "gone", requested_pause.asked)


def test_rules_follow_the_settings() -> None:
    assert Rules.of(Settings()) == Rules()
    changed = Settings(train_when="idle", idle_minutes=2, pause_for_programs=("a",), gpu_max_power=99)
    assert Rules.of(changed) == replace(Rules(), only_idle=True, idle_minutes=2, programs=("a",), gpu_watts=99)


def test_a_pause_that_cannot_be_read_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / PAUSE_FILE).mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        restore_pause(RequestedPause(), tmp_path)
