"""Devices and processes of the engines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
from legato_engine.client.engine_client import EngineClient, EngineLimits, require_files
from legato_engine.client.recovery import RefusedRequests
from legato_engine.config import EngineConfig
from legato_engine.errors import InvalidField

from legato_service.config import ServiceConfig

ALL = "all"
"""Every GPU that CUDA shows to this process."""

_CPU = "cpu"
_NAME = re.compile(r"cpu|cuda(:\d{1,3})?")
_COUNT_PROGRAM = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(0 if failed else count.value)
"""
_COUNT_TIME = 60.0  # seconds; the driver of a large host takes a few


def num_gpus() -> int:
    """Count the GPUs as CUDA does, in a process of its own: the driver's state is not for here."""
    try:
        found = subprocess.run(
            (sys.executable, "-c", _COUNT_PROGRAM),
            capture_output=True,
            timeout=_COUNT_TIME,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # there is no driver
        return 0
    return int(found.stdout)


def parse_devices(text: str, count: Callable[[], int] = num_gpus) -> tuple[str, ...]:
    """Return the devices that `--devices` names; only `cpu` may be named again.

    Raises:
        InvalidField: a name is unknown or named twice, or there is no GPU for `all`.
    """
    if text == ALL:
        names = tuple(f"cuda:{number}" for number in range(count()))
        if not names:
            raise InvalidField("all: no CUDA GPU was found", field="devices")
        return names
    names = tuple("cuda:0" if each == "cuda" else each for each in text.split(","))
    for each in names:
        if _NAME.fullmatch(each) is None:
            raise InvalidField(
                f"unknown device {each!r}; use all, or cpu and cuda:N with commas between",
                field="devices",
            )
        if each != _CPU and names.count(each) > 1:
            raise InvalidField(f"{each} is named twice; one engine uses a GPU", field="devices")
    return names


def engine_configs(config: EngineConfig, devices: Sequence[str]) -> tuple[EngineConfig, ...]:
    """Return the configuration of each engine; without `devices` one uses that of `config`.

    Engines on the CPU share its cores.
    """
    if not devices:
        return (config,)
    num_cores = len(os.sched_getaffinity(0))
    threads = config.threads or max(1, num_cores // max(1, devices.count(_CPU)))
    return tuple(
        msgspec.structs.replace(
            config, device=each, threads=threads if each == _CPU else config.threads
        )
        for each in devices
    )


# ---------------------------------------------------------------- processes

_COMMAND = (sys.executable, "-m", "legato_engine.core.process")


def make_engines(
    config: ServiceConfig,
    *,
    command: Sequence[str] = _COMMAND,
    limits: EngineLimits | None = None,
) -> tuple[EngineClient, ...]:
    """Return a client for each device, which starts `command` there. Needs a running event loop.

    Raises:
        InvalidField: a device is unknown, a file is missing, or the temporary folder takes no
            sockets.
    """
    require_files(config.engine)
    devices = parse_devices(config.devices) if config.devices else ()
    refused = RefusedRequests()
    return tuple(
        EngineClient(each, limits=limits, command=command, number=number, refused=refused)
        for number, each in enumerate(engine_configs(config.engine, devices))
    )
