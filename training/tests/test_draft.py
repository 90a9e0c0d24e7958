"""The training of the draft and of the adapter."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from legato_training.config import ModelConfig
from legato_training.draft import (
    TEXT,
    Draft,
    Lesson,
    Teacher,
    accepted,
    add_adapter,
    loss_of,
    roll,
    save,
    save_adapter,
)
from legato_training.hazard import HazardSampler, hazard_kind, hazard_lexicon
from legato_training.language import Narrator
from legato_training.lexicon import lexicon
from legato_training.model import LegatoTiny, slot_mask
from legato_training.scenes import BACKGROUNDS
from legato_training.slots import CAPTION, LENGTH, QUERY_A, STARTS
from legato_training.sprites import shape_sprites
from safetensors import safe_open
from safetensors.torch import load_file

# ---------------------------------------------------------------- the draft

DEPTH = 4
SMALL = ModelConfig(
    vision_dim=64,
    vision_ff=96,
    vision_layers=1,
    vision_heads=1,
    text_dim=64,
    text_ff=96,
    text_layers=2,
    text_heads=1,
    projector_inner=96,
    region_inner=64,
)
ANSWERS = {CAPTION: (5, 20), QUERY_A: (7, 3)}  # where an answer starts in its slot, its tokens


def lesson_of(teacher: Teacher) -> Lesson:
    """Two scenes of noise, whose slots of text hold random words and two answers."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, 1000, (2, LENGTH), generator=draw)
    targets = torch.full((2, LENGTH), -1)
    for slot, (start, count) in ANSWERS.items():
        first = STARTS[slot] + start - 1
        targets[:, first : first + count] = tokens[:, first + 1 : first + count + 1]
    pixels = torch.rand(2, 3, SMALL.crop, SMALL.crop, generator=draw) * 2 - 1
    batch = {"tokens": tokens, "targets": targets, "values": torch.zeros(2, LENGTH, 2)}
    return teacher.read(pixels, batch)


def small_teacher() -> Teacher:
    """Random weights."""
    torch.manual_seed(1)
    model = LegatoTiny(SMALL).requires_grad_(requires_grad=False)
    return Teacher(model, 1, torch.device("cpu"))


def test_who_knows_the_next_states_is_always_right():
    """States, words and what is to be said stand at the same places, slot by slot."""
    teacher = small_teacher()
    lesson = lesson_of(teacher)
    states = [lesson.hidden_BGD.float().roll(-step - 1, 1) for step in range(DEPTH)]
    words = []

    def oracle(state, word, seen, rope):
        words.append(word)
        return states[len(words) - 1]

    assert accepted(roll(oracle, teacher, lesson, DEPTH)) == [1.0] * DEPTH
    valid = [valid_BG for _, _, valid_BG in roll(oracle_again(states), teacher, lesson, DEPTH)]
    counts = [sum(max(0, n - 1 - step) for _, n in ANSWERS.values()) for step in range(DEPTH)]
    assert [int(each.sum()) for each in valid] == [2 * count for count in counts]
    caption = STARTS[CAPTION] + ANSWERS[CAPTION][0] - 1 - (LENGTH - TEXT)
    for step, word in enumerate(words):
        said = lesson.said_BG[:, caption + step]
        assert torch.equal(word[:, caption], teacher.model.text.wte[said])


def oracle_again(states):
    """Return the same states, from the first on."""
    left = iter(states)
    return lambda state, word, seen, rope: next(left)


def test_a_new_draft_says_what_it_was_given():
    """Untaught, it adds nothing to the state; its loss falls along its gradient."""
    teacher = small_teacher()
    lesson = lesson_of(teacher)
    draft = Draft(SMALL.text_dim, 32, SMALL.text_heads)
    logits = teacher.model.token_logits(lesson.hidden_BGD.float())
    for said, _, valid_BG in roll(draft, teacher, lesson, DEPTH):
        assert torch.allclose(said, logits[valid_BG], atol=1e-4)
    before = loss_of(roll(draft, teacher, lesson, DEPTH))
    before.backward()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
        assert loss_of(roll(draft, teacher, lesson, DEPTH)) < before


