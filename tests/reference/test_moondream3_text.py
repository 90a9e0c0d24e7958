"""The reference decoder, its experts and its adapters: a test of each delicate point."""

import math

import numpy as np
import pytest
import torch

from tests.reference.cases import CONFIG, embeddings, torch_gelu, weights
from tests.reference.moondream3 import check_weights, numerics, quantise_experts, text
from tests.reference.moondream3.config import full
from tests.reference.moondream3.numerics import layer_norm, linear
from tests.reference.moondream3.text import adapter_shapes, random_adapter, recompute

WEIGHTS = weights()
PREFIX = CONFIG.image_prefix
NUM_POSITIONS = PREFIX + 6


def traced(embeddings_TD, prefix, all_weights=WEIGHTS, config=CONFIG):
    """The layers' traces over a whole sequence."""
    trace: text.Trace = []
    text.prefill(embeddings_TD, prefix, config, all_weights, trace)
    return trace


def changed_rows(position, prefix):
    """The positions whose last state changes with the embedding of one position."""
    before = embeddings(NUM_POSITIONS)
    after = before.copy()
    after[position, 0] += 1.0  # a norm would take the same from all dims away
    states = [text.recompute(x, prefix, CONFIG, WEIGHTS) for x in (before, after)]
    return np.flatnonzero(np.abs(states[0] - states[1]).max(axis=-1) > 1e-9)


@pytest.mark.parametrize("prefix", [0, PREFIX])
def test_cached_and_recomputed_agree(prefix):
    """A sequence fed position by position has the states of the sequence at once."""
    x_TD = embeddings(NUM_POSITIONS)
    whole = text.recompute(x_TD, prefix, CONFIG, WEIGHTS)
    states, cache = text.prefill(x_TD[:PREFIX], prefix, CONFIG, WEIGHTS)
    np.testing.assert_allclose(states, whole[:PREFIX], atol=1e-10)
    for position in range(PREFIX, NUM_POSITIONS):
        state, cache = text.decode_step(x_TD[position], cache, CONFIG, WEIGHTS)
        np.testing.assert_allclose(state, whole[position], atol=1e-10)


def test_a_suffix_behind_a_cache():
    """A suffix after a cached prefix has the states that it has without the cache."""
    x_TD = embeddings(NUM_POSITIONS)
    _, cache = text.prefill(x_TD[:PREFIX], PREFIX, CONFIG, WEIGHTS)
    suffix, _ = text.extend(x_TD[PREFIX:], cache, PREFIX, CONFIG, WEIGHTS)
    whole = text.recompute(x_TD, PREFIX, CONFIG, WEIGHTS)
    np.testing.assert_allclose(suffix, whole[PREFIX:], atol=1e-10)


@pytest.mark.parametrize("position", [0, 1, PREFIX - 1])
def test_the_prefix_sees_itself_both_ways(position):
    """Every position attends to any position of the image prefix."""
    assert list(changed_rows(position, PREFIX)) == list(range(NUM_POSITIONS))


@pytest.mark.parametrize("position", [PREFIX, NUM_POSITIONS - 1])
def test_behind_the_prefix_all_is_causal(position):
    """A position after the prefix is seen by itself and by later ones."""
    assert list(changed_rows(position, PREFIX)) == list(range(position, NUM_POSITIONS))


@pytest.mark.parametrize("position", [0, 1, NUM_POSITIONS - 1])
def test_without_a_picture_all_is_causal(position):
    """Without a prefix the first position is causal too."""
    assert list(changed_rows(position, 0)) == list(range(position, NUM_POSITIONS))


def test_a_prefix_is_not_cut():
    """An image prefix split over calls is refused."""
    x_TD = embeddings(PREFIX)
    with pytest.raises(ValueError, match="prefix"):
        text.prefill(x_TD[:-1], PREFIX, CONFIG, WEIGHTS)
    _, cache = text.prefill(x_TD[:5], 0, CONFIG, WEIGHTS)
    with pytest.raises(ValueError, match="prefix"):
        text.extend(x_TD[5:], cache, PREFIX, CONFIG, WEIGHTS)


