"""The options of `legato serve`."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from typing import NoReturn

from legato_engine.config import (
    CPU_KERNELS,
    DECODE_PATHS,
    LATENCY_POLICIES,
    MAX_ADAPTER_RANK,
    MODELS,
    TEST_MODELS,
    WEIGHT_DTYPES,
    EngineConfig,
    max_block_size,
)
from legato_engine.errors import InvalidField

from legato_service.config import ServiceConfig, check

Add = Callable[..., argparse.Action]
"""`add_argument` of a parser or of a group."""


def model(text: str) -> str:
    if text not in (*MODELS, *TEST_MODELS):
        near = difflib.get_close_matches(text, MODELS, n=1)
        raise argparse.ArgumentTypeError(
            f"no model is called {text!r}"
            + (f", but {near[0]!r} is" if near else "")
            + f"; there are {', '.join(MODELS)}"
        )
    return text


def speculation(text: str) -> str:
    try:
        max_block_size(text)
    except InvalidField as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def fraction(text: str) -> float:
    if not 0 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, and is {value:g}")
    return value


def share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 to 1, and is {value:g}")
    return value


def whole(text: str) -> int:
    if (value := _integer(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, and is {value}")
    return value


def not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and not negative, and is {value:g}")
    return value


def above_zero(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, and is {value:g}")
    return value


def positive(text: str) -> int:
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, and is {value}")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # argparse would name the function that reads it
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


# ---------------------------------------------------------------- engine


def add_model(
    parser: argparse.ArgumentParser, engine: EngineConfig, service: ServiceConfig
) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=model,
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
        type=whole,
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
        help="of a decoder's layers: fp8 (GPU), int8 and int4 need less memory and time; packed: "
        "as --dtype, one copy on a GPU; auto: packed on a GPU without the resident kernel, else "
        "as model",
    )
    add(
        "--cpu-kernels",
        default=engine.cpu_kernels,
        choices=CPU_KERNELS,
        help="of layers on a CPU; auto: Legato's own if there is a C++ compiler, else torch's",
    )
    add("--threads", type=whole, default=engine.threads, help="CPU threads, 0: all cores")
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
        type=speculation,
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
        type=positive,
        default=engine.adapter_slots,
        help="adapters on the device at a time",
    )
    add(
        "--max-adapter-rank",
        type=positive,
        default=engine.max_adapter_rank,
        help=f"of an adapter, at most {MAX_ADAPTER_RANK}",
    )


def add_queue(add: Add, engine: EngineConfig) -> None:
    add(
        "--max-running",
        type=positive,
        default=engine.max_running,
        help="tasks that decode at a time",
    )
    add(
        "--kv-memory-fraction",
        type=fraction,
        default=engine.kv_memory_fraction,
        help="fraction of the memory left by the weights for the KV cache",
    )
    add(
        "--crops-per-launch",
        type=whole,
        default=engine.crops_per_launch,
        help="crops of an image encoded at a time while others stream; 0: all",
    )
    add(
        "--max-prefill-rows",
        type=whole,
        default=engine.max_prefill_rows,
        help="prompts per prefill launch, which running decodes may join; 1: no sharing, "
        "0: automatic",
    )
    add(
        "--images-per-launch",
        type=positive,
        default=engine.images_per_launch,
        help="images computed in one launch while many wait and none streams; 1: one by one",
    )
    add(
        "--max-waiting",
        type=positive,
        default=engine.max_waiting,
        help="tasks in the waiting queue",
    )
    add(
        "--max-waiting-per-tenant",
        type=whole,
        default=engine.max_waiting_per_tenant,
        help="of one tenant (metadata legato-tenant; without one: a shared tenant), 0: unbounded",
    )
    add(
        "--priority-seconds",
        metavar="SECONDS",
        type=not_negative,
        default=engine.priority_seconds,
        help="waiting time that equals one step of priority (metadata legato-priority, "
        "-100..100, higher starts first); 0 ignores priorities",
    )


def add_null(parser: argparse.ArgumentParser, engine: EngineConfig) -> None:
    null = parser.add_argument_group("with --model null")
    null.add_argument(
        "--null-step-ms",
        metavar="MS",
        type=not_negative,
        default=engine.null_step_ms,
        help="time between two tokens; 0: as short as can be",
    )
    null.add_argument(
        "--null-objects",
        metavar="N",
        type=whole,
        default=engine.null_objects,
        help="objects found, max_objects at most",
    )


# ---------------------------------------------------------------- service

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_listeners(add: Add, service: ServiceConfig) -> None:
    add("--listen", metavar="HOST:PORT", default=service.listen, help="where to listen")
    add(
        "--insecure",
        action="store_true",
        help="listen beyond loopback without TLS or without credentials",
    )
    add(
        "--admin-listen",
        metavar="ADDRESS",
        default=service.admin_listen,
        help="of AdminService: HOST:PORT, unix:PATH, same (as --listen) or off; by default a "
        "socket of this user, and with credentials also --listen, for the scope admin",
    )
    add(
        "--health-listen",
        metavar="HOST:PORT",
        default=service.health_listen,
        help="health checks alone, without TLS and credentials",
    )
    add(
        "--processes",
        type=positive,
        default=service.processes,
        help="service processes on this port before the engines; more than 1 helps at thousands of "
        "calls a second",
    )


def add_access(add: Add, service: ServiceConfig) -> None:
    add("--tls-cert", metavar="FILE", default=service.tls_cert, help="certificate chain, PEM")
    add("--tls-key", metavar="FILE", default=service.tls_key, help="its private key, PEM")
    add(
        "--tls-client-ca",
        metavar="FILE",
        default=service.tls_client_ca,
        help="authority that every client needs a certificate of, PEM",
    )
    add(
        "--tokens",
        metavar="FILE",
        default=service.tokens,
        help="credentials of callers, TOML: see legato token new",
    )
    add(
        "--quota-requests",
        metavar="RATE",
        type=not_negative,
        default=service.quota_requests,
        help="calls and frames a second with one credential; 0: unlimited",
    )
    add(
        "--quota-pixels",
        metavar="RATE",
        type=not_negative,
        default=service.quota_pixels,
        help="pixels of new images a second with one credential; 0: unlimited",
    )
    add(
        "--quota-sessions",
        metavar="N",
        type=whole,
        default=service.quota_sessions,
        help="open sessions with one credential; 0: unlimited",
    )


def add_limits(add: Add, engine: EngineConfig, service: ServiceConfig) -> None:
    add("--max-image-pixels", type=positive, default=engine.max_image_pixels)
    add("--max-request-bytes", type=positive, default=service.max_request_bytes)
    add("--max-sessions", type=positive, default=service.max_sessions, help="open at a time")
    add(
        "--max-session-age",
        metavar="SECONDS",
        type=above_zero,
        default=service.max_session_age,
        help="after which the client is asked to close a session",
    )
    add(
        "--max-image-bytes",
        type=positive,
        default=service.max_image_bytes,
        help="of an image that is uploaded or in shared memory",
    )
    add(
        "--shared-images",
        action="store_true",
        help="read images from shared memory: any client can name regions of this user",
    )
    add(
        "--image-ttl",
        metavar="SECONDS",
        type=above_zero,
        default=service.image_ttl,
        help="how long an uploaded image is held by default",
    )
    add(
        "--image-max-ttl",
        metavar="SECONDS",
        type=above_zero,
        default=service.image_max_ttl,
        help="how long a client may have an image held",
    )
    add(
        "--image-quota-bytes",
        type=positive,
        default=engine.image_quota_bytes,
        help="of prepared images that the engine holds for one client",
    )
    add(
        "--image-hold-bytes",
        type=positive,
        default=engine.image_hold_bytes,
        help="of prepared images that the engine holds for all clients",
    )
    add(
        "--drain-delay",
        metavar="SECONDS",
        type=not_negative,
        default=service.drain_delay,
        help="how long the server still serves after SIGTERM, reported as not ready, before it "
        "begins to drain",
    )
    add(
        "--drain-grace",
        metavar="SECONDS",
        type=not_negative,
        default=service.drain_grace,
        help="how long running requests may continue after the drain began",
    )


def add_telemetry(add: Add, service: ServiceConfig) -> None:
    add(
        "--metrics-listen",
        metavar="HOST:PORT",
        default=service.metrics_listen,
        help="where Prometheus scrapes /metrics over HTTP, without TLS; by default nowhere",
    )
    add(
        "--metrics",
        action="store_true",
        help="record metrics of calls for AdminService.GetMetrics; --metrics-listen implies it",
    )
    add(
        "--metrics-tenants",
        type=whole,
        default=service.metrics_tenants,
        help="tenants with a label of their own, the first that come; the others are `other`",
    )
    add(
        "--no-vllm-metrics",
        dest="vllm_metrics",
        action="store_false",
        help="without the metrics that repeat others under vLLM's names",
    )
    add(
        "--otlp-endpoint",
        metavar="URL",
        default=service.otlp_endpoint,
        help="OpenTelemetry collector that gets spans of calls by gRPC; by default none",
    )
    add(
        "--trace-ratio",
        type=share,
        default=service.trace_ratio,
        help="fraction of calls that are traced; a traceparent's own decision takes precedence",
    )


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, whose many lines would hide it."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse(arguments: Sequence[str] | None = None) -> ServiceConfig:
    """Exit with code 2 when the options are invalid."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    given["affinity"] = given["affinity"] == "on"
    config = ServiceConfig(
        engine=EngineConfig(**{name: given[name] for name in _fields(EngineConfig, given)}),
        **{name: given[name] for name in _fields(ServiceConfig, given)},
    )
    try:
        check(config)
    except ValueError as error:
        parser.error(str(error))
    return config


