"""The owner's policy: run, throttle or pause, from the readings of this computer and the owner's rules. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from neuroshard.config.settings import Settings
from neuroshard.config.weekly_schedule import Schedule
from neuroshard.status.owner_policy import USER, SensorReading, TrainingAction, TrainingDecision

LEAST_SHARE = 0.05  # of the time: with less, a throttled GPU would cool no further and do no work
RECOVERY_STEP = 0.03  # of the time, at each look at a GPU that is well below its limits
COOL_DEGREES = 3  # below the limit: a throttled GPU this cool gets more work
USED_BY_OTHERS = 10.0  # percent: a desktop that draws its windows uses less, a game or a renderer more
COOL_POWER = 0.95  # of the limit: the same for its power


@dataclass(frozen=True)
class Unknown:
    """A reading that is not available on this computer, and the reason."""

    why: str


@dataclass(frozen=True)
class GpuReading:
    """Temperature and power of an accelerator at one moment, and its use by other programs shortly before."""

    celsius: int | None  # None: not reported
    watts: float | None
    others: float | Unknown | None = None  # percent; None: no rule requires it

    @property
    def is_used_by_others(self) -> bool:
        """Whether another program computes or draws on it."""
        return isinstance(self.others, float) and self.others >= USED_BY_OTHERS


Idle: TypeAlias = "float | Unknown | None"
YesNo: TypeAlias = "bool | Unknown | None"


@dataclass(frozen=True)
class HostReadings:
    """The sensor readings of one moment. None: no rule requires the reading, so it was not taken."""

    idle_seconds: Idle = None  # since the last touch of keyboard or mouse
    on_battery: YesNo = None
    full_screen: YesNo = None
    metered: YesNo = None  # whether the connection to the internet is metered
    programs: frozenset[str] | Unknown | None = None  # running programs, named as in the rules
    gpu: GpuReading | Unknown | None = None


@dataclass(frozen=True)
class UserPause:
    """A pause that the owner requested by hand."""

    reason: str
    until: float | None = None  # seconds since the epoch; None: until resumed


@dataclass(frozen=True)
class Rules:
    """The owner's rules, ready to apply."""

    only_idle: bool = False
    idle_minutes: float = 5.0
    pause_on_battery: bool = True
    pause_on_full_screen: bool = True
    programs: tuple[str, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    cpu_percent: int = 100
    gpu_share: int = 25  # percent of the time, while another program uses the accelerator
    gpu_celsius: int | None = None
    gpu_watts: int | None = None
    network_schedule: Schedule = field(default_factory=Schedule)
    monthly_quota: float | None = None  # gigabytes
    spare_metered: bool = True

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """Read the rules from the settings and parse their schedules."""
        return cls(
            only_idle=settings.train_when == "idle",
            idle_minutes=settings.idle_minutes,
            pause_on_battery=settings.pause_on_battery,
            pause_on_full_screen=settings.pause_on_full_screen,
            programs=settings.pause_for_programs,
            schedule=Schedule.of(settings.training_schedule),
            cpu_percent=settings.cpu_percent,
            gpu_share=settings.gpu_share,
            gpu_celsius=settings.gpu_max_temperature,
            gpu_watts=settings.gpu_max_power,
            network_schedule=Schedule.of(settings.network_schedule),
            monthly_quota=settings.monthly_quota,
            spare_metered=settings.spare_metered,
        )

    @property
    def limits_gpu(self) -> bool:
        """Whether a rule requires temperature or power of the accelerator."""
        return self.gpu_celsius is not None or self.gpu_watts is not None

    @property
    def shares_gpu(self) -> bool:
        """Whether training leaves the accelerator to other programs that use it."""
        return self.gpu_share < 100


def decide(
    rules: Rules, observed: HostReadings, user: UserPause | None, local: datetime, gpu_share: float = 1.0
) -> TrainingDecision:
    """Decide whether training runs, slows down or pauses at a local time (without a time zone).

    The first reason that applies decides: the owner's own pause, the schedule, battery, programs, full screen, use of
    the computer, then the limits that slow training down. `gpu_share` is the last result of `next_gpu_share`.
    """
    if user is not None:
        return TrainingDecision(TrainingAction.PAUSE, user.reason, USER, user.until, 0.0)
    return next(_pauses(rules, observed, local), None) or _throttled(rules, observed.gpu, gpu_share)


def next_gpu_share(before: float, rules: Rules, gpu: GpuReading | Unknown | None) -> float:
    """Return the share of time in which an accelerator may work: fast down above a limit, slowly up below it.

    Above the power limit the share falls in proportion to the excess, at most to half. Above the temperature limit it
    falls by a fifth at each look. Between a limit and a little below it the share stays. A value that the accelerator
    does not report limits nothing.
    """
    if not isinstance(gpu, GpuReading) or not rules.limits_gpu:
        return 1.0
    share, may_recover = before, True
    if rules.gpu_watts is not None and gpu.watts is not None:
        if gpu.watts > rules.gpu_watts:
            share = min(share, before * max(0.5, rules.gpu_watts / gpu.watts))
        may_recover = gpu.watts <= COOL_POWER * rules.gpu_watts
    if rules.gpu_celsius is not None and gpu.celsius is not None:
        if gpu.celsius > rules.gpu_celsius:
            share = min(share, before * 0.8)
        may_recover = may_recover and gpu.celsius <= rules.gpu_celsius - COOL_DEGREES
    if share == before and may_recover:
        share = before + RECOVERY_STEP
    return min(1.0, max(LEAST_SHARE, share))


def _pauses(rules: Rules, observed: HostReadings, local: datetime) -> Iterator[TrainingDecision]:
    """Yield every reason to pause, the strongest first."""
    if not rules.schedule.allows(local):
        change = rules.schedule.next_change(local)
        when = "" if change is None else f" until {clock_words(change, local)}"
        until = None if change is None else change.timestamp()
        yield _pause(f"Paused{when}: that is outside the training schedule.", "training_schedule", until)
    if rules.pause_on_battery and observed.on_battery is True:
        yield _pause("Paused: this computer runs on battery.", "pause_on_battery")
    if isinstance(observed.programs, frozenset) and (running := sorted(observed.programs.intersection(rules.programs))):
        yield _pause(f"Paused while {' and '.join(running[:3])} runs.", "pause_for_programs")
    if rules.pause_on_full_screen and observed.full_screen is True:
        yield _pause("Paused while a program fills the screen.", "pause_on_full_screen")
    if rules.gpu_share == 0 and isinstance(observed.gpu, GpuReading) and observed.gpu.is_used_by_others:
        yield _pause("Paused while another program uses the GPU.", "gpu_share")
    if rules.only_idle and isinstance(observed.idle_seconds, float) and observed.idle_seconds < 60 * rules.idle_minutes:
        minutes = f"{rules.idle_minutes:g} minute{'' if rules.idle_minutes == 1 else 's'}"
        yield _pause(f"Paused while this computer is in use: resumes after {minutes} without input.", "train_when")


def _pause(reason: str, rule: str, until: float | None = None) -> TrainingDecision:
    return TrainingDecision(TrainingAction.PAUSE, reason, rule, until, 0.0)


def _throttled(rules: Rules, gpu: GpuReading | Unknown | None, gpu_share: float) -> TrainingDecision:
    """The tightest of the limits; of equal ones the first in this list."""
    is_shared = isinstance(gpu, GpuReading) and gpu.is_used_by_others and rules.shares_gpu
    shares = {
        "cpu_percent": rules.cpu_percent / 100,
        "gpu_share": rules.gpu_share / 100 if is_shared else 1.0,
        _binding_limit(rules, gpu): gpu_share if rules.limits_gpu else 1.0,
    }
    rule = min(shares, key=lambda name: shares[name])
    share = shares[rule]
    if share >= 1.0:
        return TrainingDecision()
    if rule == "cpu_percent":
        reason = f"Slowed down to {share:.0%} of the time, as set."
    elif rule == "gpu_share":
        reason = f"Slowed down to {share:.0%} of the time while another program uses the GPU."
    else:
        limits = [f"{rules.gpu_celsius} °C"] if rules.gpu_celsius is not None else []
        limits += [f"{rules.gpu_watts} W"] if rules.gpu_watts is not None else []
        reason = f"Slowed down to {share:.0%}, so that the GPU stays below {' and '.join(limits)}."
    return TrainingDecision(TrainingAction.THROTTLE, reason, rule, None, share)


def _binding_limit(rules: Rules, gpu: GpuReading | Unknown | None) -> str:
    """The setting that limits the accelerator: the temperature until it is cool again, otherwise the power."""
    if rules.gpu_celsius is None or rules.gpu_watts is None:
        return "gpu_max_temperature" if rules.gpu_watts is None else "gpu_max_power"
    is_warm = isinstance(gpu, GpuReading) and gpu.celsius is not None and gpu.celsius > rules.gpu_celsius - COOL_DEGREES
    return "gpu_max_temperature" if is_warm else "gpu_max_power"


def clock_words(moment: datetime, local: datetime) -> str:
    """Return a time on the owner's clock, with the weekday if it is not on the day of `local`."""
    return f"{moment:%H:%M}" if moment.date() == local.date() else f"{moment:%A %H:%M}"


MINUTE = 60.0


def readings(observed: HostReadings) -> tuple[SensorReading, ...]:
    """Return one reading in words for each sensor that a rule requires, also if its value is unknown."""
    texts = (
        ("Keyboard and mouse", _idle_words(observed.idle_seconds)),
        ("Power", _choice(observed.on_battery, "on battery", "plugged in, or no battery")),
        ("Full screen", _choice(observed.full_screen, "a program fills the screen", "no program fills the screen")),
        ("Connection", _choice(observed.metered, "metered", "not metered")),
        ("Programs", _program_words(observed.programs)),
        ("GPU", _gpu_words(observed.gpu)),
    )
    return tuple(
        SensorReading(name, value.why, is_known=False) if isinstance(value, Unknown) else SensorReading(name, value)
        for name, value in texts
        if value is not None
    )


def _idle_words(seconds: float | Unknown | None) -> str | Unknown | None:
    if seconds is None or isinstance(seconds, Unknown):
        return seconds
    if seconds < MINUTE:
        return "used within the last minute"
    minutes = int(seconds // MINUTE)
    return f"not used for {minutes:,} minute{'' if minutes == 1 else 's'}"


def _choice(value: bool | Unknown | None, yes: str, no: str) -> str | Unknown | None:
    if isinstance(value, bool):
        return yes if value else no
    return value


def _program_words(names: frozenset[str] | Unknown | None) -> str | Unknown | None:
    if not isinstance(names, frozenset):
        return names
    return f"running: {', '.join(sorted(names))}" if names else "none of those that you named runs"


def _gpu_words(gpu: GpuReading | Unknown | None) -> str | Unknown | None:
    if not isinstance(gpu, GpuReading):
        return gpu
    facts = [f"{gpu.celsius} °C"] if gpu.celsius is not None else []
    facts += [f"{gpu.watts:.0f} W"] if gpu.watts is not None else []
    if isinstance(gpu.others, float):
        facts.append(f"other programs use {gpu.others:.0f} %")
    elif isinstance(gpu.others, Unknown):
        facts.append(f"use by other programs not known: {gpu.others.why}")
    return ", ".join(facts) or Unknown("the GPU reports neither temperature nor power")
