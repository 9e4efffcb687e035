"""What a made release holds: it answers as a node does to the outside, and does nothing else. VERSION stands above."""

# ruff: noqa: F821
import fcntl
import json
import os
import secrets
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.tell({"version": VERSION, "state": "paused"})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.tell({"message": "Stopping."})
        self.server.is_over = True

    def tell(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def stop(folder):
    """Ask the node with this folder to end and wait for that; 4 when none runs, as the real one says."""
    try:
        lock = os.open(folder / "instance.lock", os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        port = json.loads((folder / "instance.lock").read_text())["port"]
        urlopen(f"http://127.0.0.1:{port}/api/shutdown", data=b"{}").read()
        fcntl.flock(lock, fcntl.LOCK_EX)
    except FileNotFoundError:
        sys.exit(4)
    else:
        sys.exit(4)


def main():
    if "--version" in sys.argv:
        print(f"neuroshard {VERSION}")  # noqa: T201
        return
    if sys.argv[1:] == ["autostart", "off"]:
        return
    if sys.argv[1] == "stop":
        stop(Path.home() / ".local/share/neuroshard" / ("demo" if "--demo" in sys.argv else "."))
        return
    if not WORKS:
        sys.exit("no such thing as this version here")
    folder = Path(sys.argv[sys.argv.index("--data-dir") + 1])
    if sys.argv[1] == "demo":
        folder /= "demo"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "starts").open("a").write(f"{VERSION} {' '.join(sys.argv[1:])} {os.environ.get('MARK', '')}\n")
    lock = os.open(folder / "instance.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    server = HTTPServer(("127.0.0.1", 0), Answers)
    server.is_over = False
    (folder / "api-secret").write_text(secrets.token_hex(16))
    os.write(lock, json.dumps({"pid": os.getpid(), "port": server.server_port, "host": "127.0.0.1"}).encode())
    os.ftruncate(lock, os.lseek(lock, 0, os.SEEK_CUR))
    while not server.is_over:
        server.handle_request()
    server.server_close()
    (folder / "asked-to-stop").touch()
    while "GATE" in os.environ and not Path(os.environ["GATE"]).exists():  # a long final checkpoint
        time.sleep(0.01)


if __name__ == "__main__":
    main()
