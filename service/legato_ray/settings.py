"""The settings of the application."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_POSITIVE = ("num_replicas", "max_replicas", "max_running", "queue_seconds", "start_timeout")
_OWN_OPTIONS = (
    "--listen",
    "--health-listen",
    "--admin-listen",
    "--max-running",
    "--drain-delay",
    "--drain-grace",
    "--log-level",  # the address is read from the log
)


class InvalidSettings(ValueError):
    """Names the setting and what it may be."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Times are in seconds."""

    serve_options: tuple[str, ...] = ()
    """Options of `legato serve`."""
    host: str = ""
    """IP address to listen on, the same that Envoy connects to; empty: the node's."""
    num_replicas: int = 1
    """Servers at the start, and the fewest."""
    max_replicas: int = 0
    """Maximum replicas; 0: as many as `num_replicas`, without autoscaling."""
    max_surge_percent: int = 0
    """Servers beyond these while an update replaces them, in percent; needs room on the nodes."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_running: int = 16
    """As `--max-running`."""
    queue_seconds: float = 1.0
    """Predicted wait of a new request above which servers are added."""
    upscale_delay: float = 5.0
    downscale_delay: float = 300.0
    drain_delay: float = 2.0
    """As `--drain-delay`: Envoy finds out meanwhile."""
    drain_grace: float = 30.0
    """As `--drain-grace`."""
    start_timeout: float = 600.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """From the `args` of a Serve configuration, or NAME=VALUE words of `serve run`.

        Raises:
            InvalidSettings: A name is unknown or a value out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        read: dict[str, Any] = {}
        for name, value in values.items():
            if name not in fields:
                raise InvalidSettings(f"no setting {name!r}; there are {', '.join(fields)}")
            read[name] = _read(name, value, type(fields[name].default))
        settings = cls(**read)
        return dataclasses.replace(
            settings, max_replicas=settings.max_replicas or settings.num_replicas
        )

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            least = 0 if name == "max_replicas" else 1e-3
            if getattr(self, name) < least:
                raise InvalidSettings(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_replicas and self.max_replicas < self.num_replicas:
            raise InvalidSettings(
                f"max_replicas {self.max_replicas} is below num_replicas {self.num_replicas}"
            )
        for option in self.serve_options:
            if option.partition("=")[0] in _OWN_OPTIONS:
                raise InvalidSettings(f"serve_options must leave out {option}, which is set here")


def _read(name: str, value: Any, kind: type) -> Any:
    if kind is tuple:
        return tuple(value.split()) if isinstance(value, str) else tuple(map(str, value))
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise InvalidSettings(f"{name} must be of type {kind.__name__}, got {value!r}") from error
