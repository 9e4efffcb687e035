"""The populator on real text, 5 GB of it in one stream, and its tokenizer beside Hugging Face's on the same text."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.node_process import TOKEN
from benchmarks.record import NotHereError, Report, Row
from benchmarks.sizes import size
from benchmarks.texts import real_texts
from neuroshard.data.tokenizer import SPLIT_PATTERN, Tokenizer, TokenizerTable, learn_merges
from neuroshard.dataset.build_text import Document, in_sections

MERGES = size(31_734, 300)
STREAM_BYTES = size(5_000_000_000, 2_000_000)
DOCUMENT_CHARACTERS = 8_000  # about as long as pages of the web are
_SAMPLES_A_SECOND = 4


def measure() -> Report:
    """Needs the shared text, `tokenizers` and 16 GB of disk."""
    whole = [Document(str(number), text.decode(errors="replace")) for number, text in enumerate(real_texts())]
    texts = [section.text for section in in_sections(whole, DOCUMENT_CHARACTERS)]
    rows = list(_beside_hugging_face(texts))
    with tempfile.TemporaryDirectory(prefix="population-") as folder:
        rows += _built(Path(folder), texts)
    notes = (
        "The stream repeats the shared text, cut into documents of 8,000 characters, as JSON Lines.",
        "End to end is all from the start of the command to its end: Python, vocabulary, tokenising, shards, manifest.",
        "What as many processes reach that only tokenise says how far the cores hinder each other.",
        "Memory is the sum of the resident sizes of all processes, pages that they share counted for each.",
        "Hugging Face's library got the same split pattern and number of merges, and one thread.",
    )
    return Report("population", "Populator", tuple(rows), notes)


def _built(folder: Path, texts: Sequence[str]) -> Iterator[Row]:
    workers = os.cpu_count() or 1
    small = _build(folder, texts, sum(len(text.encode()) for text in texts), workers)
    yield Row("build of the shared text alone, vocabulary included", f"{small.seconds:.1f} s", "", None)
    core_rate = _core_rate(TokenizerTable.load((small.out / "tokenizer.json").read_bytes()), texts)
    yield Row("tokenise, one core", f"{core_rate:.1f} MB/s", ">= 5", core_rate >= 5)
    together = _rate_together(small.out / "tokenizer.json", texts, workers)
    large = _build(folder, texts, STREAM_BYTES, workers)
    rate = large.text_bytes / 1e6 / large.seconds
    share = rate / (workers * core_rate)
    yield Row(
        f"build of {large.text_bytes / 1e9:.1f} GB, {workers} processes, end to end",
        f"{rate:.1f} MB/s, {large.shards} shards: {share:.2f} of {workers} x one core",
        ">= 0.8",
        share >= 0.8,
    )
    figure = f"{together:.1f} MB/s together; the build reaches {rate / together:.2f} of it"
    yield Row(f"{workers} processes that do nothing but tokenise", figure, "", None)
    figure = f"{large.peak_bytes / 1e6:.0f} MB, {large.early_peak_bytes / 1e6:.0f} MB in its first quarter"
    steady = large.peak_bytes <= 1.25 * large.early_peak_bytes
    yield Row("peak memory of that build, all processes", figure, "bounded: <= 1.25 x the first quarter", steady)


@dataclass(frozen=True)
class _Build:
    out: Path
    text_bytes: int
    seconds: float
    shards: int
    peak_bytes: int
    early_peak_bytes: int


def _build(folder: Path, texts: Sequence[str], text_bytes: int, workers: int) -> _Build:
    """`neuroshard genesis build` of so much text, as a user starts it, watched from outside."""
    work = folder / str(text_bytes)
    work.mkdir()
    written = _write_lines(work / "stream.jsonl", texts, text_bytes)
    configuration = work / "sources.toml"
    configuration.write_text(
        '[[sources]]\nname = "stream"\nkind = "jsonl"\nlocation = "stream.jsonl"\ntarget_shards = 1_000_000\n'
    )
    command = [sys.executable, "-m", "neuroshard", "genesis", "build", "--config", str(configuration), "--json"]
    command += ["--out", str(work / "out"), "--data-dir", str(work / "data"), "--workers", str(workers)]
    started = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "NEUROSHARD_TOKEN": TOKEN}, stdout=subprocess.PIPE)
    peaks = list[int]()
    while process.poll() is None:
        peaks.append(_resident_bytes(process.pid))
        time.sleep(1 / _SAMPLES_A_SECOND)
    seconds = time.perf_counter() - started
    out, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the build ended with {process.returncode}")
    early = peaks[: max(1, len(peaks) // 4)]
    return _Build(work / "out", written, seconds, json.loads(out)["shards"], max(peaks), max(early))


def _write_lines(file: Path, texts: Sequence[str], text_bytes: int) -> int:
    """The texts again and again; bytes of text written, as UTF-8 without the JSON around it."""
    lines = [(json.dumps({"text": text}) + "\n", len(text.encode())) for text in texts]
    written = 0
    with file.open("w", encoding="utf-8") as stream:
        while written < text_bytes:
            for line, size in lines:
                stream.write(line)
                written += size
    return written


def _resident_bytes(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:  # ended between two looks
        return 0


def _core_rate(table: TokenizerTable, texts: Sequence[str]) -> float:
    """MB/s of CPU time over all texts, encoder ready."""
    tokenizer = Tokenizer(table)
    tokenizer.encode("ready")
    seconds = _cpu_seconds(lambda: [tokenizer.encode(text, bos=True, eos=True).size for text in texts])[0]
    return sum(len(text.encode()) for text in texts) / 1e6 / seconds


def _rate_together(table_file: Path, texts: Sequence[str], workers: int) -> float:
    """MB/s of several processes that tokenise all texts at the same time, each by itself; their start not counted."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        rates = [pool.submit(_wall_rate, table_file, texts) for _ in range(workers)]
        return sum(rate.result() for rate in rates)


