"""The guide to a first public run, typed by people on computers of their own, behind home routers.

Real: the programs, their network stacks, nginx with the documented file, and https. Simulated: the routers and the
internet between them (`tests.worlds.lan`), and the authority that signed the certificate.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.docs.test_documented_commands import FOLLOWED, blocks_of
from tests.docs.test_first_public_run import ORGANISER_TOKEN, STRANGER_TOKEN, Person, person
from tests.worlds.lan import internet, is_possible
from tests.worlds.processes import until
from tests.worlds.system_programs import nginx_path

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="needs root, network namespaces and TUN devices"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="the guide speaks of curl"),
    pytest.mark.skipif(nginx_path() is None, reason="nginx is not installed (Debian package nginx-light)"),
]
DOCUMENTED = FOLLOWED.with_name("nginx-organiser.conf")
PUBLIC = "1.2.3"  # only ever inside the namespaces
SERVER_IP, HOME_IP = f"{PUBLIC}.1", f"{PUBLIC}.10"
LONGEST_SECONDS = 300.0
_MAIN = """
daemon off; master_process off; pid {work}/nginx.pid; error_log {work}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log {work}/access.log;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    {server}
}}
"""


def write_certificate(folder: Path, host: str) -> Path:
    """A key and its certificate for an IP address, which signs itself; the file that contains both."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .sign(key, SHA256())
    )
    file = folder / "certificate.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(made.public_bytes(Encoding.PEM) + private)
    return file


def visitor(home: Path, token: str, place: str, certificate: Path) -> Person:
    """Somebody whose computer trusts the authority that signed a certificate."""
    return replace(person(home, token, place), variables={"SSL_CERT_FILE": str(certificate)})


@contextmanager
def proxy(organiser: Person, certificate: Path) -> Iterator[None]:
    """Nginx on the organiser's computer, with the file that the guide names."""
    program, work = nginx_path(), organiser.home / "nginx"
    assert program is not None
    work.mkdir()
    server = DOCUMENTED.read_text(encoding="utf-8")
    server, changed = re.subn(r"/etc/letsencrypt/\S+\.pem", str(certificate), server)
    assert changed == 2
    (work / "nginx.conf").write_text(_MAIN.format(work=work, server=server), encoding="utf-8")
    with organiser.leaves_running(f"{program} -p {work} -c {work}/nginx.conf -e {work}/error.log", "nginx.log"):
        yield


def answer_of(someone: Person, path: str) -> dict[str, Any]:
    """What a person's node answers at an address of its API; nothing while it does not."""
    secret = next(someone.home.rglob("api-secret"), None)
    if secret is None:
        return {}
    header = f"Authorization: Bearer {secret.read_text(encoding='ascii').strip()}"
    asked = someone.command("-c", f"curl -sf -m 20 -H '{header}' http://127.0.0.1:8000{path}")
    ran = subprocess.run(asked, env=someone.environment, capture_output=True, text=True, check=False)
    return dict(json.loads(ran.stdout)) if ran.returncode == 0 else {}


