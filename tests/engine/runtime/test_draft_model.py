"""A smaller model as the draft: its draft tokens, and the cache that it keeps."""

from __future__ import annotations

import pytest
import torch
from legato_engine.core.requests import make_sequence
from legato_engine.device.cpu import CpuDevice
from legato_engine.errors import InvalidField
from legato_engine.kernels.proposer import UNKNOWN, RowHistory
from legato_engine.models.paged_attention import PrefillSpan
from legato_engine.runtime.drafting import CATCH_UP, DraftModel
from legato_engine.types import QuerySpec, Request, RequestKey, SamplingParams

from benchmarks.speculation.run import Run
from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.models.paged_session import PagedSession

ROWS, BLOCK, CONTEXT, PREFIX = 3, 4, 90, 5
PROMPT = list(range(20, 43))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Phi."""
    made = tmp_path_factory.mktemp("phi")
    hub_folder.write(made, hub_folder.phi())
    return made


@pytest.fixture(scope="module")
def model(folder):
    """The loaded Phi."""
    with torch.inference_mode():
        yield same.load("phi", folder)


@pytest.fixture
def draft(model):
    """A fresh draft model."""
    device = CpuDevice(1)
    yield DraftModel(model, device, num_rows=ROWS, vocab_size=model.vocab_size)
    device.close()


def continued(model, tokens, count):
    """The model's likeliest tokens after these, each computed from scratch."""
    tokens = list(tokens)
    for _ in range(count):
        x_TD = model.embed(torch.tensor(tokens), torch.zeros(len(tokens), 2))
        pages_M = torch.arange(1, 7)
        span = PrefillSpan(0, pages_M, bidirectional=False)
        hidden_TD = model.prefill(x_TD, span, PagedSession(model).kv)
        tokens.append(int(model.logits(hidden_TD[-1:]).argmax()))
    return tokens[len(tokens) - count :]


class Rows:
    """The histories of all rows, and the draft tokens for some."""

    def __init__(self, draft):
        self.draft = draft
        self.tokens_RC = torch.full((ROWS + 1, CONTEXT), UNKNOWN)
        self.position_R = torch.zeros(ROWS + 1, dtype=torch.int64)

    def set(self, row, tokens, prefix=PREFIX):
        """Fill a row's history, after a prefix without known tokens."""
        self.tokens_RC[row] = UNKNOWN
        self.tokens_RC[row, prefix : prefix + len(tokens)] = torch.tensor(tokens)
        self.position_R[row] = prefix + len(tokens) - 1

    def say(self, *rows, block=BLOCK):
        """Propose for these rows."""
        row_R = torch.tensor(rows)
        draft_RK = torch.full((len(rows), block), 7)
        empty = torch.zeros(len(rows), 1)
        history = RowHistory(row_R, self.tokens_RC[row_R], self.position_R[row_R], empty, empty)
        self.draft.propose(history, draft_RK)
        return draft_RK.tolist()


def test_it_is_silent_until_it_has_read_the_prompt(model, draft):
    """It reads a few tokens per proposal, then proposes the likeliest next ones."""
    rows = Rows(draft)
    rows.set(1, PROMPT)
    needed = -(-len(PROMPT) // CATCH_UP)
    said = [rows.say(1)[0] for _ in range(needed)]
    assert said[:-1] == [[UNKNOWN] * BLOCK] * (needed - 1)
    assert said[-1] == continued(model, PROMPT, BLOCK)


def test_it_goes_on_from_what_was_accepted(model, draft):
    """After all, none or a part of a block is accepted, rejected positions are computed again."""
    rows = Rows(draft)
    tokens = PROMPT[:6]
    rows.set(0, tokens)
    for accepted, other in ((BLOCK, 60), (0, 61), (2, 62), (1, 63), (BLOCK, 64)):
        (said,) = rows.say(0)
        assert said == continued(model, tokens, BLOCK)
        tokens = [*tokens, *said[:accepted], other]
        rows.set(0, tokens)


def test_rows_are_apart_and_change_hands(model, draft):
    """Each row has its own cache, and a new sequence reuses the beginning that it shares."""
    rows = Rows(draft)
    first, second = PROMPT[:5], PROMPT[3:9]
    rows.set(0, first)
    rows.set(2, second, prefix=1)
    assert rows.say(2, 0) == [continued(model, each, BLOCK) for each in (second, first)]
    other = [*second[:4], 99]
    rows.set(2, other, prefix=40)
    assert rows.say(0, 2, block=1) == [continued(model, each, 1) for each in (first, other)]


def test_it_is_silent_after_its_context(model, draft):
    """A row longer than the draft's context gets no draft tokens, and other rows keep theirs."""
    longest = model.max_context
    rows = Rows(draft)
    rows.tokens_RC = torch.full((ROWS + 1, longest + 20), 9)
    rows.position_R[0] = longest + 3
    rows.set(1, PROMPT[:4])
    for _ in range(3):
        said = rows.say(0, 1)
    assert said == [[UNKNOWN] * BLOCK, continued(model, PROMPT[:4], BLOCK)]


def test_vocabularies_have_to_agree(model):
    """A draft with another vocabulary size is refused."""
    device = CpuDevice(1)
    with pytest.raises(InvalidField, match="384 tokens, the model has 300"):
        DraftModel(model, device, num_rows=ROWS, vocab_size=300)
    device.close()


def asked(engine, temperature):
    """Run questions together to their ends."""
    sampling = SamplingParams(max_tokens=25, temperature=temperature, seed=3)
    sequences = []
    for number, question in enumerate(same.questions(5, seed=3)):
        task = QuerySpec(question=question)
        request = Request(request_id=RequestKey(str(number)), task=task, sampling=sampling)
        sequences.append(make_sequence(engine.assembly.frontend, request, None))
    return Run(engine.assembly, sequences)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafts_for_itself(folder, temperature):
    """The engine gives the same answers, in few steps where the likeliest token is chosen."""
    with same.Engine("phi", folder) as engine:
        plain = asked(engine, temperature)
    settings = {"speculation": "fixed:4", "draft": f"phi:{folder}"}
    with same.Engine("phi", folder, **settings) as engine:
        figures = asked(engine, temperature).figures("", 5, "", plain)
    assert figures.identical
    assert figures.acceptance > (0.0 if temperature else 0.85)  # but what it says while it reads
    assert figures.tokens_per_verify > (1.0 if temperature else 2.0)
