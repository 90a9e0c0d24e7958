"""Assembly of an engine from a configuration: model, runner, scheduler, warm-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import structlog
import torch
from PIL import Image

from legato_engine.config import RESIDENT_PATH, STORED, EngineConfig, LoadOptions, check
from legato_engine.core.adapters import AdapterStore
from legato_engine.core.engine_core import EngineCore
from legato_engine.core.leases import LeaseHandler
from legato_engine.core.output import OutputSink
from legato_engine.core.preprocessor import Preprocessor
from legato_engine.core.refinements import Refinements
from legato_engine.core.requests import RequestTable, make_sequence
from legato_engine.crash import FlightRecorder
from legato_engine.device.base import Device
from legato_engine.device.host import available_memory
from legato_engine.device.select import open_device
from legato_engine.errors import InvalidField
from legato_engine.images.cache import ImageCache, ImageKey, ImageLeases
from legato_engine.images.decoding import DecodeJpeg, decode_by_libjpeg
from legato_engine.images.memory import PixelMemory, Pixels, host_slab, image_quota
from legato_engine.ipc.messages import EngineOutput, ServedModel
from legato_engine.kernels.accelerated import missing_kernels
from legato_engine.kernels.cpu.library import take_threads
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.layers.lora import AdapterBank
from legato_engine.models import registry
from legato_engine.models.base import MaskRefiner, Model
from legato_engine.models.checkpoint import dtype_name
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.models.gguf import is_gguf
from legato_engine.models.paged_attention import KVCache
from legato_engine.models.registry import ModelBundle
from legato_engine.runtime.kv_pool import allocate, num_pages_for, token_bytes
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.runtime.torch_backend import ImageFeatures
from legato_engine.runtime.warm_up import warm_runner
from legato_engine.scheduler.batch import ALONE, StepRecord
from legato_engine.scheduler.interfaces import Clock, Pause, sleep
from legato_engine.scheduler.output import SilentSink, Sink
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.shm import BlobReader
from legato_engine.speculation import block_sizes
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    ImageProperties,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)

_TOKENS = 4


def warm_up(frontend: ModelFrontend, scheduler: Scheduler) -> None:
    sampling = SamplingParams(max_tokens=_TOKENS, seed=0)
    info = ImageProperties(image_id="warm-up", width=64, height=48, cache_hit=False)
    pixels = Image.fromarray(np.zeros((48, 64, 3), np.uint8))
    source = CachedImageRef(image_id=info.image_id)
    if "caption" in frontend.tasks:
        request = Request(
            request_id=RequestKey("0"), task=CaptionSpec(), image=source, sampling=sampling
        )
        image = frontend.prepare_image(pixels, info.image_id, info)
        scheduler.submit(make_sequence(frontend, request, image))
    if "query" in frontend.tasks:
        request = Request(
            request_id=RequestKey("1"), task=QuerySpec(question="?"), sampling=sampling
        )
        scheduler.submit(make_sequence(frontend, request, None))
    scheduler.drain()


# ---------------------------------------------------------------- assembly

_UNCACHED_PIXELS = 64 * 1024 * 1024  # bytes of pending and leased images
_MAX_INLINE_PIXELS = 1024 * 1024  # decoded in about six milliseconds


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """Loaded and warmed-up model with its runner; it serves one scheduler at a time."""

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
    decode_jpeg: DecodeJpeg

    @property
    def info(self) -> ServedModel:
        prompt = self.frontend.prefix_length(has_image=True) + 1
        return ServedModel(
            name=self.frontend.name,
            device=self.device.name,
            tasks=self.frontend.tasks,
            max_context_tokens=self.model.max_context,
            max_output_tokens=self.model.max_context - prompt,
            max_running=self.config.max_running,
            max_waiting=self.config.max_waiting,
            max_images=self.frontend.max_images,
            num_parameters=self.model.num_parameters,
            dtype=dtype_name(self.model.dtype),
            adapters=self.bank is not None,
            kv_dtype=dtype_name(self.kv.k_LNHSE.dtype),
            kv_token_bytes=token_bytes(self.model),
            confidence=self.frontend.confidence,
            notice=self.frontend.notice,
        )

    @property
    def pipeline_depth(self) -> int:
        """Return the launches in flight.

        By default a CPU has one: the launch after an answer's last token takes its cores from other
        work, which costs short answers more than overlap gains.
        """
        is_cpu = self.device.torch_device.type == "cpu"
        return self.config.pipeline_depth or (1 if is_cpu else 2)

    def scheduler(
        self,
        sink: Sink,
        *,
        pipeline_depth: int,
        prefills_per_decode: int = 1,
        shares: bool = True,
        pause: Pause = sleep,
        observer: Callable[[StepRecord], None] | None = None,
        recorder: FlightRecorder | None = None,
    ) -> Scheduler:
        """Return a scheduler with an empty KV cache; the previous one must be idle.

        Without `shares` every prefill has a launch of its own, and decodes have no forced tokens.
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
            Clock(),
            sink,
            max_waiting=self.config.max_waiting,
            max_waiting_per_tenant=self.config.max_waiting_per_tenant,
            priority_seconds=self.config.priority_seconds,
            prefills_per_decode=prefills_per_decode,
            crops_per_launch=self.config.crops_per_launch,
            limits=self.runner.limits if shares else ALONE,
            max_decode_tokens=self.runner.limits.sampled if shares else 0,
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
        observer: Callable[[StepRecord], None] | None = None,
        recorder: FlightRecorder | None = None,
    ) -> EngineCore:
        """Make an engine core; `wake` is called on other threads and cuts a `pause` short."""
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
            decode_jpeg=self.decode_jpeg,
        )
        if self.frontend.max_images:
            preprocessor.warm_up()
        requests = RequestTable(wake=wake)
        refinements = Refinements(self.refiner, requests, send=send)
        sink = OutputSink(self.frontend.name, requests, send=send, finish=refinements.finish)
        return EngineCore(
            self.frontend,
            self.scheduler(
                sink,
                pipeline_depth=self.pipeline_depth,
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
        config, values = self.config, self.bank.values_per_slot
        max_rank = config.max_adapter_rank
        on_device = config.adapter_slots * values * self.model.dtype.itemsize
        return AdapterStore(
            lambda data, key, settings: self.model.read_adapter(data, key, max_rank, settings),
            self.adapter_folders,
            max_values=values,
            # At least what the device holds, so that a swapped-out adapter is not read again.
            cache_bytes=max(config.adapter_cache_bytes, on_device),
        )


# ---------------------------------------------------------------- loading

_log = structlog.get_logger()

Progress = Callable[[str, float], None]
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_WEIGHTS_FROM, _WEIGHTS_SHARE = 0.1, 0.6


def assemble(config: EngineConfig, progress: Progress = lambda stage, fraction: None) -> Assembly:
    """Load the model on its device, build the runner and warm it up.

    Raises:
        LegatoError: the model or device does not exist, or a setting cannot be served.
        OSError: a file is missing.
    """
    check(config)
    progress("device", 0.0)
    device = open_device(config.device, config.threads)
    if missing := missing_kernels(device.torch_device):
        _log.info("missing_kernels", device=device.name, reasons=missing)
    decode_jpeg = _jpeg_decoder(config, device)
    bundle = registry.resolve(
        config.model,
        weights=config.weights,
        tokenizer=config.tokenizer,
        random_weights=config.random_weights,
        max_context=config.max_context,
        models=config.models,
    )
    progress("weights", _WEIGHTS_FROM)
    dtype = _dtype(config.dtype, device)
    folders = _adapter_folders(config, bundle)
    free = device.free_memory()
    options = LoadOptions(
        vision_fp8=config.vision_dtype == "fp8",
        kv_dtype=config.kv_dtype,
        weight_dtype=_weight_dtype(config, device),
        cpu_kernels=config.cpu_kernels,
        memory=available_memory() if free is None else free,
        progress=lambda done: progress("weights", _WEIGHTS_FROM + done * _WEIGHTS_SHARE),
    )
    model = bundle.load(device.torch_device, dtype, options)
    if model.own_threads:
        device.compute.submit(take_threads)
    progress("warm-up", _WEIGHTS_FROM + _WEIGHTS_SHARE)
    warm, rest = _WEIGHTS_FROM + _WEIGHTS_SHARE, 1.0 - _WEIGHTS_FROM - _WEIGHTS_SHARE
    assembly = _with_runner(
        config,
        bundle,
        model,
        device,
        folders,
        decode_jpeg,
        lambda done: progress("warm-up", warm + done * rest),
    )
    progress("ready", 1.0)
    return assembly


def _with_runner(
    config: EngineConfig,
    bundle: ModelBundle,
    model: Model,
    device: Device,
    folders: tuple[Path, ...],
    decode_jpeg: DecodeJpeg,
    progress: Callable[[float], None],
) -> Assembly:
    # Allocated before the KV cache, which gets a fraction of the free memory.
    bank = _adapter_bank(config, bundle, model) if folders else None
    refiner = _refiner(config, bundle, model)
    num_pages = config.num_pages or num_pages_for(
        model,
        device,
        config.page_size,
        config.max_running,
        config.kv_memory_fraction,
        ImageFeatures.reserved_bytes(model, config.image_cache_bytes),
    )
    kv = allocate(model, device, num_pages, config.page_size)
    runner = warm_runner(
        config,
        model,
        device,
        kv,
        bank=bank,
        refiner=refiner,
        draft=bundle.draft,
        progress=progress,
    )
    frontend = bundle.frontend.keeping_images() if refiner else bundle.frontend
    if runner.encodes_images:
        frontend = frontend.resizing_on_device()
    assembly = Assembly(
        config,
        frontend,
        model,
        device,
        runner,
        kv,
        num_pages,
        folders,
        bank,
        bundle.draft,
        refiner,
        decode_jpeg,
    )
    warm_up(frontend, assembly.scheduler(SilentSink(), pipeline_depth=assembly.pipeline_depth))
    return assembly


def _adapter_bank(config: EngineConfig, bundle: ModelBundle, model: Model) -> AdapterBank | None:
    bank = model.adapter_bank(config.adapter_slots, config.max_adapter_rank)
    if bank is None and config.adapters:
        raise InvalidField(f"{bundle.frontend.name} takes no adapters", field="adapters")
    return bank


def _refiner(config: EngineConfig, bundle: ModelBundle, model: Model) -> MaskRefiner | None:
    if not config.refiner:
        return None
    refiner = model.mask_refiner(Path(config.refiner))
    if refiner is None:
        raise InvalidField(f"{bundle.frontend.name} takes no refiner", field="refiner")
    return refiner


def _adapter_folders(config: EngineConfig, bundle: ModelBundle) -> tuple[Path, ...]:
    given = Path(config.adapters) if config.adapters else None
    if given is not None and not given.is_dir():
        raise InvalidField(f"{given} is not a folder", field="adapters")
    return tuple(folder for folder in (given, bundle.adapters) if folder is not None)


def _weight_dtype(config: EngineConfig, device: Device) -> str:
    name = config.weight_dtype
    if name == "auto" and config.decode_path == RESIDENT_PATH:
        return "model"  # which the resident kernel reads
    if name == STORED and not is_gguf(config.weights):
        weights = config.weights or config.model
        problem = f"weight_dtype stored keeps the blocks of a GGUF file, which {weights} is not"
        raise InvalidField(f"{problem}: use weight_dtype auto", field="weight_dtype")
    if name in ("packed", "fp8") and device.torch_device.type == "cpu":
        problem = f"weights in {name} need a GPU, not {device.name}: use int8 or model"
        raise InvalidField(problem, field="weight_dtype")
    return name


def _jpeg_decoder(config: EngineConfig, device: Device) -> DecodeJpeg:
    if config.jpeg_decoder == "cpu":
        return decode_by_libjpeg
    if device.torch_device.type != "cuda":
        problem = f"jpeg_decoder gpu needs a CUDA GPU, not {device.name}: use jpeg_decoder cpu"
        raise InvalidField(problem, field="jpeg_decoder")
    from legato_engine.device.cuda import JpegDecoder  # needs packages that torch brings for GPUs

    return JpegDecoder(device.torch_device)


def _dtype(name: str, device: Device) -> torch.dtype:
    if name == "auto":
        name = "f32" if device.torch_device.type == "cpu" else "bf16"
    return _DTYPES[name]
