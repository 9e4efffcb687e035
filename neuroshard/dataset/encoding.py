"""Tokenises batches, in several processes or in this one. The output and its order do not depend on the number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import connection
from pathlib import Path

import numpy as np

from neuroshard.data.tokenizer import Tokenizer, TokenizerTable
from neuroshard.dataset.batches import NO_TOKENS, Ids, Mark, Piece, TextBatch
from neuroshard.errors import NeuroShardError

_BATCHES_A_WORKER = 64  # in progress, so no worker waits while the main process syncs a shard to disk


@dataclass(frozen=True)
class EncodedBatch:
    """The ids of one batch (n,), its size as UTF-8, and the source's mark after it."""

    ids: Ids
    text_bytes: int
    mark: Mark


Encoding = Callable[[Iterable[TextBatch]], Generator[EncodedBatch]]


@contextmanager
def open_encoding(table: TokenizerTable, workers: int) -> Generator[Encoding]:
    """Provide the function that tokenises batches in order: in `workers` processes, or with 0 in this process.

    The processes end with the context, and also when this process is killed.
    """
    if workers == 0:
        tokenizer = Tokenizer(table)
        yield lambda batches: (EncodedBatch(*_encode(tokenizer, batch.pieces), batch.mark) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
    with tempfile.TemporaryDirectory(prefix="neuroshard-table-") as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_bytes(table.to_json())
        processes = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker)
        try:
            yield partial(_encode_in_processes, processes, file, workers * _BATCHES_A_WORKER)
        finally:
            processes.shutdown(wait=True, cancel_futures=True)


def _encode_in_processes(
    processes: ProcessPoolExecutor, table_file: Path, queue_length: int, batches: Iterable[TextBatch]
) -> Generator[EncodedBatch]:
    """Yield batches in order; a bounded number is in progress. Raises NeuroShardError if a process dies."""
    on_the_way: deque[tuple[Future[tuple[Ids, int]], Mark]] = deque()
    try:
        for batch in batches:
            on_the_way.append((processes.submit(_encode_in_worker, table_file, batch.pieces), batch.mark))
            if len(on_the_way) >= queue_length:
                yield _collected(*on_the_way.popleft())
        while on_the_way:
            yield _collected(*on_the_way.popleft())
    except BrokenProcessPool as error:
        raise NeuroShardError(
            "The system ended a tokenising process, perhaps because memory ran out.",
            "Run the same command again to continue. Fewer --workers need less memory.",
        ) from error
    finally:
        for future, _ in on_the_way:
            future.cancel()  # the results are no longer needed


def _collected(future: Future[tuple[Ids, int]], mark: Mark) -> EncodedBatch:
    return EncodedBatch(*future.result(), mark)


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> Ids:
    """Encode pieces in sequence, with BOS before and EOS after each document; uint16 if all ids fit, or uint32."""
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    parts = [tokenizer.encode(piece.text, bos=piece.begins, eos=piece.ends) for piece in pieces]
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else NO_TOKENS


def _encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> tuple[Ids, int]:
    text_bytes = sum(len(piece.text.encode("utf-8", "surrogatepass")) for piece in pieces)
    return encode_pieces(tokenizer, pieces), text_bytes


def _encode_in_worker(table_file: Path, pieces: Sequence[Piece]) -> tuple[Ids, int]:
    return _encode(_tokenizer(table_file), pieces)


@lru_cache(maxsize=1)
def _tokenizer(table_file: Path) -> Tokenizer:
    return Tokenizer(TokenizerTable.load(table_file.read_bytes()))


def _prepare_worker() -> None:
    """Leave signals to the main process, and exit when it is gone: a killed process cannot stop its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):  # either may be sent to all processes of a group
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