@pytest.mark.parametrize("layer", [0, CONFIG.text.layers - 1])
def test_attention_and_mlp_are_parallel(layer):
    """A block adds what attention alone and the MLP alone add, both read from one norm."""
    x_TD = embeddings(9)
    name = f"text.blocks.{layer}"
    proj = {f"{name}.attn.proj.{part}": np.zeros(()) for part in ("weight", "bias")}
    fc2 = {key: np.zeros(()) for key in WEIGHTS if key.startswith(f"{name}.mlp.fc2")}

    def added(zeroed):
        silent = WEIGHTS | {key: np.zeros_like(WEIGHTS[key]) for key in zeroed}
        past = text.empty_cache(CONFIG)[layer]
        _, entry = text.block(x_TD, text.visible(0, 9, 0), past, layer, CONFIG, silent)
        return entry["out"] - x_TD

    np.testing.assert_allclose(added({}), added(proj) + added(fc2), atol=1e-12)
    assert np.abs(added(proj)).max() > 0.1
    assert np.abs(added(fc2)).max() > 0.1


def test_attention_is_that_of_a_double_loop():
    """Each head weighs the values it may see by exp(q k / sqrt(dims)); heads are side by side."""
    entry = traced(embeddings(NUM_POSITIONS), PREFIX)[0]
    for position in (0, 7, PREFIX - 1, PREFIX, NUM_POSITIONS - 1):
        seen = range(PREFIX if position < PREFIX else position + 1)
        heads = []
        for head in range(CONFIG.text.heads):
            q, k, v = (entry[part][head] for part in "qkv")
            shares = [math.exp(q[position] @ k[j] / math.sqrt(CONFIG.text.head_dim)) for j in seen]
            heads.append(sum(s * v[j] for s, j in zip(shares, seen, strict=True)) / sum(shares))
        expected = linear(np.concatenate(heads), WEIGHTS, "text.blocks.0.attn.proj")
        np.testing.assert_allclose(entry["attention"][position], expected, atol=1e-12)


def by_hand_qkv(normed_D, layer):
    """q, k and v of one position as one row with its bias."""
    return linear(normed_D, WEIGHTS, f"text.blocks.{layer}.attn.qkv")


@pytest.mark.parametrize("position", [0, 1, 40, NUM_POSITIONS - 1])
@pytest.mark.parametrize("layer", [0, CONFIG.text.layers - 1])
def test_tau_scales_the_cached_value_by_its_position(position, layer):
    """The factor is tanh(gelu(qkv) wv) + 0.5 + sigmoid(alpha ln(p + 1)), p also counts a cache."""
    x_TD = embeddings(NUM_POSITIONS)
    trace = traced(x_TD, 0)
    cache = text.empty_cache(CONFIG)
    for piece in (x_TD[:position], x_TD[position:]):
        _, cache = text.extend(piece, cache, 0, CONFIG, WEIGHTS) if len(piece) else (None, cache)
    row = by_hand_qkv(trace[layer]["normed"][position], layer)
    gelu = torch_gelu(row)
    width, dim = CONFIG.text.width, CONFIG.text.head_dim
    tau = f"text.blocks.{layer}.attn.tau"
    for head in range(CONFIG.text.heads):
        alpha = WEIGHTS[f"{tau}.alpha"][head]
        gain = 0.5 + 1 / (1 + math.exp(-alpha * math.log(position + 1)))
        factor = math.tanh(gelu @ WEIGHTS[f"{tau}.wv"][head]) + gain
        raw = row[2 * width + head * dim :][:dim]
        np.testing.assert_allclose(cache[layer].v_HSK[head, position], raw * factor, atol=1e-12)


def test_tau_scales_the_query_too():
    """The norm of q, which RoPE leaves, is that of the raw q times tau's factor of its position."""
    position, layer = 33, 1
    entry = traced(embeddings(NUM_POSITIONS), 0)[layer]
    row = by_hand_qkv(entry["normed"][position], layer)
    gelu = torch_gelu(row)
    tau, dim = f"text.blocks.{layer}.attn.tau", CONFIG.text.head_dim
    for head in range(CONFIG.text.heads):
        gain = 0.5 + 1 / (1 + math.exp(-WEIGHTS[f"{tau}.alpha"][head] * math.log(position + 1)))
        factor = math.tanh(gelu @ WEIGHTS[f"{tau}.wq"][head]) + gain
        expected = np.linalg.norm(row[head * dim :][:dim]) * abs(factor)
        assert np.linalg.norm(entry["q"][head, position]) == pytest.approx(expected)


