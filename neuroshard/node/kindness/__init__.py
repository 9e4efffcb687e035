"""How a node gives way to its owner: what is looked at, what follows from it, and the task that obeys.

`policy` decides and is pure; `sensing` looks at this computer; `watch` lives beside the training.
"""