@dataclass
class Session:
    """A run that an organiser opens to strangers. `lines` says when each command had its effect."""

    organiser: Person
    url: str
    certificate: Path
    run: str = ""
    lines: list[str] = field(default_factory=list[str])
    began: float = field(default_factory=time.monotonic)

    def note(self, line: str) -> None:
        """Remember what happened now, with the seconds since the beginning."""
        self.lines.append(f"{time.monotonic() - self.began:6.1f} s  {line}")

    def typed(self, text: str) -> str:
        """A command of the guide with the words of this run."""
        return text.strip().replace("RUN", self.run).replace("URL", self.url)

    @contextmanager
    def opened(self, texts: Path, config: str = "") -> Iterator[None]:
        """The organiser's commands, in the order of the guide; `config` adds to the file of the run."""
        create, node, organise, *_ = (block.text for block in blocks_of(FOLLOWED))
        shutil.copytree(texts, self.organiser.home / "my-texts")
        (shown,) = re.findall(r"^```toml\n(.*?)^```$", FOLLOWED.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        (self.organiser.home / "run.toml").write_text(shown + config)
        (self.run,) = re.findall(r"Signed: run ([0-9a-f]{64})", self.organiser.types(create))
        self.note(f"organiser: {create.strip()}")
        with ExitStack() as running:
            running.enter_context(self.organiser.leaves_running(self.typed(node), "node.log"))
            until("an address", lambda: bool(network_of(self.organiser).get("addresses")), LONGEST_SECONDS)
            self.note(f"organiser: {self.typed(node)}")
            running.enter_context(proxy(self.organiser, self.certificate))
            served = f"{self.typed(organise)} --public-url {self.url} --trust-proxy"
            running.enter_context(self.organiser.leaves_running(served, "organiser.log"))
            until("the organiser", self.is_up, LONGEST_SECONDS)
            self.note(f"organiser: {served}")
            yield

    def is_up(self) -> bool:
        asks = f"curl -sf -m 20 -o /dev/null --cacert {self.certificate} {self.url}/health"
        asked = self.organiser.command("-c", asks)
        return subprocess.run(asked, env=self.organiser.environment, check=False).returncode == 0

    @contextmanager
    def joined(self, stranger: Person) -> Iterator[None]:
        """The stranger's one line. A failure within the block shows what everybody saw."""
        line = self.typed(next(block.text for block in blocks_of(FOLLOWED) if "--organiser" in block.text))
        self.note(f"{stranger.home.name} types: {line}")
        with stranger.leaves_running(line, "node.log") as log:
            try:
                yield
            except AssertionError as error:
                error.add_note("\n".join(self.lines))
                error.add_note(log.read_text())
                error.add_note(json.dumps(network_of(stranger)))
                raise

    def shows(self, path: str) -> dict[str, Any]:
        """What the organiser's page shows."""
        facts: dict[str, Any] = json.loads(self.organiser.types(f"curl -sf http://127.0.0.1:8800{path}"))
        return facts


def network_of(someone: Person) -> dict[str, Any]:
    return dict(answer_of(someone, "/api/status").get("network", {}))


def id_of(someone: Person) -> str:
    return str(answer_of(someone, "/api/status").get("node_id", ""))


def certified(someone: Person) -> list[set[str]]:
    """The nodes whose parts are in each certified value of a round of which somebody's node knows."""
    return [
        {member["node_id"] for member in record["members"] if member["part"] == "accepted"}
        for record in answer_of(someone, "/api/rounds").get("rounds", [])
        if record["result"] == "completed" and record["certificate"]
    ]


def way_to(peer: Person, someone: Person) -> str | None:
    """How somebody's node is connected with a peer's."""
    known = {each["node_id"]: each["connection"] for each in answer_of(someone, "/api/peers").get("peers", [])}
    return known.get(id_of(peer))


def test_a_stranger_behind_a_router_trains_in_the_run_of_a_home(small_text: Path, tmp_path: Path) -> None:
    certificate = write_certificate(tmp_path, HOME_IP)
    with internet("nshome", PUBLIC) as homes, ExitStack() as running:
        homes.routers["left"].speaks_nat_pmp = True
        homes.routers["left"].forwards[443] = 443  # its owner told the router
        organiser = person(tmp_path / "organiser", ORGANISER_TOKEN, homes.name("left"))
        stranger = visitor(tmp_path / "stranger", STRANGER_TOKEN, homes.name("right"), certificate)
        session = Session(organiser, f"https://{HOME_IP}", certificate)
        running.enter_context(session.opened(small_text))
        running.enter_context(session.joined(stranger))
        until("a step", lambda: answer_of(stranger, "/api/status").get("training", {}).get("steps", 0) > 0)
        session.note("the stranger trains")
        both = {id_of(organiser), id_of(stranger)}
        for someone in (organiser, stranger):
            until("a certified round of both", lambda one=someone: both in certified(one), LONGEST_SECONDS)
        session.note("a round of both is certified")
        until("the page", lambda: session.shows("/api/run")["participants_ever"] == 2, LONGEST_SECONDS)
        session.note("the page shows it")
        until("reports", lambda: session.shows("/api/run")["unreachable_nodes"] == 1)
        assert session.shows("/api/run")["reachable_nodes"] == 0
        board = {entry["wallet"]: entry for entry in session.shows("/api/leaderboard")["wallets"]}
        assert board[json.loads(stranger.types("neuroshard wallet show --json"))["wallet_id"]]["rounds"] > 0
        # the organiser called, and the router let nobody in
        assert network_of(stranger)["reachable"] is False
        assert homes.routers["right"].dropped > 0
        assert homes.routers["right"].forwards == {}
        assert {shard["origin"] for shard in answer_of(stranger, "/api/data")["data"]["shards"]} - {None} == {"node"}
        assert "were downloaded from node" in (stranger.home / "node.log").read_text()
        assert way_to(organiser, stranger) == "direct"


@pytest.mark.long
def test_strangers_behind_routers_meet_through_the_organiser(small_text: Path, tmp_path: Path) -> None:
    certificate = write_certificate(tmp_path, SERVER_IP)
    with internet("nsmeet", PUBLIC) as homes, ExitStack() as running:
        organiser = person(tmp_path / "organiser", ORGANISER_TOKEN, homes.name("relay"))
        strangers = [
            visitor(tmp_path / home, f"{number:02x}" * 32, homes.name(home), certificate)
            for number, home in enumerate(("left", "right"), 11)
        ]
        session = Session(organiser, f"https://{SERVER_IP}", certificate)
        running.enter_context(session.opened(small_text, "inner_steps = 20\n"))
        for stranger in strangers:
            running.enter_context(session.joined(stranger))
        for one, other in (strangers, strangers[::-1]):
            until("the other's node", lambda one=one, other=other: is_met(one, other), LONGEST_SECONDS)
        session.note("the strangers are connected")
        for each in strangers:
            until("its certified round", lambda one=each: is_in_a_round(one, organiser), LONGEST_SECONDS)
        session.note("rounds of both with others are certified")
        for each in strangers:
            assert network_of(each)["reachable"] is False
            assert any("/p2p-circuit/" in address for address in network_of(each)["addresses"])
            assert "no longer answers" not in (each.home / "node.log").read_text()


def is_in_a_round(someone: Person, teller: Person) -> bool:
    """Whether a node's part is in a certified round with others, as another one's node reports."""
    return any(id_of(someone) in nodes and len(nodes) > 1 for nodes in certified(teller))


def is_met(someone: Person, other: Person) -> bool:
    """Whether two nodes behind routers are connected, after both opened theirs."""
    return bool(network_of(other)) and way_to(other, someone) == "punched"
