"""Faults of the network, of processes and of callers, as clients see them."""
