"""A real nginx on loopback with the configuration of the documents, slowed down where a test needs time."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

from find_nginx import nginx_path

from benchmarks.node_process import free_port

DOCUMENTED = Path(__file__).parents[2] / "docs/nginx-genesis.conf"
_MAIN = """
daemon off; master_process off; pid {work}/nginx.pid; error_log {work}/error.log;
events {{ worker_connections 64; }}
http {{
    log_format ranges '$request_method $uri $status $http_range';
    access_log {work}/access.log ranges;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    {limit}
    {server}
}}
"""


class Nginx:
    """Serves a folder from start() to kill(); may be started again at the same address."""

    def __init__(self, folder: Path, work: Path, *, bytes_per_second: int | None = None) -> None:
        program = nginx_path()
        assert program is not None
        work.mkdir()
        self.port = free_port()
        server = DOCUMENTED.read_text(encoding="utf-8")
        for documented, here in (("listen 8100;", f"listen 127.0.0.1:{self.port};"), ("/srv/genesis", str(folder))):
            assert documented in server
            server = server.replace(documented, here)
        limit = f"limit_rate {bytes_per_second};" if bytes_per_second else ""
        (work / "nginx.conf").write_text(_MAIN.format(work=work, limit=limit, server=server), encoding="utf-8")
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [program, "-p", str(work), "-c", str(work / "nginx.conf"), "-e", str(work / "error.log")]
        self._log = work / "access.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, self._process.communicate()[1]
                assert time.monotonic() < deadline, "nginx does not answer"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """As by a power cut: no connection is ended with courtesy."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def requests(self) -> list[str]:
        """Method, path, status and range of what was answered to the end."""
        return self._log.read_text(encoding="utf-8").splitlines()
