"""On a GPU: drafts are captured with everything else, and change no answer."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble, with_speculation
from legato_engine.kernels.cuda.draft_layer import DraftLayerKernels, DraftSizes, supported
from legato_engine.layers.rope import Rope
from legato_engine.models.moondream import draft as moondream_draft
from legato_engine.models.moondream.draft import DraftLayer, DraftProposer
from legato_engine.models.paged_attention import KVCache
from legato_engine.speculative.proposer import UNKNOWN, RowHistory
from torch import nn

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.runtime.test_draft_model import asked as asked_in_text
from tests.engine.speculative.test_default_draft import asked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    plain = asked(tiny, temperature)
    figures = asked(with_speculation(tiny, "fixed:4"), temperature).figures("", 2, "", plain)
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
