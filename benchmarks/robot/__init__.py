"""A robot's camera in a rendered world: frames to a session, tracks back, and places in 3D."""

from benchmarks.robot.run import main

__all__ = ["main"]
