"""`neuroshard genesis`: build a data set from text or from named sources, verify it, show its state, and serve it."""

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
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, DataDir, S3Endpoint, TokenFile, given
from neuroshard.errors import UsageError
from neuroshard.types import LOOPBACK

if TYPE_CHECKING:
    from threading import Event

    from neuroshard.data.shard_file import ShardFormat
    from neuroshard.dataset import BuildOptions, BuiltGenesis, DataSetStatus, Verification
    from neuroshard.dataset.population import PopulationReport
    from neuroshard.identity import Wallet


FOLLOW_SECONDS = 60.0


def build(
    out: Annotated[
        str,
        typer.Option(
            "--out", metavar="DEST", help="The Genesis folder to write; with --config also s3://bucket/prefix."
        ),
    ],
    text: Annotated[Path | None, typer.Option("--text", metavar="FOLDER", help="A folder with text files.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="A file with sources (TOML or JSON), or `genesis` for our list."),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --text: number of token ids, up to 32000. (default: depends on the text size)"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="With --config: processes. (default: one per core)")
    ] = None,
    s3_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="With --config: S3-compatible store, if it is not Amazon's.")
    ] = None,
    shard_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="bin|pt",
            help="Format of the shards. bin: token ids; pt: tensors of torch.save, four times as large. (default: bin)",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="With --config: continue when the sources grow.")] = False,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token of the signing wallet; NEUROSHARD_TOKEN is safer.")
    ] = None,
    token_file: TokenFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into signed, tokenised shards that a node can train on.

    --text uses the files of one folder, at once. --config uses sources of any size: after a stop or a kill, the same
    command continues. The log of each source is logs/genesis_SOURCE.log in the data folder.
    """
    from neuroshard.config.loading import load_settings
    from neuroshard.dataset import BuildOptions
    from neuroshard.host.identity import wallet_of

    _check_options(text, config, vocabulary, has_config_options=bool(workers or follow or s3_endpoint))
    chosen = _shard_format(shard_format)
    wallet, _, _ = wallet_of(load_settings(given(token=token, token_file=token_file, data_dir=data_dir)))
    if text is not None:
        options = BuildOptions(vocabulary=vocabulary, shard_format=chosen or "bin")
        _print_built(build_from_folder(text, Path(out), wallet, options), Path(out), wallet, as_json=as_json)
    elif config is not None:
        where = _Places(config, out, data_dir, s3_endpoint, chosen)
        _build_from_sources(where, wallet, workers=workers, follow=follow, as_json=as_json)


def _check_options(text: Path | None, config: Path | None, vocabulary: int | None, *, has_config_options: bool) -> None:
    """Raise UsageError for options that cannot be combined."""
    if (text is None) == (config is None):
        raise UsageError("Exactly one of --text and --config is needed.", "Name a folder or a file of sources.")
    if config is None and has_config_options:
        raise UsageError("--workers, --follow and --s3-endpoint require --config.", "Leave them out.")
    if config is not None and vocabulary is not None:
        raise UsageError("--vocabulary requires --text.", "With --config, set it in the file: [vocabulary] merges = N")


def _shard_format(given_format: str | None) -> ShardFormat | None:
    match given_format:
        case None | "bin" | "pt":
            return given_format
        case other:
            raise UsageError(f"{other!r} is not a shard format.", "Give --format bin or --format pt.")


def now() -> str:
    """Date for the data set in ISO format: SOURCE_DATE_EPOCH if it is set, so that equal input gives equal bytes.

    Raises UsageError if SOURCE_DATE_EPOCH is not a number of seconds.
    """
    given_seconds = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.now(UTC) if given_seconds is None else datetime.fromtimestamp(int(given_seconds), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"SOURCE_DATE_EPOCH is {given_seconds!r}, not a number of seconds.") from error
    return moment.isoformat(timespec="seconds")


def build_from_folder(text: Path, out: Path, wallet: Wallet, options: BuildOptions) -> BuiltGenesis:
    """Build a data set from the text files of a folder, and show the progress. Raises NeuroShardError."""
    from neuroshard.dataset import FolderText, build_genesis
    from neuroshard.dataset.progress import ProgressPrinter

    printer = ProgressPrinter(sys.stderr, time.monotonic)

    def progress(step: str, fraction: float) -> None:
        printer.show(f"{step} {fraction:.0%}")

    built = build_genesis(FolderText(text), out, wallet, now=now(), options=options, progress=progress)
    printer.end()
    return built


def summary_of_built(built: BuiltGenesis, wallet: Wallet) -> str:
    """The contents of a new data set, in one sentence."""
    from neuroshard.status.values import plural

    report, verb = built.report, "Already there" if built.is_reused else "Built"
    return (
        f"{verb}: {report.tokens:,} tokens in {plural(report.shards, 'shard')} from "
        f"{plural(report.documents, 'document')} "
        f"({report.text_bytes / 1e6:.1f} MB), vocabulary {report.vocabulary:,}, signed by wallet {wallet.wallet_id}."
    )


def _print_built(built: BuiltGenesis, out: Path, wallet: Wallet, *, as_json: bool) -> None:
    if as_json:
        typer.echo(built.report.to_json().decode())
        return
    typer.echo(summary_of_built(built, wallet))
    if built.has_default_run and not built.is_reused:
        typer.echo(
            "The default run published here is unchanged. If the data changed, nodes cannot join that run with them:"
        )
        typer.echo(f"then publish another one: neuroshard run publish RUN --genesis {out}")
    typer.echo(f"Train on it: neuroshard --genesis {out}")


@dataclass(frozen=True)
class _Places:
    """Places that a build from sources reads and writes."""

    config: Path
    out: str
    data_dir: Path | None
    s3_endpoint: str | None
    shard_format: ShardFormat | None


def _build_from_sources(where: _Places, wallet: Wallet, *, workers: int | None, follow: bool, as_json: bool) -> None:
    from neuroshard.config.folders import NodePaths
    from neuroshard.config.loading import resolve_data_dir
    from neuroshard.dataset.destination import open_destination
    from neuroshard.dataset.population import PopulationDependencies, PopulationOptions, PopulationPlan, populate
    from neuroshard.dataset.progress import ProgressPrinter
    from neuroshard.dataset.sources import load_configuration

    options = PopulationOptions(
        workers=workers or os.cpu_count() or 1,
        logs=NodePaths.below(resolve_data_dir(where.data_dir)).logs,
        follow_seconds=FOLLOW_SECONDS if follow else None,
        shard_format=where.shard_format,
    )
    now()  # raises for a wrong date before the long work begins
    plan = PopulationPlan.of(load_configuration(where.config), follows=follow)
    destination = open_destination(where.out, s3_endpoint=where.s3_endpoint)
    progress = ProgressPrinter(sys.stderr, time.monotonic)
    try:
        with _stopped_by_signals() as stop:
            surroundings = PopulationDependencies(date=now, clock=time.monotonic, stop=stop, progress=progress)
            report = populate(plan, destination, wallet, options, surroundings)
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
    """Raise the error of an unfinished build, which decides the exit code."""
    from neuroshard.dataset.population import stopped_error
    from neuroshard.dataset.sources import SourceFailureError

    if report.failures:
        names = ", ".join(report.failures)
        raise SourceFailureError(
            f"These sources were not read completely: {names}. {next(iter(report.failures.values()))}",
            "Fix this and run the same command again: it resumes.",
        )
    if report.is_stopped:
        raise stopped_error()


@contextmanager
def _stopped_by_signals() -> Generator[Event]:
    """Provide an event that the first Ctrl+C or SIGTERM sets. A second one ends the process at once."""
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


PlaceArgument = Annotated[str, typer.Argument(metavar="DEST", help="A folder, http(s)://... or s3://bucket/prefix.")]


def check_genesis(
    place: PlaceArgument,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Check N shards drawn at random instead of all.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="HEX", help="Public key that must have signed the data. (default: any key)")
    ] = None,
    s3_endpoint: S3Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Compare digests and counts of shards, pages and tables with the manifest. Exit code 6 on a difference."""
    from neuroshard.data.manifest import ManifestTrust
    from neuroshard.dataset import VerificationSample, verify_data_set
    from neuroshard.dataset.destination import open_place
    from neuroshard.errors import DataError

    opened = open_place(place, s3_endpoint=s3_endpoint)
    try:
        found = verify_data_set(
            opened,
            trust=ManifestTrust(signing_key=None if key is None else key.lower()),
            sample=None if sample is None else VerificationSample(sample, SystemRandom()),
            progress=_show if sys.stderr.isatty() else lambda _: None,
        )
    finally:
        opened.close()
    typer.echo(_as_json(found) if as_json else _summary_of(found))
    if not found.is_sound:
        raise DataError("The data set is damaged or incomplete.", "Build it again, or download it again.")


