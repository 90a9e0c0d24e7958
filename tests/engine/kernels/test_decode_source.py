"""The CUDA sources of decode and drafting steps compile at every size, and stay in registers."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import pytest
import torch
from legato_engine.kernels.cuda import (
    adapters,
    capability,
    control_flow,
    draft_layer,
    module,
    skinny_gemm,
    tau_decoder,
    token_rows,
)
from legato_engine.kernels.cuda import decoder as layer_boundary
from legato_engine.kernels.cuda.attention import (
    MAX_CONTEXT,
    MAX_TOKENS,
    AttentionSizes,
    attend_defines,
    attention_forms,
)
from legato_engine.kernels.cuda.capability import gpu_of_arch
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    decode_defines,
    decode_forms,
    fitting_stages,
    head_defines,
)
from legato_engine.kernels.cuda.drafting import LOOKUP_SOURCE, SOURCE, RuleConstants
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.cuda.sampling import sampling_defines
from legato_engine.kernels.cuda.skinny_gemm import unpack_defines
from legato_engine.kernels.cuda.tau_decoder import (
    TauRows,
    expert_adapter_defines,
    expert_defines,
    tau_defines,
)
from legato_engine.kernels.cuda.value_heads import (
    embed_defines,
    value_argmax_defines,
    value_bins_defines,
)
from legato_engine.kernels.map_codes import GROUP, WeightKind
from legato_engine.models.moondream.text import WeightKinds
from legato_engine.speculation import (
    NO_COSTS,
    AdaptiveBlockPolicy,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from tests.engine.kernels.assembly import instructions, sections, text_at, under_way
from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_gemm import (
    CONFIGS,
    EXPERT_KINDS,
    EXPERT_STATIC,
    GAINS_STATIC,
    PAGE,
    RESERVED,
    dynamic_shared,
    expert_shared,
    expert_sizes,
    most_tokens,
    sizes_of,
)

pytestmark = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


ARCHS = (
    *("sm_80", "sm_90"),
    *(
        pytest.param(arch, marks=pytest.mark.slow)
        for arch in ("sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
    ),
)
"""One of each; only sm_90 and PTX of compute_80 have run."""
MODELS = [
    pytest.param(model, marks=[pytest.mark.slow] if model != "moondream2" else [])
    for model in CONFIGS
]
SOME_KINDS = [  # of experts; those of int8 compile as those of e4m3
    pytest.param(kinds, marks=[pytest.mark.slow] if kinds.experts is WeightKind.INT8 else [])
    for kinds in EXPERT_KINDS
]
TILES = [  # the largest batch takes the most registers
    pytest.param(tiles, marks=[pytest.mark.slow] if tiles < max(skinny_gemm.TILES) else [])
    for tiles in skinny_gemm.TILES
]
MOST_STACK = 32  # bytes of a thread's own memory: what sines take, or two spilled registers
FRAME_SIZE, REGISTERS = 0x11, 0x2F  # the numbers of these notes
MOST_REGISTERS = {
    "layer_in": 168,
    "layer_out": 168,
    "layer_boundary": 168,
    "attend": 176,
    "head": 168,
    "embed": 40,
    "value_inner": 168,
    "value_bins": 144,
    "packed_linear": 168,
    "unpack": 48,
    "shrink": 128,
    "expand": 128,
    "tau_in": 128,
    "gains": 80,
    "experts_up": 144,
    "experts_out": 112,
}
"""A thread's, reviewed: on any architecture, for any number of tokens.

The first round of inputs stays in registers where 32 tokens do not fit shared memory (8.0 and 8.7).
"""
SPILLS_OF_BLOCKS = 48
"""Bytes of stack, reviewed: of Q8_0 with 32 tokens before 9.0, of Q4_0 with 24 from 9.0 on."""
KERNELS = {
    "layer_maps.cu": {"layer_in", "layer_out"},
    "layer_boundary.cu": {"layer_boundary"},
    "paged_attention.cu": {"attend"},
    "head.cu": {"head"},
    "embed.cu": {"embed"},
    "value_bins.cu": {"value_inner", "value_bins"},
}


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a kernel takes: bytes of stack and registers per thread, and static shared memory."""

    stack: int
    static: int
    registers: int


