"""A text model compared with transformers' own, on the same weights."""

from __future__ import annotations

import itertools
import random

import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.requests import make_sequence
from legato_engine.models.decoder.frontend import TextFrontend
from legato_engine.models.paged_attention import PrefillSpan
from legato_engine.models.registry import resolve
from legato_engine.sequence import tokens_of
from legato_engine.types import (
    CachedImageRef,
    FinishReason,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)

from tests.engine.models import hub_folder
from tests.engine.models.paged_session import PagedSession

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest logit

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""The rotation of Llama 3.1, at a small context."""


def relative_error(actual, expected):
    """Largest difference over the largest expected magnitude."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def load(name, folder, dtype=torch.float32, **settings):
    """Load the model of that name."""
    return resolve(name, weights=str(folder), **settings).load(CPU, dtype)


def check_prefill_and_decode(model, theirs, *, length, steps=20, seed=0):
    """The logits of a prompt's last token, and of every later step, are transformers' own.

    Tokens are random rather than sampled, so that steps vary. A second row decodes in the same
    batch.
    """
    generator = random.Random(seed)
    ids = [generator.randrange(model.vocab_size) for _ in range(length + steps)]
    with torch.inference_mode():
        expected_TV = theirs(torch.tensor([ids])).logits[0]
        session = PagedSession(model, seed=seed)
        hidden_1D = session.prefill(2, None, list(map(PromptToken, ids[:length])))
        session.prefill(0, None, [PromptToken(5)])
        for at in range(length - 1, length + steps - 1):
            logits_V = model.logits(hidden_1D)[0]
            assert relative_error(logits_V, expected_TV[at]) < TOLERANCE, at
            session.feed(2, ids[at + 1], (0.0, 0.0))
            session.feed(0, ids[at], (0.0, 0.0))
            hidden_1D = session.step()[2:3]
        assert relative_error(model.logits(hidden_1D)[0], expected_TV[-1]) < TOLERANCE


def check_two_spans(model, theirs, *, length, cut):
    """The logits after both spans of a prompt are transformers' own, and all of the second's."""
    ids_T = torch.randint(model.vocab_size, (length,), generator=torch.Generator().manual_seed(cut))
    with torch.inference_mode():
        expected_TV = theirs(ids_T[None]).logits[0]
        kv = PagedSession(model).kv
        pages_M = torch.tensor([5, 2, 9])
        x_TD = model.embed(ids_T, torch.zeros(length, 2))
        model.prefill(x_TD[:cut], PrefillSpan(0, pages_M, bidirectional=False), kv)
        hidden_TD = model.prefill(x_TD[cut:], PrefillSpan(cut, pages_M, bidirectional=False), kv)
        assert relative_error(model.logits(hidden_TD), expected_TV[cut:]) < TOLERANCE


def check_chosen(theirs, prompt, chosen):
    """Every token is the one that transformers' greedy loop would choose, checked in one pass."""
    with torch.inference_mode():
        logits_TV = theirs(torch.tensor([[*prompt, *chosen[:-1]]])).logits[0]
    assert logits_TV[len(prompt) - 1 :].argmax(-1).tolist() == chosen


class Answers:
    """A `Sink` that keeps the result of every request."""

    def __init__(self):
        self.told, self.results, self.reasons = {}, {}, {}

    @property
    def tokens(self):
        """Token ids of every request."""
        return {name: [token.token_id for token in told] for name, told in self.told.items()}

    def started(self, sequence):
        """Ignore the start."""
        self.told[sequence.request.request_id.caller_id] = []

    def delta(self, sequence, events):
        """Keep the tokens of the events."""
        self.told[sequence.request.request_id.caller_id] += tokens_of(events)

    def done(self, sequence, finish_reason):
        """Keep the result."""
        name = sequence.request.request_id.caller_id
        result = sequence.task.result(finish_reason)
        self.results[name] = getattr(result, "answer", result)  # or boxes
        self.reasons[name] = finish_reason

    def failed(self, sequence, error):
        """Fail the test."""
        raise error


