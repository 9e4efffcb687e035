"""Checks at intervals whether a run's source has new shards and still serves the run's own.

A run's data is pinned, so a new manifest never changes it. The monitor verifies and reports new shards for a new run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random, SystemRandom

import anyio
import anyio.to_thread

from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.data_set import Genesis, WrongDataSetError, pinned_part
from neuroshard.data.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DataSetManifest, ManifestTrust, parse_manifest
from neuroshard.data.tokenizer.table import FIRST_MERGE_ID, TokenizerTable
from neuroshard.data.transfer import FileRequest, FileUnchangedError, MemorySink, Transfer
from neuroshard.errors import DataError, DataUnavailableError
from neuroshard.status.data import RefreshState, RefreshStatus

_LOG = logging.getLogger(__name__)
_KNOWN_AGAIN = frozenset({RefreshState.CURRENT, RefreshState.GROWN, RefreshState.OLDER})


@dataclass(frozen=True)
class RefreshTimes:
    """Times of the checks, in seconds; each wait is random, so nodes that started together check at different times."""

    interval_seconds: float = 300.0
    jitter_share: float = 0.25  # of the interval, up and down
    attempt_seconds: float = 60.0  # for one check, downloads included


DEFAULT_REFRESH_TIMES = RefreshTimes()


class SourceMonitor:
    """Requests the manifest with the validator of the last one, so most checks cost one answer without a body.

    `wall_clock` (seconds since the epoch) is for display only; a wrong clock has no effect on the checks.
    """

    def __init__(
        self,
        genesis: Genesis,
        pins: GenesisPins,
        *,
        rng: Random | None = None,
        times: RefreshTimes = DEFAULT_REFRESH_TIMES,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._genesis = genesis
        self._pins = pins
        self._rng = rng if rng is not None else SystemRandom()
        self._times = times
        self._wall_clock = wall_clock
        self._trust = ManifestTrust(pins.signing_key, was_signed=pins.signing_key is not None)
        self._copies = genesis.store.only_read()  # the last page of a growing source differs every time
        self._tables = replace(genesis.tables, store=self._copies)
        self._known_table = pins.tokenizer_sha256
        self._validator: str | None = None
        self._judged = RefreshStatus()  # of the manifest that the validator names
        self._most_shards = pins.total_shards
        self.status = RefreshStatus()

    async def run(self) -> None:
        """Check at intervals until cancelled."""
        while True:
            share = self._times.jitter_share * (2 * self._rng.random() - 1)
            delay = self._times.interval_seconds * (1 + share)
            self.status = replace(self.status, next_at=self._wall_clock() + delay)
            await anyio.sleep(delay)
            await self.look()

    async def look(self) -> None:
        """Check once; never raises because of an answer or a failure of the source."""
        found = self._late()
        with anyio.move_on_after(self._times.attempt_seconds):
            found = await self._found()
        if found.state is not self.status.state:
            level = logging.WARNING if found.state is RefreshState.REFUSED else logging.INFO
            _LOG.log(level, "Data at %s: %s", self._genesis.fetcher.source.description, found.explanation)
        self.status = replace(found, checked_at=self._wall_clock(), next_at=None)

    async def _found(self) -> RefreshStatus:
        try:
            data, validator = await self._read()
        except FileUnchangedError:
            return self._judged
        except DataUnavailableError as error:
            return self._problem(RefreshState.UNREACHABLE, f"{error} The node tries again.")
        except DataError as error:
            return self._problem(RefreshState.INCOMPLETE, str(error))
        found = await self._judge(data)
        self._judged, self._validator = found, validator if found.state in _KNOWN_AGAIN else None
        return found

    async def _read(self) -> tuple[bytes, str | None]:
        sink = MemorySink()
        transfer = Transfer(FileRequest(MANIFEST_NAME, 2, MAX_MANIFEST_BYTES), sink)
        async with self._genesis.fetcher.source.open(MANIFEST_NAME, known=self._validator) as opened:
            transfer.begin(opened.offset, opened.total_bytes, opened.validator)
            async for chunk in opened.chunks:
                transfer.add(chunk)
        transfer.end()
        return bytes(sink.data), transfer.validator

    async def _judge(self, data: bytes) -> RefreshStatus:
        """Return the refresh status that a manifest gives for the run."""
        try:
            manifest = parse_manifest(data, self._trust)
        except DataError as error:
            return self._problem(RefreshState.REFUSED, f"Refused: {error} Training continues with the run's own data.")
        if manifest.total_shards < self._most_shards:
            return self._problem(
                RefreshState.OLDER,
                f"The source shows {manifest.total_shards:,} shards, but there were {self._most_shards:,} already: "
                "a cache between may be older. Training continues.",
            )
        try:
            await pinned_part(self._genesis.fetcher, self._copies, manifest, self._pins, give_up_after=2)
        except WrongDataSetError as error:
            return self._problem(RefreshState.REFUSED, f"Refused: {error} Training continues with the run's own data.")
        except DataError as error:
            return self._problem(RefreshState.INCOMPLETE, f"{error} The node will check again; training continues.")
        try:
            await self._check_table(manifest)
        except DataError as error:
            return self._problem(RefreshState.INCOMPLETE, f"{error} The node will check again; training continues.")
        return self._accepted(manifest)

    async def _check_table(self, manifest: DataSetManifest) -> None:
        """Get the newest table, if it differs from the run's, and check that it continues the run's."""
        if not manifest.tokenizers or manifest.tokenizers[-1].sha256 == self._known_table:
            return
        newest = manifest.tokenizers[-1]
        data = await self._tables.load(newest.sha256, give_up_after=2)
        await anyio.to_thread.run_sync(self._compare_tables, data)
        self._known_table = newest.sha256

    def _compare_tables(self, data: bytes) -> None:
        newest, own = TokenizerTable.load(data, len(data)), TokenizerTable.load(self._genesis.tokenizer)
        known = self._pins.next_merge_id - FIRST_MERGE_ID
        if newest.merges[:known] != own.merges[:known]:
            raise DataError("The newest tokenizer table does not continue the one of this run.")

    def _accepted(self, manifest: DataSetManifest) -> RefreshStatus:
        self._most_shards = manifest.total_shards
        if manifest.signing_key is not None:
            self._trust = ManifestTrust(manifest.signing_key, was_signed=True)
        more = manifest.total_shards - self._pins.total_shards
        words = "The source has the data of this run, and no newer data."
        if more:
            words = (
                f"Newer data: {more:,} shards more than the {self._pins.total_shards:,} of this run, which stays with "
                "its own. A new run (neuroshard run create) has all of them."
            )
        return RefreshStatus(
            RefreshState.GROWN if more else RefreshState.CURRENT,
            words,
            newest_shards=manifest.total_shards,
            newest_tokens=manifest.total_tokens,
            newest_ids=manifest.tokenizers[-1].next_merge_id if manifest.tokenizers else None,
            updated_at=manifest.updated_at,
        )

    def _problem(self, state: RefreshState, words: str) -> RefreshStatus:
        """Return the status for a problem; the newest known facts are kept."""
        return replace(self.status, state=state, explanation=words)

    def _late(self) -> RefreshStatus:
        seconds = self._times.attempt_seconds
        return self._problem(RefreshState.UNREACHABLE, f"The source did not answer completely within {seconds:g} s.")
