"""The node on the stand-in for rclpy, before a real server."""

from __future__ import annotations

from tests.ros2 import standin

standin.install()

from tests.e2e.conftest import server  # noqa: E402, F401 - one server of legato-tiny
