"""Kernels of single steps on the emulated machine: what GPU tests ask of them, of small sizes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.kernels import ops, pages, reference
from legato_engine.kernels.cuda import fused_attention, quantise, skinny_gemm, token_rows
from legato_engine.kernels.cuda.attention import (
    MAX_TOKENS,
    SPLITS,
    AttentionSizes,
    PagedAttention,
    StepPositions,
    splits_for,
)
from legato_engine.kernels.cuda.decoder import DEFAULT_STAGES, MOST_TOKENS, LayerBoundary
from legato_engine.kernels.cuda.drafting import DraftKernels, LookupKernel
from legato_engine.kernels.map_codes import WeightKind
from legato_engine.kernels.pages import AttentionMetadata
from legato_engine.kernels.proposer import UNKNOWN, LookupProposer
from legato_engine.models.moondream.presets import legato_tiny_config
from legato_engine.speculation import TokenBudgetPolicy

from tests.emulator.module import CPU, EmulatedKernel, EmulatedModule
from tests.emulator.test_steps import PARTS
from tests.engine.kernels.cases import random_codes
from tests.engine.speculative.drafted import row_history
from tests.gpu.inputs import FLIPPED, assert_same
from tests.gpu.test_drafting import BLOCK, POLICIES, ROWS, VOCABULARY, Side
from tests.gpu.test_kernels import shallow, world_of
from tests.gpu.test_sampling import tokens_are_those_of_the_definition

HEADS, CONTEXT, TABLES = 2, 192, 6
GROUPS = (1, 2, 8)
"""Numbers of groups that make for each number of splits on the emulated machine."""


@pytest.mark.parametrize(
    ("vocab", "batch", "offsets"),
    [
        (256, 3, range(0, 8, 4)),
        pytest.param(1536, 4, range(0, 20, 5), marks=pytest.mark.slow),
        pytest.param(9000, 2, range(0, 8, 4), marks=pytest.mark.slow),
    ],
)
def test_sampled_tokens_are_those_of_the_definition(vocab: int, batch: int, offsets: range) -> None:
    """By one thread block, and by a cluster of up to four."""
    tokens_are_those_of_the_definition(vocab, batch, offsets, CPU)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("kind", [1, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in (0, 2))])
def test_packed_products_are_those_of_the_weights_that_are_read(kind: int, gates: bool) -> None:
    """Of widths that leave some warps of a stage without inputs, in several blocks of rows each."""
    torch.manual_seed(0)
    order_O = skinny_gemm.gate_order(OUTPUTS, CPU) if gates else None
    weight_OI = torch.randn(OUTPUTS, 384).bfloat16()
    check_products(skinny_gemm.packed_map(weight_OI, WeightKind(kind), order_O=order_O))


@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_K", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Q4_0", "Q4_1"))]
)
def test_products_of_blocks_are_those_of_their_values(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By the kernel of a few tokens, and all bits of the copy that many tokens are multiplied by.

    What `dequantised` undoes is the codes' own float32 values (test_gemm.py).
    """
    monkeypatch.setattr(skinny_gemm, "made_on", lambda _device, make, *of: make(*of))
    codes = random_codes(name, 32, 576, of_gpu=True)
    order_O = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    for order in (None, order_O):
        packed = skinny_gemm.pack_codes(codes, order_O=order)
        unpacked_OI = skinny_gemm._unpacked(packed, slice(0, 32), slice(64, 576))
        assert torch.equal(unpacked_OI, codes.dequantised()[:, 64:].bfloat16())
    check_products(skinny_gemm.pack_codes(random_codes(name, OUTPUTS, 576, of_gpu=True)))


OUTPUTS = 16 * 96
"""Rows of a map of which a thread block has several blocks on the emulated machine."""


