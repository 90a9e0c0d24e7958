"""The paged model equals the dense reference, and results are batch-invariant."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from legato_engine.config import LoadOptions
from legato_engine.kernels.cpu.library import library
from legato_engine.models import registry
from legato_engine.models.moondream.frontend import MoondreamFrontend, Prompts
from legato_engine.models.moondream.region import sizes_of
from legato_engine.models.moondream.tasks import Allow
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.models.moondream.vision import patches, stitch
from legato_engine.models.paged_attention import Chunk, DecodeBatch, PrefillSpan
from legato_engine.types import ImageBox, ImagePoint, PromptToken

from tests.engine.models.paged_session import PAGE_SIZE, PagedSession
from tests.engine.models.reference_moondream import ReferenceMoondream, pooled

COORD, SIZE, EOS = 5, 6, 0
DETECT_CYCLE = (Allow.DETECT_Y, Allow.DETECT_Y, Allow.DETECT_SIZE)
REFS = (ImagePoint(x=0.3, y=0.725), ImageBox(x_min=0.1, y_min=0.2, x_max=0.55, y_max=0.9))


def relative_error(actual, expected):
    """Largest difference over the largest expected magnitude."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def payload_of(model, hidden_BD, token_B):
    """The payloads of tokens, whatever their logits were."""
    return model.values(hidden_BD, token_B, torch.zeros(len(token_B), model.vocab_size))[0]


def best(model, logits_V, constraint):
    """The likeliest token that a constraint allows."""
    allowed, suppressed = model.constraints[constraint][:2]
    scores_V = logits_V.clone()
    if allowed is not None:
        scores_V[[i for i in range(len(scores_V)) if i not in allowed]] = -torch.inf
    scores_V[list(suppressed)] = -torch.inf
    return scores_V.argmax().item()


def check_against_reference(model, reference, image, image_embeddings, prompt, constraints):
    """Prefill and decode greedily through pages; the reference sees the same tokens densely."""
    session = PagedSession(model)
    row = 2
    hidden_1D = session.prefill(row, image, prompt)
    tokens = [(token.token_id, token.payload) for token in prompt]
    chosen = []
    for constraint in constraints:
        expected_D = reference.hidden(image_embeddings, tokens)[-1]
        expected_V = reference.logits(expected_D)
        logits_1V = model.logits(hidden_1D)
        assert relative_error(logits_1V[0], expected_V) < 1e-4
        token = best(model, logits_1V[0], constraint)
        assert token == best(model, expected_V, constraint)
        payload = tuple(payload_of(model, hidden_1D, torch.tensor([token]))[0].tolist())
        assert payload == pytest.approx(reference.value(expected_D, token), abs=1e-6)
        chosen.append(token)
        tokens.append((token, payload))
        session.feed(row, token, payload)
        hidden_1D = session.step()[row : row + 1]
    return chosen


@pytest.mark.parametrize(
    ("size", "tiling"), [((50, 40), (1, 1)), ((230, 60), (1, 4)), ((150, 150), (2, 2))]
)
def test_detect_matches_the_reference(
    tiny_config, make_model, frontend, prepare, noise_image, size, tiling
):
    """Prefix, prompt and fed-back coordinates have the reference's logits, for every tiling."""
    model, weights = make_model(tiny_config)
    reference = ReferenceMoondream(tiny_config, weights)
    image = prepare(frontend, *size)
    assert image.pixels.tiling == tiling
    expected_TD = reference.image_embeddings(noise_image(*size), tiling)
    embeddings_PD = model.prefix_embeddings(image)
    assert relative_error(embeddings_PD[1:], expected_TD) < 1e-4
    prompt = Prompts(tiny_config, StandInTokenizer()).detect("red cup")
    constraints = [*DETECT_CYCLE, *DETECT_CYCLE]
    chosen = check_against_reference(model, reference, image, expected_TD, prompt, constraints)
    assert chosen == [COORD, COORD, SIZE, COORD, COORD, SIZE]