class Engine:
    """An engine without its process."""

    def __init__(self, name, folder, **settings):
        config = EngineConfig(model=name, weights=str(folder), device="cpu", threads=1)
        fields = {"max_running": 6, **settings}
        self.config = type(config)(**{**_fields(config), **fields})
        self.assembly = assemble(self.config)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.assembly.device.close()

    def prompt(self, question):
        """Token ids of the model's prompt."""
        task = self.assembly.frontend.make_task(
            Request(request_id=RequestKey("p"), task=QuerySpec(question=question))
        )
        return [token.token_id for token in task.prompt]

    def ask(
        self,
        questions,
        depth=2,
        together=True,
        logprobs=False,
        images=(),
        adapters=(),
        steps=None,
        **sampling,
    ):
        """Run all requests, questions or tasks, with images and an adapter of each.

        Earlier ones are forgotten. Records of launches are appended to `steps`. With `logprobs`
        tokens have alternatives, too.
        """
        answers = Answers()
        observer = None if steps is None else steps.append
        scheduler = self.assembly.scheduler(answers, pipeline_depth=depth, observer=observer)
        for index, (question, adapter) in enumerate(
            zip(questions, adapters or itertools.repeat(None), strict=False)
        ):
            request = Request(
                request_id=RequestKey(str(index)),
                task=QuerySpec(question=question) if isinstance(question, str) else question,
                sampling=SamplingParams(**sampling),
                return_tokens=True,
                logprobs=logprobs,
                top_logprobs=3 if logprobs else 0,
                image=CachedImageRef(image_id="i") if images and images[index] else None,
            )
            frontend = self.assembly.frontend
            task = frontend.make_task(request, images[index]) if images else None
            sequence = make_sequence(frontend, request, None, adapter, task=task)
            sequence.seq_id = index  # ranks them when pages run out
            scheduler.submit(sequence)
            if not together:
                scheduler.drain()
        scheduler.drain()
        load = scheduler.load()
        assert (load.rows_used, load.pages_used) == (0, 0)
        return answers


def questions(count, seed=0):
    """Texts of one word to many, some with multi-byte characters."""
    generator = random.Random(seed)
    words = ["the", "cat", "sky", "why", "is", "it", "blue?", "é", "😀", "0", "tea", "\n", "x" * 9]
    return [
        f"{index} " + " ".join(generator.choices(words, k=generator.randrange(1, 24)))
        for index in range(count)
    ]


def check_greedy(name, folder, theirs, *, count, tokens=8, eos=0):
    """Greedy answers of many requests in a batch are transformers' own, token for token."""
    asked = questions(count)
    with Engine(name, folder, max_running=16, max_waiting=count) as engine:
        answers = engine.ask(asked, max_tokens=tokens, temperature=0.0)
        for index, question in enumerate(asked):
            chosen, reason = answers.tokens[str(index)], answers.reasons[str(index)]
            assert (chosen[-1] == eos) == (reason is FinishReason.STOP)
            assert len(chosen) == tokens or reason is FinishReason.STOP
            check_chosen(theirs, engine.prompt(question), chosen)


def _fields(config):
    return {name: getattr(config, name) for name in config.__struct_fields__}


# ---------------------------------------------------------------- asking
# Tasks and prompts of a text model's questions.


def task_of(folder, spec, **fields):
    """The frontend's task for a request."""
    frontend = resolve("phi", weights=str(folder)).frontend
    assert isinstance(frontend, TextFrontend)
    frontend.check()
    return frontend.make_task(Request(request_id=RequestKey("r"), task=spec, **fields))


def prompt_of(folder, question):
    """Ids of a prompt."""
    return [token.token_id for token in task_of(folder, QuerySpec(question=question)).prompt]


def theirs(folder):
    """The tokenizer as transformers uses it."""
    from transformers import PreTrainedTokenizerFast  # takes seconds, not needed by most

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=hub_folder.BOS,
        eos_token=hub_folder.EOS,
        chat_template=hub_folder.CHAT,
    )
