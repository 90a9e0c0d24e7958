"""Speculation changes how many steps an answer takes, and nothing about the answer."""

import dataclasses
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from legato_engine.config import LOOKUP_DRAFT, EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.requests import make_sequence
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.scheduler.output import SilentSink
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    FinishReason,
    ImageProperties,
    PointSpec,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    SegmentSpec,
)
from PIL import Image

from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.run import Run as BenchmarkRun
from benchmarks.speculation.run import with_settings
from benchmarks.speculation.workloads import real_requests, sample_images
from tests.adapters import random_adapter, safetensors_file
from tests.engine.models.moondream.test_draft import draft_file, random_draft

MAX_RUNNING = 4
TASKS = {
    "query": (QuerySpec(question="what is it?"), None),
    "words": (QuerySpec(question="a b a b a b a b"), None),
    "thought": (QuerySpec(question="why?", reasoning=True), 0),
    "caption": (CaptionSpec(), 1),
    "boxes": (DetectSpec(object="cat", max_objects=4), 0),
    "points": (PointSpec(object="dog", max_objects=4), 1),
    "outline": (SegmentSpec(object="dog"), 2),
}


@pytest.fixture(scope="module")
def assembly():
    """One model for all tests."""
    config = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=MAX_RUNNING)
    made = assemble(config)
    yield made
    made.device.close()


@dataclasses.dataclass
class Answer:
    """What became of a request."""

    tokens: list[tuple[object, ...]]
    result: object
    finish_reason: object
    events: list[tuple[int, tuple[object, ...]]]


class Recorded:
    """A task whose tokens are written down, with values where they have any, as it is asked."""

    def __init__(self, inner, logprobs):
        self.inner = inner
        self._logprobs = logprobs
        self.tokens = []

    def consume(self, token):
        """Write it down."""
        payload = token.payload if self.inner.has_payload else None
        self.tokens.append((token.token_id, token.logprob if self._logprobs else None, payload))
        return self.inner.consume(token)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Run(SilentSink):
    """One schedule of some requests over an assembly, and all that came of it."""

    def __init__(self, assembly, *, depth=2, temperature=0.0, max_tokens=40, stop=()):
        self.assembly = assembly
        self.sequences = {}
        self.answers = {}
        self.records = []
        self.scheduler = assembly.scheduler(self, pipeline_depth=depth, observer=self.committed)
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens, "stop": stop}
        self._events = {}

    def committed(self, record):
        """Keep a launch's record."""
        self.records.append(record)

    def delta(self, sequence, events):
        """Keep the events, each with the number of the token that made it."""
        self._events.setdefault(sequence.request.request_id.caller_id, []).append(
            (sequence.num_committed, tuple(events))
        )

    def done(self, sequence, finish_reason):
        """Keep the whole."""
        name = sequence.request.request_id.caller_id
        result = sequence.task.result(finish_reason)
        events = self._events.get(name, [])
        self.answers[name] = Answer(sequence.task.tokens, result, finish_reason, events)

    def submit(
        self, name, task, picture=None, seed=0, *, adapter=None, logprobs=False, deltas=True
    ):
        """Submit a request; pictures are noise."""
        image = None
        if picture is not None:
            info = ImageProperties(image_id=str(picture), width=60, height=50, cache_hit=False)
            pixels = np.random.default_rng(picture).integers(0, 256, (50, 60, 3), dtype=np.uint8)
            prepare = self.assembly.frontend.prepare_image
            image = prepare(Image.fromarray(pixels), str(picture), info)
        request = Request(
            request_id=RequestKey(name),
            task=task,
            image=None if image is None else CachedImageRef(image_id=str(picture)),
            sampling=SamplingParams(seed=seed, **self._sampling),
            logprobs=logprobs,
            deltas=deltas,
        )
        sequence = make_sequence(self.assembly.frontend, request, image, adapter)
        sequence.task = Recorded(sequence.task, logprobs)
        sequence.timing.arrival = float(len(self.sequences))
        self.sequences[name] = sequence
        self.scheduler.submit(sequence)

    def finish(self):
        """Let all run out; nothing may be held then."""
        self.scheduler.drain()
        load = self.scheduler.load()
        assert (load.running, load.rows_used, load.pages_used, load.inflight) == (0, 0, 0, 0)
        return self

    @property
    def num_decodes(self):
        """Decode launches."""
        return sum(record.launch.plan.kind is LaunchKind.DECODE for record in self.records)

    def total(self, field):
        """A counter over all launches."""
        return sum(getattr(record, field) for record in self.records)


