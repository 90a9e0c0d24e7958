"""Garbage collector settings of a process that runs an engine."""

from __future__ import annotations

import gc

from legato_engine.config import EngineConfig
from legato_engine.device.host import return_freed_memory
from legato_engine.ipc import latency_policy


def freeze_loaded(config: EngineConfig) -> None:
    """Freeze loaded objects and raise the GC thresholds."""
    gc.collect()
    return_freed_memory()
    gc.freeze()
    gc.set_threshold(latency_policy.resolve(config.latency_policy).engine_gc)
