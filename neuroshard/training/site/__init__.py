"""A site: one node that trains on several ranks, which are processes with a device each."""