def mixed(assembly, *, draw, without=(), **options):
    """All skills but those it is to go without, arriving at random while others decode."""
    run = Run(assembly, **options)
    names = sorted(TASKS.keys() - without)
    for name in draw.sample(names, len(names)):
        run.submit(name, *TASKS[name], seed=len(name))
        for _ in range(draw.randrange(4)):
            run.scheduler.step()
    return run.finish()


def knowing(assembly, run, *rates):
    """A proposer that knows what this run's requests said, by one rate or one for each."""
    known = [
        known_history(s.prefix_length, s.prompt, [token[0] for token in s.task.tokens])
        for s in run.sequences.values()
    ]
    vocab_size = assembly.model.vocab_size
    return OracleProposer(known, assembly.device.torch_device, rates=rates, vocab_size=vocab_size)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize(
    "setting",
    [
        *(pytest.param(setting, marks=pytest.mark.slow) for setting in ("fixed:1", "seed")),
        *("fixed:8", "budget"),
    ],
)
def test_answers_are_those_without(assembly, setting, temperature):
    """Every skill reads the same tokens, values and all, in any mix and at both depths."""
    plain = mixed(assembly, draw=random.Random(0), depth=1, temperature=temperature)
    assert plain.total("drafted") == 0
    replay = with_settings(assembly, knowing(assembly, plain, 0.7), speculation=setting)
    for depth, changed in (
        (1, replay),
        (2, replay),
        (2, with_settings(assembly, speculation=setting)),
    ):
        run = mixed(changed, draw=random.Random(depth), depth=depth, temperature=temperature)
        assert run.answers == plain.answers
        assert changed is not replay or run.total("accepted") > 0


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize("setting", ["fixed:3", "budget"])
def test_answers_are_those_without_a_draft(assembly, tmp_path, setting, temperature):
    """A draft that says anything at all changes no answer; it speaks for every row that may."""
    plain = mixed(assembly, draw=random.Random(0), depth=1, temperature=temperature)
    path = draft_file(tmp_path / "draft.safetensors", random_draft())
    config = msgspec.structs.replace(assembly.config, draft=str(path))
    changed = with_settings(dataclasses.replace(assembly, config=config), speculation=setting)
    for depth in (1, 2):
        run = mixed(changed, draw=random.Random(depth), depth=depth, temperature=temperature)
        assert run.answers == plain.answers
        assert run.total("drafted") > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_of_the_default_model_are_those_without(temperature):
    """Trained weights at their own sizes: wider sums, longer contexts, answers that end."""
    tiny = assemble(EngineConfig(device="cpu", threads=1, max_running=MAX_RUNNING))
    # It has not learnt to reason, and pictures take it long.
    options = {"without": {"thought", "points", "outline"}, "temperature": temperature}
    plain = mixed(tiny, draw=random.Random(0), depth=1, **options)
    changed = with_settings(tiny, knowing(tiny, plain, 0.7), speculation="fixed:8")
    run = mixed(changed, draw=random.Random(1), **options)
    tiny.device.close()
    assert run.answers == plain.answers
    assert run.total("accepted") > 0


