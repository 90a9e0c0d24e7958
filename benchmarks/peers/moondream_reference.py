"""Moondream's open reference (GitHub vikhyat/moondream, Apache-2.0), from a checkout.

Random weights; a JPEG becomes keys and values, then three tokens, then a run of decode steps. Times
are of the host's clock with the device awaited, because its own loop reads every token.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks import peers
from benchmarks.image.charts import Photographer

SIZE = (850, 600)
QUESTION = (1, 15381, 2, *range(100, 112), 3)  # the query template around 12 tokens
TOKENS = 3
REPEATS = 7
DRY_VISION = {"enc_dim": 48, "enc_ff_dim": 80, "enc_n_heads": 3, "proj_inner_dim": 96}


class Reference:
    """The model and its own functions; `position` is that of the next token."""

    def __init__(self, path: str, device: str, *, dry: bool) -> None:
        sys.path.insert(0, path)
        self._module: Any = importlib.import_module("moondream.torch.moondream")
        self._text: Any = importlib.import_module("moondream.torch.text")
        self._vision: Any = importlib.import_module("moondream.torch.vision")
        vars(self._module)["Tokenizer"] = NoTokenizer  # it would be downloaded
        self._device = device
        config = self._config(dry)
        with torch.device(device):
            self._model = self._module.MoondreamModel(config)
        self._context: int = config.text.max_context
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in self._model.named_parameters():
            norm = name.endswith("weight") and parameter.ndim == 1
            if norm:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, 0.02, generator=generator)
        self.position = 0
        self._token: Any = None

    def compile(self) -> None:
        """Compile as the reference itself does."""
        self._model.compile()

    def crops(self, image: Image.Image) -> None:
        """Resize, tile and normalise only."""
        self._vision.prepare_crops(image, self._model.config.vision, device=self._device)

    def encode(self, image: Image.Image) -> None:
        """Run crops, vision tower and the image's prefill; keys and values stay."""
        self.position = self._model.encode_image(image).pos

    def ask(self) -> None:
        """Prefill a question and sample the first token, greedily."""
        question = [token % self._model.config.text.vocab_size for token in QUESTION]
        prompt = torch.tensor([question], device=self._device)
        _, _, self._token, self.position = self._model._prefill_prompt(
            prompt, self.position, 0.0, 0.3
        )
        self._mask = torch.zeros(1, 1, self._context, dtype=torch.bool, device=self._device)
        self._mask[:, :, : self.position] = True
        self._position_1 = torch.tensor([self.position], device=self._device)
        self._token.item()

    def step(self) -> None:
        """Decode one more token, read by the host."""
        with torch.inference_mode():
            embedded = self._text.text_encoder(self._token, self._model.text)
            self._mask[:, :, self.position] = True
            self._position_1[0] = self.position
            logits, _ = self._model._decode_one_tok(embedded, self._mask, self._position_1, None)
            self.position += 1
            self._token = torch.argmax(logits, dim=-1).unsqueeze(1)
        self._token.item()

    def _config(self, dry: bool) -> Any:
        configs: Any = importlib.import_module("moondream.torch.config")
        if not dry:
            return configs.MoondreamConfig()
        shape = peers.DRY
        text = configs.TextConfig(
            dim=shape.dim,
            ff_dim=shape.ff_dim,
            n_layers=shape.layers,
            vocab_size=shape.vocab,
            n_heads=shape.heads,
            n_kv_heads=shape.heads,
        )
        vision = configs.VisionConfig(proj_out_dim=shape.dim, max_crops=4, **DRY_VISION)
        return configs.MoondreamConfig(
            text=text, vision=vision, region=configs.RegionConfig(dim=shape.dim)
        )


def sources(path: str) -> str:
    """Return the beginning of a hash of the checkout's model code, by file name."""
    digest = hashlib.sha256()
    for file in sorted((Path(path) / "moondream" / "torch").glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class NoTokenizer:
    """Replaces a tokenizer that would be downloaded."""

    @classmethod
    def from_pretrained(cls, name: str) -> NoTokenizer:
        """Return a tokenizer without reading anything."""
        return cls()


def measure(reference: Reference, jpeg: bytes, options: peers.Options) -> dict[str, Any]:
    """Return medians in ms of the parts, of a JPEG to three tokens, and of a step."""
    parts: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        peers.synchronize(options.device)
        parts.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    for _ in range(2 if options.dry else REPEATS):
        timed("decode_jpeg_ms", lambda: _opened(jpeg))
        timed("crops_ms", lambda: reference.crops(_opened(jpeg)))
        timed("total_ms", lambda: _answer(reference, jpeg))
        timed("encode_image_ms", functools.partial(reference.encode, _opened(jpeg)))
        timed("question_ms", reference.ask)
    context = reference.position
    times = peers.step_times(reference.step, options)
    medians = {name: statistics.median(times[1:]) for name, times in parts.items()}
    step = {"step_ms": statistics.median(times), "steps": len(times), "context": context}
    return {**medians, **step}


def _answer(reference: Reference, jpeg: bytes) -> None:
    reference.encode(_opened(jpeg))
    reference.ask()
    for _ in range(TOKENS - 1):
        reference.step()


def _opened(jpeg: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(jpeg))
    image.load()
    return image


def main() -> None:
    """Emit a row without torch.compile, then one with it."""
    options = peers.parse()
    peers.emit({"versions": {**peers.versions(), "sources' SHA-256": sources(options.path)}})
    jpeg = Photographer(0, max(SIZE)).jpeg(0, SIZE)
    reference = Reference(options.path, options.device, dry=options.dry)
    head = {"streams": 1, "size": SIZE, "tokens": TOKENS}
    peers.emit({**head, "compiled": False, **measure(reference, jpeg, options)})
    if options.compiled and not options.dry:
        reference.compile()
        peers.emit({**head, "compiled": True, **measure(reference, jpeg, options)})


if __name__ == "__main__":
    main()
