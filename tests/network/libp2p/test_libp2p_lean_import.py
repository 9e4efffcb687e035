"""A node's network loads libp2p without its unused transports, and whoever wants these later gets them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import trio
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.network.libp2p import NetworkOptions, libp2p_network


def identity(number):
    wallet, key = Wallet.from_secret(TokenSecret("hex", bytes([number]) * 32)), NodeKey.from_seed(bytes([number]) * 32)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, expires_at=4e9))


async def main():
    options = NetworkOptions(host="127.0.0.1")
    async with libp2p_network(identity(1), options) as one, libp2p_network(identity(2), options) as other:
        await other.transport.connect(one.transport.addresses()[0])


trio.run(main)
print(sorted({"Crypto", "aioquic", "dns", "pycparser", "requests", "torch", "zeroconf", "httpx"} & set(sys.modules)))
from libp2p.security.secio.transport import Transport
from libp2p.transport.quic.transport import QUICTransport
print(QUICTransport.dial.__name__, Transport.secure_inbound.__name__)
"""


def test_what_no_node_uses_is_not_loaded() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["[]", "dial secure_inbound"]
