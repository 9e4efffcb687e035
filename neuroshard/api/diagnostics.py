"""The diagnostic report: one archive without secrets and personal data, which an owner can give to others."""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, cast

import psutil
from fastapi import APIRouter
from starlette.responses import Response

from neuroshard.api.context import ApiContext
from neuroshard.api.rendering import as_python, finite_json
from neuroshard.api.requests import NoMembers
from neuroshard.api.settings_view import settings_view
from neuroshard.identity.wallet import phrase_word_list
from neuroshard.status.snapshot import NodeStatus
from neuroshard.telemetry.logs import FILE_NAME, LogLine
from neuroshard.telemetry.redaction import Redactor, Scrubber
from neuroshard.types import JsonValue

MOST_PART_BYTES: Final = 500_000  # limit per file, before compression
PACKAGES: Final = ("neuroshard", "torch", "numpy", "libp2p", "trio", "fastapi", "uvicorn", "pydantic", "psutil")
ZIP_BEGINS: Final = 315_532_800.0  # 1980: a zip file cannot store an earlier date
ZIP_ENDS: Final = 4_102_444_800.0
README: Final = """A report about one NeuroShard node, for people who help to find a problem.

computer.json   versions, operating system, processor, memory
settings.json   every setting and where it comes from; never the token
status.json     what the node said of itself, without its peers and its curve
counters.json   what it has counted since its start
log.txt         the newest lines of this start
node.log        the end of the log file, also of earlier starts

Taken out: token, wallet phrase, API secret, passwords, the home folder, user and host names, public addresses.
Read it before you give it away: a folder or a data source that you named yourself is still in it.
"""


def diagnostic_archive(context: ApiContext, now: float) -> bytes:
    """Make the report, a zip file of at most a few megabytes. Reads the log file; `now` is seconds since the epoch."""
    redactors = (context.redactor, Redactor(context.secret))
    scrubber = Scrubber(redactors, phrase_word_list(), Path.home(), platform.node())
    buffer = io.BytesIO()
    date = datetime.fromtimestamp(min(max(now, ZIP_BEGINS), ZIP_ENDS), UTC)  # the computer's date may be wrong
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _parts(context, scrubber):
            entry = zipfile.ZipInfo(f"neuroshard-report/{name}", date.timetuple()[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content.encode("utf-8", "replace")[-MOST_PART_BYTES:])
    return buffer.getvalue()


def archive_name(now: float) -> str:
    """File name of a report, with the date in UTC."""
    return f"neuroshard-report-{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M}.zip"


def _parts(context: ApiContext, scrubber: Scrubber) -> Iterator[tuple[str, str]]:
    status = context.board.current()
    values: dict[str, JsonValue] = {
        "computer.json": _computer(),
        "settings.json": settings_view(context.config_view(), status),
        "status.json": _status(status, context.board.age()),
        "counters.json": dict(context.counters.values()),
    }
    yield "README.txt", README
    for name, value in values.items():
        yield name, json.dumps(scrubber.json(finite_json(value)), indent=1, ensure_ascii=False)
    yield "log.txt", scrubber.text("".join(_line(line) for line in context.log_ring.newest(2_000))[-MOST_PART_BYTES:])
    yield "node.log", scrubber.text(_end_of(Path(status.paths.logs) / FILE_NAME))


def _computer() -> dict[str, JsonValue]:
    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _status(status: NodeStatus, age_seconds: float) -> dict[str, JsonValue]:
    """The status without the other nodes and without the command to join through this node."""
    private = replace(status, network=replace(status.network, join_line=""))
    shown = cast("dict[str, JsonValue]", as_python(private))
    del shown["peers"]
    return {**shown, "snapshot_age_seconds": age_seconds}


def _line(line: LogLine) -> str:
    time = datetime.fromtimestamp(line.time, UTC).isoformat(timespec="milliseconds")
    return f"{time} {line.level} {line.logger}: {line.message}\n"


def _end_of(path: Path) -> str:
    """The last whole lines of a file, or the reason why it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_PART_BYTES))
            content = file.read(MOST_PART_BYTES)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}.\n"
    if size > MOST_PART_BYTES:
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", "replace")


ZIP = "application/zip"


def diagnostic_routes(context: ApiContext) -> APIRouter:
    """Make the route POST /api/diagnostics. It is a POST, so that it needs the owner's authorisation."""
    router = APIRouter(tags=["status"])

    @router.post("/api/diagnostics", response_class=Response, responses={200: {"content": {ZIP: {}}}})
    async def diagnostics(body: NoMembers | None = None) -> Response:
        """Download a zip file with versions, settings, status and log, without secrets and personal data."""
        del body
        now = context.clock()
        content = await asyncio.to_thread(diagnostic_archive, context, now)
        headers = {"Content-Disposition": f'attachment; filename="{archive_name(now)}"'}
        return Response(content, headers=headers, media_type=ZIP)

    return router
