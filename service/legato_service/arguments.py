"""The options of `legato serve`."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
from legato_engine.config import (
    CPU_KERNELS,
    DECODE_PATHS,
    JPEG_DECODERS,
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


def _number(
    kind: type[int] | type[float], is_valid: Callable[[float], bool], rule: str
) -> Callable[[str], float]:
    """Return the reader of a number for which `is_valid`."""
    name = "a whole number" if kind is int else "a number"

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:  # argparse would name the function that reads it
            raise argparse.ArgumentTypeError(f"must be {name}, not {text!r}") from None
        if not is_valid(value):
            shown = value if kind is int else f"{value:g}"
            raise argparse.ArgumentTypeError(f"must {rule}, and is {shown}")
        return value

    return read


fraction = _number(float, lambda value: 0 < value < 1, "be above 0 and below 1")
share = _number(float, lambda value: 0 <= value <= 1, "be 0 to 1")
not_negative = _number(float, lambda value: 0 <= value < math.inf, "be finite and not negative")
above_zero = _number(float, lambda value: 0 < value < math.inf, "be finite and above 0")
whole = _number(int, lambda value: value >= 0, "not be negative")
positive = _number(int, lambda value: value >= 1, "be at least 1")


# ---------------------------------------------------------------- options

# An option has one line for its form, and the next ones for its help.
# fmt: off


def add_model(add: Add) -> None:
    add("--model", type=model, metavar="NAME",
        help=f"model to serve: one of {', '.join(MODELS)}; null: made-up results")
    add("--models", metavar="FOLDER",
        help="folder of models from `legato pull`, default ~/.local/share/legato/models")
    add("--weights", metavar="PATH",
        help="weights to load: a folder, or a .safetensors, .pt or .gguf file")
    add("--tokenizer", metavar="FILE", help="tokenizer.json to use")
    add("--max-context", metavar="TOKENS", type=whole,
        help="maximum tokens of prompt and output together; 0: the model's own, for text models at "
        "most 8192")
    add("--random-weights", action="store_true", help="seeded random weights, for benchmarks")
    add("--refiner", metavar="FILE", help="head that improves outlines, default: none")


def add_device(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    devices = group.add_mutually_exclusive_group()
    devices.add_argument("--device", metavar="DEVICE",
        help="device of the engine: auto, cpu, cuda or cuda:N")
    devices.add_argument("--devices", metavar="all|DEVICE,DEVICE",
        help="several, as cuda:0,cuda:1: an engine on each, behind one service")
    add("--affinity", choices=("on", "off"),
        help="with --devices: prefer the engine that holds a request's image, prefix, adapter or "
        "session; off: only the shortest wait counts")
    add("--dtype", choices=("auto", "f32", "bf16"), help="number format of weights and activations")
    add("--vision-dtype", choices=("auto", "fp8"),
        help="number format of the vision encoder's weights, and in fp8 of copies of the decoder's "
        "that images pass, but for layers with experts (Moondream 3); auto: as --dtype")
    add("--kv-dtype", choices=("auto", "model", "fp8"),
        help="number format of cached keys and values; auto: fp8 if the weights have scales, else "
        "as model")
    add("--weight-dtype", choices=WEIGHT_DTYPES,
        help="number format of the decoder's layers: fp8 (GPU), int8 and int4 need less memory and "
        "time; stored: the blocks of a GGUF file as they are; packed: as --dtype, one copy "
        "on a GPU; auto: stored of a GGUF file on a CPU, packed on a GPU without the resident "
        "kernel, else as model")
    add("--cpu-kernels", choices=CPU_KERNELS,
        help="kernels of layers on a CPU; auto: Legato's own if there is a C++ compiler, else "
        "torch's")
    add("--jpeg-decoder", choices=JPEG_DECODERS,
        help="decoder of plain JPEGs up to 4 megapixels; gpu: nvJPEG, which needs torchvision "
        "and changes pixels a little")
    add("--threads", metavar="N", type=whole, help="number of CPU threads; 0: one for each core")
    add("--latency-policy", choices=LATENCY_POLICIES,
        help="low-latency: spend CPU time to respond sooner (busy polling); shared: leave cores to "
        "other threads; auto: low-latency with 8 or more cores, else shared")


def add_decoding(add: Add) -> None:
    add("--pipeline-depth", type=int, choices=(0, 1, 2),
        help="decode steps in flight; 2: launch each step before the previous one is read back; "
        "0: 2 on a GPU, else 1")
    add("--decode-path", choices=DECODE_PATHS,
        help="how decode steps are launched; graph: a launch for every step; loop: many steps in "
        "one; resident: these as one kernel, where it can run; auto: loop on a GPU with kernels "
        "for the model, resident where that was measured to be faster there, else graph")
    add("--depth-switch", action="store_true",
        help="let an operator change --pipeline-depth while the server runs")
    add("--speculation", type=speculation, metavar="off|seed|budget|fixed:K",
        help="draft tokens of text that one step verifies; results stay the same")
    add("--draft", metavar="FILE|NAME:FOLDER|lookup",
        help="proposer of draft tokens, default: the model's own draft, else prompt lookup")


def add_adapters(add: Add) -> None:
    add("--adapters", metavar="FOLDER",
        help="folder of adapters (files, or PEFT folders), served by their names")
    add("--adapter-slots", metavar="N", type=positive,
        help="number of adapters on the device at a time")
    add("--max-adapter-rank", metavar="N", type=positive,
        help=f"maximum rank of an adapter, up to {MAX_ADAPTER_RANK}")


def add_queue(add: Add) -> None:
    add("--max-running", metavar="N", type=positive,
        help="maximum number of tasks that decode at a time")
    add("--kv-memory-fraction", metavar="0..1", type=fraction,
        help="fraction of the memory left by the weights for the KV cache")
    add("--crops-per-launch", metavar="N", type=whole,
        help="number of image crops encoded per launch while other requests stream; 0: all")
    add("--max-prefill-rows", metavar="N", type=whole,
        help="maximum number of prompts per prefill launch, which running decodes may join; 1: no "
        "sharing, 0: automatic")
    add("--images-per-launch", metavar="N", type=positive,
        help="number of images encoded per launch while many wait and none streams")
    add("--max-waiting", metavar="N", type=positive,
        help="maximum number of tasks in the waiting queue")
    add("--max-waiting-per-tenant", metavar="N", type=whole,
        help="maximum number of waiting tasks of one tenant (metadata legato-tenant; without "
        "one: a shared tenant); 0: unlimited")
    add("--priority-seconds", metavar="SECONDS", type=not_negative,
        help="seconds of waiting that equal one step of priority (metadata legato-priority, "
        "-100..100, higher starts first); 0 ignores priorities")


def add_null(add: Add) -> None:
    add("--null-step-ms", metavar="MS", type=not_negative,
        help="milliseconds between two tokens; 0: as fast as possible")
    add("--null-objects", metavar="N", type=whole,
        help="number of objects found, up to max_objects")


def add_listeners(add: Add) -> None:
    add("--listen", metavar="HOST:PORT", help="address to listen on")
    add("--insecure", action="store_true",
        help="listen beyond loopback without TLS or without credentials")
    add("--admin-listen", metavar="ADDRESS",
        help="address of AdminService: HOST:PORT, unix:PATH, same (as --listen) or off; default: a "
        "socket of this user, and with credentials also --listen, for the scope admin")
    add("--health-listen", metavar="HOST:PORT",
        help="address that serves only health checks, without TLS and credentials")
    add("--processes", metavar="N", type=positive,
        help="number of service processes on this port before the engines; more than 1 helps at "
        "thousands of calls a second")


def add_access(add: Add) -> None:
    add("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    add("--tls-key", metavar="FILE", help="private key of --tls-cert, PEM")
    add("--tls-client-ca", metavar="FILE",
        help="authority that must have signed every client's certificate, PEM")
    add("--tokens", metavar="FILE", help="credentials of callers, TOML: see `legato token new`")
    add("--quota-requests", metavar="RATE", type=not_negative,
        help="maximum calls and frames per second with one credential; 0: unlimited")
    add("--quota-pixels", metavar="RATE", type=not_negative,
        help="maximum pixels of new images per second with one credential; 0: unlimited")
    add("--quota-sessions", metavar="N", type=whole,
        help="maximum number of open sessions with one credential; 0: unlimited")


def add_limits(add: Add) -> None:
    add("--max-image-pixels", metavar="PIXELS", type=positive,
        help="maximum width times height of an image")
    add("--max-request-bytes", metavar="BYTES", type=positive,
        help="maximum size of a request, its image included")
    add("--max-sessions", metavar="N", type=positive, help="maximum number of open sessions")
    add("--max-session-age", metavar="SECONDS", type=above_zero,
        help="age at which the client is asked to close a session")
    add("--max-image-bytes", metavar="BYTES", type=positive,
        help="maximum size of an image that is uploaded or in shared memory")
    add("--shared-images", action="store_true",
        help="read images from shared memory: any client can name regions of this user")
    add("--image-ttl", metavar="SECONDS", type=above_zero,
        help="time that an uploaded image is held unless the client asks for another")
    add("--image-max-ttl", metavar="SECONDS", type=above_zero,
        help="maximum time for which a client may have an image held")
    add("--image-quota-bytes", metavar="BYTES", type=positive,
        help="maximum size of prepared images held for one client")
    add("--image-hold-bytes", metavar="BYTES", type=positive,
        help="maximum size of prepared images held for all clients")


def add_lifecycle(add: Add) -> None:
    add("--drain-delay", metavar="SECONDS", type=not_negative,
        help="time that the server still serves after SIGTERM, reported as not ready, before it "
        "begins to drain")
    add("--drain-grace", metavar="SECONDS", type=not_negative,
        help="time that running requests may continue after the drain began")
    add("--crash-folder", metavar="FOLDER",
        help="folder for the crash bundle of an engine that died, default: legato-crashes-UID in "
        "the temporary folder")
    add("--crash-bundles", metavar="N", type=whole,
        help="number of newest crash bundles that are kept; 0: none is written")


def add_telemetry(add: Add) -> None:
    add("--log-level", choices=("debug", "info", "warning", "error"),
        help="least severe messages that are logged")
    add("--metrics-listen", metavar="HOST:PORT",
        help="address where Prometheus scrapes /metrics over HTTP, without TLS, default: none")
    add("--metrics", action="store_true",
        help="record metrics of calls for AdminService.GetMetrics; --metrics-listen implies it")
    add("--metrics-tenants", metavar="N", type=whole,
        help="number of tenants with a label of their own, the first that come; the others are "
        "`other`")
    add("--no-vllm-metrics", dest="vllm_metrics", action="store_false",
        help="omit the metrics that repeat others under vLLM's names")
    add("--otlp-endpoint", metavar="URL",
        help="OpenTelemetry collector that receives spans of calls by gRPC, default: none")
    add("--trace-ratio", metavar="0..1", type=share,
        help="fraction of calls that are traced; a traceparent's own decision takes precedence")


# fmt: on
# ---------------------------------------------------------------- parser


class _Formatter(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_told = isinstance(default, bool) or "default" in text
        if is_told or default in (None, "", argparse.SUPPRESS):
            return text
        return f"{text}; default %(default)s"


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, whose many lines would hide it."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parse(arguments: Sequence[str] | None = None) -> ServiceConfig:
    """Exit with code 2 when the options are invalid."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    given["affinity"] = given["affinity"] == "on"
    of_engine, own = (
        {name: given[name] for name in kind.__struct_fields__ if name in given}
        for kind in (EngineConfig, ServiceConfig)
    )
    config = ServiceConfig(engine=EngineConfig(**of_engine), **own)
    try:
        check(config)
    except ValueError as error:
        parser.error(str(error))
    return config


def make_parser(
    kind: Callable[..., argparse.ArgumentParser] = _Parser,
) -> argparse.ArgumentParser:
    """Build the parser; `kind` takes no abbreviations, as `legato` must see which were typed."""
    parser = kind(prog="legato serve", description="Serve a vision-language model over gRPC.")

    def group(title: str) -> Add:
        return parser.add_argument_group(title).add_argument

    add_listeners(group("network"))
    add_access(group("access"))
    add_model(group("model"))
    add_device(parser.add_argument_group("device"))
    add_decoding(group("decoding"))
    add_adapters(group("adapters"))
    add_queue(group("scheduling"))
    add_limits(group("limits"))
    add_lifecycle(group("stopping and crashes"))
    add_telemetry(group("telemetry"))
    add_null(group("made-up results (--model null)"))
    defaults = msgspec.structs.asdict(ServiceConfig()) | msgspec.structs.asdict(EngineConfig())
    defaults["affinity"] = "on" if defaults["affinity"] else "off"
    del defaults["engine"]
    parser.set_defaults(**defaults)
    return parser
