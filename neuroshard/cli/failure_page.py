"""The page that explains why a start failed: its text, and a server that sends it to a browser once, from memory."""

from __future__ import annotations

import html
import os
import secrets
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

from neuroshard.errors import NeuroShardError
from neuroshard.types import LOOPBACK

FETCH_SECONDS = 60.0  # the browser may have to start first; this process then only waits for it
MOST_FRAMES = 8

# The page is complete in itself: it loads nothing and runs no script. It is not a file, because the disk may be full,
# and a sandboxed browser may not be able to read the folder.
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>NeuroShard is not running</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 0; }}
main {{ max-width: 40rem; margin: 10vh auto; padding: 0 1.5rem; }}
.said {{ font-size: 1.15rem; overflow-wrap: anywhere; }}
code {{ overflow-wrap: anywhere; }}
</style></head><body><main>
<h1>NeuroShard is not running</h1>
<p class="said">{message}</p>
<p class="said"><strong>{action}</strong></p>
<h2>What helps</h2>
<ul>
<li>When that is fixed, start NeuroShard again in the same way.</li>
{places}<li>In a terminal, <code>neuroshard doctor</code> checks everything and says what to do.</li>
</ul>
{details}</main></body></html>
"""
SETTINGS = """<li>Settings are in <code>{file}</code>. There, an option such as <code>--port 8001</code> is a
line: <code>port = 8001</code></li>
"""
LOGS = "<li>The log is in <code>{folder}</code></li>\n"
DETAILS = "<h2>For a report</h2>\n<pre>{frames}</pre>\n"


def failure_page(error: Exception, data_dir: Path | None) -> str:
    """Make the page for an error. For an unexpected error it shows the class and the place, but not the message.

    The message of an unexpected error may contain a secret. `data_dir` is the node's folder; None if it is not known.
    """
    message, action, details = _words(error)
    places = ""
    if data_dir is not None:
        from neuroshard.config.folders import NodePaths

        paths = NodePaths.below(data_dir)
        places = SETTINGS.format(file=_escaped(paths.config_file))
        places += LOGS.format(folder=_escaped(paths.logs)) if os.access(paths.logs, os.R_OK) else ""
    return PAGE.format(message=_escaped(message), action=_escaped(action), places=places, details=details)


def serve_once(page: bytes, open_at: Callable[[str], object], seconds: float = FETCH_SECONDS) -> bool:
    """Serve a page at a secret address, open it with `open_at`, and return whether a browser has fetched it in time."""
    path, fetched = f"/{secrets.token_urlsafe(16)}", Event()

    class OnePage(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            if not secrets.compare_digest(self.path.encode(), path.encode()):
                self.send_error(404)
                return
            self.send_response(200)
            for name, value in {**HEADERS, "Content-Length": str(len(page))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page)
            fetched.set()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer((LOOPBACK, 0), OnePage) as server:
        server.daemon_threads, server.block_on_close = True, False
        Thread(target=server.serve_forever, name="neuroshard-failure-page", daemon=True).start()
        open_at(f"http://{LOOPBACK}:{server.server_address[1]}{path}")
        was_fetched = fetched.wait(seconds)
        server.shutdown()
    return was_fetched


def _words(error: Exception) -> tuple[str, str, str]:
    """The message, the recommended action and the HTML with details of an error."""
    if isinstance(error, NeuroShardError):
        return error.message, error.action or "Start it again; if it happens again, look at the log.", ""
    frames = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    lines = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    kind = type(error).__name__
    details = DETAILS.format(frames=_escaped("\n".join([*lines, kind])))
    return (
        f"NeuroShard stopped because of an error in the program: {kind}.",
        "Start it again; if it happens again, please report it.",
        details,
    )


def _escaped(text: object) -> str:
    return html.escape(str(text), quote=True)
