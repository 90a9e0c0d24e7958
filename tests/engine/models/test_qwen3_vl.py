"""Qwen3-VL as transformers computes it, and the boxes that it writes.

Its published weights are not at hand: all are random.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.config import LoadOptions
from legato_engine.errors import InvalidField, PromptTooLong, TaskUnsupported
from legato_engine.kernels.map_codes import KINDS as KINDS_OF_WEIGHTS
from legato_engine.kernels.map_codes import format_of, map_codes
from legato_engine.models import quantise
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.paged_attention import DecodeBatch, KVCache, PrefillSpan, VisualRows
from legato_engine.models.qwen3_vl.config import TowerConfig
from legato_engine.models.qwen3_vl.model import Qwen3VLModel, Qwen3VLNetwork
from legato_engine.models.qwen3_vl.processor import joined, patched
from legato_engine.models.qwen3_vl.vision import patch_values
from legato_engine.models.registry import resolve
from legato_engine.runtime.torch_backend import ImageFeatures
from legato_engine.scheduler.batch import StepRecord
from legato_engine.sequence import Grammar, SampledToken
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    FinishReason,
    ImagePlace,
    ImagePoint,
    ImageProperties,
    PointSpec,
    QuerySpec,
    Request,
    RequestKey,
    SegmentSpec,
    Turn,
)
from PIL import Image
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.adapters import ALL, PeftAdapter
from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.models.paged_session import PagedSession
from tests.fake_device import InlineStream

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>")
VOCABULARY = hub_folder.byte_level_tokenizer(also=SPECIALS)
TOKENS = {
    f"{name}_token_id": VOCABULARY.token_to_id(text)
    for name, text in zip(("vision_start", "vision_end", "image", "video"), SPECIALS, strict=False)
}
TEXT: dict[str, Any] = {
    "vocab_size": hub_folder.VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_heads": 2,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
    "out_hidden_size": 96,
}
SIZES = {"size": {"shortest_edge": 2 * 32**2, "longest_edge": 16 * 32**2}}
SHAPES = ((33, 61), (200, 40), (100, 100), (31, 190))
"""Heights and widths of images, none of them whole tokens."""

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for content in message.content %}"
    "{% if content.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content.text }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with parts of contents, as the published one."""


def config(*, text=TEXT, vision=VISION, **fields):
    """A small model; tokens are those of the tokenizer."""
    from transformers import Qwen3VLConfig  # takes seconds, not needed by most

    return Qwen3VLConfig(text_config=text, vision_config=vision, **(TOKENS | fields))


def write(folder, configuration, **files):
    """Write a folder; return transformers' model."""
    theirs = hub_folder.write(folder, configuration, tokenizer=VOCABULARY, **files)
    (folder / "preprocessor_config.json").write_text(json.dumps(SIZES))
    return theirs


def noise(height, width, seed=0):
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def prepared(frontend, *shapes):
    """Images of these heights and widths."""
    info = ImageProperties(image_id="i", width=1, height=1, cache_hit=False)
    return [
        frontend.prepare_image(noise(shape[0], shape[1], seed), f"key {seed}", info)
        for seed, shape in enumerate(shapes)
    ]


def task_of(frontend, spec, images=(), **fields):
    image = CachedImageRef(image_id="i") if images else None
    return frontend.make_task(
        Request(request_id=RequestKey("r"), task=spec, image=image, **fields), images
    )


def logits_of(theirs, bundle, task, after=()):
    """[T, V] of transformers' model, for a prompt and tokens after it."""
    theirs.model.rope_deltas = None  # else those of an earlier prompt
    ids = torch.tensor([[*(token.token_id for token in task.prompt), *after]])
    inputs: dict[str, Any] = {}
    visual = [] if task.visual is None else [each.pixels for each in task.visual.images]
    values = [
        patch_values(torch.from_numpy(each.levels_PCFYX), bundle.config.vision) for each in visual
    ]
    kinds = {1: ("pixel_values", "image_grid_thw"), 2: ("pixel_values_videos", "video_grid_thw")}
    for frames, (name, grid) in kinds.items():
        mine = [at for at, each in enumerate(visual) if each.levels_PCFYX.shape[2] == frames]
        if mine:
            inputs[name] = torch.cat([values[at] for at in mine])
            inputs[grid] = torch.tensor([[1, visual[at].rows, visual[at].columns] for at in mine])
    if inputs:
        is_image, is_video = (
            ids == token for token in (bundle.config.image_token, bundle.config.video_token)
        )
        inputs["mm_token_type_ids"] = is_image.int() + 2 * is_video.int()
    return theirs(ids, **inputs).logits[0]


