"""Our model beside Moondream's open reference, on the same random weights.

`python -m benchmarks reference --checkout FOLDER` imports a checkout of
github.com/vikhyat/moondream, and copies nothing of it. A run is a width and a dtype: hidden states
and logits of every forward with the reference's tokens as input of both, then the engine's own
answers, through its scheduler, token for token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from legato_engine.types import QuerySpec
from PIL import Image

from benchmarks import record
from benchmarks.image.charts import Photographer
from benchmarks.peers.moondream_reference import sources
from benchmarks.reference import compare
from benchmarks.reference.cases import SIZES, Case, Size, cases
from benchmarks.reference.checkout import (
    COORD,
    FAMILIES,
    SIZE,
    Family,
    make_config,
    write_checkpoint,
)
from benchmarks.reference.compare import Errors, Score, bins_apart
from benchmarks.reference.ours import Answer, Engine
from benchmarks.reference.theirs import RULES, Reference, Token, Trace

RUNS = ("tiny/f32", "tiny/bf16", "full/f32", "full/bf16")
_LAYERS = {"tiny": (2, 3), "full": (1, 2)}  # of vision and text
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def main(options: Sequence[str]) -> int:
    """Run the comparisons one after the other, and write the record after each."""
    arguments = _parse(options)
    runs: dict[str, Any] = {}
    facts = {"rules": RULES, "sources' SHA-256": sources(arguments.checkout)}
    facts["biases"] = {each.name: {str(k): v for k, v in each.bias.items()} for each in FAMILIES}
    for name in arguments.runs:
        started = time.monotonic()
        runs[name] = Run(name, arguments).figures()
        runs[name]["seconds"] = round(time.monotonic() - started)
        record.write(
            arguments.name,
            "Moondream 2 beside its open reference",
            {**facts, "runs": runs},
            compare.tables(facts, runs),
        )
    return 0 if all(compare.passes(name, run) for name, run in runs.items()) else 1


class Run:
    """One width in one dtype."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._shape, _, self._dtype = name.partition("/")
        self._seed: int = arguments.seed
        self._threads: int = arguments.threads
        vision, text = arguments.layers or _LAYERS[self._shape]
        self._layers: tuple[int, int] = vision, text
        self._max_tokens: int = arguments.max_tokens
        self._families = [each for each in FAMILIES if each.name in arguments.families]
        few = arguments.full_sizes if self._shape == "full" else len(SIZES)
        self._sizes = SIZES[: min(few, arguments.sizes)]
        photographer = Photographer(self._seed, max(max(size) for size in self._sizes))
        self._images = {
            size: Image.fromarray(photographer.pixels(index, size))
            for index, size in enumerate(self._sizes)
        }
        self._seen: set[str] = set()  # images that were compared
        self._num_crops = 0
        self._answers: set[tuple[Token, ...]] = set()
        self.errors = Errors()
        self.scores: dict[str, Score] = {}
        self.bins: Counter[int] = Counter()
        self.best: Counter[bool] = Counter()
        config = make_config(self._shape, *self._layers, FAMILIES[0])
        self._device = torch.device(arguments.device)
        self._reference = Reference(arguments.checkout, config, _DTYPES[self._dtype], self._device)

    def figures(self) -> dict[str, Any]:
        """Return all compared figures."""
        asked: list[Case] = []
        for family in self._families:
            asked += self._family(family, questions(self._shape, family, self._sizes))
            print(f"{self._shape}/{self._dtype} {family.name}: done", flush=True)
        return {
            "layers": {"vision": self._layers[0], "text": self._layers[1]},
            "prompts": len(asked),
            "sizes": list(self._sizes),
            "crops": self._num_crops,
            "different_answers": len(self._answers),
            "errors": self.errors.figures(),
            "skills": {skill: score.figures() for skill, score in self.scores.items()},
            "bins_apart": {str(k): v for k, v in sorted(self.bins.items())},
            "same_best_token": self.best[True] / max(1, self.best.total()),
        }

    def _family(self, family: Family, asked: list[Case]) -> list[Case]:
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(self._shape, *self._layers, family)
            checkpoint = write_checkpoint(config, family, self._seed, Path(folder) / "model")
            self._reference.load(checkpoint, family.num_answers)
            engine = Engine(checkpoint, self._dtype, self._threads, self._device)
        try:
            if not self._num_crops:
                self._compare_crops(engine)
            images = {size: engine.prepare(image, size) for size, image in self._images.items()}
            answers = engine.answers(asked, images, self._budget)
            for case, answer in zip(asked, answers, strict=True):
                image = None if case.size is None else self._images[case.size]
                trace = self._reference.run(case, image, self._max_tokens)
                score = self.scores.setdefault(case.skill, Score())
                score.add(case, trace, answer, self._max_tokens)
                self._answers.add(tuple(trace.tokens))
                self._replay(engine, case.size and images[case.size], trace, answer)
        finally:
            engine.close()
        return asked

    def _budget(self, case: Case) -> int | None:
        """Return the engine's budget: lists count objects, reasoning and answer share one."""
        task = case.task
        if case.skill in ("detect", "point"):
            return None
        if isinstance(task, QuerySpec) and task.reasoning:
            return 2 * self._max_tokens + 2
        return self._max_tokens

    def _compare_crops(self, engine: Engine) -> None:
        """Compare tilings and, where the reference's values can be inverted, pixels."""
        for size, image in self._images.items():
            mine = engine.prepare(image, size)
            crops, tiling = self._reference.crops(image)
            self._num_crops += len(crops)
            if mine.num_crops:  # the device cuts it
                alone = mine.num_crops == 1 and tiling == (1, 1)  # it is its own tile here
                assert alone or mine.num_crops == len(crops), f"{size}: {mine.num_crops} crops"
                continue
            mine = mine.pixels
            assert mine.tiling == tiling, f"{size}: tiled as {mine.tiling} and {tiling}"
            if self._dtype == "f32":
                levels = ((crops.double() * 0.5 + 0.5) * 255).round().to(torch.uint8)
                pixels = torch.from_numpy(mine.pixels_NHWC).permute(0, 3, 1, 2)
                assert torch.equal(pixels, levels[: len(pixels)]), f"{size}: other crops"

    def _replay(self, engine: Engine, image: Any, trace: Trace, answer: Answer) -> None:
        """Feed the reference's tokens to our model, and compare after every forward."""
        replayed = engine.replay(image, answer.prompt, [each.fed for each in trace.passes[1:]])
        for index, (expected, (hidden_TD, logits_V)) in enumerate(
            zip(trace.passes, replayed, strict=True)
        ):
            if image is not None and image.key not in self._seen:
                self._seen.add(image.key)
                self.errors.add("vision", engine.prefix_PD[1:], self._reference.image_TD)
                theirs_PD = self._reference.prefix_TD
                self.errors.add("image's prefill hidden", engine.prefix_hidden_PD, theirs_PD)
            stage = "decode" if index else "prefill"
            theirs_TD = expected.hidden_TD[-len(hidden_TD) :]
            self.errors.add(f"{stage} hidden", hidden_TD, theirs_TD)
            self.errors.add(f"{stage} logits", logits_V, expected.logits_V)
            self.best[logits_V.argmax().item() == expected.logits_V.argmax().item()] += 1
            if index + 1 < len(trace.passes):
                token, value = trace.passes[index + 1].fed[0]
                if token in (COORD, SIZE):
                    mine = engine.value(hidden_TD[-1], token)
                    rounded = torch.tensor(mine).to(hidden_TD.dtype).tolist()
                    self.bins[bins_apart(token, (rounded[0], rounded[1]), value)] += 1


def questions(shape: str, family: Family, sizes: Sequence[Size]) -> list[Case]:
    """Return the cases of a run: at full width and for reasoning about every other size."""
    is_text = family is FAMILIES[0]
    every = shape == "tiny" and not family.name.startswith("reasoning")
    return cases(family.name, sizes if is_text or every else sizes[::2])


def _parse(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks reference", description=__doc__)
    parser.add_argument("--checkout", required=True, help="folder of the reference's repository")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    names = [family.name for family in FAMILIES]
    parser.add_argument("--families", nargs="+", choices=names, default=names, help="of skills")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="of images, at most")
    parser.add_argument("--full-sizes", type=int, default=3, help="of these, in full width")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a text")
    parser.add_argument("--layers", type=int, nargs=2, help="of vision and of text, not a few")
    parser.add_argument("--device", default="cpu", help="of both sides: cpu, cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="reference_moondream2")
    arguments = parser.parse_args(options)
    if not (Path(arguments.checkout) / "moondream" / "torch").is_dir():
        parser.error(f"{arguments.checkout} has no moondream/torch")
    return arguments
