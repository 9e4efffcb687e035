"""The upload speed of this computer's line: measured from what the node sends anyway, and stored.

Nothing is sent for the measurement. It counts bytes that other computers outside this network acknowledged, while data
was on its way to them. A share of the line cannot be a limit before the line is known, and it would slow down the
measurement itself. So the first bytes to such computers leave without the share, and at most TRIAL_BYTES of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import StorageError
from neuroshard.network.transport import Connection
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)

LINE_FILE = "network/line.json"
ASSUMED_UPLOAD = 1.25e6  # bytes per second, 10 Mbit/s: what most home lines have
WHOLE_LINE = 100  # percent
SAMPLE_BYTES = 4 << 20  # a measurement ends after as many bytes, or
SAMPLE_SECONDS = 3.0  # after this time on a slow line
LEAST_SAMPLE_BYTES = 256 << 10
LARGE_LOOK_BYTES = 1 << 20  # between two looks; less counts only if data was on its way all the time
BUSY_SHARE = 0.8  # of the time between two looks
LEAST_LOOK_SECONDS = 0.2  # a shorter time is that of a clock that was set back
TRIAL_BYTES = 16 << 20  # sent without the share while the line is measured, at most, for each start
TRIAL_MEASUREMENTS = 3  # without the share: connections find their speed during the first one
VALID_SECONDS = 7 * 86_400.0  # then the next measurement replaces the last one even if it is slower


class LineSpeed(Struct, frozen=True):
    """One measurement of the upload: bytes that one peer acknowledged, and the time with data on its way to it."""

    sent_bytes: Annotated[int, Meta(gt=0, le=1 << 50)]
    seconds: Annotated[float, Meta(ge=1e-3, le=1e6)]
    measured_at: Annotated[float, Meta(ge=0, lt=1e12)]  # seconds since the epoch

    @property
    def upload(self) -> float:
        """Bytes per second. The line may be faster: the peer, or the way to it, may have been the limit."""
        return self.sent_bytes / self.seconds


class StoredLine:
    """The last measurement in a data folder."""

    def __init__(self, data_dir: Path) -> None:
        effect = "the speed of the line is measured again"
        self._file = StateFile(data_dir / LINE_FILE, LineSpeed, "ignore", effect, max_bytes=1_000, data_dir=data_dir)

    def read(self) -> LineSpeed | None:
        """The measurement; None if none is stored that can be read."""
        try:
            return self._file.read()
        except StorageError as error:
            _LOG.warning("The measured speed of the line is not used: %s", error)
            return None

    def keep(self, speed: LineSpeed) -> None:
        """Store a measurement. A disk error is only logged."""
        try:
            self._file.write(speed)
        except StorageError as error:
            _LOG.warning("The measured speed of the line cannot be stored: %s", error)


class LineMeter:
    """Measures the line by looks at the counters of the connections."""

    def __init__(self) -> None:
        self.far_bytes = 0  # sent to computers outside this network since the start
        self.has_far_peer = False
        self._last: dict[NodeId, Connection] = {}
        self._looked_at: float | None = None
        self._evidence: dict[NodeId, tuple[int, float]] = {}  # bytes and seconds of an unfinished measurement

    def look(self, connections: Iterable[Connection], now: float) -> LineSpeed | None:
        """Return the fastest measurement that ends with this look; None if none does. Call it every second or so."""
        far = {one.peer: one for one in connections if one.is_far}
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        before, self._last, self._looked_at = self._last, far, now
        self.has_far_peer = bool(far)
        self._evidence = {peer: found for peer, found in self._evidence.items() if peer in far}
        ended = list[LineSpeed]()
        for peer, one in far.items():
            last = before.get(peer)
            if last is None or elapsed < LEAST_LOOK_SECONDS or one.bytes_sent < last.bytes_sent:
                continue
            self.far_bytes += one.bytes_sent - last.bytes_sent
            arrived, busy = one.bytes_arrived - last.bytes_arrived, one.busy_seconds - last.busy_seconds
            if speed := self._with_evidence(peer, arrived, busy if busy > 0 else elapsed, elapsed, now):
                ended.append(speed)
        return max(ended, key=lambda speed: speed.upload, default=None)

    def _with_evidence(self, peer: NodeId, arrived: int, busy: float, elapsed: float, now: float) -> LineSpeed | None:
        is_full = busy >= BUSY_SHARE * elapsed and arrived > 0
        if not is_full and arrived < LARGE_LOOK_BYTES:
            return None
        sent, seconds = self._evidence.pop(peer, (0, 0.0))
        sent, seconds = sent + arrived, seconds + busy
        if sent >= SAMPLE_BYTES or (seconds >= SAMPLE_SECONDS and sent >= LEAST_SAMPLE_BYTES):
            return LineSpeed(sent, seconds, now)
        self._evidence[peer] = (sent, seconds)
        return None


class UploadLine:
    """The line's upload speed, and the upload limit that follows from it and from the owner's settings."""

    def __init__(self, data_dir: Path) -> None:
        self._stored = StoredLine(data_dir)
        self._meter = LineMeter()
        self.speed = self._stored.read()
        # Measurements to make without the share. A look finds out whether the stored one is old.
        self._wanted = TRIAL_MEASUREMENTS if self.speed is None else 0

    def look(self, connections: Iterable[Connection], now: float) -> None:
        """Measure, and store a measurement that replaces the last one."""
        found = self._meter.look(connections, now)
        is_old = self._is_old(now)
        if is_old:
            self._wanted = TRIAL_MEASUREMENTS
        if found is None:
            return
        self._wanted = max(0, self._wanted - 1)
        if self.speed is None or is_old or found.upload > self.speed.upload:
            self.speed = found
            self._stored.keep(found)

    def limit(self, settings: Settings) -> float | None:
        """The upload limit in bytes per second; None if there is none."""
        is_trial = self._meter.has_far_peer and self._wanted > 0 and self._meter.far_bytes < TRIAL_BYTES
        share = WHOLE_LINE if is_trial else settings.upload_percent
        upload = ASSUMED_UPLOAD if self.speed is None else self.speed.upload
        return upload_limit(settings.upload_bytes_per_second, share, upload)

    def _is_old(self, now: float) -> bool:
        return self.speed is None or now - self.speed.measured_at > VALID_SECONDS


def upload_limit(most: float | None, percent: int, line: float) -> float | None:
    """The limit of an owner who sends at most `most` and this share of the line, in the units of both; None: none."""
    share = None if percent >= WHOLE_LINE else line * percent / WHOLE_LINE
    return share if most is None else most if share is None else min(most, share)