def run(pieces):
    """Return the features of an image after all of its pieces."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


class Row:
    """A prompt with images in the pages of one row, with an adapter of a bank's first slot."""

    def __init__(self, model, task, bank=None):
        self.model, self.visual, self.device = model, task.visual, model._device
        self.adapters = None
        if bank is not None:
            self.adapters = bank.rows(self.tensor([1]), bank.max_rank)
        self.ids_T = self.tensor([token.token_id for token in task.prompt])
        self.pages_M = self.tensor(list(range(1, 2 + model.max_context // 16)))
        kv = PagedSession(model).kv
        self.kv = KVCache(kv.k_LNHSE.to(self.device), kv.v_LNHSE.to(self.device))
        images = [] if task.visual is None else task.visual.images
        self.features = [run(model.encode_image(each)) for each in images]

    def tensor(self, values):
        return torch.tensor(values, device=self.device)

    def prefill(self, start, stop):
        """[T, D] of a part of the prompt."""
        rows = None
        if self.visual is not None:
            indices, features = [self.tensor([]).long()], [self.features[0][:0]]
            for span in self.visual.prompt.spans:
                first, last = max(span.start, start), min(span.start + span.length, stop)
                if first < last:
                    indices.append(self.tensor(list(range(first - start, last - start))))
                    part = slice(first - span.start, last - span.start)
                    features.append(self.features[span.index][part])
            rope_3T = torch.from_numpy(self.visual.prompt.rope_3P[:, start:stop]).to(self.device)
            rows = VisualRows(rope_3T, torch.cat(indices), torch.cat(features))
        payload_T2 = torch.zeros(stop - start, 2, device=self.device)
        x_TD = self.model.embed(self.ids_T[start:stop], payload_T2)
        span = PrefillSpan(start, self.pages_M, False, self.adapters, rows)
        return self.model.prefill(x_TD, span, self.kv)

    def decode(self, token_id, position):
        """[1, D] of a token; the next row is padding."""
        offset_B = None
        if self.visual is not None:
            offset_B = self.tensor([self.visual.prompt.rope_offset, 0])
        tables_BM = torch.stack([self.pages_M, torch.zeros_like(self.pages_M)])
        batch = DecodeBatch(self.tensor([position, 0]), tables_BM, self.adapters, offset_B)
        x_BD = self.model.embed(self.tensor([token_id, 5]), torch.zeros(2, 2, device=self.device))
        return self.model.decode(x_BD, batch, self.kv)[:1]


def check_logits(model, theirs, bundle, task, *, cut, steps=8, tolerance=same.TOLERANCE, bank=None):
    """Compare a prompt at once, in parts and followed by tokens."""
    after, length = [*range(20, 20 + steps)], len(task.prompt)
    cuts = [*range(0, length, cut), length]
    with torch.inference_mode():
        expected_TV = logits_of(theirs, bundle, task, after)
        whole, row = Row(model, task, bank).prefill(0, length), Row(model, task, bank)
        found = [row.prefill(*part) for part in itertools.pairwise(cuts)]
        found += [row.decode(token, length + at) for at, token in enumerate(after)]
        errors = [
            same.relative_error(model.logits(whole), expected_TV[:length]),
            same.relative_error(model.logits(torch.cat(found)), expected_TV),
        ]
    assert max(errors) < tolerance, errors


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "as 2B": ({}, {}, {"tie_word_embeddings": True}),
    "heads of 36": ({}, {"hidden_size": 72}, {}),
    "taps of all layers": ({}, {"deepstack_visual_indexes": [0, 1, 3]}, {}),
}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path, kind, kernels):
    """Prefill at once and in parts that cut images, and decode, with up to four images."""
    text, vision, fields = KINDS[kind]
    theirs = write(tmp_path, config(text=TEXT | text, vision=VISION | vision, **fields))
    bundle = resolve("qwen3-vl", weights=str(tmp_path))
    model = bundle.load(same.CPU, torch.float32, LoadOptions(cpu_kernels=kernels))
    for count in (0, 1, 4):
        images = prepared(bundle.frontend, *SHAPES[:count])
        task = task_of(bundle.frontend, QuerySpec(question="why is it?"), images)
        assert (task.visual is None) == (count == 0)
        check_logits(model, theirs, bundle, task, cut=19)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_quantised_language_model_sees_with_the_tower_as_it_was(tmp_path, kind):
    """Logits are those of the dequantised codes; the tower's tensors are the checkpoint's."""
    text = TEXT | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
    vision = VISION | {"out_hidden_size": 128}
    root, output = tmp_path / "source", tmp_path / kind
    root.mkdir()
    theirs = write(root, config(text=text, vision=vision, tie_word_embeddings=False))
    command = ["--model", "qwen3-vl", "--weights", str(root), "--output", str(output)]
    assert quantise.main([*command, "--weight-dtype", kind]) == 0
    source, stored = (load_file(each / "model.safetensors") for each in (root, output))
    tower = {name for name in source if ".visual." in name}
    assert tower
    assert all(torch.equal(stored[name], source[name]) for name in tower)
    code_format = format_of(KINDS_OF_WEIGHTS[kind])
    with torch.no_grad():
        for name in source.keys() - stored.keys():
            own = code_format.of_head if name.startswith("lm_head") else code_format
            codes = map_codes(source[name].bfloat16(), own)
            theirs.get_parameter(name).copy_(codes.dequantised())
    bundle = resolve("qwen3-vl", weights=str(output))
    model = bundle.load(same.CPU, torch.float32)
    task = task_of(
        bundle.frontend,
        QuerySpec(question="why is it?"),
        prepared(bundle.frontend, *SHAPES[:2]),
    )
    check_logits(model, theirs, bundle, task, cut=19, tolerance=1e-3)


def test_logits_of_the_published_heads_are_those_of_transformers(tmp_path):
    """One layer of each kind, with heads as in the model with 2 billion parameters."""
    text = TEXT | {
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [24, 20, 20]},
    }
    vision = VISION | {
        "depth": 1,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "num_position_embeddings": 48**2,
        "deepstack_visual_indexes": [0],
        "out_hidden_size": 512,
    }
    theirs = write(tmp_path, config(text=text, vision=vision, tie_word_embeddings=True))
    bundle = resolve("qwen3-vl", weights=str(tmp_path))
    model = bundle.load(same.CPU, torch.float32)
    images = prepared(bundle.frontend, *SHAPES[:2])
    task = task_of(bundle.frontend, QuerySpec(question="what is it?"), images)
    check_logits(model, theirs, bundle, task, cut=30, steps=2)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_adapters_have_the_logits_of_merged_weights(tmp_path, kernels):
    """Prompts with images, whose features are those of the model without an adapter."""
    theirs = write(tmp_path, config(tie_word_embeddings=True))
    bundle = resolve("qwen3-vl", weights=str(tmp_path))
    model = bundle.load(same.CPU, torch.float32, LoadOptions(cpu_kernels=kernels))
    adapter = PeftAdapter.of(theirs, rank=5)
    bank = model.adapter_bank(1, 8)
    assert bank is not None
    data, settings_ = adapter.files()
    bank.write(1, model.read_adapter(data, "", 8, settings_).weights, InlineStream())
    merged = adapter.merged(theirs)
    for count in (0, 3):
        images = prepared(bundle.frontend, *SHAPES[:count])
        task = task_of(bundle.frontend, QuerySpec(question="why is it?"), images)
        check_logits(model, merged, bundle, task, cut=19, bank=bank)
        with pytest.raises(AssertionError):
            check_logits(model, merged, bundle, task, cut=19)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder of a small model with a template of its own, and transformers' model."""
    folder = tmp_path_factory.mktemp("qwen3-vl")
    return folder, write(folder, config(tie_word_embeddings=True), chat=CHAT)


