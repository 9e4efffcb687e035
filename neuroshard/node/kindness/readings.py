"""What was observed, in words for the owner. Pure."""

from __future__ import annotations

from neuroshard.node.kindness.policy import GpuReading, Observed, Unknown
from neuroshard.status.owner_policy import SensorReading

MINUTE = 60.0


def readings(observed: Observed) -> tuple[SensorReading, ...]:
    """One for each thing that a rule asks for, also when it cannot be known."""
    told = (
        ("keyboard and mouse", _idle_words(observed.idle_seconds)),
        ("power", _choice(observed.on_battery, "on battery", "plugged in, or no battery")),
        ("full screen", _choice(observed.full_screen, "a program fills the screen", "no program fills the screen")),
        ("programs", _program_words(observed.programs)),
        ("GPU", _gpu_words(observed.gpu)),
    )
    return tuple(
        SensorReading(name, f"cannot be told here: {value.why}", is_known=False)
        if isinstance(value, Unknown)
        else SensorReading(name, value)
        for name, value in told
        if value is not None
    )


def _idle_words(seconds: float | Unknown | None) -> str | Unknown | None:
    if seconds is None or isinstance(seconds, Unknown):
        return seconds
    if seconds < MINUTE:
        return "touched within the last minute"
    minutes = int(seconds // MINUTE)
    return f"not touched for {minutes:,} minute{'' if minutes == 1 else 's'}"


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
    return ", ".join(facts) or Unknown("the GPU tells neither temperature nor power")
