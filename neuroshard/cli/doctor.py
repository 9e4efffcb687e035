"""`neuroshard doctor`: check everything that a node needs, on this computer and in the network, with remedies."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import typer

from neuroshard.cli.failures import ExitCode
from neuroshard.cli.options import AsJson, DataDir, DeviceOption, GenesisSource, Host, Port, given
from neuroshard.status.values import plural

if TYPE_CHECKING:
    from neuroshard.config.loading import LoadedSettings
    from neuroshard.config.settings import Settings
    from neuroshard.host.resources import Device


MANIFEST_SECONDS = 10.0
LEAST_FREE_BYTES = 2_000_000_000
LEAST_BF16_CAPABILITY = 8.0  # of NVIDIA's GPUs: Ampere
_INSTALL_TORCH = "Install PyTorch into this environment, as pytorch.org describes for this computer."


@dataclass(frozen=True)
class Finding:
    """Result of one check, with the action that repairs a problem."""

    subject: str
    is_well: bool
    detail: str
    action: str = ""


@dataclass(frozen=True)
class Case:
    """Input of a check: the settings, and status and settings of the node that runs with this data folder.

    Without a running node, both are None: then the settings are those with which it would start from this shell.
    """

    loaded: LoadedSettings
    status: Mapping[str, Any] | None
    in_node: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def described(self) -> Mapping[str, Any]:
        """Every setting with value and source; the running node's, if there is one."""
        return self.in_node or self.loaded.describe()


