"""Families of text models: Llama, Phi, Qwen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
import torch
from torch import nn

from legato_engine.config import LOAD_DEFAULTS, STORED, LoadOptions
from legato_engine.errors import InvalidField
from legato_engine.kernels import ops
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.library import Library, library
from legato_engine.kernels.map_codes import KINDS, CodeFormat, WeightKind
from legato_engine.kernels.pages import AttentionMetadata, LayerCache, Span
from legato_engine.kernels.step import has_room_for_copy
from legato_engine.layers.attention import Attend, GroupedAttention
from legato_engine.layers.cpu import ungated_layer
from legato_engine.layers.lora import LayerAdapters
from legato_engine.layers.mlp import MLP
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import require_layers
from legato_engine.models.decoder.config import (
    DecoderConfig,
    HubConfig,
    ModelSettings,
    check_sizes,
    decoder_config,
    head_plan,
    partial_rotary,
    read_config,
    read_settings,
    refuse_others,
    text_config,
)
from legato_engine.models.decoder.frontend import ChatTemplate, Plain, TextFrontend, TextSetup
from legato_engine.models.decoder.gguf import (
    gguf_settings,
    gguf_tokenizer,
    hub_config,
    with_factors,
)
from legato_engine.models.decoder.model import (
    QUANTISED,
    DecoderModel,
    DecoderNetwork,
    load_weights,
    quantisation,
    random_weights,
)
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.gguf import is_gguf, read_gguf
from legato_engine.models.recipe import Quantisation, Recipe, require_plain
from legato_engine.models.registry import ModelBundle, ModelSource
from legato_engine.models.untrusted import refusing

DEFAULT_CONTEXT = 8192
"""The default context of models that have a longer one."""

_SEED = 0
_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family's configuration readers by `model_type`, its network, model and frontend.

    `template`: the chat template of a folder without one; None: it has no conversations.
    """

    configs: Mapping[str, Callable[[HubConfig], DecoderConfig]]
    network: Callable[[DecoderConfig], DecoderNetwork]
    model: Callable[[DecoderNetwork], DecoderModel] = DecoderModel
    frontend: Callable[[TextSetup], TextFrontend] = TextFrontend
    template: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderBundle(ModelBundle):
    """A text model, perhaps with a vision tower; it has no draft."""

    name: str
    config: DecoderConfig
    family: Family
    frontend: TextFrontend

    def load(
        self, device: torch.device, dtype: torch.dtype, options: LoadOptions = LOAD_DEFAULTS
    ) -> DecoderModel:
        self._check(options)
        with torch.device("meta"):
            network = self.family.network(self.config).to(dtype)
        on_cpu = device.type == "cpu"
        cpu_library = library(options.cpu_kernels) if on_cpu else None
        recipe = self._recipe(options)
        from_gguf = self.weights is not None and is_gguf(self.weights)
        keeps_blocks = options.weight_dtype == STORED or (
            # Faster and smaller on a CPU; a GPU's steps with blocks were not timed.
            options.weight_dtype == "auto" and from_gguf and cpu_library is not None
        )
        kind = KINDS.get(options.weight_dtype if recipe is None else recipe.kind)
        kind = WeightKind.BF16 if keeps_blocks else kind  # of maps without blocks
        reason = None if on_cpu or kind is None else network.cannot_quantise(device)
        if reason and recipe is None:
            problem = f"weight_dtype {options.weight_dtype} {reason}; use weight_dtype model"
            raise InvalidField(problem, field="weight_dtype")
        as_codes: Mapping[str, CodeFormat] = {}
        if keeps_blocks:
            as_codes = self._expect_blocks(network, device, cpu_library)
        dequantises = False
        if recipe is not None:
            panels = cpu_library is not None and kind is not WeightKind.E4M3
            dequantises = not panels if on_cpu else reason is not None
            if dequantises:
                checkpoint.require_memory(network, device, options.memory)
            network.expect_codes(network.map_formats(recipe.code_format), recipe.code_format)
        if self.weights is None:
            random_weights(network, _SEED, device, options)
        else:
            if from_gguf:
                _log.info("gguf_maps", **checkpoint.gguf_fates(self.weights, as_codes))
            load_weights(network, self.weights, device, options, as_codes=as_codes)
            read_gguf.cache_clear()
        model = self.family.model(network)
        if dequantises:
            network.dequantise()
        elif not on_cpu and kind is not None:
            network.quantise(kind)
        else:
            _pack_copies(network, device, options)
        if on_cpu:  # codes are not rounded again
            network.pack("auto" if recipe or as_codes else options.weight_dtype, cpu_library)
        self.frontend.check()  # its process has started meanwhile
        return model

    def _check(self, options: LoadOptions) -> None:
        if options.vision_fp8:
            raise InvalidField(f"{self.name} has no vision encoder in fp8", field="vision_dtype")
        if options.kv_dtype == "fp8":
            problem = f"{self.name} has no scales for keys and values in fp8: use auto or model"
            raise InvalidField(problem, field="kv_dtype")
        if self.weights is not None:
            require_layers(self.config.num_layers, self.weights)

    def _recipe(self, options: LoadOptions) -> Recipe | None:
        if self.weights is None or is_gguf(self.weights):
            return None
        return QUANTISED.read(self.weights, options.weight_dtype)

    def _expect_blocks(
        self, network: DecoderNetwork, device: torch.device, cpu_library: Library | None
    ) -> Mapping[str, CodeFormat]:
        """Have the blocks of a GGUF file in place of maps, and return these maps' formats."""
        on_cpu = device.type == "cpu"
        if self.weights is None or (on_cpu and cpu_library is None):
            problem = "weight_dtype stored needs a GGUF file and compiled cpu_kernels"
            raise InvalidField(f"{problem}: use weight_dtype auto", field="weight_dtype")
        formats = checkpoint.code_formats(self.weights)
        if not on_cpu:
            formats = {name: each.of_gpu for name, each in formats.items()}
        return network.expect_codes(formats)

    def quantisation(self, code_format: CodeFormat) -> Quantisation:
        weights = require_plain(self.weights)
        require_layers(self.config.num_layers, weights)
        with torch.device("meta"):
            network = self.family.network(self.config).to(torch.bfloat16)
        return quantisation(network, weights, code_format)


