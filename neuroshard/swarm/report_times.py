"""When a node reports, and for how long one is remembered that is silent: pure, so that all nodes agree."""

from __future__ import annotations

REPORT_SECONDS = 10.0
MEMBERS_AT_FULL_PACE = 100  # more of them report more seldom, so that everybody's gossip stays the same
LONGEST_REPORT_SECONDS = 1000.0
SILENT_INTERVALS = 6
LEAST_SILENCE_SECONDS = 60.0
EARLY_SECONDS = 1.0  # after the last report at least
NEWS_SECONDS = 0.2  # the same for what a node does now, for others wait for it
NEWS_AT_ONCE = 4  # then one in EARLY_SECONDS: everybody counts how often a node speaks
MEMBERS_THAT_ALL_ANSWER = 16  # in a larger swarm a newcomer learns of the others by and by
MEMBERS_TO_CATCH_UP = 64


def report_interval(members: int) -> float:
    """Seconds from one report to the next: 10 up to 100 members, then in proportion to them, 1,000 at most."""
    return min(REPORT_SECONDS * max(1.0, members / MEMBERS_AT_FULL_PACE), LONGEST_REPORT_SECONDS)


def silence_limit(interval_seconds: float, members: int) -> float:
    """Seconds without a report after which a node is forgotten: six intervals, at least a minute.

    The interval is the longer one of what the silent node announced and what is due in a swarm as large as it is now.
    """
    return max(SILENT_INTERVALS * max(interval_seconds, report_interval(members)), LEAST_SILENCE_SECONDS)


def next_report_at(last: float, share: float, members: int) -> float:
    """When the next report is due when nobody appears: `share` of an interval after the last one."""
    return last + share * report_interval(members)


def is_worth_an_early_report(members: int, members_at_last_report: int) -> bool:
    """Whether the newcomers of the last second deserve a report of their own, which everybody receives.

    In a small swarm always; in a larger one they learn of this node with its next regular report. A node that has just
    found its first few others reports to them: the report before reached nobody.
    """
    return members <= MEMBERS_THAT_ALL_ANSWER or (members_at_last_report <= 1 and members <= MEMBERS_TO_CATCH_UP)
