"""Logging set-up, the log ring, counters and CPU shares of threads. This room only observes the node."""