def test_tau_leaves_the_key():
    """Other weights of tau change q and v of their layer, and not k."""
    x_TD = embeddings(8)
    name = "text.blocks.0.attn.tau"
    tau = {key: value + 1 for key, value in WEIGHTS.items() if key.startswith(name)}
    before, after = traced(x_TD, 0)[0], traced(x_TD, 0, WEIGHTS | tau)[0]
    np.testing.assert_array_equal(before["k"], after["k"])
    for part in "qv":
        assert np.abs(before[part] - after[part]).max() > 0.1


def test_taus_gain_of_the_first_position_is_one():
    """ln(1) is 0: position 0 has the gain 1 whatever alpha is; far ones tend to 0.5 or 1.5."""
    gain = text.position_gain(np.array([-30.0, 0.0, 30.0]), np.array([0, 700]), CONFIG.switches)
    np.testing.assert_allclose(gain, np.array([[1, 1, 1], [0.5, 1, 1.5]]), atol=1e-12)


def test_taus_switches_are_different():
    """Each switch of tau changes the outcome, and rounding the position only beyond 256."""
    x_TD = embeddings(8)
    default = traced(x_TD, 0)[0]["v"]
    erf = traced(x_TD, 0, config=CONFIG.switched(tau_gelu="erf"))[0]["v"]
    assert 1e-6 < np.abs(default - erf).max() < 1e-2
    alpha, positions = np.array([0.3]), np.arange(700)
    rounded = CONFIG.switched(tau_position="bfloat16_gain").switches
    gain = torch.from_numpy(text.position_gain(alpha, positions, CONFIG.switches))
    expected = gain.to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(text.position_gain(alpha, positions, rounded), expected)
    position = CONFIG.switched(tau_position="bfloat16_position").switches
    count = torch.arange(1, 701).to(torch.bfloat16)
    log = count.double().log().to(torch.bfloat16).double()
    ours = text.position_gain(alpha, positions, position)[:, 0]
    np.testing.assert_allclose(ours, 0.5 + torch.sigmoid(0.3 * log).numpy(), atol=1e-12)


def test_rope_turns_pairs_half_the_rotated_dims_apart():
    """Dim i is rotated with dim i + half by p * theta^(-2 i / rotated dims); others stay."""
    sizes, position = CONFIG.text, 5
    half = sizes.rotary_dim // 2
    unit = np.eye(sizes.head_dim)[None]  # one head, a position for each dim
    turned = text.rotate(unit, np.full(sizes.head_dim, position), sizes)[0]
    expected = np.eye(sizes.head_dim)
    for i in range(half):
        angle = position * sizes.theta ** (-2 * i / sizes.rotary_dim)
        expected[i, [i, i + half]] = math.cos(angle), math.sin(angle)
        expected[i + half, [i, i + half]] = -math.sin(angle), math.cos(angle)
    np.testing.assert_allclose(turned, expected, atol=1e-14)


def test_rope_keeps_norms_and_knows_distances_only():
    """A rotated vector keeps its norm, and a score depends on the distance of q and k."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 1, 1, CONFIG.text.head_dim))

    def at(x, position):
        return text.rotate(x, np.array([position]), CONFIG.text)[0, 0]

    assert np.linalg.norm(at(q, 1000)) == pytest.approx(np.linalg.norm(q))
    assert at(q, 17) @ at(k, 11) == pytest.approx(at(q, 1017) @ at(k, 1011))
    assert abs(at(q, 17) @ at(k, 11) - at(q, 17) @ at(k, 12)) > 1e-3


def test_a_trace_reads_the_layers_in_order():
    """Each layer's norm reads what the layer before left, and the last one leaves the state."""
    x_TD = embeddings(7)
    trace = traced(x_TD, 0)
    for layer, entry in enumerate(trace):
        normed = layer_norm(x_TD, WEIGHTS, f"text.blocks.{layer}.ln")
        np.testing.assert_array_equal(entry["normed"], normed)
        x_TD = entry["out"]
    np.testing.assert_array_equal(x_TD, text.recompute(embeddings(7), 0, CONFIG, WEIGHTS))


