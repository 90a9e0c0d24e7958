"""Sampled tokens and their log-probabilities follow their definitions."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.core.requests import make_sequence
from legato_engine.runtime.sampler import (
    constraint_table,
    greedy,
    gumbel_noise,
    sample,
    token_logprobs,
)
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import NO_PAYLOAD, Constraint
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    ImageProperties,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    SegmentSpec,
    TaskSpec,
)
from PIL import Image

from tests.engine.models.paged_session import PagedSession


def rows(count: int, **values: float) -> dict[str, torch.Tensor]:
    """Sampling tensors of `count` equal rows, seeds and positions counting up."""
    return {
        "temperature_B": torch.full((count,), values.get("temperature", 1.0)),
        "top_p_B": torch.full((count,), values.get("top_p", 1.0)),
        "top_k_B": torch.full((count,), int(values.get("top_k", 0))),
        "seed_B": torch.full((count,), int(values.get("seed", 1))),
        "position_B": torch.arange(count),
    }


def test_constraints_allow_and_suppress() -> None:
    """A constraint leaves exactly its allowed tokens, less its suppressed ones."""
    table_CV = constraint_table([Constraint(), Constraint((1, 3)), Constraint(None, (0,))], 4)
    allowed = torch.isfinite(table_CV).tolist()
    assert allowed == [[True] * 4, [False, True, False, True], [False, True, True, True]]


def test_zero_temperature_is_greedy() -> None:
    """A row at temperature 0 takes the highest logit, next to a sampled row too."""
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    parameters = rows(6)
    parameters["temperature_B"][::2] = 0.0
    chosen = sample(logits_BV, **parameters)
    assert torch.equal(chosen[::2], greedy(logits_BV)[::2])


def test_top_p_keeps_the_token_that_crosses() -> None:
    """A token stays while the mass before it is at most top_p; the first always stays."""
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    count = 4000
    for top_p, kept in [(0.3, {0}), (0.55, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})]:
        chosen = sample(logits_V.repeat(count, 1), **rows(count, top_p=top_p))
        assert set(chosen.tolist()) == kept, top_p


def test_top_k_keeps_the_k_most_likely() -> None:
    """With top_k 2 only the two highest are drawn, and both are."""
    chosen = sample(torch.tensor([[0.0, 1.0, 0.5, -1.0]]).repeat(2000, 1), **rows(2000, top_k=2))
    assert set(chosen.tolist()) == {1, 2}


def test_draws_follow_the_distribution() -> None:
    """Over many positions the frequencies are the softmax probabilities within four sigma."""
    probs_V = torch.tensor([0.6, 0.25, 0.1, 0.05])
    count = 40_000
    chosen = sample(probs_V.log().repeat(count, 1), **rows(count))
    freq_V = torch.bincount(chosen, minlength=4) / count
    sigma_V = (probs_V * (1 - probs_V) / count).sqrt()
    assert ((freq_V - probs_V).abs() < 4 * sigma_V).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), permutation=st.permutations(range(8)))
def test_a_row_does_not_see_its_neighbours(seed: int, permutation: list[int]) -> None:
    """A permuted batch has permuted tokens."""
    logits_BV = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed % 1000))
    parameters = rows(8, top_p=0.9, temperature=0.7)
    parameters["seed_B"] = torch.full((8,), seed)
    chosen = sample(logits_BV, **parameters)
    order = torch.tensor(permutation)
    shuffled = sample(logits_BV[order], **{k: v[order] for k, v in parameters.items()})
    assert torch.equal(chosen[order], shuffled)


@pytest.mark.parametrize("changed", ["seed_B", "position_B"])
def test_noise_depends_on_seed_and_position(changed: str) -> None:
    """Another seed or another position draws other noise; the same pair draws the same."""
    key = {"seed_B": torch.tensor([5]), "position_B": torch.tensor([9])}
    tokens = torch.arange(16)[None]
    same = gumbel_noise(**key, token_BV=tokens)
    assert torch.equal(same, gumbel_noise(**key, token_BV=tokens))
    key[changed] = key[changed] + 1
    assert not torch.equal(same, gumbel_noise(**key, token_BV=tokens))


# ---------------------------------------------------------------- logprobs
# Log-probabilities of sampled tokens, compared with their definition and a replay.

EOS, COORD, SIZE = 0, 5, 6
IMAGE = CachedImageRef(image_id="p")
ASKED: dict[str, TaskSpec] = {
    "caption": CaptionSpec(),
    "thoughts": QuerySpec(question="why?", reasoning=True),
    "boxes": DetectSpec(object="cup", max_objects=2),
    "outline": SegmentSpec(object="cup"),
}


@pytest.fixture(scope="module")
def assembly():
    """One small model for all tests."""
    made = assemble(EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=4))
    yield made
    made.device.close()


class Listener(SilentSink):
    """Keeps the tokens of every request's sequence."""

    def __init__(self):
        self.tokens = {}

    def watch(self, sequence):
        """Record the tokens that its task reads."""
        seen = self.tokens[sequence.request.request_id.caller_id] = []
        consume = sequence.task.consume

        def read(token):
            seen.append(token)
            return consume(token)

        sequence.task.consume = read
        return sequence


