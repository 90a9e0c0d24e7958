"""The draft layer after a model's last: its draft tokens, and its files.

Shape legend: R rows, D width, H heads, E head dim, L positions.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.kernels.proposer import UNKNOWN, RowHistory
from legato_engine.models.moondream.draft import DraftLayer, DraftProposer
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.presets import tiny_random_config
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import KVCache, PrefillSpan
from safetensors.torch import save_file

CONFIG = tiny_random_config()
TEXT = CONFIG.text
PAGE, PAGES, BLOCK, INNER, LAYER = 4, 8, 5, 24, 1


def random_draft(seed=0):
    """Random tensors of a draft layer, by name."""
    torch.manual_seed(seed)
    layer = DraftLayer(TEXT.dim, INNER, TEXT.num_heads)
    return {name: torch.randn_like(each) / 4 for name, each in layer.state_dict().items()}


def draft_file(path, tensors, **notes):
    """Write them to a file."""
    save_file(tensors, path, metadata={"model": CONFIG.name, "layer": str(LAYER)} | notes)
    return path


@pytest.fixture(scope="module")
def model():
    """Random weights."""
    network = random_weights(CONFIG, 0, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        yield MoondreamModel(CONFIG, network)


def prefilled(model, kv, tokens, pages):
    """The hidden states of a sequence whose keys and values are in these pages."""
    x_TD = model.embed(torch.tensor(tokens), torch.zeros(len(tokens), 2))
    span = PrefillSpan(0, torch.tensor(pages), bidirectional=False)
    return model.prefill(x_TD, span, kv)


def rolled(model, tensors, kv, pages, state_D, token, newest, count):
    """The draft tokens of one row, computed head by head."""
    text, width = model._network.text, TEXT.dim // TEXT.num_heads
    norm = torch.nn.functional.layer_norm

    def named(name):
        return tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def linear(name, x_D):
        weight, bias = named(name)
        return weight @ x_D + bias

    caches = (kv.k_LNHSE[LAYER], kv.v_LNHSE[LAYER])
    k_LHE, v_LHE = (
        torch.cat([cache[page].transpose(0, 1) for page in pages])[:newest] for cache in caches
    )
    said = []
    for step in range(count):
        word_D = text.wte[token]
        both = torch.cat(
            [norm(x, x.shape, *named(n)) for x, n in ((state_D, "ln_state"), (word_D, "ln_token"))]
        )
        joined_D = linear("join", both)
        joined_D = norm(joined_D, joined_D.shape, *named("ln"))
        cos_R, sin_R = text.rope.cos_PR[newest + step], text.rope.sin_PR[newest + step]
        half, seen = len(cos_R), []
        for head, q_E in enumerate(linear("query", joined_D).view(TEXT.num_heads, width)):
            first, second, rest = q_E[:half], q_E[half : 2 * half], q_E[2 * half :]
            turned = (first * cos_R - second * sin_R, first * sin_R + second * cos_R)
            share_L = (k_LHE[:, head] @ torch.cat([*turned, rest]) / width**0.5).softmax(0)
            seen.append(share_L @ v_LHE[:, head])
        inner = torch.nn.functional.gelu(linear("fc1", joined_D), approximate="tanh")
        state_D = state_D + linear("proj", torch.cat(seen)) + linear("fc2", inner)
        token = int(model.logits(state_D[None])[0].argmax())
        said.append(token)
    return said


def test_rows_say_what_each_says_by_hand(model, tmp_path):
    """Rows of different lengths and pages, a free one among them, have their own draft tokens."""
    tensors = random_draft()
    shape = (TEXT.num_layers, 2 * PAGES, TEXT.num_heads, PAGE, TEXT.dim // TEXT.num_heads)
    kv = KVCache(torch.zeros(shape), torch.zeros(shape))
    proposer = model.draft_proposer(draft_file(tmp_path / "d.safetensors", tensors), kv)
    assert isinstance(proposer, DraftProposer)
    rows = [([9, 30, 41, 7, 8, 65, 20], [3, 9]), ([50, 51, 52], [7]), ([8] * 13, [2, 4, 6, 11])]
    tokens_RC = torch.full((4, TEXT.max_context), UNKNOWN)
    position_R = torch.zeros(4, dtype=torch.int64)
    hidden_RD = torch.zeros(4, TEXT.dim)
    table_RM = torch.zeros(4, PAGES, dtype=torch.int64)
    wanted = []
    for row, (tokens, pages) in enumerate(rows):
        streams_TD = prefilled(model, kv, tokens, pages)
        newest = 33 + row  # any token may have been sampled
        tokens_RC[row, : len(tokens) + 1] = torch.tensor([*tokens, newest])
        position_R[row] = len(tokens)
        hidden_RD[row] = streams_TD[-1]
        table_RM[row, : len(pages)] = torch.tensor(pages)
        start = (tensors, kv, pages, streams_TD[-1], newest, len(tokens))
        wanted.append(rolled(model, *start, BLOCK))
    history = RowHistory(torch.arange(4), tokens_RC, position_R, hidden_RD, table_RM)
    draft_RK = torch.full((4, BLOCK), UNKNOWN)
    proposer.propose(history, draft_RK)
    assert draft_RK[:3].tolist() == wanted
    assert len({tuple(said) for said in wanted}) == 3
    shorter_RK = torch.full((4, 2), UNKNOWN)
    proposer.propose(history, shorter_RK)
    assert shorter_RK[:3].tolist() == [said[:2] for said in wanted]


def test_the_end_of_the_context_is_no_place_to_fail(model, tmp_path):
    """After the last position any draft token is fine, because none is read."""
    shape = (TEXT.num_layers, 2, TEXT.num_heads, PAGE, TEXT.dim // TEXT.num_heads)
    kv = KVCache(torch.zeros(shape), torch.zeros(shape))
    proposer = model.draft_proposer(draft_file(tmp_path / "d.safetensors", random_draft()), kv)
    tokens_RC = torch.zeros(1, TEXT.max_context + 1, dtype=torch.int64)
    position_R = torch.tensor([TEXT.max_context - 1])
    table_RM = torch.zeros(1, PAGES, dtype=torch.int64)
    draft_RK = torch.full((1, BLOCK), UNKNOWN)
    hidden_RD, row_R = torch.zeros(1, TEXT.dim), torch.arange(1)
    history = RowHistory(row_R, tokens_RC, position_R, hidden_RD, table_RM)
    proposer.propose(history, draft_RK)
    assert 0 <= draft_RK.min() <= draft_RK.max() < TEXT.vocab_size


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "moondream2"}, "is for the model moondream2"),
        ({"layer": "2"}, "reads layer '2' of 2"),
        ({"layer": "-1"}, "reads layer '-1'"),
    ],
)
def test_files_for_others_are_refused(model, tmp_path, change, problem):
    """A draft names its model and the layer that it reads."""
    path = draft_file(tmp_path / "d.safetensors", random_draft(), **change)
    with pytest.raises(InvalidField, match=problem) as error:
        model.draft_proposer(path, None)
    assert error.value.metadata["field"] == "draft"


def test_files_that_do_not_fit_are_refused(model, tmp_path):
    """Missing, wrong and unreadable tensors are named."""
    short = random_draft()
    del short["query.bias"]
    short["fc2.weight"] = torch.zeros(TEXT.dim, INNER + 1)
    path = draft_file(tmp_path / "d.safetensors", short)
    with pytest.raises(InvalidField, match=r"missing or wrong fc2\.weight, query\.bias"):
        model.draft_proposer(path, None)
    (tmp_path / "text").write_text("nothing of the kind")
    for name in ("text", "absent"):
        with pytest.raises(InvalidField, match="cannot be read"):
            model.draft_proposer(tmp_path / name, None)
