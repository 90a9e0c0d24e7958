"""The decoder: its cache, its experts and its adapters."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.reference.moondream3.config import Config, Switches, TextConfig
from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    attend,
    cached,
    expert_matrix,
    gelu_erf,
    gelu_tanh,
    layer_norm,
    linear,
    round_bfloat16,
    sigmoid,
    softmax,
    split_heads,
    weight,
)

# ---------------------------------------------------------------- moe
# The experts of the later layers.
#
# Shapes: T positions, D the text model's width, E experts.


def route(logits_E: Array, experts_per_token: int) -> tuple[NDArray[np.int64], Array]:
    """The experts with the largest logits, largest first, and their weights.

    Among equals the lower index wins. The choice comes before the softmax: the weights sum to 1.
    """
    chosen = np.argsort(-logits_E, kind="stable")[:experts_per_token]
    return chosen, softmax(logits_E[chosen])


def expert_mlp(x_TD: Array, expert: int, weights: Weights, name: str, adapter: str = "") -> Array:
    """One expert on T positions: down of gelu(first half of its rows) * (second half + 1).

    An adapter changes up and down; the expert's weight is applied afterwards.
    """
    up = x_TD @ expert_matrix(weights, f"{name}.fc1", expert).T
    first, second = np.split(up + change(x_TD, weights, f"{adapter}.up", expert), 2, axis=-1)
    hidden = gelu_erf(first) * (second + 1)
    down = hidden @ expert_matrix(weights, f"{name}.fc2", expert).T
    return down + change(hidden, weights, f"{adapter}.down", expert)


def moe(
    x_TD: Array, text: TextConfig, weights: Weights, name: str, adapter: str = ""
) -> tuple[Array, Array]:
    """The weighted sum of each position's experts [T, D], and the router's logits [T, E].

    `adapter` is the name of the layer's changes, which need not be there.
    """
    logits_TE = linear(x_TD, weights, f"{name}.router")
    shares_TE = np.zeros_like(logits_TE)
    for position, logits_E in enumerate(logits_TE):
        chosen, shares = route(logits_E, text.experts_per_token)
        shares_TE[position, chosen] = shares
    out_TD = np.zeros_like(x_TD)
    for expert in range(text.experts):
        rows = np.flatnonzero(shares_TE[:, expert])
        if len(rows):
            mlp = expert_mlp(x_TD[rows], expert, weights, name, adapter)
            out_TD[rows] += shares_TE[rows, expert, None] * mlp
    return out_TD, logits_TE


def router_margin(logits_TE: Array, experts_per_token: int) -> float:
    """How far, at the closest position, the last chosen logit is from the first that is not."""
    descending = -np.sort(-logits_TE, axis=-1)
    return float((descending[:, experts_per_token - 1] - descending[:, experts_per_token]).min())


# ---------------------------------------------------------------- adapters
# Adapters: low-rank changes of a fine-tune, by their published names.
#
# `dense.{i}` belong to layer i, `moe.{i}` to the i-th layer with experts; each has `up_a`,
# `up_b`,
# `down_a` and `down_b`. The product of a map's input with `a` and `b` is added to its output,
# unscaled.
#
# Shapes: T positions, R ranks, I and O a map's inputs and outputs.

Shapes = dict[str, tuple[int, ...]]


def change(x_TI: Array, weights: Weights, name: str, expert: int | None = None) -> Array | float:
    """[T, O]: what the adapter adds to the map `name` of x; nothing if it has no such map."""
    if f"{name}_a" not in weights:
        return 0.0
    a_RI, b_OR = weight(weights, f"{name}_a"), weight(weights, f"{name}_b")
    if expert is not None:
        a_RI, b_OR = a_RI[expert], b_OR[expert]
    return (b_OR @ (a_RI @ x_TI.T)).T


def layer_name(layer: int, text: TextConfig) -> str:
    """The name of a layer's changes."""
    if layer < text.dense_layers:
        return f"dense.{layer}"
    return f"moe.{layer - text.dense_layers}"


def adapter_shapes(config: Config, rank: int) -> Shapes:
    """All tensors of an adapter; active experts share the rank."""
    text, shapes = config.text, Shapes()
    share = rank // text.experts_per_token
    for layer in range(text.layers):
        name = layer_name(layer, text)
        own, lead = rank, list[int]()
        up, down = (text.width, text.inner), (text.inner, text.width)
        if layer >= text.dense_layers:
            own, lead = share, [text.experts]
            up, down = (text.width, 2 * text.expert_inner), (text.expert_inner, text.width)
        for part, (inputs, outputs) in (("up", up), ("down", down)):
            shapes[f"{name}.{part}_a"] = (*lead, own, inputs)
            shapes[f"{name}.{part}_b"] = (*lead, outputs, own)
    return shapes