@pytest.fixture
def prepared(assembly):
    """An image, ready for the vision encoder."""
    info = ImageProperties(image_id="p", width=40, height=30, cache_hit=False)
    return assembly.frontend.prepare_image(Image.new("RGB", (40, 30), "teal"), "p", info)


def request(name, *, logprobs=True, temperature=0.8):
    """One of the tasks; with this seed there are some boxes."""
    sampling = SamplingParams(temperature=temperature, top_p=0.9, seed=2, max_tokens=10)
    return Request(
        request_id=RequestKey(name),
        task=ASKED[name],
        image=IMAGE,
        sampling=sampling,
        logprobs=logprobs,
    )


def run(assembly, prepared, *requests):
    """Run all requests together; return the tokens that each task read."""
    listener = Listener()
    scheduler = assembly.scheduler(listener, pipeline_depth=2)
    for asked in requests:
        scheduler.submit(listener.watch(make_sequence(assembly.frontend, asked, prepared)))
    scheduler.drain()
    return listener.tokens


def definition(model, logits_V, constraint, hidden_1D, token):
    """Log-softmax over allowed tokens, plus that of the value's bin."""
    allowed, suppressed = model.constraints[constraint][:2]
    ids = [i for i in (range(len(logits_V)) if allowed is None else allowed) if i not in suppressed]
    mass = math.log(sum(math.exp(logits_V[i].double()) for i in ids))
    logprob = logits_V[token.token_id].item() - mass
    region = model._network.region
    if token.token_id == COORD:
        bins_N = region.coord_decoder(hidden_1D)[0].double().log_softmax(-1)
        logprob += bins_N[round(token.payload[0] * 1024)].item()
    if token.token_id == SIZE:
        bins_2N = region.size_decoder(hidden_1D)[0].reshape(2, -1).double().log_softmax(-1)
        logprob += bins_2N.max(-1).values.sum().item()
    return logprob


@pytest.mark.parametrize("name", ASKED)
def test_logprobs_are_those_of_a_replay(assembly, prepared, name):
    """Each is the model's own, at temperature 1 and under the constraint of its state."""
    (tokens,) = run(assembly, prepared, request(name)).values()
    model, task = assembly.model, assembly.frontend.make_task(request(name))
    session = PagedSession(model)
    with torch.inference_mode():
        hidden_1D = session.prefill(1, prepared, task.prompt)
        for token in tokens:
            logits_V = model.logits(hidden_1D)[0]
            expected = definition(model, logits_V, task.constraint(), hidden_1D, token)
            assert token.logprob == pytest.approx(expected, abs=2e-4)
            task.consume(token)
            session.feed(1, token.token_id, token.payload)
            hidden_1D = session.step()[1:2]
    assert name != "boxes" or {COORD, SIZE} <= {token.token_id for token in tokens}


