"""Moondream's open reference (GitHub vikhyat/moondream, Apache-2.0), from a checkout, observed.

Its own methods run. Wrappers at their seams record inputs and outputs, and apply the engine's rules
where the two differ on purpose or by mistake. `RULES` lists them, and every token that a rule
changed is counted.

Shape legend: T positions of one forward, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.types import (
    CaptionSpec,
    DetectSpec,
    ImagePoint,
    PointSpec,
    QuerySpec,
    SpatialRef,
)
from PIL import Image

from benchmarks.reference.cases import Case, Size
from benchmarks.reference.checkout import ANSWER, COORD, EOS, SIZE, Checkout

_SEAMS = (
    "_run_vision_encoder",
    "_prefill",
    "_prefill_prompt",
    "_decode_one_tok",
    "_generate_reasoning",
    "_generate_answer",
)
RULES = {
    "crops": "its pixels are bfloat16 whatever the model's dtype; here they have the model's",
    "resize": "PIL's Lanczos on both sides, where it would take pyvips if that is installed",
    "first token": "it suppresses ids from the second token on; here from the first",
    "answer": "the engine lets no coord and size ids into a text, it does (without their values)",
    "answer ids": "it feeds one 3 between thoughts and answer; the engine as many as a query has",
    "references": "it looks for references in the answer's prompt again, and fails; here not",
    "first coord": "a coord as the first thought is read from all of the prompt; here from its end",
    "text": "it begins with a space and shows broken characters; the engine drops both",
    "boundary": "it goes on with a list for any token but EOS; here coord and EOS alone can win",
}
Token = tuple[int, tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One forward: its input, the residual stream of its positions, and the last one's logits.

    `hidden_TD` is as long as `fed`. References in a prompt are there without their values.
    """

    fed: tuple[Token, ...]
    hidden_TD: torch.Tensor
    logits_V: torch.Tensor


@dataclasses.dataclass(slots=True)
class Trace:
    """An answer with all its forwards; `changed` counts its tokens that a rule changed."""

    passes: list[Pass] = dataclasses.field(default_factory=list)
    changed: Counter[str] = dataclasses.field(default_factory=Counter)
    text: str = ""
    thoughts: str = ""
    objects: list[dict[str, float]] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        """Tokens that it generated and fed back, after its first prompt."""
        return [token for each in self.passes[1:] for token in each.fed]


@dataclasses.dataclass(frozen=True, slots=True)
class _Phase:
    """Ids that may be sampled: all but `suppressed`, or only `allowed`.

    `every`: logits decide only at every n-th forward of the phase.
    """

    suppressed: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    every: int = 1


_ANSWERING = _Phase(suppressed=(ANSWER, COORD, SIZE), own=(ANSWER,))
_THINKING = _Phase(suppressed=(EOS, SIZE), own=(EOS, SIZE))
_POINTING, _BOXING = (_Phase(allowed=(COORD, EOS), every=every) for every in (2, 3))


