"""Genesis data: its format, where it comes from, the local cache, and which window of it a node trains on next."""
