"""The node's server before there is a token: the same address and protections, and a short wizard instead of a node."""
