"""Answers with a grammar: masks, refusals, and the engine that samples under them."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import legato_tiny
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.core.requests import make_sequence, replay
from legato_engine.errors import InternalError, InvalidField
from legato_engine.models.grammar import GrammarCompiler
from legato_engine.models.moondream.tokenizer import BytePairTokenizer
from legato_engine.runtime.decode_slot import DraftState
from legato_engine.scheduler.batch import LaunchKind, StepRecord
from legato_engine.sequence import Grammar
from legato_engine.types import (
    AnswerFormat,
    FinishReason,
    QuerySpec,
    Request,
    RequestKey,
    Resumed,
    SamplingParams,
)

from tests.engine.models.against_transformers import Answers, Engine

VOCABULARY = BytePairTokenizer(Path(legato_tiny.__path__[0]) / "tokenizer.json", is_shipped=True)
EOS = 0
NUM_IDS = VOCABULARY.num_ids + 7  # a model's vocabulary may be larger
COMPILER = GrammarCompiler(VOCABULARY, NUM_IDS, [EOS])

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "sizes": {"type": "array", "items": {"enum": ["small", "large"]}, "maxItems": 3},
    },
    "required": ["name", "count", "sizes"],
    "additionalProperties": False,
}


def allowed(grammar, forced=()):
    """Tokens that may follow, after forced ones."""
    words = np.zeros(-(-NUM_IDS // 32), np.int32)
    grammar.fill(words, forced)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def walk(grammar, seed, most=600):
    """Draw tokens until the text is complete; prefer its end to going on."""
    draw, text = np.random.default_rng(seed), b""
    for _ in range(most):
        tokens = allowed(grammar)
        assert len(tokens), "no token may follow, and the text is not complete"
        if EOS in tokens:
            return text.decode()
        token = int(draw.choice(tokens))
        assert grammar.allows(token)
        grammar.accept(token)
        text += VOCABULARY.piece(token)
        if grammar.is_complete:
            return text.decode()
    raise AssertionError(f"not complete after {most} tokens: {text!r}")


def follow(grammar, token, times):
    """Accept one token again and again."""
    for _ in range(times):
        assert token in allowed(grammar)
        grammar.accept(token)


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer", "minimum": -50, "maximum": 50}),
    st.integers(0, 8).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.text(max_size=5) | st.integers(-9, 9), min_size=1, max_size=4, unique=True).map(
        lambda values: {"enum": values}
    ),
)


def objects(inner):
    """Schemas of objects whose properties are all required."""
    names = st.text('abcé_" \\', min_size=1, max_size=4)
    return st.dictionaries(names, inner, min_size=1, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


def arrays(inner):
    """Schemas of short arrays."""
    return inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3})


SCHEMAS = st.recursive(SCALARS, lambda inner: objects(inner) | arrays(inner), max_leaves=6)


def conforms(value, schema):
    """Return whether a value is what these schemas describe."""
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return value.keys() == properties.keys() and all(
                conforms(value[name], of) for name, of in properties.items()
            )
        case "array":
            return len(value) <= 3 and all(conforms(each, schema["items"]) for each in value)
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
    return value is None


@settings(max_examples=75, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_every_text_under_a_schema_parses_and_conforms(schema, seed):
    """Whatever tokens are drawn, the complete text is JSON of the schema."""
    text = walk(COMPILER.compile(AnswerFormat(json_schema=json.dumps(schema))), seed)
    assert conforms(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize("seed", range(5))
def test_choices_expressions_and_grammars_bind(seed):
    """Complete texts are among the choices, match the expression, derive from the grammar."""
    choices = ('yes "sir"', "no\\", "été\n😀")
    assert walk(COMPILER.compile(AnswerFormat(choices=choices)), seed) in choices
    pattern = r"[A-C]{2}-\d{3}"
    assert re.fullmatch(pattern, walk(COMPILER.compile(AnswerFormat(regex=pattern)), seed))
    gbnf = 'root ::= item ("," item){2}\nitem ::= "cat" | "dog"'
    assert re.fullmatch(
        "(cat|dog)(,(cat|dog)){2}", walk(COMPILER.compile(AnswerFormat(grammar=gbnf)), seed)
    )
    lark = 'start: "<" /[a-z]{1,4}/ ">"'
    assert re.fullmatch("<[a-z]{1,4}>", walk(COMPILER.compile(AnswerFormat(grammar=lark)), seed))


def test_a_special_token_is_never_allowed():
    """No text contains the tokens that a model keeps for itself, but for the end."""
    special = [index for index in range(NUM_IDS) if not VOCABULARY.piece(index)]
    free = allowed(COMPILER.compile(AnswerFormat(regex="(?s).*")))
    assert set(special) & set(free.tolist()) == {EOS}
    assert max(free) < VOCABULARY.num_ids


HOSTILE = {
    "no_format": (AnswerFormat(), "response_format"),
    "two_formats": (AnswerFormat(regex="a", grammar='start: "a"'), "response_format"),
    "not_json": (AnswerFormat(json_schema="{"), "json_schema"),
    "not_a_schema": (AnswerFormat(json_schema="[1]"), "json_schema"),
    "unknown_type": (AnswerFormat(json_schema='{"type":"colour"}'), "json_schema"),
    "remote_reference": (AnswerFormat(json_schema='{"$ref":"http://x/y"}'), "json_schema"),
    "unsatisfiable": (AnswerFormat(json_schema='{"enum":[]}'), "json_schema"),
    "deep_schema": (
        AnswerFormat(json_schema='{"items":' * 5_000 + "{}" + "}" * 5_000),
        "json_schema",
    ),
    "deep_expression": (AnswerFormat(regex="(" * 20_000 + ")" * 20_000), "regex"),
    "deep_grammar": (
        AnswerFormat(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        "grammar",
    ),
    "no_expression": (AnswerFormat(regex="("), "regex"),
    "no_grammar": (AnswerFormat(grammar="start: missing"), "grammar"),
    "huge": (AnswerFormat(regex="a" * 70_000), "regex"),
    "many_choices": (AnswerFormat(choices=tuple(map(str, range(2_000)))), "choices"),
    "empty_choice": (AnswerFormat(choices=("a", "")), "choices"),
    "big_number": (
        AnswerFormat(json_schema='{"type":"integer","multipleOf":7919,"minimum":1000000000}'),
        "json_schema",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_format_is_refused_with_its_field(name):
    """The error names the field, in one line, whatever the source."""
    wanted, field = HOSTILE[name]
    with pytest.raises(InvalidField) as refused:
        COMPILER.compile(wanted)
    assert refused.value.metadata["field"].endswith(field)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def test_a_bad_expression_is_refused_with_the_reason():
    for expression, reason in {"a(b": "unclosed group", "(?=x)a": "look-around"}.items():
        with pytest.raises(InvalidField, match=f"^{reason}"):
            COMPILER.compile(AnswerFormat(regex=expression))


def test_a_grammar_too_complex_to_follow_ends_its_request():
    """The error comes with the token that it cannot follow, and not as a wrong answer."""
    grammar = COMPILER.compile(AnswerFormat(regex="((a{1,100}){1,100}){1,100}b"))
    (letter,) = (index for index in allowed(grammar) if VOCABULARY.piece(index) == b"a")
    with pytest.raises(InvalidField, match=r"lexer|complex|fuel|limit") as refused:
        follow(grammar, letter, 300)
    assert refused.value.metadata["field"] == "response_format.regex"


def compiled(wanted):
    """The start of a text that matches."""
    grammar = COMPILER.compile(wanted)
    assert grammar is not None
    return grammar


def after(wanted, tokens):
    """Tokens that may follow others, by a grammar that has computed no mask and no forced run."""
    grammar = compiled(wanted)
    for token in tokens:
        grammar.accept(token)
    return allowed(grammar)


@settings(max_examples=20, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_a_forced_token_is_the_only_one_allowed(schema, seed):
    """So it is certain; masks ahead of the accepted tokens are those of a grammar that is not."""
    wanted = AnswerFormat(json_schema=json.dumps(schema))
    grammar, draw, text = compiled(wanted), np.random.default_rng(seed), list[int]()
    while not grammar.is_complete and len(text) < 40:
        run = grammar.forced(0)
        for count, token in enumerate(run):
            assert after(wanted, [*text, *run[:count]]).tolist() == [token]
        forced = run[: draw.integers(0, len(run) + 1)]
        tokens = allowed(grammar, forced)
        assert tokens.tolist() == after(wanted, [*text, *forced]).tolist()
        assert not forced or not grammar.is_complete
        assert grammar.forced(len(forced) + 1) == run[len(forced) + 1 :]
        chosen = int(draw.choice(tokens))
        if chosen == EOS:
            break
        for token in (*forced, chosen):
            grammar.accept(token)
            text.append(token)
            if grammar.is_complete:
                break


# ---------------------------------------------------------------- engine


def asked(**wanted):
    return QuerySpec(question="What is there?", response_format=AnswerFormat(**wanted))


TASKS = [
    asked(json_schema=json.dumps(OBJECT)),
    QuerySpec(question="What is there?"),
    asked(choices=("red", "green", "blue")),
    asked(regex="[0-9]{4}-[0-9]{2}"),
    QuerySpec(question="Where is the cat?"),
]


@pytest.fixture(scope="module", params=["off", "seed"])
def engine(request):
    """An engine with legato-tiny, with and without drafts."""
    with Engine("legato-tiny", "", speculation=request.param) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_match_their_formats_in_any_batch(engine, temperature):
    """Alone or beside others, pipelined or not, tokens are the same and answers match."""
    sampling = {"max_tokens": 120, "temperature": temperature, "top_p": 0.95}
    runs = [
        engine.ask(TASKS, depth, together, **sampling)
        for depth in (1, 2)
        for together in (True, False)
    ]
    assert all(run.tokens == runs[0].tokens for run in runs[1:])
    results = runs[0].results
    assert conforms_to_object(json.loads(results["0"]))
    assert results["2"] in ("red", "green", "blue")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", results["3"])
    assert {runs[0].reasons[name] for name in "023"} == {FinishReason.STOP}


def conforms_to_object(value):
    return (
        value.keys() == OBJECT["properties"].keys()
        and len(value["name"]) <= 12
        and 0 <= value["count"] <= 99
        and set(value["sizes"]) <= {"small", "large"}
    )


LISTED = asked(
    grammar='start: ITEM ("," ITEM){0,2}\n'
    'ITEM: /\\{"bbox_2d": \\[[0-9]{1,3}, [0-9]{1,3}\\], "label": "cat"\\}/'
)
WITH_RUNS = [*TASKS, LISTED, asked(regex="The answer is [0-9]{2}, and no more\\.")]


def without_forced(engine, monkeypatch, *arguments, **options):
    """Answers whose forced tokens are sampled one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(Grammar, "forced", lambda self, num_inflight: ())
        return engine.ask(*arguments, **options)


