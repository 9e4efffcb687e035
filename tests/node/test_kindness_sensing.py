"""What is looked at: real files, processes and X server, and outputs as the programs of a system print them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuroshard.host.nvidia import HOLD_SECONDS, GpuSensor, training_gpus
from neuroshard.host.owner_policy import GpuReading, Rules, Unknown
from neuroshard.host.sensors import (
    Sensors,
    X11Display,
    full_screen_from_state,
    hid_idle_seconds,
    idle_from_ticks,
    metered_from_networkmanager,
    metered_from_windows,
    monitor_idle_seconds,
    running_of,
    runs_on_battery,
    runs_on_battery_linux,
    session_idle_seconds,
)
from tests.worlds.system_programs import xvfb_path

IOREG = """+-o Root  <class IORegistryEntry, id 0x100000100, retain 33>
  +-o IOResources  <class IOResources, id 0x10000011a, registered, matched, active, busy 0 (0 ms), retain 60>
    +-o IOHIDSystem  <class IOHIDSystem, id 0x1000003a1, registered, matched, active, busy 0 (0 ms), retain 19>
        {
          "HIDIdleTime" = 83522117458
          "HIDParameters" = {"HIDIdleTime" = 83522117458,"HIDClickTime"=500000000}
        }
"""


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, False),  # a computer without a battery
        ({"AC": "Mains  1 ", "BAT0": "Battery   Charging"}, False),
        ({"AC": "Mains  0 ", "BAT0": "Battery   Discharging"}, True),
        ({"AC": "Mains  0 ", "BAT0": "Battery   Not charging"}, False),
        ({"hidpp_battery_0": "Battery Device  Discharging"}, False),  # of a mouse
        ({"hidpp_battery_0": "Battery Device  Discharging", "BAT1": "Battery System  Discharging"}, True),
        ({"ADP1": "Mains  0 ", "ucsi-source-psy-1": "USB  1 ", "BAT0": "Battery   Discharging"}, False),
        ({"BAT0": "Battery   Unknown"}, False),
    ],
)
def test_the_battery_as_the_kernel_tells_it(tmp_path: Path, supplies: dict[str, str], expected: bool) -> None:
    for name, facts in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("type", "scope", "online", "status"), facts.split(" ", 3), strict=True):
            if text:
                (tmp_path / name / file).write_text(f"{text}\n")
    assert runs_on_battery_linux(tmp_path) is expected


def test_no_power_supplies_are_no_battery(tmp_path: Path) -> None:
    assert runs_on_battery_linux(tmp_path / "none") is False
    (tmp_path / "file").write_text("")
    assert isinstance(runs_on_battery_linux(tmp_path / "file"), Unknown)
    assert isinstance(runs_on_battery(), bool | Unknown)


def test_programs_that_run_are_found_by_name(tmp_path: Path) -> None:
    program = tmp_path / "A-Very-Long-Game-Name"  # longer than the 15 letters that the kernel keeps
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    wanted = ("a-very-long-game-name.exe", "another-game", Path(sys.executable).name)
    assert "a-very-long-game-name.exe" not in running_of(wanted)
    with subprocess.Popen([program, "60"]) as process:
        try:
            found = running_of(wanted)
        finally:
            process.kill()
    assert "a-very-long-game-name.exe" in found
    assert "another-game" not in found


def test_this_process_is_no_reason_to_pause_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    own = psutil.Process()
    monkeypatch.setattr(psutil, "process_iter", lambda: iter([own]))
    assert running_of((own.name(),)) == frozenset()
    assert own.pid == os.getpid()


def test_idle_times_as_systems_tell_them() -> None:
    assert hid_idle_seconds(IOREG) == pytest.approx(83.522117458)
    assert isinstance(hid_idle_seconds("+-o Root"), Unknown)
    assert session_idle_seconds("State=active\nIdleHint=no\nIdleSinceHint=0\n", 1e9) == 0.0
    assert session_idle_seconds("State=active\nIdleHint=yes\nIdleSinceHint=1699999400000000\n", 1.7e9) == 600.0
    assert isinstance(session_idle_seconds("IdleHint=yes\nIdleSinceHint=n/a\n", 1.7e9), Unknown)
    assert isinstance(session_idle_seconds("", 1.7e9), Unknown)
    assert monitor_idle_seconds("(uint64 61234,)\n") == 61.234
    assert isinstance(monitor_idle_seconds("()\n"), Unknown)


@pytest.mark.parametrize(("kind", "metered"), [(1, True), (3, True), (2, False), (4, False)])
def test_networkmanager_knows_or_guesses_whether_the_connection_is_metered(kind: int, metered: bool) -> None:
    assert metered_from_networkmanager(f"(<uint32 {kind}>,)\n") is metered


@pytest.mark.parametrize("answer", ["", "()", "(<uint32 0>,)", "(<uint32 9>,)", "(<true>,)", "(<uint32 12>,)"])
def test_an_answer_of_networkmanager_that_says_nothing_is_unknown(answer: str) -> None:
    assert isinstance(metered_from_networkmanager(answer), Unknown)


def test_the_costs_of_windows() -> None:
    answers = {"Unrestricted\r\n": False, "Fixed\r\n": True, "Variable": True}
    assert {answer: metered_from_windows(answer) for answer in answers} == answers
    assert isinstance(metered_from_windows("Unknown\r\n"), Unknown)
    assert isinstance(metered_from_windows(""), Unknown)


def test_the_connection_is_asked_about_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, calls, now = tmp_path / "gdbus", tmp_path / "calls", [0.0]
    program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\necho "(<uint32 1>,)"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sensors = Sensors("linux", {}, lambda: now[0])
    for second in (0, 1, 59, 61):
        now[0] = second
        assert sensors.look(Rules(), None).metered is True
    assert len(calls.read_text().splitlines()) == 2
    assert "org.freedesktop.NetworkManager Metered" in calls.read_text()
    program.write_text("#!/bin/sh\necho 'no such service' >&2; exit 1\n")
    now[0] = 200
    reading = sensors.look(Rules(), None).metered
    assert isinstance(reading, Unknown)
    assert reading.why == "NetworkManager does not answer (no such service)"


def test_windows_ticks_begin_again_after_49_days() -> None:
    assert idle_from_ticks(5_000, 2_000) == 3.0
    assert idle_from_ticks(1_000, 2**32 - 2_000) == 3.0
    assert idle_from_ticks(-2_000, 2**32 - 5_000) == 3.0


def test_what_windows_says_of_full_screen() -> None:
    told = [full_screen_from_state(0, state) for state in range(1, 8)]
    assert told == [False, True, True, True, False, False, False]
    assert isinstance(full_screen_from_state(-2147467259, 0), Unknown)
    assert isinstance(full_screen_from_state(0, 99), Unknown)


class Cards:
    """As much of pynvml as names GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, *names: str, has_driver: bool = True) -> None:
        self._names, self._has_driver = names, has_driver

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's name
        if not self._has_driver:
            raise self.NVMLError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._names)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:  # noqa: N802
        return self._names[number]

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=12_884_901_888)


