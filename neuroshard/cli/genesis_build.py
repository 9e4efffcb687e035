"""`neuroshard genesis build`: training data from a folder of text, or from the sources that a file names."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, TokenFile, given
from neuroshard.errors import UsageError

if TYPE_CHECKING:
    from threading import Event

    from neuroshard.genesis.population import PopulationReport
    from neuroshard.identity import Wallet

FOLLOW_SECONDS = 60.0


def build(
    out: Annotated[
        str,
        typer.Option(
            "--out", metavar="DEST", help="The Genesis folder to make; with --config also s3://bucket/prefix."
        ),
    ],
    text: Annotated[Path | None, typer.Option("--text", metavar="FOLDER", help="A folder with text files.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="A file that names sources (TOML or JSON); `genesis` is the one shipped."
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --text: token ids in all, up to 32000. (default: by the size of the text)"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="With --config: processes. (default: one a core)")
    ] = None,
    s3_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="With --config: the S3-compatible store, if not Amazon's.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="With --config: go on when the sources grow.")] = False,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Wallet that signs the data; NEUROSHARD_TOKEN is better.")
    ] = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into signed, tokenised shards that a node can train on.

    With --text from the files of one folder, at once. With --config from sources of any size: the same command goes on
    where it was stopped or killed, and logs/genesis_SOURCE.log in the data folder tells what each source had to say.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.node.identity import wallet_of

    if (text is None) == (config is None):
        raise UsageError("Exactly one of --text and --config is needed.", "Name a folder or a file of sources.")
    if config is None and (workers is not None or follow or s3_endpoint is not None):
        raise UsageError("--workers, --follow and --s3-endpoint go with --config.", "Leave them out.")
    if config is not None and vocabulary is not None:
        raise UsageError(
            "--vocabulary goes with --text.", "With --config write it in the file: [vocabulary] merges = N"
        )
    wallet, _, _ = wallet_of(load_settings(given(token=token, token_file=token_file, data_dir=data_dir)))
    if text is not None:
        _build_from_folder(text, Path(out), wallet, vocabulary, as_json=as_json)
    elif config is not None:
        where = _Places(config, out, data_dir, s3_endpoint)
        _build_from_sources(where, wallet, workers=workers, follow=follow, as_json=as_json)


def now() -> str:
    """The date that goes into the data: SOURCE_DATE_EPOCH when set, so that the same input gives the same bytes.

    Raises UsageError when it is set to something else than seconds.
    """
    given_seconds = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.now(UTC) if given_seconds is None else datetime.fromtimestamp(int(given_seconds), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"SOURCE_DATE_EPOCH is {given_seconds!r}, not a number of seconds.") from error
    return moment.isoformat(timespec="seconds")


def _build_from_folder(text: Path, out: Path, wallet: Wallet, vocabulary: int | None, *, as_json: bool) -> None:
    from neuroshard.genesis import BuildOptions, FolderText, build_genesis

    shown = _ProgressLine()
    options = BuildOptions(vocabulary=vocabulary)
    built = build_genesis(FolderText(text), out, wallet, now=now(), options=options, progress=shown.show)
    shown.end()
    report = built.report
    if as_json:
        typer.echo(report.to_json().decode())
        return
    verb = "Already there" if built.is_reused else "Built"
    typer.echo(
        f"{verb}: {report.tokens:,} tokens in {report.shards} shards from {report.documents:,} documents "
        f"({report.text_bytes / 1e6:.1f} MB), vocabulary {report.vocabulary:,}, signed by wallet {wallet.wallet_id}."
    )
    if built.has_default_run and not built.is_reused:
        typer.echo(
            "The default run that was published here stays. Where the data changed, nodes cannot join it with them:"
        )
        typer.echo(f"then publish another one: neuroshard run publish RUN --genesis {out}")
    typer.echo(f"Train on it: neuroshard --genesis {out}")


@dataclass(frozen=True)
class _Places:
    """What a build from sources reads and writes."""

    config: Path
    out: str
    data_dir: Path | None
    s3_endpoint: str | None


def _build_from_sources(where: _Places, wallet: Wallet, *, workers: int | None, follow: bool, as_json: bool) -> None:
    from neuroshard.config.data_dir import NodePaths
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.genesis.destination import open_destination
    from neuroshard.genesis.population import PopulationOptions, ProgressPrinter, Surroundings, populate
    from neuroshard.genesis.sources import load_configuration

    options = PopulationOptions(
        workers=workers or os.cpu_count() or 1,
        logs=NodePaths.below(resolve_data_dir(where.data_dir)).logs,
        follow_seconds=FOLLOW_SECONDS if follow else None,
    )
    now()  # a wrong date is told before the work begins
    configuration = load_configuration(where.config)
    destination = open_destination(where.out, s3_endpoint=where.s3_endpoint)
    progress = ProgressPrinter(sys.stderr, time.monotonic)
    try:
        with _stopped_by_signals() as stop:
            surroundings = Surroundings(date=now, clock=time.monotonic, stop=stop, progress=progress)
            report = populate(configuration, destination, wallet, options, surroundings)
    finally:
        progress.end()
        destination.close()
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        typer.echo(
            f"{report.shards:,} shards of {report.tokens_per_shard:,} tokens, vocabulary {report.vocabulary:,}, "
            f"signed by wallet {wallet.wallet_id}: {where.out}"
        )
        for name, shards in report.shards_by_source.items():
            typer.echo(f"- {name}: {shards:,} shards")
    _raise_for(report)


def _raise_for(report: PopulationReport) -> None:
    """The exit code of a build that is not done."""
    from neuroshard.genesis.population import stopped
    from neuroshard.genesis.sources import SourceFailureError

    if report.failures:
        names = ", ".join(report.failures)
        raise SourceFailureError(
            f"Not read to the end: {names}. {next(iter(report.failures.values()))}",
            "Give the same command again when that is put right: it goes on.",
        )
    if report.is_stopped:
        raise stopped()


@contextmanager
def _stopped_by_signals() -> Generator[Event]:
    """An event that Ctrl+C and SIGTERM set; the second one ends the process at once."""
    import signal
    import threading

    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal(_number: int, _frame: object) -> None:
        stop.set()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ProgressLine:
    """One line on a terminal that changes; nothing elsewhere."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()

    def show(self, stage: str, fraction: float) -> None:
        """Tell how far the build is."""
        if self._wanted:
            sys.stderr.write(f"\r{stage:10} {fraction:4.0%}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._wanted:
            sys.stderr.write("\r" + " " * 16 + "\r")