def _pack_copies(network: DecoderNetwork, device: torch.device, options: LoadOptions) -> None:
    """Have packed copies of the maps for steps, if a GPU has room for them."""
    if options.weight_dtype == "auto" and network.cannot_quantise(device) is None:
        copied = sum(each.nbytes for each in network.layers.parameters())
        if has_room_for_copy(copied, device):
            network.quantise(WeightKind.BF16, keeps_maps=True)


def find_bundle(source: ModelSource, family: Family) -> DecoderBundle:
    """Find a model in a folder of config.json, tokenizer.json and model*.safetensors, or in a GGUF.

    tokenizer_config.json, generation_config.json and chat_template.jinja are optional. Nothing is
    downloaded. `random_weights` need no safetensors. A GGUF file has all but the weights in its
    metadata; a given tokenizer replaces its own.

    Raises:
        InvalidField: a file is missing, wrong, or asks for what is not implemented.
    """
    if not source.weights:
        problem = f"{source.name} needs a Hugging Face folder with its config.json, or a GGUF file"
        raise InvalidField(problem, field="weights")
    if is_gguf(source.weights):
        return _find_gguf(source, family)
    folder = Path(source.weights)
    hub = read_config(folder, family.configs)
    config = limited(_config(hub, family, "config.json"), source.max_context)
    path = Path(source.tokenizer) if source.tokenizer else folder / "tokenizer.json"
    tokenizer = TextTokenizer.read(path)
    settings = read_settings(folder, tokenizer, text_config(hub).eos_token_id)
    return bundle_of(source, family, config, settings, tokenizer)


def _find_gguf(source: ModelSource, family: Family) -> DecoderBundle:
    file = read_gguf(Path(source.weights))
    hub = hub_config(file, family.configs)
    sizes = _config(hub, family, file.path.name)
    config = with_factors(limited(sizes, source.max_context), file)
    tokenizer = (
        TextTokenizer.read(Path(source.tokenizer))
        if source.tokenizer
        else TextTokenizer(gguf_tokenizer(file))
    )
    return bundle_of(source, family, config, gguf_settings(file), tokenizer)


def _config(hub: HubConfig, family: Family, source: str) -> DecoderConfig:
    check_sizes(text_config(hub), source)
    with refusing(source, "weights"):
        return family.configs[hub.model_type](hub)


def bundle_of(
    source: ModelSource,
    family: Family,
    config: DecoderConfig,
    settings: ModelSettings,
    tokenizer: TextTokenizer,
) -> DecoderBundle:
    """Make the bundle of what was read.

    Raises:
        InvalidField: the tokenizer does not fit the model.
    """
    highest = max(tokenizer.num_ids - 1, *settings.eos, 0)
    if highest >= config.vocab_size:
        raise InvalidField(
            f"the tokenizer has the id {highest}, the model's vocabulary ends before "
            f"{config.vocab_size}",
            field="tokenizer",
        )
    template = settings.template or family.template
    setup = TextSetup(
        name=source.name,
        prompter=(
            Plain(tokenizer)
            if template is None
            else ChatTemplate(template, settings.specials, tokenizer)
        ),
        tokenizer=tokenizer,
        eos=settings.eos,
        sampling=settings.sampling,
        config=config,
    )
    stored = None if source.random_weights else Path(source.weights)
    beside = None if stored is None or not (stored / "adapters").is_dir() else stored / "adapters"
    return DecoderBundle(
        frontend=family.frontend(setup),
        weights=stored,
        max_context=config.max_context,
        adapters=beside,
        name=source.name,
        config=config,
        family=family,
    )


