"""The engine with the same checkpoint: its own answers, and a replay of the reference's.

Shape legend: T positions of one forward, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.requests import make_sequence
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_attention import DecodeBatch, KVCache, PrefillSpan
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import SampledToken, Task
from legato_engine.types import (
    CachedImageRef,
    Event,
    FinishReason,
    ImageProperties,
    Request,
    RequestKey,
    SamplingParams,
    TaskOutput,
)
from PIL import Image

from benchmarks.reference.cases import Case, Size
from benchmarks.reference.theirs import Token

_PAGE = 16
_RUNNING = 8


class WatchedTask:
    """A `tasks.Task` that records its tokens."""

    grammar = None

    def __init__(self, inner: Task) -> None:
        self._inner = inner
        self.prompt = inner.prompt
        self.sampling = inner.sampling
        self.max_tokens = inner.max_tokens
        self.constrained = inner.constrained
        self.uses_transition_table = inner.uses_transition_table
        self.has_payload = inner.has_payload
        self.tokens: list[Token] = []

    def constraint(self) -> int:
        return self._inner.constraint()

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Record the token and pass it to the inner task."""
        self.tokens.append((token.token_id, token.payload))
        return self._inner.consume(token)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The inner task's."""
        return self._inner.finish_reason

    @property
    def reasoning_tokens(self) -> int:
        """The inner task's."""
        return self._inner.reasoning_tokens

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        return self._inner.result(finish_reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The engine's output for a case: its prompt, every token, and the result."""

    prompt: tuple[Token, ...]
    tokens: tuple[Token, ...]
    result: TaskOutput
    finish_reason: FinishReason


class Engine:
    """Scheduler, pipeline and model over a checkpoint."""

    def __init__(self, folder: Path, dtype: str, threads: int, device: torch.device) -> None:
        self._assembly = assemble(
            EngineConfig(
                model="legato-tiny",  # reads the folder's config.json, whatever it describes
                weights=str(folder),
                device=str(device),
                dtype=dtype,
                threads=threads,
                max_running=_RUNNING,
                max_waiting=1000,
                page_size=_PAGE,
                num_pages=(_RUNNING + 4) * 2048 // _PAGE + 1,
            )
        )
        model = self._assembly.model
        self._model = model
        shape = (model.num_layers, 2048 // _PAGE + 1, model.num_kv_heads, _PAGE, model.head_dim)
        self._device = device
        nan = torch.full(shape, torch.nan, dtype=model.dtype, device=device)
        self._kv = KVCache(nan, nan.clone())
        self._pages_M = torch.arange(1, shape[1], device=device)
        self._held: str | None = None  # the prefix in the cache
        self.prefix_PD = torch.empty(0)  # its embeddings
        self.prefix_hidden_PD = torch.empty(0)  # and its residual stream

    def close(self) -> None:
        """Stop its threads."""
        self._assembly.device.close()

    def prepare(self, image: Image.Image, size: Size) -> PreparedImage:
        """Return crops of an image, whose key is its size."""
        key = f"{size[0]}x{size[1]}"
        info = ImageProperties(image_id=key, width=size[0], height=size[1], cache_hit=False)
        return self._assembly.frontend.prepare_image(image, key, info)

    # ------------------------------------------------------------ its own answers

    def answers(
        self,
        cases: Sequence[Case],
        images: Mapping[Size, PreparedImage],
        budget: Callable[[Case], int | None],
    ) -> list[Answer]:
        """Run all cases through one scheduler, as many at a time as may run."""
        scheduler = self._assembly.scheduler(SilentSink(), pipeline_depth=2)
        tasks: list[WatchedTask] = []
        for index, case in enumerate(cases):
            request = Request(
                request_id=RequestKey(str(index)),
                task=case.task,
                image=None if case.size is None else CachedImageRef(image_id=str(case.size)),
                sampling=SamplingParams(temperature=0.0, max_tokens=budget(case), seed=0),
            )
            image = None if case.size is None else images[case.size]
            sequence = make_sequence(self._assembly.frontend, request, image)
            sequence.task = WatchedTask(sequence.task)
            tasks.append(sequence.task)
            scheduler.submit(sequence)
        scheduler.drain()
        return [_answer(task) for task in tasks]

    # ------------------------------------------------------------ the reference's answers again

    def replay(
        self, image: PreparedImage | None, prompt: Sequence[Token], fed: Sequence[Sequence[Token]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return [T, D] residual stream and [V] float32 logits of a prompt, then of later passes.

        The passes are decode steps; one of several tokens gives the last token's logits.
        `prefix_PD` and `prefix_hidden_PD` are those of the image until the next replay.
        """
        with torch.inference_mode():
            position = self._hold(image)
            x_TD = self._embed(prompt)
            span = PrefillSpan(position, self._pages_M, bidirectional=False)
            hidden_TD = self._model.prefill(x_TD, span, self._kv)
            position += len(prompt)
            yield hidden_TD, self._model.logits(hidden_TD[-1:])[0]
            for tokens in fed:
                hidden = []
                for token in tokens:
                    hidden.append(self._step(token, position))
                    position += 1
                hidden_TD = torch.cat(hidden)
                yield hidden_TD, self._model.logits(hidden_TD[-1:])[0]

    def value(self, hidden_D: torch.Tensor, token_id: int) -> tuple[float, float]:
        """Return what the region heads read there."""
        with torch.inference_mode():
            token_1 = torch.tensor([token_id], device=self._device)
            assert self._model.has_value_heads, "the reference is compared with a Moondream"
            logits_1V = self._model.logits(hidden_D[None])
            payload_12, _ = self._model.values(hidden_D[None], token_1, logits_1V)
        first, second = payload_12[0].tolist()
        return first, second

    def _hold(self, image: PreparedImage | None) -> int:
        """Put a prefix into the cache, and return its length."""
        key = "" if image is None else image.key
        if self._held != key:
            self.prefix_PD = self._embed_prefix(image)
            span = PrefillSpan(0, self._pages_M, bidirectional=True)
            self.prefix_hidden_PD = self._model.prefill(self.prefix_PD, span, self._kv)
            self._held = key
        return self.prefix_PD.shape[0]

    def _step(self, token: Token, position: int) -> torch.Tensor:
        batch = DecodeBatch(torch.tensor([position], device=self._device), self._pages_M[None])
        return self._model.decode(self._embed([token]), batch, self._kv)

    def _embed(self, tokens: Sequence[Token]) -> torch.Tensor:
        ids, values = zip(*tokens, strict=True)
        on = self._device
        return self._model.embed(torch.tensor(ids, device=on), torch.tensor(values, device=on))

    def _embed_prefix(self, image: PreparedImage | None) -> torch.Tensor:
        """Embed BOS and the image, by the encoder if the device cuts it."""
        if image is None or image.num_crops == 0:
            return self._model.prefix_embeddings(image)
        encoder = self._model.image_encoder(self._assembly.device.pinned, 1)
        assert encoder is not None, "images stay uncropped only for an encoder"
        encoder.stage(0, image)
        encoder.upload(0)
        encoder.cut()
        encoder.encode(image.num_crops, gathered=False)
        return encoder.finish(0)


def _answer(task: WatchedTask) -> Answer:
    assert task.finish_reason is not None, "the scheduler is idle"
    prompt = tuple((token.token_id, token.payload) for token in task.prompt)
    result = task.result(task.finish_reason)
    return Answer(prompt, tuple(task.tokens), result, task.finish_reason)
