"""The decoder network of text models, its weights, and the model on a device.

Layers of a `PackedLinear` are stored apart; a tied head may be stored, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from legato_engine.errors import InvalidField
from legato_engine.kernels import ops, packed_weights
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.decoder import PanelWeight
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.map_codes import GROUP, WeightKind
from legato_engine.kernels.packed_weights import PackedWeight
from legato_engine.kernels.pages import AttentionMetadata, LayerCache, Span
from legato_engine.kernels.step import StepMap, has_step_kernels
from legato_engine.layers.attention import Attend, GroupedAttention
from legato_engine.layers.cpu import cpu_map, cpu_norm
from legato_engine.layers.linear import Linear, PackedLinear, pack_linears
from legato_engine.layers.mlp import GatedMLP
from legato_engine.layers.rope import Rope
from legato_engine.models import checkpoint
from legato_engine.models.base import Model
from legato_engine.models.checkpoint import Destination, TensorHeader, headers, opened
from legato_engine.models.decoder.config import DecoderConfig
from legato_engine.models.decoder.frontend import FREE
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_attention import (
    DecodeBatch,
    KVCache,
    PrefillSpan,
    span_attention,
    span_metadata,
    step_attention,
    step_metadata,
)
from legato_engine.models.registry import LOAD_DEFAULTS, LoadOptions

_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # in old checkpoints; `Rope` computes it
_HEAD = "lm_head.weight"
_GAINS = re.compile(r"norm\d?\.weight$")


class _Part(NamedTuple):
    """A stored tensor's destination, and the rows that it fills."""

    destination: Destination
    num_rows: int


def load_weights(
    network: DecoderNetwork,
    folder: Path,
    device: torch.device,
    options: LoadOptions = LOAD_DEFAULTS,
) -> DecoderNetwork:
    """Fill a network made on the meta device.

    Raises:
        InvalidField: as `checkpoint.load`, or a stored head differs from tied embeddings.
    """
    parts = _parts(network)
    stored = headers(folder)
    _check_rows(stored, parts)
    if network.config.tied_head:
        _check_tied(stored, network.checkpoint_name("embed_tokens.weight"))

    def rename(name: str) -> str | Destination | None:
        if _DERIVED.search(name) or (name == _HEAD and network.config.tied_head):
            return None
        return parts[name].destination if name in parts else name

    checkpoint.load(network, stored, rename, device, options)
    return network.eval()


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


def _parts(network: DecoderNetwork) -> dict[str, _Part]:
    packed = {name: m for name, m in network.named_modules() if isinstance(m, PackedLinear)}
    parts: dict[str, _Part] = {}
    for name, tensor in network.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module not in packed:
            parts[network.checkpoint_name(name)] = _Part(Destination(name), tensor.shape[0])
            continue
        parent, row = module.rpartition(".")[0], 0
        for part, num_rows in packed[module].parts.items():
            stored = network.checkpoint_name(f"{parent}.{part}.{kind}")
            parts[stored] = _Part(Destination(name, row), num_rows)
            row += num_rows
    return parts


def _check_rows(stored: Sequence[TensorHeader], parts: dict[str, _Part]) -> None:
    """Refuse a part with too many rows: it would overwrite the next one."""
    for header in stored:
        part = parts.get(header.name)
        if part is None or part.destination.first_row is None:
            continue
        if header.shape[:1] != (part.num_rows,):
            shape = f"shape {list(header.shape)}, expected {part.num_rows} rows"
            raise InvalidField(f"{header.name}: {shape}", field="weights")


def _check_tied(stored: Sequence[TensorHeader], embeddings: str) -> None:
    """Refuse a stored head unless it equals the embeddings, because it is not loaded."""
    by_name = {header.name: header for header in stored}
    if _HEAD not in by_name or embeddings not in by_name:
        return
    if not torch.equal(_read(by_name[_HEAD]), _read(by_name[embeddings])):
        raise InvalidField(
            f"{_HEAD} differs from {embeddings}, to which tie_word_embeddings ties it",
            field="weights",
        )