def python(_case: Case) -> Finding:
    """Check the version of the Python interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    is_known = sys.version_info >= (3, 11)
    return Finding("python", is_known, version, "" if is_known else "Install Python 3.11 or newer.")


def torch(_case: Case) -> Finding:
    """Check that PyTorch can be imported."""
    try:
        import torch as library
    except (ImportError, OSError) as error:  # OSError: a system library is missing
        return Finding("torch", is_well=False, detail=f"cannot be imported: {error}", action=_INSTALL_TORCH)
    built: dict[str, str | None] = {
        "CUDA": library.version.cuda,
        "ROCm": library.version.hip,
        "XPU": library.version.xpu,
        "Metal": "" if library.backends.mps.is_built() else None,
    }
    kinds = [f"{name} {version}".strip() for name, version in built.items() if version is not None]
    detail = f"{library.__version__}, with {' and '.join(kinds)}" if kinds else f"{library.__version__}, without CUDA"
    return Finding("torch", is_well=True, detail=detail)


def device(case: Case) -> Finding:
    """Show the compute device with its memory, version and driver, and GPUs that are not used, with the reason."""
    from neuroshard.host.computer import default_threads
    from neuroshard.host.nvidia import driver_version, training_gpus
    from neuroshard.host.resources import choose_device, obstacle

    if case.status is not None:
        used: Mapping[str, Any] = case.status["resources"]
        threads = plural(used["cpu_threads_limit"], "CPU thread")
        name = used["device_name"] if used["device"] == "cpu" else f"{used['device_name']} ({used['device']})"
        memory = f", {used['gpu_memory_total_bytes'] / 1e6:,.0f} MB" if used["gpu_memory_total_bytes"] else ""
        return Finding("device", is_well=True, detail=f"the running node uses {name}{memory}, {threads}")
    chosen = choose_device(case.loaded.settings.device).limited_to(case.loaded.settings.max_gpu_memory)
    threads = case.loaded.settings.cpu_threads or default_threads()
    unused = training_gpus() if case.loaded.settings.device == "auto" and chosen.kind == "cpu" else []
    facts = [
        chosen.label,
        f"{chosen.memory_mb:,} MB" if chosen.memory_mb else "",
        chosen.version,
        f"driver {driver_version() or 'not known'}" if chosen.gpu_uuid else "",
        plural(threads, "CPU thread"),
    ]
    action = ""
    if case.loaded.settings.site != "off" and "MASTER_ADDR" in os.environ:
        action = "The ranks of a site are not authenticated: their network must be a trusted one."
    if unused:
        reason, advice = obstacle("cuda")
        action = f"{', '.join(unused)}: not used. {reason}. {advice}".strip()
    return Finding("device", is_well=True, detail=", ".join(filter(None, facts)), action=action)


def precision(case: Case) -> Finding:
    """Show the precision of the last model that was measured here, the measured speeds, and how to measure again."""
    from neuroshard.pipeline.precision_probe import precision_file

    file = precision_file(case.loaded.settings.data_dir)
    damage = list[str]()
    stored = file.read(damage.append)
    training: Mapping[str, Any] = (case.status or {}).get("training") or {}
    running = f"the running node computes in {training['precision']}; " if training.get("precision") else ""
    if stored is None or not stored.measured:
        detail = f"{running}nothing is measured yet: a new model measures fp32 against bf16 at its first start"
        return Finding("precision", is_well=True, detail=detail, action=" ".join(damage))
    last = stored.measured[-1]
    detail = (
        f"{running}the last measurement chose {last.probe.chosen.value}: bf16 had {last.probe.gain:.2f} times the "
        f"speed on {last.machine.device} with {plural(last.machine.threads, 'CPU thread')} and PyTorch "
        f"{last.machine.torch}"
    )
    action = f"To measure again at the next start of a new model, delete {file.path}."
    return Finding("precision", is_well=True, detail=detail, action=action)


def speed(case: Case) -> Finding:
    """Show the training speed that this device reaches, measured or expected, and what keeps it from more."""
    import torch

    from neuroshard.host.matmul_speed import BF16_PEAKS, peak_speed
    from neuroshard.host.resources import choose_device
    from neuroshard.runs.proposal import TRAINING_EFFICIENCY

    now: Mapping[str, Any] | None = (case.status or {}).get("acceleration")
    if now is not None and now.get("tokens_per_second"):
        detail = (
            f"the running node trains at {now['tokens_per_second']:,.0f} tokens/s, {now['mfu']:.0%} of "
            f"{now['peak_flops'] / 1e12:,.2f} TFLOP/s ({now['peak_source']})"
        )
        return Finding("speed", is_well=True, detail=detail)
    settings = case.loaded.settings
    chosen = choose_device(settings.device).limited_to(settings.max_gpu_memory)
    dtype = torch.float32 if chosen.kind == "cpu" else torch.bfloat16
    peak = peak_speed(chosen, dtype)
    source = "data sheet" if chosen.name in BF16_PEAKS else "measured now"
    reached = TRAINING_EFFICIENCY * peak.flops_per_second
    detail = (
        f"matrix products at {peak.flops_per_second / 1e12:,.2f} TFLOP/s ({source}); training reaches "
        f"{TRAINING_EFFICIENCY:.0%}: {reached / (6 * 100e6):,.0f} tokens/s with 100 M parameters, "
        f"{reached / (6 * 1e9):,.0f} with 1 B"
    )
    return Finding("speed", is_well=True, detail=detail, action=" ".join(_reasons_for_less(chosen, settings)))


def _reasons_for_less(chosen: Device, settings: Settings) -> list[str]:
    """Sentences for the owner about limits on the speed of this device."""
    from neuroshard.host.computer import default_threads

    reasons = list[str]()
    if chosen.kind == "cpu":
        cores = default_threads()
        if (settings.cpu_threads or cores) < cores:
            reasons.append(f"cpu_threads allows {settings.cpu_threads} of {cores} cores.")
        if settings.device == "auto":
            reasons.append("No GPU that PyTorch can use was found, so the processor trains.")
    if chosen.gpu_uuid is not None:
        reasons += _reasons_of_nvidia(chosen)
    if chosen.kind in ("cuda", "xpu"):
        reasons += _reasons_of_settings(settings)
    if settings.cpu_percent < 100:
        reasons.append(f"cpu_percent allows {settings.cpu_percent} % of the time.")
    return reasons


def _reasons_of_nvidia(chosen: Device) -> list[str]:
    import torch

    from neuroshard.host.nvidia import driver_advice

    capability = float(chosen.version.rpartition(" ")[2])
    reasons = [driver_advice(torch.version.cuda)]
    if capability < LEAST_BF16_CAPABILITY:
        reasons.append(f"Its compute capability is {capability}, and bf16 needs {LEAST_BF16_CAPABILITY}.")
    return list(filter(None, reasons))


def _reasons_of_settings(settings: Settings) -> list[str]:
    from importlib.util import find_spec

    reasons = list[str]()
    if settings.compile == "off":
        reasons.append("compile = off: training stays eager.")
    elif find_spec("triton") is None:
        reasons.append("Triton is not installed, so nothing is compiled: training stays eager.")
    if settings.max_gpu_memory is not None:
        reasons.append(f"max_gpu_memory allows {settings.max_gpu_memory:,} MB.")
    if settings.optimizer_memory == "host":
        reasons.append("optimizer_memory = host: each step copies the optimizer's moments to the GPU and back.")
    return reasons


def memory(case: Case) -> Finding:
    """Show the memory limit of training, and the largest model that fits it."""
    from neuroshard.host.live_settings import limit_source
    from neuroshard.host.resources import choose_device
    from neuroshard.model.architecture import parameter_count
    from neuroshard.model.memory_limit import memory_bound, probe_memory, tier_mb
    from neuroshard.model.memory_need import propose_architecture

    known: Mapping[str, Any] | None = (case.status or {}).get("memory")
    if known is not None:
        detail = (
            f"the running node may use {known['limit_mb']:,} MB ({known['limit_source']}), tier {known['tier_mb']:,}"
        )
        return Finding("memory", is_well=True, detail=detail)
    bound = memory_bound(probe_memory(), case.loaded.settings.memory)
    tier = tier_mb(bound.mb)
    source = limit_source(bound.by, case.loaded.sources["memory"])
    layers = propose_architecture(tier, 32_000).layer_count
    detail = f"{bound.mb:,} MB may be used ({source}), tier {tier:,}: up to {layers} layers on the CPU"
    settings = case.loaded.settings
    chosen = choose_device(settings.device).limited_to(settings.max_gpu_memory)
    if chosen.memory_mb is not None:
        device_tier = tier_mb(chosen.memory_mb)
        largest = [
            propose_architecture(tier, 32_000, device=chosen.kind, device_tier_mb=device_tier, moments_on_host=on_host)
            for on_host in (False, True)
        ]
        on_device, on_host = (f"{parameter_count(each) / 1e6:,.0f} M" for each in largest)
        detail += (
            f"; {chosen.memory_mb:,} MB of the GPU: up to {on_device} parameters, or {on_host} with the optimizer in "
            "this computer's memory"
        )
    return Finding("memory", is_well=True, detail=detail)


def disk(case: Case) -> Finding:
    """Check that the data folder can be written and that its disk has enough space. It creates the folder."""
    import shutil

    from neuroshard.config.folders import prepare_data_dir

    folder = case.loaded.settings.data_dir
    prepare_data_dir(folder)
    free = shutil.disk_usage(folder).free
    action = "" if free >= LEAST_FREE_BYTES else "Free some space, or name another folder with --data-dir."
    return Finding("disk", free >= LEAST_FREE_BYTES, f"{free / 1e9:.1f} GB free in {folder}", action)


def autostart(_case: Case) -> Finding:
    """Show whether a node starts at login, and check that its program exists."""
    import os

    from neuroshard.cli.desktop import AUTOSTART_REMEDY
    from neuroshard.errors import UsageError
    from neuroshard.host.autostart import places_of_this_computer, read_autostart

    try:
        found = read_autostart(places_of_this_computer(os.environ))
    except UsageError as error:  # an operating system without a supported autostart
        return Finding("autostart", is_well=True, detail=f"off. {error.message}")
    if found.missing:
        return Finding("autostart", is_well=False, detail=found.complaint(), action=AUTOSTART_REMEDY)
    return Finding("autostart", is_well=True, detail=f"on: {found.kind} {found.path}" if found.is_on else "off")


def token(case: Case) -> Finding:
    """Check the token, and show its wallet."""
    from neuroshard.host.identity import wallet_of

    if case.status is not None and case.status["wallet_id"]:
        return Finding("token", is_well=True, detail=f"the running node has wallet {case.status['wallet_id']}")
    wallet, kind, warnings = wallet_of(case.loaded)
    return Finding("token", is_well=True, detail=f"{kind}, wallet {wallet.wallet_id}", action=" ".join(warnings))


def data(case: Case) -> Finding:
    """Check that the source of the data set answers, and show its contents."""
    import anyio

    from neuroshard.runs.data_opening import look_at_source

    genesis = case.loaded.settings.genesis
    in_use: Mapping[str, Any] | None = (case.status or {}).get("data")
    if case.loaded.sources["genesis"] != "flag" and in_use is not None and in_use["source"]:
        genesis = str(in_use["source"])
    if genesis is None:
        return Finding("data", is_well=True, detail="no data source is set: the nodes of the run send the data")
    found = anyio.run(look_at_source, genesis, MANIFEST_SECONDS, backend="trio")
    return Finding("data", is_well=True, detail=found)


DIAL_SECONDS = 3.0
CLOCK_SECONDS = 5.0
MOST_CLOCK_ERROR_SECONDS = 30.0  # signed reports are dropped after 60 s
MOST_DIALS = 8
_SET_CLOCK = "Let the network set this computer's date and time: other nodes refuse reports that seem old."


def port(case: Case) -> Finding:
    """Check that the port of dashboard and API is free, or used by the node of this data folder."""
    from neuroshard.api.address import bind
    from neuroshard.config.instance_lock import read_lock_owner

    settings = case.loaded.settings
    owner = read_lock_owner(settings.data_dir)
    if owner is None:
        bind(settings.host, settings.port).close()
        return Finding("port", is_well=True, detail=f"{settings.port} is free")
    if owner.is_setup:
        detail = f"the wizard of the first run waits at port {owner.port}"
        return Finding(
            "port", is_well=True, detail=detail, action="`neuroshard` opens the wizard again: finish it there."
        )
    if case.status is None:
        detail = f"process {owner.pid} holds {settings.data_dir}, but no node answers at port {owner.port}"
        return Finding("port", is_well=False, detail=detail, action="Wait until it has started, or end that process.")
    return Finding("port", is_well=True, detail=f"a node of this folder is running at port {owner.port}")


def p2p_port(case: Case) -> Finding:
    """Check that the port for other nodes can be used."""
    settings = case.loaded.settings
    if not settings.network:
        return Finding("p2p port", is_well=True, detail="not needed: the network is off")
    if case.status is not None:
        addresses = ", ".join(case.status["network"]["addresses"]) or "no address yet"
        return Finding("p2p port", is_well=True, detail=f"the running node has {addresses}")
    if settings.p2p_port == 0:
        return Finding("p2p port", is_well=True, detail=f"any free one of {settings.p2p_host}")
    from neuroshard.errors import NetworkRefusedError

    family = socket.AF_INET6 if ":" in settings.p2p_host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.p2p_host, settings.p2p_port))
    except OSError as error:
        raise NetworkRefusedError(
            f"{settings.p2p_host}:{settings.p2p_port} cannot be used: {error.strerror or error}.",
            "Name another with --p2p-port, or 0 for any free one.",
        ) from error
    return Finding("p2p port", is_well=True, detail=f"{settings.p2p_port} is free")


def nat(case: Case) -> Finding:
    """Show how other nodes can reach this computer, by the running node's status or by the settings."""
    from neuroshard.network.nat.router import default_gateway, outbound_host

    settings = case.loaded.settings
    if case.status is not None:
        network: Mapping[str, Any] = case.status["network"]
        is_well = network["state"] != "failed"
        action = "" if is_well else "Training continues and the node tries again; `neuroshard logs` shows more."
        return Finding("nat", is_well=is_well, detail=f"{network['state']}: {network['explanation']}", action=action)
    if not settings.network:
        return Finding("nat", is_well=True, detail="the network is off: this node trains alone")
    ways = [
        "asks the router for a port" if settings.port_mapping else "does not ask the router (port_mapping = false)",
        "can be reached through relays" if settings.relay else "uses no relay (relay = false)",
    ]
    outside, router = outbound_host(), default_gateway()
    if outside is None:
        detail, action = "there is no route to the internet", "Nodes on the local network still find each other."
        return Finding("nat", is_well=True, detail=detail, action=action)
    behind = f"{outside} behind {router}" if router else outside
    reachable = settings.port_mapping or settings.relay
    action = "" if reachable else "Behind a router no other node can reach this one: allow port mapping or relays."
    return Finding("nat", is_well=True, detail=f"{behind}; it {' and '.join(ways)}", action=action)


