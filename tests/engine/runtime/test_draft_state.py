"""Where rows stand, what they feed and what of it stands, told by tensors alone."""

import pytest
import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.draft_state import DraftState
from legato_engine.speculative.proposer import UNKNOWN

ROWS, BLOCK, CONTEXT, VOCABULARY = 3, 3, 20, 50
PROMPT = (11, 12, 13)
START = 2  # positions of the prefix


class Told:
    """Proposes what it was told to, for row after row."""

    def __init__(self):
        self.says = torch.full((ROWS + 1, BLOCK), UNKNOWN)

    def propose(self, history, draft_RK):
        """Say it, of the rows that are asked for."""
        draft_RK.copy_(self.says[history.row_R])


@pytest.fixture
def device():
    """Its streams are not used: everything runs at once."""
    made = CpuDevice(1)
    yield made
    made.close()


class Rows:
    """Drafts over one slot, driven by hand."""

    def __init__(self, device):
        self.told = Told()
        self.drafts = DraftState(
            self.told,
            num_rows=ROWS,
            max_context=CONTEXT,
            vocab_size=VOCABULARY,
            width=1,
            max_block=BLOCK,
            dtype=torch.float32,
            device=device.torch_device,
        )
        self.slot = DecodeSlot(
            device,
            max_rows=8,
            max_pages=2,
            max_prompt=CONTEXT,
            width=1,
            vocab_size=VOCABULARY,
            dtype=torch.float32,
            speculates=True,
        )
        self.token_R = torch.zeros(ROWS + 1, dtype=torch.int64)

    def stage(self, **fields):
        """Fill the front of some staged fields."""
        for name, values in fields.items():
            self.slot.staged.device[name][: len(values)] = torch.tensor(values)

    def admit(self, row, *, limit, token):
        """A prompt and the first token sampled behind it."""
        prompt = self.slot.prompt.device
        prompt["row"].fill_(row)
        prompt["history"].fill_(UNKNOWN)
        prompt["history"][0, START : START + len(PROMPT)] = torch.tensor(PROMPT)
        prompt["limit"].fill_(limit)
        self.drafts.admit(self.slot)
        pads = [ROWS] * 7
        self.stage(sample_row=[row, *pads], draft_index=[0] * 8)
        self.stage(sample_position=[START + len(PROMPT), *[0] * 7])
        self.settle([token, *[0] * 7])

    def place(self, lanes):
        """Place lanes, given as (row, lane); what they are to feed."""
        padded = [*lanes, *[(ROWS, 0)] * (8 - len(lanes))]
        self.stage(row=[row for row, _ in padded], draft_index=[index for _, index in padded])
        self.drafts.place(self.slot, 8, torch.zeros(ROWS + 1, 2, dtype=torch.int64), BLOCK)
        names = ("row", "source", "token", "position", "sample_position")
        fields = [self.slot.staged.device[name][: len(lanes)].tolist() for name in names]
        return list(zip(*fields, strict=True))

    def settle(self, tokens):
        """Settle what was sampled; counts and proposed of every lane."""
        self.slot.tokens_R[: len(tokens)] = torch.tensor(tokens)
        self.drafts.settle(self.slot, 8, self.token_R)
        outputs = self.slot.outputs.device
        return outputs["count"].tolist(), outputs["proposed"].tolist()

    def known(self, row):
        """A row's tokens up to its newest."""
        tokens_C = self.drafts.tokens_RC[row].tolist()
        newest = int(self.drafts.position_R[row])
        assert set(tokens_C[newest + 1 :]) <= {UNKNOWN}, "something stands behind the newest token"
        return tokens_C[: newest + 1]


PADDING = (ROWS, -1, 0, 0, 0)
PREFIX = [UNKNOWN] * START


def test_lanes_follow_the_newest_token(device):
    """Lane 0 feeds the last sampled token, the others what is proposed, one position on each."""
    rows = Rows(device)
    rows.admit(1, limit=17, token=20)
    rows.told.says[1] = torch.tensor([21, 22, 23])
    assert rows.place([(1, 0), (1, 1), (1, 2), (1, 3)]) == [
        (1, 1, 0, 5, 6),
        (1, -1, 21, 6, 7),
        (1, -1, 22, 7, 8),
        (1, -1, 23, 8, 9),
    ]
    assert rows.known(1) == [*PREFIX, *PROMPT, 20]