def random_adapter(config: Config, rank: int, seed: int) -> dict[str, NDArray[np.generic]]:
    """Changes about as large as what they change, in float32."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
        for name, shape in adapter_shapes(config, rank).items()
    }


# ---------------------------------------------------------------- text
# The decoder, with a cache of keys and values and without.
#
# Shapes: T new positions, S all positions so far, D width, H heads, K dims of a head, V
# vocabulary.

Positions = NDArray[np.int64]
Trace = list[dict[str, Array]]
"""Per layer: normed, attention, mlp, out [T, D]; q, k, v [H, T, K] as attention reads them; and
router_logits [T, E] where there are experts."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys (rotated) and values (scaled by tau), as they are read."""

    k_HSK: Array
    v_HSK: Array


Cache = list[LayerCache]


def rotate(x_HTK: Array, positions: Positions, text: TextConfig) -> Array:
    """RoPE on the first `rotary_dim` dims: dim i with dim i + rotary_dim / 2. Others stay."""
    half = text.rotary_dim // 2
    frequencies = text.theta ** (-2 * np.arange(half) / text.rotary_dim)
    angles = positions[:, None] * frequencies
    real, imaginary = x_HTK[..., :half], x_HTK[..., half : 2 * half]
    turned = [
        real * np.cos(angles) - imaginary * np.sin(angles),
        imaginary * np.cos(angles) + real * np.sin(angles),
    ]
    return np.concatenate([*turned, x_HTK[..., 2 * half :]], axis=-1)


def position_gain(alpha_H: Array, positions: Positions, switches: Switches) -> Array:
    """What tau gives a head for a position alone: [T, H], 0.5 + sigmoid(alpha ln(p + 1))."""
    count = (positions + 1).astype(np.float64)
    if switches.tau_position == "bfloat16_position":
        logarithm = round_bfloat16(np.log(round_bfloat16(count)))
    else:
        logarithm = np.log(count)
    gain_TH = 0.5 + sigmoid(logarithm[:, None] * alpha_H)
    return round_bfloat16(gain_TH) if switches.tau_position == "bfloat16_gain" else gain_TH


def tau_gains(
    qkv_TN: Array, positions: Positions, switches: Switches, weights: Weights, name: str
) -> tuple[Array, Array]:
    """The factors of q and of v, each [T, H], from all of q, k and v, with bias, before RoPE."""
    gelu = gelu_tanh if switches.tau_gelu == "tanh" else gelu_erf
    activated = gelu(qkv_TN)
    gain_TH = position_gain(weight(weights, f"{name}.alpha"), positions, switches)
    q_TH = np.tanh(activated @ weight(weights, f"{name}.wq").T) + gain_TH
    v_TH = np.tanh(activated @ weight(weights, f"{name}.wv").T) + gain_TH
    return q_TH, v_TH


def qkv(
    x_TD: Array, positions: Positions, layer: int, config: Config, weights: Weights
) -> tuple[Array, Array, Array]:
    """q, k, v [H, T, K] of normed positions: tau on q and v, then RoPE on q and k."""
    name, text = f"text.blocks.{layer}.attn", config.text
    qkv_TN = linear(x_TD, weights, f"{name}.qkv")
    q, k, v = (split_heads(part, text.heads) for part in np.split(qkv_TN, 3, axis=-1))
    q_TH, v_TH = tau_gains(qkv_TN, positions, config.switches, weights, f"{name}.tau")
    q, v = q * q_TH.T[:, :, None], v * v_TH.T[:, :, None]
    return rotate(q, positions, text), rotate(k, positions, text), v


def _mlp(
    x_TD: Array, layer: int, config: Config, weights: Weights
) -> tuple[Array, dict[str, Array]]:
    name, adapter = f"text.blocks.{layer}.mlp", layer_name(layer, config.text)
    if layer < config.text.dense_layers:
        up = linear(x_TD, weights, f"{name}.fc1") + change(x_TD, weights, f"{adapter}.up")
        hidden = gelu_tanh(up)
        down = linear(hidden, weights, f"{name}.fc2")
        return down + change(hidden, weights, f"{adapter}.down"), {}
    out_TD, logits_TE = moe(x_TD, config.text, weights, name, adapter)
    return out_TD, {"router_logits": logits_TE}