def _fields(kind: type[EngineConfig] | type[ServiceConfig], given: dict[str, object]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name in given]


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; without abbreviations, as `legato` must see which options were typed."""
    parser = _Parser(
        prog="legato serve",
        description="Serve a vision-language model over gRPC.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    engine, service = EngineConfig(), ServiceConfig()
    add_listeners(parser.add_argument, service)
    add_access(parser.add_argument, service)
    add_model(parser, engine, service)
    add_adapters(parser.add_argument, engine)
    add_queue(parser.add_argument, engine)
    add_limits(parser.add_argument, engine, service)
    add_telemetry(parser.add_argument, service)
    add_null(parser, engine)
    parser.add_argument(
        "--latency-policy",
        choices=LATENCY_POLICIES,
        default=engine.latency_policy,
        help="low-latency: spend CPU time to respond sooner (busy polling); shared: leave cores to "
        "other threads; auto: low-latency with 8 or more cores, else shared",
    )
    parser.add_argument(
        "--crash-folder",
        metavar="FOLDER",
        default=engine.crash_folder,
        help="where an engine that died leaves a crash bundle; by default legato-crashes-UID in "
        "the temporary folder",
    )
    parser.add_argument(
        "--crash-bundles",
        metavar="N",
        type=whole,
        default=engine.crash_bundles,
        help="newest crash bundles that are kept; 0: none is written",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default=service.log_level)
    return parser
