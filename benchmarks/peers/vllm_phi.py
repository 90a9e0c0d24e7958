"""vLLM on the same decoder with random weights, where it is installed.

The time of a step is the difference of two runs that differ only in their number of tokens, which
cancels prefill, start and end.
"""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import peers

REPEATS = 5


def configuration(shape: peers.Shape) -> dict[str, Any]:
    """Return the decoder's config.json."""
    return {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "vocab_size": shape.vocab,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ff_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_context,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def step_ms(model: Any, sampling: Any, streams: int, options: peers.Options) -> float:
    """Return median milliseconds of a step of `streams` different prompts."""
    prompts = [
        {"prompt_token_ids": [(row * 7919 + place) % 500 + 5 for place in range(options.context)]}
        for row in range(streams)
    ]

    def seconds(tokens: int) -> float:
        limits = sampling(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        model.generate(prompts, limits, use_tqdm=False)
        return time.perf_counter() - start

    few, many = 4, 4 + 4 * options.steps
    seconds(few)
    differences = [seconds(many) - seconds(few) for _ in range(REPEATS)]
    return statistics.median(differences) * 1e3 / (many - few)


def main() -> None:
    """Emit a row per number of streams."""
    options = peers.parse()
    vllm: Any = importlib.import_module("vllm")
    peers.emit({"versions": {"vllm": str(vllm.__version__)}})
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(configuration(options.shape))
        (Path(folder) / "config.json").write_text(text)
        model = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=options.shape.max_context,
            gpu_memory_utilization=0.5,
        )
        for streams in options.streams:
            step = step_ms(model, vllm.SamplingParams, streams, options)
            peers.emit({"streams": streams, "step_ms": step, "steps": 4 * options.steps})


if __name__ == "__main__":
    main()
