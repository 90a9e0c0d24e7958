"""On a GPU: drafts are captured with everything else and change no answer."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels.cuda.draft_layer import DraftLayerKernels, DraftSizes, supported
from legato_engine.kernels.cuda.drafting import LookupKernel
from legato_engine.kernels.proposer import UNKNOWN, LookupProposer, RowHistory
from legato_engine.layers.rope import Rope
from legato_engine.models.moondream import draft as moondream_draft
from legato_engine.models.moondream.draft import DraftLayer, DraftProposer
from legato_engine.models.paged_attention import KVCache
from legato_engine.runtime.decode_slot import DecodeSlot, DraftState, StepLayout
from legato_engine.runtime.descriptors import DESCRIPTOR, NO_DRAFTS, STARTS, UNDER_PRESSURE, WORDS
from legato_engine.runtime.graphs import GraphRunner
from legato_engine.runtime.reference_drafts import ReferenceDrafts
from legato_engine.sequence import Descriptor
from legato_engine.speculation import (
    INITIAL_RATE,
    AdaptiveBlockPolicy,
    BlockPolicy,
    CostTable,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)
from torch import nn

from benchmarks.speculation.oracle import OracleKernel, OracleProposer
from benchmarks.speculation.run import with_settings
from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.runtime.test_draft_model import asked as asked_in_text
from tests.engine.speculative.drafted import Flag, RequestDescriptor, row_history
from tests.engine.speculative.test_speculation import captions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


ROWS, BLOCK, CONTEXT, VOCABULARY, WIDTH = 20, 8, 40, 32, 64
TOKENS = ROWS * (BLOCK + 1)
STAGED = (
    *("row", "draft_index", "source", "token", "position", "fresh"),
    *("sample_row", "sample_position", "scheduled", "start", "fed"),
)


class Scripted:
    """A proposer of fixed draft tokens."""

    sequential = False

    def __init__(self, says_RK):
        self.says_RK = says_RK

    def propose(self, history, draft_RK):
        """Copy those of the rows."""
        draft_RK.copy_(self.says_RK.index_select(0, history.row_R))


def costs():
    """Steps of which more tokens cost more from some number on."""
    steps = ((8, 0.9e-3), (16, 1.0e-3), (32, 1.2e-3), (33, 2.2e-3), (200, 6e-3))
    return CostTable(steps, prefill=0.0, propose=1e-5)


POLICIES: dict[str, Callable[[], BlockPolicy]] = {
    "fixed": lambda: FixedBlockPolicy(BLOCK),
    "seed": lambda: AdaptiveBlockPolicy(max_block=BLOCK),
    "budget": lambda: TokenBudgetPolicy(costs(), max_block=BLOCK),
}


class Side:
    """Draft state over a slot, by kernels or by the policies themselves, from one random state."""

    def __init__(self, device, seed, policy, by_kernels):
        draw = torch.Generator().manual_seed(seed)

        def ints(*shape, low, high):
            return torch.randint(low, high, shape, generator=draw).to(device.torch_device)

        says_RK = ints(ROWS + 1, BLOCK, low=0, high=VOCABULARY)
        gaps_RK = ints(ROWS + 1, BLOCK, low=0, high=8) == 0
        says_RK[gaps_RK] = ints(ROWS + 1, BLOCK, low=-2, high=VOCABULARY + 3)[gaps_RK]
        self.says_RK = says_RK
        self.drafts = DraftState(
            Scripted(says_RK),
            policy,
            num_rows=ROWS,
            max_context=CONTEXT,
            vocab_size=VOCABULARY,
            width=WIDTH,
            dtype=torch.bfloat16,
            device=device.torch_device,
        )
        if not by_kernels:
            self.drafts.operations = ReferenceDrafts(policy, VOCABULARY)
        if isinstance(policy, TokenBudgetPolicy):
            self.drafts.set_costs(policy)
        self.slot = DecodeSlot(
            device,
            max_rows=TOKENS,
            max_pages=2,
            max_prompt=CONTEXT,
            width=WIDTH,
            vocab_size=VOCABULARY,
            dtype=torch.bfloat16,
            max_drafting=ROWS,
        )
        layouts = [(1, 1), (8, 1), (8, 8), (16, 1), (16, 2), (16, 16), (64, 64), (TOKENS, TOKENS)]
        self.drafts.lay_out([StepLayout(*each) for each in layouts], TOKENS)
        self.table_RM = torch.zeros(ROWS + 1, 2, dtype=torch.int64, device=device.torch_device)
        self.token_R = ints(ROWS + 1, low=0, high=VOCABULARY)
        self.drafts.position_R.copy_(ints(ROWS + 1, low=3, high=CONTEXT - BLOCK - 2))
        self.drafts.limit_R.copy_(self.drafts.position_R + ints(ROWS + 1, low=-1, high=BLOCK + 4))
        noise = torch.randn(self.slot.hidden_RD.shape, generator=draw)
        self.slot.hidden_RD.copy_(noise.to(device.torch_device))
        # What is sampled is mostly what was proposed, so that blocks end everywhere.
        wrong = ints(ROWS + 1, BLOCK + 1, low=0, high=6) == 0
        self.right_RL = torch.cat([says_RK, says_RK[:, :1]], 1).clamp(0, VOCABULARY - 1)
        self.right_RL[wrong] = ints(ROWS + 1, BLOCK + 1, low=-1, high=VOCABULARY)[wrong]
        descriptors = np.zeros(ROWS + 1, DESCRIPTOR)
        descriptors["ema_acceptance_rate"], descriptors["flags"] = INITIAL_RATE, STARTS
        words = torch.from_numpy(descriptors.view(np.int64).reshape(ROWS + 1, WORDS))
        self.drafts.descriptor_R4.copy_(words)

    def stage(self, name, values, padding):
        """Fill a field of rows."""
        field = self.slot.staged.device[name]
        padded = [*values, *[padding] * (len(field) - len(values))]
        field.copy_(torch.tensor(padded))

    def run(self, rooms, *, pressed):
        """Place (row, room) pairs, sample, settle; return what can be read of it."""
        self.stage("scheduled_row", [row for row, _ in rooms], ROWS)
        self.stage("room", [room for _, room in rooms], NO_DRAFTS)
        self.stage("control", [UNDER_PRESSURE if pressed else 0, 0], 0)
        self.stage("entry", [rooms[0][0] * 2 + 1], ROWS * 2)
        self.stage("page", [len(rooms)], 0)
        self.drafts.allot(self.slot, self.table_RM)
        self.drafts.propose(self.slot, self.table_RM, BLOCK)
        self.drafts.place(self.slot)
        staged = self.slot.staged.device
        placed = [staged[name].tolist() for name in STAGED]
        self.slot.tokens_R.copy_(self.right_RL[staged["row"], staged["draft_index"]])
        self.drafts.settle(self.slot, TOKENS, self.token_R)
        outputs = self.slot.outputs.device
        counts = [outputs[name][: len(rooms)].tolist() for name in ("count", "proposed")]
        counts.append(outputs["descriptor"][: len(rooms)].tolist())
        drafts = self.drafts
        state = (drafts.tokens_RC, drafts.position_R, drafts.hidden_RD, drafts.descriptor_R4)
        said = [each[:ROWS].tolist() for each in (*state, self.token_R)]
        chosen = [each.tolist() for each in (drafts.choice, drafts.overall, drafts.block_S)]
        return placed, counts, said, chosen, self.table_RM[:ROWS].tolist()


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


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_launches_are_what_the_policies_do(seed, name):
    """Random rows, rooms, gaps, ends and outcomes: the same blocks, positions and states."""
    device = CudaDevice(0)
    sides = []
    with torch.inference_mode():
        for by_kernels in (True, False):
            draw, side = random.Random(seed), Side(device, seed, POLICIES[name](), by_kernels)
            said = []
            for launch in range(4):
                rows = draw.sample(range(ROWS), draw.randint(1, ROWS))
                rooms = [
                    (row, draw.choice((BLOCK, BLOCK, draw.randint(-1, BLOCK)))) for row in rows
                ]
                said.append(side.run(rooms, pressed=launch == 2))
            sides.append(said)
    device.close()
    assert sides[0] == sides[1]
    counts = [count for _, (counts, *_), *_ in sides[0] for count in counts]
    assert 0 in counts
    assert max(counts) > 1, "nothing was accepted"


class Trace:
    """Launches of all rows without a model: rows accept as many tokens as they are told to."""

    def __init__(self, device, policy):
        self.side = Side(device, 0, policy, by_kernels=True)
        drafts, slot = self.side.drafts, self.side.slot
        self.side.says_RK.fill_(1)
        drafts.limit_R.fill_(CONTEXT - 2)
        self.side.stage("scheduled_row", range(ROWS), ROWS)
        self.luck_R = torch.zeros(ROWS, dtype=torch.int64, device=device.torch_device)
        self.told = device.pinned((ROWS + 1,), torch.int64)
        staged = slot.staged.device

        def launch():
            drafts.position_R.fill_(3)
            drafts.allot(slot, self.side.table_RM)
            drafts.propose(slot, self.side.table_RM, BLOCK)
            drafts.place(slot)
            right_B = staged["draft_index"] < self.luck_R[staged["scheduled"]]
            slot.tokens_R.copy_(right_B.long())  # 1 is what was proposed
            drafts.settle(slot, TOKENS, self.side.token_R)

        with torch.inference_mode():
            self.launch = device.capture(launch)
        self.drafts, self.slot, self.device = drafts, slot, device

    def step(self, luck, *, pressed):
        """Run one launch; return drafted counts and the descriptors."""
        with torch.inference_mode():
            self.luck_R.copy_(torch.tensor(luck))
            self.side.stage("room", [BLOCK] * ROWS, NO_DRAFTS)
            self.side.stage("control", [UNDER_PRESSURE if pressed else 0, 0], 0)
        self.launch()
        outputs = self.slot.outputs.device
        words = outputs["descriptor"][:ROWS].cpu().numpy()
        return outputs["proposed"][:ROWS].tolist(), words.view(DESCRIPTOR)[:, 0].tolist()


@pytest.mark.parametrize("name", ["seed", "budget"])
def test_ten_thousand_decisions_of_a_gpu_are_the_specifications(name):
    """Every block, average and weight of every row, bit for bit, over drifting acceptance."""
    device = CudaDevice(0)
    policy, draw = POLICIES[name](), random.Random(name)
    trace = Trace(device, POLICIES[name]())
    trace.drafts.descriptor_R4.copy_(Side(device, 0, policy, by_kernels=True).drafts.descriptor_R4)
    trace.drafts.forget()
    requests = [RequestDescriptor(row, 1000) for row in range(ROWS)]
    rates, sizes = [draw.random() for _ in range(ROWS)], set()
    for launch in range(10_000):
        pressed = launch % 100 > 90
        if launch % 50 == 0:
            rates = [draw.random() * (launch % 200 > 0) for _ in range(ROWS)]
        luck = [sum(draw.random() < rate for _ in range(BLOCK)) for rate in rates]
        for request in requests:
            request.set_flag(Flag.KV_PRESSURE, on=pressed)
            if launch == 0:
                policy.begin(request)
        policy.allot(requests)
        blocks = [request.current_block_size for request in requests]
        sizes.update(blocks)
        proposed, learnt = trace.step(luck, pressed=pressed)
        assert proposed == blocks
        for request, lucky, fields in zip(requests, luck, learnt, strict=True):
            block = request.current_block_size
            request.block_size_history.append(block)
            policy.update(request, min(lucky, block), block)
            mine = Descriptor._make(fields)
            assert mine.current_block_size == request.current_block_size
            assert mine.ema_acceptance_rate == np.float32(request.ema_acceptance_rate)
            assert mine.accepted_weight == request.accepted_weight
            assert mine.tried_weight == request.tried_weight
    device.close()
    assert len(sizes) > 3


def test_a_switch_runs_the_graph_that_the_device_chooses():
    """Inside a captured graph and outside, with graphs that allocate; no other runs, or none."""
    device = CudaDevice(0)
    on = device.torch_device
    index = torch.zeros(1, dtype=torch.int32, device=on)
    wanted = torch.zeros(1, dtype=torch.int32, device=on)
    runs = torch.zeros(5, dtype=torch.int64, device=on)

    def add(which):
        def work():
            runs[which] += torch.ones(3, dtype=torch.int64, device=on).sum() // 3

        return work

    graphs = GraphRunner(device)
    made = {which: add(which) for which in range(5)}

    def chosen():
        index.copy_(wanted)
        switch()

    with torch.inference_mode():
        switch = graphs.switch(index, made.__getitem__, [(which,) for which in range(5)])
        runs.zero_()
        captured = device.capture(chosen)
        runs.zero_()
        for which in (3, 0, 3, 5, 4, 1, 3):
            wanted.fill_(which)
            captured()
        assert runs.tolist() == [1, 1, 0, 3, 1]
        index.fill_(2)
        switch()
        assert runs.tolist() == [1, 1, 1, 3, 1]
    device.close()


# ---------------------------------------------------------------- captured drafts

SIZES = DraftSizes(
    dim=320, inner=1280, num_heads=5, vocab_size=1536, page_size=16, max_pages=64, num_angles=16
)
LAYER = 1


def on(device, dtype, rows):
    """Make a layer of random weights with the parts of its model, and rows that stand anywhere.

    The numbers are the same for any device and dtype, as all of them are bf16's.
    """
    draw = torch.Generator().manual_seed(rows)

    def noise(*shape, scale=1.0, around=0.0):
        numbers = torch.randn(shape, generator=draw) * scale + around
        return numbers.bfloat16().to(device, dtype)

    layer = DraftLayer(SIZES.dim, SIZES.inner, SIZES.num_heads)
    post_ln, head = nn.LayerNorm(SIZES.dim), nn.Linear(SIZES.dim, SIZES.vocab_size)
    for module in (layer, post_ln, head):
        for name, parameter in module.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.data = noise(*parameter.shape, scale=0.06, around=float(is_norm))
    rope = Rope(10000.0, 2 * SIZES.num_angles, 1024)
    rope.fill(torch.device(device))
    words = noise(SIZES.vocab_size, SIZES.dim)
    text = SimpleNamespace(
        wte=words,
        post_ln=post_ln,
        lm_head=head,
        rope=rope,
        dense_head=lambda: moondream_draft._affine(head),
    )
    shape = (2, 1 + rows * SIZES.max_pages, SIZES.num_heads, SIZES.page_size, 64)
    kv = KVCache(noise(*shape), noise(*shape))
    pages = 1 + torch.randperm(rows * SIZES.max_pages, generator=draw).view(rows, -1)
    newest = torch.randint(0, 1024 - 8, (rows,), generator=draw)
    newest[:3] = torch.tensor([0, 1, 1015])[:rows]
    tokens = torch.randint(0, SIZES.vocab_size, (rows, 1025), generator=draw)
    tokens[0] = UNKNOWN
    history = RowHistory(
        torch.arange(rows),
        tokens.to(device),
        newest.to(device),
        noise(rows, SIZES.dim),
        pages.to(device),
    )
    return layer.requires_grad_(requires_grad=False), text, kv, history


@pytest.mark.parametrize("rows", [1, 2, 9, 33])
def test_kernels_say_what_the_layer_does(rows):
    """Block after block, captured or not, they say what torch finds in float32."""
    block = 4
    with torch.inference_mode():
        layer, text, kv, history = on("cpu", torch.float32, rows)
        wanted_RK = torch.zeros(rows, block, dtype=torch.int64)
        DraftProposer(layer, text, kv, LAYER).propose(history, wanted_RK)
        layer, text, kv, history = on("cuda", torch.bfloat16, rows)
        assert supported(SIZES, torch.device("cuda"), torch.bfloat16, torch.bfloat16)
        kernels = moondream_draft._by_kernels(SIZES, layer, text, kv, LAYER)
        assert kernels is not None
        said_RK = torch.full((rows, 8), 7).cuda()
        for _ in range(3):
            said_RK[:, :block] = 0
            kernels.propose(history, said_RK[:, :block])
            assert said_RK[:, :block].tolist() == wanted_RK.tolist()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.propose(history, said_RK[:, :block])
        said_RK[:, :block] = 0
        for _ in range(3):
            graph.replay()
        assert said_RK[:, :block].tolist() == wanted_RK.tolist()
    assert said_RK[:, block:].eq(7).all()
    assert isinstance(kernels, DraftLayerKernels)
    assert len({tuple(row) for row in wanted_RK.tolist()}) > rows // 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_default_draft_says_what_the_model_will(temperature):
    """Answers by the kernels are the same bits, in far fewer steps."""
    tiny = assemble(EngineConfig(device="cuda", max_running=2, crops_per_launch=0))
    plain = captions(tiny, temperature)
    figures = captions(with_settings(tiny, speculation="fixed:4"), temperature).figures(
        "", 2, "", plain
    )
    tiny.device.close()
    assert figures.identical
    assert figures.tokens_per_verify > 1.5


@pytest.mark.parametrize(
    ("streams", "setting"), [(8, "fixed:4"), (6, "fixed:8"), (12, "fixed:4"), (8, "fixed:8")]
)
def test_large_steps_are_right(streams, setting):
    """Steps of 40 to 72 tokens, in passes over the weights, change no answer then or later."""
    command = [sys.executable, "-m", "tests.gpu.wrong_steps", "--child", "--only", "captured"]
    command += ["--streams", str(streams), "--setting", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert " 0 of 25 differ; after it 0 by the same runner, 0 by a new one" in done.stdout
    assert "weights written: none" in done.stdout


def test_a_model_drafts_for_itself(tmp_path):
    """With fixed shapes and nothing read on the host, most drafts are what the model says.

    The model's own sums depend on the batch here.
    """
    hub_folder.write(tmp_path, hub_folder.phi())
    settings = {"speculation": "fixed:4", "draft": f"phi:{tmp_path}", "device": "cuda"}
    with same.Engine("phi", tmp_path, **settings, dtype="f32") as engine:
        run = asked_in_text(engine, 0.0)
    figures = run.figures("", 5, "", run)
    assert figures.acceptance > 0.7
