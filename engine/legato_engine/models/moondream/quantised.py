"""Quantisation of Moondream's checkpoints: the decoder's maps with their norms, and experts."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from legato_engine.config import LoadOptions, Progress
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import CodeFormat, MapCodes
from legato_engine.kernels.step import FoldedCodes
from legato_engine.layers.mlp import MoE
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import Destination, TensorHeader
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import Network
from legato_engine.models.moondream.weights import (
    empty_network,
    load_weights,
    quantised_maps,
    rename,
    stored_experts,
)
from legato_engine.models.recipe import Quantisation

_CPU = torch.device("cpu")


def quantisation(config: MoondreamConfig, weights: Path, code_format: CodeFormat) -> Quantisation:
    """Plan a quantised checkpoint.

    Raises:
        InvalidField: the checkpoint cannot be quantised so.
    """
    network = empty_network(config, torch.bfloat16)
    stored = checkpoint.headers(weights)
    if stored_experts(stored) is not None:
        problem = f"{weights} has quantised experts already: use the checkpoint that it was made"
        raise InvalidField(f"{problem} from", field="weights")
    if reason := network.text.cannot_quantise(code_format.kind):
        raise InvalidField(f"the decoder {reason}", field="weight_dtype")
    before = network.state_dict()
    network.text.expect_codes(code_format)
    after = network.state_dict()
    destination = rename(config.text.num_heads)

    def is_code(name: str) -> bool:
        return name not in before or after[name].dtype is not before[name].dtype

    def is_kept(header: TensorHeader) -> bool:
        to = destination(header.name)
        name = to.name if isinstance(to, Destination) else to
        return name not in before or (name in after and not is_code(name))

    return Quantisation(
        kept=[header for header in stored if is_kept(header)],
        num_bytes=sum(each.nbytes for name, each in after.items() if is_code(name)),
        recipe=functools.partial(quantised_maps(config).recipe, code_format),
        codes=functools.partial(_codes, config, weights, code_format),
    )


def _codes(
    config: MoondreamConfig,
    weights: Path,
    code_format: CodeFormat,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    options = LoadOptions(progress=lambda part: progress(0.5 * part))
    network = load_weights(config, weights, _CPU, torch.bfloat16, options)
    return _maps(network, code_format, lambda part: progress(0.5 + 0.5 * part))


def _maps(network: Network, code_format: CodeFormat, progress: Progress) -> dict[str, torch.Tensor]:
    """Quantise layer by layer, and free the weights of each."""
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, codes: MapCodes, folded: FoldedCodes | None = None) -> None:
        tensors.update({f"{name}.{part}": each for part, each in codes.tensors().items()})
        if folded is not None:
            tensors[f"{name}.bias"] = folded.bias_O.contiguous()

    blocks = list(network.text.text_blocks())
    for index, block in enumerate(blocks, 1):
        codes = block.codes(code_format)
        add(f"text.blocks.{index - 1}.qkv_fc1", codes.first.map, codes.first)
        add(f"text.blocks.{index - 1}.fc2_proj", codes.second)
        if isinstance(block.mlp, MoE):
            for name, layer in zip(("fc1", "fc2"), block.mlp.layers, strict=True):
                layer.quantise(code_format)
                assert layer.scale is not None, "codes have scales"
                whole = f"text.blocks.{index - 1}.mlp.{name}"
                tensors[f"{whole}.weight"] = layer.weight.detach()
                tensors[f"{whole}.scale"] = layer.scale
        block.expect_codes(code_format)
        progress(index / len(blocks))
    head = network.text.codes_of_head(code_format)
    add("text.head", head.map, head)
    return tensors
