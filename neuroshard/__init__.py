"""NeuroShard: ordinary computers pre-train one language model together."""

__version__ = "0.1.0"
