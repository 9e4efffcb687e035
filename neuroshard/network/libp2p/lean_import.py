"""Imports libp2p without the half of its 1,500 modules that no node uses: 30 MB and one or two seconds less.

libp2p imports all its transports, discoveries and certificate services with its first module. During that import the
unused modules are replaced by empty ones, whose names are classes without behaviour. A later import gets the real
ones.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = (
    "Crypto",  # RSA keys, which no node has; its import parses C
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
    """Leave unused modules out of the first import of libp2p within the block.

    A libp2p already imported stays as it is.
    """
    if "libp2p" in sys.modules:
        yield
        return
    finder = _EmptyModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        loaded = list(sys.modules.items())  # a copy: other threads import at the same time
        for name in [name for name, module in loaded if isinstance(module, _EmptyModule)]:
            del sys.modules[name]


class _EmptyModule(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


class _EmptyModules:
    """Finder and loader of empty modules."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        is_unused = any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED)
        return ModuleSpec(name, self, is_package=True) if is_unused else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None: ...
