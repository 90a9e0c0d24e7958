"""The decoder.

Shape legend: T tokens, B rows of one token, D width, V vocabulary; C sequences of P positions, M
pages of one.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from legato_engine.kernels import ops
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.map_codes import (
    GROUP,
    CodeFormat,
    MapCodes,
    WeightKind,
    format_of,
)
from legato_engine.kernels.pages import AttentionMetadata, LayerCache, PlacedSpan, Span
from legato_engine.kernels.parameters import (
    Affine,
    DecoderLayer,
    DenseMlp,
    ExpertMlp,
    TauWeights,
)
from legato_engine.kernels.step import (
    HEAD_DIM,
    FoldedCodes,
    LayerCodes,
    QuantisedHead,
    QuantisedLayer,
    has_step_kernels,
    head_codes,
    layer_codes,
    quantised_head,
    quantised_layer,
)
from legato_engine.layers.attention import Attend, Attention, Heads, Tau
from legato_engine.layers.cpu import ungated_decoder, ungated_layer
from legato_engine.layers.fp8 import Centres, Fp8Attention, Fp8MLP
from legato_engine.layers.linear import Linear, TileCounters
from legato_engine.layers.lora import AdaptedRows, BlockAdapters, LayerAdapters
from legato_engine.layers.mlp import MLP, MoE
from legato_engine.layers.rope import Rope
from legato_engine.models.moondream.config import TextConfig
from legato_engine.models.paged_attention import (
    Chunk,
    DecodeBatch,
    KVCache,
    PrefillSpan,
    chunk_attention,
    chunk_metadata,
    span_attention,
    span_metadata,
    stacked_attention,
    stacked_metadata,
    step_attention,
    step_metadata,
)

_CALIBRATION_TOKENS = 64
_KV_MARGIN, _E4M3_MOST, _LEAST_KV = 8.0, 448.0, 1e-6


class WeightKinds(NamedTuple):
    """Kinds of packed maps, of the head, and of experts' weights, as a decode step reads them."""

    maps: WeightKind = WeightKind.BF16
    head: WeightKind = WeightKind.BF16
    experts: WeightKind = WeightKind.BF16


