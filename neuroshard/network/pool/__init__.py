"""Bodies over many connections: 1 to 16 of them to a peer as the line needs, each resumable by the others."""

from neuroshard.network.pool.options import NotDeliveredError, PeerTraffic, PoolOptions
from neuroshard.network.pool.pool import BulkPool, bulk_pool

__all__ = ["BulkPool", "NotDeliveredError", "PeerTraffic", "PoolOptions", "bulk_pool"]