def test_point_with_references_matches_the_reference(mid_config, make_model, prepare, noise_image):
    """Exact reference values enter the prompt as the reference encodes them; greedy text agrees."""
    model, weights = make_model(mid_config, seed=1)
    reference = ReferenceMoondream(mid_config, weights)
    frontend = MoondreamFrontend(mid_config, StandInTokenizer())
    image = prepare(frontend, 300, 260)
    assert image.pixels.tiling != (1, 1)
    expected_TD = reference.image_embeddings(noise_image(300, 260), image.pixels.tiling)
    prompt = Prompts(mid_config, StandInTokenizer()).point("cup", REFS)
    constraints = [Allow.DETECT_Y, Allow.DETECT_Y, Allow.TEXT, Allow.TEXT, Allow.TEXT]
    check_against_reference(model, reference, image, expected_TD, prompt, constraints)


def test_text_only_matches_the_reference(mid_config, make_model):
    """Without an image everything is causal from BOS on."""
    model, weights = make_model(mid_config, seed=2)
    reference = ReferenceMoondream(mid_config, weights)
    prompt = Prompts(mid_config, StandInTokenizer()).query("why?", (), reasoning=False)
    check_against_reference(model, reference, None, None, prompt, [Allow.TEXT] * 12)


def test_context_across_many_pages_matches_the_reference(tiny_config, make_model):
    """A prompt of several pages, and decoding over a page boundary, equal the dense model."""
    model, weights = make_model(tiny_config, seed=3)
    reference = ReferenceMoondream(tiny_config, weights)
    prompt = Prompts(tiny_config, StandInTokenizer()).query("x" * 52, (), reasoning=False)
    check_against_reference(model, reference, None, None, prompt, [Allow.TEXT] * 10)


def run_row(model, image, prompt, row, others, num_rows=6, steps=5):
    """Logits and payload bits of one row over some steps, with `others` in the batch."""
    session = PagedSession(model, num_rows=num_rows, seed=row)
    for other, other_prompt in others.items():
        session.prefill(other, image if other % 2 else None, other_prompt)
    seen = [session.prefill(row, image, prompt)[0]]
    ids = [COORD, 90, SIZE, 120, 40]
    for index in range(steps):
        session.feed(row, ids[index], (0.125 * index, 0.5))
        for other in others:
            session.feed(other, 30 + 7 * other + index, (0.3, 0.7))
        hidden_RD = session.step()
        token_R = torch.full((num_rows,), COORD)
        seen.append(hidden_RD[row])
        seen.append(model.logits(hidden_RD)[row])
        seen.append(payload_of(model, hidden_RD, token_R)[row])
    return seen


def test_a_row_does_not_depend_on_its_neighbours(either_model, frontend, prepare):
    """A row's bits are the same alone, in any batch and at any index."""
    image = prepare(frontend, 150, 140)
    prompt = tuple(PromptToken(token) for token in (1, 121, 2, 77, 3))
    company = {
        1: tuple(PromptToken(token) for token in (1, 130, 2, 3)),
        2: tuple(PromptToken(token) for token in range(21, 90)),
        5: (PromptToken(COORD, (0.3, 0.0)), PromptToken(3)),
    }
    alone = run_row(either_model, image, prompt, 0, {})
    assert all(map(torch.equal, alone, run_row(either_model, image, prompt, 0, company)))
    assert all(map(torch.equal, alone, run_row(either_model, image, prompt, 4, company)))
    assert all(map(torch.equal, alone, run_row(either_model, image, prompt, 0, {}, num_rows=1)))
    assert all(
        map(torch.equal, alone, run_row(either_model, image, prompt, 8, company, num_rows=9))
    )


def test_a_prompt_is_its_tokens_one_by_one(either_model, frontend, prepare):
    """A prompt after an image gives what a step for each of its tokens gives, over pages."""
    image = prepare(frontend, 150, 140)
    prompt = tuple(PromptToken(token) for token in range(30, 60))
    whole = PagedSession(either_model).prefill(0, image, prompt)
    session = PagedSession(either_model)
    hidden_1D = session.prefill(0, image, prompt[:1])
    for token in prompt[1:]:
        session.feed(0, token.token_id, token.payload)
        hidden_1D = session.step()[:1]
    torch.testing.assert_close(hidden_1D, whole, rtol=1e-4, atol=1e-4)


