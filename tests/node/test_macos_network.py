"""The path monitor of macOS, against a library in C that calls the block as Network.framework does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from neuroshard.host import macos_network
from neuroshard.host.macos_network import PathMonitor, macos_is_metered
from neuroshard.host.owner_policy import Rules, Unknown
from neuroshard.host.sensors import Sensors

SOURCE = """
#include <stdbool.h>
#include <stddef.h>
typedef struct { unsigned long reserved, size; } descriptor;
typedef struct block {
  void *isa;
  int flags, reserved;
  void (*invoke)(struct block *, void *);
  descriptor *about;
} block;
typedef struct { int status; bool expensive, constrained; } path;
void *_NSConcreteGlobalBlock[32];
static block *handler;
static int monitor, queue, started;
void *dispatch_queue_create(const char *name, void *attributes) { return name && !attributes ? &queue : NULL; }
void *nw_path_monitor_create(void) { return &monitor; }
void nw_path_monitor_set_queue(void *one, void *on) { started += one == &monitor && on == &queue; }
void nw_path_monitor_set_update_handler(void *one, block *given) { if (one == &monitor) handler = given; }
void nw_path_monitor_start(void *one) { started += one == &monitor; }
int nw_path_get_status(path *one) { return one->status; }
bool nw_path_is_expensive(path *one) { return one->expensive; }
#ifndef OLD
bool nw_path_is_constrained(path *one) { return one->constrained; }
#endif
/* What the system does: it copies no global block, and calls it with itself and the path. */
int report(int status, int expensive, int constrained) {
  path now = {status, expensive, constrained};
  if (!handler || started != 2) return 1;
  if (handler->isa != _NSConcreteGlobalBlock || !(handler->flags & 1 << 28)) return 2;
  if (handler->about->size != sizeof(block)) return 3;
  handler->invoke(handler, &now);
  return 0;
}
"""


def built(folder: Path, *options: str) -> Any:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("there is no C compiler here")
    (folder / "network.c").write_text(SOURCE)
    library = folder / "network.so"
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, folder / "network.c"], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macos_network, "_monitors", [])


def reported(library: Any, *path: int) -> None:
    """The system calls from a thread of its own."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(library.report(*path)))
    thread.start()
    thread.join()
    assert results == [0]


def test_expensive_and_constrained_paths_are_metered(tmp_path: Path) -> None:
    library = built(tmp_path)
    monitor = PathMonitor(lambda _: library)
    for path, metered in (((1, 0, 0), False), ((1, 1, 0), True), ((1, 0, 1), True), ((1, 0, 0), False)):
        reported(library, *path)
        assert monitor.is_metered() is metered
    reported(library, 2, 1, 0)
    assert monitor.is_metered() == Unknown("this computer has no connection")


def test_before_macos_10_15_only_expensive_paths_are_known(tmp_path: Path) -> None:
    library = built(tmp_path, "-DOLD")
    monitor = PathMonitor(lambda _: library)
    reported(library, 1, 0, 1)
    assert monitor.is_metered() is False
    reported(library, 1, 1, 0)
    assert monitor.is_metered() is True


def test_the_first_look_waits_for_the_first_report(tmp_path: Path) -> None:
    library = built(tmp_path)
    looks: list[bool | Unknown] = []
    thread = threading.Thread(target=lambda: looks.append(macos_is_metered(lambda _: library)))
    thread.start()
    while library.report(1, 1, 0) != 0:  # not started yet
        pass
    thread.join()
    assert looks == [True]


def test_a_system_without_the_framework_is_unknown() -> None:
    assert isinstance(macos_is_metered(), Unknown)  # there is no such library here
    assert isinstance(Sensors("darwin", {"PATH": ""}).look(Rules(pause_on_battery=False), None).metered, Unknown)