def limited(config: DecoderConfig, max_context: int) -> DecoderConfig:
    wanted = max_context or min(config.max_context, DEFAULT_CONTEXT)
    if not 2 <= wanted <= config.max_context:
        raise InvalidField(
            f"the model has a context of 2 to {config.max_context} positions, not {wanted}",
            field="max_context",
        )
    return dataclasses.replace(config, max_context=wanted)


# ---------------- Llama 1 to 3 and models with its configuration


def find_llama(source: ModelSource) -> ModelBundle:
    return find_bundle(source, Family({"llama": _gated}, DecoderNetwork))


def _gated(
    config: HubConfig, *, qkv_bias: bool | None = None, norms_heads: bool = False
) -> DecoderConfig:
    """Read a decoder of `GatedBlock`; without a `qkv_bias` its attention's biases are settings."""
    refuse_others(config, {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False})
    out_bias = config.attention_bias if qkv_bias is None else False
    heads = head_plan(
        config,
        qkv_bias=qkv_bias or out_bias,
        out_bias=out_bias,
        norm_eps=config.rms_norm_eps if norms_heads else None,
    )
    return decoder_config(config, norm_eps=config.rms_norm_eps, heads=heads)


# ---------------- Phi 1, 1.5 and 2 in transformers' format


class PhiBlock(nn.Module):
    """Parallel attention and MLP, added in one residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.self_attn = GroupedAttention(config.dim, config.heads)
        self.mlp = MLP(config.dim, config.ff_dim, config.dim)

    def forward(
        self,
        x: torch.Tensor,
        where: AttentionMetadata | Span,
        cache: LayerCache,
        attend: Attend,
        adapters: LayerAdapters | None = None,
    ) -> torch.Tensor:
        normed: torch.Tensor = self.input_layernorm(x)
        heads: torch.Tensor = self.self_attn(normed, where, cache, attend, adapters)
        mlp: torch.Tensor = self.mlp(normed, adapters)
        return ops.add3(x, heads, mlp)

    def cpu_layer(self) -> cpu.CpuLayer:
        """Return this layer for a decoder on the CPU, once it is packed."""
        attention = self.self_attn
        return ungated_layer(self.input_layernorm, attention.qkv, attention.o_proj, self.mlp)


class PhiNetwork(DecoderNetwork):
    """All weights of a Phi."""

    def __init__(self, config: DecoderConfig) -> None:
        norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        super().__init__(config, PhiBlock, norm, head_bias=True)

    @staticmethod
    def checkpoint_name(name: str) -> str:
        if name.startswith("norm."):
            return f"model.final_layer{name}"
        return DecoderNetwork.checkpoint_name(name.replace(".o_proj.", ".dense."))


def find_phi(source: ModelSource) -> ModelBundle:
    return find_bundle(source, Family({"phi": _phi_config}, PhiNetwork))


def _phi_config(config: HubConfig) -> DecoderConfig:
    implemented = {"hidden_act": "gelu_new", "qk_layernorm": False, "tie_word_embeddings": False}
    refuse_others(config, implemented)
    return decoder_config(
        config,
        norm_eps=config.layer_norm_eps,
        heads=head_plan(config, qkv_bias=True, out_bias=True),
        partial=partial_rotary(config),
    )


# ---------------- Qwen 2, 2.5 (biases of queries, keys and values) and 3 (normed heads)


def find_qwen(source: ModelSource) -> ModelBundle:
    second = functools.partial(_gated, qkv_bias=True)
    third = functools.partial(_gated, norms_heads=True)
    return find_bundle(source, Family({"qwen2": second, "qwen3": third}, DecoderNetwork))


_BY_ARCHITECTURE = {
    "llama": ("llama", find_llama),
    "qwen2": ("qwen", find_qwen),
    "qwen3": ("qwen", find_qwen),
}
"""Families by the architecture that a GGUF file names, which is transformers' model type."""


def find_gguf(source: ModelSource) -> ModelBundle:
    """Find the model of a GGUF file.

    Raises:
        InvalidField: the file is damaged, or its architecture is not implemented.
    """
    file = read_gguf(Path(source.weights))
    hub_config(file, _BY_ARCHITECTURE)
    name, find = _BY_ARCHITECTURE[file.architecture]
    return find(dataclasses.replace(source, name=name))
