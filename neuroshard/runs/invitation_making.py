"""New invitations to a run: their places, the statement of its model, and their QR code."""

from __future__ import annotations

from collections.abc import Sequence

from neuroshard.config.run_parameters import RunParameters
from neuroshard.identity.invitations import InvitedModel, InvitedPlaces
from neuroshard.runs.stage_plan import planned_stages

INVITED_PEERS = 3


def invited_model(parameters: RunParameters) -> InvitedModel:
    """The size of a run's model, and the memory that its smallest stage needs on a computer without accelerator."""
    stages = planned_stages(parameters)
    least = min(stage.memory_mb for stage in stages)
    return InvitedModel(sum(stage.parameters for stage in stages), len(stages), least)


def invited_places(
    parameters: RunParameters, peers: Sequence[str], data: str | None, organiser: str | None = None
) -> InvitedPlaces:
    """The places that an invitation names. Of the data, only an https:// address means the same place elsewhere."""
    places = (data,) if data is not None and data.startswith("https://") else ()
    model = invited_model(parameters)
    return InvitedPlaces(parameters.name, tuple(peers[:INVITED_PEERS]), places, organiser, model)


def qr_rows(link: str) -> tuple[str, ...]:
    """The QR code of a link: one text of 0 and 1 per row of modules, without the quiet zone."""
    import segno  # 20 ms that other commands need not spend

    code = segno.make_qr(link, error="l", boost_error=False)
    return tuple("".join(str(module) for module in row) for row in code.matrix)


QUIET_ZONE = 4  # modules around the code


def qr_svg(link: str) -> bytes:
    """The QR code of a link as an SVG image, black on white."""
    rows = qr_rows(link)
    size = len(rows) + 2 * QUIET_ZONE
    squares = "".join(
        f"M{x + QUIET_ZONE} {y + QUIET_ZONE}h1v1h-1z"
        for y, row in enumerate(rows)
        for x, module in enumerate(row)
        if module == "1"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{8 * size}" height="{8 * size}">'
        f'<rect width="100%" height="100%" fill="#fff"/><path d="{squares}" fill="#000"/></svg>\n'
    ).encode()
