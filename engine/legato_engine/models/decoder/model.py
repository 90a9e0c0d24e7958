"""The decoder network of text models, its weights, and the model on a device.

Layers of a `PackedLinear` are stored apart; a tied head may be stored, too.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from legato_engine.config import LOAD_DEFAULTS, LoadOptions, Progress
from legato_engine.errors import InvalidField
from legato_engine.kernels import ops, packed_weights
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.decoder import PanelWeight, panel_kind
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.map_codes import (
    BLOCKS_OF_8_BITS,
    GROUP,
    CodeFormat,
    WeightKind,
    format_of,
    map_codes,
)
from legato_engine.kernels.packed_weights import PackedWeight
from legato_engine.kernels.pages import AttentionMetadata, LayerCache, Span
from legato_engine.kernels.parameters import LowRankStack
from legato_engine.kernels.step import StepMap, has_step_kernels
from legato_engine.layers.attention import Attend, GroupedAttention
from legato_engine.layers.cpu import cpu_map, cpu_norm
from legato_engine.layers.linear import Coded, Embedding, Linear, PackedLinear, pack_linears
from legato_engine.layers.lora import (
    AdaptedRows,
    AdapterBank,
    BankSizes,
    LayerAdapters,
    Widths,
)
from legato_engine.layers.mlp import GatedMLP
from legato_engine.layers.rope import Rope
from legato_engine.models import checkpoint
from legato_engine.models.adapters import PeftTargets, parse_peft
from legato_engine.models.base import Adapter, Model
from legato_engine.models.checkpoint import Destination, TensorHeader, headers
from legato_engine.models.decoder.config import DecoderConfig
from legato_engine.models.decoder.frontend import FREE
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_attention import (
    Chunk,
    DecodeBatch,
    KVCache,
    PrefillSpan,
    chunk_attention,
    chunk_metadata,
    span_attention,
    span_metadata,
    step_attention,
    step_metadata,
)
from legato_engine.models.recipe import Quantisation, QuantisedMaps

_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # in old checkpoints; `Rope` computes it
_HEAD = "lm_head.weight"
_CODED = ("embed_tokens", "layers", "lm_head")
"""Modules whose maps checkpoints may have as codes; a vision tower stays as it is."""

QUANTISED = QuantisedMaps(("layers.*",), "lm_head", folds_norms=False)
_GAINS = re.compile(r"norm\d?\.weight$")


def load_weights(
    network: DecoderNetwork,
    folder: Path,
    device: torch.device,
    options: LoadOptions = LOAD_DEFAULTS,
    *,
    as_codes: Mapping[str, CodeFormat] = {},
) -> DecoderNetwork:
    """Fill a network made on the meta device, which expects the maps `as_codes` of a GGUF file so.

    Raises:
        InvalidField: as `checkpoint.load`, or a stored head differs from tied embeddings.
    """
    stored = headers(folder, as_codes)
    checked = _checked(network, stored)
    checkpoint.load(network, stored, checked, device, options)
    return network.eval()


def _checked(network: DecoderNetwork, stored: Sequence[TensorHeader]) -> checkpoint.Rename:
    """Return the destinations of stored tensors, whose tied head is right."""
    parts = _parts(network)
    if network.config.tied_head:
        _check_tied(stored, network.checkpoint_name("embed_tokens.weight"))

    def rename(name: str) -> str | Destination | None:
        if _DERIVED.search(name) or (name == _HEAD and network.config.tied_head):
            return None
        return parts.get(name, name)

    return rename


def quantisation(network: DecoderNetwork, folder: Path, code_format: CodeFormat) -> Quantisation:
    """Plan a quantised checkpoint of a network on the meta device, map by map as stored.

    Raises:
        InvalidField: the checkpoint does not fit the network, or its maps not the format.
    """
    if reason := network.misfit(code_format.group or GROUP):
        smaller = code_format.group > GROUP and network.misfit(GROUP) is None
        use = f"use group_size {GROUP}" if smaller else "serve it as it is"
        field = "group_size" if smaller else "weight_dtype"
        raise InvalidField(f"quantisation {reason}: {use}", field=field)
    stored = headers(folder)
    checkpoint.plan(network, stored, _checked(network, stored))
    formats = network.map_formats(code_format)
    maps = [each for each in stored if each.name.removesuffix(".weight") in formats]
    kept = [each for each in stored if each not in maps]
    meta = torch.device("meta")

    def like(header: TensorHeader) -> dict[str, torch.Tensor]:
        return formats[header.name.removesuffix(".weight")].empty(header.shape, meta).tensors()

    def codes(progress: Progress) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for done, header in enumerate(maps, 1):
            base = header.name.removesuffix(".weight")
            made = map_codes(checkpoint.read(header).bfloat16(), formats[base])
            tensors |= {f"{base}.{part}": each for part, each in made.tensors().items()}
            progress(done / len(maps))
        return tensors

    num_bytes = sum(each.nbytes for header in maps for each in like(header).values())
    recipe = functools.partial(QUANTISED.recipe, code_format)
    return Quantisation(kept, num_bytes, recipe, codes)


def random_weights(
    network: DecoderNetwork,
    seed: int,
    device: torch.device,
    options: LoadOptions = LOAD_DEFAULTS,
) -> DecoderNetwork:
    checkpoint.randomise(network, seed, device, _scale, _GAINS, options)
    return network.eval()


def _scale(_name: str, shape: torch.Size) -> float:
    return 1.0 / math.sqrt(shape[1]) if len(shape) == 2 else 0.02


def _parts(network: DecoderNetwork) -> dict[str, Destination]:
    packed = {name: m for name, m in network.named_modules() if isinstance(m, PackedLinear)}
    parts: dict[str, Destination] = {}
    for name in network.state_dict():
        module, _, kind = name.rpartition(".")
        if module not in packed:
            parts[network.checkpoint_name(name)] = Destination(name)
            continue
        parent, row = module.rpartition(".")[0], 0
        for part, num_rows in packed[module].parts.items():
            stored = network.checkpoint_name(f"{parent}.{part}.{kind}")
            parts[stored] = Destination(name, row, num_rows)
            row += num_rows
    return parts


def _check_tied(stored: Sequence[TensorHeader], embeddings: str) -> None:
    """Refuse a stored head unless it equals the embeddings, because it is not loaded."""
    by_name = {header.name: header for header in stored}
    if _HEAD not in by_name or embeddings not in by_name:
        return
    if not torch.equal(checkpoint.read(by_name[_HEAD]), checkpoint.read(by_name[embeddings])):
        raise InvalidField(
            f"{_HEAD} differs from {embeddings}, to which tie_word_embeddings ties it",
            field="weights",
        )


# ---------------------------------------------------------------- network

# Shape legend: T tokens, B rows of one token, D width, V vocabulary.


class GatedBlock(nn.Module):
    """Attention, then a gated MLP, each with an RMS norm and a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = GroupedAttention(config.dim, config.heads)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = GatedMLP(config.dim, config.ff_dim)

    def forward(
        self,
        x: torch.Tensor,
        where: AttentionMetadata | Span,
        cache: LayerCache,
        attend: Attend,
        adapters: LayerAdapters | None = None,
    ) -> torch.Tensor:
        """Compute the layer; the storage of x may be reused."""
        _, normed = ops.add_rms_norm(x, None, self.input_layernorm)
        heads = self.self_attn(normed, where, cache, attend, adapters)
        x, normed = ops.add_rms_norm(x, heads, self.post_attention_layernorm)
        return self.mlp.onto(x, normed, adapters)

    def cpu_layer(self) -> cpu.CpuLayer:
        """Return this layer for a decoder on the CPU, once it is packed."""
        attention, mlp = self.self_attn, self.mlp
        return cpu.CpuLayer(
            norm=cpu_norm(self.input_layernorm),
            qkv=cpu_map(attention.qkv),
            out=cpu_map(attention.o_proj),
            up=cpu_map(mlp.gate_up),
            down=cpu_map(mlp.down_proj),
            next_norm=cpu_norm(self.post_attention_layernorm),
            query_norm=cpu_norm(attention.q_norm) if attention.norms_heads else None,
            key_norm=cpu_norm(attention.k_norm) if attention.norms_heads else None,
        )


