"""The dashboard's files, read once from the installed package."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MOST_FILE_BYTES: Final = 8 << 20
HASHED_FOLDER: Final = "/assets/"  # names contain a digest of the content
FOREVER: Final = "public, max-age=31536000, immutable"
NOT_BUILT: Final = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>NeuroShard</title></head><body>
<h1>The node is running; its dashboard is not built.</h1>
<p>In a copy of the repository, run <code>make web</code> (or <code>npm ci</code> and <code>npm run build</code> in the
folder <code>web</code>) and start the node again. Installed packages contain the dashboard.</p>
<p>Meanwhile: <a href="/api/status">status</a>, <a href="/api/training/verify">is it learning?</a>,
<a href="/docs">all routes</a>.</p>
</body></html>
"""


@dataclass(frozen=True)
class StaticFile:
    """One file of the dashboard, held in memory, with its response headers."""

    content: bytes
    media_type: str
    cache_control: str


def dashboard_files(folder: Traversable | None = None) -> dict[str, StaticFile]:
    """Read the dashboard's files by URL path; `/` is the page. If it was not built, a page explains that."""
    root = folder if folder is not None else files("neuroshard.api").joinpath("static")
    found = dict(_files(root, "/")) if root.is_dir() else {}
    page = found.pop("/index.html", None)
    found["/"] = page if page is not None else StaticFile(NOT_BUILT, "text/html; charset=utf-8", "no-cache")
    return found


def dashboard_routes(found: dict[str, StaticFile]) -> list[Route]:
    """Make one exact route per file: the path of a request never reaches the file system."""
    return [Route(path, _endpoint(file), methods=["GET"], include_in_schema=False) for path, file in found.items()]


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, StaticFile]]:
    for entry in folder.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            yield from _files(entry, path + "/")
        else:
            content = entry.read_bytes()
            if len(content) <= MOST_FILE_BYTES:
                yield path, StaticFile(content, _media_type(entry.name), _cache_control(path))


def _media_type(name: str) -> str:
    """Media type by the file's extension. Scripts are fixed, because the registry of Windows may have a wrong type."""
    if name.endswith((".js", ".mjs")):
        return "text/javascript; charset=utf-8"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _cache_control(path: str) -> str:
    return FOREVER if path.startswith(HASHED_FOLDER) else "no-cache"


def _endpoint(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        del request
        headers = {"Content-Type": file.media_type, "Cache-Control": file.cache_control}
        return Response(file.content, headers=headers)

    return serve
