"""The refiner's network."""

import numpy as np
import pytest
import torch
from legato_engine.models.moondream.presets import moondream3_config, tiny_random3_config
from legato_engine.models.moondream.refiner import MaskAttention, MaskHead
from torch import nn

from tests.engine.models.moondream.outlines import reference_head
from tests.engine.models.moondream.outlines.heads import random_head

CONFIG = tiny_random3_config()
GRID, SIDE, V = CONFIG.vision.grid, CONFIG.vision.crop_size, CONFIG.vision.dim


def given(count=1, seed=0):
    """Late and early features, and a mask."""
    torch.manual_seed(seed)
    late, early = torch.randn(2, count, GRID * GRID, V)
    return late, early, (torch.rand(count, SIDE, SIDE) > 0.5).float()


def test_shapes_of_moondream_3s_head():
    """At the published sizes: four masks of the crop's size and their predicted IoU."""
    vision = moondream3_config().vision
    with torch.device("meta"):
        head = MaskHead(vision.dim, vision.grid, 256, 4)
        late, early = torch.empty(2, 1, 729, 1152)
        logits, ratings = head(head.fused(late, early), torch.empty(1, 378, 378))
        refined = head.refine(late, early, torch.empty(1, 378, 378), 1)
    assert (logits.shape, ratings.shape) == ((1, 4, 378, 378), (1, 4))
    assert refined.shape == (1, 378, 378)
    names = {name: tuple(p.shape) for name, p in head.named_parameters()}
    assert len(names) == 150
    assert names["mask_encoder.conv3.0.weight"] == (64, 32, 3, 3)
    assert names["hq_fusion.early_proj.0.weight"] == (256, 1152)
    assert names["upsample.16.norm.weight"] == (32,)
    assert names["transformer_blocks.1.mlp.0.weight"] == (2048, 256)
    assert names["mask_mlps.3.4.bias"] == (32,)
    assert names["image_pe"] == (1, 256, 27, 27)


def test_the_upsampled_map_has_eight_times_the_resolution():
    """Three doublings, down to an eighth of the width."""
    head = random_head(CONFIG)
    assert head.upsample(torch.zeros(1, 32, GRID, GRID)).shape == (1, 4, 8 * GRID, 8 * GRID)


def test_attention_is_torchs():
    """The attention equals torch's with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    ours = MaskAttention(32, 4)
    ours.load_state_dict(theirs.state_dict())
    query, key, value = torch.randn(2, 5, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    assert torch.allclose(ours(query, key, value), theirs(query, key, value)[0], atol=1e-6)


def test_the_head_is_the_references():
    """Logits, predicted IoU and five iterations equal a plain head in numpy."""
    head = random_head(CONFIG, seed=2)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    weights = {name: tensor.numpy() for name, tensor in head.state_dict().items()}
    late, early, mask = given()
    one = late[0].double().numpy(), early[0].double().numpy(), mask[0].double().numpy()
    logits, ratings = head(head.fused(late, early), mask)
    expected = reference_head.masks_of(weights, *one)
    assert np.allclose(logits[0], expected[0], atol=2e-4)
    assert np.allclose(ratings[0], expected[1], atol=2e-5)
    refined = reference_head.refine(weights, *one, 5)
    assert np.allclose(head.refine(late, early, mask, 5)[0], refined, atol=2e-4)


def test_refining_feeds_back_the_best_rated_mask():
    """Each iteration starts from the mask with the highest predicted IoU."""
    head = random_head(CONFIG, seed=4)
    late, early, mask = given(3)
    image, best = head.fused(late, early), set()
    by_hand = mask
    for _ in range(3):
        logits, ratings = head(image, by_hand)
        chosen = ratings.argmax(1)
        best |= set(chosen.tolist())
        by_hand = torch.stack([logits[b, m].sigmoid() for b, m in enumerate(chosen)])
    refined = head.refine(late, early, mask, 3)
    assert torch.allclose(refined, by_hand, atol=1e-6)
    assert refined.min() >= 0
    assert refined.max() <= 1
    assert not torch.allclose(refined, head.refine(late, early, mask, 2), atol=1e-4)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_answer_depends_on_all_that_is_given(which):
    """Late features, early features and the mask all matter."""
    head = random_head(CONFIG)
    late, early, mask = given()
    before = head.refine(late, early, mask, 1)
    late, early, mask = (given(seed=int(place == which))[place] for place in range(3))
    assert not torch.allclose(head.refine(late, early, mask, 1), before, atol=1e-3)


def test_the_same_gives_the_same_bits():
    """Two runs have the same bits."""
    head = random_head(CONFIG)
    late, early, mask = given()
    assert torch.equal(head.refine(late, early, mask, 5), head.refine(late, early, mask, 5))