def test_greedy_answers_are_those_of_transformers(small):
    """Many prompts in one batch, each with up to four images of odd sizes, some of them shared."""
    generator = random.Random(7)
    asked, bundle = same.questions(100), resolve("qwen3-vl", weights=str(small[0]))
    with same.Engine("qwen3-vl", small[0], max_running=16, max_waiting=100) as engine:
        frontend = engine.assembly.frontend
        shapes = [(generator.randrange(9, 150), generator.randrange(9, 150)) for _ in range(40)]
        pool = prepared(frontend, *shapes)
        images = [generator.sample(pool, index % 5) for index in range(len(asked))]
        answers = engine.ask(asked, images=images, max_tokens=6, temperature=0.0)
        for index, question in enumerate(asked):
            task = task_of(frontend, QuerySpec(question=question), images[index])
            chosen = answers.tokens[str(index)]
            with torch.inference_mode():
                logits_TV = logits_of(small[1], bundle, task, chosen[:-1])
            assert logits_TV[len(task.prompt) - 1 :].argmax(-1).tolist() == chosen, index


def test_boxes_take_fewer_steps_and_are_the_same(small, monkeypatch):
    """Brackets, keys and labels are forced; with and without drafts, answers keep their bits."""
    boxes, points = DetectSpec(object="red ball", max_objects=3), PointSpec(object="é")
    asked = [boxes, points, boxes, points, QuerySpec(question="what is it?")]
    options = {"logprobs": True, "max_tokens": 200, "temperature": 1.0, "seed": 4}
    for fields in ({}, {"speculation": "fixed:3", "draft": "lookup"}):
        with same.Engine("qwen3-vl", small[0], **fields) as engine:
            pool = prepared(engine.assembly.frontend, *SHAPES)
            singly, steps = list[StepRecord](), list[StepRecord]()
            images = [pool[:1], pool[1:2], pool[2:3], pool[:1], pool[:2]]
            with monkeypatch.context() as patch:
                patch.setattr(Grammar, "forced", lambda self, num_inflight: ())
                expected = engine.ask(asked, images=images, steps=singly, **options)
            answers = engine.ask(asked, images=images, steps=steps, **options)
        assert (answers.told, answers.results) == (expected.told, expected.results)
        rows, before = (sum(len(each.launch.plan.rows) for each in of) for of in (steps, singly))
        assert rows < before - sum(step.forced for step in steps) / 2


