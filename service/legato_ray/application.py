"""The Ray Serve application: `serve run legato_ray.application:build`.

Ray places, restarts and scales servers. Calls do not pass through it: Envoy carries them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray import serve

from legato_ray.endpoints import Directory
from legato_ray.settings import Settings
from legato_ray.unit import Unit

NAMESPACE = "legato"
DIRECTORY = "legato-directory"
_REPEAT = 1.0  # seconds between two words to the directory
_NOTICE = 2.0
"""Seconds for writers and Envoy to find a new server. Only then it counts as ready for Ray, which
may take an old one away."""
_HEALTH_PERIOD = 1.0  # seconds; after three failures Ray replaces the replica
_LAST_SECONDS = 20.0  # beyond delay and grace, before Ray kills the replica


def directory() -> Any:
    """Return the cluster's directory, which outlives the application."""
    actor = ray.remote(Directory).options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    )
    return actor.remote()


class Server:
    """A replica: one `legato serve`, on the node where Ray placed it."""

    def __init__(self, settings: Settings) -> None:
        host = settings.host or ray.util.get_node_ip_address()
        self._unit = Unit(
            settings.serve_options,
            host=host,
            max_running=settings.max_running,
            drain_delay=settings.drain_delay,
            drain_grace=settings.drain_grace,
        )
        self._unit.wait_until_serving(settings.start_timeout)
        self._directory = directory()
        self._stopping = threading.Event()
        self._tell()
        time.sleep(_NOTICE)
        self._teller = threading.Thread(target=self._keep_telling, name="directory", daemon=True)
        self._teller.start()

    def check_health(self) -> None:
        """Raise for a server that ended or hangs; one whose engine is lost heals itself."""
        if not self._unit.is_alive():
            raise RuntimeError("the server has ended or does not answer")

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._unit.load()

    def info(self) -> dict[str, Any]:
        return {"address": self._unit.address, "pid": self._unit.pid}

    def __del__(self) -> None:
        """Ray's word that the replica is to go; again when Python forgets the object."""
        if not hasattr(self, "_teller"):
            return  # it never served
        self._stopping.set()
        self._teller.join()
        self._unit.stop()

    def _keep_telling(self) -> None:
        while not self._stopping.wait(_REPEAT):
            self._tell()
        self._directory.drop.remote(self._unit.address)

    def _tell(self) -> None:
        if self._unit.is_serving():
            self._directory.put.remote(self._unit.address, self._unit.health_address)
        else:
            self._directory.drop.remote(self._unit.address)


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application; `args` are those of `legato_ray.settings.Settings`."""
    settings = Settings.of(args)
    deployment = serve.deployment(Server).options(
        name="server",
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=5.0,
        graceful_shutdown_timeout_s=settings.drain_delay + settings.drain_grace + _LAST_SECONDS,
        max_surge_percent=settings.max_surge_percent,
        **_scale(settings),
    )
    return deployment.bind(settings)


def _scale(settings: Settings) -> dict[str, Any]:
    if settings.max_replicas == settings.num_replicas:
        return {"num_replicas": settings.num_replicas}
    policy = {
        "policy_function": "legato_ray.autoscaling:QueueSecondsPolicy",
        "policy_kwargs": {"target": settings.queue_seconds},
    }
    return {
        "autoscaling_config": {
            "min_replicas": settings.num_replicas,
            "initial_replicas": settings.num_replicas,
            "max_replicas": settings.max_replicas,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 5.0,
            "upscale_delay_s": settings.upscale_delay,
            "downscale_delay_s": settings.downscale_delay,
            "policy": policy,
        }
    }