class Reference:
    """The reference with a checkpoint; `run` answers a case."""

    def __init__(
        self, folder: str, config: MoondreamConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkout = Checkout(folder, dtype, device)
        self._checkout.watch("text_encoder", "text", self._saw_ids)
        self._checkout.watch("encode_coordinate", "region", self._saw_coord)
        self._checkout.watch("encode_size", "region", self._saw_size)
        self._model = self._checkout.build(config)
        self._its: dict[str, Callable[..., Any]] = {n: getattr(self._model, n) for n in _SEAMS}
        for name in _SEAMS:
            setattr(self._model, name, getattr(self, name))
        self._encoded: dict[Size, Any] = {}
        self.image_TD = torch.empty(0)  # embeddings of the image encoded last
        self.prefix_TD = torch.empty(0)  # residual stream of BOS and that image
        self._fed: list[Token] | None = None  # None: no trace is recorded
        self._thought = False
        self._phase = _Phase()
        self._trace = Trace()

    def load(self, folder: Path, num_answers: int) -> None:
        """Read a checkpoint of which only the head may differ from the previous one.

        Images stay encoded. `num_answers` ids stand between reasoning and answer.
        """
        self._num_answers = num_answers
        self._checkout.load(self._model, folder)

    def crops(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return normalised crops [N, C, H, W] and tiling."""
        crops, tiling = self._checkout.prepare_crops(image, self._model.config.vision, None)
        return crops.cpu(), tiling

    def run(self, case: Case, image: Image.Image | None, max_tokens: int) -> Trace:
        """Answer greedily; an image of one size is encoded once."""
        encoded = None
        if image is not None and case.size is not None:
            if case.size not in self._encoded:
                self._encoded[case.size] = self._model.encode_image(image)
            encoded = self._encoded[case.size]
        self._trace, self._fed, self._thought = Trace(), [], False
        settings = {"temperature": 0, "max_tokens": max_tokens}
        task = case.task
        match task:
            case CaptionSpec():
                answer = self._model.caption(encoded, task.length.value, settings=settings)
                self._trace.text = answer["caption"]
            case DetectSpec():
                self._phase = _BOXING
                limit = {"max_objects": task.max_objects}
                self._trace.objects = self._model.detect(encoded, task.object, limit)["objects"]
            case PointSpec():
                self._phase = _POINTING
                limit = {"max_objects": task.max_objects}
                self._trace.objects = self._model.point(encoded, task.object, limit)["points"]
            case QuerySpec():
                refs = [_plain(ref) for ref in task.spatial_refs]
                answer = self._model.query(
                    encoded, task.question, task.reasoning, refs or None, settings=settings
                )
                self._trace.text = answer["answer"]
                self._trace.thoughts = answer.get("reasoning", {}).get("text", "")
        self._fed = None
        return self._trace

    # ------------------------------------------------------------ watching it

    def _saw_ids(self, ids: torch.Tensor) -> None:
        self._feed(*((token, (0.0, 0.0)) for token in ids.flatten().tolist()))

    def _saw_coord(self, value: torch.Tensor) -> None:
        self._feed((COORD, (value.float().item(), 0.0)))

    def _saw_size(self, size: torch.Tensor) -> None:
        width, height = size.float().tolist()
        self._feed((SIZE, (width, height)))

    def _feed(self, *tokens: Token) -> None:
        if self._fed is not None:
            self._fed += tokens

    def _seen(self, hidden_1TD: torch.Tensor, logits_1V: torch.Tensor) -> None:
        assert self._fed is not None, "nobody watches"
        seen = Pass(tuple(self._fed), hidden_1TD[0].clone(), logits_1V[0].clone())
        self._trace.passes.append(seen)
        self._fed.clear()

    # ------------------------------------------------------------ its methods, held to the rules

    def _run_vision_encoder(self, image: Image.Image) -> torch.Tensor:
        self.image_TD = self._its["_run_vision_encoder"](image)
        return self.image_TD

    def _prefill(self, *args: Any) -> torch.Tensor:
        hidden_1TD: torch.Tensor = self._its["_prefill"](*args)
        if self._fed is None:
            self.prefix_TD = hidden_1TD[0]
        return hidden_1TD

    def _prefill_prompt(self, prompt: torch.Tensor, *args: Any, **options: Any) -> Any:
        logits, hidden, _, pos = self._its["_prefill_prompt"](prompt, *args, **options)
        self._seen(hidden, logits)
        rule = "boundary" if self._phase.allowed else "first token"
        logits = self._ruled(logits, own=(), rule=rule)
        return logits, hidden[:, -1:], logits.argmax(-1, keepdim=True), pos

    def _decode_one_tok(self, *args: Any, **options: Any) -> Any:
        logits, hidden = self._its["_decode_one_tok"](*args, **options)
        self._seen(hidden, logits)
        rule = "boundary" if self._phase.allowed else "answer"
        return self._ruled(logits, own=self._phase.own, rule=rule), hidden

    def _ruled(self, logits_1V: torch.Tensor, own: Sequence[int], rule: str) -> torch.Tensor:
        """Return the logits with the ids that the phase excludes at minus infinity."""
        phase = self._phase
        allowed_V = torch.full_like(logits_1V, not phase.allowed, dtype=torch.bool)
        allowed_V[:, list(phase.allowed)] = True
        allowed_V[:, list(phase.suppressed)] = False
        ruled = logits_1V.masked_fill(~allowed_V, -torch.inf)
        bare = logits_1V.clone()
        bare[:, list(own)] = -torch.inf
        best, kept = bare.argmax().item(), ruled.argmax().item()
        decides = (len(self._trace.passes) - 1) % phase.every == 0
        if phase.allowed:  # it only asks whether EOS is the best
            best, kept = best == EOS, kept == EOS
        if decides and best != kept:
            self._trace.changed[rule] += 1
        return ruled

    def _generate_reasoning(self, *args: Any, **options: Any) -> Any:
        self._phase, self._thought = _THINKING, True
        return self._its["_generate_reasoning"](*args, **options)

    def _generate_answer(
        self, prompt: torch.Tensor, pos: int, settings: Any, refs: Any = None, **options: Any
    ) -> Any:
        self._phase = _ANSWERING
        if self._thought:
            if refs:
                self._trace.changed["references"] += 1
            if self._num_answers != 1:
                self._trace.changed["answer ids"] += 1
            prompt, refs = torch.full_like(prompt[:, :1], ANSWER).repeat(1, self._num_answers), None
        return self._its["_generate_answer"](prompt, pos, settings, refs, **options)


def _plain(ref: SpatialRef) -> tuple[float, ...]:
    if isinstance(ref, ImagePoint):
        return ref.x, ref.y
    return ref.x_min, ref.y_min, ref.x_max, ref.y_max
