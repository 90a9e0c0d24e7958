"""Engine settings: frozen, built once by whoever starts the engine, handed down narrow."""

from __future__ import annotations

import math

import msgspec

from legato_engine.errors import InvalidField

LATENCY_POLICIES = ("auto", "low-latency", "shared")
HIGHEST_ADAPTER_RANK = 512
MOST_PREFILL_ROWS = 32
MOST_PICTURES = 4
SPECULATION_OFF = "off"
LOOKUP_DRAFT = "lookup"
LARGEST_BLOCK = 16
"""Most tokens that a row may propose, whatever is asked for."""

_ADAPTIVE_BLOCK = 8
_WORDS = {
    "latency_policy": LATENCY_POLICIES,
    "dtype": ("auto", "f32", "bf16"),
    "vision_dtype": ("auto", "fp8"),
    "kv_dtype": ("auto", "model", "fp8"),
}
_RANGES = {
    "adapter_slots": (1, math.inf),
    "max_adapter_rank": (1, HIGHEST_ADAPTER_RANK),
    "max_prefill_rows": (0, MOST_PREFILL_ROWS),
    "pictures_per_launch": (1, MOST_PICTURES),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process is told at its start (as JSON on its command line).

    `num_pages` 0 sizes the KV pool: on the CPU for `max_running` full contexts and some shared
    prefixes, on a GPU by `kv_memory_fraction` of the memory that the model leaves free.
    `crops_per_launch` bounds how many crops of a picture are encoded at a time while others stream.
    `max_prefill_rows` prompts share a launch, and with it whoever decodes; 1 shares nothing, 0 is 4
    on a GPU with kernels for the model and 1 elsewhere. `pictures_per_launch` may be computed in
    one while many wait and nobody streams, where a GPU cuts pictures and prompts share launches.
    `max_waiting_per_tenant` bounds one tenant's share of `max_waiting`; those who name none share.
    `priority_seconds` is how long a request waits to make up for one step of priority.
    `image_cache_bytes` is for pictures that requests brought. Those that callers have it hold come
    besides: `image_quota_bytes` for each caller, `image_hold_bytes` for all of them.
    `pipeline_depth` 1 is the blocking loop, 2 the pipelined one.
    `speculation` says how many tokens a row proposes for one forward to verify: `off`, `fixed:K`,
    `seed` (the rule of adaptive block sizes) or `budget` (by what they are worth on this device).
    `draft` says who proposes them: a file of a draft for the model; `NAME:FOLDER`, a model of text
    with the same vocabulary; or `lookup`, what followed when the same words stood there before.
    Empty is the draft that the model brings, else `lookup`.
    `refiner` is the file of a head that improves outlines; empty leaves them as the model says.
    `max_context` bounds the positions of a sequence, prompt and answer, and with them the KV pool.
    `adapters` is a folder of adapter files by name, beside those that the model brings; they are
    read when first asked for. The host keeps `adapter_cache_bytes` of them, or as many as there are
    slots: `adapter_slots` are on the device at a time, each with room for `max_adapter_rank`.
    `random_weights` serves the named architecture with seeded random weights, for benchmarks.
    `model` "null" is no model at all: answers are made up, a token every `null_step_ms` (0: at
    once), and hold `null_objects` objects where objects are asked for and `max_objects` allows it.
    """

    model: str = "legato-tiny"
    weights: str = ""  # a folder, .safetensors or .pt file; empty: those shipped with the model
    tokenizer: str = ""
    random_weights: bool = False
    max_context: int = 0  # 0: as the model has it; of those that read text alone at most 8192
    adapters: str = ""
    adapter_slots: int = 8
    max_adapter_rank: int = 64  # at most `HIGHEST_ADAPTER_RANK`
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
    max_waiting_per_tenant: int = 0  # 0: no bound of its own
    priority_seconds: float = 1.0
    page_size: int = 16
    num_pages: int = 0
    kv_memory_fraction: float = 0.6
    crops_per_launch: int = 5  # 0: never split a picture
    max_prefill_rows: int = 0  # at most `MOST_PREFILL_ROWS`
    pictures_per_launch: int = 4  # at most `MOST_PICTURES`
    vision_dtype: str = "auto"  # auto (as dtype), fp8
    kv_dtype: str = "auto"  # auto (fp8 where the weights have scales for it), model (as dtype), fp8
    max_image_pixels: int = 40_000_000
    image_cache_bytes: int = 256 * 1024 * 1024
    image_quota_bytes: int = 256 * 1024 * 1024
    image_hold_bytes: int = 1024 * 1024 * 1024
    preprocess_threads: int = 2
    heartbeat_interval: float = 0.2
    latency_policy: str = "auto"  # of all processes, see `ipc.latency_policy`
    cuda_graphs: bool = True
    trace_steps: int = 4096  # launches the timeline ring remembers
    null_step_ms: float = 0.0
    null_objects: int = 3


def check(config: EngineConfig) -> None:
    """Raise `InvalidField` for what no model could be served with, before any is loaded."""
    for field, words in _WORDS.items():
        word = getattr(config, field)
        if word not in words:
            known = f"{', '.join(words[:-1])} or {words[-1]}"
            raise InvalidField(f"unknown {field} {word!r}; use {known}", field=field)
    for field, (least, most) in _RANGES.items():
        if not least <= getattr(config, field) <= most:
            numbers = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise InvalidField(numbers, field=field)
    largest_block(config.speculation)


def largest_block(setting: str) -> int:
    """Most tokens that a row proposes: 0 with `off`, 8 with `seed` and `budget`, K with `fixed:K`.

    Raises `InvalidField` for any other setting.
    """
    if setting in ("seed", "budget"):
        return _ADAPTIVE_BLOCK
    name, _, size = setting.partition(":")
    if name == "fixed" and size.isascii() and size.isdigit() and 0 < int(size) <= LARGEST_BLOCK:
        return int(size)
    if setting != SPECULATION_OFF:
        raise InvalidField(
            f"unknown speculation {setting!r}; use off, seed, budget, or fixed:K with K from 1 to "
            f"{LARGEST_BLOCK}",
            field="speculation",
        )
    return 0
