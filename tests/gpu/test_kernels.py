"""On a GPU: the decode step's kernels compute what torch computes, each token by itself.

Shape legend: B tokens, D width, V vocabulary, R rows of the token state and of the page table, M
pages per row, L layers, N pages, H heads, S positions per page, E head dim, P positions of a row.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, pages
from legato_engine.kernels.cuda import grouped, module
from legato_engine.kernels.cuda.attention import MAX_TOKENS
from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.decoder import MOST_TOKENS, LayerBoundary
from legato_engine.kernels.map_codes import KINDS, WeightKind, format_of
from legato_engine.kernels.parameters import ExpertWeights, Routes
from legato_engine.layers.mlp import ExpertLinear, MoE
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.config import (
    ARCHITECTURE_3,
    Gelu,
    MoEConfig,
    MoondreamConfig,
    TauConfig,
)
from legato_engine.models.moondream.decode_step import MoondreamStep
from legato_engine.models.moondream.model import MoondreamModel, Network
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_config,
)
from legato_engine.models.moondream.region import RegionCoder
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import DecodeBatch, KVCache

from tests.engine.kernels.cases import by_hand, dequantised, layers, quantised, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
ROWS, TOKENS, PAGE = 40, 38, 16
ONE_PASS = slice(0, MAX_TOKENS)
NEAR = 0.1
"""Router logits this close may be in either order, because they are rounded on the way."""


def shallow_moondream2() -> MoondreamConfig:
    """Moondream 2's widths in few layers."""
    return shallow(moondream2_config())


def shallow_moondream3(num_layers: int = 3, max_context: int = 2048) -> MoondreamConfig:
    """Moondream 3's widths in few layers, the first of them without experts."""
    config = moondream3_config()
    assert config.text.moe is not None
    moe = msgspec.structs.replace(config.text.moe, first_layer=1)
    return shallow(config, num_layers, moe=moe, max_context=max_context)


def narrow_moondream3() -> MoondreamConfig:
    """Moondream 3's kind at legato-tiny's widths, with gains of the other gelu."""
    config = legato_tiny_config()
    return msgspec.structs.replace(
        shallow(
            config,
            tau=TauConfig(gelu=Gelu.EXACT),
            moe=MoEConfig(first_layer=1, num_experts=16, num_active=3, inner_dim=192),
        ),
        architecture=ARCHITECTURE_3,
        region=msgspec.structs.replace(config.region, inner_dim=None, coord_reaches_one=True),
    )


def shallow(config: MoondreamConfig, num_layers: int = 3, **text: Any) -> MoondreamConfig:
    """Few layers, and other changes of the text part."""
    return msgspec.structs.replace(
        config,
        text=msgspec.structs.replace(config.text, num_layers=num_layers, **text),
        vision=msgspec.structs.replace(config.vision, num_layers=1),
    )


def long_moondream3() -> MoondreamConfig:
    """The same for long sequences."""
    return shallow_moondream3(num_layers=2, max_context=8192)


CONFIGS = {
    "legato-tiny": legato_tiny_config,
    "moondream2": shallow_moondream2,
    "legato-tiny-int8": legato_tiny_config,
    "legato-tiny-int4-kv8": legato_tiny_config,
    "moondream2-fp8-kv8": shallow_moondream2,
    "moondream2-int8": shallow_moondream2,
    "moondream2-int4-kv8": shallow_moondream2,
    "moondream3": shallow_moondream3,
    "moondream3-fp8-kv8": shallow_moondream3,
    "moondream3-int8": shallow_moondream3,
    "moondream3-int4": shallow_moondream3,
    "moondream3-int4-kv8": shallow_moondream3,
    "moondream3-e4m3": shallow_moondream3,
    "moondream3-e4m3-kv8": shallow_moondream3,
    "moondream3-long": long_moondream3,
    "moondream3-long-kv8": long_moondream3,
    "narrow3": narrow_moondream3,
    "narrow3-fp8": narrow_moondream3,
    "narrow3-int8": narrow_moondream3,
    "narrow3-int4": narrow_moondream3,
    "narrow3-e4m3": narrow_moondream3,
    "narrow3-kv8": narrow_moondream3,
}
"""By name: with e4m3 only experts are quantised, with kv8 keys and values."""


