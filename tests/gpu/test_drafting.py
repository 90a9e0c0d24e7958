"""On a GPU: the launches around a forward do what torch's operations do.

Shape legend: R rows of the state, B tokens of a step, K draft tokens, C positions, D width.
"""

from __future__ import annotations

import random

import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels.cuda.drafting import LookupKernel
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.draft_state import DraftState
from legato_engine.speculative.lookup import LookupProposer
from legato_engine.speculative.proposer import UNKNOWN

from benchmarks.speculation.oracle import OracleProposer
from benchmarks.speculation.oracle_kernel import OracleKernel
from tests.engine.speculative.histories import row_history

ROWS, BLOCK, CONTEXT, VOCABULARY, WIDTH = 20, 8, 40, 32, 64
STAGED = ("row", "source", "token", "position", "fresh", "sample_position")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Scripted:
    """A proposer of fixed draft tokens."""

    def __init__(self, says_RK):
        self.says_RK = says_RK

    def propose(self, history, draft_RK):
        """Copy them."""
        draft_RK.copy_(self.says_RK)


class Side:
    """Draft state over a slot, by kernels or by torch, from one random state."""

    def __init__(self, device, seed, by_kernels):
        draw = torch.Generator().manual_seed(seed)

        def ints(*shape, low, high):
            return torch.randint(low, high, shape, generator=draw).to(device.torch_device)

        says_RK = ints(ROWS + 1, BLOCK, low=0, high=VOCABULARY)
        gaps_RK = ints(ROWS + 1, BLOCK, low=0, high=8) == 0
        says_RK[gaps_RK] = ints(ROWS + 1, BLOCK, low=-2, high=VOCABULARY + 3)[gaps_RK]
        self.drafts = DraftState(
            Scripted(says_RK),
            num_rows=ROWS,
            max_context=CONTEXT,
            vocab_size=VOCABULARY,
            width=WIDTH,
            max_block=BLOCK,
            dtype=torch.bfloat16,
            device=device.torch_device,
        )
        if not by_kernels:
            self.drafts._kernels = None
        self.slot = DecodeSlot(
            device,
            max_rows=ROWS * (BLOCK + 1),
            max_pages=2,
            max_prompt=CONTEXT,
            width=WIDTH,
            vocab_size=VOCABULARY,
            dtype=torch.bfloat16,
            speculates=True,
        )
        self.token_R = ints(ROWS + 1, low=0, high=VOCABULARY)
        self.drafts.position_R.copy_(ints(ROWS + 1, low=3, high=CONTEXT - BLOCK - 2))
        self.drafts.limit_R.copy_(self.drafts.position_R + ints(ROWS + 1, low=-1, high=BLOCK + 4))
        noise = torch.randn(self.slot.hidden_RD.shape, generator=draw)
        self.slot.hidden_RD.copy_(noise.to(device.torch_device))
        # What is sampled is mostly what was proposed, so that blocks end everywhere.
        wrong = ints(ROWS + 1, BLOCK + 1, low=0, high=6) == 0
        self.right_RL = torch.cat([says_RK, says_RK[:, :1]], 1).clamp(0, VOCABULARY - 1)
        self.right_RL[wrong] = ints(ROWS + 1, BLOCK + 1, low=-1, high=VOCABULARY)[wrong]

    def run(self, lanes):
        """Place lanes, sample, settle; what can be read of it, scratch row and padding left out."""
        staged, batch = self.slot.staged.device, -(-len(lanes) // 8) * 8
        padded = [*lanes, *[(ROWS, 0)] * (batch - len(lanes))]
        row_B, draft_index_B = (
            torch.tensor(part).to(staged["row"]) for part in zip(*padded, strict=True)
        )
        staged["row"][:batch], staged["draft_index"][:batch] = row_B, draft_index_B
        self.drafts.place(self.slot, batch, torch.zeros(1, 1, dtype=torch.int64), BLOCK)
        placed = [staged[name][:batch].tolist() for name in STAGED]
        self.slot.tokens_R[:batch] = self.right_RL[row_B, draft_index_B]
        self.drafts.settle(self.slot, batch, self.token_R)
        first = [b for b, (_, lane) in enumerate(padded) if lane == 0]
        outputs = self.slot.outputs.device
        counts = [[outputs[name][b].item() for b in first] for name in ("count", "proposed")]
        state = (self.drafts.tokens_RC, self.drafts.position_R, self.drafts.hidden_RD, self.token_R)
        return placed, counts, [each[:ROWS].tolist() for each in state]


@pytest.mark.parametrize("lengths", [(1, 4), (2, 3), (1, 1)])
def test_lookup_is_what_torch_does(lengths):
    """Random tokens of a few kinds, prefixes, gaps and newest positions: the same drafts."""
    draw = torch.Generator().manual_seed(sum(lengths))
    shape = (60, 300)
    tokens_RC = torch.randint(0, 5, shape, generator=draw)
    newest_R = torch.randint(0, shape[1], (shape[0],), generator=draw)
    place_C = torch.arange(shape[1])
    tokens_RC[place_C > newest_R[:, None]] = UNKNOWN
    tokens_RC[place_C < torch.randint(0, 9, (shape[0], 1), generator=draw)] = UNKNOWN
    tokens_RC[:7] = torch.randint(0, 1000, (7, shape[1]), generator=draw)  # nothing comes again
    history = row_history(tokens_RC.cuda(), newest_R.cuda())
    shortest, longest = lengths
    said = []
    for lookup in (LookupProposer, LookupKernel):
        draft_RK = torch.full((shape[0], 8), 7).cuda()
        lookup(shortest=shortest, longest=longest).propose(history, draft_RK[:, :6])
        said.append(draft_RK.tolist())
    assert said[0] == said[1]
    assert any(UNKNOWN in row for row in said[0])
    assert sum(UNKNOWN not in row for row in said[0]) > 20


@pytest.mark.parametrize("context", [120, 700, 900])
def test_the_oracle_is_what_torch_does(context):
    """Rows that continue like a known sequence, deviate from it anywhere, or match none.

    The tables are shorter than a row, and longer.
    """
    draw = torch.Generator().manual_seed(context)
    known = torch.randint(0, 40, (50, 700), generator=draw)
    known[25:, :600] = known[:25, :600]  # these part late
    known[:, :3] = UNKNOWN
    lengths = torch.randint(100, 700, (50,), generator=draw).tolist()
    histories = [row[:length] for row, length in zip(known.tolist(), lengths, strict=True)]
    proposer = OracleProposer(histories, torch.device("cuda"), rates=[0.6], vocab_size=40)
    which_R = torch.randint(0, 50, (80,), generator=draw)
    newest_R = torch.randint(0, min(context, 690), (80,), generator=draw)
    tokens_RC = torch.full((80, context), UNKNOWN)
    width = min(context, 700)
    tokens_RC[:, :width] = known[which_R, :width]
    tokens_RC[torch.arange(context) > newest_R[:, None]] = UNKNOWN
    parts_R = torch.arange(0, 80, 4)
    at_R = (torch.rand(len(parts_R), generator=draw) * (newest_R[parts_R] + 1)).long()
    tokens_RC[parts_R, at_R] = 41
    history = row_history(tokens_RC.cuda(), newest_R.cuda())
    said = []
    for one in (proposer, OracleKernel(*proposer.tables)):
        draft_RK = torch.full((80, 8), 7).cuda()
        one.propose(history, draft_RK[:, :6])
        said.append(draft_RK.tolist())
    assert said[0] == said[1]
    assert sum(UNKNOWN in row for row in said[0]) >= len(parts_R)
    assert sum(UNKNOWN not in row for row in said[0]) > 20


@pytest.mark.parametrize("seed", range(8))
def test_launches_are_what_torch_does(seed):
    """Random rows, blocks, gaps, ends and outcomes: the same positions, tokens and states."""
    device = CudaDevice(0)
    draw = random.Random(seed)
    rows = draw.sample(range(ROWS), draw.randint(1, ROWS))
    lanes = [(row, lane) for row in rows for lane in range(draw.randint(1, BLOCK + 1))]
    with torch.inference_mode():
        kernels, reference = (
            Side(device, seed, by_kernels).run(lanes) for by_kernels in (True, False)
        )
    device.close()
    assert kernels == reference
    assert any(count > 1 for count in reference[1][0]), "nothing was accepted"
    assert UNKNOWN in reference[2][0][0]
