"""Where strangers' bytes are handled: what they set off ends with their connection or stream, not with the node."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

_LOG = logging.getLogger(__name__)


async def contained(work: Awaitable[object], doing: str) -> Exception | None:
    """Await `work`. An error of it is logged at debug level and returned."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - the inbound-message handler: libp2p lets almost any error through
        _LOG.debug("%s failed.", doing, exc_info=True)
        return error
    return None
