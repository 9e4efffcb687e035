"""Logging set-up, the log ring, counters and CPU shares of threads. Nothing here decides anything."""
