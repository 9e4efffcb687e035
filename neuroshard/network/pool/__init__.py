"""Direct connections for bulk tensors: TLS 1.3 between node keys, 1 to 16 of them to a peer as the line needs."""

from neuroshard.network.pool.options import Endpoint, NotDeliveredError, PeerTraffic, PoolOptions
from neuroshard.network.pool.pool import BulkPool, bulk_pool

__all__ = ["BulkPool", "Endpoint", "NotDeliveredError", "PeerTraffic", "PoolOptions", "bulk_pool"]