def test_a_cached_prefix_gives_the_same_bits(either_model, frontend, prepare):
    """A prompt after another row's prefix has the bits of one after a fresh prefix."""
    image = prepare(frontend, 150, 140)
    prompt = tuple(PromptToken(token) for token in (1, 121, 2, 77, 3))
    fresh = PagedSession(either_model).prefill(0, image, prompt)
    session = PagedSession(either_model, seed=5)
    session.prefill(0, image, prompt[:2])
    assert len(session.prefixes) == 1
    assert torch.equal(session.prefill(3, image, prompt), fresh)
    assert len(session.prefixes) == 1


def test_padding_rows_are_finite(either_model):
    """Rows without a sequence are finite, whatever the cache holds."""
    session = PagedSession(either_model)
    hidden_RD = session.step()
    assert torch.isfinite(either_model.logits(hidden_RD)).all()


def test_payload_belongs_to_the_sampled_token(either_model):
    """Coord tokens carry one value, size tokens two, all others none."""
    hidden_BD = torch.randn(3, either_model.width, generator=torch.Generator().manual_seed(1))
    coord, size, text = payload_of(
        either_model, hidden_BD, torch.tensor([COORD, SIZE, 40])
    ).tolist()
    assert coord[1] == 0.0
    assert 0.0 <= coord[0] < 1.0
    assert coord[0] * 1024 == int(coord[0] * 1024)
    assert all(2**-10 <= value <= 1.0 for value in size)
    assert text == [0.0, 0.0]


def test_values_have_the_probability_of_their_bins(tiny_model):
    """The probabilities of all values add up to 1, and the decoded value is the likeliest."""
    hidden_1D = torch.randn(1, tiny_model.width, generator=torch.Generator().manual_seed(2))
    bins_N = torch.arange(1024)
    steps_N = torch.exp2(bins_N / 1023 * 10 - 10)
    read = payload_of(tiny_model, hidden_1D.repeat(2, 1), torch.tensor([COORD, SIZE]))
    values = {
        COORD: (torch.stack([bins_N / 1024, torch.zeros(1024)], -1),),
        SIZE: (
            torch.stack([steps_N, read[1, 1].repeat(1024)], -1),
            torch.stack([read[1, 0].repeat(1024), steps_N], -1),
        ),
    }
    for kind, all_of_one_side in values.items():
        token_N, own_12 = torch.full((1024,), kind), read[kind - COORD][None]
        own = tiny_model.payload_logprobs(hidden_1D, token_N[:1], own_12).item()
        sums = []
        for payload_N2 in all_of_one_side:
            seen_N = tiny_model.payload_logprobs(hidden_1D.repeat(1024, 1), token_N, payload_N2)
            assert own == pytest.approx(seen_N.max().item(), abs=1e-5)
            sums.append(seen_N.exp().sum().log().item())
        if kind == COORD:
            assert sums == pytest.approx([0.0], abs=1e-4)
        else:  # with the other side's own probability as a factor in each
            assert sum(sums) == pytest.approx(own, abs=1e-4)


def test_plain_tokens_have_no_value_to_measure(tiny_model):
    """Plain tokens add nothing, whatever their payload."""
    hidden_BD = torch.randn(2, tiny_model.width)
    left_over = torch.tensor([[0.0, 0.0], [7.0, -1.0]])
    seen = tiny_model.payload_logprobs(hidden_BD, torch.tensor([40, 41]), left_over)
    assert seen.tolist() == [0.0, 0.0]


def test_payload_of_plain_tokens_is_ignored(tiny_model):
    """A stale payload does not change a plain token's embedding."""
    ids = torch.tensor([30, 40])
    left_over = tiny_model.embed(ids, torch.full((2, 2), 0.7))
    assert torch.equal(left_over, tiny_model.embed(ids, torch.zeros(2, 2)))


def test_bfloat16_follows_float32(tiny_config, make_model, frontend, prepare):
    """The model runs in bfloat16 with float32 logits close to the float32 model's."""
    model, _ = make_model(tiny_config)
    image = prepare(frontend, 150, 140)
    prompt = tuple(PromptToken(token) for token in (1, 121, 2, 77, 3))
    expected = model.logits(PagedSession(model).prefill(0, image, prompt))
    _, weights = make_model(tiny_config)
    half = type(model)(tiny_config, _bfloat16(tiny_config, weights))
    logits = half.logits(PagedSession(half).prefill(0, image, prompt))
    assert half.dtype is torch.bfloat16
    assert logits.dtype is torch.float32
    assert relative_error(logits, expected.double()) < 0.1


