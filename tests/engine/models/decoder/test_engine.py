"""A decoder in the engine: batches, both depths, ends of answers, bfloat16, images in prompts."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from legato_engine.core.requests import make_sequence
from legato_engine.device.cpu import CpuDevice
from legato_engine.errors import InvalidField
from legato_engine.models.base import Model
from legato_engine.models.decoder.families import DecoderBundle
from legato_engine.models.decoder.model import DecoderModel
from legato_engine.models.paged_attention import Chunk, DecodeBatch, KVCache, PrefillSpan
from legato_engine.models.registry import resolve
from legato_engine.runtime import torch_backend
from legato_engine.runtime.torch_backend import ImageFeatures
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.sequence import SampledToken, tokens_of
from legato_engine.telemetry import Timeline, step_feed, trace_events
from legato_engine.types import (
    CachedImageRef,
    FinishReason,
    ImageProperties,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.adapters import PeftAdapter
from tests.engine.models import against_transformers as same
from tests.engine.models.paged_session import PagedSession

QUESTIONS = same.questions(9, seed=3)


@pytest.fixture(scope="module")
def engine(phi_folder):
    """One engine for all tests."""
    with same.Engine("phi", phi_folder) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_neither_batch_nor_depth_changes_an_answer(engine, temperature):
    """Tokens are the same alone, in a batch, pipelined or not; greedy or sampled."""
    sampling = {"max_tokens": 12, "temperature": temperature, "top_p": 0.95}
    answers = [
        engine.ask(QUESTIONS, depth, together, **sampling).tokens
        for depth, together in itertools.product((1, 2), (True, False))
    ]
    assert all(other == answers[0] for other in answers[1:])
    assert any(len(set(tokens)) > 3 for tokens in answers[0].values())


def test_deltas_spell_the_answer(engine):
    """The tokens' texts add up to the result, whatever their bytes."""
    answers = engine.ask(QUESTIONS, max_tokens=30, temperature=1.5)
    pieces = engine.assembly.frontend._setup.tokenizer
    for name, tokens in answers.tokens.items():
        spelled = b"".join(map(pieces.piece, tokens)).decode(errors="ignore")
        assert answers.results[name] == spelled.lstrip()


def test_log_probabilities_are_those_of_transformers(engine, phi_folder):
    """Each token has transformers' log-probability at temperature 1, EOS included."""
    from transformers import AutoModelForCausalLM  # takes seconds, not needed by most

    theirs = AutoModelForCausalLM.from_pretrained(phi_folder, dtype=torch.float32)
    answers = engine.ask(QUESTIONS, logprobs=True, max_tokens=40, temperature=2.5)
    assert FinishReason.STOP in answers.reasons.values()
    for name, question in enumerate(QUESTIONS):
        prompt, told = engine.prompt(question), answers.told[str(name)]
        chosen = [token.token_id for token in told]
        with torch.inference_mode():
            logits_TV = theirs(torch.tensor([[*prompt, *chosen]])).logits[0]
        expected_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        expected = expected_TV[range(len(chosen)), chosen].tolist()
        assert [token.logprob for token in told] == pytest.approx(expected, abs=1e-4)
    silent = engine.ask(QUESTIONS, max_tokens=40, temperature=2.5)
    assert silent.tokens == answers.tokens
    assert {token.logprob for told in silent.told.values() for token in told} == {None}


@pytest.mark.parametrize("eos", [0, 2])
def test_every_eos_ends_an_answer(engine, eos):
    """Each of the folder's two EOS ends an answer without text."""
    request = Request(
        request_id=RequestKey("r"), task=QuerySpec(question="why?"), return_tokens=True
    )
    task = engine.assembly.frontend.make_task(request)
    (told,) = tokens_of(task.consume(SampledToken(100, (0.0, 0.0))))
    assert told.token_id == 100
    assert task.finish_reason is None
    (told,) = tokens_of(task.consume(SampledToken(eos, (0.0, 0.0))))
    assert (told.token_id, told.text) == (eos, "")
    assert task.finish_reason is FinishReason.STOP


def test_sampled_answers_end_at_an_eos(engine):
    """An engine at a high temperature samples an EOS before the budget ends, and stops there."""
    answers = engine.ask(same.questions(30), max_tokens=200, temperature=3.0)
    assert FinishReason.STOP in answers.reasons.values()
    for name, tokens in answers.tokens.items():
        assert not {0, 2} & set(tokens[:-1])
        assert (tokens[-1] in (0, 2)) == (answers.reasons[name] is FinishReason.STOP)