def test_an_image_is_encoded_once_for_each_tenant_and_chunk(small):
    """Chunks and later prompts share its features; another tenant does not.

    Nor does a request that lets no image be cached.
    """
    bundle = resolve("qwen3-vl", weights=str(small[0]))
    model: Any = bundle.load(same.CPU, torch.float32)
    images = prepared(bundle.frontend, *SHAPES[:3])
    task = task_of(bundle.frontend, QuerySpec(question="what is it?"), images)
    encoded, length = list[str](), len(task.prompt)
    encode = model.encode_image

    def counting(image):
        encoded.append(image.key)
        return encode(image)

    model.encode_image = counting
    with torch.inference_mode():
        features = ImageFeatures(model, 1 << 20)

        def chunks(size, tenant, **fields):
            asked = Request(
                request_id=RequestKey("r", tenant), task=QuerySpec(question="?"), **fields
            )
            return [
                features.rows(task.visual, start, min(start + size, length + 2), same.CPU, asked)
                for start in range(0, length + 2, size)
            ]

        (whole,) = chunks(length + 2, "a")
        parts = chunks(7, "a")
        assert encoded == [each.key for each in images]
        chunks(length + 2, "b")
        assert len(encoded) == 2 * len(images)
        for size, times in ((7, 3), (length + 2, 4)):
            chunks(size, "b", cache_image=False)
            assert len(encoded) == times * len(images)
    found = torch.cat([part.features_NKD for part in parts if len(part.rows_N)])
    assert torch.equal(found, whole.features_NKD)
    assert torch.equal(torch.cat([part.rope_3T for part in parts], 1), whole.rope_3T)
    assert whole.rope_3T[0, -1] == length + 1 + task.visual.prompt.rope_offset


def test_neither_drafts_nor_batches_change_an_answer(small, tmp_path):
    """Draft tokens rotate by the positions after images, and read the adapters of their rows."""
    asked = ["the cat the cat the cat", "why? why? why?", "tea tea tea tea", "0 1 0 1 0 1", "is it"]
    bundle, answers = resolve("qwen3-vl", weights=str(small[0])), []
    adapters = [PeftAdapter.of(small[1], rank=5), PeftAdapter.of(small[1], ALL[:2], 8, seed=1)]
    files = [each.files() for each in adapters]
    for fields in ({}, {"speculation": "fixed:3", "draft": "lookup"}):
        limits = {"adapters": str(tmp_path), "adapter_slots": 2, "max_adapter_rank": 8}
        with same.Engine("qwen3-vl", small[0], **limits, **fields) as engine:
            pool, read = (
                prepared(engine.assembly.frontend, *SHAPES),
                engine.assembly.model.read_adapter,
            )
            images = [pool[:count] for count in range(len(asked))]
            first, second = (read(data, said.hex(), 8, said) for data, said in files)
            known = [None, first, second, second, first]
            sampling = {"max_tokens": 24, "temperature": 0.0, "adapters": known}
            answers += [
                engine.ask(asked, images=images, together=together, **sampling).tokens
                for together in (True, False)
            ]
            frontend = engine.assembly.frontend
    assert all(each == answers[0] for each in answers)
    one, other = (each.merged(small[1]) for each in adapters)
    for index, truth in enumerate((small[1], one, other, other, one)):
        task = task_of(frontend, QuerySpec(question=asked[index]), images[index])
        chosen = answers[0][str(index)]
        with torch.inference_mode():
            logits_TV = logits_of(truth, bundle, task, chosen[:-1])
        assert logits_TV[len(task.prompt) - 1 :].argmax(-1).tolist() == chosen, index


