"""A look that is never answered stops neither the other rules nor the end of the node."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import anyio
import pytest
import trio

from neuroshard.host.owner_policy import Rules, Unknown
from neuroshard.host.sensors import SensorThread

X11_PORTS = range(6100, 6200)


@pytest.fixture
def silent_display() -> Iterator[str]:
    """A display that takes connections and says nothing: `ssh -X` from a laptop that sleeps."""
    for port in X11_PORTS:
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
            continue
        with listener:
            listener.listen()
            yield f"127.0.0.1:{port - 6000}"
        return
    pytest.fail("no port of a display is free")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # python-xlib leaves the socket whose server went away
def test_a_display_that_never_answers_is_done_without(silent_display: str) -> None:
    lookout = SensorThread({"DISPLAY": silent_display}, most_seconds=0.2)
    rules = Rules(programs=("no-such-program",))

    async def scenario() -> None:
        for _ in range(2):
            seen = await lookout.look(rules, None)
            assert isinstance(seen.full_screen, Unknown)
            assert seen.programs == frozenset()

    trio.run(scenario)
    lookout.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_end_of_the_node_waits_for_no_answer(silent_display: str) -> None:
    lookout = SensorThread({"DISPLAY": silent_display}, most_seconds=3600)

    async def scenario() -> None:
        with anyio.move_on_after(0.2) as scope:
            await lookout.look(Rules(), None)
        assert scope.cancelled_caught

    trio.run(scenario)
    lookout.close()
