"""The options of the engine: model, adapters, queue."""

from __future__ import annotations

import argparse

from legato_engine.config import (
    CPU_KERNELS,
    DECODE_PATHS,
    MAX_ADAPTER_RANK,
    MODELS,
    WEIGHT_DTYPES,
    EngineConfig,
)

from legato_service.arguments import values
from legato_service.arguments.values import Add
from legato_service.config import ServiceConfig


def add_model(
    parser: argparse.ArgumentParser, engine: EngineConfig, service: ServiceConfig
) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=values.model,
        default=engine.model,
        help=f"one of {', '.join(MODELS)}; null: made-up results",
    )
    add(
        "--models",
        metavar="FOLDER",
        default=engine.models,
        help="where `legato pull` put models; by default ~/.local/share/legato/models",
    )
    add("--weights", default=engine.weights, help="folder, .safetensors, .pt or .gguf file")
    add("--tokenizer", default=engine.tokenizer, help="tokenizer.json")
    add(
        "--max-context",
        metavar="POSITIONS",
        type=values.whole,
        default=engine.max_context,
        help="of prompt and output together; 0: the model's own, for text models at most 8192",
    )
    add("--random-weights", action="store_true", help="seeded random weights, for benchmarks")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--device", default=engine.device, help="auto, cpu, cuda or cuda:N")
    devices.add_argument(
        "--devices",
        metavar="all|DEVICE,DEVICE",
        default=service.devices,
        help="several, as cuda:0,cuda:1: an engine on each, behind one service",
    )
    add(
        "--affinity",
        choices=("on", "off"),
        default="on" if service.affinity else "off",
        help="with --devices: prefer the engine that holds a request's image, prefix, adapter or "
        "session; off: only the shortest wait counts",
    )
    add("--dtype", default=engine.dtype, choices=("auto", "f32", "bf16"), help="of the weights")
    add(
        "--vision-dtype",
        default=engine.vision_dtype,
        choices=("auto", "fp8"),
        help="of the vision encoder's weights; auto: as --dtype",
    )
    add(
        "--kv-dtype",
        default=engine.kv_dtype,
        choices=("auto", "model", "fp8"),
        help="of cached keys and values; auto: fp8 if the weights have scales, else as model",
    )
    add(
        "--weight-dtype",
        default=engine.weight_dtype,
        choices=WEIGHT_DTYPES,
        help="of linear layers on a CPU: int8 and int4 need less memory; auto: as --dtype",
    )
    add(
        "--cpu-kernels",
        default=engine.cpu_kernels,
        choices=CPU_KERNELS,
        help="of layers on a CPU; auto: Legato's own if there is a C++ compiler, else torch's",
    )
    add("--threads", type=values.whole, default=engine.threads, help="CPU threads, 0: all cores")
    add("--pipeline-depth", type=int, choices=(1, 2), default=engine.pipeline_depth)
    add(
        "--decode-path",
        choices=DECODE_PATHS,
        default=engine.decode_path,
        help="graph: a launch for every decode step; loop: many steps in one; resident: these "
        "as one kernel, where it can run; auto: loop on a GPU with kernels for the model, "
        "resident where that was measured to be faster there, else graph",
    )
    add(
        "--depth-switch",
        action="store_true",
        help="an operator may change --pipeline-depth while it serves",
    )
    add(
        "--speculation",
        type=values.speculation,
        default=engine.speculation,
        metavar="off|seed|budget|fixed:K",
        help="draft tokens of text that one step verifies; results stay the same",
    )
    add(
        "--draft",
        default=engine.draft,
        metavar="FILE|NAME:FOLDER|lookup",
        help="proposer of draft tokens; by default the model's own draft, else prompt lookup",
    )
    add(
        "--refiner",
        default=engine.refiner,
        metavar="FILE",
        help="head that improves outlines; by default none",
    )


def add_adapters(add: Add, engine: EngineConfig) -> None:
    add(
        "--adapters",
        metavar="FOLDER",
        default=engine.adapters,
        help="folder of adapter files, by name",
    )
    add(
        "--adapter-slots",
        type=values.positive,
        default=engine.adapter_slots,
        help="adapters on the device at a time",
    )
    add(
        "--max-adapter-rank",
        type=values.positive,
        default=engine.max_adapter_rank,
        help=f"of an adapter, at most {MAX_ADAPTER_RANK}",
    )


def add_queue(add: Add, engine: EngineConfig) -> None:
    add(
        "--max-running",
        type=values.positive,
        default=engine.max_running,
        help="tasks that decode at a time",
    )
    add(
        "--kv-memory-fraction",
        type=values.fraction,
        default=engine.kv_memory_fraction,
        help="share of the memory left by the weights, for the KV cache",
    )
    add(
        "--crops-per-launch",
        type=values.whole,
        default=engine.crops_per_launch,
        help="crops of an image encoded at a time while others stream; 0: all",
    )
    add(
        "--max-prefill-rows",
        type=values.whole,
        default=engine.max_prefill_rows,
        help="prompts per prefill launch, which running decodes may join; 1: no sharing, "
        "0: automatic",
    )
    add(
        "--pictures-per-launch",
        type=values.positive,
        default=engine.pictures_per_launch,
        help="images computed in one launch while many wait and none streams; 1: one by one",
    )
    add(
        "--max-waiting",
        type=values.positive,
        default=engine.max_waiting,
        help="tasks in the waiting queue",
    )
    add(
        "--max-waiting-per-tenant",
        type=values.whole,
        default=engine.max_waiting_per_tenant,
        help="of one tenant (metadata legato-tenant; without one: a shared tenant), 0: unbounded",
    )
    add(
        "--priority-seconds",
        metavar="SECONDS",
        type=values.not_negative,
        default=engine.priority_seconds,
        help="waiting time that equals one step of priority (metadata legato-priority, "
        "-100..100, higher starts first); 0 ignores priorities",
    )


def add_null(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    null = parser.add_argument_group("with --model null")
    null.add_argument(
        "--null-step-ms",
        metavar="MS",
        type=values.not_negative,
        default=engine.null_step_ms,
        help="time between two tokens; 0: as short as can be",
    )
    null.add_argument(
        "--null-objects",
        metavar="N",
        type=values.whole,
        default=engine.null_objects,
        help="objects found, max_objects at most",
    )