def test_what_is_known_takes_fewer_steps(assembly):
    """A text that is proposed right takes a step a block, and every counter says so."""
    task = QuerySpec(question="what is it?")
    plain = Run(assembly, max_tokens=37)
    plain.submit("r", task)
    plain.finish()
    length = len(plain.answers["r"].tokens)
    assert length == 37, "this model ends its answers early"
    right = with_settings(assembly, knowing(assembly, plain, 1.0), speculation="fixed:8")
    run = Run(right, depth=1, max_tokens=37)
    run.submit("r", task)
    run.finish()
    assert run.answers == plain.answers
    # One token by the prefill, then nine a step.
    assert run.num_decodes == (length - 1) // 9 == 4
    assert [record.tokens for record in run.records] == [1, 9, 9, 9, 9]
    assert (run.total("drafted"), run.total("accepted")) == (32, 32)
    wrong = with_settings(assembly, knowing(assembly, plain, 0.0), speculation="fixed:8")
    run = Run(wrong, depth=1, max_tokens=37)
    run.submit("r", task)
    run.finish()
    assert run.answers == plain.answers
    assert (run.num_decodes, run.total("accepted")) == (36, 0)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_the_budget_ends_inside_a_block(assembly, max_tokens, depth):
    """However a block crosses the last token, exactly so many are read and no more."""
    task = QuerySpec(question="what is it?")
    plain = Run(assembly, max_tokens=13)
    plain.submit("r", task)
    plain.finish()
    right = with_settings(assembly, knowing(assembly, plain, 1.0), speculation="fixed:5")
    run = Run(right, depth=depth, max_tokens=max_tokens)
    run.submit("r", task)
    run.submit("other", QuerySpec(question="hello"))
    run.finish()
    answer = run.answers["r"]
    assert answer.tokens == plain.answers["r"].tokens[:max_tokens]
    assert run.total("tokens") == sum(s.num_committed for s in run.sequences.values())


def ends_with(run, token_id):
    """Let this token end the newest request, as EOS does; random weights seldom say that one."""
    task = list(run.sequences.values())[-1].task.inner
    task._eos = frozenset((token_id,))