def peers(case: Case) -> Finding:
    """Show the number of peers of the running node; without one, check whether known addresses answer."""
    from neuroshard.membership.connectivity import remembered_addresses
    from neuroshard.membership.network_opening import PEERS_FILE

    settings = case.loaded.settings
    if case.status is not None:
        connections = case.status["network"]["connections"]
        detail = f"{case.status['peer_count']:,} of the run, {connections:,} connections"
        return Finding("peers", is_well=True, detail=detail)
    if not settings.network:
        return Finding("peers", is_well=True, detail="none: the network is off")
    known = remembered_addresses(settings.data_dir / PEERS_FILE, on_damage="ignore")
    addresses = tuple(dict.fromkeys([*settings.peer, *known]))[:MOST_DIALS]
    if not addresses:
        return Finding(
            "peers", is_well=True, detail="none known yet; a node asks the local network and the default run"
        )
    with ThreadPoolExecutor(MOST_DIALS) as dials:
        answers = dict(zip(addresses, dials.map(_answers, addresses), strict=True))
    detail = f"{sum(answers.values())} of {len(answers)} known addresses answer"
    silent = [address for address in settings.peer if answers.get(address) is False]
    if silent:
        action = f"{silent[0]} does not answer: is that node running, and is its port open?"
        return Finding("peers", is_well=False, detail=detail, action=action)
    return Finding("peers", is_well=True, detail=detail)