class DecoderNetwork(nn.Module):
    """All weights; `block` makes a layer with the methods of `GatedBlock`.

    Modules are named as in Llama's checkpoints, apart from packed layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        block: Callable[[DecoderConfig], nn.Module] = GatedBlock,
        norm: nn.RMSNorm | nn.LayerNorm | None = None,
        *,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        # Unlike the constructor this draws no noise, for which torch would load its compiler.
        embeddings = torch.empty(config.vocab_size, config.dim)
        self.embed_tokens: Embedding = Embedding.from_pretrained(  # type: ignore[no-untyped-call]  # torch's
            embeddings, freeze=False
        )
        self.layers = nn.ModuleList(block(config) for _ in range(config.num_layers))
        self.norm = norm or nn.RMSNorm(config.dim, eps=config.norm_eps)
        if not config.tied_head:
            self.lm_head = Linear(config.dim, config.vocab_size, bias=head_bias)
        self.rope = Rope(
            config.rope_theta, config.rotary_dim, config.max_context, config.rope_scaling
        )
        self.config = config
        # Of a layer, by map in the order of `cpu.CpuLayer`, which is that of a block.
        self._low_rank_parts = [
            [*_parts_of(name, module)]
            for name, module in self.layers[0].named_modules()
            if isinstance(module, Linear)
        ]
        self._table: PanelWeight | None = None
        self._tied_head: PackedWeight | None = None
        self._tied_format: CodeFormat | None = None
        self._on_cpu: cpu.CpuDecoder | None = None

    @staticmethod
    def checkpoint_name(name: str) -> str:
        return name if name.startswith("lm_head.") else f"model.{name}"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of what is no code."""
        return self.norm.weight.dtype

    @property
    def num_parameters(self) -> int:
        """Return their number before maps are packed, as codes or as numbers."""
        coded = sum(module.num_coded for module, _ in self._coded())
        return coded + sum(parameter.numel() for parameter in self.parameters())

    def map_formats(self, code_format: CodeFormat) -> dict[str, CodeFormat]:
        """Return the formats of a quantised checkpoint's maps, by name; embeddings stay."""
        return {
            part: code_format.of_head if is_head else code_format
            for module, parts in self._coded()
            if isinstance(module, Linear)
            for is_head in (module is getattr(self, "lm_head", None),)
            for part in parts
        }

    def expect_codes(
        self, formats: Mapping[str, CodeFormat], tied_format: CodeFormat | None = None
    ) -> dict[str, CodeFormat]:
        """Have codes in place of maps, all of whose parts in the checkpoint have a format.

        Return the formats of these parts: a map has one kernel, so parts of different formats are
        to be rounded to blocks of 8 bits. A tied head is to be rounded to `tied_format`.
        """
        found: dict[str, CodeFormat] = {}
        self._tied_format = tied_format
        for module, parts in self._coded():
            if all(part in formats for part in parts):
                own = {formats[part] for part in parts}
                code_format = own.pop() if len(own) == 1 else BLOCKS_OF_8_BITS
                module.expect_codes(code_format)
                found |= dict.fromkeys(parts, code_format)
        return found

    def dequantise(self) -> None:
        """Turn a checkpoint's codes into numbers, for devices without kernels that read them."""
        self._tied_format = None
        for module, _ in self._coded():
            if module.stored is not None:
                module.use_codes(None)

    def adapter_targets(self) -> PeftTargets:
        maps: dict[str, Widths] = {}
        modules: dict[str, tuple[int, str]] = {}
        for layer, block in enumerate(self.layers):
            for path, module in block.named_modules(prefix=f"layers.{layer}"):
                if not isinstance(module, Linear):
                    continue
                for part, outputs in _parts_of(path, module).items():
                    maps[part] = module.in_features, outputs
                    name = self.checkpoint_name(f"{path.rpartition('.')[0]}.{part}.weight")
                    modules[name.removesuffix(".weight")] = layer, part
        return PeftTargets(BankSizes(self.config.num_layers, maps), modules)

    def pack(self, kind: str, library: Library | None) -> None:
        """Pack all linear maps on the CPU, the rotations being there.

        Codes of a checkpoint need a `library`. A tied head is packed beside the embeddings, and
        with a library in their place, unless only the head is rounded.
        """
        head_kind, embeddings = packed_weights.head_kind(kind), self.embed_tokens
        if embeddings.stored is not None:
            self._table = embeddings.use_codes(library)
        if not self.config.tied_head:
            self.lm_head.pack(head_kind, library)
        elif library is None:
            self._tied_head = packed_weights.pack(embeddings.weight, head_kind, None)
        elif (own := self._rounded_head(library)) is not None:
            self._tied_head = own
        else:
            self._table = self._table or packed_weights.panels(
                embeddings.weight, head_kind, library
            )
            self._tied_head = self._table
            empty = embeddings.weight.new_empty(0)
            embeddings.weight = nn.Parameter(empty, requires_grad=False)
        pack_linears(self, kind, library)
        if library is not None and self.config.heads.head_dim % cpu.LANES == 0:
            self._on_cpu = self._cpu_decoder(library)

    def _rounded_head(self, library: Library) -> PanelWeight | None:
        """Return the panels of the head's codes as a GPU has them, if there are such panels."""
        if self._tied_format is None:
            return None
        codes = map_codes(self.embed_tokens.weight.bfloat16(), self._tied_format.of_head)
        panels = panel_kind(codes)
        return None if panels is None else PanelWeight(library, codes, panels)

    def cannot_quantise(self, device: torch.device) -> str | None:
        """Return why a GPU's kernels would not read packed maps, or None."""
        if not has_step_kernels(device):
            return "needs a GPU of compute capability 8.0 or later"
        if self.dtype is not torch.bfloat16:
            return f"computes in bf16, not in {self.dtype}".replace("torch.", "")
        return self.misfit(GROUP)

    def misfit(self, group: int) -> str | None:
        """Return why maps do not fit a GPU's kernels with so many inputs for a scale, or None.

        Embeddings are as large as the head, which may be tied to them.
        """
        shapes = [module.weight.shape for module, _ in self._coded()]
        if any(inputs % group or outputs % 16 for outputs, inputs in shapes):
            return f"takes maps of a multiple of {group} inputs and of 16 outputs"
        return None

    def quantise(self, kind: WeightKind, *, keeps_maps: bool = False) -> None:
        """Replace the loaded maps by packed copies on a GPU, the head's with 8 bits at least.

        If it `keeps_maps`, passes of many tokens read them. Loaded codes are not rounded again.
        Embeddings become or stay numbers, also those that a tied head is a packed copy of.
        """
        embeddings, head = self.embed_tokens, None
        if embeddings.stored is not None:
            head = StepMap(embeddings.take_codes())
            embeddings.weight = nn.Parameter(head.dense(), requires_grad=False)
        if self.config.tied_head:
            dense_OI = embeddings.weight if keeps_maps else None
            self._tied_head = head or StepMap(
                map_codes(embeddings.weight, format_of(kind.of_head)), dense_OI=dense_OI
            )
        for module, _ in self._coded():
            if isinstance(module, Linear):
                own = kind.of_head if module is getattr(self, "lm_head", None) else kind
                codes = (
                    module.take_codes()
                    if module.stored
                    else map_codes(module.weight, format_of(own))
                )
                gates = isinstance(module, PackedLinear) and module.gates
                dense_OI = module.weight if keeps_maps else None
                module.take(StepMap(codes, gates=gates, dense_OI=dense_OI), module.bias)

    @property
    def runs_by_library(self) -> bool:
        return self._on_cpu is not None

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        x_TD: torch.Tensor
        if self._table is not None:
            x_TD = self._table.rows(token_ids_T).to(self.dtype)
        else:
            x_TD = self.embed_tokens(token_ids_T)
        return x_TD

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        assert not span.bidirectional, "a text model has no bidirectional prefix"
        if self._on_cpu is not None:
            rows = self._cpu_rows(kv, span.adapters)
            return self._on_cpu.span(x_TD, span.start, span.pages_M, rows, bidirectional=False)
        where, attend = span_metadata(span, self.rope), span_attention(span, x_TD.shape[0])
        return self._blocks(x_TD, where, kv, attend, span.adapters)

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        self.prefill(x_TD, span, kv)

    def chunk(self, x_TD: torch.Tensor, chunk: Chunk, kv: KVCache) -> torch.Tensor:
        """Like `prefill`, of fixed shape; can be captured."""
        where = chunk_metadata(chunk, self.rope).metadata(len(x_TD), kv.page_size)
        return self._blocks(x_TD, where, kv, chunk_attention(chunk, kv), chunk.adapters)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        if self._on_cpu is not None:
            angles = None
            if batch.rope_offset_B is not None:
                cos_B1R, sin_B1R = self.rope.at(batch.positions_B + batch.rope_offset_B)
                angles = cos_B1R[:, 0], sin_B1R[:, 0]
            rows = self._cpu_rows(kv, batch.adapters, angles)
            return self._on_cpu.decode(x_BD, batch.positions_B, batch.page_table_BM, rows)
        where, attend = step_metadata(batch, kv, self.rope), step_attention(batch, kv)
        return self._blocks(x_BD, where, kv, attend, batch.adapters)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        normed_BD = self.norm(hidden_BD)
        if self._tied_head is not None:
            return packed_weights.linear(normed_BD, self._tied_head, None).float()
        if self.config.tied_head:
            return ops.linear(normed_BD, self.embed_tokens.weight, None).float()
        return self.lm_head(normed_BD).float()

    def _blocks(
        self,
        x: torch.Tensor,
        where: AttentionMetadata | Span,
        kv: KVCache,
        attend: Attend,
        adapters: AdaptedRows | None,
    ) -> torch.Tensor:
        for layer, block in enumerate(self.layers):
            own = None if adapters is None else adapters.layer(layer)
            x = block(x, where, kv.layer(layer), attend, own)
        return x

    def _coded(self) -> Iterator[tuple[Coded, tuple[str, ...]]]:
        """Yield embeddings, maps and head, with the names of their parts in a checkpoint."""
        for name, module in self.named_modules():
            if isinstance(module, Coded) and name.split(".")[0] in _CODED:
                parent, _, own = name.rpartition(".")
                parts = module.parts if isinstance(module, PackedLinear) else (own,)
                stored = (
                    self.checkpoint_name(f"{parent}.{part}.weight".lstrip(".")) for part in parts
                )
                yield module, tuple(each.removesuffix(".weight") for each in stored)

    def _cpu_rows(
        self,
        kv: KVCache,
        adapters: AdaptedRows | None,
        angles: cpu.Angles | None = None,
        layers: slice = slice(None),
    ) -> cpu.CpuRows:
        low_rank = None
        if adapters is not None:
            maps = adapters.weights.maps
            stacks = (
                [LowRankStack(*(each[layers] for each in maps[part])) for part in parts]
                for parts in self._low_rank_parts
            )
            low_rank = cpu.CpuLowRank(adapters.rows, *stacks)
        return cpu.CpuRows(kv.k_LNHSE[layers], kv.v_LNHSE[layers], low_rank, angles)

    def _cpu_decoder(self, library: Library, of: slice = slice(None)) -> cpu.CpuDecoder:
        heads = self.config.heads
        gated = isinstance(self.layers[0], GatedBlock)
        sizes = cpu.CpuSizes(heads.num_heads, heads.num_kv_heads, heads.head_dim, gated)
        blocks: Iterable[Any] = self.layers[of]  # of `nn.Module`, which hides their methods
        layers = [block.cpu_layer() for block in blocks]
        return cpu.CpuDecoder(library, layers, sizes, (self.rope.cos_PR, self.rope.sin_PR))


