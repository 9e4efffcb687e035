"""Options that several commands share, and the conversion of flags to settings."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

SHOWN_PRECISION = 0.999_999  # seconds: lists show whole ones, and a time from a list must select its state


def end_of_second(text: str) -> float:
    """The end of the second that a person names with --at, in seconds since the epoch. Raises BadParameter."""
    try:
        return datetime.fromisoformat(text).timestamp() + SHOWN_PRECISION
    except (ValueError, OverflowError, OSError):  # the last two: a time that the system does not know
        raise typer.BadParameter(f"{text!r} is not a time: use a form such as 2026-11-29T14:30.") from None


DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="Checkpoints, cache, logs and keys. (default: per-user folder)"),
]
Port = Annotated[
    int | None, typer.Option("--port", metavar="PORT", help="HTTP port of dashboard and API. (default: 8000)")
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Address of dashboard and API; other computers can connect unless it is a loopback address. "
        "(default: 127.0.0.1)",
    ),
]
GenesisSource = Annotated[
    str | None,
    typer.Option("--genesis", metavar="PLACE", help="Genesis data set: https://, http://, file:// or a folder."),
]
OwnText = Annotated[
    Path | None,
    typer.Option("--text", metavar="FOLDER", help="Train on the text files in this folder."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="auto, cpu, cuda, cuda:N, mps, xpu or xpu:N. (default: auto)",
    ),
]
CompileOption = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="MODE",
        help="auto or off. auto compiles the model in the background for a CUDA or XPU device. (default: auto)",
    ),
]
OptimizerMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer-memory",
        metavar="PLACE",
        help="auto, device or host. host keeps the optimizer of a GPU in this computer's memory. (default: auto)",
    ),
]
MaxGpuMemory = Annotated[
    int | None,
    typer.Option("--max-gpu-memory", metavar="MB", help="Most memory of the GPU. (default: nine tenths)"),
]
GpuShare = Annotated[
    int | None,
    typer.Option(
        "--gpu-share",
        metavar="PERCENT",
        help="Share of the time for training while another program uses the GPU. (default: 25)",
    ),
]
SiteOption = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="N",
        help="Compute in N processes, each on a device of its own. auto: one for each GPU; off: in this one. "
        "(default: off)",
    ),
]
MemoryLimit = Annotated[
    int | None, typer.Option("--memory", metavar="MB", help="Memory limit, never exceeded. (default: measured)")
]
Threads = Annotated[
    int | None, typer.Option("--cpu-threads", metavar="N", help="CPU threads for training. (default: measured)")
]
_MEETING = "Other nodes"
RunId = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN_ID", help="Run to join. (default: the default run)", rich_help_panel=_MEETING),
]
Invite = Annotated[
    str | None,
    typer.Option(
        "--invite",
        metavar="CODE|LINK|FILE",
        help="Invitation to a run of friends, with the run, its peers and its data. NEUROSHARD_INVITE is safer.",
        rich_help_panel=_MEETING,
    ),
]
OrganiserUrl = Annotated[
    str | None,
    typer.Option(
        "--organiser",
        metavar="URL",
        help="Organiser that admits this node to an organised run. (default: the one that admitted it before)",
        rich_help_panel=_MEETING,
    ),
]
PublicName = Annotated[
    str | None,
    typer.Option(
        "--public-name",
        metavar="NAME",
        help="Name of your wallet on the page of an organised run. (default: none; leave it out to remove it)",
        rich_help_panel=_MEETING,
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="MULTIADDR",
        help="A node to connect to first: /ip4/.../tcp/.../p2p/<node id>. Can be repeated.",
        rich_help_panel=_MEETING,
    ),
]
P2pPort = Annotated[
    int | None,
    typer.Option(
        "--p2p-port",
        metavar="PORT",
        help="Port for other nodes. (default: a free one, kept for later starts)",
        rich_help_panel=_MEETING,
    ),
]
P2pHost = Annotated[
    str | None,
    typer.Option(
        "--p2p-host",
        metavar="IP",
        help="IP address to listen on for other nodes. With a loopback address, only nodes on this computer can "
        "connect. (default: 0.0.0.0)",
        rich_help_panel=_MEETING,
    ),
]
MaxStages = Annotated[
    int | None,
    typer.Option(
        "--max-stages",
        metavar="N",
        help="Hold at most N stages of the run's model. (default: as many as fit the memory)",
        rich_help_panel=_MEETING,
    ),
]
SpareStages = Annotated[
    int | None,
    typer.Option(
        "--spare-stages",
        metavar="N",
        help="In addition to --max-stages, hold up to N stages that no other node holds. (default: 0)",
        rich_help_panel=_MEETING,
    ),
]
MaxUpload = Annotated[
    float | None,
    typer.Option(
        "--max-upload",
        metavar="MBIT/S",
        help="Limit for the upload to other nodes, in megabits per second. (default: no limit)",
        rich_help_panel=_MEETING,
    ),
]
MonthlyQuota = Annotated[
    float | None,
    typer.Option(
        "--monthly-quota",
        metavar="GB",
        help="Limit for sent and received data per calendar month, in gigabytes. (default: no limit)",
        rich_help_panel=_MEETING,
    ),
]
NoNetwork = Annotated[
    bool,
    typer.Option("--no-network", help="Train alone, without connections to other nodes.", rich_help_panel=_MEETING),
]
NoLanDiscovery = Annotated[
    bool,
    typer.Option(
        "--no-lan-discovery",
        help="Do not look for nodes on the local network, and do not announce this one there.",
        rich_help_panel=_MEETING,
    ),
]
NoPortMapping = Annotated[
    bool, typer.Option("--no-port-mapping", help="Do not ask the router to open ports.", rich_help_panel=_MEETING)
]
NoRelay = Annotated[bool, typer.Option("--no-relay", help="Do not use relays.", rich_help_panel=_MEETING)]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Wallet: a phrase of 12 or 24 words, 64 hex digits, or any text. NEUROSHARD_TOKEN is safer.",
    ),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token.")]
MaxStorage = Annotated[
    int | None,
    typer.Option("--max-storage", metavar="MB", help="Disk space for shards and their descriptions. (default: 2000)"),
]
InnerSteps = Annotated[
    int | None,
    typer.Option(
        "--inner-steps",
        "--diloco-steps",
        metavar="N",
        help="Longest interval between two rounds, in inner steps, for a run of your own. (default: 100)",
    ),
]
Archive = Annotated[
    bool,
    typer.Option(
        "--archive",
        help="Keep a checkpoint for ever every 50 outer steps of a run, so that its model of an earlier time can be "
        "assembled.",
    ),
]
TrainWhen = Annotated[
    str | None,
    typer.Option(
        "--train-when", metavar="WHEN", help="always, or idle: only while nobody uses the computer. (default: always)"
    ),
]
NoTraining = Annotated[bool, typer.Option("--no-training", help="Start without training.")]
Headless = Annotated[bool, typer.Option("--headless", "--no-browser", help="Do not open the dashboard.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object per line.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more details.")]
EndWithStdin = Annotated[  # for programs that start nodes and must not leave any running
    bool, typer.Option("--end-with-stdin", hidden=True, help="Stop cleanly when standard input closes.")
]
S3Endpoint = Annotated[
    str | None,
    typer.Option("--s3-endpoint", metavar="URL", help="Object store for s3://. (default: AWS_ENDPOINT_URL, or Amazon)"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def given(**flags: object) -> dict[str, object]:
    """Keep only the flags that were given (not None); environment, config.toml and defaults decide the others."""
    return {key: value for key, value in flags.items() if value is not None}


def settings_given(parameters: Mapping[str, object]) -> dict[str, object]:
    """Convert the flags of a node's command line to settings; `no_network` becomes network = False."""
    from neuroshard.config.settings import OPPOSITES

    flags: dict[str, object] = {}
    for name, value in parameters.items():
        if value is None or value is False or value in ([], ()):  # typer versions differ for a repeatable option
            continue  # not given: environment, config.toml or the default decides
        if name in OPPOSITES:
            flags[OPPOSITES[name]] = False
        else:
            flags[_SETTINGS.get(name, name)] = value
    return flags


_SETTINGS = {"genesis_source": "genesis", "run_id": "run"}  # parameters that cannot have the name of their setting


def node_folder(data_dir: Path | None, *, demo: bool) -> Path:
    """The data folder for a command. With `demo`, that of the running demo, otherwise of the one that ran last.

    Raises UsageError if several demos are running.
    """
    from neuroshard.config.loading import resolve_data_dir

    folder = resolve_data_dir(data_dir)
    return _demo_folder(folder) if demo else folder


def _demo_folder(data_dir: Path) -> Path:
    from neuroshard.config.instance_lock import last_used, read_lock_owner
    from neuroshard.errors import UsageError
    from neuroshard.node.demo import DEMO_FOLDER, demo_folders

    folders = demo_folders(data_dir)
    running = [folder for folder in folders if read_lock_owner(folder) is not None]
    if len(running) > 1:
        named = ", ".join(map(str, running))
        raise UsageError(f"Several demos are running: {named}.", "Name one of these folders: --data-dir FOLDER")
    return running[0] if running else max(folders, key=last_used, default=data_dir / DEMO_FOLDER)
