"""What rounded weights cost: F1 of legato-tiny's Detect on a CPU in each of four forms.

    python -m benchmarks rounding
    python -m benchmarks rounding --text .tools/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Scenes of coloured shapes are drawn by `legato_training.labelled`, so their truth is exact. Every
form is served in turn and asked for all that each picture shows and for one thing that it does not.
A box is right at an IoU of 0.5. All forms answer the same questions, so a difference from float32
is taken picture by picture; its 95 % interval is a bootstrap over pictures.

With `--text`, SmolLM2's perplexity on the first tokens of the licence, and the share of its
answers' tokens that stay the likeliest: by the CPU's kernels, and with the weights that a GPU
packs, dequantised to float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from legato_client import Client
from legato_client.calibration.scored import (
    ANNOTATIONS,
    LabelledImage,
    Scored,
    read_labels,
    score,
)
from legato_client.cli.demo import LocalServer

from benchmarks import record
from benchmarks.record import ROOT

if TYPE_CHECKING:
    import torch
    from legato_engine.models.decoder.model import DecoderModel

FORMS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("--dtype", "bf16"),
    "int8": ("--weight-dtype", "int8"),
    "int4": ("--weight-dtype", "int4"),
}
"""Options of `legato serve`; the first form is what the others are compared with."""

TEXT_FORMS = ("float32", "int8 on a CPU", "int4 on a CPU", "stored on a CPU", "fp8", "int8", "int4")
"""Forms of a text model; the first is what the others are compared with."""

_ANSWERS = ROOT / "tests/published/smollm2.json"  # prompts and greedy answers of transformers
_TEXT_TOKENS = 512

_SKILL = "detect"
_ABSENT = 1  # things asked for that a picture does not show
_RESAMPLES = 4000
_START_SECONDS = _CALL_SECONDS = 600.0
_HITS, _FOUND, _TRUE = range(3)

Counts = npt.NDArray[np.int64]
"""Right boxes, found ones and true ones of each picture, [P, 3]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Of two F1, with its 95 % interval."""

    value: float
    low: float
    high: float


def main(argv: Sequence[str]) -> int:
    """Measure all forms and write a record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rounding", description=__doc__)
    parser.add_argument("--scenes", type=int, default=320)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--folder", type=Path, help="keep the drawn scenes there, or take those that it has"
    )
    parser.add_argument("--parallel", type=int, default=4, help="pictures asked about at a time")
    parser.add_argument("--text", type=Path, metavar="GGUF", help="measure SmolLM2 instead")
    parser.add_argument("--name", default="")
    arguments = parser.parse_args(argv)
    if arguments.text is not None:
        return _record_text(arguments.text, arguments.name or "rounding_text")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        pictures = scenes(folder, arguments.scenes, arguments.seed)
        counts = {
            name: counted(pictures, answers(options, pictures, arguments.parallel))
            for name, options in FORMS.items()
        }
    reference = counts[next(iter(FORMS))]
    differences = {
        name: difference(each, reference, arguments.seed)
        for name, each in counts.items()
        if each is not reference
    }
    num_true = int(reference[:, _TRUE].sum())
    questions = sum(len(picture.boxes) for picture in pictures)
    figures = {
        "pictures": len(pictures),
        "questions": questions,
        "objects": num_true,
        "f1": {name: f1(each) for name, each in counts.items()},
        "differences": {name: dataclasses.asdict(each) for name, each in differences.items()},
        "counts": {name: each.sum(0).tolist() for name, each in counts.items()},
    }
    told = f"{len(pictures)} pictures, {questions} questions, {num_true} objects."
    record.write(
        arguments.name or "rounding",
        "F1 of legato-tiny's Detect with rounded weights",
        figures,
        [table(counts, differences), "", told],
    )
    return 0


def scenes(folder: Path, count: int, seed: int) -> Sequence[LabelledImage]:
    """At most so many pictures of a folder, which are drawn if it has none.

    Those without an object are left out.
    """
    if not (folder / ANNOTATIONS).exists():
        program = [sys.executable, "-m", "legato_training.labelled", "--shapes"]
        options = ["--out", str(folder), "--scenes", str(count), "--seed", str(seed)]
        subprocess.run([*program, *options], cwd=ROOT / "training", check=True)
    return read_labels(folder, folder / ANNOTATIONS, absent=_ABSENT, seed=seed)[:count]


def answers(
    options: Sequence[str], pictures: Sequence[LabelledImage], parallel: int
) -> Sequence[Scored]:
    """Ask a server with these options about every image."""
    with LocalServer(["--device", "cpu", *options]) as server:
        server.wait_until_serving(_START_SECONDS, lambda _: None)
        with Client(server.target, timeout=_CALL_SECONDS) as client:
            return score(client, pictures, [_SKILL], parallel=parallel, tell=lambda: None)


def counted(pictures: Sequence[LabelledImage], found: Sequence[Scored]) -> Counts:
    """Count hits, finds and truths in the order of the images."""
    counts = {picture.number: [0, 0, sum(map(len, picture.boxes.values()))] for picture in pictures}
    for each in found:
        counts[each.image][_HITS] += each.right
        counts[each.image][_FOUND] += 1
    return np.array([counts[picture.number] for picture in pictures], np.int64)


def f1(counts_P3: Counts) -> float:
    """Of all pictures together."""
    hits, found, true = counts_P3.sum(0)
    return float(2 * hits / (found + true))


