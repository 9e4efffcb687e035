"""`python -m benchmarks [NAME ...]` runs benchmarks and stores their results; `report` only rewrites RESULTS.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

from benchmarks.record import NotHereError, Report, store, table, write_results_page

BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {  # name: module and what its measure() takes
    "start": ("start", ()),
    "data": ("data", ()),
    "population": ("population", ()),
    "shards": ("shards", ()),
    "loss_kernel": ("loss_kernel", ()),
    "aggregation": ("aggregation", ()),
    "learning": ("learning", ()),
    "codecs": ("codecs", ()),
    "diloco": ("diloco", ()),
    "diloco_long": ("diloco", ("long",)),
    "schemes": ("schemes", ()),
    "rare_rounds": ("rare_rounds", ()),
    "overlap": ("overlap", ()),
    "churn": ("churn", ()),
    "utilisation_int8": ("utilisation", ("int8",)),
    "utilisation_int4": ("utilisation", ("int4",)),
    "attacks": ("attacks", ()),
    "dashboards": ("dashboards", ()),
    "kill": ("kill", ()),
    "foreground": ("foreground", ()),
    "paused": ("paused", ()),
    "membership": ("membership", ()),
    "meeting": ("meeting", ()),
    "first_record": ("first_record", ()),
    "line_speed": ("line_speed", ("shaped",)),
    "loopback_speed": ("line_speed", ("loopback",)),
    "tensor_round_trip": ("tensor_round_trip", ()),
    "rounds": ("rounds", ()),
    "state_joining": ("state_joining", ()),
    "pipeline_speed": ("pipeline_speed", ()),
    "pipeline_quality": ("pipeline_quality", ()),
    "pipeline_kills": ("pipeline_kills", ()),
    "pipeline_takeovers": ("pipeline_takeovers", ()),
    "pipeline_join": ("pipeline_join", ()),
    "node_speed_5m": ("node_speed", ("5M",)),
    "node_speed_16m": ("node_speed", ("16M",)),
    "node_speed_350m": ("node_speed", ("350M",)),  # needs a GPU
}


def main() -> int:
    """Run the named benchmarks, or all; exit code 2 for an unknown name."""
    names = sys.argv[1:] or list(BENCHMARKS)
    if names == ["report"]:
        write_results_page()
        return 0
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.stderr.write(f"unknown benchmark {unknown[0]}; there are: {', '.join(BENCHMARKS)}\n")
        return 2
    for name in names:
        module, arguments = BENCHMARKS[name]
        measure = cast("Callable[..., Report]", import_module(f"benchmarks.{module}").measure)
        try:
            report = measure(*arguments)
        except NotHereError as error:
            print(f"\n{name} was not run: {error}.\n")
            continue
        store(report)
        print(f"\n{report.title}\n\n{table(report.rows)}\n")
        for note in report.notes:
            print(f"- {note}")
    write_results_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
