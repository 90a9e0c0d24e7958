"""An assembled engine: what is loaded and warm, and what serves with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from legato_engine.config import EngineConfig
from legato_engine.device.base import Device
from legato_engine.engine.adapter_store import AdapterStore
from legato_engine.engine.engine_core import EngineCore
from legato_engine.engine.lease_handler import LeaseHandler
from legato_engine.engine.output_sink import OutputSink
from legato_engine.engine.preprocessor import Preprocessor
from legato_engine.engine.refinements import Refinements
from legato_engine.engine.request_table import RequestTable
from legato_engine.images.cache import ImageCache, ImageKey
from legato_engine.images.leases import ImageLeases
from legato_engine.images.pixel_memory import PixelMemory, Pixels, host_slab
from legato_engine.images.quota import image_quota
from legato_engine.ipc.messages import EngineOutput, ModelInfo
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.capabilities import MaskRefiner
from legato_engine.models.checkpoint_plan import dtype_name
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.runtime.kv_pool import token_bytes
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.scheduler.clock import SystemClock
from legato_engine.scheduler.launch import ALONE
from legato_engine.scheduler.pipeline import Pipeline
from legato_engine.scheduler.runner import Pause, sleep
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.scheduler.sink import Sink
from legato_engine.scheduler.step_record import FlightRecorder, Observer
from legato_engine.shm.blob_reader import BlobReader
from legato_engine.speculative.block_sizes import block_sizes

_UNCACHED_PIXELS = 64 * 1024 * 1024  # bytes of pending and leased images
_MAX_INLINE_PIXELS = 1024 * 1024  # decoded in about six milliseconds


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded and warm model with its runner; it serves one scheduler at a time."""

    config: EngineConfig
    frontend: ModelFrontend
    model: Model
    device: Device
    runner: ModelRunner
    kv: KVCache
    num_pages: int  # at most those of `kv`
    adapter_folders: tuple[Path, ...]
    bank: AdapterBank | None  # None if the engine takes no adapters
    draft: Path | None
    refiner: MaskRefiner | None

    @property
    def info(self) -> ModelInfo:
        prompt = self.frontend.prefix_length(has_image=True) + 1
        return ModelInfo(
            name=self.frontend.name,
            device=self.device.name,
            tasks=self.frontend.tasks,
            max_context_tokens=self.model.max_context,
            max_output_tokens=self.model.max_context - prompt,
            max_running=self.config.max_running,
            max_waiting=self.config.max_waiting,
            num_parameters=self.model.num_parameters,
            dtype=dtype_name(self.model.dtype),
            adapters=self.bank is not None,
            kv_dtype=dtype_name(self.kv.k_LNHSE.dtype),
            kv_token_bytes=token_bytes(self.model),
            confidence=self.frontend.confidence,
        )

    def scheduler(
        self,
        sink: Sink,
        *,
        pipeline_depth: int,
        prefills_per_decode: int = 1,
        shares: bool = True,
        pause: Pause = sleep,
        observer: Observer | None = None,
        recorder: FlightRecorder | None = None,
    ) -> Scheduler:
        """Return a scheduler with an empty KV cache; the previous one must be idle.

        Without `shares` every prefill has a launch of its own.
        """
        self.runner.forget_acceptance()
        manager = KVCacheManager(
            self.num_pages,
            self.config.page_size,
            self.config.max_running,
            self.model.max_context,
            num_adapter_slots=self.config.adapter_slots if self.bank is not None else 0,
        )
        return Scheduler(
            self.runner,
            manager,
            Pipeline(pipeline_depth),
            SystemClock(),
            sink,
            max_waiting=self.config.max_waiting,
            max_waiting_per_tenant=self.config.max_waiting_per_tenant,
            priority_seconds=self.config.priority_seconds,
            prefills_per_decode=prefills_per_decode,
            crops_per_launch=self.config.crops_per_launch,
            limits=self.runner.limits if shares else ALONE,
            block_sizes=block_sizes(self.config.speculation),
            loops=self.runner if self.runner.decodes_by_loops else None,
            pause=pause,
            observer=observer,
            recorder=recorder,
        )

    def core(
        self,
        *,
        blobs: BlobReader,
        send: Callable[[EngineOutput], None],
        wake: Callable[[], None],
        pause: Pause = sleep,
        observer: Observer | None = None,
        recorder: FlightRecorder | None = None,
    ) -> EngineCore:
        """Make an engine; `wake` is called on other threads, and cuts a `pause` short."""
        config = self.config
        cache = ImageCache[ImageKey, PreparedImage](config.image_cache_bytes)
        preprocessor = Preprocessor(
            self.frontend,
            cache,
            blobs=blobs,
            max_pixels=config.max_image_pixels,
            threads=config.preprocess_threads,
            memory=PixelMemory(self._pixel_slab(config.image_cache_bytes + _UNCACHED_PIXELS)),
            max_inline_pixels=_MAX_INLINE_PIXELS if self.runner.encodes_images else 0,
        )
        if self.frontend.takes_images:
            preprocessor.warm_up()
        requests = RequestTable(wake=wake)
        refinements = Refinements(self.refiner, requests, send=send)
        sink = OutputSink(self.frontend.name, requests, send=send, finish=refinements.finish)
        return EngineCore(
            self.frontend,
            self.scheduler(
                sink,
                pipeline_depth=config.pipeline_depth,
                pause=pause,
                observer=observer,
                recorder=recorder,
            ),
            requests,
            preprocessor,
            LeaseHandler(preprocessor, ImageLeases(cache, image_quota(config)), send=send),
            self._adapter_store(),
            refinements,
            sink,
        )

    def _pixel_slab(self, num_bytes: int) -> Pixels:
        """Return memory for decoded images, page-locked if the device reads them there."""
        if not self.runner.encodes_images:
            return host_slab(num_bytes)
        slab: Pixels = self.device.pinned((num_bytes,), torch.uint8).numpy()
        return slab

    def _adapter_store(self) -> AdapterStore | None:
        if self.bank is None:
            return None
        support = self.model.capabilities.adapters
        assert support is not None, "a bank is allocated by a model that supports adapters"
        config, values = self.config, self.bank.values_per_slot
        max_rank = config.max_adapter_rank
        on_device = config.adapter_slots * values * self.model.dtype.itemsize
        return AdapterStore(
            lambda data, key: support.read_adapter(data, key, max_rank),
            self.adapter_folders,
            max_values=values,
            # At least what the device holds, so that a swapped-out adapter is not read again.
            cache_bytes=max(config.adapter_cache_bytes, on_device),
        )