def clock(case: Case) -> Finding:
    """Check this computer's clock, by the running node's warnings and by the date of the data source's server."""
    here = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    warnings = [text for text in (case.status or {}).get("warnings", []) if "clock" in text.lower()]
    if warnings:
        return Finding("clock", is_well=False, detail=f"{here}; {warnings[0]}", action=_SET_CLOCK)
    genesis = case.loaded.settings.genesis or ""
    error = _clock_error(genesis) if genesis.startswith(("http://", "https://")) else None
    if error is None:
        return Finding("clock", is_well=True, detail=f"{here}; no other clock was available for comparison")
    is_well = abs(error) <= MOST_CLOCK_ERROR_SECONDS
    detail = f"{here}; {abs(error):,.0f} s {'ahead of' if error > 0 else 'behind'} the data's server"
    return Finding("clock", is_well=is_well, detail=detail, action="" if is_well else _SET_CLOCK)


def _clock_error(url: str) -> float | None:
    """Seconds by which this computer is ahead of a server, by the Date of its response; None if it is not known."""
    import httpx

    try:
        before = time.time()
        answer = httpx.head(f"{url.rstrip('/')}/manifest.json", timeout=CLOCK_SECONDS, follow_redirects=True)
        middle = (before + time.time()) / 2
        age = int(answer.headers.get("age", 0))  # the Date of a cached response is the time at which it was cached
        return middle - parsedate_to_datetime(answer.headers["date"]).timestamp() - age
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError):
        return None