@pytest.mark.usefixtures("portable_gpu")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", pytest.param("Q4_0", marks=pytest.mark.slow)])
def test_products_of_blocks_without_hoppers_features(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By copies of 16 bytes, which scales and minima of every kind of block divide into."""
    test_products_of_blocks_are_those_of_their_values(monkeypatch, name)


def check_products(packed: skinny_gemm.PackedMap) -> None:
    """A row has the same bits in any batch, and is near the product in float64.

    So it is added to another, and gated where rows are ordered for it.
    """
    gates = packed.order_O is not None
    sizes = skinny_gemm.LinearSizes(packed.inputs, packed.outputs, packed.kind, gates)
    assert max(sizes.blocks(*each) for each in skinny_gemm.linear_stages(sizes).items()) > 1
    kernels = skinny_gemm.LinearKernels(sizes)
    x_BI, bias_O = torch.randn(11, packed.inputs).bfloat16(), torch.randn(OUTPUTS).bfloat16()
    truth_BO = x_BI.double() @ packed.dequantised().double().t()
    whole_BO = kernels.run(x_BI, packed, bias_O)
    for batch in (11, 3):
        rows_BI, onto_BO = x_BI[:batch].contiguous(), torch.randn(batch, OUTPUTS).bfloat16()
        plain_BO = kernels.run(rows_BI, packed, bias_O)
        assert torch.equal(plain_BO, whole_BO[:batch])
        found = [(plain_BO, truth_BO[:batch] + bias_O.double())]
        wanted_BO = onto_BO.double() + truth_BO[:batch]
        added_BO = kernels.run(rows_BI, packed, None, onto_BO=onto_BO)
        assert added_BO is onto_BO
        found.append((added_BO, wanted_BO))
        if gates:
            gate_BF, up_BF = truth_BO[:batch].chunk(2, dim=1)
            gated_BF = kernels.run(rows_BI, packed, None, gated=True)
            found.append((gated_BF, torch.nn.functional.silu(gate_BF) * up_BF))
        for ours, truth in found:
            assert (ours.double() - truth).norm() < 0.005 * truth.norm()


@pytest.mark.parametrize(
    ("heads", "head_dim", "half", "normed"),
    [
        ((6, 2), 128, 64, True),
        ((2, 1), 16, 8, True),
        ((5, 2), 64, 32, True),
        ((3, 3), 80, 16, False),
    ],
)
def test_heads_are_normed_and_rotated_as_torch_does(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    head_dim: int,
    half: int,
    normed: bool,
) -> None:
    """Queries, keys, and every slot of the caches; others stay as they are."""
    monkeypatch.setattr(token_rows, "Module", EmulatedModule)
    monkeypatch.setattr(token_rows, "made_on", lambda _, make, *constants: make(*constants))
    torch.manual_seed(0)
    num_heads, num_kv = heads
    qkv_TGE = torch.randn(3, num_heads + 2 * num_kv, head_dim).bfloat16()
    angle_T1R, place_T = torch.rand(3, 1, half) * 6, torch.tensor([5, 16, 31])
    where = AttentionMetadata(angle_T1R.cos(), angle_T1R.sin(), place_T // 16, place_T % 16)
    norms = None
    if normed:
        norms = torch.nn.RMSNorm(head_dim, eps=1e-6), torch.nn.RMSNorm(head_dim, eps=1e-6)
        for norm in norms:
            norm.bfloat16().requires_grad_(requires_grad=False).weight.copy_(torch.randn(head_dim))
    caches = [torch.randn(2, num_kv, 16, head_dim).bfloat16() for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    k_NHSE, v_NHSE = expected
    heads_THE = ops.rotate_and_cache(qkv_TGE.clone(), where, k_NHSE, v_NHSE, norms=norms)
    angles, places = (where.cos_T1R, where.sin_T1R), (where.page_T, where.slot_T)
    token_rows.rotate_and_cache(qkv_TGE, angles, places, caches[0], caches[1], norms)
    for ours, theirs in ((qkv_TGE, torch.cat(heads_THE, 1)), *zip(caches, expected, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-6 * normed, atol=2.0**-6 * normed)
        assert (ours == theirs).float().mean() > 0.95


def test_the_gate_is_a_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one rounding of float64."""
    monkeypatch.setattr(token_rows, "Module", EmulatedModule)
    monkeypatch.setattr(token_rows, "made_on", lambda _, make, *constants: make(*constants))
    both_T2F = (torch.randn(3, 2 * 264, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    gate_TF, up_TF = both_T2F.double().chunk(2, dim=-1)
    exact_TF = torch.nn.functional.silu(gate_TF) * up_TF
    found_TF = token_rows.gate(both_T2F).double()
    torch.testing.assert_close(found_TF, exact_TF, rtol=1.1 * 2.0**-8, atol=1e-6)


@pytest.mark.parametrize("dim", [48, 1296])
def test_gelu_rows_less_a_centre_are_the_reference(
    monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """By a warp of a row, and by several; a lane's last load may be beyond the row."""
    monkeypatch.setattr(quantise, "Module", EmulatedModule)
    torch.manual_seed(0)
    x_TK, centre_K = (3 * torch.randn(5, dim)).bfloat16(), torch.rand(dim).bfloat16()
    kernels = quantise.QuantiseKernels(dim)
    ours = kernels.launch(kernels.gelu, x_TK, centre_K, overlap=True)
    assert_same(ours, reference.quantise_gelu(x_TK, centre_K), FLIPPED)


@pytest.mark.parametrize(
    ("tokens", "dim"),
    [(65, 72), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((140, 72), (100, 64)))],
)
def test_attention_of_warps_is_that_of_float64(
    monkeypatch: pytest.MonkeyPatch, tokens: int, dim: int
) -> None:
    """Full blocks of keys and a last one that is not; queries beyond the tokens write nothing."""
    monkeypatch.setattr(fused_attention, "Module", EmulatedModule)
    torch.manual_seed(0)
    heads_BT3HE = torch.randn(2, tokens, 3, 2, dim).bfloat16()
    q_BTHE, k_BTHE, v_BTHE = (heads_BT3HE.select(2, i) for i in range(3))
    kernel = fused_attention.WarpAttention(dim, 2, tokens)
    ours_BHTE = kernel(q_BTHE, k_BTHE, v_BTHE).double().transpose(1, 2)
    q_BHTE, k_BHTE, v_BHTE = (x.double().transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE))
    weights_BHTT = (q_BHTE @ k_BHTE.transpose(2, 3) / dim**0.5).softmax(-1)
    truth_BHTE = weights_BHTT @ v_BHTE
    assert (ours_BHTE - truth_BHTE).norm() < 0.005 * truth_BHTE.norm()


@pytest.mark.usefixtures("portable_gpu")
@pytest.mark.parametrize("vocab", [256, pytest.param(36000, marks=pytest.mark.slow)])
def test_tokens_sampled_without_clusters_are_those_of_the_definition(vocab: int) -> None:
    """By one thread block a row, whose values are in global memory where shared memory is full."""
    tokens_are_those_of_the_definition(vocab, 2, range(0, 8, 4), CPU)


@pytest.mark.parametrize(
    "name", ["budget", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fixed", "seed"))]
)
def test_drafting_launches_are_what_the_policies_do(name: str) -> None:
    """Random rows, rooms, gaps, ends and outcomes: the same blocks, positions and states."""
    device, sides = CpuDevice(1), []
    for by_kernels in (True, False):
        policy, draw = POLICIES[name](), random.Random(name)
        side = Side(device, 5, policy, by_kernels=False)
        if by_kernels:
            kernels = DraftKernels(policy, num_rows=ROWS, vocab_size=VOCABULARY, device=CPU)
            side.drafts.operations = kernels
            if isinstance(policy, TokenBudgetPolicy):
                side.drafts.set_costs(policy)
        said = []
        for launch in range(4):
            rows = draw.sample(range(ROWS), draw.randint(2, ROWS))
            rooms = [(row, draw.choice((BLOCK, draw.randint(-1, BLOCK)))) for row in rows]
            said.append(side.run(rooms, pressed=launch == 2))
        sides.append(said)
    device.close()
    assert sides[0] == sides[1]
    counts = [count for _, (counts, *_), *_ in sides[0] for count in counts]
    assert 0 in counts
    assert max(counts) > 1, "nothing was accepted"


def test_lookup_is_what_torch_does() -> None:
    """Random tokens of a few kinds, gaps and newest positions: the same drafts."""
    draw = torch.Generator().manual_seed(3)
    shape = (8, 300)
    tokens_RC = torch.randint(0, 5, shape, generator=draw)
    newest_R = torch.randint(0, shape[1], (shape[0],), generator=draw)
    tokens_RC[torch.arange(shape[1]) > newest_R[:, None]] = UNKNOWN
    tokens_RC[:2] = torch.randint(0, 1000, (2, shape[1]), generator=draw)  # nothing comes again
    history, said = row_history(tokens_RC, newest_R), []
    for lookup in (LookupProposer(), LookupKernel()):
        draft_RK = torch.full((shape[0], 8), 7)
        lookup.propose(history, draft_RK[:, :6])
        said.append(draft_RK.tolist())
    assert said[0] == said[1]
    assert any(UNKNOWN in row for row in said[0])


@dataclasses.dataclass(frozen=True)
class Cached:
    """Random keys and values in pages of a caches' dtype, in random order; and the kernel."""

    attention: PagedAttention
    k_NHSE: torch.Tensor
    v_NHSE: torch.Tensor
    table_RM: torch.Tensor
    scale_2: torch.Tensor | None

    @classmethod
    def random(cls, size: int, dtype: torch.dtype, head_dim: int) -> Cached:
        torch.manual_seed(size)
        count = CONTEXT // size
        scale_2 = torch.tensor([0.0125, 0.007]) if dtype is pages.E4M3 else None
        caches = []
        for scale in pages.units(scale_2):
            random_NHSE = torch.randn(TABLES * count + 1, HEADS, size, head_dim).bfloat16()
            caches.append(pages.indexable(pages.quantise(random_NHSE, scale)).view(dtype))
        sizes = AttentionSizes(
            num_heads=HEADS,
            page_size=size,
            max_pages=count,
            out_stride=HEADS * head_dim + 24,
            kv_bytes=dtype.itemsize,
            head_dim=head_dim,
        )
        attention = PagedAttention(sizes, DEFAULT_STAGES.attend, DEFAULT_STAGES.attend_split)
        k_NHSE, v_NHSE = caches
        table_RM = (torch.randperm(TABLES * count) + 1).view(TABLES, count)
        return cls(attention, k_NHSE, v_NHSE, table_RM, scale_2)

    def positions(self, tokens: Sequence[int]) -> StepPositions:
        """So many tokens of each of some rows."""
        draw, row, position, fresh = (
            random.Random(sum(tokens)),
            list[int](),
            list[int](),
            list[int](),
        )
        for name, count in zip(draw.sample(range(TABLES), len(tokens)), tokens, strict=True):
            start = draw.choice((0, 1, 15, 16, 17, 127, CONTEXT - count))
            position += range(start, start + count)
            row += [name] * count
            fresh += [start] * count
        row_B, position_B, fresh_B = torch.tensor([row, position, fresh])
        return StepPositions(row_B, position_B, fresh_B, self.table_RM, num_groups=1)

    def attend(self, q_BD: torch.Tensor, positions: StepPositions) -> torch.Tensor:
        """The kernel's [B, D]; nothing else may be written."""
        batch, width = q_BD.shape
        out_BF = torch.full((MAX_TOKENS + 1, width + 24), torch.nan).bfloat16()
        self.attention.launch(q_BD, self.k_NHSE, self.v_NHSE, positions, out_BF, self.scale_2)
        assert out_BF[batch:].isnan().all()
        assert out_BF[:, width:].isnan().all()
        return out_BF[:batch, :width].clone()

    def expected(self, q_BD: torch.Tensor, positions: StepPositions) -> torch.Tensor:
        """[B, D] by torch in float64."""
        out = []
        for q_D, row, position in zip(
            q_BD, positions.row_B.tolist(), positions.position_B.tolist(), strict=True
        ):
            k_HPE, v_HPE = (
                pages.dequantise(
                    pages.gather_pages(cache, self.table_RM[row], position + 1),
                    scale,
                    torch.float64,
                )
                .double()
                .transpose(0, 1)
                for cache, scale in zip(
                    (self.k_NHSE, self.v_NHSE), pages.units(self.scale_2), strict=True
                )
            )
            q_H1E = q_D.view(HEADS, 1, -1).double()
            out.append(((q_H1E @ k_HPE.mT / q_H1E.shape[2] ** 0.5).softmax(-1) @ v_HPE).flatten())
        return torch.stack(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype", "head_dim"),
    [
        *((16, torch.bfloat16, 64), (32, torch.bfloat16, 64), (16, pages.E4M3, 64)),
        *((16, torch.bfloat16, 128), (16, pages.E4M3, 128)),
    ],
    ids=str,
)
def test_attention_is_exact_and_a_token_has_the_same_bits_in_any_group(
    size: int, dtype: torch.dtype, head_dim: int
) -> None:
    """Alone or with others of its row, by one thread block or by clusters of two and four."""
    assert {splits_for(groups * HEADS) for groups in GROUPS} == set(SPLITS)
    cached = Cached.random(size, dtype, head_dim)
    for tokens in ((1,), (3, 1), (1, 9, 2)):
        positions = cached.positions(tokens)
        q_BD = torch.randn(sum(tokens), HEADS * head_dim).bfloat16()
        alone_BD = torch.cat(
            [
                cached.attend(
                    q_BD[i : i + 1],
                    dataclasses.replace(
                        positions,
                        row_B=positions.row_B[i : i + 1],
                        position_B=positions.position_B[i : i + 1],
                        fresh_B=positions.fresh_B[i : i + 1],
                        num_groups=GROUPS[i % len(GROUPS)],
                    ),
                )
                for i in range(sum(tokens))
            ]
        )
        truth_BD = cached.expected(q_BD, positions)
        assert (alone_BD.double() - truth_BD).norm() < 5e-3 * truth_BD.norm()
        for groups in GROUPS:
            together_BD = cached.attend(q_BD, dataclasses.replace(positions, num_groups=groups))
            assert torch.equal(together_BD, alone_BD), (tokens, groups)


# ---------------------------------------------------------------- layer boundary
# The kernel between two layers, on the emulated machine.
#
# Its thread blocks wait for each other, so all run at once here, too. They share the one copy of
# its
# `__shared__` variables, which are the same in all of them.

PROCESSORS = 24
"""One for each thread block."""
LAYERS = 3
"""The fewest that it takes."""


@pytest.mark.parametrize(
    "batch", [MOST_TOKENS, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (1, 5))]
)
def test_it_has_the_bits_of_a_kernel_for_each_end_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Hidden states, logits, keys and values of a step."""
    launched = []
    launch = EmulatedKernel.launch

    def at_once(self: EmulatedKernel, *arguments: Any, **options: Any) -> None:
        launched.append(self._name)
        if self._name == "emulate_layer_boundary":
            options["cooperative"] = True
        launch(self, *arguments, **options)

    monkeypatch.setattr(EmulatedKernel, "launch", at_once)
    monkeypatch.setattr(EmulatedKernel, "per_processor", lambda self, threads: 1, raising=False)
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: PROCESSORS)
    world = world_of(shallow(legato_tiny_config(), num_layers=LAYERS, **PARTS), CPU)
    inputs, before = world.inputs().part(slice(0, batch)), world.snapshot()
    across, written = world.forward(inputs), world.snapshot()
    assert launched.count("emulate_layer_boundary") == LAYERS + 1
    world.restore(before)
    launched.clear()
    monkeypatch.setattr(LayerBoundary, "takes", lambda self, batch: False)
    apart = world.forward(inputs)
    assert launched.count("emulate_layer_out") == LAYERS
    assert all(map(torch.equal, across, apart))
    assert torch.equal(written.k_LNHSE, world.kv.k_LNHSE)
    assert torch.equal(written.v_LNHSE, world.kv.v_LNHSE)
