from __future__ import annotations

import signal
from threading import Thread, get_ident

import pytest
import trio
import trio.testing

from neuroshard.errors import ConflictError
from neuroshard.node.process import MainThreadWaker, StopRequest, outside_requests


def test_a_stop_before_during_and_after_the_event_loop_is_no_error() -> None:
    stop, reactions = StopRequest(), list[str]()

    async def main() -> None:
        stop.react(lambda: reactions.append("asked"))

    trio.run(main)
    stop.ask("a signal that came after the end")
    assert stop.reason == "a signal that came after the end"
    assert reactions == []


def test_the_first_reason_counts_and_whoever_listens_late_hears_it_at_once() -> None:
    stop, reactions = StopRequest(), list[str]()
    stop.ask("first")
    stop.ask("second")

    async def main() -> None:
        stop.react(lambda: reactions.append("late"))

    trio.run(main)
    assert stop.reason == "first"
    assert reactions == ["late"]


def test_only_what_was_told_last_happens() -> None:
    stop, reactions = StopRequest(), list[str]()

    async def main() -> None:
        stop.react(lambda: reactions.append("start-up"))
        stop.react(lambda: reactions.append("training"))
        stop.ask("a signal")
        await trio.testing.wait_all_tasks_blocked()

    trio.run(main)
    assert reactions == ["training"]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system cannot choose the thread of a signal")
def test_a_signal_that_reaches_another_thread_wakes_the_main_thread() -> None:
    stop = StopRequest()
    with MainThreadWaker() as waker, outside_requests(stop, waker, ends_with_stdin=False):
        sender = Thread(target=lambda: signal.pthread_kill(get_ident(), signal.SIGTERM))
        sender.start()
        while stop.reason is None:
            waker.wait()
        sender.join()
    assert stop.reason == "SIGTERM received"


def test_a_wake_up_before_the_wait_and_after_the_end_is_kept_or_ignored() -> None:
    with MainThreadWaker() as waker:
        for _ in range(100_000):  # more than the socket holds
            waker.wake()
        waker.wait()
    waker.wake()


def test_a_node_that_nothing_would_start_again_refuses_a_restart() -> None:
    stop = StopRequest(may_restart=False)
    with pytest.raises(ConflictError, match="start it again"):
        stop.ask_restart("the owner asked for a restart")
    assert stop.reason is None


def test_a_stop_after_a_restart_was_requested_ends_the_node() -> None:
    stop = StopRequest()
    stop.ask_restart("joining another run")
    assert stop.starts_again
    stop.ask("SIGTERM received")
    assert not stop.starts_again
    stop.ask_restart("joining another run")
    assert not stop.starts_again
