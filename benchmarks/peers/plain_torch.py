"""Plain torch operations under one CUDA graph: a decoder without kernels of its own.

Every step runs at the same position, so all read the same context. Shape legend: B streams, D
width, H heads, S positions, E head dim, R rotary dim.
"""

from __future__ import annotations

import dataclasses
import statistics

import torch
from legato_engine.device.select import open_device
from torch.nn import functional as F

from benchmarks import peers

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a block, [out, in], and its keys and values [B, H, S, E]."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    k_BHSE: Tensor
    v_BHSE: Tensor


class Decoder:
    """Random weights, random context; `step` reads and replaces `token_B`. Biases are zero."""

    def __init__(self, shape: peers.Shape, streams: int, context: int, device: str) -> None:
        self._shape = shape
        self._context = context
        dtype = torch.bfloat16

        def random(*sizes: int) -> Tensor:
            weights: Tensor = torch.randn(*sizes, device=device, dtype=dtype) * 0.02
            return weights

        dim, ff_dim = shape.dim, shape.ff_dim
        cache = (streams, shape.heads, context + 1, shape.head_dim)
        self._layers = [
            Layer(
                qkv=random(3 * dim, dim),
                out=random(dim, dim),
                up=random(ff_dim, dim),
                down=random(dim, ff_dim),
                k_BHSE=random(*cache),
                v_BHSE=random(*cache),
            )
            for _ in range(shape.layers)
        ]
        self._embedding, self._head = random(shape.vocab, dim), random(shape.vocab, dim)
        self._bias_D = torch.zeros(dim, device=device, dtype=dtype)
        self._ff_bias = torch.zeros(ff_dim, device=device, dtype=dtype)
        self._qkv_bias = torch.zeros(3 * dim, device=device, dtype=dtype)
        self._norm_D = torch.ones(dim, device=device, dtype=dtype)
        frequencies = 1e4 ** (-torch.arange(0, shape.rotary_dim, 2) / shape.rotary_dim)
        angles_R = (context * frequencies).repeat(2)
        self._cos_R = angles_R.cos().to(device, dtype)
        self._sin_R = angles_R.sin().to(device, dtype)
        self.token_B = torch.zeros(streams, dtype=torch.int64, device=device)

    def step(self) -> None:
        """Run a forward pass and sample one token a stream, greedily."""
        x_BD = self._embedding[self.token_B]
        for layer in self._layers:
            h_BD = self._normed(x_BD)
            up = F.gelu(F.linear(h_BD, layer.up, self._ff_bias), approximate="tanh")
            x_BD = x_BD + self._attention(h_BD, layer) + F.linear(up, layer.down, self._bias_D)
        logits_BV = F.linear(self._normed(x_BD), self._head)
        self.token_B.copy_(logits_BV.argmax(dim=-1))

    def _attention(self, h_BD: Tensor, layer: Layer) -> Tensor:
        shape = self._shape
        qkv = F.linear(h_BD, layer.qkv, self._qkv_bias)
        q_BHE, k_BHE, v_BHE = qkv.view(-1, 3, shape.heads, shape.head_dim).unbind(1)
        layer.k_BHSE[:, :, self._context] = self._rotated(k_BHE)
        layer.v_BHSE[:, :, self._context] = v_BHE
        q_BH1E = self._rotated(q_BHE)[:, :, None]
        mixed = F.scaled_dot_product_attention(q_BH1E, layer.k_BHSE, layer.v_BHSE)
        return F.linear(mixed.reshape(-1, shape.dim), layer.out, self._bias_D)

    def _rotated(self, x_BHE: Tensor) -> Tensor:
        rotary = self._shape.rotary_dim
        turn, keep = x_BHE[..., :rotary], x_BHE[..., rotary:]
        first, second = turn.chunk(2, dim=-1)
        turned = turn * self._cos_R + torch.cat((-second, first), dim=-1) * self._sin_R
        return torch.cat((turned, keep), dim=-1)

    def _normed(self, x_BD: Tensor) -> Tensor:
        return F.layer_norm(x_BD, (self._shape.dim,), self._norm_D, self._bias_D)


def main() -> None:
    """Emit a row per number of streams."""
    options = peers.parse()
    device = open_device(options.device)
    with torch.inference_mode():
        for streams in options.streams:
            decoder = Decoder(options.shape, streams, options.context, options.device)
            replay = device.capture(decoder.step)
            times = peers.step_times(replay, options)
            peers.emit(
                {"streams": streams, "step_ms": statistics.median(times), "steps": len(times)}
            )
            del decoder, replay
    peers.emit({"versions": peers.versions()})
    device.close()


if __name__ == "__main__":
    main()