@pytest.mark.parametrize(("name", "size"), [("random-tiny-vl", 0), ("qwen3-vl", 2_127_532_032)])
def test_random_weights_need_no_files(name, size):
    """The larger model has as many parameters as the published one of its sizes."""
    bundle: Any = resolve(name, random_weights=True)
    with torch.device("meta"):
        network = bundle.family.network(bundle.config)
    assert not size or sum(each.numel() for each in network.parameters()) == size
    images = prepared(bundle.frontend, *SHAPES[:2])
    task = task_of(bundle.frontend, QuerySpec(question="what is it?"), images)
    assert len(task.visual.images) == 2


def test_it_runs_on_a_device_with_kernels(small):
    """Torch's fake GPU knows shapes and devices, and refuses to give values."""
    bundle: Any = resolve("qwen3-vl", weights=str(small[0]))
    images = prepared(bundle.frontend, *SHAPES[:2])
    task = task_of(bundle.frontend, QuerySpec(question="what is it?"), images)
    patches = [each.pixels for each in images]
    visual, length = task.visual.prompt, len(task.prompt)
    with torch.inference_mode(), FakeTensorMode():
        with torch.device("cuda"):
            model: Any = Qwen3VLModel(Qwen3VLNetwork(bundle.config))
            levels = [torch.zeros(each.levels_PCFYX.shape, dtype=torch.uint8) for each in patches]
            shape = model.num_layers, 40, model.num_kv_heads, 16, model.head_dim
            kv = KVCache(torch.zeros(shape), torch.zeros(shape))
            ids_T = torch.zeros(length, dtype=torch.int64)
            rope_3T = torch.zeros(visual.rope_3P.shape, dtype=torch.int64)
            rows_N = torch.zeros(visual.num_image_tokens, dtype=torch.int64)
            pages_M = torch.zeros(40, dtype=torch.int64)
            batch = DecodeBatch(ids_T[:4], pages_M[:8].view(4, 2), rope_offset_B=ids_T[:4])
        tower = model._visual
        features = [
            run(tower.encode(each, *shape.grid))
            for each, shape in zip(levels, patches, strict=True)
        ]
        rows = VisualRows(rope_3T, rows_N, torch.cat(features))
        x_TD = model.embed(ids_T, torch.zeros(length, 2, device="cuda"))
        span = PrefillSpan(0, pages_M, bidirectional=False, visual=rows)
        hidden_TD = model.prefill(x_TD, span, kv)
        assert hidden_TD.device.type == "cuda"
        assert model.decode(hidden_TD[:4], batch, kv).shape == (4, model.width)


@pytest.fixture(scope="module")
def frontend(small):
    frontend: Any = resolve("qwen3-vl", weights=str(small[0])).frontend
    frontend.check()
    return frontend


def test_a_clip_has_the_logits_of_a_video(small):
    """Two frames of a size share their tokens; a third one stands for both of its pair."""
    bundle = resolve("qwen3-vl", weights=str(small[0]))
    images = prepared(bundle.frontend, (64, 96), (64, 96), (64, 96), (99, 40))
    places = (*(ImagePlace(time=time) for time in (0.0, 0.5, 1.0)), ImagePlace(offset=4))
    task = task_of(bundle.frontend, QuerySpec(question="say why", places=places), images)
    assert text_of(task.prompt) == (
        "<|im_start|>user\n<0.2 seconds><|vision_start|>6 x <|video_pad|><|vision_end|>"
        "<1.0 seconds><|vision_start|>6 x <|video_pad|><|vision_end|>"
        "say <|vision_start|>3 x <|image_pad|><|vision_end|>why<|end|>\n<|im_start|>assistant\n"
    )
    model = bundle.load(same.CPU, torch.float32)
    check_logits(model, small[1], bundle, task, cut=21)


def text_of(prompt):
    """Return the text of a prompt; tokens of images are counted."""
    runs = itertools.groupby(prompt, lambda token: (token.token_id, token.payload))
    parts = []
    for (token_id, payload), run in runs:
        text, count = VOCABULARY.id_to_token(token_id), len([*run])
        parts.append(f"{count} x {text}" if payload != (0.0, 0.0) else text * count)
    return "".join(parts).replace("\u0120", " ").replace("\u010a", "\n")


