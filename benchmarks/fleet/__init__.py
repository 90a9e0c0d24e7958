"""A fleet of simulated engines in virtual time: routing, autoscaling, failures and their costs."""

from benchmarks.fleet.run import main

__all__ = ["main"]