def test_the_engine_computes_the_same(tmp_path):
    """The file holds the engine's layer, and both make the same state of the same things."""
    from legato_engine.models.moondream.draft import DraftLayer

    torch.manual_seed(2)
    draft = Draft(64, 32, 2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_((torch.randn_like(parameter) / 4).bfloat16())
    save(draft, 1, tmp_path / "draft.safetensors")
    with safe_open(tmp_path / "draft.safetensors", framework="pt") as file:
        assert file.metadata() == {"model": "legato-tiny", "layer": "1"}
    layer = DraftLayer(64, 32, 2)
    tensors = load_file(tmp_path / "draft.safetensors")
    layer.load_state_dict({name: each.float() for name, each in tensors.items()})
    state, word = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    k, v = torch.randn(1, 2, 11, 32), torch.randn(1, 2, 11, 32)
    still = torch.ones(3, 4), torch.zeros(3, 4)  # a turn by nothing
    with torch.no_grad():
        ours = draft(state, word, (k, v, torch.zeros(3, 11)), still)[0]
        joined = layer.joined(state[0], word[0])
        query = layer.queries(joined).transpose(0, 1)
        seen = F.scaled_dot_product_attention(query, k[0], v[0]).transpose(0, 1)
        theirs = layer.next_state(state[0], joined, seen)
    assert torch.allclose(ours, theirs, atol=1e-5)


# ---------------------------------------------------------------- the adapter


def hidden(model: LegatoTiny) -> torch.Tensor:
    """Return the residual stream of fixed tokens after a fixed image."""
    image = torch.randn(1, SMALL.num_image_tokens, 64, generator=torch.Generator().manual_seed(1))
    tokens, values = torch.arange(20, 28)[None], torch.zeros(1, 8, 2)
    with torch.no_grad():
        return model.decode(image, tokens, values, *slot_mask((8,), SMALL.prefix))


def test_an_adapter_begins_as_nothing_and_is_all_that_trains():
    """A new adapter changes no output, and only its own matrices have gradients."""
    plain = LegatoTiny(SMALL)
    adapted = copy.deepcopy(plain)
    trained = add_adapter(adapted, 4)
    assert torch.equal(hidden(plain), hidden(adapted))
    assert sum(p.numel() for p in trained) == 2 * 4 * (64 + 96) * 2
    frozen = [p for p in adapted.parameters() if all(p is not t for t in trained)]
    assert not any(p.requires_grad for p in frozen)


def test_the_file_holds_the_change(tmp_path):
    """Adding B A of the saved file to the plain weights gives the adapted model's outputs."""
    plain = LegatoTiny(SMALL)
    adapted = copy.deepcopy(plain)
    for parameter in add_adapter(adapted, 4):
        with torch.no_grad():
            parameter.copy_((0.1 * torch.randn_like(parameter)).bfloat16())
    save_adapter(adapted, tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    for index, block in enumerate(plain.text.blocks):
        for name in ("fc1", "fc2"):
            prefix = f"text.blocks.{index}.mlp.{name}"
            change = tensors[f"{prefix}.lora_b"].float() @ tensors[f"{prefix}.lora_a"].float()
            getattr(block.mlp, name).weight.data += change
    torch.testing.assert_close(hidden(plain), hidden(adapted), rtol=1e-4, atol=1e-4)


def test_yellow_triangles_are_hazards_and_nothing_else_is():
    """The new word covers the one kind, beside its old name; every other kind is as it was."""
    words, book, at = hazard_lexicon(), lexicon(), hazard_kind()
    assert book.kinds[at].names == ("yellow triangle",)
    assert words.kinds[at].names == ("hazard", "yellow triangle")
    assert [k for i, k in enumerate(words.kinds) if i != at] == [
        k for i, k in enumerate(book.kinds) if i != at
    ]
    assert {p.singular for p in words.phrases_of[at]} == {"hazard", "yellow triangle"}


def test_scenes_of_hazards_are_told_as_such():
    """Hazards are tinted yellow, named in captions, and no scene needs a photograph."""
    sampler = HazardSampler(shape_sprites(), seed=3)
    seen = 0
    for _ in range(60):
        scene = sampler.sample()
        assert BACKGROUNDS[scene.background] != "photo"
        told = Narrator(scene, np.random.default_rng(1), sampler.lexicon).short().lower()
        assert ("hazard" in told) == (sampler.hazard in scene.kinds)
        assert "yellow triangle" not in told
        for kind, tint in zip(scene.kinds, scene.tints, strict=True):
            if kind == sampler.hazard:
                seen += 1
                assert tint[0] > 0.7
                assert tint[2] < 0.4
    assert seen > 30