def _cached(x_HTK: Array, weights: Weights, scale: str) -> Array:
    """Keys or values as read: rounded to fp8 if there is a scale."""
    return cached(x_HTK, weight(weights, scale)) if scale in weights else x_HTK


def block(
    x_TD: Array,
    visible_TS: NDArray[np.bool_],
    past: LayerCache,
    layer: int,
    config: Config,
    weights: Weights,
) -> tuple[LayerCache, dict[str, Array]]:
    """Attention and MLP read the same normed input, and one sum takes both.

    Returns the cache with the new positions, and a trace's entry, whose `out` is the result.
    """
    positions = np.arange(len(x_TD)) + past.k_HSK.shape[1]
    normed = layer_norm(x_TD, weights, f"text.blocks.{layer}.ln")
    q, k, v = qkv(normed, positions, layer, config, weights)
    k, v = (
        _cached(x, weights, f"text.blocks.{layer}.attn.{which}_scale")
        for which, x in zip("kv", (k, v), strict=True)
    )
    cache = LayerCache(
        np.concatenate([past.k_HSK, k], axis=1), np.concatenate([past.v_HSK, v], axis=1)
    )
    heads = attend(q, cache.k_HSK, cache.v_HSK, visible_TS)
    attention = linear(heads, weights, f"text.blocks.{layer}.attn.proj")
    mlp, routing = _mlp(normed, layer, config, weights)
    out = x_TD + attention + mlp
    traced = {"normed": normed, "q": q, "k": k, "v": v, "attention": attention, "mlp": mlp}
    return cache, traced | {"out": out} | routing


def visible(past: int, new: int, prefix: int) -> NDArray[np.bool_]:
    """The mask [new, past + new]: causal, except within the prefix."""
    query = np.arange(past, past + new)[:, None]
    key = np.arange(past + new)[None, :]
    return (key <= query) | ((query < prefix) & (key < prefix))


def empty_cache(config: Config) -> Cache:
    """A cache of no positions."""
    nothing = np.zeros((config.text.heads, 0, config.text.head_dim))
    return [LayerCache(nothing, nothing)] * config.text.layers


def extend(
    embeddings_TD: Array,
    cache: Cache,
    prefix: int,
    config: Config,
    weights: Weights,
    trace: Trace | None = None,
) -> tuple[Array, Cache]:
    """T more positions: the residual stream [T, D] before post_ln, and the cache with them.

    The first `prefix` positions of the sequence see each other both ways and come in one call.

    Raises:
        ValueError: a prefix is cut.
    """
    past = cache[0].k_HSK.shape[1]
    if 0 < past < prefix or past + len(embeddings_TD) < prefix:
        raise ValueError(f"positions {past}.. cut a prefix of {prefix}")
    visible_TS = visible(past, len(embeddings_TD), prefix)
    x_TD, new_cache = embeddings_TD, []
    for layer, layer_cache in enumerate(cache):
        grown, traced = block(x_TD, visible_TS, layer_cache, layer, config, weights)
        x_TD = traced["out"]
        new_cache.append(grown)
        if trace is not None:
            trace.append(traced)
    return x_TD, new_cache


def prefill(
    embeddings_TD: Array,
    prefix: int,
    config: Config,
    weights: Weights,
    trace: Trace | None = None,
) -> tuple[Array, Cache]:
    """A whole prompt from position 0: the residual stream [T, D] before post_ln, and the cache."""
    return extend(embeddings_TD, empty_cache(config), prefix, config, weights, trace)


def decode_step(
    embedding_D: Array,
    cache: Cache,
    config: Config,
    weights: Weights,
    trace: Trace | None = None,
) -> tuple[Array, Cache]:
    """One more position: the residual stream [D] before post_ln, and the cache with it."""
    hidden, grown = extend(embedding_D[None], cache, 0, config, weights, trace)
    return hidden[0], grown


def recompute(embeddings_TD: Array, prefix: int, config: Config, weights: Weights) -> Array:
    """The residual stream [T, D] before post_ln of a whole sequence, nothing of it from a cache."""
    return prefill(embeddings_TD, prefix, config, weights)[0]


def logits(hidden: Array, weights: Weights) -> Array:
    """[..., D] before post_ln to [..., V]."""
    return linear(layer_norm(hidden, weights, "text.post_ln"), weights, "text.lm_head")