def _answers(address: str) -> bool:
    """Whether the host and port of a multiaddr accept a TCP connection within DIAL_SECONDS."""
    parts = address.split("/")
    try:
        with socket.create_connection((parts[2], int(parts[4])), DIAL_SECONDS):
            return True
    except (OSError, ValueError, IndexError):
        return False


def doctor(
    data_dir: DataDir = None,
    port: Port = None,
    host: Host = None,
    genesis: GenesisSource = None,
    device: DeviceOption = None,
    as_json: AsJson = False,
) -> None:
    """Check everything that a node needs, from Python to its peers, and show every setting. Exit code 1 on a problem.

    If a node is running, the command shows the status of that node. Otherwise it checks the network itself.
    """
    import logging

    from neuroshard.config.loading import load_settings

    logging.getLogger("neuroshard").addHandler(logging.NullHandler())  # a problem is shown once, as a finding
    loaded = load_settings(given(data_dir=data_dir, port=port, host=host, genesis=genesis, device=device))
    case = _case_of(loaded)
    findings = [_examined(name, look, case) for name, look in _LOOKS]
    if as_json:
        facts = {"findings": [asdict(finding) for finding in findings], "settings": case.described}
        typer.echo(json.dumps(facts))
    else:
        for finding in findings:
            typer.echo(f"{'ok ' if finding.is_well else 'BAD'} {finding.subject:9} {finding.detail}")
            if finding.action:
                typer.echo(f"              {finding.action}")
        typer.echo("\nsettings of the running node:" if case.in_node else "\nsettings:")
        for key, facts in case.described.items():
            in_use = f", in use: {facts['in_use']}" if "in_use" in facts else ""
            typer.echo(f"    {key:28} {facts['value']!s:40} {facts['source']}{in_use}")
    if not all(finding.is_well for finding in findings):
        raise typer.Exit(ExitCode.REFUSED)


def _case_of(loaded: LoadedSettings) -> Case:
    from neuroshard.cli.client import connect
    from neuroshard.errors import NeuroShardError

    try:
        node = connect(loaded.settings.data_dir, None)
        return Case(loaded, node.get("/api/status"), node.get("/api/config"))
    except NeuroShardError:
        return Case(loaded, None)  # no node answers: the check of the port shows the reason


def _examined(name: str, look: Callable[[Case], Finding], case: Case) -> Finding:
    """Run a check. A NeuroShardError or ImportError becomes a finding."""
    from neuroshard.errors import NeuroShardError

    try:
        return look(case)
    except NeuroShardError as error:
        return Finding(name, is_well=False, detail=error.message, action=error.action)
    except ImportError as error:
        return Finding(name, is_well=False, detail=f"cannot be checked: {error}", action="Install NeuroShard again.")


_LOOKS: tuple[tuple[str, Callable[[Case], Finding]], ...] = (
    ("python", python),
    ("torch", torch),
    ("device", device),
    ("precision", precision),
    ("speed", speed),
    ("memory", memory),
    ("disk", disk),
    ("port", port),
    ("p2p port", p2p_port),
    ("nat", nat),
    ("peers", peers),
    ("autostart", autostart),
    ("token", token),
    ("data", data),
    ("clock", clock),
)