def test_the_gpus_that_may_train_are_named() -> None:
    assert training_gpus("linux", "x86_64", Cards("RTX A", "RTX B")) == ["RTX A (13 GB)", "RTX B (13 GB)"]
    assert training_gpus("linux", "x86_64", Cards()) == []
    assert training_gpus("win32", "AMD64", Cards("RTX A", has_driver=False)) == []
    assert training_gpus("darwin", "arm64") == ["Apple GPU"]
    assert training_gpus("darwin", "x86_64") == []
    assert isinstance(training_gpus(), list)  # the real library, with or without a driver


class Driver:
    """As much of pynvml as is asked; the driver restarts when told so."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """As in pynvml."""

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818 - as in pynvml
        """As in pynvml."""

    def __init__(self) -> None:
        self.is_lost = self.has_power = False
        self.begun = 0

    def nvmlInit(self) -> None:  # noqa: N802 - as in pynvml
        self.begun += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - as in pynvml
        return uuid

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802 - as in pynvml
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        return 71 if (handle, sensor) == ("GPU-1", 0) else 0

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:  # noqa: N802 - as in pynvml
        if not self.has_power:
            raise self.NVMLError_NotSupported("Not Supported")
        return 215_400


def test_a_gpu_that_does_not_tell_its_power_and_a_driver_that_restarts() -> None:
    driver = Driver()
    sensor = GpuSensor("GPU-1", driver)
    assert sensor.look() == GpuReading(71, None)
    driver.has_power = True
    assert sensor.look() == GpuReading(71, 215.4)
    driver.is_lost = True
    assert sensor.look() == Unknown("the NVIDIA driver reports: GPU is lost")
    driver.is_lost = False
    assert sensor.look() == GpuReading(71, 215.4)
    assert driver.begun == 2


class SharedGpu(Driver):
    """A GPU with several programs on it; times of the samples are in seconds here."""

    class NVMLError_NotFound(Driver.NVMLError):  # noqa: N801 - as in pynvml
        """As in pynvml."""

    NVMLError = Driver.NVMLError
    OWN = 100

    def __init__(self) -> None:
        super().__init__()
        self.present = [self.OWN, 7]
        self.samples = list[tuple[float, int, int]]()  # time, process, percent
        self.reports_use = True

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[Any]:  # noqa: N802 - as in pynvml
        return [SimpleNamespace(pid=process) for process in self.present]

    def nvmlDeviceGetProcessUtilization(self, _: str, since: int) -> list[Any]:  # noqa: N802 - as in pynvml
        if not self.reports_use:
            raise self.NVMLError_NotSupported("Not Supported")
        found = [
            SimpleNamespace(pid=process, timeStamp=int(time * 1e6), smUtil=percent)
            for time, process, percent in self.samples
            if time * 1e6 > since
        ]
        if not found:
            raise self.NVMLError_NotFound("Not Found")
        return found


def test_only_the_use_by_other_programs_counts_and_counts_for_a_while() -> None:
    now, gpu = 1_000.0, SharedGpu()
    sensor = GpuSensor("GPU-1", gpu, process=SharedGpu.OWN, wall_clock=lambda: now)

    def others() -> float | Unknown | None:
        reading = sensor.look(others=True)
        assert isinstance(reading, GpuReading)
        return reading.others

    gpu.samples = [(999.5, SharedGpu.OWN, 98), (900.0, 7, 90)]  # the second is long past
    assert others() == 0.0
    gpu.samples += [(1_000.5, 7, 40), (1_000.7, 7, 20), (1_000.7, 8, 5), (1_000.8, SharedGpu.OWN, 50)]
    now = 1_001.0
    assert others() == 35.0
    now = 1_002.0
    assert others() == 35.0  # nothing new: it may be between two frames
    now = 1_001.0 + HOLD_SECONDS + 0.1
    assert others() == 0.0
    assert sensor.look() == GpuReading(71, None)


def test_the_processes_of_this_node_are_no_other_programs() -> None:
    """A rank of a site trains on a GPU in a process of its own."""
    gpu = SharedGpu()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        gpu.present, gpu.samples = [os.getpid(), rank.pid], [(999.5, os.getpid(), 50), (999.5, rank.pid, 45)]
        reading = GpuSensor("GPU-1", gpu, wall_clock=lambda: 1_000.0).look(others=True)
        rank.kill()
    assert isinstance(reading, GpuReading)
    assert reading.others == 0.0


def test_use_that_cannot_be_told_apart_is_unknown() -> None:
    gpu = SharedGpu()
    gpu.present = [4_711]  # as in a container, where this process has another id
    gpu.samples = [(999.5, 4_711, 90)]
    sensor = GpuSensor("GPU-1", gpu, process=SharedGpu.OWN, wall_clock=lambda: 1_000.0)
    reading = sensor.look(others=True)
    assert isinstance(reading, GpuReading)
    assert isinstance(reading.others, Unknown)
    assert not reading.is_used_by_others
    gpu.present, gpu.reports_use = [SharedGpu.OWN], False
    reading = sensor.look(others=True)
    assert isinstance(reading, GpuReading)
    assert reading.others == Unknown("this GPU does not report its use by program")


def test_the_fake_has_the_functions_of_the_library() -> None:
    import pynvml

    for name in vars(SharedGpu) | vars(Driver):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name)


def test_without_a_driver_a_gpu_is_unknown() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert isinstance(GpuSensor("GPU-1").look(), Unknown)


@pytest.fixture(scope="module")
def screen() -> Iterator[str]:
    """The name of a display."""
    xvfb = xvfb_path()
    if xvfb is None:
        pytest.skip("no Xvfb here")
    with display(xvfb) as (name, _):
        yield name


@contextmanager
def display(xvfb: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A display of its own, and its server."""
    reading, writing = os.pipe()
    command = [xvfb, "-displayfd", str(writing), "-noreset", "-nolisten", "tcp", "-screen", "0", "640x480x24"]
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL) as process:
        os.close(writing)
        try:
            with os.fdopen(reading) as stream:
                yield f":{stream.readline().strip()}", process
        finally:
            process.terminate()


