"""Qwen3-VL on a device: the text decoder with rotations in three dimensions, and its vision tower.

Shape legend: T tokens, B rows of one token, D text width, R rotated pairs, N tokens of images,
K features of one, P patches, C channels, F frames, Y and X pixels.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.pages import AttentionMetadata
from legato_engine.models.decoder.config import DecoderConfig
from legato_engine.models.decoder.model import DecoderModel, DecoderNetwork
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_attention import KVCache, PrefillSpan, VisualRows, span_attention
from legato_engine.models.qwen3_vl.config import Qwen3VLConfig
from legato_engine.models.qwen3_vl.processor import PatchedImage
from legato_engine.models.qwen3_vl.vision import VisionTower


class Qwen3VLNetwork(DecoderNetwork):
    """All weights of the text model and of `visual`."""

    def __init__(self, config: DecoderConfig) -> None:
        assert isinstance(config, Qwen3VLConfig), "a configuration of another family"
        super().__init__(config)
        self.visual = VisionTower(config.vision, config.dim)
        self._axes = _axes(config.sections)
        self._num_taps = len(config.vision.taps)
        self._parts_on_cpu: list[cpu.CpuDecoder] = []

    @staticmethod
    def checkpoint_name(name: str) -> str:
        if name == "visual.pos_embed":
            return "model.visual.pos_embed.weight"
        if name.startswith("visual."):
            return "model." + name.replace(".mlp.fc", ".mlp.linear_fc")
        return name if name.startswith("lm_head.") else f"model.language_model.{name}"

    def pack(self, kind: str, library: Library | None) -> None:
        super().pack(kind, library)
        if self._on_cpu is not None and library is not None:
            taps, num_layers = self._num_taps, self.config.num_layers
            stops = [*range(1, taps + 1), *([num_layers] if taps < num_layers else [])]
            self._parts_on_cpu = [
                self._cpu_decoder(library, slice(start, stop))
                for start, stop in zip([0, *stops], stops, strict=False)
            ]
            self.visual.use_library(library)

    @property
    def runs_by_library(self) -> bool:
        return super().runs_by_library and bool(self.visual.on_cpu)

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        """Put features of images in the place of embeddings, and add the others layer by layer."""
        visual = span.visual
        if visual is None:
            return super().prefill(x_TD, span, kv)
        has_images = len(visual.rows_N) > 0
        if has_images:
            x_TD = x_TD.index_copy(0, visual.rows_N, visual.features_NKD[:, 0])
        angles = self._angles(visual)
        if self._parts_on_cpu:
            return self._prefill_on_cpu(x_TD, span, visual, angles, kv)
        positions_T = torch.arange(span.start, span.start + len(x_TD), device=x_TD.device)
        cos_T1R, sin_T1R = (each[:, None] for each in angles)
        where = AttentionMetadata(
            *(cos_T1R, sin_T1R),
            *(span.pages_M[positions_T // kv.page_size], positions_T % kv.page_size),
        )
        attend, adapters = span_attention(span, len(x_TD)), span.adapters
        for layer, block in enumerate(self.layers):
            own = None if adapters is None else adapters.layer(layer)
            x_TD = block(x_TD, where, kv.layer(layer), attend, own)
            if has_images and layer < self._num_taps:
                x_TD.index_add_(0, visual.rows_N, visual.features_NKD[:, layer + 1])
        return x_TD

    def _prefill_on_cpu(
        self,
        x_TD: torch.Tensor,
        span: PrefillSpan,
        visual: VisualRows,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
    ) -> torch.Tensor:
        """Compute in float32 throughout, as one call for all layers does."""
        x32_TD, features_NKD, first = x_TD.float(), visual.features_NKD.float(), 0
        for tap, part in enumerate(self._parts_on_cpu):
            layers = slice(first, first + part.num_layers)
            rows = self._cpu_rows(kv, span.adapters, angles, layers)
            x32_TD = part.span(x32_TD, span.start, span.pages_M, rows, bidirectional=False)
            if len(visual.rows_N) and tap < self._num_taps:
                x32_TD.index_add_(0, visual.rows_N, features_NKD[:, tap + 1])
            first += part.num_layers
        return x32_TD.to(x_TD.dtype)

    def _angles(self, visual: VisualRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R]: of a pair by the position in its dimension."""
        axes_R = torch.tensor(self._axes, device=visual.rope_3T.device)
        positions_TR = visual.rope_3T[axes_R].t()
        return self.rope.cos_PR.gather(0, positions_TR), self.rope.sin_PR.gather(0, positions_TR)


def _axes(sections: tuple[int, int, int]) -> list[int]:
    """Return by which dimension each pair rotates: 0 time, 1 row, 2 column, interleaved."""
    axes = [pair % 3 for pair in range(sum(sections))]
    return [axis if pair < 3 * sections[axis] else 0 for pair, axis in enumerate(axes)]


class Qwen3VLModel(DecoderModel):
    """A text model whose prompts hold images."""

    has_visual_prompts = True

    def __init__(self, network: DecoderNetwork) -> None:
        assert isinstance(network, Qwen3VLNetwork), "a network of another family"
        super().__init__(network)
        network.visual.patch_embed.flatten()
        self._visual = network.visual
        config = network.config
        assert isinstance(config, Qwen3VLConfig), "a configuration of another family"
        self.max_image_tokens = config.max_image_tokens
        num_features = 1 + len(config.vision.taps)
        self.image_token_bytes = num_features * self.width * self.dtype.itemsize

    def encode_image(self, image: PreparedImage) -> Generator[None, None, torch.Tensor]:
        patches: PatchedImage = image.pixels
        levels_PCFYX = torch.from_numpy(patches.levels_PCFYX)
        if self._device.type != "cpu":
            levels_PCFYX = levels_PCFYX.pin_memory().to(self._device, non_blocking=True)
        return self._visual.encode(levels_PCFYX, patches.rows, patches.columns)