def _bfloat16(config, weights):
    from legato_engine.models.moondream.model import Network

    network = Network(config).to(torch.bfloat16)
    network.load_state_dict({name: tensor.bfloat16() for name, tensor in weights.items()})
    return network.requires_grad_(False)


def test_decode_writes_where_the_position_says(either_model):
    """A decode step writes one position of one page of its row, and nothing else."""
    session = PagedSession(either_model)
    session.prefill(1, None, tuple(PromptToken(token) for token in (1, 30, 3)))
    before = session.kv.k_LNHSE.clone().float()
    position = int(session.positions_R[1])
    pages_M = session.page_table_RM[1]
    batch = DecodeBatch(session.positions_R[1:2], session.page_table_RM[1:2])
    either_model.decode(
        either_model.embed(torch.tensor([40]), torch.zeros(1, 2)), batch, session.kv
    )
    after = session.kv.k_LNHSE.float()
    changed = (before != after) & ~(before.isnan() & after.isnan())
    touched = changed.any(-1).any(2)[0].nonzero().tolist()
    assert touched == [[pages_M[position // 16].item(), position % 16]]


def test_prefix_sees_itself_both_ways(tiny_model, frontend, prepare):
    """A change at the end of the image changes keys at its start."""
    start = []
    for seed in (0, 1):
        session = PagedSession(tiny_model)
        x_PD = tiny_model.prefix_embeddings(prepare(frontend, 50, 40))
        x_PD[-1] += seed
        pages_M = torch.arange(1, 3)
        tiny_model.prefill(x_PD, PrefillSpan(0, pages_M, bidirectional=True), session.kv)
        start.append(session.kv.k_LNHSE[1, 1, :, 0])
    assert not torch.equal(*start)


@pytest.mark.parametrize("fp8", [False, True])
def test_images_in_one_pass_have_the_bytes_of_one_by_one(either_model, fp8):
    """Images in one pass fill their own pages, on the CPU with the same bits."""
    if fp8:
        either_model = in_fp8(either_model)
    together, apart = PagedSession(either_model), PagedSession(either_model)
    generator = torch.Generator().manual_seed(3)
    x_CPD = torch.randn(3, 15, either_model.width, generator=generator).to(either_model.dtype)
    pages_CM = torch.tensor([[4], [1], [3]])
    either_model._network.text.cache_stacked(x_CPD, pages_CM, together.kv)
    for x_PD, pages_M in zip(x_CPD, pages_CM, strict=True):
        either_model.cache_span(x_PD, PrefillSpan(0, pages_M, bidirectional=True), apart.kv)
    for name in ("k_LNHSE", "v_LNHSE"):
        ours, theirs = (getattr(each.kv, name).float() for each in (together, apart))
        assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        assert not torch.equal(ours[-1, 1], ours[-1, 3])


def in_fp8(model):
    """The model with copies of its blocks in e4m3."""
    model = copy.deepcopy(model)
    model._network.text.use_fp8()
    return model


def prefix_of(model, length, adapters=None):
    """Keys and values of a prefix of these many noise positions, [2, L, P, H, E]."""
    session = PagedSession(model, num_rows=1)
    generator = torch.Generator().manual_seed(5)
    x_PD = torch.randn(length, model.width, generator=generator).to(model.dtype)
    pages_M = torch.arange(1, 2 - length // -PAGE_SIZE)
    span = PrefillSpan(0, pages_M, bidirectional=True, adapters=adapters)
    model.cache_span(x_PD, span, session.kv)
    caches = (session.kv.k_LNHSE, session.kv.v_LNHSE)
    return torch.stack([each[:, pages_M].float().movedim(2, 3).flatten(1, 2) for each in caches])[
        :, :, :length
    ]


def test_only_images_pass_in_e4m3(mid_config, make_model):
    """Text, an image with an adapter and questions keep the bits that they had."""
    plain, _ = make_model(mid_config)
    ours = in_fp8(plain)
    bank = plain.adapter_bank(1, 8)
    rows = bank.rows(torch.zeros(1, dtype=torch.int64), bank.ranks[-1])
    for length, adapters in ((1, None), (40, rows)):
        pair = (prefix_of(model, length, adapters) for model in (plain, ours))
        assert torch.equal(*pair)
    ours_2LPHE, truth_2LPHE = prefix_of(ours, 40), prefix_of(plain, 40)
    errors_2L = (ours_2LPHE - truth_2LPHE).flatten(2).norm(dim=2) / truth_2LPHE.flatten(2).norm(
        dim=2
    )
    assert (errors_2L > 0.01).all()
    assert (errors_2L < 0.09).all()
    prompt = PrefillSpan(0, torch.arange(1, 4), bidirectional=False)
    x_TD = torch.randn(20, plain.width)
    assert torch.equal(
        *(model.prefill(x_TD, prompt, PagedSession(model).kv) for model in (plain, ours))
    )


def test_layers_with_gains_or_experts_are_not_in_e4m3(tiny3_model):
    """Images of such a model have the bits that they had."""
    assert torch.equal(prefix_of(in_fp8(tiny3_model), 20), prefix_of(tiny3_model, 20))


def test_passes_of_one_shape_compute_what_a_prefill_does(tiny_model):
    """The last of them is padded; other pages, and positions that nothing has written, are NaN."""
    chunked, whole = PagedSession(tiny_model), PagedSession(tiny_model)
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(27, tiny_model.width, generator=generator)
    pages_M = torch.arange(1, 4)
    expected_TD = tiny_model.prefill(x_TD, PrefillSpan(0, pages_M, bidirectional=False), whole.kv)
    table_M = torch.tensor([1, 2, 3, 0])
    parts = []
    for start in (0, 8, 16, 24):
        count = min(8, len(x_TD) - start)
        real_T = torch.arange(8) < count
        positions_T = torch.where(real_T, start + torch.arange(8), 0)
        page_T = torch.where(real_T, table_M[positions_T // 16], 0)
        chunk = Chunk(torch.tensor([start, count]), positions_T, page_T, table_M)
        hidden_TD = tiny_model.prefill_chunk(x_TD[positions_T], chunk, chunked.kv)
        parts.append(hidden_TD[:count])
    torch.testing.assert_close(torch.cat(parts), expected_TD, rtol=1e-4, atol=1e-4)
    ours, theirs = chunked.kv.k_LNHSE[:, 1:3], whole.kv.k_LNHSE[:, 1:3]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_caching_writes_what_a_prefill_writes(either_model):
    """Every byte of keys and values is the same, of a prefix and of text after it."""
    cached, prefilled = PagedSession(either_model), PagedSession(either_model)
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(20, either_model.width, generator=generator).to(either_model.dtype)
    pages_M = torch.arange(1, 3)
    for start, stop, bidirectional in ((0, 15, True), (15, 20, False)):
        span = PrefillSpan(start, pages_M, bidirectional=bidirectional)
        either_model.cache_span(x_TD[start:stop], span, cached.kv)
        either_model.prefill(x_TD[start:stop], span, prefilled.kv)
    for name in ("k_LNHSE", "v_LNHSE"):
        ours, theirs = (getattr(each.kv, name).float() for each in (cached, prefilled))
        assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
        assert not torch.equal(ours[-1, 1].nan_to_num(), torch.zeros_like(ours[-1, 1]))


# ---------------------------------------------------------------- region

NUM_BINS = 1024


def test_a_size_does_not_depend_on_the_batch():
    """Every bin has the same size alone and at any place among others, bit for bit."""
    bin_T2 = torch.arange(NUM_BINS).reshape(-1, 2)
    together_T2 = sizes_of(bin_T2, NUM_BINS)
    for start in (0, 1, 3):
        assert torch.equal(sizes_of(bin_T2[start:], NUM_BINS), together_T2[start:])
    for bin_2, size_2 in zip(bin_T2, together_T2, strict=True):
        assert torch.equal(sizes_of(bin_2[None], NUM_BINS)[0], size_2)
    assert together_T2[0, 0] == 2.0**-10
    assert together_T2[-1, 1] == 1.0


# ---------------------------------------------------------------- vision
# Patches, stitching and pooling against loops.


def test_patch_values_run_by_channel_row_column():
    """Value c * 196 + y * 14 + x of patch (gy, gx) is the pixel it covers."""
    pixels_NHWC = torch.randn(2, 28, 42, 3)
    out_NTP = patches(pixels_NHWC, 14)
    assert out_NTP.shape == (2, 6, 588)
    for gy, gx, c, y, x in [(0, 0, 0, 0, 0), (1, 2, 2, 13, 5), (0, 1, 1, 3, 12), (1, 0, 0, 7, 0)]:
        value = pixels_NHWC[1, gy * 14 + y, gx * 14 + x, c]
        assert out_NTP[1, gy * 3 + gx, c * 196 + y * 14 + x] == value


@pytest.mark.parametrize("tiling", [(1, 2), (2, 1), (2, 3), (3, 4)])
def test_stitching_drops_inner_margins(tiling):
    """Every cell of the grid comes from the one tile that owns it."""
    rows, columns = tiling
    grid, margin = 9, 2
    core = grid - 2 * margin
    tiles_NGGD = torch.randn(rows * columns, grid, grid, 2)
    out_YWD = stitch(tiles_NGGD, tiling, margin)
    assert out_YWD.shape == (rows * core + 2 * margin, columns * core + 2 * margin, 2)
    for y in range(out_YWD.shape[0]):
        for x in range(out_YWD.shape[1]):
            i = min(max((y - margin) // core, 0), rows - 1)
            j = min(max((x - margin) // core, 0), columns - 1)
            expected = tiles_NGGD[i * columns + j, y - i * core, x - j * core]
            assert torch.equal(out_YWD[y, x], expected)


@pytest.mark.parametrize("tiling", [(2, 2), (1, 4), (3, 1)])
def test_reconstruction_pools_the_stitched_grid(tiny_model, tiny_config, tiling):
    """Pooling windows go from floor to ceiling."""
    vision = tiny_model._network.vision
    grid, dim = tiny_config.vision.grid, tiny_config.vision.dim
    tiles_NTD = torch.randn(tiling[0] * tiling[1], grid * grid, dim)
    out_TD = vision.reconstruct(tiles_NTD, tiling)
    stitched = stitch(tiles_NTD.reshape(-1, grid, grid, dim), tiling, 1)
    expected_TD = pooled(stitched, grid).reshape(grid * grid, dim)
    torch.testing.assert_close(out_TD, expected_TD)


def test_crops_never_mix(tiny_model):
    """A crop's features do not depend on other crops."""
    pixels = torch.randint(0, 256, (3, 56, 56, 3), dtype=torch.uint8)
    together = tiny_model._network.vision.encode(pixels)
    torch.testing.assert_close(together[1:2], tiny_model._network.vision.encode(pixels[1:2]))


def test_a_second_encoder_leaves_the_tile_counters_of_the_first(tiny_model):
    """The graphs that it captured clear and count in that memory."""
    network = tiny_model._network
    for part in (network.vision, network.text):
        part.count_apart()
        first = part._counters
        part.count_apart()
        assert part._counters is first
        part._counters = None  # of a GPU's kernels alone


# ---------------------------------------------------------------- vision by the CPU's kernels


def encoder(kernels):
    bundle: Any = registry.resolve("random-tiny")
    model: Any = bundle.load(torch.device("cpu"), torch.float32, LoadOptions(cpu_kernels=kernels))
    return model._network.vision, bundle.config.vision


@pytest.mark.skipif(library("auto") is None, reason="no C++ compiler or no AVX2 here")
def test_images_have_the_embeddings_of_torch():
    """Of one crop and of several."""
    ours, config = encoder("auto")
    theirs, _ = encoder("torch")
    assert ours.on_cpu is not None
    assert theirs.on_cpu is None
    size = config.crop_size
    generator = torch.Generator().manual_seed(0)
    for tiling in ((1, 1), (1, 2)):
        count = 1 if tiling == (1, 1) else 1 + tiling[0] * tiling[1]
        pixels = torch.randint(0, 256, (count, size, size, 3), generator=generator).byte()
        with torch.inference_mode():
            found, expected = ours(pixels, tiling), theirs(pixels, tiling)
        assert (found - expected).norm() / expected.norm() < 1e-5
