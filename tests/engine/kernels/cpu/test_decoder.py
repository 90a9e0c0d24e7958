"""Whole layers against float64, and the bits of a row however its sequence is cut.

Shape legend as in `ops`: T tokens, D width, H heads, E head dim, L positions.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels.cpu.decoder import (
    CpuDecoder,
    CpuLayer,
    CpuLowRank,
    CpuMap,
    CpuNorm,
    CpuRows,
    CpuSizes,
    PanelWeight,
)
from legato_engine.kernels.parameters import AdapterRows

DIM, INNER, SLOTS, PAGES, LAYERS = 50, 70, 6, 40, 2
EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Form:
    """Of the layers."""

    gated: bool
    heads: int
    key_heads: int
    head_dim: int
    rotary: int
    normed_heads: bool = False
    kind: str = "float32"
    cache: torch.dtype = torch.float32


FORMS = {
    "llama": Form(True, 4, 2, 16, 16),
    "qwen3": Form(True, 4, 1, 24, 24, normed_heads=True),
    "phi": Form(False, 3, 3, 80, 32),
    "int8": Form(True, 4, 2, 16, 16, kind="int8"),
    "int4": Form(False, 3, 3, 16, 8, kind="int4"),
    "bf16": Form(True, 2, 2, 16, 16, kind="bfloat16", cache=torch.bfloat16),
}


class Made:
    """A decoder with noise for weights, and the same weights for the reference."""

    def __init__(self, library, form, seed=0):
        self.form = form
        self.generator = torch.Generator().manual_seed(seed)
        fused = (form.heads + 2 * form.key_heads) * form.head_dim
        inner = INNER * (2 if form.gated else 1)
        shapes = [(fused, DIM), (DIM, form.heads * form.head_dim), (inner, DIM), (DIM, INNER)]
        self.layers = []
        for _ in range(LAYERS):
            qkv, out, up, down = [
                CpuMap(
                    PanelWeight(library, self.noise(*shape) / 6, form.kind), self.noise(shape[0])
                )
                for shape in shapes
            ]
            norm, later = [self.norm(DIM, biased=not form.gated) for _ in range(2)]
            query, key = [self.norm(form.head_dim, biased=False) for _ in range(2)]
            self.layers.append(
                CpuLayer(
                    norm,
                    qkv,
                    out,
                    up,
                    down,
                    next_norm=later if form.gated else None,
                    query_norm=query if form.normed_heads else None,
                    key_norm=key if form.normed_heads else None,
                )
            )
        angle = torch.arange(PAGES * SLOTS)[:, None] / 7.0 ** torch.arange(form.rotary // 2)
        self.angles = angle.cos(), angle.sin()
        sizes = CpuSizes(form.heads, form.key_heads, form.head_dim, form.gated)
        self.decoder = CpuDecoder(library, self.layers, sizes, self.angles)

    def noise(self, *shape):
        values = torch.randn(*shape, generator=self.generator)
        return values.bfloat16().float() if self.form.kind == "bfloat16" else values

    def norm(self, width, *, biased):
        return CpuNorm(1 + self.noise(width) / 4, self.noise(width) if biased else None, EPSILON)

    def rows(self, adapters=None):
        shape = LAYERS, PAGES, self.form.key_heads, SLOTS, self.form.head_dim
        odd = torch.full(shape, torch.nan, dtype=self.form.cache)  # nothing unwritten is read
        return CpuRows(odd, odd.clone(), adapters)


def norm64(norm, x):
    width, gain = x.shape[-1:], norm.weight.double()
    if norm.bias is None:
        return F.rms_norm(x, width, gain, norm.epsilon)
    return F.layer_norm(x, width, gain, norm.bias.double(), norm.epsilon)


def map64(each, x):
    weight_OI = each.weight.rows(torch.arange(each.weight.out_features)).double()
    return F.linear(x, weight_OI, each.bias.double())


def rotated64(x_THE, angles):
    half = angles[0].shape[1]
    cos_T1R, sin_T1R = (each[: len(x_THE), None].double() for each in angles)
    first, second, rest = x_THE.split([half, half, x_THE.shape[2] - 2 * half], dim=2)
    turned = first * cos_T1R - second * sin_T1R, first * sin_T1R + second * cos_T1R
    return torch.cat([*turned, rest], dim=2)


def reference(made, x_TD, visible_TL, change=lambda layer, part, x: 0.0):
    """All positions of one sequence at once."""
    form, x = made.form, x_TD.double()
    for index, layer in enumerate(made.layers):
        normed = norm64(layer.norm, x)
        qkv = map64(layer.qkv, normed).unflatten(1, (-1, form.head_dim))
        q, k, v = qkv.split([form.heads, form.key_heads, form.key_heads], dim=1)
        if layer.query_norm is not None:
            q, k = norm64(layer.query_norm, q), norm64(layer.key_norm, k)
        q, k = rotated64(q, made.angles), rotated64(k, made.angles)
        k, v = (each.repeat_interleave(form.heads // form.key_heads, 1) for each in (k, v))
        scores = torch.einsum("the,lhe->htl", q, k) / math.sqrt(form.head_dim)
        shares = scores.masked_fill(~visible_TL, -torch.inf).softmax(-1)
        heads = torch.einsum("htl,lhe->the", shares, v).flatten(1)
        if layer.next_norm is None:
            inner = F.gelu(
                map64(layer.up, normed) + change(index, "up", normed), approximate="tanh"
            )
            down = map64(layer.down, inner) + change(index, "down", inner)
            x = x + map64(layer.out, heads) + down
        else:
            x = x + map64(layer.out, heads)
            gate, up = map64(layer.up, norm64(layer.next_norm, x)).chunk(2, dim=1)
            x = x + map64(layer.down, F.silu(gate) * up)
    return x


def pages_of(count, seed=0):
    """Pages in an order of their own, none of them the scratch page."""
    shuffled = 1 + torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed))
    return shuffled[: -(-count // SLOTS)]


def near(found, expected, form):
    bound = {"float32": 1e-5, "int8": 1e-3, "int4": 1e-3, "bfloat16": 2e-2}[form.kind]
    assert (found.double() - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("name", FORMS)
def test_layers_compute_what_float64_does(library, name):
    """A prompt in two parts, and a token after it; then a prefix that sees all of itself."""
    form, made = FORMS[name], Made(library, FORMS[name])
    x_TD, rows, pages_M = made.noise(90, DIM), made.rows(), pages_of(90)
    causal_TL = torch.ones(90, 90, dtype=torch.bool).tril()
    parts = [
        made.decoder.span(x_TD[:70], 0, pages_M, rows, bidirectional=False),
        made.decoder.span(x_TD[70:89], 70, pages_M, rows, bidirectional=False),
        made.decoder.decode(x_TD[89:], torch.tensor([89]), pages_M[None], rows),
    ]
    near(torch.cat(parts), reference(made, x_TD, causal_TL), form)
    seen_TD = made.decoder.span(x_TD, 0, pages_M, made.rows(), bidirectional=True)
    near(seen_TD, reference(made, x_TD, torch.ones_like(causal_TL)), form)


@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_number_of_threads(library, name):
    """One token at a time, in chunks of any size, beside other sequences and padding."""
    made = Made(library, FORMS[name])
    sequences = [made.noise(count, DIM) for count in (37, 20, 9)]
    tables = [pages_of(37, seed) for seed in range(3)]
    alone = []
    torch.set_num_threads(1)
    for x_TD, pages_M in zip(sequences, tables, strict=True):
        alone.append(made.decoder.span(x_TD, 0, pages_M, made.rows(), bidirectional=False))
    for threads, sizes in ((1, (1, 3, 5)), (2, (16, 1, 20)), (3, (7, 30))):
        torch.set_num_threads(threads)
        for x_TD, pages_M, expected in zip(sequences, tables, alone, strict=True):
            rows, at, found = made.rows(), 0, []
            for size in sizes * 20:
                if at < len(x_TD):
                    part = x_TD[at : at + size]
                    found.append(made.decoder.span(part, at, pages_M, rows, bidirectional=False))
                    at += len(part)
            assert torch.equal(torch.cat(found), expected)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together(made, sequences, alone)


@pytest.mark.parametrize("name", FORMS)
def test_avx512_has_the_bits_of_avx2(library, avx2_library, name):
    """Whole layers of a prompt, then of a token."""
    found = []
    for each in (library, avx2_library):
        made = Made(each, FORMS[name])
        x_TD, rows, pages_M = made.noise(60, DIM), made.rows(), pages_of(60)
        found.append(made.decoder.span(x_TD[:59], 0, pages_M, rows, bidirectional=False))
        found.append(made.decoder.decode(x_TD[59:], torch.tensor([59]), pages_M[None], rows))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def together(made, sequences, alone):
    """Steps of all sequences, drafts of one and padding among them."""
    rows, width = made.rows(), 7
    tables = [torch.arange(1 + i * width, 1 + (i + 1) * width) for i in range(len(sequences))]
    scratch = torch.zeros(width, dtype=torch.int64)
    for at in range(0, 36, 2):
        live = [i for i, x_TD in enumerate(sequences) for _ in range(2) if at + 2 <= len(x_TD)]
        positions = [at + n % 2 for n in range(len(live))]
        x = [sequences[i][position] for i, position in zip(live, positions, strict=True)]
        x_BD = torch.stack([*x[:2], torch.full((DIM,), 9.0), *x[2:]])
        table_BM = torch.stack(
            [*(tables[i] for i in live[:2]), scratch, *(tables[i] for i in live[2:])]
        )
        positions_B = torch.tensor([*positions[:2], 0, *positions[2:]])
        found_BD = made.decoder.decode(x_BD, positions_B, table_BM, rows)
        found_BD = torch.cat([found_BD[:2], found_BD[3:]])
        for each_D, i, position in zip(found_BD, live, positions, strict=True):
            assert torch.equal(each_D, alone[i][position])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_change_their_rows_alone(library, dtype):
    """Each row by its own slot and rank, as in float64; a row without one keeps its bits."""
    made = Made(library, FORMS["phi"])
    ranks_S = torch.tensor([0, 3, 5])
    shapes = (5, DIM), (5, INNER), (5, INNER), (5, DIM)
    up_a, up_b, down_a, down_b = ((made.noise(LAYERS, 3, *shape) / 4).to(dtype) for shape in shapes)
    x_TD, pages_M = made.noise(12, DIM), pages_of(12)

    def low_rank(slots):
        return CpuLowRank(up_a, up_b, down_a, down_b, AdapterRows(torch.tensor(slots), ranks_S, 5))

    def change(slot):
        def changed(layer, part, x):
            a, b = (up_a, up_b) if part == "up" else (down_a, down_b)
            rank = ranks_S[slot]
            return x @ a[layer, slot, :rank].double().T @ b[layer, slot, :rank].double()

        return changed

    causal_TL = torch.ones(12, 12, dtype=torch.bool).tril()
    plain = made.decoder.span(x_TD, 0, pages_M, made.rows(), bidirectional=False)
    found = []
    for slot in range(3):
        rows = made.rows(low_rank([slot]))
        found.append(made.decoder.span(x_TD, 0, pages_M, rows, bidirectional=False))
        near(found[-1], reference(made, x_TD, causal_TL, change(slot)), made.form)
    assert torch.equal(found[0], plain)
    rows = made.rows(low_rank([0, 1, 2]))
    table_BM = torch.arange(1, 1 + 3 * 2).view(3, 2)
    for at in range(12):
        x_BD, positions_B = x_TD[at].expand(3, DIM), torch.full((3,), at)
        step_BD = made.decoder.decode(x_BD, positions_B, table_BM, rows)
        for each_D, expected_TD in zip(step_BD, found, strict=True):
            assert torch.equal(each_D, expected_TD[at])


def test_keys_and_values_alone(library):
    """`caches_only` writes what the whole pass writes."""
    made, x_TD, pages_M = Made(library, FORMS["phi"]), torch.randn(20, DIM), pages_of(20)
    whole, caches = made.rows(), made.rows()
    made.decoder.span(x_TD, 0, pages_M, whole, bidirectional=True)
    made.decoder.span(x_TD, 0, pages_M, caches, bidirectional=True, caches_only=True)
    for one, other in ((whole.k_LNHSE, caches.k_LNHSE), (whole.v_LNHSE, caches.v_LNHSE)):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
