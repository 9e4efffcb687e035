"""Memory that a node gives back: that of one heap for all threads, and the code of PyTorch during a pause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuroshard.state.system_resources import executable_mappings

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists the memory of a process there")
HEAPS = """
import ctypes, sys, threading
from neuroshard.node.process import use_one_heap
if sys.argv[1] == "one":
    use_one_heap()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
threads = [threading.Thread(target=library.malloc, args=(1000,)) for _ in range(4)]
for thread in threads:
    thread.start()
    thread.join()
library.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(library.fdopen(1, b"w"))
library.malloc_info(0, stream)
library.fflush(stream)
"""
CODE = """
import torch
from neuroshard.state.system_resources import release_code
def files():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1000
values = torch.arange(4096.0).reshape(64, 64) / 64
before, held = torch.nn.functional.softmax(values @ values, dim=1), files()
release_code()
print(held - files())
assert torch.equal(torch.nn.functional.softmax(values @ values, dim=1), before)
"""
STEPS = """
import ctypes, sys
from neuroshard.node.process import use_one_heap
from neuroshard.state.system_resources import trim_heap
if sys.argv[1] == "kept":
    use_one_heap()
library = ctypes.CDLL(None)
library.malloc.restype = library.memset.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1000
before = resident()
blocks = [library.memset(library.malloc(20_000_000), 1, 20_000_000) for _ in range(8)]
for block in blocks:
    library.free(block)
after = resident()
trim_heap()
print(after - before, resident() - before)
"""


def output(program: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(("heaps", "is_one"), [("one", True), ("several", False)])
def test_threads_share_one_heap_when_asked(heaps: str, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert (output(HEAPS, heaps).count("<heap nr=") == 1) is is_one


def test_a_limit_of_the_owner_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    assert output(HEAPS, "one").count("<heap nr=") > 1


def test_code_is_released_and_runs_again_with_the_same_result() -> None:
    assert float(output(CODE)) > 20


def test_only_code_of_files_is_released() -> None:
    lines = [
        "7f0000000000-7f0001000000 r--p 00000000 08:01 42 /lib/libtorch_cpu.so",
        "7f0001000000-7f0009000000 r-xp 01000000 08:01 42 /lib/a name/libtorch_cpu.so",
        "7f0009000000-7f0009100000 rwxp 00000000 08:01 42 /lib/patched.so",
        "7f0009100000-7f000a000000 r-xp 00000000 00:00 0 ",
        "7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]",
    ]
    assert executable_mappings(lines) == [(0x7F0001000000, 0x7F0009000000)]


@pytest.mark.parametrize(("heap", "is_kept"), [("kept", True), ("default", False)])
def test_memory_of_a_step_stays_until_a_pause(heap: str, is_kept: bool) -> None:
    between_steps, in_a_pause = map(int, output(STEPS, heap).split())
    assert (between_steps > 150) is is_kept  # MB, of 160
    assert in_a_pause < 10