def test_the_dense_mlp_and_the_head():
    """A dense MLP is two biased layers with tanh gelu; logits are read after post_ln."""
    entry = traced(embeddings(7), 0)[0]
    hidden = torch_gelu(linear(entry["normed"], WEIGHTS, "text.blocks.0.mlp.fc1"))
    expected = linear(hidden, WEIGHTS, "text.blocks.0.mlp.fc2")
    np.testing.assert_allclose(entry["mlp"], expected, atol=1e-12)
    normed = layer_norm(entry["out"], WEIGHTS, "text.post_ln")
    expected = normed @ WEIGHTS["text.lm_head.weight"].T + WEIGHTS["text.lm_head.bias"]
    np.testing.assert_allclose(text.logits(entry["out"], WEIGHTS), expected, atol=1e-12)


def test_the_norm_is_torchs_with_its_own_epsilon():
    """A vector of tiny variance is normed with 1e-5, by the variance of all its values."""
    x = np.random.default_rng(4).standard_normal((5, 24)) * 1e-2
    gain, bias = np.random.default_rng(5).standard_normal((2, 24))
    ours = layer_norm(x, {"n.weight": gain, "n.bias": bias}, "n")
    theirs = torch.nn.functional.layer_norm(
        torch.from_numpy(x), (24,), torch.from_numpy(gain), torch.from_numpy(bias)
    )
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-13)


def test_both_gelus_are_torchs():
    """The exact one and the approximation differ from each other and from torch's in no digit."""
    x = np.linspace(-6, 6, 101)
    for ours, approximate in ((numerics.gelu_erf, "none"), (numerics.gelu_tanh, "tanh")):
        np.testing.assert_allclose(ours(x), torch_gelu(x, approximate), atol=1e-14)


# ---------------------------------------------------------------- moondream3 moe
# The reference's experts and their fp8 form.

LAYER = CONFIG.text.dense_layers
NAME = f"text.blocks.{LAYER}.mlp"
K = CONFIG.text.experts_per_token


def run(x_TD, all_weights=WEIGHTS):
    """The experts' result alone."""
    return text.moe(x_TD, CONFIG.text, all_weights, NAME)[0]


def test_the_chosen_weights_sum_to_one():
    """The softmax is over the chosen logits alone, and the largest is first."""
    logits = np.array([0.0, 3.0, 1.0, 3.5, -9.0])
    experts, shares = text.route(logits, 3)
    assert list(experts) == [3, 1, 2]
    expected = np.exp([3.5, 3.0, 1.0])
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=1e-15)


def test_equal_logits_go_to_the_lower_index():
    """Ties are decided the same way each time."""
    assert list(text.route(np.zeros(5), 2)[0]) == [0, 1]


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
    _, logits = text.moe(x_TD, CONFIG.text, WEIGHTS, NAME)
    chosen, _ = text.route(logits[0], K)
    fc1 = np.full_like(WEIGHTS[f"{NAME}.fc1.weight"], np.nan)
    fc1[chosen] = WEIGHTS[f"{NAME}.fc1.weight"][chosen]
    np.testing.assert_array_equal(run(x_TD), run(x_TD, WEIGHTS | {f"{NAME}.fc1.weight": fc1}))


def test_the_bias_of_the_router_chooses():
    """An expert whose bias is large is chosen by every position."""
    bias = np.zeros(CONFIG.text.experts)
    bias[5] = 100.0
    _, logits = text.moe(embeddings(6), CONFIG.text, WEIGHTS | {f"{NAME}.router.bias": bias}, NAME)
    assert all(text.route(row, K)[0][0] == 5 for row in logits)


@pytest.mark.parametrize("half", [0, 1])
def test_plus_one_is_on_the_second_half(half):
    """With a first half of zeros nothing is left, with a second half of zeros gelu of the first."""
    inner = CONFIG.text.expert_inner
    fc1 = WEIGHTS[f"{NAME}.fc1.weight"].copy()
    fc1[:, half * inner : (half + 1) * inner] = 0
    x_D = embeddings(1)[0]
    ours = text.expert_mlp(x_D[None], 2, WEIGHTS | {f"{NAME}.fc1.weight": fc1}, NAME)[0]
    first = fc1[2, :inner] @ x_D
    gelu = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in first])
    np.testing.assert_allclose(ours, WEIGHTS[f"{NAME}.fc2.weight"][2] @ gelu, atol=1e-13)
    assert np.any(ours) == (half == 1)


