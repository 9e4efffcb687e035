"""The nodes of a run as one node sees them: handshake, reports, failure detector and the view of the swarm.

Import from the modules. None of them needs PyTorch.
"""