@dataclass(frozen=True, slots=True)
class World:
    """A model in bf16, the same weights in float32, its kernels, and pages of random contexts."""

    config: MoondreamConfig
    network: Network
    model: MoondreamModel
    exact: MoondreamModel
    kernels: MoondreamStep
    kv: KVCache
    table_RM: torch.Tensor

    @property
    def device(self) -> torch.device:
        """That of all tensors."""
        return self.table_RM.device

    def empty(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden state and logits that nothing has filled."""
        text = self.config.text
        hidden_BD = torch.full((batch, text.dim), torch.nan, dtype=self.model.dtype)
        logits_BV = torch.full((batch, text.vocab_size), torch.nan)
        return hidden_BD.to(self.device), logits_BV.to(self.device)

    def forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the kernels: hidden state and logits."""
        out = self.empty(len(inputs.row_B))
        self.kernels.forward(inputs, *out)
        return out

    def inputs(self) -> StepInputs:
        """A token for each of `TOKENS` rows: words and values, on all sides of pages' borders."""
        generator = torch.Generator(self.device).manual_seed(7)
        on: dict[str, Any] = {"device": self.device, "generator": generator}
        end = self.config.text.max_context
        token_R = torch.randint(10, self.config.text.vocab_size, (ROWS,), **on)
        token_R[::3], token_R[1::3] = self.config.tokens.coord, self.config.tokens.size
        position_B = torch.randint(0, end, (TOKENS,), **on)
        edges = [0, 1, 15, 16, 17, 255, 256, 511, 512, 513, end - 1, end // 2, end // 2 + 1]
        edges = [edge for edge in edges if edge < end]
        position_B[5 : 5 + len(edges)] = torch.tensor(edges, device=self.device)
        row_B = torch.randperm(ROWS, **on)[:TOKENS].contiguous()
        return StepInputs(
            source_B=row_B,
            row_B=row_B,
            position_B=position_B,
            fresh_B=position_B,
            prompt_token_B=torch.zeros_like(row_B),
            prompt_payload_B2=torch.zeros(TOKENS, 2, device=self.device),
            token_R=token_R,
            payload_R2=torch.rand(ROWS, 2, **on),
            page_table_RM=self.table_RM,
        )

    def snapshot(self) -> KVCache:
        """A copy of all keys and values."""
        kv = self.kv
        return KVCache(kv.k_LNHSE.clone(), kv.v_LNHSE.clone(), kv.scale_L2)

    def restore(self, kv: KVCache) -> None:
        """All keys and values back to a snapshot."""
        self.kv.k_LNHSE.copy_(kv.k_LNHSE)
        self.kv.v_LNHSE.copy_(kv.v_LNHSE)


@pytest.fixture(scope="module", params=CONFIGS)
def world(request):
    """As `make_world` makes it."""
    return make_world(request.param)


def make_world(name: str) -> World:
    """One of `CONFIGS`, on a GPU."""
    weights = next((kind for kind in KINDS if kind in name), None)
    kv8 = name.endswith("kv8")
    return world_of(CONFIGS[name](), DEVICE, e4m3="e4m3" in name, kv8=kv8, weights=weights)


def world_of(
    config: MoondreamConfig,
    device: torch.device,
    *,
    e4m3: bool = False,
    kv8: bool = False,
    weights: str | None = None,
) -> World:
    """A model with random weights; a row's pages are anywhere.

    With `e4m3` experts are quantised, with `kv8` keys and values, by `weights` maps and experts.
    """
    network = random_weights(config, 0, device, torch.bfloat16)
    if e4m3:
        quantise_experts(network)
    if weights is not None:
        if reason := network.text.cannot_quantise(KINDS[weights]):
            pytest.skip(reason)
        network.quantise(weights)
    text = config.text
    pages = -(-text.max_context // PAGE)
    shape = (text.num_layers, ROWS * pages + 1, text.num_heads, PAGE, text.head_dim)
    generator = torch.Generator(device).manual_seed(1)
    on: dict[str, Any] = {"device": device, "generator": generator}
    kv = KVCache(*(torch.randn(shape, dtype=torch.bfloat16, **on) for _ in range(2)))
    if kv8:
        kv = narrowed(kv, torch.rand(text.num_layers, 2, **on) * 0.01 + 0.01)
    table_RM = (torch.randperm(ROWS * pages, **on) + 1).view(ROWS, pages)
    model, exact = (MoondreamModel(config, n) for n in (network, copy.deepcopy(network).float()))
    kernels = MoondreamStep(config, network.text, network.region, kv)
    return World(config, network, model, exact, kernels, kv, table_RM)


def quantise_experts(network: Network) -> None:
    """Experts in e4m3: every other one of numbers so small that most are below the normal ones."""
    for layer in network.modules():
        if not isinstance(layer, ExpertLinear):
            continue
        weight_XOI = layer.weight
        scale_XO = weight_XOI.float().abs().amax(-1) / 448
        scale_XO[1::2] *= 448 / 2**-4
        layer.use_codes(format_of(WeightKind.E4M3))
        layer.weight.copy_(weight_XOI / scale_XO[..., None])
        assert layer.scale is not None
        layer.scale.copy_(scale_XO)


def narrowed(kv: KVCache, scale_L2: torch.Tensor) -> KVCache:
    """Keys and values in e4m3, in these units."""
    caches = []
    for cache_LNHSE, scale_L in zip((kv.k_LNHSE, kv.v_LNHSE), scale_L2.unbind(1), strict=True):
        layers = zip(cache_LNHSE, scale_L, strict=True)
        stored = [pages.indexable(pages.quantise(cache, scale)) for cache, scale in layers]
        caches.append(torch.stack(stored).view(pages.E4M3))
    k_LNHSE, v_LNHSE = caches
    return KVCache(k_LNHSE, v_LNHSE, scale_L2)


Index = tuple[slice, torch.Tensor, slice, torch.Tensor]
"""What `written` gives."""


def read(kv: KVCache, at: Index | None = None) -> list[torch.Tensor]:
    """Keys and values as numbers: all of them, or those at an index, layer by layer.

    A whole cache of long contexts in float32 is several GiB.
    """
    layers = range(len(kv.k_LNHSE))
    scale_L2 = torch.ones(len(layers), 2) if kv.scale_L2 is None else kv.scale_L2
    where = (...,) if at is None else at[1:]
    return [
        torch.stack([cache[layer].float().mul_(scale_L2[layer, i])[where] for layer in layers])
        for i, cache in enumerate((kv.k_LNHSE, kv.v_LNHSE))
    ]


def indexable(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as what can be indexed and compared."""
    return pages.indexable(kv.k_LNHSE), pages.indexable(kv.v_LNHSE)


def no_number(cache: torch.Tensor) -> float:
    """NaN in the form of `indexable`."""
    return 0x7F if cache.dtype is torch.uint8 else torch.nan


def decode_batch(inputs: StepInputs) -> DecodeBatch:
    """The tokens' positions, as torch's own decode takes them."""
    return DecodeBatch(inputs.position_B, inputs.page_table_RM[inputs.row_B])


def written(inputs: StepInputs) -> Index:
    """The index of the tokens' own keys or values in a cache."""
    page_B = inputs.page_table_RM[inputs.row_B, inputs.position_B // PAGE]
    return slice(None), page_B, slice(None), inputs.position_B % PAGE


@contextlib.contextmanager
def chosen(world: World) -> Iterator[None]:
    """Torch's own operations take the experts that the kernels' last step took.

    Near ties fall either way, and what follows then differs by more than rounding. They must be
    near ties: no expert that was left out is much likelier than one that was taken.
    """
    if world.kernels.expert_LBK is None:
        yield
        return
    assert world.config.text.moe is not None
    first = world.config.text.moe.first_layer
    layers = itertools.cycle(world.kernels.expert_LBK[first:].long())

    def route(logits_TX: torch.Tensor, num_active: int) -> Routes:
        expert_TK = next(layers)[: len(logits_TX)]
        taken_TK = logits_TX.gather(1, expert_TK).float()
        left_TX = logits_TX.float().scatter(1, expert_TK, -torch.inf)
        assert (taken_TK.amin(1) - left_TX.amax(1)).min() > -NEAR
        assert (taken_TK[:, :-1] - taken_TK[:, 1:]).min() > -NEAR
        assert (taken_TK.isfinite()).all()
        return Routes(expert_TK, taken_TK.softmax(-1).to(logits_TX.dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "route", route)
        yield


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def test_a_step_is_as_exact_as_torch(world):
    """Against float32 the kernels err no more than 1.2 times what torch errs in bf16."""
    a_step_is_as_exact_as_torch(world, min(MAX_TOKENS, world.kernels.max_tokens))


def a_step_is_as_exact_as_torch(world: World, batch: int) -> None:
    """That of the first tokens."""
    inputs = world.inputs().part(slice(0, batch))
    x_BD, _ = world.empty(batch)
    world.kernels.embed(inputs, x_BD)
    before, where = world.snapshot(), decode_batch(inputs)
    hidden_BD, logits_BV = world.forward(inputs)
    wide = KVCache(*read(before))
    with chosen(world):
        plain_BD = world.model.decode(x_BD, where, before)
        exact_BD = world.exact.decode(x_BD.float(), where, wide)
    exact_BV = world.exact.logits(exact_BD)
    assert error(hidden_BD, exact_BD) <= 1.2 * error(plain_BD, exact_BD)
    assert error(logits_BV, exact_BV) <= 1.2 * error(world.model.logits(plain_BD), exact_BV)
    at = written(inputs)
    for ours, torchs, truth in zip(*(read(kv, at) for kv in (world.kv, before, wide)), strict=True):
        assert error(ours, truth) <= 1.2 * error(torchs, truth)


def test_a_row_has_the_same_bits_in_any_batch(world):
    """A token's results are those that it has alone, also where a batch takes two passes."""
    a_row_has_the_same_bits_in_any_batch(world, range(1, TOKENS + 1))


def a_row_has_the_same_bits_in_any_batch(
    world: World, batches: Sequence[int], rows: Sequence[int] = ()
) -> None:
    """In the first and the last ones of up to the largest of these; `rows` are fewer to compare."""
    count = max(batches)
    inputs = world.inputs().part(slice(0, count))
    before = world.snapshot()
    single = {row: inputs.part(slice(row, row + 1)) for row in rows or range(count)}
    alone = {row: world.forward(each) for row, each in single.items()}
    written_alone = {
        row: [cache[written(each)] for cache in indexable(world.kv)] for row, each in single.items()
    }
    assert not any(logits.isnan().any() for _, logits in alone.values())
    for batch in batches:
        world.restore(before)
        for first in {0, count - batch}:
            some = range(first, first + batch)
            hidden, logits = world.forward(inputs.part(slice(first, first + batch)))
            for row in alone.keys() & set(some):
                assert torch.equal(hidden[row - first], alone[row][0][0]), (batch, row)
                assert torch.equal(logits[row - first], alone[row][1][0]), (batch, row)
    for row, each in single.items():
        for cache, alone_at in zip(indexable(world.kv), written_alone[row], strict=True):
            assert torch.equal(cache[written(each)], alone_at)


@pytest.mark.parametrize("batch", [1, 9, TOKENS])
def test_a_step_writes_its_own_slots_and_no_others(world, batch):
    """Every layer's keys and values change at the tokens' positions; nothing else does."""
    inputs = world.inputs().part(slice(0, batch))
    before, at = world.snapshot(), written(inputs)
    for ours in indexable(world.kv):
        ours[at] = no_number(ours)
    world.forward(inputs)
    assert all(values.isfinite().all() for values in read(world.kv, at))
    for ours, old in zip(indexable(world.kv), indexable(before), strict=True):
        ours[at] = old[at]
        assert torch.equal(ours, old)


def test_later_positions_never_reach_a_token(world):
    """With NaN everywhere but in a row's past the results keep their bits."""
    inputs = world.inputs()
    before = world.snapshot()
    expected = world.forward(inputs)
    try:
        for cache, old in zip(indexable(world.kv), indexable(before), strict=True):
            cache.fill_(no_number(cache))
            for row, position in zip(inputs.row_B, inputs.position_B, strict=True):
                past_P = torch.arange(position.item(), device=DEVICE)
                at = slice(None), world.table_RM[row, past_P // PAGE], slice(None), past_P % PAGE
                cache[at] = old[at]
        results = world.forward(inputs)
    finally:
        world.restore(before)
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("start", "count"), [(0, 20), (13, 5), (256, 31), (700, 37)])
def test_a_prompt_in_one_step_is_the_prompt_token_by_token(world, start, count):
    """Tokens of one sequence in one step, among others, attend to each other as if fed singly."""
    tokens, decoding = world.config.tokens, 1
    rows = world.inputs().part(slice(0, decoding + count))
    here = slice(decoding, None)
    position_B, row_B, source_B = rows.position_B.clone(), rows.row_B.clone(), rows.row_B.clone()
    position_B[here] = start + torch.arange(count, device=DEVICE)
    row_B[here], source_B[here] = row_B[decoding].item(), -1
    prompt_B = 20 + torch.arange(decoding + count, device=DEVICE)
    prompt_B[3], prompt_B[5] = tokens.coord, tokens.size
    payload_B2 = torch.rand(decoding + count, 2, device=DEVICE)
    fresh_B = position_B.clone()
    together = replace(
        rows,
        source_B=source_B,
        row_B=row_B,
        position_B=position_B,
        fresh_B=fresh_B,
        prompt_token_B=prompt_B,
        prompt_payload_B2=payload_B2,
    )
    one_by_one = [world.forward(together.part(slice(i, i + 1))) for i in range(decoding + count)]
    expected, at = world.snapshot(), written(together)
    for cache in indexable(world.kv):
        cache[at] = no_number(cache)
    fresh_B[here] = start
    results = world.forward(together)
    for ours, theirs in zip(results, zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(theirs))
    for cache, single in zip(indexable(world.kv), indexable(expected), strict=True):
        assert torch.equal(cache, single)


def test_tokens_are_embedded_with_their_values(world):
    """A word is its row of the table, to the bit; coordinates and sizes are encoded."""
    inputs, tokens = world.inputs().part(ONE_PASS), world.config.tokens
    x_BD, _ = world.empty(MAX_TOKENS)
    world.kernels.embed(inputs, x_BD)
    token_B, payload_B2 = inputs.token_R[inputs.source_B], inputs.payload_R2[inputs.source_B]
    expected_BD = world.model.embed(token_B, payload_B2)
    words_B = (token_B != tokens.coord) & (token_B != tokens.size)
    assert torch.equal(x_BD[words_B], expected_BD[words_B])
    for kind in (tokens.coord, tokens.size):
        assert (token_B == kind).any()
        assert error(x_BD[token_B == kind], expected_BD[token_B == kind]) < 5e-3


@pytest.mark.parametrize("batch", [1, 8, 13, MAX_TOKENS])
def test_bins_are_as_exact_as_torch(world, batch):
    """Both decoders' bins err no more than torch's, and a token's are those it has alone."""
    if batch > world.kernels.max_tokens:
        pytest.skip("more tokens than fit a launch on this GPU")
    tokens, width = world.config.tokens, world.config.text.dim
    hidden_BD = torch.randn(batch, width, device=DEVICE).to(world.model.dtype)
    region, exact = world.network.region, copy.deepcopy(world.network.region).float()
    for token, which in ((tokens.coord, 0), (tokens.size, 1)):
        token_B = torch.full((batch,), token, device=DEVICE)
        bins_BN = world.kernels.bins(token_B, hidden_BD)[which].clone()
        plain, truth = (torch_bins(part, hidden_BD)[which] for part in (region, exact))
        assert error(bins_BN, truth) <= 1.2 * error(plain, truth)
        for i in range(batch):
            alone_1N = world.kernels.bins(token_B[i : i + 1], hidden_BD[i : i + 1])[which]
            assert torch.equal(alone_1N[0], bins_BN[i])


def torch_bins(region: RegionCoder, hidden_BD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bins of coords and of sizes by torch's own operations."""
    hidden_BD = hidden_BD.to(region.coord_features.dtype)
    normed_BD = hidden_BD if region.ln is None else region.ln(hidden_BD)
    return region.coord_decoder(normed_BD), region.size_decoder(normed_BD)


def test_bins_that_no_token_needs_are_left_alone(world):
    """A batch of words changes neither decoder's bins, one of sizes only those of sizes."""
    if world.config.region.inner_dim is None:
        pytest.skip("both are one map, which is small")
    hidden_BD = torch.randn(4, world.config.text.dim, device=DEVICE).to(world.model.dtype)
    words_B = torch.full((4,), 50, device=DEVICE)
    for bins in world.kernels.bins(words_B, hidden_BD):
        bins.fill_(torch.nan)
    assert all(bins.isnan().all() for bins in world.kernels.bins(words_B, hidden_BD))
    words_B[2] = world.config.tokens.size
    coord_BN, size_BN = world.kernels.bins(words_B, hidden_BD)
    assert coord_BN.isnan().all()
    assert size_BN.isfinite().all()


def test_a_captured_step_follows_its_inputs(world):
    """A graph reads tokens, rows and positions when it runs, and gives the bits of a launch."""
    inputs = world.inputs().part(slice(0, 9))
    later = world.inputs().part(slice(9, 18))
    expected = world.forward(later)
    out = world.empty(9)
    replay = CudaDevice(0).capture(lambda: world.kernels.forward(inputs, *out))
    for name in ("source_B", "row_B", "position_B", "fresh_B"):
        getattr(inputs, name).copy_(getattr(later, name))
    replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.equal(ours, theirs)


REPLAYS = 50
"""In a row, so that a step begins while the one before it ends."""
TIMES = 20


@pytest.fixture(
    scope="module", params=["moondream2", "moondream3", "moondream3-e4m3", "moondream3-int4"]
)
def replayed(request: pytest.FixtureRequest) -> World:
    """A model's widths in few layers."""
    return make_world(request.param)


@pytest.mark.parametrize("batch", [1, 4, 8, 9, 16, 24, 32])
def test_steps_at_once_have_the_bits_of_one_alone(replayed, batch):
    """Hidden state and logits, in any of a thousand replays."""
    inputs = replayed.inputs().part(slice(0, batch))
    expected = replayed.forward(inputs)
    torch.cuda.synchronize()
    assert different_replays(replayed.kernels, inputs, expected) == [0, 0]


def different_replays(
    kernels: MoondreamStep, inputs: StepInputs, expected: tuple[torch.Tensor, torch.Tensor]
) -> list[int]:
    """Return how many of a thousand replays have another hidden state, and other logits."""
    out = tuple(torch.full_like(tensor, torch.nan) for tensor in expected)
    wrong = torch.zeros(len(out), dtype=torch.int64, device=DEVICE)

    def step() -> None:
        for tensor in out:
            tensor.fill_(torch.nan)
        kernels.forward(inputs, *out)
        for i, (ours, theirs) in enumerate(zip(out, expected, strict=True)):
            wrong[i] += (ours != theirs).any()

    replay = CudaDevice(0).capture(step)
    for _ in range(TIMES):
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    return wrong.tolist()


ONE_ROW = [(1, count) for count in range(1, MOST_TOKENS + 1)]
SEVERAL = [(2, 1), (2, 3), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)]


@pytest.fixture(scope="module")
def boundary() -> World:
    """Moondream 2's widths in few layers."""
    return make_world("moondream2")


@pytest.fixture(scope="module", params=["as they are", "late at random"])
def kernels(request: pytest.FixtureRequest, boundary: World) -> Iterator[MoondreamStep]:
    """The kernels, and those whose warps come to where others wait for them at any time."""
    texts = dict(module.sources())
    if request.param == "late at random":
        texts["common.cuh"] = "#define DELAYS\n" + texts["common.cuh"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sources", lambda: texts)
        network = boundary.network
        yield MoondreamStep(boundary.config, network.text, network.region, boundary.kv)


@pytest.mark.parametrize(("rows", "count"), [*ONE_ROW, *SEVERAL])
def test_the_kernel_between_layers_changes_no_bits(boundary, kernels, monkeypatch, rows, count):
    """Neither of logits nor of keys and values, in any of a thousand replays."""
    inputs = verification(boundary, rows, count)
    taken: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(LayerBoundary, "takes", lambda self, batch: False)
        expected = boundary.forward(inputs)
    wanted = boundary.snapshot()
    run = LayerBoundary.run

    def counted(*given: Any) -> None:
        taken.append(given)
        run(*given)

    monkeypatch.setattr(LayerBoundary, "run", counted)
    assert different_replays(kernels, inputs, expected) == [0, 0]
    assert taken
    for cache, single in zip(indexable(boundary.kv), indexable(wanted), strict=True):
        assert torch.equal(cache, single)


def verification(boundary: World, rows: int, count: int) -> StepInputs:
    """`count` successive tokens of each of `rows`, deep in their contexts."""
    some = boundary.inputs().part(slice(0, rows * count))
    at_B = torch.arange(rows * count, device=DEVICE)
    row_B = some.row_B[at_B // count].contiguous()
    fresh_B = 600 + 13 * (at_B // count)
    return replace(
        some,
        source_B=row_B,
        row_B=row_B,
        position_B=fresh_B + at_B % count,
        fresh_B=fresh_B,
        num_groups=rows,
    )


FIRST = torch.device("cuda", 0)
COUNT, MANY = 9, 100


@pytest.mark.parametrize("count", [COUNT, MANY])
def test_products_of_many_tokens_read_packed_experts(count):
    """Each weight rounded once to bf16; grouped or not, products are near the formula."""
    network = random_weights(narrow_moondream3(), 0, DEVICE, torch.bfloat16)
    network.quantise("int4")
    moe = next(module for module in network.modules() if isinstance(module, MoE))
    up, down = (layer.weights() for layer in moe.layers)
    exact = []
    for weights in (up, down):
        assert weights.packed is not None
        exact_XOI = weights.dense(torch.float32)
        assert torch.equal(weights.dense(torch.bfloat16), exact_XOI.bfloat16())
        assert torch.equal(weights.one(torch.bfloat16, 5), exact_XOI[5].bfloat16())
        exact.append(ExpertWeights(exact_XOI.cpu(), None))
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(count, exact[1].weight_XOI.shape[1], generator=generator)
    x_TD, routes = bfloat16(x_TD, ops.route(torch.randn(count, 16, generator=generator), 3))
    expected_TD = by_hand(x_TD, routes, *exact)
    there = Routes(routes.expert_TK.to(DEVICE), routes.share_TK.to(DEVICE))
    for capturable in (False, True):
        out_TD = ops.experts(x_TD.to(DEVICE), there, up, down, capturable=capturable)
        assert error(out_TD.cpu(), expected_TD) < 0.02


def on_gpu(layer):
    """The same weights there."""
    scale_XO = None if layer.scale_XO is None else layer.scale_XO.to(FIRST)
    return ExpertWeights(layer.weight_XOI.to(FIRST), scale_XO)


def bfloat16(x_TD, routes):
    """Tokens and routes in the dtype of the model."""
    return x_TD.bfloat16(), Routes(routes.expert_TK, routes.share_TK.bfloat16())


@pytest.fixture(scope="module", params=["plain", "e4m3"])
def weights(request):
    """Both layers of all experts in bfloat16 or e4m3, and as numbers to compute with."""
    up, down = layers(dtype=torch.bfloat16)
    if request.param == "plain":
        return up, down, up, down
    packed = [quantised(ExpertWeights(layer.weight_XOI.float(), None)) for layer in (up, down)]
    return *packed, *map(dequantised, packed)


@pytest.mark.parametrize("count", [COUNT, MANY])
@pytest.mark.parametrize("capturable", [False, True])
def test_experts_are_the_formula(weights, capturable, count):
    """What the device takes for prefills and for steps stays near the formula."""
    up, down, up_numbers, down_numbers = weights
    x_TD, routes = bfloat16(*tokens(count))
    expected_TD = by_hand(x_TD, routes, up_numbers, down_numbers)
    there = Routes(routes.expert_TK.to(FIRST), routes.share_TK.to(FIRST))
    out_TD = ops.experts(x_TD.to(FIRST), there, on_gpu(up), on_gpu(down), capturable=capturable)
    error = (out_TD.cpu().double() - expected_TD).abs().max()
    assert error < 0.03 * expected_TD.abs().max()


@pytest.mark.parametrize("count", [COUNT, MANY])
def test_a_captured_step_follows_its_routes(weights, count):
    """Replayed with other tokens, a graph gives what running the step with them gives."""
    up, down = map(on_gpu, weights[:2])
    x_TD, routes = bfloat16(*tokens(count))
    x_TD, expert_TK, share_TK = (
        tensor.to(FIRST) for tensor in (x_TD, routes.expert_TK, routes.share_TK)
    )
    out_TD = torch.empty_like(x_TD)

    def step() -> None:
        out_TD.copy_(ops.experts(x_TD, Routes(expert_TK, share_TK), up, down, capturable=True))

    device = CudaDevice(0)
    try:
        replay = device.capture(step)
        for seed in (1, 2):
            other_TD, other = bfloat16(*tokens(count, seed))
            x_TD.copy_(other_TD)
            expert_TK.copy_(other.expert_TK)
            share_TK.copy_(other.share_TK)
            device.compute.submit(replay)
            device.compute.record().wait()
            replayed_TD = out_TD.clone()
            device.compute.submit(step)
            device.compute.record().wait()
            assert torch.equal(replayed_TD, out_TD)
    finally:
        device.close()


@pytest.mark.parametrize("count", [COUNT, MANY])
def test_bfloat16_and_many_tokens_are_grouped(weights, count):
    """Plain weights go to one product each, e4m3 where widening all of it pays."""
    up, down = map(on_gpu, weights[:2])
    x_TD = tokens(count)[0].to(FIRST, torch.bfloat16)
    capable = runs(Kernels.GROUPED_EXPERTS, FIRST)
    grouped_anyway = up.scale_XO is None or count == MANY
    assert grouped.can_group(x_TD, up, down) is (capable and grouped_anyway)