def test_the_margin_is_the_closest_decision():
    """The margin is that of the position that nearly chose another expert."""
    logits = np.array([[5.0, 4.0, 1.0], [0.25, 9.0, 0.5]])
    assert text.router_margin(logits, 2) == 0.25
    assert text.router_margin(logits, 1) == 1.0


def test_all_codes_are_those_of_torch():
    """Each of the 256 codes has the value that torch.float8_e4m3fn gives it."""
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(numerics.decode_e4m3(codes), theirs)


def test_values_are_rounded_as_torch_rounds_them():
    """Nearest, ties to even, down to the subnormals; beyond 448 the largest value."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal(4000) * np.exp2(rng.uniform(-12, 7, 4000))
    ties = np.arange(-448, 449) / 2 ** rng.integers(0, 14, 897)
    values = np.clip(np.concatenate([values, ties, [0.0, -0.0]]), -448, 448)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(numerics.encode_e4m3(values), theirs)
    assert list(numerics.decode_e4m3(numerics.encode_e4m3(np.array([1e9, -1e9])))) == [448, -448]


def test_a_row_is_its_codes_times_its_scale():
    """A weight is off by half of a step at most, and the largest of a row by a float32."""
    matrix = np.random.default_rng(7).standard_normal((3, 5, 11))
    matrix *= np.arange(1, 16).reshape(3, 5, 1)
    codes, scales = numerics.quantise_rows(matrix)
    back = numerics.decode_e4m3(codes) * scales[..., None]
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
        plain[weight] = numerics.decode_e4m3(codes) * quantised[key][..., None].astype(float)
    check_weights(CONFIG, plain)
    states = [text.recompute(embeddings(9), 0, CONFIG, w) for w in (quantised, plain, WEIGHTS)]
    np.testing.assert_allclose(states[0], states[1], atol=1e-10)
    assert np.abs(states[0] - states[2]).max() > 1e-2


# ---------------------------------------------------------------- moondream3 adapters
# Adapters of the reference follow their description.

RANK = 2 * CONFIG.text.experts_per_token


def merged(adapter, all_weights):
    """Weights with B A of each adapted map added."""
    changed = dict(all_weights)
    for layer in range(CONFIG.text.layers):
        behind = layer - CONFIG.text.dense_layers
        name = f"dense.{layer}" if behind < 0 else f"moe.{behind}"
        for part, own in (("up", "fc1"), ("down", "fc2")):
            a, b = (adapter[f"{name}.{part}_{side}"].astype(np.float64) for side in "ab")
            changed[f"text.blocks.{layer}.mlp.{own}.weight"] = (
                all_weights[f"text.blocks.{layer}.mlp.{own}.weight"] + b @ a
            )
    return changed


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adapter_is_its_product_in_the_weights(seed):
    """An adapter gives the states of weights with its products added."""
    adapter, x_TD = random_adapter(CONFIG, RANK, seed), embeddings(9)
    ours = recompute(x_TD, 4, CONFIG, {**weights(), **adapter})
    np.testing.assert_allclose(ours, recompute(x_TD, 4, CONFIG, merged(adapter, weights())))
    assert np.abs(ours - recompute(x_TD, 4, CONFIG, weights())).max() > 0.1


def test_layers_may_be_left_out():
    """An adapter of some layers changes only these."""
    adapter = random_adapter(CONFIG, RANK, 0)
    some = {name: array for name, array in adapter.items() if name.startswith("moe.0.")}
    rest = {name: np.zeros_like(array) for name, array in adapter.items() if name not in some}
    ours = recompute(embeddings(5), 0, CONFIG, {**weights(), **some})
    np.testing.assert_array_equal(
        ours, recompute(embeddings(5), 0, CONFIG, {**weights(), **some, **rest})
    )


def test_the_published_shapes():
    """Of rank 16 at full size: an eighth of it in each expert, both halves of its gate."""
    shapes = adapter_shapes(full(), 16)
    assert shapes["dense.3.up_b"] == (8192, 16)
    assert [shapes[f"moe.19.{part}"] for part in ("up_a", "up_b", "down_a", "down_b")] == [
        (64, 2, 2048),
        (64, 2048, 2),
        (64, 2, 1024),
        (64, 2048, 2),
    ]
    assert len(shapes) == 4 * 24