def _wall_rate(table_file: Path, texts: Sequence[str]) -> float:
    tokenizer = Tokenizer(TokenizerTable.load(table_file.read_bytes()))
    start = time.perf_counter()
    for _ in range(3):
        for text in texts:
            tokenizer.encode(text, bos=True, eos=True)
    return 3 * sum(len(text.encode()) for text in texts) / 1e6 / (time.perf_counter() - start)


def _cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    value = work()
    return time.process_time() - start, value


def _beside_hugging_face(texts: Sequence[str]) -> Iterator[Row]:
    """Learning and encoding, ours and theirs, one thread each, on the same text."""
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    ours, table = _cpu_seconds(lambda: learn_merges(texts, MERGES))
    theirs, their_tokenizer = _cpu_seconds(lambda: _hugging_face_learned(texts))
    figure = f"{ours:.1f} CPU-s (Hugging Face tokenizers: {theirs:.1f})"
    yield Row(f"learn {MERGES:,} merges on {megabytes:.0f} MB", figure, "<= 40 CPU-s", ours <= 40)
    our_rate = _core_rate(table, texts)
    their_seconds, _ = _cpu_seconds(lambda: [len(their_tokenizer.encode(text).ids) for text in texts])
    ratio = our_rate * their_seconds / megabytes
    figure = f"{our_rate:.1f} MB/s, Hugging Face tokenizers {megabytes / their_seconds:.1f} MB/s: {ratio:.1f} x"
    yield Row("encode, one thread", figure, ">= 3 x theirs", ratio >= 3)


def _hugging_face_learned(texts: Sequence[str]) -> Any:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # read when it is imported
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise NotHereError("tokenizers is not installed") from error
    pattern = SPLIT_PATTERN.encode("ascii").decode("unicode_escape")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
