"""Engine settings, built once by the service."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import msgspec

from legato_engine.errors import InvalidField

MODELS = (
    "legato-tiny",
    "moondream2",
    "moondream3",
    "moondream3.1",
    "smollm2-135m",
    "qwen3-0.6b",
    "llama",
    "phi",
    "qwen",
    "qwen3-vl",
    "null",
)
"""Names of `--model` for users."""

TEST_MODELS = ("random-tiny", "random-tiny3", "random-tiny-vl")
"""Names of models with random weights."""

LATENCY_POLICIES = ("auto", "low-latency", "shared")
MAX_ADAPTER_RANK = 512
MAX_PREFILL_ROWS = 32
MAX_IMAGES_PER_LAUNCH = 4
SPECULATION_OFF = "off"
LOOKUP_DRAFT = "lookup"
MAX_BLOCK_SIZE = 16
"""Maximum draft tokens of a row."""

_ADAPTIVE_BLOCK = 8
AUTO_PATH = "auto"
RESIDENT_PATH = "resident"
LOOP_PATHS = ("loop", RESIDENT_PATH)
"""Decode paths with several steps per launch."""
DECODE_PATHS = (AUTO_PATH, "graph", *LOOP_PATHS)
STORED = "stored"
WEIGHT_DTYPES = ("auto", "model", "packed", "fp8", "int8", "int4", STORED)
CPU_KERNELS = ("auto", "torch")
JPEG_DECODERS = ("cpu", "gpu")
_CHOICES = {
    "decode_path": DECODE_PATHS,
    "latency_policy": LATENCY_POLICIES,
    "dtype": ("auto", "f32", "bf16"),
    "vision_dtype": ("auto", "fp8"),
    "jpeg_decoder": JPEG_DECODERS,
    "kv_dtype": ("auto", "model", "fp8"),
    "weight_dtype": WEIGHT_DTYPES,
    "cpu_kernels": CPU_KERNELS,
}
_RANGES = {
    "adapter_slots": (1, math.inf),
    "max_adapter_rank": (1, MAX_ADAPTER_RANK),
    "max_prefill_rows": (0, MAX_PREFILL_ROWS),
    "images_per_launch": (1, MAX_IMAGES_PER_LAUNCH),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of an engine process, passed as JSON on its command line.

    docs/configuration.md explains what an operator may set. The model "null" has no weights and
    generates scripted results, one token every `null_step_ms` (0: all at once).

    `num_pages` 0 sizes the pool of KV pages by `kv_memory_fraction` of the memory that the model
    leaves free, on the CPU at most for `max_running` full contexts and some shared prefixes.

    Held images count against `image_quota_bytes` for each owner and `image_hold_bytes` for all, not
    against `image_cache_bytes`. The host caches `adapter_cache_bytes` of adapter files.
    """

    model: str = "legato-tiny"
    weights: str = ""  # folder, .safetensors, .pt or .gguf file; empty: the model's own
    tokenizer: str = ""
    models: str = ""  # folder of pulled models; empty: the user's
    random_weights: bool = False
    max_context: int = 0  # 0: the model's own, for text models at most 8192
    adapters: str = ""
    adapter_slots: int = 8
    max_adapter_rank: int = 64
    adapter_cache_bytes: int = 256 * 1024 * 1024
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, f32, bf16
    threads: int = 0  # intra-op threads on CPU; 0: all cores
    pipeline_depth: int = 0
    decode_path: str = AUTO_PATH
    speculation: str = SPECULATION_OFF
    draft: str = ""
    refiner: str = ""
    max_running: int = 16
    max_waiting: int = 256
    max_waiting_per_tenant: int = 0  # 0: unbounded
    priority_seconds: float = 1.0
    page_size: int = 16
    num_pages: int = 0
    kv_memory_fraction: float = 0.6
    crops_per_launch: int = 5  # 0: never split an image
    max_prefill_rows: int = 0
    images_per_launch: int = 4
    vision_dtype: str = "auto"  # auto (as dtype), fp8
    kv_dtype: str = "auto"  # auto (fp8 if the weights have scales), model (as dtype), fp8
    weight_dtype: str = "auto"  # of linear layers: model, packed and fp8 (GPU), int8, int4, stored
    cpu_kernels: str = "auto"  # auto (Legato's, which the CPU's own compiler makes), torch
    jpeg_decoder: str = "cpu"  # cpu (libjpeg-turbo), gpu (nvJPEG, through torchvision)
    max_image_pixels: int = 40_000_000
    image_cache_bytes: int = 256 * 1024 * 1024
    image_quota_bytes: int = 256 * 1024 * 1024
    image_hold_bytes: int = 1024 * 1024 * 1024
    preprocess_threads: int = 2
    heartbeat_interval: float = 0.2
    latency_policy: str = "auto"
    cuda_graphs: bool = True
    trace_steps: int = 4096  # launches in the timeline's ring
    log_level: str = "info"
    human_readable_logs: bool = False  # human-readable lines instead of JSON
    crash_folder: str = ""  # of crash bundles; empty: in the temporary folder
    crash_bundles: int = 8  # newest bundles to keep; 0: none is written
    null_step_ms: float = 0.0
    null_objects: int = 3


def check(config: EngineConfig) -> None:
    """Check the settings that do not depend on the model.

    Raises:
        InvalidField: a setting is unknown or out of range.
    """
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        if value not in choices:
            known = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise InvalidField(f"unknown {field} {value!r}; use {known}", field=field)
    for field, (least, most) in _RANGES.items():
        if not least <= getattr(config, field) <= most:
            bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise InvalidField(bounds, field=field)
    max_block_size(config.speculation)  # raises
    loops = config.decode_path in LOOP_PATHS
    if loops and not config.cuda_graphs:
        reason = f"decode_path {config.decode_path} needs cuda_graphs"
        raise InvalidField(reason, field="decode_path")


def max_block_size(setting: str) -> int:
    """Return the maximum draft tokens of a row.

    Raises:
        InvalidField: the setting is unknown.
    """
    if setting in ("seed", "budget"):
        return _ADAPTIVE_BLOCK
    name, _, size = setting.partition(":")
    if name == "fixed" and size.isascii() and size.isdigit() and 0 < int(size) <= MAX_BLOCK_SIZE:
        return int(size)
    if setting != SPECULATION_OFF:
        raise InvalidField(
            f"unknown speculation {setting!r}; use off, seed, budget, or fixed:K with K from 1 to "
            f"{MAX_BLOCK_SIZE}",
            field="speculation",
        )
    return 0


# ---------------------------------------------------------------- weights

Progress = Callable[[float], None]
"""Called with the fraction done, which rises to 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOptions:
    """Form in which weights are loaded, and the `memory` that they may take (None: unlimited).

    `kv_dtype`: keys and values as `fp8`, in the dtype of the `model`, or (`auto`) as fp8 if the
    weights have scales. `weight_dtype`: of linear layers, on a CPU as `packed_weights.pack`, on a
    GPU as `KINDS`, or `stored` for the blocks of a GGUF file, which on a CPU `auto` is too.
    `cpu_kernels`: as `EngineConfig`.
    """

    vision_fp8: bool = False
    kv_dtype: str = "auto"
    weight_dtype: str = "auto"
    cpu_kernels: str = "auto"
    memory: int | None = None
    progress: Progress = lambda fraction: None


LOAD_DEFAULTS = LoadOptions()
