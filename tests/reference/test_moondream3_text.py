"""The reference decoder: a test of each delicate point of section 10 of its description."""

import math

import numpy as np
import pytest
import torch

from tests.reference.cases import CONFIG, embeddings, torch_gelu, weights
from tests.reference.moondream3 import numerics, text
from tests.reference.moondream3.numerics import layer_norm, linear

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
