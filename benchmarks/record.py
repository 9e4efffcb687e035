"""What a benchmark reports, and where it is kept."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.plots import Plot, draw

RESULTS_FOLDER = Path(__file__).parent / "results"
REPORT_FILE = Path(__file__).parent / "RESULTS.md"
# 97.5 % quantiles for 1 to 30 degrees of freedom; for more, the last one is a little too careful.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class NotHereError(Exception):
    """This computer lacks what a benchmark needs; says what."""


@dataclass(frozen=True)
class Row:
    """One figure beside its goal; `met` is None where the goal is only to report."""

    item: str
    figure: str
    goal: str
    met: bool | None


WAS_NOT_RUN = "was not run"  # the figure of a row that this computer cannot measure


@dataclass(frozen=True)
class Report:
    """The rows of one benchmark."""

    name: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    plot: Plot | None = None
    device: str = ""  # name of the GPU, which also names the file: results of several GPUs are kept

    @property
    def was_run(self) -> bool:
        """Whether at least one row has a measured figure."""
        return any(row.figure != WAS_NOT_RUN for row in self.rows)


def store(report: Report) -> None:
    """Keep the newest result of a benchmark, with the date and the machine."""
    RESULTS_FOLDER.mkdir(exist_ok=True)
    content = {
        **asdict(report),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(),
        "commit": _commit(),
    }
    suffix = "".join(f"_{part}" for part in re.findall(r"[a-z0-9]+", report.device.lower()))
    (RESULTS_FOLDER / f"{report.name}{suffix}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if report.plot is not None:
        draw(report.plot, _plot_file(report.name))


def _plot_file(name: str) -> Path:
    return RESULTS_FOLDER / f"{name}.svg"


def _machine() -> str:
    """Processor, cores, system and Python of this machine."""
    processor, cpuinfo = platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return f"{os.cpu_count()} cores of {processor}, {platform.system()}, Python {platform.python_version()}"


def _commit() -> str:
    """Which program was measured: the last commit that changed it, with a plus when its files differ from that."""
    last = _git("log", "-1", "--format=%h", "--", "neuroshard")
    return last + ("+" if _git("status", "--porcelain", "--", "neuroshard") else "")


def _git(*arguments: str) -> str:
    ran = subprocess.run(("git", *arguments), cwd=REPORT_FILE.parents[1], capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def table(rows: Sequence[dict[str, object]] | Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    words = {True: "yes", False: "**no**", None: "report"}
    lines = ["| item | measured | goal | met |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = asdict(row) if isinstance(row, Row) else row
        met = cells["met"]
        assert met is None or isinstance(met, bool)
        lines.append(f"| {cells['item']} | {cells['figure']} | {cells['goal']} | {words[met]} |")
    return "\n".join(lines)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % confidence interval by Student's t; one value alone may be anything."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    quantile = STUDENT_T[min(len(values) - 1, len(STUDENT_T)) - 1]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def load_average() -> str:
    """Of the last minute: how many programs wanted a core; for notes."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def write_results_page() -> None:
    """Write RESULTS.md from the stored results."""
    parts = [
        "# Benchmark results",
        "",
        "Written by `python -m benchmarks report` from `benchmarks/results/`; every figure was measured, also where it",
        "falls short. `make bench` measures all of them again. Ratios are taken within one run; absolute ones belong",
        "to the machine named beside them. Whether a goal is met is judged by the figure itself, for repeated",
        "measurements by their mean; their 95 % confidence interval (Student's t) is printed beside it.",
    ]
    for file in sorted(RESULTS_FOLDER.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        commit = f", commit {content['commit']}" if content.get("commit") else ""
        device = f"{content['device']}, " if content.get("device") else ""
        parts += [
            "",
            f"## {content['title']}",
            "",
            f"`python -m benchmarks {content['name']}` on {content['date']} ({device}{content['machine']}{commit})",
            "",
            table(content["rows"]),
        ]
        if _plot_file(content["name"]).exists():
            parts += ["", f"![{content['title']}](results/{content['name']}.svg)"]
        if content["notes"]:
            parts += ["", *(f"- {note}" for note in content["notes"])]
    REPORT_FILE.write_text("\n".join(parts) + "\n", encoding="utf-8")
