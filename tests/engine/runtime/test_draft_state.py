"""Positions, draft tokens and acceptance of rows, with tensors alone."""

import numpy as np
import pytest
import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.kernels.decode_loop import DONE
from legato_engine.kernels.proposer import UNKNOWN
from legato_engine.runtime.buffers import TokenRing
from legato_engine.runtime.decode_slot import DecodeSlot, DraftState, RowState, StepLayout
from legato_engine.runtime.descriptors import DESCRIPTOR, NO_DRAFTS, STARTS
from legato_engine.runtime.drafting import DraftSnapshot
from legato_engine.speculation import FixedBlockPolicy

ROWS, BLOCK, CONTEXT, VOCABULARY = 3, 3, 20, 50
TOKENS = 8
PROMPT = (11, 12, 13)
START = 2  # positions of the prefix


class Told:
    """A proposer with scripted draft tokens per row."""

    sequential = False

    def __init__(self):
        self.says = torch.full((ROWS + 1, BLOCK), UNKNOWN)

    def propose(self, history, draft_RK):
        """Copy the script of the rows."""
        draft_RK.copy_(self.says[history.row_R])


@pytest.fixture
def device():
    """Its streams are unused: everything runs at once."""
    made = CpuDevice(1)
    yield made
    made.close()


def descriptor_words(**fields):
    """A descriptor of zeros but for some fields, as int64."""
    made = np.zeros(1, DESCRIPTOR)
    for name, value in fields.items():
        made[name] = value
    return torch.from_numpy(made.view(np.int64))


class Rows:
    """A draft state over one slot, driven by hand."""

    def __init__(self, device):
        self.told = Told()
        self.drafts = DraftState(
            self.told,
            FixedBlockPolicy(BLOCK),
            num_rows=ROWS,
            max_context=CONTEXT,
            vocab_size=VOCABULARY,
            width=1,
            dtype=torch.float32,
            device=device.torch_device,
        )
        self.slot = DecodeSlot(
            device,
            max_rows=TOKENS,
            max_pages=2,
            max_prompt=CONTEXT,
            width=1,
            vocab_size=VOCABULARY,
            dtype=torch.float32,
            max_drafting=ROWS,
        )
        self.drafts.lay_out([StepLayout(2, 1), StepLayout(4, 1), StepLayout(TOKENS, 1)], TOKENS)
        self.table_RM = torch.zeros(ROWS + 1, 2, dtype=torch.int64)
        self.token_R = torch.zeros(ROWS + 1, dtype=torch.int64)

    def stage(self, **fields):
        """Fill the first entries of staged fields."""
        for name, values in fields.items():
            self.slot.staged.device[name][: len(values)] = torch.tensor(values)

    def admit(self, row, *, limit, token):
        """Admit a prompt, and settle its first sampled token."""
        prompt = self.slot.prompt.device
        prompt["row"].fill_(row)
        prompt["history"].fill_(UNKNOWN)
        prompt["history"][0, START : START + len(PROMPT)] = torch.tensor(PROMPT)
        prompt["limit"].fill_(limit)
        prompt["descriptor"].copy_(descriptor_words(flags=STARTS))
        self.drafts.admit(self.slot)
        self.stage(scheduled_row=[row, ROWS, ROWS], room=[NO_DRAFTS] * 3, start=[0], fed=[1])
        self.stage(sample_position=[START + len(PROMPT)])
        self.settle([token])

    def place(self, *rooms):
        """Place rows, given as (row, most draft tokens); return what the tokens feed."""
        padded = [*rooms, *[(ROWS, 0)] * (ROWS - len(rooms))]
        self.stage(scheduled_row=[row for row, _ in padded], room=[room for _, room in padded])
        self.drafts.allot(self.slot, self.table_RM)
        self.drafts.propose(self.slot, self.table_RM, BLOCK)
        self.drafts.place(self.slot)
        names = ("row", "source", "token", "position", "sample_position")
        fields = [self.slot.staged.device[name].tolist() for name in names]
        tokens = list(zip(*fields, strict=True))
        fed = [each for each in tokens if each[0] != ROWS]
        assert tokens == fed + [PADDING] * (TOKENS - len(fed)), "tokens are not adjacent"
        return fed

    def settle(self, tokens):
        """Settle sampled tokens; return the rows' counts, and of draft tokens that were fed."""
        self.slot.tokens_R[: len(tokens)] = torch.tensor(tokens)
        self.drafts.settle(self.slot, TOKENS, self.token_R)
        outputs = self.slot.outputs.device
        return outputs["count"].tolist(), outputs["proposed"].tolist()

    def known(self, row):
        """Return a row's tokens up to its newest."""
        tokens_C = self.drafts.tokens_RC[row].tolist()
        newest = int(self.drafts.position_R[row])
        assert set(tokens_C[newest + 1 :]) <= {UNKNOWN}, "tokens after the newest one"
        return tokens_C[: newest + 1]


