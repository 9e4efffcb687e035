"""Run by another Python that has hivemind: seconds of a store into its DHT and of a get from another peer.

Prints one JSON object. All its processes listen on loopback only; nothing asks a router for a port.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import hivemind  # type: ignore[import-not-found]
from hivemind.dht import DHT  # type: ignore[import-not-found]
from hivemind.utils.timed_storage import get_dht_time  # type: ignore[import-not-found]

from benchmarks.hivemind_loopback import LOOPBACK

RECORD_SECONDS = 3600
RECORD = "x" * 1500  # as long as an announcement


def main() -> None:
    """Arguments: how many peers, and how many records."""
    peer_count, record_count = int(sys.argv[1]), int(sys.argv[2])
    peers = [DHT(start=True, **LOOPBACK)]
    while len(peers) < peer_count:
        known = [str(address) for address in peers[0].get_visible_maddrs()]
        peers.append(DHT(initial_peers=known, start=True, **LOOPBACK))
    stores, gets = [], []
    for number in range(-2, record_count):  # the first two open connections
        keeper, asker = peers[number % peer_count], peers[(number + peer_count // 2) % peer_count]
        begun = time.perf_counter()
        if not keeper.store(f"record {number}", RECORD, expiration_time=get_dht_time() + RECORD_SECONDS):
            raise ValueError("a record was not stored")
        stored = time.perf_counter()
        found = asker.get(f"record {number}", latest=True)  # asks others, although it may keep the record itself
        got = time.perf_counter()
        if found is None or found.value != RECORD:
            raise ValueError("a record was not found")
        if number >= 0:
            stores.append(stored - begun)
            gets.append(got - stored)
    facts = {"put": median(stores), "got": median(gets), "peers": peer_count, "version": hivemind.__version__}
    print(json.dumps(facts), flush=True)
    for peer in peers:
        peer.shutdown()


if __name__ == "__main__":
    main()
