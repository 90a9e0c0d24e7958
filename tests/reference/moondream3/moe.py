"""The experts of the later layers.

Shapes: T positions, D the text model's width, E experts.
"""

import numpy as np
from numpy.typing import NDArray

from tests.reference.moondream3.adapters import change
from tests.reference.moondream3.config import TextConfig
from tests.reference.moondream3.fp8 import expert_matrix
from tests.reference.moondream3.numerics import Array, Weights, gelu_erf, linear, softmax


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
