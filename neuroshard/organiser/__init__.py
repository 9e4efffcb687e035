"""The organiser of a run: it admits nodes, counts them by stage, and keeps a queue. One process with one database."""
