"""Decoders of declared types may be asked for by several threads at once, also for the first time."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each of four threads is the first to read new structs that contain a common one. It runs in a process of its own,
# because the defect that this prevents ends the process. Without the lock it ends within these rounds.
_FIRST_USE = """
import sys
from threading import Barrier, Thread
from typing import Annotated

import msgspec

from neuroshard.decoders import analysed, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
INNER = {f"a{number}": 1 for number in range(30)}
DATA = {f"b{number}": INNER for number in range(5)}
READERS = {
    "convert": lambda form: msgspec.convert(DATA, analysed(form)),
    "msgpack": lambda form: msgpack_decoder(form).decode(msgspec.msgpack.encode(DATA)),
    "json": lambda form: json_decoder(form).decode(msgspec.json.encode(DATA)),
}


def forms():
    fields = [(name, "Annotated[int, msgspec.Meta(ge=0)]") for name in INNER]
    globals()["Inner"] = msgspec.defstruct("Inner", fields, module=__name__)
    return [msgspec.defstruct("Outer", [(name, "Inner") for name in DATA], module=__name__) for _ in range(4)]


def read(barrier, form, results):
    barrier.wait()
    results.append(READERS[sys.argv[1]](form).b4.a29)


for _ in range(600):
    results, barrier = [], Barrier(4)
    threads = [Thread(target=read, args=(barrier, form, results)) for form in forms()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1, 1, 1, 1]
"""


@pytest.mark.parametrize("reader", ["convert", "msgpack", "json"])
def test_threads_that_read_a_struct_first_do_not_end_the_process(reader: str) -> None:
    ended = subprocess.run([sys.executable, "-c", _FIRST_USE, reader], capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
