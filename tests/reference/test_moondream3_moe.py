"""The reference's experts and their fp8 form."""

import math

import numpy as np
import pytest
import torch

from tests.reference.cases import CONFIG, embeddings, weights
from tests.reference.moondream3 import check_weights, fp8, moe, quantise_experts, text

WEIGHTS = weights()
LAYER = CONFIG.text.dense_layers
NAME = f"text.blocks.{LAYER}.mlp"
K = CONFIG.text.experts_per_token


def run(x_TD, all_weights=WEIGHTS):
    """The experts' result alone."""
    return moe.moe(x_TD, CONFIG.text, all_weights, NAME)[0]


def test_the_chosen_weights_sum_to_one():
    """The softmax is over the chosen logits alone, and the largest is first."""
    logits = np.array([0.0, 3.0, 1.0, 3.5, -9.0])
    experts, shares = moe.route(logits, 3)
    assert list(experts) == [3, 1, 2]
    expected = np.exp([3.5, 3.0, 1.0])
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=1e-15)


def test_equal_logits_go_to_the_lower_index():
    """Ties are decided the same way each time."""
    assert list(moe.route(np.zeros(5), 2)[0]) == [0, 1]


def test_the_outcome_is_that_of_torch():
    """The choice includes the bias; gelu is exact on the first half, plus one on the second."""
    x = torch.from_numpy(embeddings(9))
    w = {key: torch.from_numpy(value) for key, value in WEIGHTS.items() if key.startswith(NAME)}
    logits = x @ w[f"{NAME}.router.weight"].T + w[f"{NAME}.router.bias"]
    values, experts = logits.topk(K, dim=-1)
    up = torch.einsum("td,tknd->tkn", x, w[f"{NAME}.fc1.weight"][experts])
    first, second = up.chunk(2, dim=-1)
    hidden = torch.nn.functional.gelu(first) * (second + 1)
    down = torch.einsum("tkn,tkdn->tkd", hidden, w[f"{NAME}.fc2.weight"][experts])
    expected = (values.softmax(-1)[..., None] * down).sum(1)
    np.testing.assert_allclose(run(x.numpy()), expected.numpy(), atol=1e-12)


def test_experts_that_are_not_chosen_do_nothing():
    """A position's result does not depend on other experts."""
    x_TD = embeddings(1)
    _, logits = moe.moe(x_TD, CONFIG.text, WEIGHTS, NAME)
    chosen, _ = moe.route(logits[0], K)
    fc1 = np.full_like(WEIGHTS[f"{NAME}.fc1.weight"], np.nan)
    fc1[chosen] = WEIGHTS[f"{NAME}.fc1.weight"][chosen]
    np.testing.assert_array_equal(run(x_TD), run(x_TD, WEIGHTS | {f"{NAME}.fc1.weight": fc1}))


def test_the_bias_of_the_router_chooses():
    """An expert whose bias is large is chosen by every position."""
    bias = np.zeros(CONFIG.text.experts)
    bias[5] = 100.0
    _, logits = moe.moe(embeddings(6), CONFIG.text, WEIGHTS | {f"{NAME}.router.bias": bias}, NAME)
    assert all(moe.route(row, K)[0][0] == 5 for row in logits)


@pytest.mark.parametrize("half", [0, 1])
def test_plus_one_is_on_the_second_half(half):
    """With a first half of zeros nothing is left, with a second half of zeros gelu of the first."""
    inner = CONFIG.text.expert_inner
    fc1 = WEIGHTS[f"{NAME}.fc1.weight"].copy()
    fc1[:, half * inner : (half + 1) * inner] = 0
    x_D = embeddings(1)[0]
    ours = moe.expert_mlp(x_D[None], 2, WEIGHTS | {f"{NAME}.fc1.weight": fc1}, NAME)[0]
    first = fc1[2, :inner] @ x_D
    gelu = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in first])
    np.testing.assert_allclose(ours, WEIGHTS[f"{NAME}.fc2.weight"][2] @ gelu, atol=1e-13)
    assert np.any(ours) == (half == 1)


def test_the_margin_is_the_closest_decision():
    """The margin is that of the position that nearly chose another expert."""
    logits = np.array([[5.0, 4.0, 1.0], [0.25, 9.0, 0.5]])
    assert moe.router_margin(logits, 2) == 0.25
    assert moe.router_margin(logits, 1) == 1.0


def test_all_codes_are_those_of_torch():
    """Each of the 256 codes has the value that torch.float8_e4m3fn gives it."""
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(fp8.decode_e4m3(codes), theirs)


def test_values_are_rounded_as_torch_rounds_them():
    """Nearest, ties to even, down to the subnormals; beyond 448 the largest value."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal(4000) * np.exp2(rng.uniform(-12, 7, 4000))
    ties = np.arange(-448, 449) / 2 ** rng.integers(0, 14, 897)
    values = np.clip(np.concatenate([values, ties, [0.0, -0.0]]), -448, 448)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fp8.encode_e4m3(values), theirs)
    assert list(fp8.decode_e4m3(fp8.encode_e4m3(np.array([1e9, -1e9])))) == [448, -448]


def test_a_row_is_its_codes_times_its_scale():
    """A weight is off by half of a step at most, and the largest of a row by a float32."""
    matrix = np.random.default_rng(7).standard_normal((3, 5, 11))
    matrix *= np.arange(1, 16).reshape(3, 5, 1)
    codes, scales = fp8.quantise_rows(matrix)
    back = fp8.decode_e4m3(codes) * scales[..., None]
    half_step = np.maximum(np.abs(matrix) / 16, scales[..., None] / 1024)
    assert np.all(np.abs(back - matrix) <= half_step)
    np.testing.assert_allclose(np.abs(back).max(-1), np.abs(matrix).max(-1), rtol=1e-6)


def test_fp8_experts_are_used_dequantised():
    """Codes and scales compute what their dequantised weights do."""
    quantised = quantise_experts(CONFIG, WEIGHTS)
    check_weights(CONFIG, quantised)
    plain = {key: value for key, value in quantised.items() if not key.endswith(".scale")}
    for key in [key for key in quantised if key.endswith(".scale")]:
        weight = key.removesuffix("scale") + "weight"
        codes = quantised[weight].astype(np.uint8)
        plain[weight] = fp8.decode_e4m3(codes) * quantised[key][..., None].astype(float)
    check_weights(CONFIG, plain)
    states = [text.recompute(embeddings(9), 0, CONFIG, w) for w in (quantised, plain, WEIGHTS)]
    np.testing.assert_allclose(states[0], states[1], atol=1e-10)
    assert np.abs(states[0] - states[2]).max() > 1e-2
