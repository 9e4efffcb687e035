from __future__ import annotations

import trio
import trio.testing

from neuroshard.node.process import StopRequest


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
