"""`neuroshard genesis verify` and `status`: look at a data set in a folder, behind a URL or in an object store."""

from __future__ import annotations

import json
import sys
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated

import typer

from neuroshard.cli.options import AsJson, S3Endpoint

if TYPE_CHECKING:
    from neuroshard.genesis import DataSetStatus, Verification

PlaceArgument = Annotated[str, typer.Argument(metavar="DEST", help="A folder, http(s)://... or s3://bucket/prefix.")]


def verify(
    place: PlaceArgument,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Check N shards drawn at random instead of all.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="HEX", help="Public key that must have signed the data. (default: any)")
    ] = None,
    s3_endpoint: S3Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Hash shards again and compare with the manifest, as with pages, tables and counts. Exit code 6: not sound."""
    from neuroshard.data.genesis.manifest import ManifestTrust
    from neuroshard.errors import DataError
    from neuroshard.genesis import Sample, verify
    from neuroshard.genesis.destination import open_place

    opened = open_place(place, s3_endpoint=s3_endpoint)
    try:
        found = verify(
            opened,
            trust=ManifestTrust(signing_key=None if key is None else key.lower()),
            sample=None if sample is None else Sample(sample, SystemRandom()),
            progress=_show if sys.stderr.isatty() else lambda _: None,
        )
    finally:
        opened.close()
    typer.echo(_as_json(found) if as_json else _told(found))
    if not found.is_sound:
        raise DataError("The data set is not sound.", "Build it again, or fetch it again.")


def status(place: PlaceArgument, s3_endpoint: S3Endpoint = None, as_json: AsJson = False) -> None:
    """Show how far each source of a data set is."""
    from neuroshard.genesis import read_status
    from neuroshard.genesis.destination import open_place

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


def _told(found: Verification) -> str:
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
        typer.echo(f"{found.unpublished_shards:,} more shards are made and not published yet.")
    if found.problem:
        typer.echo(f"The populator's state is left out: {found.problem}")
    for name, source in found.sources.items():
        target = "" if source.target_shards is None else f" of {source.target_shards:,}"
        skipped = f" ({source.documents_skipped:,} skipped)" if source.documents_skipped else ""
        changed = f", last change {source.changed_at}" if source.changed_at else ""
        typer.echo(
            f"- {name}: {source.shards:,}{target} shards, {source.tokens:,} tokens, "
            f"{source.documents_processed:,} documents{skipped}{changed}"
        )
