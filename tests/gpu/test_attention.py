"""On a GPU: attention to pages, and fused attention of the tower, are exact in any group.

Shape legend: B tokens, H heads, E head dim, D = H * E, F width of the output's rows, R rows of the
page table, M pages per row, N pages, S positions per page, P positions of a row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, pages, reference
from legato_engine.kernels.cuda import fused_attention
from legato_engine.kernels.cuda.attention import (
    HEAD_DIM,
    MAX_CONTEXT,
    MAX_TOKENS,
    SPLITS,
    AttentionSizes,
    PagedAttention,
    StepPositions,
    splits_for,
)
from legato_engine.kernels.cuda.capability import Feature, Kernels, current_gpu, runs
from legato_engine.kernels.cuda.decoder import DEFAULT_STAGES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
HEADS, ROWS, CONTEXT, BEHIND = 32, 40, 2048, 24
WIDTH = HEADS * HEAD_DIM
EDGES = (0, 1, 7, 14, 15, 16, 17, 127, 128, 255, 256, 511, 512, 513, 850, CONTEXT - 9)
"""Positions at the ends of pages, steps and tracks."""
FAR = (4094, 4095, 4096, 4097, 4607, 4608, 5000, 8191, 8192, 12288, 16384, MAX_CONTEXT - 9)
"""The same after the steps whose pages a warp holds at first."""
WORLDS = {
    "pages of 16": (16, CONTEXT, torch.bfloat16),
    "pages of 32": (32, CONTEXT, torch.bfloat16),
    "pages of 64": (64, CONTEXT, torch.bfloat16),
    "e4m3": (16, CONTEXT, pages.E4M3),
    "e4m3, pages of 64": (64, CONTEXT, pages.E4M3),
    "long": (16, MAX_CONTEXT, torch.bfloat16),
    "long e4m3": (16, MAX_CONTEXT, pages.E4M3),
}
"""Positions per page, positions of a row, and the caches' dtype."""
SCALES = (0.0125, 0.007)
"""Units of keys and values of e4m3: some saturate."""
LAYOUTS = (1, 2, MAX_TOKENS)
"""Numbers of groups that make for each number of splits."""
MIXTURES = (
    *((count,) for count in range(1, 10)),
    (8, 8),
    (19, 13),
    (32,),
    (5, 1),
    (1,) * 8,
    (1,) * 32,
    (4,) * 8,
    (2,) * 16,
    (7, 7, 7, 7, 4),
    (1, 1, 1, 1, 1, 19, 3),
    (31, 1),
    (1, 31),
)
"""Tokens of the rows of a batch."""