def _parts_of(name: str, module: Linear) -> dict[str, int]:
    """Return the outputs of a map's parts by their own names."""
    if isinstance(module, PackedLinear):
        return module.parts
    return {name.rpartition(".")[2]: module.out_features}


# ---------------------------------------------------------------- model

# Shape legend: T tokens, B rows, D text width, V vocabulary.


class DecoderModel(Model):
    """A model over a loaded, frozen network, with adapters and captured prompts."""

    has_prefill_chunks = True

    def __init__(self, network: DecoderNetwork) -> None:
        config = network.config
        self.constraints = FREE
        self.num_layers = config.num_layers
        self.num_kv_heads = config.heads.num_kv_heads
        self.head_dim = config.heads.head_dim
        self.vocab_size = config.vocab_size
        self.width = config.dim
        self.max_context = config.max_context
        self.dtype = network.dtype
        self.kv_scale_L2 = None
        self.num_parameters = network.num_parameters
        self.bos_token = 0  # unused: the prefix is empty
        self._network = self._decoder = network
        self._targets = network.adapter_targets()
        self._device = network.norm.weight.device
        network.rope.fill(self._device)

    @property
    def own_threads(self) -> bool:
        return self._network.runs_by_library

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[0, D]: the tokenizer puts BOS into the prompt."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self._device)

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        return self._network.embed(token_ids_T)

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank:
        sizes, like = self._targets.sizes, self._network.norm.weight
        return AdapterBank(sizes, num_slots=num_slots, max_rank=max_rank, like=like)

    def read_adapter(self, data: bytes, key: str, max_rank: int, settings: bytes = b"") -> Adapter:
        weights = parse_peft(data, settings, self._targets, max_rank, self.dtype)
        return Adapter.on_host(key, weights, self._device)