PADDING = (ROWS, -1, 0, 0, 0)
PREFIX = [UNKNOWN] * START


def test_draft_tokens_follow_the_newest_token(device):
    """A row feeds its newest token and then its draft tokens, one position after another."""
    rows = Rows(device)
    rows.admit(1, limit=17, token=20)
    rows.told.says[1] = torch.tensor([21, 22, 23])
    assert rows.place((1, 3)) == [
        (1, 1, 0, 5, 6),
        (1, -1, 21, 6, 7),
        (1, -1, 22, 7, 8),
        (1, -1, 23, 8, 9),
    ]
    assert rows.known(1) == [*PREFIX, *PROMPT, 20]


@pytest.mark.parametrize(
    ("sampled", "accepted"),
    [
        ([21, 22, 23, 24], [21, 22, 23, 24]),
        ([21, 22, 40, 24], [21, 22, 40]),
        ([21, 40, 23, 24], [21, 40]),
        ([40, 22, 23, 24], [40]),
        ([21, -1, 23, 24], [21, -1]),  # not finite: nothing is accepted after it
    ],
)
def test_accepted_tokens_are_what_was_sampled(device, sampled, accepted):
    """Sampled tokens are accepted up to the first that differs from its draft token, inclusive."""
    rows = Rows(device)
    rows.admit(1, limit=17, token=20)
    rows.told.says[1] = torch.tensor([21, 22, 23])
    rows.place((1, 3))
    count, proposed = rows.settle([*sampled, 7, 7, 7, 7])
    assert (count[0], proposed[0]) == (len(accepted), 3)
    rows.told.says.fill_(UNKNOWN)
    newest = 5 + len(accepted)
    (fed,) = rows.place((1, 3))
    assert fed == (1, 1, 0, newest, newest + 1)
    assert rows.known(1) == [*PREFIX, *PROMPT, 20, *accepted]
    assert rows.token_R[1] == max(accepted[-1], 0)


def test_rows_are_settled_apart(device):
    """Rows with different draft lengths in one launch, and rows outside it, do not interact."""
    rows = Rows(device)
    for row in range(3):
        rows.admit(row, limit=17, token=20 + row)
    rows.told.says[:3] = torch.tensor([[30, 31, 32], [40, 41, 42], [45, 46, 47]])
    rows.place((2, 1), (0, 2))
    count, proposed = rows.settle([45, 9, 30, 8, 7, 0, 0, 0])
    assert (count, proposed) == ([2, 2, 0], [1, 2, 0])
    rows.place((1, 0))
    known = [rows.known(row)[START + len(PROMPT) :] for row in range(3)]
    assert known == [[20, 30, 8], [21], [22, 45, 9]]
    assert rows.token_R.tolist()[:3] == [8, 21, 9]


@pytest.mark.parametrize(
    ("says", "fed"),
    [([21, UNKNOWN, 23], 1), ([UNKNOWN, 22, 23], 0), ([21, VOCABULARY, 23], 1), ([21, 22, -7], 2)],
)
def test_a_gap_ends_the_draft_tokens(device, says, fed):
    """After the first entry that is no token, nothing is fed, and no token is wasted on it."""
    rows = Rows(device)
    rows.admit(0, limit=17, token=20)
    rows.told.says[0] = torch.tensor(says)
    tokens = rows.place((0, 3))
    assert [token for _, _, token, _, _ in tokens[1:]] == says[:fed]
    count, proposed = rows.settle([*says, 7, 0, 0, 0, 0])
    assert (count[0], proposed[0]) == (fed + 1, fed)


