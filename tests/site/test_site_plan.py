"""The ranks that a launcher or `--site` asks for, and the refusal of ranks that do not fit together."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuroshard.config.settings import Settings
from neuroshard.errors import UsageError
from neuroshard.node import site_ranks
from neuroshard.training.site.commands import RankFacts
from neuroshard.training.site.plan import SitePlan, first_host, site_plan
from neuroshard.training.site.process_group import meet

ROOT = Path(__file__).parents[2]
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[03-04],x",
    "SLURM_JOB_ID": "24711",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("setting", "environment", "plan"),
    [
        ("off", TORCHRUN, None),
        ("1", {}, None),
        ("2", {}, SitePlan(2)),
        ("auto", {}, SitePlan(None)),
        ("auto", TORCHRUN, SitePlan(8, 3, 1, "torchrun", "gpu1", 29500)),
        ("8", TORCHRUN, SitePlan(8, 3, 1, "torchrun", "gpu1", 29500)),
        ("auto", TORCHRUN | SLURM, SitePlan(8, 3, 1, "torchrun", "gpu1", 29500)),
        ("auto", SLURM, SitePlan(8, 5, 1, "SLURM", "gpu03", 24711)),
        ("2", SLURM | {"SLURM_NTASKS": "1"}, SitePlan(2)),
        ("auto", KUBERNETES, SitePlan(2, 1, 0, "Kubernetes", "pod-0", 29400)),
        ("2", {"JOB_COMPLETION_INDEX": "1"}, SitePlan(2)),
    ],
)
def test_the_launcher_says_which_rank_this_is(setting: str, environment: dict[str, str], plan: SitePlan | None) -> None:
    assert site_plan(setting, environment) == plan


@pytest.mark.parametrize(
    ("setting", "environment", "words"),
    [
        ("auto", {"RANK": "0"}, "without LOCAL_RANK and MASTER_ADDR and MASTER_PORT and WORLD_SIZE"),
        ("auto", {key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"}, "without SLURM_LOCALID"),
        ("auto", {key: value for key, value in KUBERNETES.items() if key != "WORLD_SIZE"}, "without WORLD_SIZE"),
        ("4", TORCHRUN, "--site 4 differs from the 8 ranks"),
        ("auto", TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        ("auto", TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE must be a number"),
        ("auto", TORCHRUN | {"MASTER_PORT": "70000"}, "port 70000"),
    ],
)
def test_variables_that_do_not_fit_are_refused(setting: str, environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        site_plan(setting, environment)


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu1", "gpu1"), ("gpu[03-05,9],cpu1", "gpu03"), ("a,b", "a"), ("n[7]-x", "n7-x")]
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def devices(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_ranks, "devices_of", lambda kind: [None] * count if kind == "cuda" else [])


@pytest.mark.parametrize(
    ("device", "plan", "count", "expected"),
    [
        ("auto", SitePlan(None), 4, (4, "cuda")),
        ("cuda", SitePlan(2), 4, (2, "cuda")),
        ("auto", SitePlan(None), 1, None),
        ("cpu", SitePlan(3), 0, (3, "cpu")),
        ("auto", SitePlan(16, 9, 1, "torchrun", "a", 1), 2, (16, "cuda")),
        ("auto", SitePlan(16, 9, 5, "SLURM", "a", 1), 1, (16, "cuda")),  # SLURM shows each task its own GPU only
    ],
)
def test_devices_of_the_ranks(
    device: str, plan: SitePlan, count: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(count, monkeypatch)
    found = site_ranks.rank_devices(Settings(device=device, cpu_threads=4), plan)
    assert (found and (found.width, found.kind)) == expected


@pytest.mark.parametrize(
    ("device", "plan", "count", "words"),
    [
        ("auto", SitePlan(4), 2, "4 ranks needs 4 accelerators on this computer, which has 2"),
        ("auto", SitePlan(2), 0, "which has 0"),
        ("mps", SitePlan(2), 0, "cannot use mps"),
        ("cuda:1", SitePlan(2), 4, "names a kind and not cuda:1"),
        ("auto", SitePlan(16, 9, 5, "torchrun", "a", 1), 4, "needs 6 accelerators"),
    ],
)
def test_missing_devices_are_refused(
    device: str, plan: SitePlan, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(count, monkeypatch)
    with pytest.raises(UsageError, match=words):
        site_ranks.rank_devices(Settings(device=device), plan)


FACTS = RankFacts("1.0", "2.11", 2, "cpu")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (RankFacts("1.1", "2.11", 2, "cpu"), "NeuroShard 1.1 instead of 1.0"),
        (RankFacts("1.0", "2.12", 2, "cpu"), r"PyTorch 2\.12 instead of 2\.11"),
        (RankFacts("1.0", "2.11", 3, "cpu"), "WORLD_SIZE 3 instead of 2"),
        (RankFacts("1.0", "2.11", 2, "cuda"), "device cuda instead of cpu"),
    ],
)
def test_ranks_that_differ_are_refused_on_both_sides(other: RankFacts, words: str, tmp_path: Path) -> None:
    refused = list[str]()

    def rank_1() -> None:
        with pytest.raises(UsageError) as raised:
            meet(SitePlan(2, 1), other, tmp_path, 20, lambda: None)
        refused.append(str(raised.value))

    thread = threading.Thread(target=rank_1)
    thread.start()
    with pytest.raises(UsageError, match=f"Rank 1 of the site has {words}"):
        meet(SitePlan(2, 0), FACTS, tmp_path, 20, lambda: None)
    thread.join(20)
    assert len(refused) == 1
    assert refused[0].startswith("Rank 0 of the site has")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# as `neuroshard`, but a normal shutdown of the interpreter aborts the process; transfers with a lost rank may do that
ABORTING = "import atexit, os\nfrom neuroshard.cli.main import main\natexit.register(os.abort)\nmain()"


def launched(folder: Path, *options: str, program: Sequence[str] = ("-m", "neuroshard")) -> list[subprocess.Popen[str]]:
    """Two processes with one command line and torchrun's variables."""
    (folder / "text").mkdir()
    for number in range(4):
        (folder / f"text/{number}.txt").write_text(f"Line {number} of a text about ranks. " * 4000)
    paths = ["--headless", "--port", "0", "--data-dir", str(folder / "node"), "--text", str(folder / "text")]
    node = ["demo", "--site", "auto", "--device", "cpu", "--cpu-threads", "1"]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, *program, *node, *paths, *options],
            env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]


