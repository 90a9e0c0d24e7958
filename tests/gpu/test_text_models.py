"""On a GPU: text models and Qwen3-VL compute and answer as on the CPU.

Weights are random; the CPU's model has the same ones in float32.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.device.base import Stream
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels.map_codes import KINDS
from legato_engine.kernels.step import StepMap, has_step_kernels
from legato_engine.layers.attention import HeadPlan
from legato_engine.layers.linear import Linear
from legato_engine.models.qwen3_vl.model import Qwen3VLModel
from legato_engine.models.registry import resolve
from legato_engine.types import AnswerFormat, DetectSpec, FinishReason, PointSpec, QuerySpec

from tests.adapters import PeftAdapter
from tests.engine.models import against_transformers as same
from tests.engine.models.test_qwen3_vl import SHAPES, Row, prepared, task_of
from tests.fake_device import InlineStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
AS_STORED = LoadOptions(weight_dtype="model")
SIZES: dict[str, dict[str, Any]] = {
    "heads of 16": {},
    "heads of 128": {
        "dim": 128,
        "ff_dim": 256,
        "heads": HeadPlan(num_heads=4, num_kv_heads=2, head_dim=128, norm_eps=1e-6),
        "rotary_dim": 128,
        "sections": (24, 20, 20),
    },
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.04}
"""Errors of logits, as a fraction of their norm."""
QUESTIONS = ("the cat the cat the cat", "why? why? why?", "0 1 0 1 0 1", "is it blue?", "x")


def bundle_of(sizes: dict[str, Any]) -> Any:
    bundle: Any = resolve("random-tiny-vl")
    return dataclasses.replace(bundle, config=dataclasses.replace(bundle.config, **sizes))


def on_cpu(model: Any) -> Qwen3VLModel:
    return Qwen3VLModel(copy.deepcopy(model._network).cpu().float())


def bank_of(model: Any, adapter: PeftAdapter) -> Any:
    """The adapter in the first slot of a bank."""
    bank, (data, said) = model.adapter_bank(1, 8), adapter.files()
    stream: Stream = InlineStream()
    if bank.rank_S.is_cuda:
        torch.cuda.synchronize()
        stream = CudaDevice(0).compute  # from here on the current one
    bank.write(1, model.read_adapter(data, "", 8, said).weights, stream)
    return bank


def logits_of(model: Any, task: Any, bank: Any = None, after: Any = range(20, 26)) -> torch.Tensor:
    """[T, V] of a prompt in two parts, and of tokens after it."""
    row, length = Row(model, task, bank), len(task.prompt)
    with torch.inference_mode():
        hidden = [row.prefill(0, 19), row.prefill(19, length)]
        hidden += [row.decode(token, length + at) for at, token in enumerate(after)]
        return model.logits(torch.cat(hidden)).float().cpu()


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_are_those_of_the_cpu(sizes, dtype):
    """Of prompts with no, one and four images, in parts that cut one, and of steps after them."""
    bundle = bundle_of(SIZES[sizes])
    model = bundle.load(DEVICE, dtype, AS_STORED)
    truth = on_cpu(model)
    for count in (0, 1, 4):
        images = prepared(bundle.frontend, *SHAPES[:count])
        task = task_of(bundle.frontend, QuerySpec(question=QUESTIONS[0]), images)
        ours, wanted = (logits_of(each, task) for each in (model, truth))
        assert error(ours, wanted) < LIMITS[dtype], count


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_an_adapter_changes_logits_as_on_the_cpu(dtype):
    bundle = bundle_of({})
    model = bundle.load(DEVICE, dtype, AS_STORED)
    truth = on_cpu(model)
    adapter = PeftAdapter.fitting(model._targets, rank=4)
    task = task_of(
        bundle.frontend, QuerySpec(question="why?"), prepared(bundle.frontend, SHAPES[0])
    )
    ours = logits_of(model, task, bank_of(model, adapter))
    wanted = logits_of(truth, task, bank_of(truth, adapter))
    assert error(ours, wanted) < LIMITS[dtype]
    assert error(logits_of(model, task), wanted) > 0.1


@pytest.mark.parametrize(
    ("name", "keeps_maps"), [*((name, False) for name in KINDS), ("packed", True)]
)
def test_packed_maps_have_the_logits_of_their_weights(name, keeps_maps):
    """With and without an adapter, whose rows are not gated within the product."""
    if not has_step_kernels(DEVICE):
        pytest.skip("needs compute capability 8.0")
    bundle = bundle_of(SIZES["heads of 128"])
    model = bundle.load(DEVICE, torch.bfloat16, AS_STORED)
    truth, adapter = on_cpu(model), PeftAdapter.fitting(model._targets, rank=4)
    model._network.quantise(KINDS[name], keeps_maps=keeps_maps)
    maps = zip(model._network.layers.modules(), truth._network.layers.modules(), strict=True)
    for ours, theirs in maps:
        if isinstance(ours, Linear):
            assert isinstance(theirs, Linear)
            assert isinstance(ours.packed, StepMap)
            theirs.weight.copy_(ours.packed.exact().cpu())
    head = model._network._tied_head
    assert isinstance(head, StepMap)
    truth._network.config = dataclasses.replace(truth._network.config, tied_head=False)
    truth._network.lm_head = Linear(head.in_features, head.out_features, bias=False)
    truth._network.lm_head.weight = torch.nn.Parameter(head.exact().cpu(), requires_grad=False)
    task = task_of(
        bundle.frontend, QuerySpec(question="why?"), prepared(bundle.frontend, SHAPES[0])
    )
    banks = bank_of(model, adapter), bank_of(truth, adapter)
    for own, other in ((None, None), banks):
        found, wanted = logits_of(model, task, own), logits_of(truth, task, other)
        assert error(found, wanted) < LIMITS[torch.bfloat16]


# ---------------------------------------------------------------- engine

DTYPES = {"f32": 1e-4, "bf16": 0.1}
"""How far a chosen token's logit may be below the greatest, as a fraction of the largest one."""
SPECULATION = {"plain": {}, "lookup": {"speculation": "fixed:3", "draft": "lookup"}}


