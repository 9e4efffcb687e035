"""Files for servers: image, compose, Kubernetes, SLURM and the release, each executed as far as this computer can."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from benchmarks.node_process import NodeProcess, free_port, running_node
from neuroshard.config.loading import load_settings
from neuroshard.runs.invited_settings import text_of

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "installers/docker"
TOKEN_PLACE = "/run/secrets/neuroshard-token"


def module(path: Path) -> ModuleType:
    """A script of `installers`, which are not a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


rootfs = module(DOCKER / "rootfs.py")
STEPS: list[tuple[str, str]] = list(rootfs.instructions((DOCKER / "Dockerfile").read_text(encoding="utf-8")))
VARIABLES = dict(rest.split("=", 1) for word, rest in STEPS if word == "ENV")


def last(word: str) -> str:
    return next(rest for found, rest in reversed(STEPS) if found == word)


def test_the_image_is_not_root_and_takes_its_token_from_a_file() -> None:
    assert last("USER") == "10001:10001"
    assert last("VOLUME") == VARIABLES["NEUROSHARD_DATA_DIR"] == "/data"
    assert json.loads(last("CMD")) == ["--headless", "--token-file", TOKEN_PLACE]
    assert not [rest for word, rest in STEPS if word in {"ARG", "ENV"} and re.search("TOKEN|SECRET", rest)]
    assert {word for word, _ in STEPS} <= {
        *("FROM", "ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "EXPOSE", "STOPSIGNAL"),
        *("HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    assert all(path.exists() for path in rootfs.copied_sources())
    settings = load_settings({}, {name: value for name, value in VARIABLES.items() if name.startswith("NEUROSHARD_")})
    assert (settings.settings.host, settings.settings.p2p_port) == ("0.0.0.0", 4001)


def health(port: int) -> subprocess.CompletedProcess[str]:
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert command[1] == "/opt/neuroshard/healthcheck.py"
    return subprocess.run(
        [sys.executable, str(DOCKER / "healthcheck.py")],
        env={**os.environ, "NEUROSHARD_PORT": str(port), "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_of_the_image_starts_a_node_that_is_healthy_and_stops_well(
    tmp_path: Path, quick: list[str]
) -> None:
    (tmp_path / "token").write_text("a token that is long enough for this\n")
    port, data = free_port(), tmp_path / "data"
    command = [value.replace(TOKEN_PLACE, str(tmp_path / "token")) for value in json.loads(last("CMD"))]
    variables = {name: value for name, value in VARIABLES.items() if name.startswith(("NEUROSHARD_", "PYTHON"))}
    variables |= {"NEUROSHARD_DATA_DIR": str(data), "NEUROSHARD_PORT": str(port), "NEUROSHARD_P2P_HOST": "127.0.0.1"}
    variables |= {"NEUROSHARD_HOST": "127.0.0.1", "NEUROSHARD_P2P_PORT": "0"}  # tests listen on loopback only
    assert health(port).returncode == 1
    process = subprocess.Popen([sys.executable, "-m", "neuroshard", *command, *quick], env=os.environ | variables)
    try:
        until = time.monotonic() + 120
        while health(port).returncode != 0:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.5)
        process.send_signal(getattr(signal, last("STOPSIGNAL")))
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_compose_has_a_node_prometheus_and_grafana() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services: dict[str, dict[str, Any]] = compose["services"]
    node = services["neuroshard"]
    assert (DOCKER / node["build"]["context"] / node["build"]["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    assert node["secrets"] == list(compose["secrets"]) == [TOKEN_PLACE.rsplit("/", 1)[1]]
    assert node["read_only"] is True
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["4001:4001"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 4
    assert [name for name in files if not (DOCKER / name).exists()] == []
    assert {mount for mount in mounts if not mount.startswith(".")} == set(compose["volumes"])
    scrape = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]
    assert services["prometheus"]["network_mode"] == "service:neuroshard"  # so that it may ask for localhost
    assert scrape["static_configs"] == [{"targets": ["localhost:8000"]}]
    assert scrape["authorization"]["credentials_file"] in services["read-token"]["entrypoint"][2]
    source = yaml.safe_load((DOCKER / "grafana/datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://neuroshard:9090"
    folder = yaml.safe_load((DOCKER / "grafana/dashboards.yaml").read_text())["providers"][0]["options"]["path"]
    assert any(mount.endswith(f"{folder}/neuroshard.json:ro") for mount in services["grafana"]["volumes"])


def test_kubernetes_runs_the_image_as_the_image_runs_itself() -> None:
    service, node = yaml.safe_load_all((ROOT / "installers/kubernetes/neuroshard.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (node["apiVersion"], node["kind"]) == ("apps/v1", "StatefulSet")
    assert node["spec"]["serviceName"] == service["metadata"]["name"]
    pod = node["spec"]["template"]
    assert pod["metadata"]["labels"] == node["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    security = pod["spec"]["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == last("USER")
    (container,) = pod["spec"]["containers"]
    token = next(mount for mount in container["volumeMounts"] if mount["name"] == "token")
    assert container["args"] == ["--headless", "--token-file", f"{token['mountPath']}/neuroshard-token"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    health = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert container["livenessProbe"]["exec"]["command"] == container["startupProbe"]["exec"]["command"] == health
    claims = [claim["metadata"]["name"] for claim in node["spec"]["volumeClaimTemplates"]]
    named = {volume["name"] for volume in pod["spec"]["volumes"]} | set(claims)
    assert {mount["name"] for mount in container["volumeMounts"]} == named
    assert {str(port["containerPort"]) for port in container["ports"]} == set(last("EXPOSE").split())


SRUN = """#!/bin/bash
printf '%s\\n' "$@" "invite=$NEUROSHARD_INVITE" > "$RECORD"
trap 'echo TERM >> "$RECORD"; exit 0' TERM
while :; do sleep 0.1; done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
def test_the_slurm_job_starts_a_node_and_passes_the_signal_on(tmp_path: Path) -> None:
    script = ROOT / "installers/slurm/node.sbatch"
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "neuroshard").mkdir()
    (tmp_path / "neuroshard/invitation").write_text("neuroshard://join/CODE\n")
    record = tmp_path / "record"
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RECORD": str(record),
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_MEM_PER_NODE": "32000",
    }
    job = subprocess.Popen(["bash", str(script)], env=variables)
    until = time.monotonic() + 20
    while not record.exists() or "invite=" not in record.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    job.terminate()
    assert job.wait(20) == 0
    program, *options, invite, ended = record.read_text().splitlines()
    folder = f"{tmp_path}/neuroshard"
    # The program gets the place of the invitation: neither its arguments nor its environment contain a secret.
    assert (program, invite, ended) == ("neuroshard", f"invite={folder}/invitation", "TERM")
    assert text_of(invite.removeprefix("invite=")) == "neuroshard://join/CODE\n"
    expected = f"--headless --data-dir {folder}/data --token-file {folder}/token --cpu-threads 8 --port 24711"
    assert options == [*expected.split(), "--memory", "28800"]
    assert Path(folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs the right to mount")
def test_without_a_writable_folder_the_node_says_so(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "token").write_text("a token that is long enough for this\n")
    mount = f'mount -t tmpfs -o ro tmpfs {tmp_path}/data && exec "$@"'
    command = [sys.executable, "-m", "neuroshard", "--headless", "--token-file", str(tmp_path / "token")]
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *command, "--data-dir", str(tmp_path / "data")],
        env=os.environ | {"NEUROSHARD_P2P_HOST": "127.0.0.1", "NEUROSHARD_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 5, ended.stderr
    assert f"{tmp_path}/data" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with 700 MB, as a container has one."""
    for parent, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(parent) / f"neuroshard-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(700_000_000))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        yield group
        until = time.monotonic() + 10
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < until:
            time.sleep(0.1)
        group.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_container_that_is_killed_at_its_memory_limit_resumes(
    memory_group: Path, tmp_path: Path, quick: list[str], saving_often: Mapping[str, str]
) -> None:
    """The kernel's kill for memory is SIGKILL. Before it, the node stays below the limit that it has measured."""
    place = ("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh")
    flags = [flag for flag in quick if flag not in {"--memory", "500"}]

    def node() -> Any:
        return running_node(tmp_path / "node", flags, place=place, variables=saving_often, fresh=True)

    with node() as first:
        assert isinstance(first, NodeProcess)
        status = first.wait_for("checkpoint", lambda status: status["checkpoints"]["last_saved_step"] is not None)
        assert "control group" in status["memory"]["limit_source"]
        assert status["memory"]["peak_mb"] <= status["memory"]["limit_mb"] <= 700
        first.process.kill()
        first.process.wait(10)
    saved = status["checkpoints"]["last_saved_step"]
    with node() as second:
        again = second.wait_for("steps", lambda status: status["training"]["steps"] > saved)
        assert again["run"]["run_id"] == status["run"]["run_id"]


def test_the_sums_describe_the_release(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "installers"))
    release = module(ROOT / "installers/build_release.py")
    (tmp_path / "a.deb").write_bytes(b"a")
    (tmp_path / "b.whl").write_bytes(b"b")
    release.write_sums(tmp_path)
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "a.deb").write_bytes(b"changed")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


@pytest.mark.installers
@pytest.mark.timeout(3_600)
def test_the_root_file_system_of_the_image_is_at_most_1_2_gb(tmp_path: Path) -> None:
    """NEUROSHARD_DEBIAN names a folder that debootstrap filled."""
    base = Path(os.environ["NEUROSHARD_DEBIAN"])
    builder = rootfs.Builder(base, tmp_path, {}, ())
    root = builder.build((DOCKER / "Dockerfile").read_text(encoding="utf-8"), {})
    assert rootfs.size_of(root) <= 1_200_000_000
    version = ["chroot", "--userspec=10001:10001", str(root), "/opt/neuroshard/bin/neuroshard", "--version"]
    assert subprocess.run(version, capture_output=True, text=True, check=True).stdout.startswith("neuroshard ")
