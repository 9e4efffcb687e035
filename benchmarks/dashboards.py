"""What 20 open dashboards and 20 requests a second cost the training; and the page itself, in a real browser."""

from __future__ import annotations

import selectors
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import fmean, median
from typing import cast

from benchmarks.dashboard_page import find_browser, page_rows
from benchmarks.node_process import NodeProcess, running_node
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.sizes import size
from neuroshard.api.server import THREAD_NAME
from neuroshard.telemetry.counters import UNNAMED

PAIRS, WARM_UP_STEPS = size((12, 20), (1, 1))
SEGMENT_SECONDS = size(8.0, 0.5)
STREAMS = 20
REQUESTS_A_SECOND = 20
COMPUTE_THREAD = "neuroshard-compute"
SHARE_SAMPLES, LEFT_OUT = size((9, 2), (1, 0))  # the first samples measured the arrival of the crowd
PATHS = ("/api/status", "/api/training/history", "/api/training/global", "/api/training/verify")


def measure() -> Report:
    """Tokens a second with and without the crowd, in turns, on one demo node. Raises NotHereError without a browser."""
    browser = find_browser()
    with tempfile.TemporaryDirectory() as folder, running_node(Path(folder), [], demo=True) as node:
        node.wait_for_steps(WARM_UP_STEPS)
        quiet: list[float] = []
        crowded: list[float] = []
        latencies: list[float] = []
        with Crowd(node):
            serving, training = serving_and_training_cores(node, SHARE_SAMPLES)
        for pair in range(PAIRS):
            for with_crowd in (False, True) if pair % 2 == 0 else (True, False):
                if with_crowd:
                    with Crowd(node) as crowd:
                        crowded.append(node.training_rate(SEGMENT_SECONDS))
                    latencies += crowd.latencies
                else:
                    quiet.append(node.training_rate(SEGMENT_SECONDS))
        page = page_rows(node, browser)
    ratio, half = mean_with_interval([a / b for a, b in zip(crowded, quiet, strict=True)])
    latencies.sort()
    return Report(
        "dashboards",
        "Open dashboards while training",
        (
            Row(
                f"tokens/s with {STREAMS} event streams and {REQUESTS_A_SECOND} requests/s / without, {PAIRS} pairs",
                f"{ratio:.3f} ± {half:.3f} (95 %)",
                "> 0.95",
                ratio > 0.95,
            ),
            Row(
                "CPU time of serving them / of training",
                f"{serving / training:.3f}",
                "< 0.05",
                serving < 0.05 * training,
            ),
            Row("tokens/s with, without", f"{fmean(crowded):,.0f}, {fmean(quiet):,.0f}", "report", None),
            Row(
                "request latency, median and worst",
                f"{latencies[len(latencies) // 2] * 1e3:.0f} ms, {latencies[-1] * 1e3:.0f} ms",
                "report",
                None,
            ),
            *page,
        ),
        ("The crowd itself runs on the same two cores and takes its share of them.",),
    )


def serving_and_training_cores(node: NodeProcess, samples: int) -> tuple[float, float]:
    """CPU use of the thread that serves and of those that compute: medians of the node's measurements, one per 2 s."""
    serving, training = list[float](), list[float]()
    seen = node.get("/api/status")["resources"]["threads"]
    while len(serving) < samples + LEFT_OUT:
        time.sleep(0.5)
        threads = node.get("/api/status")["resources"]["threads"]
        if threads != seen:
            cores = {thread["name"]: float(thread["cores"]) for thread in threads}
            serving.append(cores.get(THREAD_NAME, 0.0))
            training.append(cores.get(COMPUTE_THREAD, 0.0) + cores.get(UNNAMED, 0.0))
            seen = threads
    return median(serving[LEFT_OUT:]), median(training[LEFT_OUT:])


class Crowd:
    """Streams that read what comes, and one client that asks at a fixed pace; plain sockets, which cost little."""

    def __init__(self, node: NodeProcess) -> None:
        self._address = ("127.0.0.1", int(node.url.rpartition(":")[2]))
        self._headers = node.authorised()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._ask)]
        self.latencies: list[float] = []

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector, ExitStack() as stack:
            for _ in range(STREAMS):
                stream = stack.enter_context(socket.create_connection(self._address))
                headers = {"Host": f"localhost:{self._address[1]}", **self._headers}
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                stream.sendall(f"GET /api/events HTTP/1.1\r\n{lines}\r\n".encode())
                selector.register(stream, selectors.EVENT_READ, stream)
            while not self._stop.is_set():
                for key, _ in selector.select(timeout=0.5):
                    if not cast("socket.socket", key.data).recv(1 << 20):
                        raise ConnectionError("the node closed an event stream")

    def _ask(self) -> None:
        with closing(HTTPConnection("localhost", self._address[1], timeout=20)) as client:
            count = 0
            while not self._stop.wait(1 / REQUESTS_A_SECOND):
                start = time.perf_counter()
                client.request("GET", PATHS[count % len(PATHS)], headers=self._headers)
                answer = client.getresponse()
                answer.read()
                if answer.status != 200:
                    raise ConnectionError(f"the node answered {answer.status}")
                self.latencies.append(time.perf_counter() - start)
                count += 1
