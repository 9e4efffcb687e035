"""The ranks of a site: their number, and the place of this process among them, from `--site` and the environment.

| launcher | variables | the ranks meet at |
| --- | --- | --- |
| none | - | a file in a folder of this user, on loopback |
| torchrun | RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT | MASTER_ADDR, MASTER_PORT |
| SLURM | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST, SLURM_JOB_ID | first host, 20000 + id % 20000 |
| Kubernetes | JOB_COMPLETION_INDEX, WORLD_SIZE, MASTER_ADDR, MASTER_PORT | MASTER_ADDR, MASTER_PORT |

With `--site off`, which is the default, the variables have no effect. A SLURM job of one task has no launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from neuroshard.errors import UsageError

MOST_RANKS = 1024
FIRST_SLURM_PORT = 20_000
SLURM_PORTS = 20_000
LAUNCHER_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})


@dataclass(frozen=True)
class SitePlan:
    """Number of ranks of a site, and the place of this process among them."""

    width: int | None  # number of ranks; None: as many as this computer has accelerators
    rank: int = 0
    local_rank: int = 0  # among the ranks of this computer: the index of the device
    launcher: str = ""  # that started the ranks; "": rank 0 starts the others
    address: str = ""  # at which rank 0 waits for the others; "": they meet at a file
    port: int = 0
    has_store: bool = False  # the launcher itself waits at the address

    @property
    def is_launched(self) -> bool:
        """Whether a launcher has started the ranks, so that only it can start them again."""
        return self.launcher != ""


def site_plan(setting: str, environment: Mapping[str, str]) -> SitePlan | None:
    """Read the setting `site` and a launcher's variables. Returns None for one process with one device.

    Raises UsageError if some of a launcher's variables are missing, or differ from the setting.
    """
    if setting == "off":
        return None
    wanted = None if setting == "auto" else int(setting)
    plan = _torchrun(environment) or _slurm(environment) or _kubernetes(environment)
    if plan is None:
        return None if wanted == 1 else SitePlan(wanted)
    if wanted is not None and wanted != plan.width:
        raise UsageError(
            f"--site {wanted} differs from the {plan.width} ranks that {plan.launcher} has started.",
            "Use --site auto under a launcher.",
        )
    return plan if plan.width != 1 else None


def _torchrun(environment: Mapping[str, str]) -> SitePlan | None:
    if not {"RANK", "LOCAL_RANK"} & environment.keys():
        return None
    values = _complete("torchrun", environment, sorted(LAUNCHER_VARIABLES))
    return _checked(
        SitePlan(
            _number(values, "WORLD_SIZE"),
            _number(values, "RANK"),
            _number(values, "LOCAL_RANK"),
            "torchrun",
            values["MASTER_ADDR"],
            _number(values, "MASTER_PORT"),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    )


def _slurm(environment: Mapping[str, str]) -> SitePlan | None:
    if "SLURM_PROCID" not in environment or environment.get("SLURM_NTASKS") == "1":
        return None
    names = ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_PROCID"]
    values = _complete("SLURM", environment, names)
    return _checked(
        SitePlan(
            _number(values, "SLURM_NTASKS"),
            _number(values, "SLURM_PROCID"),
            _number(values, "SLURM_LOCALID"),
            "SLURM",
            first_host(values["SLURM_JOB_NODELIST"]),
            FIRST_SLURM_PORT + _number(values, "SLURM_JOB_ID") % SLURM_PORTS,
        )
    )


def _kubernetes(environment: Mapping[str, str]) -> SitePlan | None:
    """A pod of an indexed Job. Without MASTER_ADDR the pods are nodes of their own."""
    if not {"JOB_COMPLETION_INDEX", "MASTER_ADDR"} <= environment.keys():
        return None
    names = ["JOB_COMPLETION_INDEX", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]
    values = _complete("Kubernetes", environment, names)
    width, rank = _number(values, "WORLD_SIZE"), _number(values, "JOB_COMPLETION_INDEX")
    return _checked(SitePlan(width, rank, 0, "Kubernetes", values["MASTER_ADDR"], _number(values, "MASTER_PORT")))


def _complete(launcher: str, environment: Mapping[str, str], names: list[str]) -> dict[str, str]:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise UsageError(
            f"{launcher} has started this process without {' and '.join(missing)}.",
            "Start all ranks with the launcher, or use --site N without one.",
        )
    return {name: environment[name] for name in names}


def _number(values: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,12}", values[name]):
        raise UsageError(f"{name} must be a number, not {values[name][:40]!r}.", "Start all ranks with the launcher.")
    return int(values[name])


def _checked(plan: SitePlan) -> SitePlan:
    if plan.width is None or not (plan.rank < plan.width <= MOST_RANKS and 0 < plan.port < 65_536):
        raise UsageError(
            f"{plan.launcher} has started rank {plan.rank} of {plan.width} at port {plan.port}.",
            f"A site has 1 to {MOST_RANKS} ranks, which count from 0.",
        )
    return plan


def first_host(nodes: str) -> str:
    """First host of a SLURM node list: `gpu03` of `gpu[03-05,9],cpu1`."""
    found = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodes)
    if found is None:
        raise UsageError(f"SLURM_JOB_NODELIST names no host: {nodes[:80]!r}.", "Start the ranks with srun.")
    return found[1] + (found[2] or "") + (found[3] or "")
