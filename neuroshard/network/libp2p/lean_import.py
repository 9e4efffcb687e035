"""Imports libp2p without what no node of ours uses of it: that is half of its 1,500 modules, 30 MB and a second or two.

libp2p imports all its transports, discoveries and certificate services with its first module. Here the unused ones are
empty while it does: their names are classes that cannot do anything. Whoever imports them later gets the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = (
    "Crypto",  # RSA keys, which no node has; it parses C to load its own
    "aioquic",
    "libp2p.discovery.bootstrap",
    "libp2p.discovery.mdns",
    "libp2p.discovery.upnp",
    "libp2p.peer.persistent",
    "libp2p.rcmgr.prometheus_exporter",
    "libp2p.relay.circuit_v2.discovery",
    "libp2p.relay.circuit_v2.protocol",
    "libp2p.relay.circuit_v2.transport",
    "libp2p.security.secio",
    "libp2p.security.tls",
    "libp2p.transport.quic",
    "libp2p.transport.websocket",
    "multiaddr.resolvers",
)


@contextmanager
def lean_libp2p() -> Generator[None]:
    """Within the block the first import of libp2p leaves out what is unused; a libp2p that is there stays as it is."""
    if "libp2p" in sys.modules:
        yield
        return
    finder = _EmptyModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        loaded = list(sys.modules.items())  # a copy: other threads import meanwhile
        for name in [name for name, module in loaded if isinstance(module, _EmptyModule)]:
            del sys.modules[name]


class _EmptyModule(ModuleType):
    """Has every name, as a class of its own."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


class _EmptyModules:
    """Finder and loader of empty modules."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Of what is unused; None for everything else."""
        is_unused = any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED)
        return ModuleSpec(name, self, is_package=True) if is_unused else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty one."""
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing."""
