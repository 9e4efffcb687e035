"""The transformer, the family of its sizes, and their memory need.

This room does no I/O except for the memory probe.
"""
