"""Chooses what to look at, and how, on this system; looks no more often than an answer is worth."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from neuroshard.node.kindness.policy import GpuReading, Observed, Rules, Unknown
from neuroshard.node.kindness.sensing.battery import runs_on_battery
from neuroshard.node.kindness.sensing.gpu import GpuSensor
from neuroshard.node.kindness.sensing.outputs import gnome_idle_seconds, logind_idle_seconds, macos_idle_seconds
from neuroshard.node.kindness.sensing.programs import running_of
from neuroshard.node.kindness.sensing.windows import windows_idle_seconds, windows_is_full_screen
from neuroshard.node.kindness.sensing.x11 import X11Display

SLOW_LOOK_SECONDS = 5.0  # between two looks that start a program or walk all processes


class Sensors:
    """Looks at what the rules ask for, and at nothing else. For one thread at a time."""

    def __init__(
        self,
        system: str = sys.platform,
        environment: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment` is the process's own by default."""
        self._system = system
        self._environment = os.environ if environment is None else environment
        self._monotonic = monotonic
        display = self._environment.get("DISPLAY", "") if system == "linux" else ""
        self._x11 = X11Display(display) if display else None
        self._is_wayland = system == "linux" and bool(self._environment.get("WAYLAND_DISPLAY"))
        self._gpu: tuple[str, GpuSensor] | None = None
        self._kept: dict[object, tuple[float, Any]] = {}

    def look(self, rules: Rules, gpu_uuid: str | None) -> Observed:
        """This computer now. `gpu_uuid` names the accelerator that trains, if it is one of NVIDIA's."""
        programs = rules.programs
        return Observed(
            idle_seconds=self._idle() if rules.only_idle else None,
            on_battery=self._sometimes("battery", runs_on_battery) if rules.pause_on_battery else None,
            full_screen=self._full_screen() if rules.pause_on_full_screen else None,
            programs=self._sometimes(programs, lambda: running_of(programs)) if programs else None,
            gpu=self._look_at_gpu(gpu_uuid) if rules.limits_gpu else None,
        )

    def close(self) -> None:
        """Let go of what is open; the next look opens it again."""
        if self._x11 is not None:
            self._x11.close()

    def _idle(self) -> float | Unknown:
        """By the first way that tells."""
        if self._system == "win32":
            return windows_idle_seconds()
        if self._system == "darwin":
            return self._aged("idle", macos_idle_seconds)
        told = Unknown("this system does not tell")
        if self._x11 is not None and not self._is_wayland:  # under Wayland it sees older programs' input only
            told = self._x11.idle_seconds()
        elif self._is_wayland:
            told = self._aged("gnome", gnome_idle_seconds)
        if isinstance(told, Unknown) and self._system == "linux":
            session = self._aged("logind", logind_idle_seconds)
            has_display = self._x11 is not None or self._is_wayland
            return Unknown(f"{told.why}; {session.why}") if isinstance(session, Unknown) and has_display else session
        return told

    def _full_screen(self) -> bool | Unknown:
        if self._system == "win32":
            return windows_is_full_screen()
        if self._x11 is None:
            return Unknown("there is no display" if self._system == "linux" else "this system does not tell")
        told = self._x11.is_full_screen()
        return told if told is True or not self._is_wayland else Unknown("Wayland shows older programs' windows only")

    def _look_at_gpu(self, uuid: str | None) -> GpuReading | Unknown:
        if uuid is None:
            return Unknown("no NVIDIA GPU trains here now")
        if self._gpu is None or self._gpu[0] != uuid:
            self._gpu = uuid, GpuSensor(uuid)
        return self._gpu[1].look()

    def _aged(self, key: str, look: Callable[[], float | Unknown]) -> float | Unknown:
        """Seconds that were told some time ago, and that time: whoever is idle stays so until the next look."""
        told = self._sometimes(key, look)
        return told if isinstance(told, Unknown) else told + self._monotonic() - self._kept[key][0]

    def _sometimes(self, key: object, look: Callable[[], Any]) -> Any:
        now = self._monotonic()
        if key not in self._kept or now - self._kept[key][0] >= SLOW_LOOK_SECONDS:
            self._kept[key] = now, look()
        return self._kept[key][1]