@pytest.mark.parametrize(
    ("sampled", "stands"),
    [
        ([21, 22, 23, 24], [21, 22, 23, 24]),
        ([21, 22, 40, 24], [21, 22, 40]),
        ([21, 40, 23, 24], [21, 40]),
        ([40, 22, 23, 24], [40]),
        ([21, -1, 23, 24], [21, -1]),  # not finite: nothing stands behind it
    ],
)
def test_what_stands_is_what_was_sampled(device, sampled, stands):
    """The sampled tokens stand up to the first that was not proposed, that one included."""
    rows = Rows(device)
    rows.admit(1, limit=17, token=20)
    rows.told.says[1] = torch.tensor([21, 22, 23])
    rows.place([(1, 0), (1, 1), (1, 2), (1, 3)])
    count, proposed = rows.settle([*sampled, 7, 7, 7, 7])
    assert (count[0], proposed[0]) == (len(stands), 3)
    rows.told.says.fill_(UNKNOWN)
    newest = 5 + len(stands)
    (fed,) = rows.place([(1, 0)])
    assert fed == (1, 1, 0, newest, newest + 1)
    assert rows.known(1) == [*PREFIX, *PROMPT, 20, *stands]
    assert rows.token_R[1] == max(stands[-1], 0)


def test_rows_are_settled_apart(device):
    """Rows of different blocks in one launch, and those that are not in it, keep their own."""
    rows = Rows(device)
    for row in range(3):
        rows.admit(row, limit=17, token=20 + row)
    rows.told.says[:3] = torch.tensor([[30, 31, 32], [40, 41, 42], [45, 46, 47]])
    rows.place([(2, 0), (2, 1), (0, 0), (0, 1), (0, 2)])
    count, proposed = rows.settle([45, 9, 30, 8, 7, 0, 0, 0])
    assert (count[0], count[2]) == (2, 2)
    assert (proposed[0], proposed[2]) == (1, 2)
    rows.place([(1, 0)])
    known = [rows.known(row)[START + len(PROMPT) :] for row in range(3)]
    assert known == [[20, 30, 8], [21], [22, 45, 9]]
    assert rows.token_R.tolist()[:3] == [8, 21, 9]


@pytest.mark.parametrize(
    ("says", "fed"),
    [([21, UNKNOWN, 23], 1), ([UNKNOWN, 22, 23], 0), ([21, VOCABULARY, 23], 1), ([21, 22, -7], 2)],
)
def test_a_gap_ends_a_proposal(device, says, fed):
    """Behind the first that is no token nothing is fed."""
    rows = Rows(device)
    rows.admit(0, limit=17, token=20)
    rows.told.says[0] = torch.tensor(says)
    lanes = rows.place([(0, 0), (0, 1), (0, 2), (0, 3)])
    assert lanes[1 + fed :] == [PADDING] * (3 - fed)
    assert [token for _, _, token, _, _ in lanes[1 : 1 + fed]] == says[:fed]
    count, proposed = rows.settle([*says, 7, 0, 0, 0, 0])
    assert (count[0], proposed[0]) == (fed + 1, fed)


def test_nothing_is_fed_behind_the_last_position(device):
    """A row never leaves its pages, though the host let it go on: its last token is its end."""
    rows = Rows(device)
    rows.admit(0, limit=6, token=20)
    rows.told.says[0] = torch.tensor([21, 22, 23])
    lanes = rows.place([(0, 0), (0, 1), (0, 2), (0, 3)])
    assert [lane[3] for lane in lanes] == [5, 6, 0, 0]
    assert lanes[2:] == [PADDING] * 2
    staged = rows.slot.staged.device
    assert (staged["fresh"] > staged["position"]).tolist() == [False, False, *[True] * 6]
    count, proposed = rows.settle([21, 22, 7, 7, 0, 0, 0, 0])
    assert (count[0], proposed[0]) == (2, 1)
    assert rows.place([(0, 0), (0, 1)]) == [PADDING] * 2
    count, _ = rows.settle([7, 7, 0, 0, 0, 0, 0, 0])
    assert count[0] == 0
    assert rows.known(0) == [*PREFIX, *PROMPT, 20, 21, 22]


def test_a_row_forgets_who_had_it(device):
    """A new sequence in a row finds nothing of the one before."""
    rows = Rows(device)
    rows.admit(0, limit=17, token=20)
    rows.told.says[0] = torch.tensor([21, 22, 23])
    rows.place([(0, 0), (0, 1), (0, 2), (0, 3)])
    rows.settle([21, 22, 23, 24, 0, 0, 0, 0])
    rows.admit(0, limit=9, token=33)
    rows.place([(0, 0)])
    assert rows.known(0) == [*PREFIX, *PROMPT, 33]