def usages(code: bytes) -> dict[str, Usage]:
    """Every kernel of a cubin, which is an ELF file with its notes per kernel."""
    found = {section.name: section for section in sections(code)}
    notes, symbols = found[".nv.info"], found[".symtab"]
    stacks: dict[str, int] = {}
    registers: dict[str, int] = {}
    at, end = notes.start, notes.start + notes.size
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", code, at)
        if attribute in (FRAME_SIZE, REGISTERS):  # of a symbol's function
            symbol, count = struct.unpack_from("<II", code, at + 4)
            (name,) = struct.unpack_from("<I", code, symbols.start + symbol * 24)
            notes_of = stacks if attribute == FRAME_SIZE else registers
            notes_of[text_at(code, found[".strtab"].start + name)] = count
        at += 4 + (value if form == 4 else 0)
    return {
        name: Usage(
            stack,
            found[shared].size if (shared := f".nv.shared.{name}") in found else 0,
            registers[name],
        )
        for name, stack in stacks.items()
        if not name.startswith("$")  # a division's slow path is no kernel
    }


def forms(source: str, model: str) -> list[tuple[dict[str, int], int]]:
    """Constants of all forms of a source, and the most tokens of each."""
    decode, region = sizes_of(model)
    most = most_tokens(model)
    if source == "layer_maps.cu":
        made_forms = decode_forms(decode, most)
        return [(decode_defines(decode, form), 8 * form.tiles) for form in made_forms]
    if source == "layer_boundary.cu":
        served = layer_boundary.fits(decode)
        return (
            [(layer_boundary.layer_defines(decode, tiles=1), layer_boundary.MOST_TOKENS)]
            if served
            else []
        )
    if source == "paged_attention.cu":
        found = attention_forms(DEFAULT_STAGES.attend, DEFAULT_STAGES.attend_split)
        defines = (attend_defines(decode.attention, *form[:2]) for form in found)
        return [(each, MAX_TOKENS) for each in defines]
    if source == "embed.cu":
        return [(embed_defines(region), MAX_TOKENS)]
    vocab_size = CONFIGS[model].text.vocab_size
    made: dict[str, Callable[[int], dict[str, int]]] = {
        "head.cu": lambda tiles: head_defines(decode.dim, vocab_size, tiles),
        "value_bins.cu": lambda tiles: value_bins_defines(region, tiles),
    }
    return [(made[source](tiles), 8 * tiles) for tiles in skinny_gemm.tiles_up_to(most)]


@pytest.fixture(params=ARCHS)
def arch(request, monkeypatch):
    """An architecture, which launches are laid out for."""
    monkeypatch.setattr(capability, "current_gpu", lambda: gpu_of_arch(request.param))
    return request.param