# ---------------------------------------------------------------- prepared images


SIDES = st.integers(1, 700)


@given(SIDES, SIDES)
@settings(max_examples=60, deadline=None)
def test_patches_and_grids_are_those_of_transformers(frontend, height, width):
    """They are equal in all bits, from an image of a pixel on; thin images are refused by both."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    said: dict[str, Any] = {
        **SIZES,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
    }
    processor = Qwen2VLImageProcessorPil(**said)
    if max(height, width) > 200 * min(height, width):
        for refused, prepare in (
            ((InvalidField, "too thin"), lambda: prepared(frontend, (height, width))),
            ((ValueError, "aspect ratio"), lambda: processor(noise(height, width))),
        ):
            with pytest.raises(refused[0], match=refused[1]):
                prepare()
        return
    (image,) = prepared(frontend, (height, width))
    theirs = processor(noise(height, width), return_tensors="pt")
    values_PV = patch_values(torch.from_numpy(image.pixels.levels_PCFYX), VISION_SIZES)
    assert theirs["image_grid_thw"].tolist() == [[1, image.pixels.rows, image.pixels.columns]]
    assert torch.equal(values_PV, theirs["pixel_values"])


VISION_SIZES = TowerConfig(dim=8, ff_dim=8, num_layers=1, num_heads=1, grid=2, taps=())


def test_patches_of_frames_are_those_of_transformers():
    """Two frames of a size make the patches of a video of two."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    frames = [noise(256, 320, seed) for seed in range(2)]
    ours = joined(*(patched(frame, VISION_SIZES) for frame in frames))
    pixels_FCHW = torch.stack([torch.from_numpy(np.array(each)) for each in frames]).permute(
        0, 3, 1, 2
    )
    video = (pixels_FCHW.float() - 127.5) / 127.5
    theirs, *grid = Qwen3VLVideoProcessor().patchify(video[None], 16, 2, 2)
    assert grid == [1, ours.rows, ours.columns]
    assert torch.equal(patch_values(torch.from_numpy(ours.levels_PCFYX), VISION_SIZES), theirs[0])


@pytest.fixture(scope="module")
def processor(small):
    """Transformers' processor without limits of pixels, which are a clip's there."""
    pytest.importorskip("torchvision", reason="needs torchvision: pip install --no-deps it")
    from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(small[0] / "tokenizer.json"))
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 1, "longest_edge": 2**30}, do_sample_frames=False
        ),
        chat_template=CHAT,
    )


def blurred(height, width, seed):
    """An image that is no noise."""
    return noise(7, 7, seed).resize((width, height), Image.Resampling.BICUBIC)


