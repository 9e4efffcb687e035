"""Where releases are told, and the key that signs them. docs/INSTALLING.md says how a publisher replaces both."""

from __future__ import annotations

import sys
from platform import machine

RELEASE_URL = ""  # nowhere yet: until there is a publisher, `update_url` and `update_key` name one
RELEASE_KEY = "e5adb0a141a7c27f06923d248ca592e956bffa9ead6818fd38b8b5213219cc8c"

_PROCESSORS = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64"}


def platform_name(system: str = sys.platform, processor: str | None = None) -> str:
    """What a manifest calls this kind of computer: `linux-x86_64`, `win32-x86_64`, `darwin-arm64`."""
    named = (processor or machine()).lower()
    return f"{system}-{_PROCESSORS.get(named, named)}"
