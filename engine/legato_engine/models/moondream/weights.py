"""Moondream's weights, from checkpoints or random.

Layout A prefixes the network's names with `model.`. Layout B has other names, and its feature
tables are transposed. Either may store tau's weights in two halves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from legato_engine.config import LOAD_DEFAULTS, LoadOptions
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import ROW_KINDS, CodeFormat, WeightKind, format_of
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import (
    Destination,
    Rename,
    TensorHeader,
    headers,
    require_layers,
)
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import Network
from legato_engine.models.recipe import QuantisedMaps

_TOWER = r"vision_encoder\.encoder\.model\.visual\."
_LAYER = r"text_model\.transformer\.h\.(\d+)\."

# Layout B by whole names; the first match counts. Catch-all rules also map unknown names, so that
# errors give the nearest expected name.
_RULES = tuple(
    (re.compile(pattern), template)
    for pattern, template in (
        (_TOWER + r"patch_embed\.linear\.(.+)", r"vision.patch_emb.\1"),
        (_TOWER + r"pos_embed", r"vision.pos_emb"),
        (_TOWER + r"blocks\.(\d+)\.norm([12])\.(.+)", r"vision.blocks.\1.ln\2.\3"),
        (_TOWER + r"norm\.(.+)", r"vision.post_ln.\1"),
        (r"vision_encoder\.projection\.mlp\.(.+)", r"vision.proj_mlp.\1"),
        (_TOWER + r"(.+)", r"vision.\1"),
        (r"text_model\.transformer\.embd\.wte\.weight", r"text.wte"),
        (r"text_model\.lm_head\.ln\.(.+)", r"text.post_ln.\1"),
        (r"text_model\.lm_head\.linear\.(.+)", r"text.lm_head.\1"),
        (_LAYER + r"mixer\.Wqkv\.(.+)", r"text.blocks.\1.attn.qkv.\2"),
        (_LAYER + r"mixer\.out_proj\.(.+)", r"text.blocks.\1.attn.proj.\2"),
        (_LAYER + r"tau_(.+)", r"text.blocks.\1.attn.tau.\2"),
        (_LAYER + r"gate\.(.+)", r"text.blocks.\1.mlp.router.\2"),
        (_LAYER + r"mlp\.experts\.weight", r"text.blocks.\1.mlp.fc1.weight"),
        (_LAYER + r"mlp\.output_experts\.weight", r"text.blocks.\1.mlp.fc2.weight"),
        (_LAYER + r"moe_quant\.up_scale", r"text.blocks.\1.mlp.fc1.scale"),
        (_LAYER + r"moe_quant\.down_scale", r"text.blocks.\1.mlp.fc2.scale"),
        (_LAYER + r"(.+)", r"text.blocks.\1.\2"),
        (r"region_model\.coordinate_encoder\.(.+)", r"region.coord_encoder.\1"),
        (r"region_model\.coordinate_(?:head|decoder)\.(.+)", r"region.coord_decoder.\1"),
        (r"region_model\.size_head\.(.+)", r"region.size_decoder.\1"),
        (r"region_model\.(.+)", r"region.\1"),
    )
)
_TABLES = {
    "region_model.coordinate_features.weight": "region.coord_features",
    "region_model.size_features.weight": "region.size_features",
}
_KV_SCALE = re.compile(_LAYER + r"kv_quantizer\.([kv]_scale)")
_TAU_HALF = re.compile(r"(text\.blocks\.\d+\.attn\.tau\.)w([qv])")


def rename(num_heads: int, *, kv_scales: bool = False) -> Rename:
    """Map stored names; without `kv_scales`, these are unused."""

    def destination(stored: str) -> str | Destination | None:
        name = _plain(stored)
        if scale := _KV_SCALE.fullmatch(name):
            ours = f"text.blocks.{scale[1]}.attn.{scale[2]}"
            return Destination(ours, flat=True) if kv_scales else None
        if name in _TABLES:
            return Destination(_TABLES[name], transposed=True)
        matches = ((pattern.fullmatch(name), template) for pattern, template in _RULES)
        name = next((match.expand(template) for match, template in matches if match), name)
        if half := _TAU_HALF.fullmatch(name):
            return Destination(f"{half[1]}wqwv", first_row=0 if half[2] == "q" else num_heads)
        return name

    return destination


def stored_experts(headers: Iterable[TensorHeader]) -> WeightKind | None:
    """Return the kind of experts in 8 bits, which alone have three dimensions, or None."""
    dtypes = {header.dtype for header in headers if len(header.shape) == 3}
    return next((kind for kind in ROW_KINDS if kind.code_dtype in dtypes), None)


def missing_kv_scales(headers: Iterable[TensorHeader], num_layers: int) -> list[str]:
    found = {name for header in headers if _KV_SCALE.fullmatch(name := _plain(header.name))}
    names = (
        f"text_model.transformer.h.{layer}.kv_quantizer.{kind}_scale"
        for layer in range(num_layers)
        for kind in ("k", "v")
    )
    return [name for name in names if name not in found]


def _plain(stored: str) -> str:
    return stored.replace("._orig_mod", "").removeprefix("_orig_mod.").removeprefix("model.")


# ---------------------------------------------------------------- weights

_GAINS = re.compile(r"ln\d?\.weight$")


def load_weights(
    config: MoondreamConfig,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions = LOAD_DEFAULTS,
    *,
    codes: CodeFormat | None = None,
) -> Network:
    """Load a file or folder in either published layout; experts stay quantised if stored so.

    `codes` is the format of a quantised checkpoint's maps, which are still to be packed or
    dequantised.

    Raises:
        InvalidField: as `checkpoint.load`, or scales are missing or invalid.
    """
    stored = headers(path)
    require_layers(config.text.num_layers + config.vision.num_layers, path)
    network = empty_network(config, dtype)
    if (kind := stored_experts(stored)) is not None:
        network.text.use_expert_codes(format_of(kind))
    kv_scales = _uses_kv_scales(stored, config.text.num_layers, options.kv_dtype)
    if kv_scales:
        network.text.use_fp8_kv()
    if codes is not None:
        if device.type == "cpu":  # which dequantises
            checkpoint.require_memory(network, device, options.memory)
        network.text.expect_codes(codes)
    renamed = rename(config.text.num_heads, kv_scales=kv_scales)
    checkpoint.load(network, stored, renamed, device, options)
    _check_kv_scales(network)
    return network.eval()


def random_weights(
    config: MoondreamConfig,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions = LOAD_DEFAULTS,
) -> Network:
    network = empty_network(config, dtype)
    checkpoint.randomise(network, seed, device, _scale, _GAINS, options)
    return network.eval()


def _uses_kv_scales(stored: Sequence[TensorHeader], num_layers: int, kv_dtype: str) -> bool:
    if kv_dtype == "model":
        return False
    missing = missing_kv_scales(stored, num_layers)
    if not missing:
        return True
    if len(missing) == 2 * num_layers:
        return False  # with fp8 they are calibrated
    raise InvalidField(
        f"the checkpoint has only some of the {2 * num_layers} scales of keys and values: "
        f"{missing[0]} is missing; kv_dtype model does without",
        field="kv_dtype",
    )


def _check_kv_scales(network: Network) -> None:
    scale_L2 = network.text.kv_scales()
    if scale_L2 is None:
        return
    for layer, scales in enumerate(scale_L2.tolist()):
        for kind, scale in zip("kv", scales, strict=True):
            if not (math.isfinite(scale) and scale > 0):
                raise InvalidField(
                    f"text.blocks.{layer}.attn.{kind}_scale: {scale} is no scale of fp8 values",
                    field="weights",
                )


def _scale(name: str, shape: torch.Size) -> float:
    if name.endswith("features") or name == "text.wte":
        return 1.0
    if name.endswith(("weight", "wqwv")) and len(shape) >= 2:
        return 1.0 / math.sqrt(shape[-1])
    if name.endswith("tau.alpha"):
        return 0.5
    return 0.02


def empty_network(config: MoondreamConfig, dtype: torch.dtype) -> Network:
    with torch.device("meta"):
        return Network(config).to(dtype)


_MAPS = QuantisedMaps(
    ("text.blocks.*.qkv_fc1", "text.blocks.*.fc2_proj"), "text.head", folds_norms=True
)
_EXPERTS = "text.blocks.*.mlp.fc1", "text.blocks.*.mlp.fc2"


def quantised_maps(config: MoondreamConfig) -> QuantisedMaps:
    """Return the maps of quantised checkpoints; in layers with experts they have no MLP in them."""
    return _MAPS if config.text.moe is None else _MAPS._replace(maps=(*_MAPS.maps, *_EXPERTS))
