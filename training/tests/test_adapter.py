"""What must stay true of adapters and of the word that the shipped one teaches."""

import copy

import numpy as np
import torch
from legato_training.config import ModelConfig
from legato_training.hazard import HazardSampler, hazard_kind, hazard_lexicon
from legato_training.language import Narrator
from legato_training.lexicon import lexicon
from legato_training.lora import add_adapter, save_adapter
from legato_training.model import LegatoTiny, slot_mask
from legato_training.scenes import BACKGROUNDS
from legato_training.sprites import shape_sprites
from safetensors.torch import load_file

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