@pytest.mark.parametrize("batches", ["largest", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("source", KERNELS)
def test_kernels_compile_without_spills(source, model, batches, arch):
    """Every kernel compiles, keeps its sums in registers, and fits beside its rings."""
    made = forms(source, model)
    most = max((batch for _, batch in made), default=0)
    for constants, batch in made:
        if batches == "largest" and batch < most:
            continue
        found = usages(module.compile_source(source, constants, arch))
        assert set(found) == KERNELS[source]
        dynamic = dynamic_shared(model, min(batch, most_tokens(model)))
        for kernel, usage in found.items():
            assert usage.stack <= MOST_STACK, kernel
            most_shared = gpu_of_arch(arch).shared + RESERVED
            assert usage.static + dynamic.get(kernel, 0) <= most_shared, kernel
            assert usage.registers <= MOST_REGISTERS[kernel], kernel


@pytest.mark.parametrize(
    "kind", [WeightKind.INT4, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))]
)
def test_quantised_weights_compile_without_spills(kind, arch):
    """The kernels of Moondream 2's maps in each format, for the most tokens of each launch."""
    kind = WeightKind(kind)
    kinds = {"weight_kind": kind, "head_kind": kind, "kv_bytes": 1}
    decode = dataclasses.replace(sizes_of("moondream2")[0], **kinds)
    stages = fitting_stages(decode, DEFAULT_STAGES)
    most = skinny_gemm.most_tokens(stages.layer_in, stages.layer_out, stages.head)
    compiled = [
        ("layer_maps.cu", decode_defines(decode, decode_forms(decode, most)[-1])),
        ("head.cu", head_defines(decode.dim, decode.vocab_size, most // 8, kind)),
        ("unpack.cu", unpack_defines(kind, skinny_gemm.chunk(decode.dim))),
    ]
    if layer_boundary.fits(decode):
        compiled.append(("layer_boundary.cu", layer_boundary.layer_defines(decode, tiles=1)))
    for source, defines in compiled:
        for kernel, usage in usages(module.compile_source(source, defines, arch)).items():
            assert usage.stack <= MOST_STACK, kernel
            assert usage.registers <= MOST_REGISTERS[kernel], kernel


@pytest.mark.parametrize("tiles", TILES)
def test_products_of_text_models_compile_without_spills(monkeypatch, tiles, arch):
    """With weights of any kind, GGUF's blocks too, and the copies for products of many tokens.

    Of a gated map, in as many blocks of rows as a thread block takes.
    """
    monkeypatch.setattr(skinny_gemm, "num_processors", lambda: 132)
    for kind in WeightKind:
        sizes = skinny_gemm.LinearSizes(2048, 12288, kind, gates=True)
        compiled = []
        if depth := skinny_gemm.linear_stages(sizes).get(tiles):
            compiled.append(("packed_linear.cu", sizes.defines(tiles, depth)))
        if tiles == max(skinny_gemm.TILES):
            compiled.append(("unpack.cu", unpack_defines(kind, 512)))
        for source, defines in compiled:
            for kernel, usage in usages(module.compile_source(source, defines, arch)).items():
                assert usage.stack <= SPILLS_OF_BLOCKS, (kernel, kind)
                assert usage.registers <= MOST_REGISTERS[kernel], (kernel, kind)


@pytest.mark.parametrize("kinds", SOME_KINDS)
@pytest.mark.parametrize("tiles", TILES)
def test_experts_compile_without_spills(tiles, kinds, arch):
    """So do the kernels of Moondream 3's layers; those of gains run beside those of experts."""
    sizes = expert_sizes(kinds)
    if 8 * tiles > tau_decoder.max_tokens(sizes):
        pytest.skip("more tokens than fit the architecture's shared memory")
    for routed in (False, True):
        kv_bytes = 1 if routed else 2
        decoder = dataclasses.replace(sizes.decoder, kv_bytes=kv_bytes)
        with_kv = dataclasses.replace(sizes, decoder=decoder)
        constants = tau_defines(with_kv, tiles, routed=routed)
        found = usages(module.compile_source("tau_layer.cu", constants, arch))
        assert set(found) == {"tau_in", "gains"}
        assert found["gains"].static <= GAINS_STATIC + RESERVED
        for kernel, usage in found.items():
            assert usage.stack <= MOST_STACK, kernel
            assert usage.registers <= MOST_REGISTERS[kernel], kernel
    found = usages(module.compile_source("experts.cu", expert_defines(sizes, tiles), arch))
    assert set(found) == set(expert_shared(kinds, 8 * tiles))
    for kernel, usage in found.items():
        assert usage.stack <= MOST_STACK, kernel
        assert usage.registers <= MOST_REGISTERS[kernel], kernel
        assert usage.static <= EXPERT_STATIC + RESERVED, kernel


@pytest.mark.parametrize("kinds", SOME_KINDS)
@pytest.mark.parametrize("room", [1, 8, 64])
def test_adapters_of_experts_compile_without_spills(room, kinds, arch):
    """So do those of their adapters, with room for any rank; they run beside the others."""
    sizes = expert_sizes(kinds)
    dim, inner = sizes.decoder.dim, sizes.experts.inner_dim
    for first, widths in ((True, (dim, 2 * inner)), (False, (inner, dim))):
        constants = expert_adapter_defines(sizes.experts, room, first=first)
        for part, kernel, width in zip(
            ("WIDTH", "OUTPUTS"), ("expert_shrink", "expert_expand"), widths, strict=True
        ):
            code = module.compile_source("expert_adapters.cu", {**constants, part: width}, arch)
            usage = usages(code)[kernel]
            assert usage.stack <= MOST_STACK
            assert usage.static <= GAINS_STATIC + 2 * RESERVED


@pytest.mark.parametrize(
    "rank", [512, *(pytest.param(r, marks=pytest.mark.slow) for r in (65, 256))]
)
def test_adapters_of_high_rank_compile_without_spills(rank, arch):
    """Two of their thread blocks run on a multiprocessor."""
    decode, _ = sizes_of("moondream2")
    for widths, norm in (((decode.dim, decode.ff_dim), True), ((decode.ff_dim, decode.dim), False)):
        for constants in adapters.tile_defines(*widths, rank, norm=norm):
            code = module.compile_source("adapter_tiles.cu", constants, arch)
            for kernel, usage in usages(code).items():
                assert usage.stack == 0, kernel
                assert usage.static <= gpu_of_arch(arch).shared // 2, kernel
                assert usage.registers <= MOST_REGISTERS[kernel], kernel


@pytest.mark.parametrize(
    ("context", "kv_bytes"),
    [
        (2048, 2),
        (MAX_CONTEXT, 1),
        pytest.param(2048, 1, marks=pytest.mark.slow),
        pytest.param(MAX_CONTEXT, 2, marks=pytest.mark.slow),
    ],
)
def test_attention_compiles_without_spills(context, kv_bytes, arch):
    """In short contexts and in long ones, over keys and values of both kinds."""
    sizes = dataclasses.replace(
        sizes_of("moondream2")[0].attention, max_pages=context // PAGE, kv_bytes=kv_bytes
    )
    attention_fits(sizes, arch)


def attention_fits(sizes, arch):
    """Every form of the architecture stays in registers."""
    stages = DEFAULT_STAGES.attend, DEFAULT_STAGES.attend_split
    for form in attention_forms(*stages, sizes.head_dim):
        defines = attend_defines(sizes, form.splits, form.line_warps)
        found = usages(module.compile_source("paged_attention.cu", defines, arch))
        assert all(u.stack <= MOST_STACK and u.static <= RESERVED for u in found.values())


@pytest.mark.parametrize(("num_heads", "share", "head_dim"), [(3, 3, 64), (8, 4, 64), (8, 2, 128)])
def test_attention_of_shared_heads_compiles_without_spills(num_heads, share, head_dim, arch):
    """As text models have them, within the rows of all heads."""
    sizes = AttentionSizes(
        num_heads=num_heads,
        page_size=PAGE,
        max_pages=MAX_CONTEXT // PAGE,
        out_stride=num_heads * share * head_dim,
        share=share,
        in_stride=num_heads * (share + 2) * head_dim,
        head_dim=head_dim,
    )
    attention_fits(sizes, arch)


@pytest.mark.parametrize(
    ("heads", "head_dim", "half", "normed"),
    [((9, 3), 64, 32, False), ((32, 32), 80, 16, False), ((16, 8), 128, 64, True)],
)
def test_token_rows_compile_without_spills(heads, head_dim, half, normed, arch):
    """With whole and with partly rotated heads, and with norms."""
    defines = token_rows.defines(heads[0], heads[1], head_dim, half, PAGE, normed=normed)
    found = usages(module.compile_source(token_rows.SOURCE, defines, arch))
    assert set(found) == {"rotate_and_cache", "gate"}
    assert all(u.stack == 0 for u in found.values())


@pytest.mark.parametrize("model", MODELS)
def test_sampling_compiles(model, arch):
    """The choice of a token and the reading of its value compile at every model's sizes."""
    config = CONFIGS[model]
    constants = sampling_defines(config.text.vocab_size, gpu_of_arch(arch))
    assert "sample" in usages(module.compile_source("sample.cu", constants, arch))
    constants = value_argmax_defines(sizes_of(model)[1])
    assert "value_argmax" in usages(module.compile_source("value_argmax.cu", constants, arch))


def test_a_kernel_that_spills_is_seen(monkeypatch):
    """The stack that the tests look at is there in a kernel that needs one."""
    monkeypatch.setattr(
        module,
        "sources",
        lambda: {
            "spill.cu": """extern "C" __global__ void spill(int* out, int at) {
                volatile int kept[64];
                for (int i = 0; i < 64; i++) kept[i] = out[i];
                out[0] = kept[at];
            }"""
        },
    )
    found = usages(module.compile_source("spill.cu", {}, "sm_90"))
    assert found["spill"].stack == 256


ROWS_PROBE = """#include "row_major_gemm.cuh"
using R = {rows};
static_assert(R::CHUNK == {chunk} && R::STAGE == {stage} && R::PADDING == {padding}, "rows");
extern "C" __global__ void probe() {{}}
"""


@pytest.mark.parametrize(
    ("kind", "packed"),
    [(WeightKind.BF16, 0), (WeightKind.INT8, 0), (WeightKind.E4M3, 1024), (WeightKind.INT4, 2048)],
)
@pytest.mark.parametrize("width", [64, 192, 320, 1024, 1280, 2048, 4096])
def test_the_header_agrees_on_rows(monkeypatch, width, kind, packed):
    """A stage of an expert's rows is as large as the launches count it."""
    rows = TauRows(width, kind, packed)
    sizes = {"chunk": rows.chunk, "stage": rows.stage, "padding": rows.padding}
    name = f"PackedRows<{width}, {packed}>" if packed else f"Rows<{width}, {kind:d}>"
    texts = module.sources() | {"probe.cu": ROWS_PROBE.format(rows=name, **sizes)}
    monkeypatch.setattr(module, "sources", lambda: texts)
    module.compile_source("probe.cu", {"WEIGHTS": int(kind)}, "sm_90")


PROBE = """#include "block_map.cuh"
static_assert({tiles} * {sum} * 2 * WARPS == sizeof(BlockSums<{tiles}>),
              "sums of blocks");
static_assert(4 * {tiles} * {sum} == sizeof(PartSums<{tiles}, 4>), "sums of parts");
static_assert(chunk_of({inputs}) == {chunk}, "chunk");
extern "C" __global__ void probe() {{}}
"""


@pytest.mark.parametrize("tiles", skinny_gemm.TILES)
@pytest.mark.parametrize("inputs", [64, 320, 448, 704, 1280, 2048, 2560, 8192])
def test_the_header_agrees_on_sizes(monkeypatch, tiles, inputs):
    """Sums and chunks of `block_map.cuh` are as large as the launches count them."""
    chunk = skinny_gemm.chunk(inputs)
    probe = PROBE.format(tiles=tiles, sum=skinny_gemm.SUM, inputs=inputs, chunk=chunk)
    texts = module.sources() | {"probe.cu": probe}
    monkeypatch.setattr(module, "sources", lambda: texts)
    module.compile_source("probe.cu", {}, "sm_90")


def test_portable_copies_have_no_policy():
    """The driver's compiler makes an illegal instruction of one with a policy."""
    defines = head_defines(320, 1536, 1, WeightKind.INT8)
    code = module.compile_source("head.cu", defines, "compute_80").decode()
    copies = [line for line in code.splitlines() if "cp.async.cg" in line]
    assert copies
    assert not [line for line in copies if "cache_hint" in line]


# ----------------------------------------------------------- launches around a speculating forward


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "policy",
    [
        FixedBlockPolicy(1),
        FixedBlockPolicy(16),
        AdaptiveBlockPolicy(),
        TokenBudgetPolicy(NO_COSTS),
    ],
)
def test_drafting_compiles(policy, arch):
    """For every rule, and for the smallest and the largest block."""
    sizes = {"ROWS": 32, "VOCAB": 51200, "GROUP": 8}
    found = usages(compile_source(SOURCE, {**RuleConstants.of(policy).defines, **sizes}, arch))
    assert set(found) == {"allot_blocks", "place", "settle"}
    assert all(usage.stack <= 8 for usage in found.values())  # a barrier of diverged threads
    assert usages(compile_source(LOOKUP_SOURCE, {}, arch))["lookup"].stack == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_the_choice_of_a_graph_compiles(arch):
    """Without a header: the driver provides the function that sets a conditional node."""
    assert usages(compile_source(control_flow.SWITCH_SOURCE, {}, arch))["choose"].stack == 0


@pytest.mark.parametrize(
    ("device", "dtype", "kv_dtype"),
    [
        ("cpu", torch.bfloat16, torch.bfloat16),
        ("cuda", torch.float32, torch.float32),
        ("cuda", torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_other_drafts_are_left_to_torch(device, dtype, kv_dtype):
    """Another device, other weights, keys and values that are not bf16, and a layer too wide."""
    sizes = draft_layer.DraftSizes(320, 1280, 5, 1536, 16, 64, 16)
    assert not draft_layer.supported(sizes, torch.device(device), dtype, kv_dtype)
    wide, bf16 = dataclasses.replace(sizes, inner=2760), torch.bfloat16
    assert not draft_layer.supported(wide, torch.device("cuda"), bf16, bf16)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("num_heads", "inner"), [(1, 64), (5, 1280), (16, 2048)])
def test_a_draft_compiles(num_heads, inner, arch):
    """For the shipped one, a small one and the widest; four of its rows fit shared memory."""
    dim = 64 * num_heads
    assert dim + inner <= draft_layer.WIDEST
    sizes = draft_layer.DraftSizes(
        dim, inner, num_heads, vocab_size=1536, page_size=16, max_pages=64, num_angles=16
    )
    found = usages(compile_source(draft_layer.SOURCE, sizes.defines, arch))
    assert set(found) == {f"draft_{name}" for name in ("join", "in", "attend", "out", "head")}
    assert all(usage.stack == 0 for usage in found.values())


# ---------------------------------------------------------------- stages that are released
# In the assembly no stage of weights is let go while reads of it are under way.
#
# The copy engine overwrites a stage as soon as all warps have arrived at its barrier, and nothing
# but
# the values orders a warp's reads before its arrival. On a GPU a violation shows in some launches
# only, and never on the emulated machine, where a read is over when the next instruction begins.

READERS = ["layer_maps.cu", "layer_boundary.cu", "head.cu", "value_bins.cu"]
DEPENDS = "(read & (gridDim.z - 1)) != 0"
"""What makes the arrival wait for values."""


def examined(source: str) -> dict[str, tuple[int, list[int]]]:
    """Every kernel of a source, of all its forms for Moondream 2."""
    return {
        f"{kernel}, {batch} tokens": under_way(instructions(code, kernel))
        for constants, batch in forms(source, "moondream2")
        for code in [module.compile_source(source, constants, "sm_90")]
        for kernel in KERNELS[source]
    }


@pytest.mark.parametrize("source", READERS)
def test_a_stage_is_let_go_when_its_values_are_there(source):
    """Stages of weights are found in every kernel, and none is let go before."""
    for kernel, (stages, early) in examined(source).items():
        assert stages > 0, kernel
        assert not early, kernel


def row_pieces(rows: TauRows) -> set[int]:
    """Return the bytes at which a lane reads a stage of rows: of two rows, 16 at a time."""
    size = rows.kind.bits // 8
    if rows.packed:
        run = skinny_gemm.chunk(rows.width)
        runs = range(0, rows.stage, rows.kind.stage_bytes(run))
        return {first + half for first in runs for half in (0, 512)[: max(1, 2 * size)]}
    groups = range(0, rows.chunk * size, skinny_gemm.WARPS * GROUP * size)
    halves = 0, rows.stage // 2
    return {g + 64 * piece + half for g in groups for piece in range(size) for half in halves}


def examined_experts(kinds: WeightKinds, tiles: int) -> dict[str, tuple[int, list[int]]]:
    """As `examined`, of Moondream 3's experts."""
    sizes = expert_sizes(kinds)
    rows = tau_decoder.up_rows(sizes), *tau_decoder.out_rows(sizes)
    layouts = [row_pieces(each) for each in rows]
    code = module.compile_source("experts.cu", expert_defines(sizes, tiles), "sm_90")
    kernels = expert_shared(kinds, 8 * tiles)
    return {kernel: under_way(instructions(code, kernel), layouts) for kernel in kernels}


@pytest.mark.parametrize("kinds", SOME_KINDS)
@pytest.mark.parametrize("tiles", TILES)
def test_a_stage_of_experts_is_let_go_when_its_values_are_there(kinds, tiles):
    """Likewise; a kernel has products for each number of tiles."""
    for kernel, (stages, early) in examined_experts(kinds, tiles).items():
        assert stages > 0, kernel
        assert not early, kernel


def test_a_release_that_waits_for_nothing_is_seen(monkeypatch):
    """Without the values in it the compiler does put an arrival before what waits for reads."""
    texts = dict(module.sources())
    assert texts["stage_ring.cuh"].count(DEPENDS) == 1
    texts["stage_ring.cuh"] = texts["stage_ring.cuh"].replace(DEPENDS, "false")
    monkeypatch.setattr(module, "sources", lambda: texts)
    assert any(early for _, early in examined("layer_boundary.cu").values())
    assert any(early for _, early in examined_experts(WeightKinds(), 1).values())
