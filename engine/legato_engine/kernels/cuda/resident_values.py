"""Values in a build of the resident kernel: constants, weights and memory.

The weights are those of the kernels of single steps, `kernels.cuda.value_heads`.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.module import Argument
from legato_engine.kernels.cuda.sampling import RowTensors
from legato_engine.kernels.cuda.value_heads import (
    DecoderWeights,
    TwoLayerValues,
    ValueEncoder,
    embed_defines,
    value_argmax_defines,
)
from legato_engine.resident.sizes import BLOCK, ValueDims

_NUM_POINTERS = 18
_FEATURE_BYTES = 2048  # of a row: a quarter of its warps' sums


class BuildValues:
    """What a build for so many tokens has of values; nothing without `values`."""

    def __init__(self, values: TwoLayerValues | None, tokens: int, device: torch.device) -> None:
        self._values = values
        self.defines = {"VALUES": 0} if values is None else _defines(values)
        dims = ValueDims(0, 0, 0) if values is None else value_dims(values)
        inner, num_bins = 2 * dims.inner_dim, dims.scalar_bins + dims.pair_bins
        self.inner = torch.zeros(tokens, inner, dtype=torch.bfloat16, device=device)
        """Inner activations of the scalar's decoder, then of the pair's."""
        self.bins = torch.zeros(tokens, num_bins, device=device)
        """Logits, likewise."""
        self._value = torch.zeros(tokens, 4, device=device)

    def pointers(self, state: RowTensors) -> tuple[Argument, ...]:
        """In the order of the kernel's parameters."""
        if self._values is None:
            return (None,) * _NUM_POINTERS
        kinds = self._values.scalar, self._values.pair
        weights = [pointer for kind in kinds for pointer in _weights(*kind)]
        return (*weights, state.payload_R2, self.inner, self.bins, self._value)


def _defines(values: TwoLayerValues) -> dict[str, int]:
    sizes, inner_dim = values.sizes, values.inner_dim
    return {
        "VALUES": 1,
        "INNER": inner_dim,
        "INNER_CHUNK": skinny_gemm.chunk(inner_dim // sizes.parts),
        "VALUE_PARTS": sizes.parts,
        **value_argmax_defines(sizes),
        **embed_defines(sizes),
    }


def value_dims(values: TwoLayerValues) -> ValueDims:
    return ValueDims(values.inner_dim, values.sizes.scalar_bins, values.sizes.pair_bins)


def values_obstacle(sizes: DecoderSizes, values: TwoLayerValues | None) -> str | None:
    """Why a model's values are not read in the resident kernel, in words, or None."""
    if values is None:
        return "takes values of decoders of two layers"
    dims, own = value_dims(values), values.sizes
    if min(dims.inner_blocks, dims.bin_blocks) < sizes.dim // BLOCK:
        return f"needs {BLOCK} outputs of each layer of values for each {BLOCK} of the width"
    if own.scalar_bins % 128 or own.pair_bins % 256:
        return "takes bins in multiples of 128"
    if 4 * max(own.scalar_features, own.pair_features) > _FEATURE_BYTES:
        return f"takes up to {_FEATURE_BYTES // 4} frequencies of a value"
    return None


def _weights(encoder: ValueEncoder, decoder: DecoderWeights) -> tuple[torch.Tensor, ...]:
    return (
        *(encoder.features, encoder.map.weight, encoder.map.bias),
        *(decoder.fc1_weights, decoder.fc1_bias, decoder.fc2_weights, decoder.fc2_bias),
    )
