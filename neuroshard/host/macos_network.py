"""Whether macOS calls the connection to the internet expensive or constrained, as Apple's Network.framework reports it.

macOS has no command that prints this. A path monitor (Network/path_monitor.h, since macOS 10.14) calls a block on a
dispatch queue with the present path, at once and after each change. It was not run on macOS yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Event
from typing import Any

from neuroshard.host.owner_policy import Unknown

FRAMEWORK = "/System/Library/Frameworks/Network.framework/Network"
SYSTEM = "/usr/lib/libSystem.B.dylib"
CONSTRAINED_SINCE = "nw_path_is_constrained"  # Low Data Mode, macOS 10.15
SATISFIED = 1  # nw_path_status_satisfied
FIRST_REPORT_SECONDS = 2.0
BLOCK_IS_GLOBAL = 1 << 28  # the block lives as long as the process, so the system does not copy or free it


class _BlockDescriptor(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ulong), ("size", ctypes.c_ulong))


class _Block(ctypes.Structure):
    """A block of the C compiler ("Block Implementation Specification" of Clang), without captured variables."""

    _fields_ = (
        ("isa", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("reserved", ctypes.c_int),
        ("invoke", ctypes.c_void_p),
        ("descriptor", ctypes.POINTER(_BlockDescriptor)),
    )


_UpdateHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)  # the block itself, the path


class PathMonitor:
    """Follows the path to the internet. The first object starts a monitor that runs until the process ends."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """`load` opens a library. Raises OSError or AttributeError on a system without the functions."""
        self._network, system = load(FRAMEWORK), load(SYSTEM)
        self._is_metered: bool | Unknown = Unknown("macOS has not reported the connection yet")
        self._reported = Event()
        for name in ("nw_path_get_status", "nw_path_is_expensive"):
            self._declare(name, ctypes.c_int if name == "nw_path_get_status" else ctypes.c_bool)
        self._knows_constrained = hasattr(self._network, CONSTRAINED_SINCE)
        if self._knows_constrained:
            self._declare(CONSTRAINED_SINCE, ctypes.c_bool)
        # These objects stay alive with this one: the system calls and reads them from its own threads.
        self._handler = _UpdateHandler(self._update)
        self._descriptor = _BlockDescriptor(0, ctypes.sizeof(_Block))
        self._block = _Block(
            ctypes.addressof(ctypes.c_void_p.in_dll(system, "_NSConcreteGlobalBlock")),
            BLOCK_IS_GLOBAL,
            0,
            ctypes.cast(self._handler, ctypes.c_void_p),
            ctypes.pointer(self._descriptor),
        )
        self._start(system)

    def is_metered(self) -> bool | Unknown:
        """The last report. A phone's hotspot is expensive; a network in Low Data Mode is constrained.

        The first call waits for the first report, at most FIRST_REPORT_SECONDS.
        """
        self._reported.wait(FIRST_REPORT_SECONDS)
        return self._is_metered

    def _declare(self, name: str, result: Any) -> None:
        function = getattr(self._network, name)
        function.argtypes, function.restype = [ctypes.c_void_p], result

    def _start(self, system: Any) -> None:
        network = self._network
        system.dispatch_queue_create.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        system.dispatch_queue_create.restype = ctypes.c_void_p
        network.nw_path_monitor_create.argtypes, network.nw_path_monitor_create.restype = [], ctypes.c_void_p
        for name in ("nw_path_monitor_set_queue", "nw_path_monitor_set_update_handler"):
            function = getattr(network, name)
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        network.nw_path_monitor_start.argtypes, network.nw_path_monitor_start.restype = [ctypes.c_void_p], None
        monitor = network.nw_path_monitor_create()
        network.nw_path_monitor_set_queue(monitor, system.dispatch_queue_create(b"neuroshard.path", None))
        network.nw_path_monitor_set_update_handler(monitor, ctypes.addressof(self._block))
        network.nw_path_monitor_start(monitor)

    def _update(self, _block: int, path: int) -> None:
        network = self._network
        if network.nw_path_get_status(path) != SATISFIED:
            self._is_metered = Unknown("this computer has no connection")
        else:
            is_constrained = self._knows_constrained and bool(network.nw_path_is_constrained(path))
            self._is_metered = is_constrained or bool(network.nw_path_is_expensive(path))
        self._reported.set()


_monitors: list[PathMonitor] = []


def macos_is_metered(load: Callable[[str], Any] = ctypes.CDLL) -> bool | Unknown:
    """Return whether macOS calls the connection metered. The first call starts the monitor."""
    if not _monitors:
        try:
            _monitors.append(PathMonitor(load))
        except (OSError, AttributeError, ValueError) as error:
            return Unknown(f"macOS does not report it ({error})"[:200])
    return _monitors[0].is_metered()