def test_a_real_display_tells_the_last_input(screen: str) -> None:
    from Xlib import X
    from Xlib.display import Display
    from Xlib.ext import xtest

    seen = X11Display(screen)
    person: Any = Display(screen)
    try:
        before = seen.idle_seconds()
        assert isinstance(before, float)
        while (waited := seen.idle_seconds()) == before:
            pass
        assert isinstance(waited, float)
        assert waited > before
        xtest.fake_input(person, X.MotionNotify, x=10, y=10)
        person.sync()
        touched = seen.idle_seconds()
        assert isinstance(touched, float)
        assert touched < 1.0
    finally:
        seen.close()
        person.close()


def test_a_real_display_tells_whether_a_window_fills_the_screen(screen: str) -> None:
    """The test is the window manager: it says which window is active, and what state that is in."""
    from Xlib import Xatom
    from Xlib.display import Display

    seen = X11Display(screen)
    desktop: Any = Display(screen)
    try:
        root = desktop.screen().root
        assert seen.is_full_screen() == Unknown("no window manager reports which window is active")
        atom = desktop.intern_atom
        root.change_property(atom("_NET_SUPPORTED"), Xatom.ATOM, 32, [atom("_NET_WM_STATE_FULLSCREEN")])
        desktop.sync()
        assert seen.is_full_screen() is False
        window = root.create_window(0, 0, 640, 480, 0, desktop.screen().root_depth)
        root.change_property(atom("_NET_ACTIVE_WINDOW"), Xatom.WINDOW, 32, [window.id])
        desktop.sync()
        assert seen.is_full_screen() is False
        states = [atom("_NET_WM_STATE_ABOVE"), atom("_NET_WM_STATE_FULLSCREEN")]
        window.change_property(atom("_NET_WM_STATE"), Xatom.ATOM, 32, states)
        desktop.sync()
        assert seen.is_full_screen() is True
        window.destroy()
        desktop.sync()
        assert seen.is_full_screen() is not True
    finally:
        seen.close()
        desktop.close()


