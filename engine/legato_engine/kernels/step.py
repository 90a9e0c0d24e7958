"""A decode step of a whole decoder by kernels, and its parameters in their layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from legato_engine.kernels.cuda import decoder, tau_decoder
from legato_engine.kernels.cuda.adapters import LowRankMaps
from legato_engine.kernels.cuda.attention import GROUP, HEAD_DIM, MAX_TOKENS, StepPositions
from legato_engine.kernels.cuda.capability import Kernels, runs, total_memory
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    CudaDecoder,
    DecoderSizes,
    HeadWeights,
    Part,
    Stages,
    StepCache,
)
from legato_engine.kernels.cuda.module import made_on
from legato_engine.kernels.cuda.sampling import RowTensors, SampledTokens
from legato_engine.kernels.cuda.skinny_gemm import (
    LinearKernels,
    LinearSizes,
    PackedMap,
    fold_norm,
    gate_order,
    num_parts,
    pack,
    pack_codes,
    pair_rotated,
)
from legato_engine.kernels.cuda.tau_decoder import (
    ExpertLayer,
    ExpertLowRank,
    ExpertSizes,
    TauDecoder,
    TauLayer,
    TauSizes,
)
from legato_engine.kernels.cuda.value_heads import (
    DecoderWeights,
    Embedder,
    MlpBins,
    NormedBins,
    TokenInputs,
    TwoLayerValues,
    ValueEncoder,
    ValueReader,
    ValueSizes,
)
from legato_engine.kernels.map_codes import CodeFormat, MapCodes, format_of, map_codes
from legato_engine.kernels.parameters import (
    Affine,
    DecoderLayer,
    DenseMlp,
    ExpertMlp,
    LayerWeights,
    PackedExperts,
)

__all__ = [
    "DEFAULT_STAGES",
    "GROUP",
    "HEAD_DIM",
    "MAX_TOKENS",
    "DecoderSizes",
    "ExpertLowRank",
    "ExpertSizes",
    "FoldedCodes",
    "LayerCodes",
    "LowRankMaps",
    "MapPart",
    "MlpBins",
    "NormedBins",
    "Part",
    "QuantisedHead",
    "QuantisedLayer",
    "Stages",
    "StepCache",
    "StepMap",
    "StepPositions",
    "TauSizes",
    "TokenInputs",
    "TwoLayerValues",
    "ValueEncoder",
    "ValueHeads",
    "ValueSizes",
    "has_resident_kernel",
    "has_room_for_copy",
    "has_step_kernels",
    "head_codes",
    "layer_codes",
    "packed_decoder",
    "packed_experts",
    "packed_head",
    "quantised_head",
    "quantised_layer",
    "step_decoder",
    "supports_decoder",
    "supports_experts",
]

_COPY_SHARE = 1 / 16
"""Of a GPU's memory, what a second copy of the decoder's maps may take by default."""


def supports_decoder(sizes: DecoderSizes, device: torch.device, dtype: torch.dtype) -> bool:
    return decoder.supported(sizes, device, dtype)


def has_step_kernels(device: torch.device) -> bool:
    return runs(Kernels.STEPS, device)


def has_room_for_copy(num_bytes: int, device: torch.device) -> bool:
    """Return whether so much is little enough of a GPU's memory to hold weights twice."""
    return num_bytes < _COPY_SHARE * total_memory(device)


def has_resident_kernel(device: torch.device) -> bool:
    return runs(Kernels.RESIDENT, device)


def supports_experts(sizes: TauSizes) -> bool:
    return tau_decoder.supported(sizes)


def step_decoder(
    sizes: DecoderSizes | TauSizes,
    layers: Sequence[DecoderLayer],
    head: HeadWeights,
    cache: StepCache,
    stages: Stages = DEFAULT_STAGES,
    adapters: LowRankMaps | None = None,
    expert_adapters: ExpertLowRank | None = None,
) -> CudaDecoder | TauDecoder:
    """Pack the layers of a decoder for steps of up to its `max_tokens` tokens."""
    if isinstance(sizes, TauSizes):
        gained = [packed_tau_layer(layer, sizes.decoder) for layer in layers]
        return TauDecoder(sizes, gained, head, cache, stages, adapters, expert_adapters)
    packed = [packed_layer(layer, sizes, rotated=True) for layer in layers]
    return CudaDecoder(sizes, packed, head, cache, stages, adapters)


# ---------------------------------------------------------------- layouts