def test_a_stop_string_ends_an_answer(engine):
    """The answer ends before it, however tokens split it."""
    (whole,) = engine.ask(QUESTIONS[:1], max_tokens=20, temperature=1.0).results.values()
    stop = whole[len(whole) // 2 :][:2]
    answers = engine.ask(QUESTIONS[:1], max_tokens=20, temperature=1.0, stop=(stop,))
    assert answers.results["0"] == whole[: whole.index(stop)]
    assert answers.reasons["0"] is FinishReason.STOP


def test_bfloat16_answers(phi_folder):
    """The model runs in bfloat16 through pages and pipeline, close to float32 at first."""
    exact, half = (same.load("phi", phi_folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.dtype is torch.bfloat16
    logits = []
    for model in (exact, half):
        session = PagedSession(model)
        hidden_1D = session.prefill(0, None, list(map(PromptToken, range(3, 40))))
        session.feed(0, 50, (0.0, 0.0))
        logits.append(torch.cat([model.logits(hidden_1D), model.logits(session.step()[:1])]))
    assert same.relative_error(logits[1], logits[0]) < 0.1
    with same.Engine("phi", phi_folder, dtype="bf16") as engine:
        together = engine.ask(QUESTIONS, max_tokens=8).tokens
        assert together == engine.ask(QUESTIONS, 1, together=False, max_tokens=8).tokens


def test_the_engine_is_told_what_it_serves(engine):
    """The info has the name, the one skill, and a context without an image."""
    info = engine.assembly.info
    assert (info.name, info.tasks, info.max_context_tokens) == ("phi", ("query",), 256)
    assert info.max_output_tokens == 255


def test_a_folder_of_adapters_is_refused_by_a_model_without(phi_folder, tmp_path, monkeypatch):
    """It is refused at start rather than by each request."""
    monkeypatch.setattr(DecoderModel, "adapter_bank", Model.adapter_bank)
    with pytest.raises(InvalidField, match="phi takes no adapters") as caught:
        same.Engine("phi", phi_folder, adapters=str(tmp_path))
    assert caught.value.metadata["field"] == "adapters"


def test_a_decode_step_reads_nothing_on_the_host(phi_folder):
    """No operation of a decode step or a pass of a prompt waits for a value to be captured.

    Torch's fake GPU knows shapes and devices, and refuses to give values.
    """
    bundle = resolve("phi", weights=str(phi_folder))
    assert isinstance(bundle, DecoderBundle)
    with torch.inference_mode(), FakeTensorMode():
        with torch.device("cuda"):
            model = DecoderModel(bundle.family.network(bundle.config))
        shape = (model.num_layers, 40, model.num_kv_heads, 16, model.head_dim)
        kv = KVCache(torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda"))
        tokens_B = torch.zeros(4, dtype=torch.int64, device="cuda")
        payload_B2 = torch.zeros(4, 2, device="cuda")
        table_BM = torch.zeros(4, 16, dtype=torch.int64, device="cuda")
        bank = model.adapter_bank(2, 8)
        rows = bank.rows(tokens_B, bank.max_rank)
        hidden_BD = model.decode(
            model.embed(tokens_B, payload_B2), DecodeBatch(tokens_B, table_BM, rows), kv
        )
        one_slot = bank.rows(tokens_B[:1], bank.max_rank)
        span = PrefillSpan(0, table_BM[0], bidirectional=False, adapters=one_slot)
        assert model.prefill(hidden_BD, span, kv).shape == hidden_BD.shape
        chunk = Chunk(tokens_B[:2], tokens_B, tokens_B, table_BM[0], one_slot)
        assert model.prefill_chunk(hidden_BD, chunk, kv).shape == hidden_BD.shape
        assert model.logits(hidden_BD).shape == (4, model.vocab_size)
        assert model.logits(hidden_BD).device.type == "cuda"
        assert not model.has_value_heads, "nor is there a value head that could read one"
        assert model.has_prefill_chunks
        assert not model.own_threads
        assert model.step_kernels(kv, None) is None
        assert model.image_encoder(CpuDevice(1).pinned, 1) is None
        assert model.draft_proposer(Path(), kv) is None
        assert model.mask_refiner(Path()) is None
        with pytest.raises(DataDependentOutputException):
            hidden_BD.sum().item()


# ---------------------------------------------------------------- images in prompts


def noise_images(frontend):
    """Four images of a few tokens each."""
    info = ImageProperties(image_id="i", width=1, height=1, cache_hit=False)
    generator = np.random.default_rng(0)
    sizes = (33, 61), (200, 40), (100, 100), (31, 190)
    pixels = [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    return [frontend.prepare_image(each, f"key {n}", info) for n, each in enumerate(pixels)]


class Behind:
    """Requests with images behind a stream of text, and the timeline of their launches."""

    def __init__(self, engine, adapter=None, **fields):
        assembly, self.adapter = dataclasses.replace(engine.assembly, **fields), adapter
        self.answers = same.Answers()
        self.timeline = Timeline(10_000)
        feed = step_feed(assembly.runner.times, (self.timeline.add,))
        self.frontend = assembly.frontend
        self.scheduler = assembly.scheduler(self.answers, pipeline_depth=2, observer=feed)
        self._numbers = itertools.count()
        self.submit("stream", "tell all of it", max_tokens=80)
        self.scheduler.step()

    @property
    def kinds(self):
        """Kinds of the committed launches, in order."""
        return [step.record.launch.plan.kind for step in self.timeline.steps]

    def submit(self, name, question, images=(), max_tokens=20):
        """Return the sequence."""
        request = Request(
            request_id=RequestKey(name),
            task=QuerySpec(question=question),
            image=CachedImageRef(image_id="i") if images else None,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3),
            logprobs=True,
            return_tokens=True,
        )
        task = self.frontend.make_task(request, images)
        adapter = self.adapter if len(images) % 2 else None
        sequence = make_sequence(self.frontend, request, None, adapter, task=task)
        sequence.seq_id = next(self._numbers)
        self.scheduler.submit(sequence)
        return sequence

    def ask(self, counts):
        """Ask about so many of four images each; return what was told to all."""
        pool = noise_images(self.frontend)
        for count in counts:
            self.submit(str(count), f"{count}?", pool[:count])
        self.scheduler.drain()
        return self.answers.told


def test_images_are_encoded_between_the_steps_of_a_stream(monkeypatch, tmp_path):
    """Pieces and chunks alternate with its decodes, and change no bit of any answer.

    Nor does a shortage of pages, after which images are encoded again. Half of the requests have an
    adapter.
    """
    with same.Engine("random-tiny-vl", "", adapters=str(tmp_path)) as engine:
        model = engine.assembly.model
        data, said = PeftAdapter.fitting(model._targets, rank=4).files()
        adapter = model.read_adapter(data, "key", 8, said)
        plain = Behind(engine).ask((1, 2, 3, 4))
        whole = Behind(engine, adapter)
        told = whole.ask((1, 2, 3, 4))
        assert LaunchKind.ENCODE not in whole.kinds
        assert [told[name] == plain[name] for name in "1234"] == [False, True, False, True]
    monkeypatch.setattr(torch_backend, "CPU_CHUNK", 3)
    with same.Engine("random-tiny-vl", "", adapters=str(tmp_path)) as engine:
        for counts, fields in (
            ((1, 2, 3, 4), {}),
            ((4, 2, 1, 3), {}),
            ((4, 3, 2), {"num_pages": 9}),
        ):
            split = Behind(engine, adapter, **fields)
            assert split.ask(counts).items() <= told.items()
            kinds = split.kinds
            assert kinds.count(LaunchKind.ENCODE) > len(counts)
            while kinds[-1] is LaunchKind.DECODE:
                del kinds[-1]
            for neighbours in itertools.pairwise(kinds):
                # With few pages nobody may be left to decode.
                assert LaunchKind.DECODE in neighbours or fields
        assert split.scheduler.load().kv.preemptions > 0
        spans = [each for each in trace_events(split.timeline.steps) if each["ph"] == "X"]
        assert {each["cat"] for each in spans} == {"encode", "prefill", "decode"}


@pytest.mark.parametrize("num_encodes", [1, 2, 4])
def test_features_end_with_a_request(monkeypatch, num_encodes):
    """An abort between two pieces frees those of its images that are begun or encoded."""
    monkeypatch.setattr(torch_backend, "CPU_CHUNK", 3)
    with same.Engine("random-tiny-vl", "") as engine:
        behind = Behind(engine)
        asked = behind.submit("1", "?", noise_images(behind.frontend)[1:])
        while behind.kinds.count(LaunchKind.ENCODE) < num_encodes:
            behind.scheduler.step()
        held = [weakref.ref(each) for each in asked.inputs.visual.features.values()]
        assert held
        behind.scheduler.abort(asked.request.request_id)
        behind.scheduler.drain()
        engine.assembly.runner._backend._features._kept.clear()
        assert [each() for each in held] == [None] * len(held)


def test_features_stay_within_what_is_reserved(monkeypatch):
    """Those kept for later prompts within their limit, and those of a prompt's chunk."""
    for name in ("CHUNK", "CPU_CHUNK"):
        monkeypatch.setattr(torch_backend, name, 5)
    most, limit, run_piece = [0], 10_000, ImageFeatures._run_piece
    token_bytes = 4 * 3 * 64

    def running(self, visual, index, request):
        features_NKD = run_piece(self, visual, index, request)
        kept = sum(each.nbytes for each in self._kept.values())
        assert kept <= limit
        held = [each for each in visual.features.values() if isinstance(each, torch.Tensor)]
        most[0] = max(most[0], kept + sum(each.nbytes for each in held))
        return features_NKD

    monkeypatch.setattr(ImageFeatures, "_run_piece", running)
    with same.Engine("random-tiny-vl", "", image_cache_bytes=limit) as engine:
        model = engine.assembly.model
        assert (model.image_token_bytes, model.max_image_tokens) == (token_bytes, 64)
        reserved = ImageFeatures.reserved_bytes(model, limit)
        assert reserved == limit + (2 * 64 + 3 * 5) * token_bytes
        Behind(engine).ask((1, 2, 3, 4))
    assert 0 < most[0] < reserved
