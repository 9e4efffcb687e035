"""Where strangers' bytes are handled: what they set off ends with their connection or stream, not with the node."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

_Result = TypeVar("_Result")
_LOG = logging.getLogger(__name__)


async def contained(work: Awaitable[_Result], doing: str) -> _Result | Exception:
    """What `work` gives. An error of it is logged at debug level and returned."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the inbound-message handler: libp2p lets almost any error through
        _LOG.debug("%s failed.", doing, exc_info=True)
        return error