@given(
    st.tuples(st.integers(33, 128), st.integers(64, 128)),
    st.lists(st.integers(0, 40), min_size=2, max_size=7),
    st.floats(0.3, 90.0),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_clips_are_those_of_transformers(frontend, processor, size, steps, rate, is_whole):
    """Prompts, grids and patches of frames at any times.

    Frames that are resized differ by at most two levels of 255: torchvision rounds otherwise.
    """
    make, (height, width) = blurred, size
    if is_whole:
        make, height, width = noise, height // 32 * 32, width // 32 * 32
    indices = [*itertools.accumulate(steps)]
    frames = [make(height, width, seed) for seed in indices]
    info = ImageProperties(image_id="i", width=1, height=1, cache_hit=False)
    images = [frontend.prepare_image(each, str(at), info) for at, each in enumerate(frames)]
    places = tuple(ImagePlace(time=index / rate) for index in indices)
    task = task_of(frontend, QuerySpec(question="why?", places=places), images)
    said = [{"role": "user", "content": [{"type": "video"}, text("why?")]}]
    prompt = processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    # Each pair of frames has marks of its own, and version 5.24 keeps the template's around all.
    prompt = prompt.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    theirs = processor(
        text=prompt,
        videos=[torch.stack([torch.from_numpy(np.array(each)) for each in frames]).movedim(3, 1)],
        video_metadata=[{"total_num_frames": 999, "fps": rate, "frames_indices": list(indices)}],
        return_tensors="pt",
    )
    assert [token.token_id for token in task.prompt] == theirs["input_ids"][0].tolist()
    visual = [each.pixels for each in task.visual.images]
    grid = [len(visual), visual[0].rows, visual[0].columns]
    assert theirs["video_grid_thw"].tolist() == [grid]
    values_PV = torch.cat(
        [patch_values(torch.from_numpy(each.levels_PCFYX), VISION_SIZES) for each in visual]
    )
    difference = (values_PV - theirs["pixel_values_videos"]).abs().max()
    assert difference <= (0.0 if is_whole else 2.01 * 2 / 255)


def test_one_image_leaves_room_for_others(small):
    """It takes at most a quarter of the context, whatever the limits of its pixels."""
    bundle = resolve("qwen3-vl", weights=str(small[0]), max_context=40)
    (image,) = prepared(bundle.frontend, (400, 400))
    assert image.pixels.rows * image.pixels.columns // 4 <= 10
    task, clip = QuerySpec(question="?"), [ImagePlace(time=float(second)) for second in range(8)]
    bundle.frontend.check_images(task, [(400, 400)] * 4)
    bundle.frontend.check_images(msgspec.structs.replace(task, places=clip), [(400, 400)] * 8)
    with pytest.raises(PromptTooLong, match="context has 40"):
        bundle.frontend.check_images(task, [(400, 400)] * 5)
    with pytest.raises(InvalidField, match="too thin"):
        bundle.frontend.check_images(task, [(4000, 3)])


# ---------------------------------------------------------------- prompts


def test_prompts_are_those_of_transformers(small, frontend):
    """Images are in the same places of a conversation with a system message."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(small[0] / "tokenizer.json"))
    images = prepared(frontend, *SHAPES[:3])
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "image"}, text("the cat"), {"type": "image"}]},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": [text("why "), {"type": "image"}, text("is it?")]},
    ]
    theirs: Any = tokenizer.apply_chat_template(
        messages, chat_template=CHAT, add_generation_prompt=True, tokenize=False
    )
    for image in images:  # as its processor does
        count = len(image.pixels.levels_PCFYX) // 4
        theirs = theirs.replace("<|image_pad|>", "<|placeholder|>" * count, 1)
    theirs = theirs.replace("<|placeholder|>", "<|image_pad|>")
    spec = QuerySpec(
        system="be brief",
        history=(Turn(question="the cat", answer="sat"),),
        question="why is it?",
        places=(ImagePlace(), ImagePlace(offset=7), ImagePlace(turn=1, offset=4)),
    )
    task = task_of(frontend, spec, images)
    assert [token.token_id for token in task.prompt] == tokenizer(theirs)["input_ids"]


def text(said):
    """Make a part of a message."""
    return {"type": "text", "text": said}


POINT = ImagePoint(x=0, y=0)


def test_text_cannot_forge_an_image(frontend):
    """The text of a special token stays text, beside an image and without one."""
    forged = "a <|image_pad|> and <|vision_start|>"
    for count in (0, 1):
        images = prepared(frontend, (64, 64))[:count]
        task = task_of(frontend, QuerySpec(question=forged), images)
        assert sum(token.payload != (0.0, 0.0) for token in task.prompt) == 4 * count
        assert forged in text_of(task.prompt)


def test_tokens_of_an_image_are_those_of_its_content(frontend):
    """Equal keys make equal tokens, which share keys and values; others differ."""
    one, other = prepared(frontend, (64, 64), (64, 64))
    first, again, second = (
        task_of(frontend, QuerySpec(question="what?"), [image]).prompt
        for image in (one, one, other)
    )
    assert first == again
    assert len(first) == len(second)
    assert first != second


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        (CaptionSpec(), InvalidField, "needs an image"),
        (DetectSpec(object="cup"), InvalidField, "needs an image"),
        (QuerySpec(question="", shows_image=True), InvalidField, "needs an image"),
        (SegmentSpec(object="cup"), TaskUnsupported, "no segment skill"),
        (QuerySpec(question="why?", reasoning=True), TaskUnsupported, "no query with reasoning"),
        (
            QuerySpec(question="?", spatial_refs=(ImagePoint(x=0, y=0),)),
            TaskUnsupported,
            "no points",
        ),
    ],
)
def test_what_it_cannot_take_is_refused(frontend, spec, error, said):
    """By the name of what is missing, and not ignored."""
    with pytest.raises(error, match=said):
        task_of(frontend, spec)


def test_a_template_without_images_is_refused(small, tmp_path):
    """It is found when the model is loaded."""
    write(tmp_path, config(), chat=hub_folder.CHAT)
    frontend: Any = resolve("qwen3-vl", weights=str(tmp_path)).frontend
    with pytest.raises(InvalidField, match="show 0 of 2 images"):
        frontend.check()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vision": VISION | {"hidden_act": "gelu"}}, "hidden_act"),
        ({"vision": VISION | {"out_hidden_size": 32}}, "out_hidden_size"),
        ({"vision": VISION | {"deepstack_visual_indexes": [2, 0]}}, "deepstack_visual_indexes"),
        ({"vision": VISION | {"num_position_embeddings": 50}}, "num_position_embeddings"),
        ({"text": TEXT | {"attention_bias": True}}, "attention_bias"),
        ({"text": TEXT | {"hidden_size": 0}}, "hidden_size"),
        ({"image_token_id": hub_folder.VOCABULARY}, "image_token_id"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(tmp_path, fields, said):
    """Other logits would be computed."""
    (tmp_path / "config.json").write_text(json.dumps(config(**fields).to_dict()))
    with pytest.raises(InvalidField, match=said):
        resolve("qwen3-vl", weights=str(tmp_path))


@pytest.mark.parametrize(
    "said", [{"patch_size": 14}, {"size": {"longest_edge": 9}}, {"image_std": [0.5, 0.5, 0]}]
)
def test_preparations_that_are_not_implemented_are_refused(small, tmp_path, said):
    """Images would be other ones than in training."""
    (tmp_path / "config.json").write_bytes((small[0] / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.raises(InvalidField, match=r"preprocessor_config\.json"):
        resolve("qwen3-vl", weights=str(tmp_path))


# ---------------------------------------------------------------- boxes


def answered(frontend, spec, answer):
    """A task that has read an answer, each token of which its grammar allowed, and its events."""
    task = task_of(frontend, spec, prepared(frontend, (64, 64)))
    events: list[Any] = []
    for token_id in TextTokenizer(VOCABULARY).encode(answer):
        if task.finish_reason is not None:
            break
        assert task.grammar.allows(token_id), (answer, token_id)
        events += task.consume(SampledToken(token_id, (0.0, 0.0)))
    return task, events


NUMBERS = st.lists(st.lists(st.integers(0, 1000), min_size=4, max_size=4), max_size=4)
LABELS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=9).filter(
    str.strip
)


@given(NUMBERS, LABELS, st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_boxes_are_read_from_any_json_of_the_grammar(frontend, numbers, label, fenced, spread):
    """Each once its brackets close, between 0 and 1, its corners in order, whatever the label."""
    label = label.strip()
    blank = "\n\t" if spread else ""
    items = [json.dumps({"bbox_2d": each, "label": label}, ensure_ascii=False) for each in numbers]
    answer = "[" + blank + ("," + blank).join(items) + blank * bool(items) + "]"
    answer = f"```json\n{answer}\n```" if fenced else answer
    task, events = answered(frontend, DetectSpec(object=label), answer)
    assert task.finish_reason is FinishReason.STOP
    result = task.result(FinishReason.STOP)
    assert result.objects == tuple(events)
    assert [each.label for each in events] == [label] * len(numbers)
    for (x, y, to_x, to_y), event in zip(numbers, events, strict=True):
        low, high = (min(x, to_x), min(y, to_y)), (max(x, to_x), max(y, to_y))
        box = event.box
        assert (box.x_min, box.y_min) == tuple(each / 1000 for each in low)
        assert (box.x_max, box.y_max) == tuple(each / 1000 for each in high)


def test_points_end_at_the_most_that_are_wanted(frontend):
    """The last one ends the task, before its label."""
    point = '{"point_2d": [250, 1000], "label": "cup"}'
    spec = PointSpec(object="cup", max_objects=2)
    task, events = answered(frontend, spec, f"[{point},{point},{point}]")
    assert task.finish_reason is FinishReason.MAX_OBJECTS
    assert task.result(FinishReason.MAX_OBJECTS).points == tuple(events)
    assert [event.point for event in events] == [ImagePoint(x=0.25, y=1.0)] * 2


@pytest.mark.parametrize(
    "answer", ['[{"bbox_2d": [1, 2, 3, 1001]', '[{"bbox_2d": [01', '[{"point_2d"', "[ \n \n \n"]
)
def test_the_grammar_allows_nothing_else(frontend, answer):
    """Neither numbers beyond the image, nor other objects, nor blanks without end."""
    with pytest.raises(AssertionError):
        answered(frontend, DetectSpec(object="cup"), answer)


def test_boxes_in_an_answer_to_a_question_stay_text(frontend):
    """Only detection reads them."""
    answer = '[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}]'
    task = task_of(frontend, QuerySpec(question="boxes?"), prepared(frontend, (64, 64)))
    for token_id in TextTokenizer(VOCABULARY).encode(answer):
        task.consume(SampledToken(token_id, (0.0, 0.0)))
    assert task.result(FinishReason.STOP).answer == answer
