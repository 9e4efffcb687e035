"""`python -m benchmarks [--tiny] [NAME ...]` runs benchmarks; `--help` lists them. See `main`."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from benchmarks import preloaded
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
    "together": ("together", ()),
    "together_16": ("together", ("16",)),
    "together_20000": ("together", ("20000",)),
    "together_1.3M": ("together", ("1.3M",)),
    "together_5M": ("together", ("5M",)),
    "muon": ("muon", ()),
    "real_together": ("real_together", ()),
    "wall_clock": ("wall_clock", ()),
    "diloco": ("diloco", ()),
    "diloco_long": ("diloco", ("long",)),
    "schemes": ("schemes", ()),
    "rare_rounds": ("rare_rounds", ()),
    "overlap": ("overlap", ()),
    "unequal_speeds": ("overlap", ("speeds",)),
    "churn": ("churn", ()),
    "utilisation_int8": ("utilisation", ("int8",)),
    "utilisation_int4": ("utilisation", ("int4",)),
    "attacks": ("attacks", ()),
    "attacks_2.4M": ("attacks", ("2.4M",)),
    "dashboards": ("dashboards", ()),
    "kill": ("kill", ()),
    "foreground": ("foreground", ()),
    "paused": ("paused", ()),
    "membership": ("membership", ()),
    "meeting": ("meeting", ()),
    "organiser": ("organiser", ()),
    "first_record": ("first_record", ()),
    "line_speed": ("line_speed", ("shaped",)),
    "punched_speed": ("punched_speed", ("punched",)),
    "relayed_speed": ("punched_speed", ("relayed",)),
    "loopback_speed": ("line_speed", ("loopback",)),
    "tensor_round_trip": ("tensor_round_trip", ()),
    "rounds": ("rounds", ()),
    "shaped_rounds": ("shaped_rounds", ()),
    "state_joining": ("state_joining", ()),
    "pipeline_speed": ("pipeline_speed", ()),
    "chain_speed": ("chain_speed", ()),
    "pipeline_quality": ("pipeline_quality", ()),
    "protocol_nano": ("protocol_nano", ()),
    "pipeline_kills": ("pipeline_kills", ()),
    "pipeline_takeovers": ("pipeline_takeovers", ()),
    "pipeline_join": ("pipeline_join", ()),
    "node_speed_2.4m": ("node_speed", ("2.4M",)),
    "node_speed_5m": ("node_speed", ("5M",)),
    "node_speed_16m": ("node_speed", ("16M",)),
    "node_speed_350m": ("node_speed", ("350M",)),  # needs a GPU
    "gpu": ("gpu", ()),  # the same, and says for each figure that it was not run
}


TINY_VARIABLE = "BENCHMARK_TINY"  # decides in sizes.py, which must not be imported before it is set
REPORT = "report"


def main() -> int:
    """Run the named benchmarks, or all; return the exit code, 2 for an unknown name.

    A result is stored and RESULTS.md written again, unless the size is tiny.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run benchmarks and store their results in benchmarks/results and benchmarks/RESULTS.md.",
        epilog=_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"from the list below, default all; {REPORT}: no run")
    parser.add_argument("--tiny", action="store_true", help="the smallest size that executes the code; stores nothing")
    parser.add_argument("--quick", action="store_true", help="of `together`: one seed in minutes, then a line of JSON")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of --quick (default: 1)")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="of --quick: the .txt files to train on")
    options = parser.parse_args()
    if options.quick:
        return _quick(parser, options)
    if options.names == [REPORT]:
        write_results_page()
        return 0
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        sys.stderr.write(f"unknown benchmark {unknown[0]}; there are: {', '.join(BENCHMARKS)}\n")
        return 2
    if options.tiny:
        # Before the modules are imported, which read it. More threads than the work needs slow it down.
        os.environ |= {TINY_VARIABLE: "1", preloaded.VARIABLE: "1", "OMP_NUM_THREADS": "1"}
    for name in options.names or list(BENCHMARKS):
        _run(name, is_stored=not options.tiny)
    if not options.tiny:
        write_results_page()
    return 0


def _quick(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the quick form of `together`, the only benchmark that has one."""
    if options.names != ["together"]:
        parser.error("--quick is for one benchmark: python -m benchmarks together --quick")
    from benchmarks.together import quick  # it reads the size when it is imported

    try:
        quick(options.seed, options.texts)
    except NotHereError as error:
        parser.error(f"together cannot run: {error}")
    return 0


def _run(name: str, *, is_stored: bool) -> None:
    """Run one benchmark and print its table, or the reason why this computer cannot run it."""
    module, arguments = BENCHMARKS[name]
    measure = cast("Callable[..., Report]", import_module(f"benchmarks.{module}").measure)
    try:
        report = measure(*arguments)
    except NotHereError as error:
        print(f"\n{name} was not run: {error}.\n", flush=True)
        return
    if is_stored and report.was_run:
        store(report)
    print(f"\n{name}: {report.title}\n\n{table(report.rows)}\n")
    for note in report.notes:
        print(f"- {note}")
    sys.stdout.flush()


def _list() -> str:
    """Return one line for each benchmark: its name and the first line of its module, which is not imported for that."""
    lines = ["benchmarks:"]
    for name, (module, arguments) in BENCHMARKS.items():
        source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:20}{summary}" + (f" ({', '.join(arguments)})" if arguments else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
