"""Whole layers and packed products against float64, and the bits of a row."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from legato_engine.kernels.cpu.decoder import (
    KINDS,
    CpuDecoder,
    CpuLayer,
    CpuLowRank,
    CpuMap,
    CpuNorm,
    CpuRows,
    CpuSizes,
    PanelWeight,
    panel_kind,
)
from legato_engine.kernels.map_codes import CodeFormat, WeightKind
from legato_engine.kernels.parameters import AdapterRows, LowRankStack

from tests.engine.kernels.cases import FORMATS, random_codes

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
    """All positions of one sequence at once; `change` is added to each map's result."""
    form, x = made.form, x_TD.double()
    for index, layer in enumerate(made.layers):
        normed = norm64(layer.norm, x)
        qkv = map64(layer.qkv, normed) + change(index, "qkv", normed)
        qkv = qkv.unflatten(1, (-1, form.head_dim))
        q, k, v = qkv.split([form.heads, form.key_heads, form.key_heads], dim=1)
        if layer.query_norm is not None:
            q, k = norm64(layer.query_norm, q), norm64(layer.key_norm, k)
        q, k = rotated64(q, made.angles), rotated64(k, made.angles)
        k, v = (each.repeat_interleave(form.heads // form.key_heads, 1) for each in (k, v))
        scores = torch.einsum("the,lhe->htl", q, k) / math.sqrt(form.head_dim)
        shares = scores.masked_fill(~visible_TL, -torch.inf).softmax(-1)
        heads = torch.einsum("htl,lhe->the", shares, v).flatten(1)
        out = map64(layer.out, heads) + change(index, "out", heads)
        if layer.next_norm is None:
            inner = F.gelu(
                map64(layer.up, normed) + change(index, "up", normed), approximate="tanh"
            )
            down = map64(layer.down, inner) + change(index, "down", inner)
            x = x + out + down
        else:
            x = x + out
            normed = norm64(layer.next_norm, x)
            both = map64(layer.up, normed) + change(index, "up", normed)
            gate, up = both.chunk(2, dim=1)
            inner = F.silu(gate) * up
            x = x + map64(layer.down, inner) + change(index, "down", inner)
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


def test_rows_rotate_by_angles_of_their_own(library):
    """Those of its position give a row the same bits; others rotate it otherwise."""
    made = Made(library, FORMS["llama"])
    x_TD, pages_M = made.noise(50, DIM), pages_of(50)
    order_T = torch.randperm(50, generator=made.generator)

    def run(angles):
        rows = dataclasses.replace(made.rows(), angles=angles)
        part = made.decoder.span(x_TD[:49], 0, pages_M, rows, bidirectional=False)
        last = None if angles is None else tuple(each[49:50] for each in angles)
        rows = dataclasses.replace(rows, angles=last)
        step = made.decoder.decode(x_TD[49:], torch.tensor([49]), pages_M[None], rows)
        return torch.cat([part, step])

    expected_TD = run(None)
    assert torch.equal(run(tuple(each[:50] for each in made.angles)), expected_TD)
    cosines, sines = (each[:50][order_T] for each in made.angles)
    made.angles = cosines, sines  # of the reference
    causal_TL = torch.ones(50, 50, dtype=torch.bool).tril()
    near(run(made.angles), reference(made, x_TD, causal_TL), made.form)


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
@pytest.mark.parametrize("name", ["phi", "llama", "qwen3"])
def test_adapters_change_their_rows_alone(library, name, dtype):
    """Each row by its own slot and rank, as in float64; a row without one keeps its bits."""
    form, made = FORMS[name], Made(library, FORMS[name])
    ranks_S = torch.tensor([0, 3, 5])
    queries, keys = form.heads * form.head_dim, form.key_heads * form.head_dim
    widths = {
        "qkv": (DIM, queries, keys, keys),
        "out": (queries, DIM),
        "up": (DIM, INNER, INNER) if form.gated else (DIM, INNER),
        "down": (INNER, DIM),
    }
    stacks = {
        part: [
            LowRankStack(
                *((made.noise(LAYERS, 3, 5, width) / 4).to(dtype) for width in (inputs, output))
            )
            for output in outputs
        ]
        for part, (inputs, *outputs) in widths.items()
    }
    x_TD, pages_M = made.noise(12, DIM), pages_of(12)

    def low_rank(slots):
        return CpuLowRank(AdapterRows(torch.tensor(slots), ranks_S, 5), **stacks)

    def change(slot):
        def changed(layer, part, x):
            rank = ranks_S[slot]
            changes = [
                x @ a[layer, slot, :rank].double().T @ b[layer, slot, :rank].double()
                for a, b in stacks[part]
            ]
            return torch.cat(changes, dim=1)

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


# ---------------------------------------------------------------- weights
# Products of packed panels against float64, and their bits.
#
# Shape legend: T rows, I inputs, O outputs, K blocks of 32 inputs.

TALLEST = 260
WIDEST = 700


def random(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def packed(library, kind, weight_OI):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    return PanelWeight(library, weight_OI.to(dtype), kind)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, TALLEST),
    inputs=st.integers(1, WIDEST),
    outputs=st.integers(1, 150),
    threads=st.integers(1, 3),
    biased=st.booleans(),
)
@example(kind="bfloat16", rows=1, inputs=31, outputs=1, threads=1, biased=False)  # 15 pairs and one
def test_products_are_those_of_the_packed_weight(
    library, kind, rows, inputs, outputs, threads, biased
):
    """Any shape: within the rounding of float32, and of inputs of 16 bits for int8 and int4.

    With weights in bfloat16 inputs are rounded to that first.
    """
    torch.set_num_threads(threads)
    weight = packed(library, kind, random(outputs, inputs, 1))
    x_TI = random(rows, inputs)
    bias_O = random(1, outputs, 2)[0] if biased else None
    exact_OI = weight.rows(torch.arange(outputs)).double()
    read_TI = x_TI.bfloat16() if kind == "bfloat16" else x_TI
    expected_TO = F.linear(read_TI.double(), exact_OI, None if bias_O is None else bias_O.double())
    found_TO = weight.multiply(x_TI, bias_O).double()
    bound = 1e-6 if kind in ("float32", "bfloat16") else 1e-4
    size = x_TI.double().norm(dim=1, keepdim=True) * exact_OI.norm(dim=1) + 1.0
    assert ((found_TO - expected_TO).abs() / size).max() < bound


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_have_the_same_bits_in_any_batch_and_on_any_number_of_threads(library, kind):
    """A row gives the same bits whichever rows, and however many, run with it."""
    weight, x_TI = packed(library, kind, random(200, 590, 1)), random(TALLEST, 590)
    torch.set_num_threads(2)
    whole_TO = weight.multiply(x_TI, None)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for first, count in ((0, 1), (3, 2), (1, 3), (7, 4), (2, 5), (9, 6), (5, 7), (6, 130)):
            rows = slice(first, first + count)
            assert torch.equal(weight.multiply(x_TI[rows].clone(), None), whole_TO[rows])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("inputs", [590, 33])
def test_avx512_products_have_the_bits_of_avx2(library, avx2_library, kind, inputs):
    """One row and many, and weights that come back; values far apart among the inputs."""
    x_TI = random(150, inputs) * torch.logspace(-6, 6, 150)[:, None]
    x_TI[5, 7], x_TI[6, 8], x_TI[7] = torch.nan, torch.inf, 0.0
    ours, plain = (packed(each, kind, random(90, inputs, 1)) for each in (library, avx2_library))
    for rows in (1, 2, 6, 7, 150):
        found_TO, expected_TO = (each.multiply(x_TI[-rows:], None) for each in (ours, plain))
        assert torch.equal(found_TO.nan_to_num(7.0), expected_TO.nan_to_num(7.0))
    outputs = torch.arange(90)
    assert torch.equal(ours.rows(outputs), plain.rows(outputs))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_byte_is_packed(library, kind, monkeypatch):
    """Whatever was in the memory, also beyond the last output and input."""

    def bytes_in(filler):
        with monkeypatch.context() as patched:
            patched.setattr(
                torch, "empty", lambda size, dtype: torch.full((size,), filler, dtype=dtype)
            )
            weight = packed(library, kind, random(40, 70))
        linear = weight.described(None)
        return ctypes.string_at(linear.data, weight.nbytes)

    assert bytes_in(0) == bytes_in(255)


@pytest.mark.parametrize(
    ("kind", "most"), [("float32", 0.0), ("bfloat16", 0.0), ("int8", 0.51), ("int4", 0.51)]
)
def test_a_weight_is_rounded_to_the_nearest_value(library, kind, most):
    """By steps of its own block; floats keep their value."""
    weight_OI = random(40, 96, 3)
    if kind == "bfloat16":
        weight_OI = weight_OI.bfloat16().float()
    found_OI = packed(library, kind, weight_OI).rows(torch.arange(40))
    blocks_OKG = weight_OI.unflatten(1, (-1, 32))
    high_OK1, low_OK1 = (each.unsqueeze(2) for each in (blocks_OKG.amax(2), blocks_OKG.amin(2)))
    step_OK1 = (
        torch.maximum(high_OK1, -low_OK1) / 127 if kind == "int8" else (high_OK1 - low_OK1) / 15
    )
    error_OKG = (found_OI - weight_OI).unflatten(1, (-1, 32)).abs()
    assert (error_OKG <= most * step_OK1 + (1e-2 * step_OK1 if kind == "int4" else 0.0)).all()


def test_weights_of_a_gguf_file_keep_their_values(library):
    """Blocks of Q4_1 and of Q8_0, with scales and minima of any half, come back as they are."""
    generator = torch.Generator().manual_seed(0)
    scale_OK1, low_OK1 = (
        random(64, 3, seed).mul(0.01).half().float()[..., None] for seed in (1, 2)
    )
    scale_OK1 = scale_OK1.abs().clamp_min(2e-3).half().float()
    for kind, least, most, low in (("int4", 0, 15, low_OK1), ("int8", -127, 127, 0.0)):
        values_OKG = torch.randint(least, most + 1, (64, 3, 32), generator=generator)
        values_OKG[..., 0], values_OKG[..., 1] = least, most
        weight_OI = (values_OKG * scale_OK1 + low).flatten(1)
        found_OI = PanelWeight(library, weight_OI, kind).rows(torch.arange(64))
        torch.testing.assert_close(found_OI, weight_OI, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_keep_their_values(library, name):
    """Of each format a panel has the bits that dequantisation gives, and products are near."""
    codes = random_codes(name, 50, 384)
    kind = panel_kind(codes)
    assert kind is not None
    assert kind.endswith("single") == (FORMATS[name].scales is not torch.float16 or "large" in name)
    weight, exact_OI = PanelWeight(library, codes, kind), codes.dequantised()
    assert torch.equal(weight.rows(torch.arange(50)), exact_OI)
    x_TI = random(9, 384)
    whole_TO, expected_TO = weight.multiply(x_TI, None), F.linear(x_TI.double(), exact_OI.double())
    size = x_TI.double().norm(dim=1, keepdim=True) * exact_OI.double().norm(dim=1) + 1.0
    assert ((whole_TO - expected_TO).abs() / size).max() < 1e-4
    assert all(
        torch.equal(weight.multiply(x_TI[i : i + 1], None), whole_TO[i, None]) for i in (0, 8)
    )


def test_codes_without_panels_are_known():
    """Those of e4m3, and scales that a block of inputs does not share."""
    cpu = torch.device("cpu")
    others = (CodeFormat(WeightKind.E4M3), CodeFormat(WeightKind.INT8, 16, torch.float16))
    assert [panel_kind(each.empty((16, 64), cpu)) for each in others] == [None, None]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(library, kind, odd):
    """A row with one such input has no finite result, and other rows have theirs."""
    x_TI = random(3, 64)
    x_TI[1, 40] = odd
    found_TO = packed(library, kind, random(32, 64, 1)).multiply(x_TI, None)
    assert not found_TO[1].isfinite().any()
    assert found_TO[0].isfinite().all()
    assert found_TO[2].isfinite().all()