def packed_layer(layer: DecoderLayer, sizes: DecoderSizes, *, rotated: bool) -> LayerWeights:
    """Pack a layer with an MLP.

    `rotated` puts the rows of each rotated pair where the first map's kernel rotates them.
    """
    if layer.packed is not None:
        return layer.packed
    assert isinstance(layer.mlp, DenseMlp), "a layer with experts has another layout"
    weights, folded = folded_first(layer, layer.mlp)
    if rotated:
        weights = weights[_rotated_order(len(weights), sizes.num_heads, weights.device)]
    return LayerWeights(
        weights_in=pack(weights),
        folded_in=folded,
        weights_out=pack(torch.cat([layer.mlp.fc2.weight, layer.proj.weight], dim=1), sizes.parts),
        proj_bias=layer.proj.bias,
        fc2_bias=layer.mlp.fc2.bias,
    )


def _rotated_order(outputs: int, num_heads: int, device: torch.device) -> torch.Tensor:
    order, paired = torch.arange(outputs, device=device), pair_rotated(num_heads, device)
    order[: len(paired)] = paired
    return order


class MapPart:
    """Rows and columns of a packed map, as a `PackedWeight` of products of many tokens."""

    def __init__(self, packed: PackedMap, rows: slice, columns: slice) -> None:
        self._packed, self._rows, self._columns = packed, rows, columns
        self.out_features = rows.stop - rows.start
        self.in_features = columns.stop - columns.start

    def dense(self) -> torch.Tensor:
        """Return a copy in bf16, [O, I]."""
        return self._packed.part(self._rows, self._columns)

    def exact(self) -> torch.Tensor:
        """Return a copy in float32."""
        return self._packed.dequantised()[self._rows, self._columns]

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Multiply by a copy in the dtype of the rows; only bf16 rounds the weights once more."""
        weight_OI = self.dense() if rows_TI.dtype is torch.bfloat16 else self.exact()
        return F.linear(rows_TI, weight_OI, None if bias_O is None else bias_O.to(rows_TI.dtype))


_FEW_TOKENS = 8
"""Beyond these the library's product of a map in bf16 is faster on an H200."""


