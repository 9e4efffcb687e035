"""Reading Server-Sent Events in tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


def parse(block: str) -> tuple[str, Any]:
    """Name and data of one event."""
    fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
    return fields.get("event", ""), json.loads(fields.get("data", "null"))


def events_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Events of a live stream."""
    buffer = ""
    for text in response.iter_text():
        buffer += text
        while "\n\n" in buffer:
            block, _, buffer = buffer.partition("\n\n")
            event = parse(block)
            if event[0]:
                yield event