# The residual stream is their sum.
Terms = tuple[torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class StoredMap(nn.Module):
    """Codes of a quantised checkpoint, in place of the weights of `maps`.

    With a norm before them, whose outputs are all the maps' inputs, `bias` is float32, in place of
    theirs; without one the maps are beside each other.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, code_format: CodeFormat, maps: Sequence[Linear], *, has_norm: bool) -> None:
        super().__init__()
        self._kind = code_format.kind
        outputs, inputs = maps[0].out_features, maps[0].in_features
        if has_norm:
            outputs = sum(each.out_features for each in maps)
        else:
            inputs = sum(each.in_features for each in maps)
        empty = code_format.empty((outputs, inputs), maps[0].weight.device)
        assert empty.scales is not None, "only bf16 has no scales"
        self.register_buffer("codes", empty.codes)
        self.register_buffer("scales", empty.scales)
        self.register_buffer("bias", empty.scales.new_empty(outputs, dtype=torch.float32))
        if not has_norm:
            self.bias = None
        for each in maps:
            each.register_parameter("weight", None)
            if has_norm:
                each.register_parameter("bias", None)

    def map(self) -> MapCodes:
        return MapCodes(self._kind, self.codes, self.scales)

    def folded(self) -> FoldedCodes:
        assert self.bias is not None, "a map after a norm has its shift"
        return FoldedCodes(self.map(), self.bias)


class TextBlock(nn.Module):
    """Attention and MLP of the same normed input, added in one residual.

    The residual stream is one or three terms, so that the next norm can be fused with their sum.
    The second of three may be overwritten.
    """

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = Attention(config.dim, config.num_heads, _tau(config))
        self.mlp = _mlp(config, layer)
        self.quantised: QuantisedLayer | None = None
        self.qkv_fc1: StoredMap | None = None
        self.fc2_proj: StoredMap | None = None

    @property
    def norm(self) -> Affine:
        """The norm of the checkpoint: of a quantised layer `ln` has no scale and no shift."""
        if isinstance(self.mlp, MoE):
            return affine(self.mlp.ln or self.ln)
        return self.mlp.adapter_norm or affine(self.ln)

    def parameters_for_kernels(self) -> DecoderLayer:
        """Return what decode steps read."""
        attention, mlp, tau = self.attn, self.mlp, self.attn.tau
        weights: DenseMlp | ExpertMlp
        if isinstance(mlp, MoE):
            weights = ExpertMlp(affine(mlp.router), mlp.fc1.weights(), mlp.fc2.weights())
        else:
            weights = DenseMlp(affine(mlp.fc1), affine(mlp.fc2))
        return DecoderLayer(
            norm=self.norm,
            qkv=affine(attention.qkv),
            proj=affine(attention.proj),
            mlp=weights,
            tau=None if tau is None else TauWeights(tau.wqwv, tau.gain_PH),
            packed=None if self.quantised is None else self.quantised.weights,
        )

    def quantise(self, kind: WeightKind, num_heads: int) -> None:
        """Replace the weights by one packed copy, with the norm in it; round and pack experts."""
        norm, codes = self.norm, self.codes(format_of(kind))
        own = quantised_layer(codes, self.parameters_for_kernels(), num_heads)
        self.quantised, self.qkv_fc1, self.fc2_proj = own, None, None
        self.attn.qkv.take(own.qkv, own.qkv_bias)
        self.attn.proj.take(own.proj, self.attn.proj.bias)
        if isinstance(self.mlp, MoE):
            self.mlp.ln = copy.deepcopy(self.ln)
            for layer in self.mlp.layers:
                if layer.kind is WeightKind.BF16:
                    layer.quantise(format_of(kind))
                layer.pack()
        else:
            self.mlp.fc1.take(own.fc1, own.fc1_bias)
            self.mlp.fc2.take(own.fc2, self.mlp.fc2.bias)
            self.mlp.adapter_norm = Affine(norm.weight.data, norm.bias.data)
        _make_plain(self.ln)

    def codes(self, code_format: CodeFormat) -> LayerCodes:
        """Return a quantised checkpoint's codes, or quantise the weights."""
        if self.qkv_fc1 is None or self.fc2_proj is None:
            return layer_codes(self.parameters_for_kernels(), code_format)
        return LayerCodes(self.qkv_fc1.folded(), self.fc2_proj.map())

    def expect_codes(self, code_format: CodeFormat) -> None:
        """Have a quantised checkpoint's tensors in place of weights, before loading."""
        into, out = self._joined
        self.qkv_fc1 = StoredMap(code_format, into, has_norm=True)
        self.fc2_proj = StoredMap(code_format, out, has_norm=False)
        if isinstance(self.mlp, MoE):
            for layer in self.mlp.layers:
                layer.use_codes(code_format)

    def dequantise(self) -> None:
        """Turn a quantised checkpoint's codes into weights, with the norm taken out again."""
        assert self.qkv_fc1 is not None, "no codes were loaded"
        assert self.fc2_proj is not None, "no codes were loaded"
        into, out = self._joined
        _unfold(self.qkv_fc1.folded(), self.ln, into)
        weights = self.fc2_proj.map().dequantised().to(self.ln.weight.dtype)
        for each, own in zip(
            out, torch.split(weights, [m.in_features for m in out], 1), strict=True
        ):
            each.weight = nn.Parameter(own.contiguous(), requires_grad=False)
        self.qkv_fc1 = self.fc2_proj = None
        if isinstance(self.mlp, MoE):
            for layer in self.mlp.layers:
                layer.dequantise(self.ln.weight.dtype)

    @property
    def _joined(self) -> tuple[list[Linear], list[Linear]]:
        """The maps that are quantised above each other, and those beside each other."""
        into, out = [self.attn.qkv], [self.attn.proj]
        if isinstance(self.mlp, MLP):
            into, out = [*into, self.mlp.fc1], [self.mlp.fc2, *out]
        return into, out

    def forward(
        self,
        terms: Terms,
        where: AttentionMetadata | Span | PlacedSpan,
        positions_T: torch.Tensor,
        cache: LayerCache,
        attend: Attend,
        adapters: BlockAdapters | None,
    ) -> Terms:
        x, normed = _normed(terms, self.ln)
        heads = self._write(normed, where, positions_T, cache)
        if isinstance(self.mlp, MoE) and self.mlp.ln is not None:
            normed = self.mlp.ln(x)
        mlp = self._feed_forward(normed, adapters, capturable=isinstance(where, AttentionMetadata))
        return x, self.attn.join(attend(*heads, cache)), mlp

    def cpu_layer(self) -> cpu.CpuLayer | None:
        """Return this layer for a CPU decoder, once it is packed; None with gains or experts."""
        if self.attn.tau is not None or not isinstance(self.mlp, MLP):
            return None
        return ungated_layer(self.ln, self.attn.qkv, self.attn.proj, self.mlp)

    def cache(
        self,
        terms: Terms,
        where: AttentionMetadata | Span | PlacedSpan,
        positions_T: torch.Tensor,
        cache: LayerCache,
    ) -> None:
        self._write(_normed(terms, self.ln)[1], where, positions_T, cache)

    def _write(
        self,
        normed: torch.Tensor,
        where: AttentionMetadata | Span | PlacedSpan,
        positions_T: torch.Tensor,
        cache: LayerCache,
    ) -> Heads:
        qkv: torch.Tensor = self.attn.qkv(normed)
        qkv_T3HE = qkv.view(normed.shape[0], 3, cache.k_NHSE.shape[1], -1)
        if self.attn.tau is not None:
            qkv_T3HE = self.attn.tau(qkv_T3HE, positions_T)
        return ops.rotate_and_cache(qkv_T3HE.flatten(1, 2), where, *cache)

    def _feed_forward(
        self, normed: torch.Tensor, adapters: BlockAdapters | None, *, capturable: bool
    ) -> torch.Tensor:
        """Run the MLP or experts; those of a step are `capturable` on every device."""
        out: torch.Tensor
        if isinstance(self.mlp, MoE):
            assert not isinstance(adapters, LayerAdapters), "experts have adapters of their own"
            out = self.mlp(normed, adapters, capturable=capturable)
        else:
            out = self.mlp(normed, adapters)
        return out


class Fp8TextBlock(nn.Module):
    """A loaded `TextBlock` without gains and experts whose maps are in e4m3."""

    def __init__(self, block: TextBlock, num_heads: int) -> None:
        super().__init__()
        mlp = block.mlp
        assert isinstance(mlp, MLP), "experts are not in e4m3"
        self.ln = copy.deepcopy(block.ln)  # packing makes the block's own plain
        centres = Centres.zeros(mlp.fc1.in_features, mlp.fc2.in_features, self.ln.weight.device)
        self.attn = Fp8Attention(block.attn, num_heads, self.ln, centres)
        self.mlp = Fp8MLP(mlp, self.ln, centres)

    def forward(
        self,
        terms: Terms,
        where: AttentionMetadata | Span | PlacedSpan,
        _positions_T: torch.Tensor,
        cache: LayerCache,
        attend: Attend,
        adapters: BlockAdapters | None,
    ) -> Terms:
        assert adapters is None, "low-rank changes are of the maps in bf16"
        x, normed = _normed(terms, self.ln)
        rows = ops.quantise(normed)
        qkv_TCE = self.attn.qkv.multiply(rows).view(len(normed), -1, cache.k_NHSE.shape[3])
        heads = ops.rotate_and_cache(qkv_TCE, where, *cache)
        return x, self.attn.join(attend(*heads, cache)), self.mlp(rows)


class Text(nn.Module):
    """Embedding table, decoder blocks and head."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(TextBlock(config, i) for i in range(config.num_layers))
        self.post_ln = nn.LayerNorm(config.dim)
        self.lm_head = Linear(config.dim, config.vocab_size)
        self.rope = Rope(config.rope_theta, config.rotary_dim, config.max_context)
        self._counters: TileCounters | None = None
        self._num_heads = config.num_heads
        self._map_kind = WeightKind.BF16
        self.quantised_head: QuantisedHead | None = None
        self.head: StoredMap | None = None
        self._on_cpu: cpu.CpuDecoder | None = None
        self.image_blocks: Sequence[TextBlock | Fp8TextBlock] = ()

    def use_fp8(self) -> None:
        """Add copies of loaded blocks in e4m3, for images without adapters, unless there are any.

        Gains and experts stay, and the last block, of which an image needs keys and values only.

        Raises:
            InvalidField: the device or a layer does not allow it.
        """
        if self.image_blocks:
            return
        *blocks, last = self.text_blocks()
        copies = (
            block
            if block.attn.tau is not None or isinstance(block.mlp, MoE)
            else Fp8TextBlock(block, self._num_heads)
            for block in blocks
        )
        self.image_blocks = (*copies, last)

    def use_library(self, library: Library) -> None:
        """Run layers that are packed for it in one call, unless they have gains or experts."""
        layers = [block.cpu_layer() for block in self.blocks if isinstance(block, TextBlock)]
        heads, dims = self._num_heads, self.wte.shape[1] // self._num_heads
        angles = self.rope.cos_PR, self.rope.sin_PR
        self._on_cpu = ungated_decoder(library, layers, heads, dims, angles)

    def quantise(self, kind: WeightKind) -> None:
        """Replace all loaded maps by one packed copy each; layer by layer, to take less memory.

        The head has 8 bits also with int4, which costs it more accuracy than all layers together.
        """
        self._map_kind = kind
        for block in self.text_blocks():
            block.quantise(kind, self._num_heads)
        self.quantised_head = own = quantised_head(self.codes_of_head(format_of(kind)))
        self.head = None
        self.lm_head.take(own.map, own.bias)
        _make_plain(self.post_ln)

    def codes_of_head(self, code_format: CodeFormat) -> FoldedCodes:
        """Return a quantised checkpoint's codes, or quantise the weights."""
        if self.head is not None:
            return self.head.folded()
        return head_codes(affine(self.lm_head), affine(self.post_ln), code_format.of_head)

    def expect_codes(self, code_format: CodeFormat) -> None:
        """Have a quantised checkpoint's tensors in place of maps, before loading."""
        for block in self.text_blocks():
            block.expect_codes(code_format)
        self.head = StoredMap(code_format.of_head, [self.lm_head], has_norm=True)

    def dequantise(self) -> None:
        """Turn a quantised checkpoint's codes into weights, for a CPU."""
        for block in self.text_blocks():
            block.dequantise()
        assert self.head is not None, "no codes were loaded"
        _unfold(self.head.folded(), self.post_ln, [self.lm_head])
        self.head = None

    def text_blocks(self) -> Iterator[TextBlock]:
        for block in self.blocks:
            assert isinstance(block, TextBlock), "a decoder has one kind of block"
            yield block

    def cannot_quantise(self, kind: WeightKind = WeightKind.BF16) -> str | None:
        """Return why no kernels would read maps packed so, or None."""
        device = self.wte.device
        if device.type == "cuda" and not has_step_kernels(device):
            return "needs a GPU of compute capability 8.0 or later"
        if self._experts():
            if kind is WeightKind.BF16:
                return "is not for experts, which have no second copy"
            if self.kinds.experts not in (WeightKind.BF16, kind):
                return "is for a checkpoint whose experts have that kind or are not quantised"
        dim, dtype = self.wte.shape[1], self.wte.dtype
        if dtype is not torch.bfloat16:
            return f"computes in bf16, not in {dtype}".replace("torch.", "")
        if dim != self._num_heads * HEAD_DIM or dim % GROUP:
            return f"takes heads of {HEAD_DIM} dimensions"
        return None

    def dense_head(self) -> Affine:
        """Return the head in bf16, a copy if it is quantised."""
        if self.quantised_head is None:
            return affine(self.lm_head)
        weight_VD = self.quantised_head.map.dense()
        return Affine(weight_VD, self.lm_head.bias.to(weight_VD.dtype))

    @property
    def runs_by_library(self) -> bool:
        return self._on_cpu is not None

    @property
    def has_chunks(self) -> bool:
        """Return whether `chunk` reads nothing on the host, as experts in groups do not."""
        experts = (module for module in self.modules() if isinstance(module, MoE))
        return all(each.runs_grouped(self.wte) for each in experts)

    def count_apart(self) -> None:
        """Clear the tile counters of `cache_stacked` at once; then only one such pass may run.

        They are those of the first call: graphs that were captured since read them.
        """
        if self._counters is not None:
            return
        tall: list[Linear] = [attention.qkv for attention in self._attentions()]
        tall += [module.fc1 for module in self.modules() if isinstance(module, MLP)]
        self._counters = TileCounters(tall, self.wte.device)

    def fill(self, device: torch.device) -> None:
        """Compute tables by position, after the weights are on their device."""
        self.rope.fill(device)
        for module in self.modules():
            if isinstance(module, Tau):
                module.fill()

    def use_expert_codes(self, code_format: CodeFormat) -> None:
        for experts in self._experts():
            for layer in experts.layers:
                layer.use_codes(code_format)

    def use_fp8_kv(self) -> None:
        """Add scales for keys and values, before loading."""
        for block in self._attentions():
            block.use_fp8_kv()

    def calibrate_kv(self, seed: int = 0) -> None:
        """Add scales for keys and values in e4m3 by those of random tokens.

        Eight times the largest value stays below the largest code, and codes are exact to three
        bits down to a 16,000th of it.
        """
        device, heads = self.wte.device, self._num_heads
        generator = torch.Generator().manual_seed(seed)
        ids_T = torch.randint(len(self.wte), (_CALIBRATION_TOKENS,), generator=generator)
        x_TD = self.wte[ids_T.to(device)]
        shape = (len(self.blocks), 2, heads, _CALIBRATION_TOKENS, x_TD.shape[1] // heads)
        keys, values = (x_TD.new_zeros(shape) for _ in range(2))
        self.fill(device)
        span = PrefillSpan(0, torch.ones(1, dtype=torch.int64, device=device), bidirectional=False)
        with torch.inference_mode():
            self.prefill(x_TD, span, KVCache(keys, values))
        for attention, *kept in zip(self._attentions(), keys, values, strict=True):
            largest = [each.float().abs().amax().clamp_min(_LEAST_KV) for each in kept]
            k_scale, v_scale = (each.view(1) * (_KV_MARGIN / _E4M3_MOST) for each in largest)
            attention.k_scale, attention.v_scale = k_scale, v_scale

    def kv_scales(self) -> torch.Tensor | None:
        """[L, 2] float32; None without e4m3."""
        scales = [attention.kv_scale_2 for attention in self._attentions()]
        known = [scale_2 for scale_2 in scales if scale_2 is not None]
        return torch.stack(known) if known else None

    @property
    def kinds(self) -> WeightKinds:
        """Return the formats that a decode step's kernels read."""
        experts = next((each.kind for each in self._experts()), WeightKind.BF16)
        return WeightKinds(self._map_kind, self._map_kind.of_head, experts)

    def _experts(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        if (decoder := self._cpu_decoder(kv)) is not None:
            return self._cpu_span(decoder, x_TD, span, kv, caches_only=False)
        return _sum(self._span(x_TD, span, kv, len(self.blocks)))

    def chunk(self, x_TD: torch.Tensor, chunk: Chunk, kv: KVCache) -> torch.Tensor:
        """Like `prefill`, of fixed shape; can be captured if `has_chunks`."""
        where, attend = chunk_metadata(chunk, self.rope), chunk_attention(chunk, kv)
        positions_T, count = chunk.positions_T, len(self.blocks)
        return _sum(self._blocks(count, x_TD, where, positions_T, kv, attend, chunk.adapters))

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        """Write keys and values; skip the rest of the last block.

        An image without an adapter passes in e4m3 after `use_fp8`, a text's first token does not.
        """
        fp8 = bool(self.image_blocks) and len(x_TD) > 1 and span.adapters is None
        if not fp8 and (decoder := self._cpu_decoder(kv)) is not None:
            self._cpu_span(decoder, x_TD, span, kv, caches_only=True)
            return
        terms = self._span(x_TD, span, kv, len(self.blocks) - 1, fp8=fp8)
        self._cache(terms, span_metadata(span, self.rope), _positions(span, x_TD), kv)

    def cache_stacked(self, x_CPD: torch.Tensor, pages_CM: torch.Tensor, kv: KVCache) -> None:
        """Cache several bidirectional prefixes in one pass.

        The bits may differ from those of `cache_span`, because a library's rounding may depend on
        the number of rows.
        """
        num_sequences, length = x_CPD.shape[:2]
        where, attend = stacked_metadata(pages_CM, self.rope), stacked_attention(num_sequences)
        positions_T = torch.arange(length, device=x_CPD.device).repeat(num_sequences)
        x_TD, count = x_CPD.flatten(0, 1), len(self.blocks) - 1
        counters = self._counters
        with contextlib.nullcontext() if counters is None else counters.cleared():
            terms = self._blocks(count, x_TD, where, positions_T, kv, attend, None, fp8=True)
            self._cache(terms, where, positions_T, kv)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        if (decoder := self._cpu_decoder(kv)) is not None:
            rows = _cpu_rows(kv, batch.adapters)
            return decoder.decode(x_BD, batch.positions_B, batch.page_table_BM, rows)
        where, attend = step_metadata(batch, kv, self.rope), step_attention(batch, kv)
        blocks = len(self.blocks)
        positions_B, adapters = batch.positions_B, batch.adapters
        return _sum(self._blocks(blocks, x_BD, where, positions_B, kv, attend, adapters))

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        logits_BV: torch.Tensor = self.lm_head(self.post_ln(hidden_BD))
        return logits_BV.float()

    def _cpu_decoder(self, kv: KVCache) -> cpu.CpuDecoder | None:
        return self._on_cpu if cpu.takes(kv.k_LNHSE, kv.v_LNHSE) else None

    def _cpu_span(
        self,
        decoder: cpu.CpuDecoder,
        x_TD: torch.Tensor,
        span: PrefillSpan,
        kv: KVCache,
        *,
        caches_only: bool,
    ) -> torch.Tensor:
        return decoder.span(
            *(x_TD, span.start, span.pages_M, _cpu_rows(kv, span.adapters)),
            bidirectional=span.bidirectional,
            caches_only=caches_only,
        )

    def _cache(self, terms: Terms, where: Span, positions_T: torch.Tensor, kv: KVCache) -> None:
        last = len(self.blocks) - 1
        block = self.blocks[last]
        assert isinstance(block, TextBlock), "a decoder has one kind of block"
        block.cache(terms, where, positions_T, kv.layer(last))

    def _attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    def _span(
        self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache, count: int, *, fp8: bool = False
    ) -> Terms:
        where, attend = span_metadata(span, self.rope), span_attention(span, x_TD.shape[0])
        positions_T = _positions(span, x_TD)
        return self._blocks(count, x_TD, where, positions_T, kv, attend, span.adapters, fp8=fp8)

    def _blocks(
        self,
        count: int,
        x: torch.Tensor,
        where: AttentionMetadata | Span | PlacedSpan,
        positions_T: torch.Tensor,
        kv: KVCache,
        attend: Attend,
        adapters: AdaptedRows | None,
        *,
        fp8: bool = False,
    ) -> Terms:
        """Run the first `count` blocks; `fp8`: their copies in e4m3, if there are any."""
        terms: Terms = (x,)
        blocks = self.image_blocks if fp8 and self.image_blocks else self.blocks
        for layer, block in enumerate(itertools.islice(blocks, count)):
            own = adapters.layer(layer) if adapters is not None else None
            terms = block(terms, where, positions_T, kv.layer(layer), attend, own)
        return terms


def affine(layer: nn.LayerNorm | Linear) -> Affine:
    return Affine(layer.weight, layer.bias)


def _unfold(folded: FoldedCodes, norm: nn.LayerNorm, maps: Sequence[Linear]) -> None:
    """Give maps their weights before a norm was folded in: where it scales by 0, any will do."""
    gain, shift = norm.weight.float(), norm.bias.float()
    weights = folded.map.dequantised()
    weights = torch.where(gain == 0, 0.0, weights / gain)
    bias, dtype = folded.bias_O - weights @ shift, norm.weight.dtype
    sizes = [each.out_features for each in maps]
    for each, own, own_bias in zip(
        maps, torch.split(weights, sizes), torch.split(bias, sizes), strict=True
    ):
        each.weight = nn.Parameter(own.to(dtype), requires_grad=False)
        each.bias = nn.Parameter(own_bias.to(dtype), requires_grad=False)


def _make_plain(norm: nn.LayerNorm) -> None:
    """Leave a norm without scale and shift, which the maps after it have."""
    ones, zeros = torch.ones_like(norm.weight), torch.zeros_like(norm.bias)
    norm.weight = nn.Parameter(ones, requires_grad=False)
    norm.bias = nn.Parameter(zeros, requires_grad=False)


def _normed(terms: Terms, norm: nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of terms and its norm."""
    if len(terms) == 1:
        return terms[0], norm(terms[0])
    return ops.add3_norm(*terms, norm)


def _sum(terms: Terms) -> torch.Tensor:
    return terms[0] if len(terms) == 1 else ops.add3(*terms)


def _positions(span: PrefillSpan, x_TD: torch.Tensor) -> torch.Tensor:
    return torch.arange(span.start, span.start + x_TD.shape[0], device=x_TD.device)


def _cpu_rows(kv: KVCache, adapters: AdaptedRows | None) -> cpu.CpuRows:
    low_rank = None
    if adapters is not None:
        maps = adapters.weights.maps
        low_rank = cpu.CpuLowRank(adapters.rows, up=(maps["fc1"],), down=(maps["fc2"],))
    return cpu.CpuRows(kv.k_LNHSE, kv.v_LNHSE, low_rank)


def _tau(config: TextConfig) -> Tau | None:
    if config.tau is None:
        return None
    return Tau(config.dim, config.num_heads, config.max_context, config.tau.gelu)


def _mlp(config: TextConfig, layer: int) -> MLP | MoE:
    moe = config.moe
    if moe is None or layer < moe.first_layer:
        return MLP(config.dim, config.ff_dim, config.dim)
    return MoE(config.dim, moe.inner_dim, moe.num_experts, moe.num_active)