def test_nothing_is_fed_after_the_last_position(device):
    """A row never feeds a position after its limit, whatever room it has."""
    rows = Rows(device)
    rows.admit(0, limit=6, token=20)
    rows.told.says[0] = torch.tensor([21, 22, 23])
    assert [token[3] for token in rows.place((0, 3))] == [5, 6]
    staged = rows.slot.staged.device
    assert (staged["fresh"] > staged["position"]).tolist() == [False, False, *[True] * 6]
    count, proposed = rows.settle([21, 22, 7, 7, 0, 0, 0, 0])
    assert (count[0], proposed[0]) == (2, 1)
    assert rows.place((0, 1)) == []
    count, _ = rows.settle([7, 7, 0, 0, 0, 0, 0, 0])
    assert count[0] == 0
    assert rows.known(0) == [*PREFIX, *PROMPT, 20, 21, 22]


def test_the_smallest_batch_is_chosen(device):
    """By the tokens of all rows together; a launch without any takes the smallest."""
    rows = Rows(device)
    for row in range(3):
        rows.admit(row, limit=17, token=20)
    rows.told.says[:3] = 30
    chosen = []
    for rooms in ([(0, 0)], [(0, 1)], [(0, 2)], [(0, 1), (1, 1)], [(0, 2), (1, 1)], []):
        rows.place(*rooms)
        chosen.append(int(rows.drafts.choice))
    assert chosen == [0, 0, 1, 1, 2, 0]


def test_pages_that_begin_are_in_the_table(device):
    """They are written before anything reads or writes at their positions."""
    rows = Rows(device)
    rows.admit(1, limit=17, token=20)
    rows.stage(entry=[1 * 2 + 1, *[ROWS * 2] * 7], page=[9])
    rows.place((1, 0))
    assert rows.table_RM[1].tolist() == [0, 9]


def test_a_row_forgets_its_last_sequence(device):
    """A new sequence in a row finds nothing of the one before."""
    rows = Rows(device)
    rows.admit(0, limit=17, token=20)
    rows.told.says[0] = torch.tensor([21, 22, 23])
    rows.place((0, 3))
    rows.settle([21, 22, 23, 24, 0, 0, 0, 0])
    rows.admit(0, limit=9, token=33)
    rows.place((0, 0))
    assert rows.known(0) == [*PREFIX, *PROMPT, 33]


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_a_step_that_the_host_has_not_heard_of_is_taken_back(device, heard):
    """After a launch without its last report, the state is that of the steps before.

    Positions, newest tokens and their values, history and descriptors are taken back.
    """
    rows, state = Rows(device), RowState(ROWS, 2, device.torch_device)
    state.token_R = rows.token_R
    state.payload_R2[[0, 2]] = torch.tensor([[0.25, 0.5], [0.75, 0.0]])
    rows.admit(0, limit=17, token=20)
    rows.admit(2, limit=17, token=30)
    rows.told.says[0], rows.told.says[2] = torch.tensor([21, 22, 23]), torch.tensor([5, 6, 7])
    drafts, ring = rows.drafts, TokenRing(device, rows.slot.outputs, max_steps=4)
    before = DraftSnapshot(drafts, state)
    before.take()
    for step in range(heard + 1):
        if step == heard:
            names = ("position_R", "tokens_RC", "descriptor_R4")
            expected = [getattr(drafts, name).clone() for name in names]
            expected += [rows.token_R.clone(), state.payload_R2.clone()]
        rows.place((2, 3), (0, 3))
        sampled = [[31, 0, 0, 0, 21, 22, 40, 0], [5, 6, 32, 0, 41, 0, 0, 0], [33] * 8][step]
        rows.settle(sampled)
        outputs, first = rows.slot.outputs.device, 0
        outputs["payload"].copy_(torch.arange(2 * TOKENS).view(TOKENS, 2) + 100 * (step + 1))
        for index, row in enumerate((2, 0)):
            newest = first + int(outputs["count"][index]) - 1
            state.payload_R2[row] = outputs["payload"][newest]
            first += 1 + int(outputs["proposed"][index])
        if step < heard:
            ring.ring_SN[step] = rows.slot.outputs.device_bytes
            ring.words[DONE] = step + 1
    left = (
        *(drafts.position_R, drafts.tokens_RC, drafts.descriptor_R4),
        *(rows.token_R, state.payload_R2),
    )
    assert not any(map(torch.equal, left, expected))
    before.restore([2, 0, ROWS], ring)
    assert all(map(torch.equal, left, expected))