@pytest.mark.process
def test_two_processes_of_a_launcher_are_one_node(tmp_path: Path) -> None:
    """Rank 0 becomes the node, and rank 1 ends cleanly with it."""
    processes = launched(tmp_path, "--steps", "3")
    try:
        shown = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], shown
    assert "This node computes on 2 ranks (cpu)." in shown[0]
    assert "steps          3" in shown[0]
    assert shown[1] == ""  # no node, no dashboard, no data folder


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("killed", "words"),
    [
        (1, "The launcher must start all ranks again."),
        (0, "Rank 1 has lost rank 0: the connection has ended.\n  Start all ranks again."),
    ],
)
def test_the_end_of_a_launched_rank_ends_the_other_with_exit_code_7(killed: int, words: str, tmp_path: Path) -> None:
    """The launcher sees the code and starts all ranks again; rank 0 has saved its state before."""
    processes = launched(tmp_path, program=("-c", ABORTING))
    try:
        output = processes[0].stdout
        assert output is not None
        assert any("This node computes on 2 ranks (cpu)." in line for line in output)  # at the end of the output: False
        processes[killed].kill()
        shown = processes[1 - killed].communicate(timeout=200)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    assert processes[1 - killed].returncode == 7, shown
    assert words in shown
    assert "Traceback" not in shown
    saved = list((tmp_path / "node").rglob("step-*.json"))
    assert bool(saved) == (killed == 1)


@pytest.mark.process
def test_too_many_ranks_are_2_with_one_sentence(tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this computer has an accelerator")
    command = [sys.executable, "-m", "neuroshard", "demo", "--headless", "--port", "0", "--data-dir", str(tmp_path)]
    ended = subprocess.run([*command, "--site", "2"], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "A site of 2 ranks needs 2 accelerators on this computer, which has 0." in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (7, "requeue 4711\n"), (5, "")])
def test_the_slurm_job_requeues_after_exit_code_7(code: int, requeued: str, tmp_path: Path) -> None:
    record, queue = tmp_path / "record", tmp_path / "queue"
    queue.write_text("")
    programs = {
        "srun": f'#!/bin/sh\nprintf "%s\\n" "$@" > {record}\nexit {code}\n',
        "scontrol": f'#!/bin/sh\necho "$@" >> {queue}\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "8",
    }
    script = ROOT / "installers/slurm/site.sbatch"
    ended = subprocess.run(["bash", str(script)], env=variables, timeout=20, check=False)
    assert (ended.returncode, queue.read_text()) == (code, requeued)
    options = record.read_text().split()
    assert options[:5] == ["--kill-on-bad-exit=1", "neuroshard", "--headless", "--site", "auto"]


def test_the_jobset_gives_each_pod_a_whole_plan() -> None:
    jobset, policy, claim = yaml.safe_load_all((ROOT / "installers/kubernetes/jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert container["args"][1:3] == ["--site", "auto"]
    plan = site_plan("auto", variables | {"JOB_COMPLETION_INDEX": "1"})
    name = jobset["metadata"]["name"]
    host = f"{name}-{jobset['spec']['replicatedJobs'][0]['name']}-0-0.{name}"  # as JobSet names pod 0
    assert plan == SitePlan(job["completions"], 1, 0, "Kubernetes", host, 29400)
    assert (job["parallelism"], job["completionMode"]) == (job["completions"], "Indexed")
    assert replace(plan, rank=0).rank == 0
    assert policy["spec"]["podSelector"]["matchLabels"] == job["template"]["metadata"]["labels"]
    assert claim["metadata"]["name"] == pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