@pytest.mark.parametrize("depth", [1, 2])
def test_eos_inside_a_block(assembly, depth):
    """Tokens accepted after the end change neither the answer, nor its reason, nor its count."""
    task = QuerySpec(question="what is it?")
    whole = Run(assembly, temperature=1.0)
    whole.submit("r", task)
    said = [token[0] for token in whole.finish().answers["r"].tokens]
    length = next(n for n in range(7, len(said)) if said[n - 1] not in said[: n - 1])
    plain = Run(assembly, temperature=1.0)
    plain.submit("r", task)
    ends_with(plain, said[length - 1])
    plain.finish()
    assert plain.answers["r"].finish_reason is FinishReason.STOP
    assert len(plain.answers["r"].tokens) == length
    for block in (2, 3, 4, 8, 16):
        changed = with_settings(
            assembly, knowing(assembly, whole, 1.0), speculation=f"fixed:{block}"
        )
        run = Run(changed, depth=depth, temperature=1.0)
        run.submit("r", task)
        ends_with(run, said[length - 1])
        run.finish()
        assert run.answers == plain.answers
        assert run.sequences["r"].num_committed == length == run.total("tokens")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_inside_a_block(assembly, depth):
    """A stop string ends the answer at the same character, wherever its block ends."""
    task = QuerySpec(question="what is it?")
    plain = Run(assembly, temperature=1.0)
    plain.submit("r", task, seed=1)
    plain.finish()
    text = plain.answers["r"].result.answer
    stop = (text[len(text) // 2 : len(text) // 2 + 3],)
    stopped = Run(assembly, temperature=1.0, stop=stop)
    stopped.submit("r", task, seed=1)
    stopped.finish()
    assert len(stopped.answers["r"].tokens) < len(plain.answers["r"].tokens)
    for block in (3, 8):
        changed = with_settings(
            assembly, knowing(assembly, plain, 1.0), speculation=f"fixed:{block}"
        )
        run = Run(changed, depth=depth, temperature=1.0, stop=stop)
        run.submit("r", task, seed=1)
        run.finish()
        assert run.answers == stopped.answers


@pytest.mark.parametrize("how", ["abort", "stop"])
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_who_leaves_between_two_blocks_disturbs_nobody(assembly, depth, how):
    """Aborted or stopped at any step, one request gives all back and its neighbours go on."""
    plain = mixed(assembly, draw=random.Random(0), temperature=0.8)
    changed = with_settings(assembly, knowing(assembly, plain, 0.7), speculation="fixed:8")
    for num_steps in range(1, 12):
        run = Run(changed, depth=depth, temperature=0.8)
        for name in ("query", "words", "caption"):
            run.submit(name, *TASKS[name], seed=len(name))
        for _ in range(num_steps):
            run.scheduler.step()
        getattr(run.scheduler, how)("words")
        run.submit("boxes", *TASKS["boxes"], seed=len("boxes"))
        run.finish()
        for name in ("query", "caption", "boxes"):
            assert run.answers[name] == plain.answers[name]
        tokens = run.sequences["words"].task.tokens
        assert tokens == plain.answers["words"].tokens[: len(tokens)]


def test_a_block_is_chosen_by_the_launch_in_front(assembly):
    """With two launches in flight, the device decides by the one that the host has not read."""
    plain = Run(assembly, max_tokens=60)
    plain.submit("r", QuerySpec(question="what is it?"))
    plain.finish()
    for depth in (1, 2):
        changed = with_settings(assembly, knowing(assembly, plain, 0.0), speculation="seed")
        run = Run(changed, depth=depth, max_tokens=60)
        run.submit("r", QuerySpec(question="what is it?"))
        run.finish()
        assert run.answers == plain.answers
        # 0.8, then 0.64, 0.51, 0.41: three blocks of 4 bring the average below 0.5.
        history = run.sequences["r"].draft_stats.block_size_history
        assert history[:5] == [4, 4, 4, 1, 1]


def test_the_seed_tells_two_requests_of_one_batch_apart(assembly):
    """Whose tokens are foreseen comes to the largest block, its neighbour to the least."""
    tasks = {"good": QuerySpec(question="what is it?"), "bad": QuerySpec(question="hello")}
    plain = Run(assembly, max_tokens=100)
    for name, task in tasks.items():
        plain.submit(name, task)
    plain.finish()
    changed = with_settings(assembly, knowing(assembly, plain, 1.0, 0.0), speculation="seed")
    run = Run(changed, max_tokens=100)
    for name, task in tasks.items():
        run.submit(name, task)
    run.finish()
    assert run.answers == plain.answers
    good, bad = (run.sequences[name].draft_stats.block_size_history for name in tasks)
    assert good[0] == 4
    assert set(good[2:-1]) == {8}
    assert set(bad[4:-1]) == {1}


class Foolish:
    """A proposer of invalid and of surplus tokens."""

    sequential = False

    def __init__(self, token):
        self._token = token

    def propose(self, history, draft_RK):
        """The same everywhere, with a gap."""
        draft_RK.fill_(self._token)
        draft_RK[:, 1:2] = -1


@pytest.mark.parametrize(
    "token",
    [
        *(-1, 0, 299, 300),  # on both sides of what the vocabulary has
        *(pytest.param(token, marks=pytest.mark.slow) for token in (-5, 5, 6, 2**40)),
    ],
)
def test_no_proposal_can_do_harm(assembly, token):
    """Ids that do not exist, coords and sizes, gaps: answers and their steps are as without."""
    plain = mixed(assembly, draw=random.Random(0))
    changed = with_settings(assembly, Foolish(token), speculation="fixed:4")
    run = mixed(changed, draw=random.Random(0))
    assert run.answers == plain.answers
    drafts = [row.num_drafts for record in run.records for row in record.launch.plan.rows]
    assert run.total("drafted") <= sum(drafts) / 2, "tokens after a gap were proposed"


@pytest.mark.parametrize("setting", ["fixed:4", "seed"])
def test_pages_of_a_request_whose_drafts_fail_are_evicted_first(assembly, setting):
    """Its average comes from the device: by the last use alone, the older request's would go."""
    questions = {"right": "what is there in the box?", "wrong": "how many cars are over here?"}

    def asked(of):
        run = Run(of, max_tokens=33)
        for name, question in questions.items():
            run.submit(name, QuerySpec(question=question))
            run.scheduler.drain()
        return run

    plain = asked(assembly)
    told = with_settings(assembly, knowing(assembly, plain, 1.0, 0.0), speculation=setting)
    held = plain.scheduler.load().prefix_pages
    run = asked(dataclasses.replace(told, num_pages=1 + held))
    assert run.answers == plain.answers
    assert run.scheduler.load().prefix_pages == held
    run.submit("other", QuerySpec(question="a"))  # evicts a few pages
    run.scheduler.drain()
    found = {}
    for name, question in questions.items():
        run.submit(f"{name} again", QuerySpec(question=question))
        sequence = run.sequences[f"{name} again"]
        while sequence.row < 0:
            run.scheduler.step()
        found[name] = sequence.pages.cached_length
        run.scheduler.abort(sequence.request.request_id)
        run.scheduler.drain()
    rates = {name: run.sequences[name].draft_stats.learnt.ema_acceptance_rate for name in found}
    assert rates["right"] > 0.8 > rates["wrong"], rates
    assert found["right"] > found["wrong"], found


# ---------------------------------------------------------------- speculation batches
# Speculation beside what else a launch may carry: few pages, adapters, log-probabilities.

CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=4, page_size=4)
RANKS = {"low": 2, "high": 9}


@pytest.fixture(scope="module")
def small_pages(tmp_path_factory):
    """One model for all tests, with pages of four positions and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        tensors = random_adapter(tiny_random_config().text, rank, seed)
        (folder / f"{name}.safetensors").write_bytes(safetensors_file(tensors))
    changes = {"adapters": str(folder), "adapter_slots": 2, "max_adapter_rank": 16}
    made = assemble(msgspec.structs.replace(CONFIG, **changes))
    yield made
    made.device.close()


def asked_in_turn(run, names, *, adapters=None, logprobs=()):
    """Text questions and one detection, one after another."""
    for number, name in enumerate(names):
        adapter = (adapters or {}).get(name)
        boxes = name == "boxes"
        task = DetectSpec(object="cat", max_objects=4) if boxes else QuerySpec(question=f"{name}?")
        picture = 0 if boxes else None
        run.submit(name, task, picture, number, adapter=adapter, logprobs=name in logprobs)
        run.scheduler.step()
    return run.finish()


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_few_pages_change_no_answer(small_pages, depth, block):
    """Where some have to give way, proposals take what is left, and all answer the same."""
    names = ("first", "second", "third", "fourth")
    plain = asked_in_turn(Run(small_pages, temperature=0.8), names)
    longest = max(sequence.max_length for sequence in plain.sequences.values())
    scarce = dataclasses.replace(small_pages, num_pages=longest // CONFIG.page_size + 4)
    changed = with_settings(scarce, knowing(scarce, plain, 0.7), speculation=f"fixed:{block}")
    run = asked_in_turn(Run(changed, depth=depth, temperature=0.8), names)
    assert run.answers == plain.answers
    assert run.total("accepted") > 0
    report = run.scheduler.load().kv
    assert report.preemptions > 0
    assert report.draft == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_adapters_verify_in_their_slots(small_pages, temperature):
    """Rows of two adapters and of none propose in one launch, and answer as they do without."""
    folder, read = Path(small_pages.config.adapters), small_pages.model.read_adapter
    adapters = {
        name: read((folder / f"{name}.safetensors").read_bytes(), name, 16) for name in RANKS
    }
    names = (*RANKS, "none", "boxes")
    plain = asked_in_turn(Run(small_pages, temperature=temperature), names, adapters=adapters)
    changed = with_settings(small_pages, knowing(small_pages, plain, 0.7), speculation="fixed:4")
    run = asked_in_turn(Run(changed, temperature=temperature), names, adapters=adapters)
    assert run.answers == plain.answers
    both = [
        record
        for record in run.records
        if len({row.sequence.adapter.key for row in record.launch.plan.rows if row.num_drafts}) > 2
    ]
    assert sum(record.accepted for record in both) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_accepted_tokens_have_their_log_probabilities(small_pages, temperature):
    """Every token of a block is told how likely it was, to the bit of plain decoding."""
    names = ("first", "second", "boxes")
    plain = asked_in_turn(
        Run(small_pages, temperature=temperature), names, logprobs=("first", "boxes")
    )
    assert all(isinstance(token[1], float) for token in plain.answers["first"].tokens)
    changed = with_settings(small_pages, knowing(small_pages, plain, 0.7), speculation="fixed:4")
    run = asked_in_turn(Run(changed, temperature=temperature), names, logprobs=("first", "boxes"))
    assert run.answers == plain.answers
    assert run.total("accepted") > 0


def test_a_proposer_knows_what_was_found(small_pages):
    """A prompt whose pages were found is read by the proposer like one that was computed."""
    plain = asked_in_turn(Run(small_pages), ("first",))
    changed = with_settings(small_pages, knowing(small_pages, plain, 1.0), speculation="fixed:8")
    run = Run(changed, depth=1)
    for name in ("first", "again"):
        run.submit(name, QuerySpec(question="first?"))
        run.finish()
    assert run.sequences["again"].pages.cached_tokens > 0
    assert run.answers["again"] == run.answers["first"] == plain.answers["first"]
    accepted = [record.accepted for record in run.records]
    assert accepted[: len(accepted) // 2] == accepted[len(accepted) // 2 :]


def test_pages_are_cached_with_the_rate_that_the_device_learnt(small_pages):
    """Eviction knows whose draft tokens were right."""
    names = ("good", "poor")
    plain = asked_in_turn(Run(small_pages, max_tokens=40), names)
    changed = with_settings(small_pages, knowing(small_pages, plain, 1.0, 0.0), speculation="seed")
    run = asked_in_turn(Run(changed, max_tokens=40), names)
    assert run.answers == plain.answers
    learnt = [run.sequences[name].draft_stats.learnt.ema_acceptance_rate for name in names]
    assert learnt[0] > 0.8 > 0.5 > learnt[1]
    tree = run.scheduler._manager._tree
    leaves = {node.acceptance for node in tree.nodes() if node.pages and not node.children}
    assert leaves == set(learnt)


# ---------------------------------------------------------------- default draft
# The draft that comes with the default model: found by itself, and worth its steps.


@pytest.fixture(scope="module")
def shipped():
    """The default model."""
    made = assemble(EngineConfig(device="cpu", threads=1, max_running=4))
    yield made
    made.device.close()


def captions(assembly, temperature=0.0):
    """Captions of one picture and questions about it, together."""
    requests = real_requests(assembly, sample_images(assembly)[1:2])
    for request in requests:
        request.task.sampling = msgspec.structs.replace(
            request.task.sampling, temperature=temperature
        )
    return BenchmarkRun(assembly, requests)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_it_says_what_the_model_will(shipped, temperature):
    """Answers are the same, greedy and sampled, and come in far fewer steps than by lookup."""
    plain = captions(shipped, temperature)
    by_draft = captions(with_settings(shipped, speculation="fixed:4"), temperature)
    config = msgspec.structs.replace(shipped.config, draft=LOOKUP_DRAFT)
    lookup = captions(
        with_settings(dataclasses.replace(shipped, config=config), speculation="fixed:4"),
        temperature,
    )
    drafted, found = (run.figures("", 4, "", plain) for run in (by_draft, lookup))
    assert drafted.identical
    assert found.identical
    assert drafted.tokens_per_verify > (2.0 if temperature == 0.0 else 1.5)
    assert drafted.tokens_per_verify > found.tokens_per_verify + 0.4


def test_with_random_weights_there_is_none():
    """It was taught by other weights."""
    config = EngineConfig(device="cpu", threads=1, random_weights=True, max_running=1)
    made = assemble(config)
    made.device.close()
    assert made.draft is None