def difference(counts_P3: Counts, reference_P3: Counts, seed: int) -> Difference:
    """How much better a form is than the reference; negative: worse."""
    choice = np.random.default_rng(seed)
    size = _RESAMPLES, len(counts_P3)
    chosen_RP = choice.integers(len(counts_P3), size=size)
    values = [f1(counts_P3[chosen]) - f1(reference_P3[chosen]) for chosen in chosen_RP]
    low, high = np.quantile(values, (0.025, 0.975))
    return Difference(f1(counts_P3) - f1(reference_P3), float(low), float(high))


def table(counts: Mapping[str, Counts], differences: Mapping[str, Difference]) -> str:
    """Format a row for each form."""
    rows = []
    for name, each in counts.items():
        hits, found, true = each.sum(0)
        more = differences.get(name)
        told = "-" if more is None else f"{more.value:+.4f} ({more.low:+.4f} to {more.high:+.4f})"
        rows.append((name, f"{f1(each):.4f}", told, f"{hits / true:.4f}", f"{hits / found:.4f}"))
    heads = ("weights", "F1", "more than float32 (95 %)", "recall", "precision")
    return record.table(heads, rows)


# ---------------------------------------------------------------- text models


@dataclasses.dataclass(frozen=True, slots=True)
class TextCost:
    """Perplexity of a text, and the share of answers' tokens that are the likeliest ones."""

    perplexity: float
    agreement: float


def _record_text(weights: Path, name: str) -> int:
    costs = {form: text_cost(weights, form) for form in TEXT_FORMS}
    rows = [(form, f"{c.perplexity:.2f}", f"{c.agreement:.1%}") for form, c in costs.items()]
    record.write(
        name,
        "Perplexity and greedy agreement of SmolLM2-135M with rounded weights",
        {form: dataclasses.asdict(cost) for form, cost in costs.items()},
        [record.table(("weights", "perplexity", "answers' tokens that stay"), rows)],
    )
    return 0


def text_cost(weights: Path, form: str) -> TextCost:
    """Evaluate a model in one form."""
    import torch

    model, text = _text_model(weights, form)
    with torch.inference_mode():
        rows, told = [_hidden(model, text)[:-1]], list[int]()
        for each in json.loads(_ANSWERS.read_text()):
            ids = [*each["prompt"], *each["tokens"]]
            rows.append(_hidden(model, ids)[len(each["prompt"]) - 1 : -1])
            told += each["tokens"]
        logits_TV = model.logits(torch.cat(rows))  # at once: a packed head is read for each call
        of_text, of_answers = torch.split(logits_TV, [len(text) - 1, len(told)])
        loss = torch.nn.functional.cross_entropy(of_text, torch.tensor(text[1:]))
        same = (of_answers.argmax(1) == torch.tensor(told)).double().mean()
    return TextCost(float(loss.exp()), float(same))


def _text_model(weights: Path, form: str) -> tuple[DecoderModel, list[int]]:
    """Load a model in a form, and the tokens of the text."""
    import torch
    from legato_engine.config import LoadOptions
    from legato_engine.kernels.map_codes import KINDS
    from legato_engine.kernels.step import StepMap
    from legato_engine.layers.linear import Linear
    from legato_engine.models.decoder.families import DecoderBundle
    from legato_engine.models.decoder.gguf import gguf_tokenizer
    from legato_engine.models.decoder.model import DecoderModel, load_weights
    from legato_engine.models.decoder.tokenizer import TextTokenizer
    from legato_engine.models.gguf import read_gguf
    from legato_engine.models.registry import DEFAULT, resolve

    bundle = resolve(DEFAULT, str(weights), max_context=1024)
    assert isinstance(bundle, DecoderBundle), "a GGUF file is a text model"
    tokenizer = TextTokenizer(gguf_tokenizer(read_gguf(weights)))
    ids = list(tokenizer.encode((ROOT / "LICENSE").read_text())[:_TEXT_TOKENS])
    cpu = torch.device("cpu")
    if form not in KINDS:
        weight_dtype = "model" if form == "float32" else form.split(maxsplit=1)[0]
        model = bundle.load(cpu, torch.float32, LoadOptions(weight_dtype=weight_dtype))
        return model, ids
    with torch.device("meta"):
        network = bundle.family.network(bundle.config).to(torch.bfloat16)
    assert bundle.weights is not None, "a GGUF file has weights"
    load_weights(network, bundle.weights, cpu)
    network.quantise(KINDS[form])
    for layer in network.modules():
        if isinstance(layer, Linear) and isinstance(part := layer.packed, StepMap):
            layer.weight, layer.packed = torch.nn.Parameter(part.exact()), None
    return DecoderModel(network.float()), ids


def _hidden(model: DecoderModel, ids: Sequence[int]) -> torch.Tensor:
    """Return the hidden state after each token, [T, D]."""
    import torch
    from legato_engine.models.paged_attention import KVCache, PrefillSpan

    shape = (model.num_layers, 2, model.num_kv_heads, len(ids), model.head_dim)
    kv = KVCache(torch.zeros(shape), torch.zeros(shape))
    ids_T = torch.tensor(ids)
    x_TD = model.embed(ids_T, torch.zeros(len(ids), 2))
    span = PrefillSpan(0, torch.ones(1, dtype=torch.int64), bidirectional=False)
    return model.prefill(x_TD, span, kv)