@pytest.mark.parametrize("name", ["boxes", "outline"])
def test_certainties_are_those_of_a_replay(assembly, prepared, name):
    """Existence is against EOS alone, under the constraint; the rest is near the value."""
    (tokens,) = run(assembly, prepared, request(name, logprobs=False)).values()
    model, task = assembly.model, assembly.frontend.make_task(request(name))
    region, session, seen = model._network.region, PagedSession(model), set()
    with torch.inference_mode():
        hidden_1D = session.prefill(1, prepared, task.prompt)
        for token in tokens:
            expected = (1.0, 1.0)
            if token.token_id in (COORD, SIZE):
                logits_V = model.logits(hidden_1D)[0]
                allowed = model.constraints[task.constraint()].allowed
                may_end = allowed is None or EOS in allowed
                versus = math.exp(logits_V[EOS] - logits_V[token.token_id]) if may_end else 0.0
                coord = token.token_id == COORD
                heads = region.coord_decoder if coord else region.size_decoder
                bins_KN = heads(hidden_1D)[0].reshape(1 if coord else 2, -1).double().softmax(-1)
                near = [
                    bins_N[max(at - reach, 0) : at + reach + 1].sum().item()
                    for bins_N, at, reach in zip(
                        bins_KN,
                        bins_KN.argmax(-1).tolist(),
                        [32] if coord else [51, 51],
                        strict=True,
                    )
                ]
                expected = (1 / (1 + versus), math.prod(near))
                seen.add((token.token_id, may_end))
            assert token.certainty == pytest.approx(expected, abs=1e-5)
            task.consume(token)
            session.feed(1, token.token_id, token.payload)
            hidden_1D = session.step()[1:2]
    assert name != "boxes" or seen == {(COORD, True), (COORD, False), (SIZE, False)}


@pytest.mark.parametrize("name", ASKED)
def test_alternatives_are_the_likeliest_allowed(assembly, prepared, name):
    """In falling order and at most as many as there are; a greedy token is the first."""
    asked = msgspec.structs.replace(request(name, temperature=0.0), top_logprobs=20)
    plain = msgspec.structs.replace(asked, request_id=RequestKey("plain"), top_logprobs=0)
    told = run(assembly, prepared, asked, plain)
    assert [t[:4] for t in told[name]] == [t[:4] for t in told["plain"]]
    task = assembly.frontend.make_task(asked)
    for token in told[name]:
        constraint = assembly.model.constraints[task.constraint()]
        most = 20 if constraint.allowed is None else len(constraint.allowed)
        assert len(token.alternatives) == most
        assert token.alternatives[0][0] == token.token_id
        logprobs = [logprob for _, logprob in token.alternatives]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-5
        ids = {token_id for token_id, _ in token.alternatives}
        assert len(ids) == most
        assert not ids & set(constraint.suppressed)
        task.consume(token)


def test_asking_changes_nothing_else(assembly, prepared):
    """Tokens and values do not depend on whether any request wants log-probabilities."""
    quiet = run(assembly, prepared, *(request(name, logprobs=False) for name in ASKED))
    mixed = run(assembly, prepared, *(request(name, logprobs=name == "boxes") for name in ASKED))
    alone = run(assembly, prepared, request("boxes"))
    for name, tokens in quiet.items():
        assert all(token.logprob is None for token in tokens)
        assert [token[:2] for token in mixed[name]] == [token[:2] for token in tokens]
    assert mixed["boxes"] == alone["boxes"]


def test_a_launch_without_values_has_no_payloads(assembly, prepared):
    """What an earlier launch of the slot left is neither a payload nor a part of a key."""
    boxes = run(assembly, prepared, request("boxes"))["boxes"]
    assert any(token.payload != NO_PAYLOAD for token in boxes)
    caption = run(assembly, prepared, request("caption"))["caption"]
    assert {token.payload for token in caption} == {NO_PAYLOAD}


def test_a_token_is_measured_among_the_allowed():
    """Suppressed tokens have no share, a sole allowed token is certain, and rows are apart."""
    table_CV = constraint_table([Constraint(), Constraint((2,)), Constraint(None, (0, 1))], 4)
    logits_BV = torch.tensor([[3.0, 1.0, 0.5, -2.0]]).repeat(3, 1) + table_CV
    seen = token_logprobs(logits_BV, torch.tensor([0, 2, 3]))
    shares = [
        math.exp(3) / sum(map(math.exp, (3, 1, 0.5, -2))),
        1.0,
        math.exp(-2) / (math.exp(0.5) + math.exp(-2)),
    ]
    assert seen.exp().tolist() == pytest.approx(shares, rel=1e-6)


def test_large_logits_do_not_overflow():
    """The likeliest token's log-probability is finite for logits of any size."""
    seen = token_logprobs(torch.tensor([[1e4, 0.0, -1e4]]), torch.tensor([0]))
    assert seen.item() == 0.0
