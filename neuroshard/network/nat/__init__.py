"""Ports at home routers: NAT-PMP and UPnP port mapping, and the external addresses of a node."""