def num_decodes(steps):
    """Count the decodes among launches."""
    return sum(step.launch.plan.kind is LaunchKind.DECODE for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forced_tokens_do_not_change_answers(engine, monkeypatch, temperature):
    """Tokens, log-probabilities and alternatives are those of single steps, in fewer steps."""
    options = {"logprobs": True, "max_tokens": 120, "temperature": temperature, "seed": 3}
    singly = list[StepRecord]()
    expected = without_forced(engine, monkeypatch, WITH_RUNS, steps=singly, **options)
    for depth, together in ((1, True), (2, True), (2, False)):
        steps = list[StepRecord]()
        answers = engine.ask(WITH_RUNS, depth, together, steps=steps, **options)
        assert answers.told == expected.told
        assert (answers.results, answers.reasons) == (expected.results, expected.reasons)
        forced = sum(step.forced for step in steps)
        assert forced > sum(map(len, answers.told.values())) / 4
        if together:
            assert num_decodes(steps) < 0.75 * num_decodes(singly)


@settings(max_examples=5, deadline=None)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_forced_tokens_do_not_change_answers_to_a_schema(engine, schemas, seed):
    """Whatever the schemas of a batch, with one launch in flight or two."""
    tasks = [asked(json_schema=json.dumps(schema)) for schema in schemas]
    options = {"max_tokens": 50, "temperature": 1.0, "seed": seed, "logprobs": True}
    expected = without_forced(engine, pytest.MonkeyPatch(), tasks, **options)
    for depth in (1, 2):
        answers = engine.ask(tasks, depth, **options)
        assert (answers.told, answers.reasons) == (expected.told, expected.reasons)


def test_an_answer_may_end_within_forced_tokens(engine, monkeypatch):
    """At max_tokens or a stop string, wherever in a run that is, as if it came token by token."""
    tasks = WITH_RUNS[-2:]
    for most in range(1, 12, 2):
        expected = without_forced(engine, monkeypatch, tasks, max_tokens=most)
        answers = engine.ask(tasks, max_tokens=most)
        assert (answers.told, answers.reasons) == (expected.told, expected.reasons)
    for stop in ("box", ", ", "ns"):
        expected = without_forced(engine, monkeypatch, tasks, max_tokens=40, stop=(stop,))
        answers = engine.ask(tasks, max_tokens=40, stop=(stop,))
        assert (answers.told, answers.results) == (expected.told, expected.results)


def test_a_forced_end_takes_no_step(engine, monkeypatch):
    """From the last token with an alternative on, the answer is complete at once."""
    tasks = [asked(choices=("a small red ball",)), asked(regex="[0-9] of them, I think")]
    expected = without_forced(engine, monkeypatch, tasks, max_tokens=30)
    steps = list[StepRecord]()
    answers = engine.ask(tasks, depth=1, steps=steps, max_tokens=30)
    assert (answers.told, answers.results) == (expected.told, expected.results)
    assert set(answers.reasons.values()) == {FinishReason.STOP}
    assert num_decodes(steps) == 0
    assert sum(step.forced for step in steps) == sum(map(len, answers.told.values())) - 2


def test_a_mask_before_forced_tokens_is_noticed(engine, monkeypatch):
    """A mask of the state before them would let the first be sampled again, which is refused."""
    fill = Grammar.fill
    monkeypatch.setattr(Grammar, "fill", lambda self, words, forced=(): fill(self, words))
    with pytest.raises((InternalError, InvalidField)):
        engine.ask(WITH_RUNS[-1:], max_tokens=40)


@pytest.mark.parametrize("engine", ["seed"], indirect=True)
def test_forced_drafts_need_a_mask_each(engine, monkeypatch):
    """Under one mask for all of a row's tokens, verification does not accept them."""
    monkeypatch.setattr(DraftState, "index_constraints", lambda self, slot: None)
    with pytest.raises(InternalError):
        engine.ask(WITH_RUNS[-1:], max_tokens=40)


def test_a_neighbour_does_not_change_a_free_answer(engine):
    """Requests without a grammar answer as they do where no request has one."""
    free = [task for task in TASKS if task.response_format is None]
    alone = engine.ask(free, max_tokens=40, temperature=1.0, seed=7)
    mixed = engine.ask(TASKS, max_tokens=40, temperature=1.0, seed=7)
    assert [mixed.tokens["1"], mixed.tokens["4"]] == [alone.tokens["0"], alone.tokens["1"]]


def test_a_cut_answer_says_so(engine):
    """An answer that reaches max_tokens ends with LENGTH."""
    answers = engine.ask(TASKS[:1], max_tokens=3)
    assert answers.reasons["0"] is FinishReason.LENGTH


def test_a_resumed_answer_must_match(engine):
    """Tokens that the grammar forbids are refused before they are replayed."""
    request = Request(
        request_id=RequestKey("r"), task=TASKS[2], sampling=SamplingParams(max_tokens=9)
    )
    sequence = make_sequence(engine.assembly.frontend, request, None)
    (wrong,) = VOCABULARY.encode("7")[:1]
    with pytest.raises(InvalidField) as refused:
        replay(sequence, Resumed(token_ids=(wrong,), arrival=0.0), engine.assembly.frontend)
    assert refused.value.metadata["field"] == "resume_from.token_ids[0]"


def test_forced_tokens_survive_preemption(engine, monkeypatch):
    """Answers are the same where pages do not last for all requests."""
    tasks, steps = [TASKS[0], LISTED] * 4, list[StepRecord]()
    options = {"max_tokens": 80, "temperature": 1.0, "seed": 11}
    with monkeypatch.context() as patch:
        patch.setattr(engine, "assembly", dataclasses.replace(engine.assembly, num_pages=10))
        answers = engine.ask(tasks, steps=steps, **options)
    rows = (row for step in steps for row in step.launch.plan.rows)
    assert any(row.sequence.pages.num_preemptions for row in rows)
    assert any(step.forced for step in steps)
    expected = without_forced(engine, monkeypatch, tasks, depth=1, together=False, **options)
    assert answers.tokens == expected.tokens


def test_an_answer_resumes_within_forced_tokens(engine):
    """After another engine's end, wherever that left it, the rest is the same."""
    task, sampling = LISTED, SamplingParams(max_tokens=60, temperature=1.0, seed=5)
    whole = engine.ask([task], max_tokens=60, temperature=1.0, seed=5).tokens["0"]
    for count in range(1, len(whole), 2):
        answers = Answers()
        scheduler = engine.assembly.scheduler(answers, pipeline_depth=2)
        request = Request(
            request_id=RequestKey("0"), task=task, sampling=sampling, return_tokens=True
        )
        sequence = make_sequence(engine.assembly.frontend, request, None)
        resumed = Resumed(token_ids=tuple(whole[:count]), arrival=0.0)
        replay(sequence, resumed, engine.assembly.frontend)
        scheduler.submit(sequence)
        scheduler.drain()
        assert answers.tokens["0"] == whole[count:]


@pytest.mark.parametrize("seed", range(2))
def test_forced_tokens_survive_ends_of_others(engine, monkeypatch, seed):
    """Requests are aborted or stopped at any step, and the pipeline's depth changes.

    What they had read, and what the others read, is what they read alone.
    """
    draw, tasks = random.Random(seed), WITH_RUNS * 2
    options = {"max_tokens": 40, "temperature": 1.0, "seed": seed}
    expected = without_forced(engine, monkeypatch, tasks, depth=1, together=False, **options)
    answers, frontend = Answers(), engine.assembly.frontend
    scheduler = engine.assembly.scheduler(answers, pipeline_depth=2)
    keys = [RequestKey(str(index)) for index in range(len(tasks))]
    for key, task in zip(keys, tasks, strict=True):
        sampling = SamplingParams(**options)
        request = Request(request_id=key, task=task, sampling=sampling, return_tokens=True)
        scheduler.submit(make_sequence(frontend, request, None))
    while not scheduler.idle:
        scheduler.step()
        scheduler.set_depth(draw.choice((1, 2)))
        if draw.random() < 0.15:
            draw.choice((scheduler.abort, scheduler.stop))(draw.choice(keys))
    assert (scheduler.load().rows_used, scheduler.load().pages_used) == (0, 0)
    finished = {
        name for name, reason in answers.reasons.items() if reason is not FinishReason.CANCELLED
    }
    assert {FinishReason.CANCELLED} < set(answers.reasons.values())
    for name, tokens in answers.tokens.items():
        whole = expected.tokens[name]
        assert tokens == (whole if name in finished else whole[: len(tokens)])
