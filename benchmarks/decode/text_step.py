"""A text decoder's step on a GPU beside transformers', and the time to read its bytes.

Random weights in the shapes of published models, one token a stream at the same position. Legato's
step is a captured graph; transformers has a static cache and torch.compile with CUDA graphs. Both
end in logits; neither waits for the host. Contenders take turns: with several `--weights` all of
these, but transformers only has bf16. Memory is that of a contender's weights, packed copies among
them.

Shape legend: B streams, V vocabulary, M pages of a stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from legato_engine.device.cuda import CudaDevice, elapsed_ms, timing_event
from legato_engine.kernels.map_codes import KINDS, WeightKind
from legato_engine.layers.attention import HeadPlan
from legato_engine.models.checkpoint import GGUF_FORMATS
from legato_engine.models.decoder.config import DecoderConfig
from legato_engine.models.decoder.model import DecoderModel, DecoderNetwork
from legato_engine.models.paged_attention import DecodeBatch, KVCache

from benchmarks import record, shared_options
from benchmarks.decode.step_bench import BANDWIDTH

_BASE = DecoderConfig(
    dim=576,
    ff_dim=1536,
    num_layers=30,
    vocab_size=49152,
    max_context=2048,
    norm_eps=1e-5,
    heads=HeadPlan(9, 3, 64),
    rope_theta=1e5,
    rotary_dim=64,
    rope_scaling=None,
    tied_head=True,
)
_QWEN3 = dataclasses.replace(
    _BASE,
    dim=2048,
    ff_dim=6144,
    num_layers=28,
    vocab_size=151_936,
    norm_eps=1e-6,
    heads=HeadPlan(16, 8, 128, norm_eps=1e-6),
    rope_theta=5e6,
    rotary_dim=128,
)
MODELS: Mapping[str, DecoderConfig] = {
    "SmolLM2-135M": _BASE,
    "Llama-3.2-1B": dataclasses.replace(
        _BASE, dim=2048, ff_dim=8192, num_layers=16, vocab_size=128256, heads=HeadPlan(32, 8, 64)
    ),
    "Qwen3-0.6B": dataclasses.replace(_QWEN3, dim=1024, ff_dim=3072, rope_theta=1e6),
    "Qwen3-1.7B": _QWEN3,  # the text model of Qwen3-VL 2B
}
PAGE = 16
DEVICE = torch.device("cuda")
WEIGHTS = ("bf16", "auto", *KINDS, *GGUF_FORMATS)  # auto: bf16, and packed copies for few streams
Step = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """A step, and the bytes of memory that its weights take."""

    step: Step
    weights: int


def random_network(config: DecoderConfig, weights: str) -> DecoderNetwork:
    """Return a network of `WEIGHTS` on the GPU."""
    with torch.device("meta"):
        network = DecoderNetwork(config).to(torch.bfloat16)
    if weights in GGUF_FORMATS:
        blocks = GGUF_FORMATS[weights].of_gpu
        names = [network.checkpoint_name("embed_tokens"), *network.map_formats(blocks)]
        network.expect_codes(dict.fromkeys(names, blocks))
    network = network.to_empty(device=DEVICE).requires_grad_(requires_grad=False)
    for parameter in network.parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    for name, buffer in network.named_buffers():
        if name.endswith("codes"):
            buffer.view(torch.uint8).random_(0, 256)
        elif name.endswith(("scales", "minima")):
            buffer.fill_(-0.03 if name.endswith("minima") else 0.004)
    if weights != "bf16":
        network.quantise(KINDS.get(weights, WeightKind.BF16), keeps_maps=weights == "auto")
    return network


def legato(
    config: DecoderConfig, streams: int, position: int, device: CudaDevice, weights: str = "bf16"
) -> Contender:
    """Return a replay of the captured step."""
    before = torch.cuda.memory_allocated()
    network = random_network(config, weights)
    taken = torch.cuda.memory_allocated() - before
    model = DecoderModel(network)
    pages = config.max_context // PAGE
    shape = config.num_layers, streams * pages + 1, config.heads.num_kv_heads, PAGE
    kv = KVCache(
        *(
            torch.randn(*shape, config.heads.head_dim, device=DEVICE, dtype=torch.bfloat16)
            for _ in range(2)
        )
    )
    table_BM = torch.randperm(streams * pages, device=DEVICE).view(streams, pages) + 1
    batch = DecodeBatch(torch.full((streams,), position, device=DEVICE), table_BM)
    token_B, payload_B2 = torch.arange(streams, device=DEVICE), torch.zeros(streams, 2).to(DEVICE)

    logits_BV = torch.empty(streams, config.vocab_size, device=DEVICE)

    def step() -> None:
        hidden_BD = model.decode(model.embed(token_B, payload_B2), batch, kv)
        logits_BV.copy_(model.logits(hidden_BD))

    replay = device.capture(step)

    def run() -> Step:
        replay()
        return step  # whose tensors the graph reads

    return Contender(run, taken)


def transformers_model(config: DecoderConfig) -> Any:
    """Return the same shape as transformers has it, on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    made: tuple[Any, Any] = LlamaConfig, LlamaForCausalLM
    if config.heads.norm_eps is not None:
        made = Qwen3Config, Qwen3ForCausalLM
    make_config, make = made
    theirs = make_config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads.num_heads,
        num_key_value_heads=config.heads.num_kv_heads,
        head_dim=config.heads.head_dim,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=config.tied_head,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = make(theirs)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def transformers_step(config: DecoderConfig, streams: int, position: int) -> Contender:
    """Return a compiled step that samples nothing; its cache is as long as Legato's context."""
    from transformers import StaticCache

    before = torch.cuda.memory_allocated()
    with DEVICE:
        model = transformers_model(config)
    taken = torch.cuda.memory_allocated() - before
    cache = StaticCache(
        config=model.config,
        max_cache_len=config.max_context,
        max_batch_size=streams,
        device=DEVICE,
        dtype=torch.bfloat16,
    )
    prompt_BT = torch.randint(0, config.vocab_size, (streams, position), device=DEVICE)
    model(input_ids=prompt_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token_B1 = prompt_BT[:, :1]
    position_11 = torch.tensor([[position]], device=DEVICE)

    def forward(token_B1: torch.Tensor, position_11: torch.Tensor) -> torch.Tensor:
        logits_BV: torch.Tensor = model(
            input_ids=token_B1,
            position_ids=position_11,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits_BV

    torch.compiler.reset()
    compiled = torch.compile(forward, mode="reduce-overhead", dynamic=False)
    begin: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin

    def step() -> torch.Tensor:
        begin()
        return compiled(token_B1, position_11)

    for _ in range(5):
        step()
    return Contender(step, taken)


def times(steps: Mapping[str, Step], stream: torch.cuda.Stream, rounds: int) -> dict[str, float]:
    """Return median milliseconds of each contender's steps, 50 back to back in a turn."""
    count, found = 50, {name: list[float]() for name in steps}
    begin, end = (timing_event() for _ in range(2))
    for _ in range(rounds):
        for name, step in steps.items():
            with torch.cuda.stream(stream):
                step()
                begin.record()
                for _ in range(count):
                    step()
                end.record()
            torch.cuda.synchronize()
            found[name].append(elapsed_ms(begin, end) / count)
    return {name: statistics.median(values) for name, values in found.items()}


def floor_ms(config: DecoderConfig, streams: int, position: int) -> float:
    """Milliseconds to read the weights once in bf16, and the keys and values, on an H200."""
    with torch.device("meta"):
        weights = sum(each.numel() for each in DecoderNetwork(config).parameters())
    kv = 2 * config.num_layers * config.heads.num_kv_heads * config.heads.head_dim
    return 2 * (weights + kv * (position + 1) * streams) / BANDWIDTH * 1e3


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks text_step", description=__doc__)
    parser.add_argument("--models", type=shared_options.names_of(MODELS), default=list(MODELS))
    parser.add_argument("--streams", default=[1, 4, 8, 32], type=shared_options.numbers)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS[:1])
    parser.add_argument("--position", type=int, default=850)
    parser.add_argument("--rounds", type=shared_options.positive, default=7)
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--name", default="text_step")
    options = parser.parse_args(arguments)
    device, rows, figures = CudaDevice(0), [], []
    for name in options.models:
        for streams in options.streams:
            place = MODELS[name], streams, options.position
            contenders: dict[str, Contender] = {}
            if not options.alone:  # first: its compiler frees the memory that libraries work in
                with torch.no_grad():
                    contenders["transformers"] = transformers_step(*place)
            with torch.inference_mode():
                for weights in options.weights:
                    contenders[weights] = legato(*place, device, weights)
            steps = {each: contender.step for each, contender in contenders.items()}
            with torch.no_grad():
                found = times(steps, device.compute.stream, options.rounds)
            floor, theirs = floor_ms(*place), found.get("transformers")
            for each, ms in found.items():
                gib = contenders[each].weights / 2**30
                figures.append(
                    {"model": name, "streams": streams, "contender": each, "ms": ms, "gib": gib}
                )
                ratio = "-" if theirs is None else f"{theirs / ms:.2f}"
                cells = name, streams, each, f"{ms:.3f}", f"{floor:.3f}", f"{gib:.2f}", ratio
                rows.append(cells)
                print(*cells, flush=True)
            del steps, contenders
            torch.cuda.empty_cache()
    heads = "model", "streams", "weights", "ms", "bf16 bytes, ms", "GiB", "transformers / this"
    table = record.table(heads, rows)
    title = f"A text decoder's step, {options.position} positions, bfloat16, random weights"
    record.write(options.name, title, {"steps": figures}, [table])
    return 0