def test_the_session_of_a_real_display(screen: str) -> None:
    """What a rule asks for is looked at, and nothing else."""
    sensors = Sensors("linux", {"DISPLAY": screen})
    everything = sensors.look(Rules(only_idle=True, programs=("no-such-program",), gpu_celsius=60), None)
    sensors.close()
    assert isinstance(everything.idle_seconds, float)
    assert everything.programs == frozenset()
    assert isinstance(everything.gpu, Unknown)
    nothing = sensors.look(Rules(pause_on_battery=False, pause_on_full_screen=False, spare_metered=False), None)
    assert nothing == type(nothing)()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # python-xlib leaves sockets that it cannot connect
def test_a_display_that_is_not_there_is_unknown_and_ends_nothing() -> None:
    assert isinstance(X11Display(":987").idle_seconds(), Unknown)


def test_a_program_without_the_library_of_displays_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Xlib.error", None)
    assert X11Display(":987").is_full_screen() == Unknown("python-xlib is not installed")
    sensors = Sensors("linux", {"DISPLAY": ":987", "WAYLAND_DISPLAY": "wayland-0", "PATH": ""})
    seen = sensors.look(Rules(only_idle=True), None)
    assert isinstance(seen.full_screen, Unknown)
    assert isinstance(Sensors("linux", {}).look(Rules(), None).full_screen, Unknown)
    assert isinstance(Sensors("freebsd", {}).look(Rules(only_idle=True), None).idle_seconds, Unknown)
    gc.collect()


def test_a_display_that_goes_away_is_unknown_until_it_is_back() -> None:
    xvfb = xvfb_path()
    if xvfb is None:
        pytest.skip("no Xvfb here")
    with display(xvfb) as (name, process):
        seen = X11Display(name)
        assert isinstance(seen.idle_seconds(), float)
        process.kill()
        process.wait()
        assert seen.idle_seconds() == Unknown(f"the display {name} does not answer (ConnectionClosedError)")


def test_what_costs_time_is_looked_at_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = [100.0], list[float]()

    def told() -> float:
        looks.append(clock[0])
        return 30.0

    monkeypatch.setattr("neuroshard.host.sensors.macos_idle_seconds", told)
    sensors = Sensors("darwin", {}, lambda: clock[0])
    idle = list[object]()
    for clock[0] in (100.0, 101.0, 104.0, 105.0):
        idle.append(sensors.look(Rules(only_idle=True), None).idle_seconds)
    assert looks == [100.0, 105.0]
    assert idle == [30.0, 31.0, 34.0, 30.0]
