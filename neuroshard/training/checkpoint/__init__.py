"""Checkpoints: format, staging, store, schedule, writer thread, instance lock, export. No pickle is ever read."""
