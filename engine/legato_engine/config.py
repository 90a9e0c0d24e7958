"""Engine settings: built once by the service; each class gets the few that it needs."""

from __future__ import annotations

import math

import msgspec

from legato_engine.errors import InvalidField

LATENCY_POLICIES = ("auto", "low-latency", "shared")
MAX_ADAPTER_RANK = 512
MAX_PREFILL_ROWS = 32
MAX_IMAGES_PER_LAUNCH = 4
SPECULATION_OFF = "off"
LOOKUP_DRAFT = "lookup"
MAX_BLOCK_SIZE = 16
"""Upper bound of the draft tokens of a row."""

_ADAPTIVE_BLOCK = 8
_CHOICES = {
    "latency_policy": LATENCY_POLICIES,
    "dtype": ("auto", "f32", "bf16"),
    "vision_dtype": ("auto", "fp8"),
    "kv_dtype": ("auto", "model", "fp8"),
}
_RANGES = {
    "adapter_slots": (1, math.inf),
    "max_adapter_rank": (1, MAX_ADAPTER_RANK),
    "max_prefill_rows": (0, MAX_PREFILL_ROWS),
    "pictures_per_launch": (1, MAX_IMAGES_PER_LAUNCH),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of an engine process, which gets them as JSON on its command line.

    Model: `model` "null" has no weights and makes results up, one token every `null_step_ms` (0:
    all at once), with `null_objects` objects at most. `random_weights` are seeded, for benchmarks.
    `refiner` is the file of a head that improves outlines.

    KV cache: `num_pages` 0 sizes the pool, on the CPU for `max_running` full contexts and some
    shared prefixes, on a GPU by `kv_memory_fraction` of the memory that the model leaves free.
    `max_context` bounds the positions of a sequence (prompt and output), and with it the pool.

    Launches: `pipeline_depth` 1 is the blocking loop, 2 the pipelined one. Up to `max_prefill_rows`
    prompts share a launch, which running decodes may join; 1 disables both, 0 is 4 on a GPU with
    kernels for the model, else 1. Up to `crops_per_launch` crops of an image are encoded at a time
    while other requests stream. Up to `pictures_per_launch` images are computed in one launch while
    many wait and none streams, where a GPU cuts images and prompts share launches.

    Queue: `max_waiting_per_tenant` bounds each tenant's share of `max_waiting`; requests without a
    tenant share one. `priority_seconds` of waiting equal one step of priority.

    Images: `image_cache_bytes` bounds the cache of images in requests. Held images are extra:
    `image_quota_bytes` for each owner, `image_hold_bytes` for all.

    Speculation: `speculation` sets the draft tokens of a row: `off`, `fixed:K`, `seed` (the rule of
    adaptive block sizes) or `budget` (by their worth on this device). `draft` is the proposer: a
    draft file of the model; `NAME:FOLDER`, a text model with the same vocabulary; or `lookup`, the
    n-gram proposer. Empty is the model's own draft, else `lookup`.

    Adapters: `adapters` is a folder of adapter files by name, besides the model's own, read on
    first use. The host caches `adapter_cache_bytes` of them, and at least `adapter_slots`; so many
    are on the device at a time, each of rank `max_adapter_rank` at most.
    """

    model: str = "legato-tiny"
    weights: str = ""  # folder, .safetensors or .pt file; empty: the model's own
    tokenizer: str = ""
    random_weights: bool = False
    max_context: int = 0  # 0: the model's own, for text models at most 8192
    adapters: str = ""
    adapter_slots: int = 8
    max_adapter_rank: int = 64  # at most `MAX_ADAPTER_RANK`
    adapter_cache_bytes: int = 256 * 1024 * 1024
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, f32, bf16
    threads: int = 0  # intra-op threads on CPU; 0: all cores
    pipeline_depth: int = 2
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
    max_prefill_rows: int = 0  # at most `MAX_PREFILL_ROWS`
    pictures_per_launch: int = 4  # at most `MAX_IMAGES_PER_LAUNCH`
    vision_dtype: str = "auto"  # auto (as dtype), fp8
    kv_dtype: str = "auto"  # auto (fp8 if the weights have scales), model (as dtype), fp8
    max_image_pixels: int = 40_000_000
    image_cache_bytes: int = 256 * 1024 * 1024
    image_quota_bytes: int = 256 * 1024 * 1024
    image_hold_bytes: int = 1024 * 1024 * 1024
    preprocess_threads: int = 2
    heartbeat_interval: float = 0.2
    latency_policy: str = "auto"  # of all processes, see `ipc.latency_policy`
    cuda_graphs: bool = True
    trace_steps: int = 4096  # launches in the timeline's ring
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
    max_block_size(config.speculation)


def max_block_size(setting: str) -> int:
    """Most draft tokens of a row: 0 with `off`, 8 with `seed` and `budget`, K with `fixed:K`.

    Raises:
        InvalidField: any other setting.
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