def _read(header: TensorHeader) -> torch.Tensor:
    tensor = torch.empty(header.shape, dtype=header.dtype)
    with opened(header.file) as fill:
        fill(header.name, tensor)
    return tensor


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
    ) -> torch.Tensor:
        """Compute the layer; the storage of x may be reused."""
        _, normed = ops.add_rms_norm(x, None, self.input_layernorm)
        heads = self.self_attn(normed, where, cache, attend)
        x, normed = ops.add_rms_norm(x, heads, self.post_attention_layernorm)
        return self.mlp.onto(x, normed)

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
        norm: nn.Module | None = None,
        *,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        # Unlike the constructor this draws no noise, for which torch would load its compiler.
        embeddings = torch.empty(config.vocab_size, config.dim)
        self.embed_tokens = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]  # torch's
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
        self._tied_head: PackedWeight | None = None
        self._on_cpu: cpu.CpuDecoder | None = None

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """Return the stored name of a parameter or module."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    def pack(self, kind: str, library: Library | None) -> None:
        """Pack all linear maps on the CPU, the rotations being there.

        A tied head is packed beside the embeddings, and with a `library` in their place.
        """
        head_kind = packed_weights.head_kind(kind)
        if self.config.tied_head:
            embeddings_VD = self.embed_tokens.weight
            self._tied_head = packed_weights.pack(embeddings_VD, head_kind, library)
            if library is not None:
                empty = embeddings_VD.new_empty(0)
                self.embed_tokens.weight = nn.Parameter(empty, requires_grad=False)
        else:
            self.lm_head.pack(head_kind, library)
        pack_linears(self, kind, library)
        if library is not None and self.config.heads.head_dim % cpu.LANES == 0:
            self._on_cpu = self._cpu_decoder(library)

    def cannot_quantise(self, device: torch.device) -> str | None:
        """Return why a GPU's kernels would not read packed maps, or None."""
        if not has_step_kernels(device):
            return "needs a GPU of compute capability 8.0 or later"
        dtype = self.embed_tokens.weight.dtype
        if dtype is not torch.bfloat16:
            return f"computes in bf16, not in {dtype}".replace("torch.", "")
        maps = [each for each in self._maps() if isinstance(each, Linear)]
        if any(each.in_features % GROUP or each.out_features % 16 for each in maps):
            return f"takes maps of a multiple of {GROUP} inputs and of 16 outputs"
        return None

    def quantise(self, kind: WeightKind) -> None:
        """Replace the loaded maps by packed copies on a GPU, the head's with 8 bits at least.

        Embeddings stay, also those that a tied head is a packed copy of.
        """
        head_kind = WeightKind.INT8 if kind is WeightKind.INT4 else kind
        if self.config.tied_head:
            self._tied_head = StepMap(self.embed_tokens.weight, head_kind)
        else:
            self.lm_head.take(StepMap(self.lm_head.weight, head_kind), self.lm_head.bias)
        for module in self._maps():
            if isinstance(module, Linear) and module.packed is None:
                module.take(StepMap(module.weight, kind), module.bias)

    @property
    def runs_by_library(self) -> bool:
        return self._on_cpu is not None

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        x_TD: torch.Tensor
        if isinstance(self._tied_head, PanelWeight):
            x_TD = self._tied_head.rows(token_ids_T).to(self.embed_tokens.weight.dtype)
        else:
            x_TD = self.embed_tokens(token_ids_T)
        return x_TD

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        assert not span.bidirectional, "a text model has no bidirectional prefix"
        if self._on_cpu is not None:
            rows = cpu.CpuRows(kv.k_LNHSE, kv.v_LNHSE)
            return self._on_cpu.span(x_TD, span.start, span.pages_M, rows, bidirectional=False)
        where, attend = span_metadata(span, self.rope), span_attention(span, x_TD.shape[0])
        return self._blocks(x_TD, where, kv, attend)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        if self._on_cpu is not None:
            angles = None
            if batch.rope_offset_B is not None:
                cos_B1R, sin_B1R = self.rope.at(batch.positions_B + batch.rope_offset_B)
                angles = cos_B1R[:, 0], sin_B1R[:, 0]
            rows = cpu.CpuRows(kv.k_LNHSE, kv.v_LNHSE, angles=angles)
            return self._on_cpu.decode(x_BD, batch.positions_B, batch.page_table_BM, rows)
        where, attend = step_metadata(batch, kv, self.rope), step_attention(batch, kv)
        return self._blocks(x_BD, where, kv, attend)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        normed_BD = self.norm(hidden_BD)
        if self._tied_head is not None:
            return packed_weights.linear(normed_BD, self._tied_head, None).float()
        if self.config.tied_head:
            return ops.linear(normed_BD, self.embed_tokens.weight, None).float()
        logits_BV: torch.Tensor = self.lm_head(normed_BD)
        return logits_BV.float()

    def _blocks(
        self, x: torch.Tensor, where: AttentionMetadata | Span, kv: KVCache, attend: Attend
    ) -> torch.Tensor:
        for layer, block in enumerate(self.layers):
            x = block(x, where, kv.layer(layer), attend)
        return x

    def _maps(self) -> Iterator[nn.Module]:
        """Modules with the decoder's maps."""
        yield from self.layers.modules()
        if not self.config.tied_head:
            yield self.lm_head

    def _cpu_decoder(self, library: Library, of: slice = slice(None)) -> cpu.CpuDecoder:
        heads = self.config.heads
        gated = isinstance(self.layers[0], GatedBlock)
        sizes = cpu.CpuSizes(heads.num_heads, heads.num_kv_heads, heads.head_dim, gated)
        blocks: Iterable[Any] = self.layers[of]  # of `nn.Module`, which hides their methods
        layers = [block.cpu_layer() for block in blocks]
        return cpu.CpuDecoder(library, layers, sizes, (self.rope.cos_PR, self.rope.sin_PR))


# ---------------------------------------------------------------- model

# Shape legend: T tokens, B rows, D text width, V vocabulary.


class DecoderModel(Model):
    """A model over a loaded, frozen network, without optional capabilities."""

    def __init__(self, network: DecoderNetwork) -> None:
        config = network.config
        self.constraints = FREE
        self.num_layers = config.num_layers
        self.num_kv_heads = config.heads.num_kv_heads
        self.head_dim = config.heads.head_dim
        self.vocab_size = config.vocab_size
        self.width = config.dim
        self.max_context = config.max_context
        self.dtype = network.embed_tokens.weight.dtype
        self.kv_scale_L2 = None
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self.bos_token = 0  # unused: the prefix is empty
        self._network = network
        self._device = network.embed_tokens.weight.device
        network.rope.fill(self._device)

    @property
    def own_threads(self) -> bool:
        return self._network.runs_by_library

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[0, D]: the tokenizer puts BOS into the prompt."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self._device)

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        return self._network.embed(token_ids_T)

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        return self._network.prefill(x_TD, span, kv)

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        self._network.prefill(x_TD, span, kv)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        return self._network.decode(x_BD, batch, kv)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self._network.logits(hidden_BD)
