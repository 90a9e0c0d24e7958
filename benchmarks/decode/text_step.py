"""A text decoder's step on a GPU beside transformers', and the time to read its bytes.

Random weights in the shapes of published models, one token a stream at the same position. Legato's
step is a captured graph; transformers has a static cache and torch.compile with CUDA graphs. Both
end in logits; neither waits for the host. Contenders take turns: with several `--weights` all of
these, but transformers only has bf16.

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
MODELS: Mapping[str, DecoderConfig] = {
    "SmolLM2-135M": _BASE,
    "Llama-3.2-1B": dataclasses.replace(
        _BASE, dim=2048, ff_dim=8192, num_layers=16, vocab_size=128256, heads=HeadPlan(32, 8, 64)
    ),
}
PAGE = 16
DEVICE = torch.device("cuda")
WEIGHTS = ("bf16", *KINDS, *GGUF_FORMATS)
Step = Callable[[], object]


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
        network.quantise(KINDS.get(weights, WeightKind.BF16))
    return network


def legato(
    config: DecoderConfig, streams: int, position: int, device: CudaDevice, weights: str = "bf16"
) -> Step:
    """Return a replay of the captured step."""
    model = DecoderModel(random_network(config, weights))
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

    return run


def transformers_step(config: DecoderConfig, streams: int, position: int) -> Step:
    """Return a compiled step that samples nothing; its cache is as long as Legato's context."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads.num_heads,
        num_key_value_heads=config.heads.num_kv_heads,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=config.tied_head,
    )
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model: Any = LlamaForCausalLM(theirs)
    model.eval()
    torch.set_default_dtype(torch.float32)
    cache = StaticCache(
        config=theirs,
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
    return step


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
    """Milliseconds to read the weights once, and the keys and values, on an H200."""
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
            steps: dict[str, Step] = {}
            if not options.alone:  # first: its compiler frees the memory that libraries work in
                with torch.no_grad():
                    steps["transformers"] = transformers_step(*place)
            with torch.inference_mode():
                for weights in options.weights:
                    steps[weights] = legato(*place, device, weights)
            with torch.no_grad():
                found = times(steps, device.compute.stream, options.rounds)
            floor = floor_ms(*place)
            figures.append({"model": name, "streams": streams, "ms": found, "floor_ms": floor})
            times_of = [f"{found[each]:.3f}" for each in steps]
            rows.append((name, str(streams), f"{floor:.3f}", *times_of))
            print(*rows[-1], flush=True)
            del steps
            torch.cuda.empty_cache()
    contenders = [*options.weights] if options.alone else ["transformers", *options.weights]
    table = record.table(("model", "streams", "bf16's bytes, ms", *contenders), rows)
    title = f"A text decoder's step in ms, {options.position} positions, random weights"
    record.write(options.name, title, {"steps": figures}, [table])
    return 0