class StepMap(MapPart):
    """A whole packed map in bf16 or fewer bits, whose few tokens have a kernel of their own.

    `gates`: its rows are packed for `gate`. With `dense_OI`, the same map, more tokens read that.
    """

    def __init__(
        self, codes: MapCodes, *, gates: bool = False, dense_OI: torch.Tensor | None = None
    ) -> None:
        outputs, device = codes.values().shape[0], codes.codes.device
        packed = pack_codes(codes, order_O=gate_order(outputs, device) if gates else None)
        super().__init__(packed, slice(0, packed.outputs), slice(0, packed.inputs))
        self._gates, self.dense_OI, self._product = gates, dense_OI, None
        if device.type == "cuda":
            most = MAX_TOKENS if dense_OI is None else _FEW_TOKENS
            sizes = LinearSizes(packed.inputs, packed.outputs, packed.kind, gates, most)
            self._product = made_on(device, LinearKernels, sizes)

    def multiply(self, rows_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        if (product := self._product_of(rows_TI)) is None:
            return super().multiply(rows_TI, bias_O)
        return product.run(rows_TI, self._packed, bias_O)

    def dense(self) -> torch.Tensor:
        return super().dense() if self.dense_OI is None else self.dense_OI

    def gate(self, rows_TI: torch.Tensor) -> torch.Tensor | None:
        """Return silu of the first half of a map without bias times the second; None: by others."""
        if not self._gates or (product := self._product_of(rows_TI)) is None:
            return None
        return product.run(rows_TI, self._packed, None, gated=True)

    def onto(
        self, to_TO: torch.Tensor, rows_TI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the product to `to_TO` in place, rounded once; None: by others."""
        if (product := self._product_of(rows_TI)) is None or not to_TO.is_contiguous():
            return None
        return product.run(rows_TI, self._packed, bias_O, onto_BO=to_TO)

    def _product_of(self, rows_TI: torch.Tensor) -> LinearKernels | None:
        """Return the kernels of few tokens, if the rows are."""
        product = self._product
        few = product is not None and 0 < rows_TI.shape[0] <= product.max_tokens
        plain = rows_TI.dtype is torch.bfloat16 and rows_TI.is_contiguous()
        return product if few and plain and rows_TI.dim() == 2 else None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantisedLayer:
    """One copy of a layer's weights, for decode steps and for products of many tokens.

    The norm's scale is in `qkv` and `fc1`, its shift in their biases, float32. `fc1` and `fc2` of a
    layer with experts are empty.
    """

    weights: LayerWeights
    qkv: MapPart
    fc1: MapPart
    fc2: MapPart
    proj: MapPart
    qkv_bias: torch.Tensor
    fc1_bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantisedHead:
    """A head likewise, with the norm before it."""

    weights: HeadWeights
    map: MapPart
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoldedCodes:
    """A map with the norm before it: its scale in the codes, its shift in the float32 bias."""

    map: MapCodes
    bias_O: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerCodes:
    """A layer's maps: QKV above fc1, and fc2 beside the output map; of experts neither is there."""

    first: FoldedCodes
    second: MapCodes


def layer_codes(layer: DecoderLayer, code_format: CodeFormat) -> LayerCodes:
    """Quantise a layer's maps, but not its experts and their router."""
    if isinstance(layer.mlp, DenseMlp):
        scaled, folded = folded_first(layer, layer.mlp)
        second = torch.cat([layer.mlp.fc2.weight, layer.proj.weight], dim=1)
    else:
        scaled, folded = fold_norm(*layer.qkv, layer.norm)
        second = layer.proj.weight
    first = FoldedCodes(map_codes(scaled, code_format), folded[:, 1])
    return LayerCodes(first, map_codes(second, code_format))


def head_codes(head: Affine, norm: Affine, code_format: CodeFormat) -> FoldedCodes:
    scaled, folded = fold_norm(*head, norm)
    return FoldedCodes(map_codes(scaled, code_format), folded[:, 1])


def quantised_layer(codes: LayerCodes, layer: DecoderLayer, num_heads: int) -> QuantisedLayer:
    """Pack a layer's codes; `layer` has what they leave: biases, and experts' norm and router."""
    into_codes, order, parts, fc2_bias = codes.first, None, 1, None
    dim, mixed = codes.second.shape
    if layer.tau is None:  # else the gains' kernel rotates
        bias_O = codes.first.bias_O
        order = _rotated_order(len(bias_O), num_heads, bias_O.device)
    if isinstance(layer.mlp, ExpertMlp):
        into_codes = _with_router(into_codes, layer.mlp.router, layer.norm)
    else:
        parts, fc2_bias = num_parts(mixed, dim), layer.mlp.fc2.bias
    into, folded = pack_codes(into_codes.map, order_O=order), _corrections(into_codes)
    out = pack_codes(codes.second, parts)
    weights = LayerWeights(
        weights_in=into.data,
        folded_in=folded,
        weights_out=out.data,
        proj_bias=layer.proj.bias,
        fc2_bias=fc2_bias,
        scales_in=into.scale_O,
        scales_out=out.scale_O,
    )
    first, whole, inner = 3 * dim, slice(0, dim), mixed - dim
    return QuantisedLayer(
        weights=weights,
        qkv=MapPart(into, slice(0, first), whole),
        fc1=MapPart(into, slice(first, first + inner), whole),
        fc2=MapPart(out, whole, slice(0, inner)),
        proj=MapPart(out, whole, slice(inner, mixed)),
        qkv_bias=folded[:first, 1],
        fc1_bias=folded[first : first + inner, 1],
    )


def _with_router(first: FoldedCodes, router: Affine, norm: Affine) -> FoldedCodes:
    """Add a router's rows, each in two: routes are to stay those of its weights.

    8 rows after each is what rounding has left of it; a logit is the sum of both.
    """
    kind, (outputs, inputs) = first.map.kind, first.map.shape
    assert first.map.scales is not None, "only bf16 has no scales"
    group = inputs // (first.map.scales.numel() // outputs)
    scaled, folded = fold_norm(*router, norm)
    rounded = map_codes(scaled, format_of(kind, group))
    rest = map_codes(scaled.float() - rounded.dequantised(), format_of(kind, group))
    split = gate_order(2 * len(folded), folded.device)
    maps = [each.tensors() for each in (first.map, rounded, rest)]
    codes, *halves = (each["codes"].view(torch.uint8) for each in maps)
    codes = torch.cat([codes, torch.cat(halves)[split]]).view(kind.code_dtype)
    scales, *halves = (each["scales"] for each in maps)
    scales = torch.cat([scales, torch.cat(halves)[split]])
    bias_O = torch.stack([folded[:, 1], torch.zeros_like(folded[:, 1])]).flatten()[split]
    return FoldedCodes(MapCodes(kind, codes, scales), torch.cat([first.bias_O, bias_O]))


class _PackedExperts:
    """A `PackedExperts`: packed maps one after the other, which are one map too."""

    def __init__(self, maps: Sequence[PackedMap]) -> None:
        like, self._num_experts = maps[0], len(maps)
        self.data = torch.cat([each.data for each in maps])
        self._one = dataclasses.replace(like, data=self.data[:0])
        order_XO = None
        if like.order_O is not None:
            starts_X = torch.arange(len(maps), device=self.data.device) * like.outputs
            order_XO = (starts_X[:, None] + like.order_O).flatten().int()
        self._all = dataclasses.replace(
            like, data=self.data, outputs=len(maps) * like.outputs, order_O=order_XO
        )

    def dense(self, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
        found = self._all
        if expert is not None:
            data = self.data.view(self._num_experts, -1)[expert]
            found = dataclasses.replace(self._one, data=data)
        if dtype is torch.bfloat16:
            weights = found.part(slice(0, found.outputs), slice(0, found.inputs))
        else:
            weights = found.dequantised().to(dtype)
        return weights if expert is not None else weights.view(self._num_experts, -1, found.inputs)


def packed_experts(experts: Sequence[MapCodes], *, gates: bool) -> PackedExperts:
    """Pack a map of every expert; with `gates` rows of both halves are 8 apart."""
    outputs, device = experts[0].shape[0], experts[0].codes.device
    order_O = gate_order(outputs, device) if gates else None
    return _PackedExperts([pack_codes(each, order_O=order_O) for each in experts])


def quantised_head(codes: FoldedCodes) -> QuantisedHead:
    packed, folded = pack_codes(codes.map), _corrections(codes)
    part = MapPart(packed, slice(0, packed.outputs), slice(0, packed.inputs))
    return QuantisedHead(HeadWeights(packed.data, folded, packed.scale_O), part, folded[:, 1])


def _corrections(codes: FoldedCodes) -> torch.Tensor:
    """Return those of `fold_norm`, with the sums of the weights as they are read."""
    return torch.stack([codes.map.dequantised().sum(1), codes.bias_O], dim=1).contiguous()


def folded_first(layer: DecoderLayer, mlp: DenseMlp) -> tuple[torch.Tensor, torch.Tensor]:
    """Both first maps with the norm folded in, as one: apart, their sums would round otherwise."""
    return fold_norm(*_stacked([layer.qkv, mlp.fc1]), layer.norm)


def packed_tau_layer(layer: DecoderLayer, sizes: DecoderSizes) -> TauLayer:
    """Pack a layer with gains; experts stay where they are."""
    assert layer.tau is not None, "a layer without gains has another layout"
    if isinstance(layer.mlp, DenseMlp):
        return TauLayer(layer.tau, packed_layer(layer, sizes, rotated=False), None)
    maps = layer.packed
    if maps is None:
        first = packed_head([layer.qkv, layer.mlp.router], layer.norm)
        maps = LayerWeights(
            weights_in=first.weights,
            folded_in=first.folded,
            weights_out=layer.proj.weight,
            proj_bias=layer.proj.bias,
            fc2_bias=None,
        )
    return TauLayer(layer.tau, maps, ExpertLayer(layer.norm, layer.mlp.up, layer.mlp.down))


def packed_head(maps: Sequence[Affine], norm: Affine) -> HeadWeights:
    """Pack maps of the same normed inputs as one, of raw inputs."""
    weights, folded = fold_norm(*_stacked(maps), norm)
    return HeadWeights(pack(weights), folded)


def _stacked(maps: Sequence[Affine]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps])


# ---------------------------------------------------------------- values

# Shape legend as in `cuda.value_heads`, V vocabulary.


class ValueHeads:
    """Encoders and decoders of values, for up to `max_tokens` tokens at a time.

    Steps share memory and must not overlap.
    """

    def __init__(
        self,
        sizes: ValueSizes,
        scalar: ValueEncoder,
        pair: ValueEncoder,
        bins: MlpBins | NormedBins,
        words_VD: torch.Tensor,
    ) -> None:
        self._words_VD, self._bins = words_VD, bins
        self._embedder = Embedder(sizes, scalar, pair)
        self._reader = ValueReader(sizes)
        self.max_tokens = bins.max_tokens
        self.two_layers: TwoLayerValues | None = None
        """Their weights, where decoders have two layers."""
        if isinstance(bins, MlpBins):
            both = (scalar, bins.scalar), (pair, bins.pair)
            self.two_layers = TwoLayerValues(sizes, *both)

    def embed(self, inputs: TokenInputs, x_BD: torch.Tensor) -> None:
        self._embedder.embed(inputs, self._words_VD, x_BD)

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits; only bins that a token needs are up to date."""
        self._bins.fill(token_B, hidden_BD)
        batch = token_B.shape[0]
        return self._bins.scalar_bins_BN[:batch], self._bins.pair_bins_BS[:batch]

    def read(self, state: RowTensors, sampled: SampledTokens) -> None:
        """Write payloads, also to their rows, and certainties; 0 and 1 for plain tokens."""
        scalar_BN, pair_BS = self.bins(sampled.token_B, sampled.hidden_BD)
        self._reader.read(state, scalar_BN, pair_BS, sampled)


def packed_decoder(mlp: DenseMlp, parts: int) -> DecoderWeights:
    """Pack a decoder whose second map's inputs are cut into `parts`."""
    return DecoderWeights(
        fc1_weights=pack(mlp.fc1.weight),
        fc1_bias=mlp.fc1.bias,
        fc2_weights=pack(mlp.fc2.weight, parts),
        fc2_bias=mlp.fc2.bias,
    )