def show_genesis(place: PlaceArgument, s3_endpoint: S3Endpoint = None, as_json: AsJson = False) -> None:
    """Show the progress of each source of a data set."""
    from neuroshard.dataset import read_status
    from neuroshard.dataset.destination import open_place

    opened = open_place(place, s3_endpoint=s3_endpoint)
    try:
        found = read_status(opened)
    finally:
        opened.close()
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        _print_status(found)


def _show(fraction: float) -> None:
    sys.stderr.write(f"\rverify {fraction:4.0%}" if fraction < 1 else "\r" + " " * 12 + "\r")
    sys.stderr.flush()


def _as_json(found: Verification) -> str:
    facts = {"sound": found.is_sound, "shards": found.total_shards, "checked": found.shards_checked}
    return json.dumps({**facts, "signed_by": found.signed_by, "problems": found.problems, "notes": found.notes})


def _summary_of(found: Verification) -> str:
    signed = f"signed by {found.signed_by[:16]}" if found.signed_by else "not signed"
    lines = [f"{found.shards_checked:,} of {found.total_shards:,} shards checked; the manifest is {signed}."]
    return "\n".join([*lines, *(f"- {line}" for line in found.problems), *(f"  {note}" for note in found.notes)])


def _print_status(found: DataSetStatus) -> None:
    manifest = found.manifest
    if manifest is None:
        typer.echo("Nothing is published yet.")
    else:
        signed = f"signed by {manifest.signing_key[:16]}" if manifest.signing_key else "not signed"
        typer.echo(
            f"{manifest.total_shards:,} shards, {manifest.total_tokens:,} tokens, "
            f"{manifest.total_size_bytes / 1e9:,.2f} GB, {signed}, published {manifest.updated_at or 'without a date'}."
        )
    if found.unpublished_shards:
        typer.echo(f"{found.unpublished_shards:,} more shards are ready and not published yet.")
    if found.problem:
        typer.echo(f"The populator's state is not shown: {found.problem}")
    for name, source in found.sources.items():
        target = "" if source.target_shards is None else f" of {source.target_shards:,}"
        skipped = f" ({source.documents_skipped:,} skipped)" if source.documents_skipped else ""
        changed = f", last change {source.changed_at}" if source.changed_at else ""
        typer.echo(
            f"- {name}: {source.shards:,}{target} shards, {source.tokens:,} tokens, "
            f"{source.documents_processed:,} documents{skipped}{changed}"
        )


app = typer.Typer(help="Build, check and serve training data.", no_args_is_help=True)

FolderArgument = Annotated[Path, typer.Argument(help="A Genesis folder.")]


app.command("build")(build)


app.command("verify")(check_genesis)
app.command("status")(show_genesis)


@app.command("serve")
def serve(
    folder: FolderArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 chooses a free port.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
) -> None:
    """Serve a Genesis folder over HTTP until Ctrl+C: a small CDN, with its state at /status.

    The server supports ranges, conditional requests and cache headers, so a cache can be placed in front of it.
    """
    import signal
    import threading

    from neuroshard.dataset import GenesisServer

    stopped_error = threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        stopped_error.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    with GenesisServer(folder, host=host, port=port) as server:
        typer.echo(f"Serving {folder} at {server.url} ; train with: neuroshard --genesis {server.url}")
        while not stopped_error.wait(0.5):  # short waits, so that signals are delivered on every operating system
            pass