def check_chosen(truth: Any, task: Any, chosen: list[int], bank: Any, below: float) -> None:
    """Every token is one that the CPU's model would choose, but for rounding."""
    length = len(task.prompt)
    logits_TV = logits_of(truth, task, bank, chosen[:-1])[length - 1 :]
    got_T = logits_TV.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert (logits_TV.amax(1) - got_T).max() <= below * logits_TV.abs().max()


@pytest.mark.parametrize(
    ("dtype", "speculation"), [("f32", "plain"), ("bf16", "plain"), ("bf16", "lookup")]
)
def test_greedy_answers_are_those_of_the_cpu(tmp_path, dtype, speculation):
    """Mixed requests in one batch: with up to four images, adapters, boxes and a schema."""
    limits = {"adapters": str(tmp_path), "adapter_slots": 2, "max_adapter_rank": 8}
    settings = {"device": str(DEVICE), "dtype": dtype, "num_pages": 600, **limits}
    settings |= SPECULATION[speculation]
    schema = {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["count"],
        "additionalProperties": False,
    }
    formatted = QuerySpec(
        question="how many?", response_format=AnswerFormat(json_schema=json.dumps(schema))
    )
    asked = [*QUESTIONS, DetectSpec(object="cup", max_objects=2), formatted]
    asked.append(PointSpec(object="é", max_objects=2))
    with same.Engine("random-tiny-vl", "", max_running=8, **settings) as engine:
        model, frontend = engine.assembly.model, engine.assembly.frontend
        truth = on_cpu(model)
        adapter = PeftAdapter.fitting(model._targets, rank=4)
        data, said = adapter.files()
        own = model.read_adapter(data, "own", 8, said)
        pool = prepared(frontend, *SHAPES)
        images = [pool[:count] for count in (0, 1, 2, 3, 4, 1, 0, 2)]
        adapters = [None, own, None, own, None, None, own, own]
        answers = engine.ask(
            asked, images=images, adapters=adapters, max_tokens=100, temperature=0.0
        )
        for index, question in enumerate(QUESTIONS):
            task = task_of(frontend, QuerySpec(question=question), images[index])
            bank = bank_of(truth, adapter) if adapters[index] else None
            check_chosen(truth, task, answers.tokens[str(index)][:12], bank, DTYPES[dtype])
    boxes, points = answers.results["5"], answers.results["7"]
    assert len(boxes.objects) <= 2
    assert all(each.label == "cup" for each in boxes.objects)
    assert len(points.points) <= 2
    assert answers.reasons["6"] is FinishReason.STOP
    assert 0 <= json.loads(answers.results["6"])["count"] <= 99