@dataclass(frozen=True, slots=True)
class World:
    """Random keys and values in pages, assigned to rows in random order; and the kernel."""

    attention: PagedAttention
    k_NHSE: torch.Tensor
    v_NHSE: torch.Tensor
    table_RM: torch.Tensor
    scale_2: torch.Tensor | None

    @property
    def context(self) -> int:
        """Positions of a row."""
        return self.table_RM.shape[1] * self.k_NHSE.shape[2]

    @property
    def edges(self) -> tuple[int, ...]:
        """Positions to test."""
        return EDGES if self.context == CONTEXT else EDGES + FAR

    def attend(self, q_BD: torch.Tensor, positions: StepPositions) -> torch.Tensor:
        """The kernel's [B, D]; nothing else may be written."""
        batch = len(q_BD)
        out_BF = torch.full((MAX_TOKENS + 1, WIDTH + BEHIND), torch.nan, device=DEVICE)
        out_BF = out_BF.bfloat16()
        self.attention.launch(q_BD, self.k_NHSE, self.v_NHSE, positions, out_BF, self.scale_2)
        assert out_BF[batch:].isnan().all()
        assert out_BF[:, WIDTH:].isnan().all()
        return out_BF[:batch, :WIDTH].clone()

    def positions(self, tokens: Sequence[int], seed: int) -> StepPositions:
        """The given number of tokens of each of some rows, in order or the last first."""
        rng = random.Random(seed)
        row, position, fresh = [], [], []
        for name, count in zip(rng.sample(range(ROWS), len(tokens)), tokens, strict=True):
            start = min(
                rng.choice([*self.edges, rng.randrange(self.context)]), self.context - count
            )
            here = list(range(start, start + count))
            position += [here[-1], *here[:-1]] if rng.random() < 0.5 else here
            row += [name] * count
            fresh += [start] * count
        row_B, position_B, fresh_B = torch.tensor([row, position, fresh], device=DEVICE)
        return StepPositions(row_B, position_B, fresh_B, self.table_RM, num_groups=1)

    def seen(self, positions: StepPositions, index: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """[H, P, E]: the keys and the values that a token sees."""
        count, table_M = int(positions.position_B[index]) + 1, self.table_RM[positions.row_B[index]]
        scales = pages.units(self.scale_2)
        return [
            pages.dequantise(pages.gather_pages(cache, table_M, count), scale, dtype)
            .to(dtype)
            .transpose(0, 1)
            for cache, scale in zip((self.k_NHSE, self.v_NHSE), scales, strict=True)
        ]

    def expected(
        self, q_BD: torch.Tensor, positions: StepPositions, dtype: torch.dtype
    ) -> torch.Tensor:
        """[B, D] by torch."""
        out = []
        for index, q_D in enumerate(q_BD):
            k_HPE, v_HPE = self.seen(positions, index, dtype)
            q_H1E = q_D.view(HEADS, 1, HEAD_DIM).to(dtype)
            weights_H1P = (q_H1E @ k_HPE.mT / HEAD_DIM**0.5).softmax(-1)
            out.append((weights_H1P @ v_HPE).flatten())
        return torch.stack(out)


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    """Pages of every size and dtype in use."""
    size, context, dtype = WORLDS[request.param]
    count = context // size
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = (ROWS * count + 1, HEADS, size, HEAD_DIM)
    scale_2 = torch.tensor(SCALES, device=DEVICE) if dtype is pages.E4M3 else None
    caches = []
    for scale in pages.units(scale_2):
        random_NHSE = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        random_NHSE.normal_(generator=generator)
        parts = [pages.quantise(part, scale) for part in random_NHSE.chunk(8)]
        caches.append(torch.cat([pages.indexable(part) for part in parts]).view(dtype))
    table_RM = torch.randperm(ROWS * count, device=DEVICE, generator=generator) + 1
    sizes = AttentionSizes(
        num_heads=HEADS,
        page_size=size,
        max_pages=count,
        out_stride=WIDTH + BEHIND,
        kv_bytes=dtype.itemsize,
    )
    attention = PagedAttention(sizes, DEFAULT_STAGES.attend, DEFAULT_STAGES.attend_split)
    k_NHSE, v_NHSE = caches
    return World(attention, k_NHSE, v_NHSE, table_RM.view(ROWS, count), scale_2)


def queries(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """[B, D] random; the larger, the fewer positions matter."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(count, WIDTH, device=DEVICE, generator=generator) * scale).bfloat16()


def one(positions: StepPositions, index: int) -> StepPositions:
    """A token alone."""
    here = slice(index, index + 1)
    return replace(
        positions,
        row_B=positions.row_B[here],
        position_B=positions.position_B[here],
        fresh_B=positions.fresh_B[here],
    )


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((ours.double() - truth).norm() / truth.norm())


def test_layouts_cover_all_splits():
    """The numbers of groups used here run every form of the kernel that the GPU has."""
    own = SPLITS if current_gpu().has(Feature.CLUSTERS) else (1,)
    assert {splits_for(groups * HEADS) for groups in LAYOUTS} == set(own)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("tokens", [(1,) * 32, (8,) * 4, (1, 1, 19, 3)])
def test_it_is_as_exact_as_torch(world, tokens, scale):
    """Against float64 the kernel errs less than torch's operations in bf16."""
    positions = world.positions(tokens, seed=len(tokens))
    q_BD = queries(sum(tokens), 5, scale)
    truth_BD = world.expected(q_BD, positions, torch.float64)
    plain_BD = world.expected(q_BD, positions, torch.bfloat16)
    assert error(world.attend(q_BD, positions), truth_BD) < error(plain_BD, truth_BD)


@pytest.mark.parametrize("tokens", MIXTURES)
def test_a_token_has_the_same_bits_in_any_group(world, tokens):
    """Alone or with others of its row, in any order, however a head is shared."""
    positions, q_BD = world.positions(tokens, seed=sum(tokens)), queries(sum(tokens), 3)
    alone_BD = torch.cat(
        [
            world.attend(
                q_BD[i : i + 1], replace(one(positions, i), num_groups=LAYOUTS[i % len(LAYOUTS)])
            )
            for i in range(sum(tokens))
        ]
    )
    assert alone_BD.isfinite().all()
    for groups in LAYOUTS:
        together_BD = world.attend(q_BD, replace(positions, num_groups=groups))
        assert torch.equal(together_BD, alone_BD), groups


@pytest.mark.parametrize("groups", LAYOUTS)
def test_padding_gets_zeros(world, groups):
    """Padding, which writes only beyond its own position, changes no other token's bits."""
    positions, q_BD = world.positions((1, 5, 3, 8), seed=6), queries(17, 9)
    expected_BD = world.attend(q_BD, replace(positions, num_groups=groups))
    for idle in ([0], [3], [1, 2, 3, 4, 5], [8, 16], list(range(1, 17))):
        row_B, position_B, fresh_B = (
            field.clone() for field in (positions.row_B, positions.position_B, positions.fresh_B)
        )
        row_B[idle], position_B[idle], fresh_B[idle] = ROWS - 1, 0, 1
        padded = StepPositions(row_B, position_B, fresh_B, world.table_RM, groups)
        out_BD = world.attend(q_BD, padded)
        assert not out_BD[idle].any()
        kept = [index for index in range(17) if index not in idle]
        assert torch.equal(out_BD[kept], expected_BD[kept])


@pytest.mark.parametrize("start", [*range(18), 127, 128, 1023, 1024, 2040, *FAR])
def test_every_slot_of_a_page_can_be_the_last(world, start):
    """Eight tokens from any position on have the bits that they have alone."""
    if start + 8 > world.context:
        pytest.skip("rows are shorter")
    row_B = torch.full((8,), 7, device=DEVICE)
    position_B = start + torch.arange(8, device=DEVICE)
    fresh_B = torch.full_like(row_B, start)
    positions, q_BD = (
        StepPositions(row_B, position_B, fresh_B, world.table_RM, 1),
        queries(8, start),
    )
    together_BD = world.attend(q_BD, positions)
    truth_BD = world.expected(q_BD, positions, torch.float64)
    assert error(together_BD, truth_BD) < 4e-3
    for i in range(8):
        assert torch.equal(world.attend(q_BD[i : i + 1], one(positions, i))[0], together_BD[i])


@pytest.mark.parametrize("groups", LAYOUTS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_later_positions_never_reach_a_token(world, groups, poison):
    """A token keeps its bits when everything after it is NaN, its own group included."""
    positions = replace(world.positions((3, 8, 1, 5), seed=4), num_groups=groups)
    q_BD = queries(17, 8)
    expected_BD = world.attend(q_BD, positions)
    for kept in (0, 2, 3, 6, 11, 12, 15):
        row, last = int(positions.row_B[kept]), int(positions.position_B[kept])
        past_P, size = torch.arange(last + 1, device=DEVICE), world.k_NHSE.shape[2]
        at = world.table_RM[row, past_P // size], slice(None), past_P % size
        caches = []
        for cache_NHSE in (world.k_NHSE, world.v_NHSE):
            worst = torch.full((1,), poison, device=DEVICE).to(cache_NHSE.dtype)
            poisoned_NHSE = pages.indexable(worst).expand(cache_NHSE.shape).clone()
            poisoned_NHSE[at] = pages.indexable(cache_NHSE)[at]
            caches.append(poisoned_NHSE.view(cache_NHSE.dtype))
        out_BD = replace(world, k_NHSE=caches[0], v_NHSE=caches[1]).attend(q_BD, positions)
        assert torch.equal(out_BD[kept], expected_BD[kept]), kept


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("groups", LAYOUTS)
def test_nan_that_is_attended_to_is_reported(world, groups, which):
    """A token that attends to NaN has NaN in that head, and its own bits in the others."""
    row_B, position_B = torch.tensor([[5], [850]], device=DEVICE)
    positions, q_BD = (
        StepPositions(row_B, position_B, position_B, world.table_RM, groups),
        queries(1, 2),
    )
    expected_HE = world.attend(q_BD, positions).view(HEADS, HEAD_DIM)
    caches = [world.k_NHSE.clone(), world.v_NHSE.clone()]
    broken, size = caches[which == "values"], world.k_NHSE.shape[2]
    nan = pages.indexable(torch.full((1,), torch.nan, device=DEVICE).to(broken.dtype))
    pages.indexable(broken)[world.table_RM[5, 600 // size], 3, 600 % size] = nan
    k_NHSE, v_NHSE = caches
    out_HE = (
        replace(world, k_NHSE=k_NHSE, v_NHSE=v_NHSE).attend(q_BD, positions).view(HEADS, HEAD_DIM)
    )
    assert out_HE[3].isnan().all()
    others = [head for head in range(HEADS) if head != 3]
    assert torch.equal(out_HE[others], expected_HE[others])


CUDA = torch.device("cuda", 0)
SIZES = [(729, 16, 72), (730, 32, 64), (129, 3, 72), (256, 2, 64), (768, 5, 72), (1000, 4, 64)]

TOWER_ATTENTION = pytest.mark.skipif(
    not torch.cuda.is_available() or not runs(Kernels.TOWER_ATTENTION, CUDA),
    reason="needs a GPU of compute capability 8.0 or later",
)

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(params=["warpgroups", "warps"])
def either_kernel(request, monkeypatch):
    """By either kernel."""
    if request.param == "warps":
        monkeypatch.setattr(fused_attention, "has_warpgroups", lambda _: False)
    elif not fused_attention.has_warpgroups(CUDA):
        pytest.skip("needs Hopper's warpgroup products")
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def heads(count: int, tokens: int, num_heads: int, dim: int) -> Heads:
    """Views of one projection."""
    all_BT3HE = torch.randn(count, tokens, 3, num_heads, dim, device=CUDA).bfloat16()
    return all_BT3HE.select(2, 0), all_BT3HE.select(2, 1), all_BT3HE.select(2, 2)


def attended(*qkv_BTHE: torch.Tensor) -> torch.Tensor:
    """By the kernel, into memory that held no numbers."""
    trap = torch.full(qkv_BTHE[0].shape, torch.nan, device=CUDA, dtype=torch.bfloat16)
    del trap
    assert fused_attention.can_attend(*qkv_BTHE)
    return fused_attention.attend(*qkv_BTHE)


def exact(*qkv_BTHE: torch.Tensor) -> torch.Tensor:
    """In float64."""
    q_BHTE, k_BHTE, v_BHTE = (x.double().transpose(1, 2) for x in qkv_BTHE)
    scores_BHTT = q_BHTE @ k_BHTE.transpose(2, 3) / q_BHTE.shape[-1] ** 0.5
    return (scores_BHTT.softmax(-1) @ v_BHTE).transpose(1, 2)


@TOWER_ATTENTION
@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize(("tokens", "num_heads", "dim"), SIZES)
def test_it_errs_no_more_than_torch(tokens, num_heads, dim):
    """Against float64, on flat and on peaked scores; every row is written."""
    for count, gain in ((1, 1.0), (3, 4.0)):
        q_BTHE, k_BTHE, v_BTHE = heads(count, tokens, num_heads, dim)
        q_BTHE *= gain
        truth_BTHE = exact(q_BTHE, k_BTHE, v_BTHE)
        ours_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
        theirs_BTHE = reference.full_attention(q_BTHE, k_BTHE, v_BTHE)
        assert error(ours_BTHE, truth_BTHE) < 1.1 * error(theirs_BTHE, truth_BTHE)


@TOWER_ATTENTION
@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize(("tokens", "num_heads", "dim"), SIZES[:2])
def test_a_query_finds_its_key(tokens, num_heads, dim):
    """Where one score is far above the others, the result is that key's value, to the bit."""
    keys_TE = F.normalize(torch.randn(tokens, dim, device=CUDA), dim=-1) * 8 * dim**0.25
    order_T = torch.randperm(tokens, device=CUDA)
    q_BTHE, k_BTHE, v_BTHE = heads(2, tokens, num_heads, dim)
    q_BTHE.copy_(4 * keys_TE[order_T][:, None])
    k_BTHE.copy_(keys_TE[:, None])
    assert torch.equal(attended(q_BTHE, k_BTHE, v_BTHE), v_BTHE[:, order_T])


@TOWER_ATTENTION
@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize(("tokens", "num_heads", "dim"), SIZES[:2])
def test_bits_depend_on_nothing_but_the_sequence(tokens, num_heads, dim):
    """A sequence has the same bits alone, among 26, and after one of NaN."""
    q_BTHE, k_BTHE, v_BTHE = heads(26, tokens, num_heads, dim)
    whole_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
    for part in (slice(0, 1), slice(25, 26), slice(3, 12)):
        part_BTHE = attended(q_BTHE[part], k_BTHE[part], v_BTHE[part])
        assert torch.equal(part_BTHE, whole_BTHE[part])
    for broken in (q_BTHE, k_BTHE, v_BTHE):
        broken[1::2] = torch.nan
    assert torch.equal(attended(q_BTHE, k_BTHE, v_BTHE)[::2], whole_BTHE[::2])


@TOWER_ATTENTION
@pytest.mark.usefixtures("either_kernel")
def test_a_broken_head_breaks_no_other():
    """NaN stays in its head of its sequence, and is not lost there."""
    q_BTHE, k_BTHE, v_BTHE = heads(2, 729, 16, 72)
    whole_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
    v_BTHE[0, 728, 5] = torch.nan
    k_BTHE[1, 0, 15] = torch.nan
    broken_BTHE = attended(q_BTHE, k_BTHE, v_BTHE)
    expected_BTHE = whole_BTHE.clone()
    expected_BTHE[0, :, 5] = torch.nan
    expected_BTHE[1, :, 15] = torch.nan
    assert torch.equal(broken_BTHE.nan_to_num(7.0), expected_BTHE.nan_to_num(7.0))


@TOWER_ATTENTION
@pytest.mark.usefixtures("either_kernel")
def test_others_take_what_it_does_not():
    """Few tokens, other head sizes, dtypes and layouts go to torch, with the same result."""
    q_BTHE, k_BTHE, v_BTHE = heads(2, 729, 4, 72)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE)]
    for case in (
        heads(2, 96, 4, 72),  # no more than one block of keys
        heads(2, 729, 4, 80),
        tuple(x.float() for x in heads(1, 200, 2, 64)),
        by_head,
        (q_BTHE, k_BTHE, v_BTHE.contiguous()),
    ):
        assert not fused_attention.can_attend(*case)
        assert error(ops.full_attention(*case), exact(*case)) < 0.01


@TOWER_ATTENTION
@pytest.mark.usefixtures("either_kernel")
def test_a_captured_call_reads_its_inputs_anew():
    """A replay over other values gives what a call gives."""
    q_BTHE, k_BTHE, v_BTHE = heads(3, 729, 16, 72)
    out_BTHE = torch.empty(q_BTHE.shape, dtype=q_BTHE.dtype, device=CUDA)
    device = CudaDevice(0)

    def work() -> None:
        out_BTHE.copy_(ops.full_attention(q_BTHE, k_BTHE, v_BTHE))

    replay = device.capture(work)
    for _ in range(2):
        for x_BTHE in (q_BTHE, k_BTHE, v_BTHE):
            x_BTHE.copy_(torch.randn(x_BTHE.shape))
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        assert torch.equal(out_BTHE, fused_attention.attend(q_BTHE, k_BTHE, v_BTHE))
    device.close()
