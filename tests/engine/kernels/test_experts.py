"""Experts: what they compute, in every form, and that a row decides its own bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import grouped
from legato_engine.kernels.parameters import (
    AdapterRows,
    ExpertAdapters,
    ExpertMap,
    ExpertWeights,
    Routes,
)

from tests.engine.kernels.cases import (
    DIM,
    INNER,
    NUM_EXPERTS,
    by_hand,
    dequantised,
    layers,
    quantised,
    tokens,
)

FORMS = (reference.experts_sorted, reference.experts_gathered, grouped.experts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_every_form_is_the_formula(form, count):
    """Sorted, gathered and grouped experts give what the formula gives, some experts unused."""
    x_TD, routes = tokens(count)
    up, down = layers()
    expected_TD = by_hand(x_TD, routes, up, down)
    torch.testing.assert_close(
        form(x_TD, routes, up, down).double(), expected_TD, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_rounds_and_no_more(form):
    """In bfloat16 every form stays near the formula and keeps its dtype."""
    x_TD, routes = tokens(9)
    routes = Routes(routes.expert_TK, routes.share_TK.bfloat16())
    up, down = layers(dtype=torch.bfloat16)
    out_TD = form(x_TD.bfloat16(), routes, up, down)
    assert out_TD.dtype is torch.bfloat16
    expected_TD = by_hand(x_TD.bfloat16(), routes, up, down)
    assert (out_TD.double() - expected_TD).abs().max() < 0.03 * expected_TD.abs().max()


@pytest.mark.parametrize("form", FORMS[:2])
def test_e4m3_weights_count_by_their_scales(form):
    """Quantised weights give what their numbers give as plain weights: nothing else is rounded."""
    x_TD, routes = tokens(6)
    up, down = map(quantised, layers())
    expected_TD = by_hand(x_TD, routes, dequantised(up), dequantised(down))
    torch.testing.assert_close(
        form(x_TD, routes, up, down).double(), expected_TD, rtol=1e-5, atol=1e-5
    )


SLOTS, RANK = 3, 2


def changes(dtype=torch.float32):
    """Slots with ranks 2 and 1 for each expert, after slot 0, for both maps."""
    generator = torch.Generator().manual_seed(3)
    rank_S, maps = torch.tensor([0, RANK, 1]), []
    for inputs, outputs in ((DIM, 2 * INNER), (INNER, DIM)):
        a_SXRI = torch.zeros(SLOTS, NUM_EXPERTS, RANK, inputs, dtype=dtype)
        b_SXRO = torch.zeros(SLOTS, NUM_EXPERTS, RANK, outputs, dtype=dtype)
        for slot, rank in enumerate(rank_S.tolist()):
            for each_SXRW, scale in ((a_SXRI, inputs**-0.5), (b_SXRO, 1.0)):
                shape = each_SXRW[slot, :, :rank].shape
                each_SXRW[slot, :, :rank] = torch.randn(shape, generator=generator) * scale
        maps.append(ExpertMap(a_SXRI, b_SXRO))
    return maps, rank_S


def with_change(layer, change, slot):
    """The experts of a token that reads this slot, the change in their weights."""
    a_XRI, b_XRO = change.a_SXRI[slot], change.b_SXRO[slot]
    return ExpertWeights(layer.weight_XOI + b_XRO.transpose(1, 2) @ a_XRI, None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slots", [[0], [1], [2], [1, 0, 2, 2, 0, 1, 1, 2, 1, 0]])
def test_adapters_are_as_in_the_weights(form, slots):
    """Every form gives each token what experts with its slot's change in them give."""
    x_TD, routes = tokens(10)
    (up, down), (maps, rank_S) = layers(), changes()
    adapters = ExpertAdapters(maps[0], maps[1], AdapterRows(torch.tensor(slots), rank_S, RANK))
    out_TD = form(x_TD, routes, up, down, adapters)
    for token, slot in enumerate(slots if len(slots) > 1 else slots * len(x_TD)):
        one = slice(token, token + 1)
        own = Routes(routes.expert_TK[one], routes.share_TK[one])
        merged = (with_change(*pair, slot) for pair in zip((up, down), maps, strict=True))
        expected_1D = by_hand(x_TD[one], own, *merged)
        torch.testing.assert_close(out_TD[one].double(), expected_1D, rtol=1e-5, atol=1e-5)


def test_adapters_change_no_other_row():
    """On the CPU a row's bits depend on its own slot only; rows of slot 0 are unchanged."""
    x_TD, routes = tokens(20)
    (up, down), (maps, rank_S) = layers(), changes()

    def out(rows, slots):
        some = Routes(routes.expert_TK[rows], routes.share_TK[rows])
        adapters = ExpertAdapters(maps[0], maps[1], AdapterRows(torch.tensor(slots), rank_S, RANK))
        return ops.experts(x_TD[rows], some, up, down, capturable=True, adapters=adapters)

    slots = [0, 1, 2, 1] * 5
    whole_TD = out(range(20), slots)
    for row, slot in enumerate(slots):
        assert torch.equal(out([row], [slot])[0], whole_TD[row])
    plain_TD = ops.experts(x_TD, routes, up, down, capturable=True)
    assert torch.equal(whole_TD[::4], plain_TD[::4])


def test_one_unit_by_hand():
    """Gelu is exact and of the first half, one is added to the second, shares weigh the sum."""
    up = ExpertWeights(torch.tensor([[[2.0], [0.5]], [[-1.0], [3.0]]]), None)
    down = ExpertWeights(torch.tensor([[[10.0]], [[100.0]]]), None)
    routes = Routes(torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.75]]))
    first = 10 * 0.5 * 2.0 * (1 + math.erf(2.0 / math.sqrt(2))) * 1.5
    second = 100 * 0.5 * -1.0 * (1 + math.erf(-1.0 / math.sqrt(2))) * 4.0
    out = ops.experts(torch.tensor([[1.0]]), routes, up, down, capturable=False)
    assert out.item() == pytest.approx(0.75 * first + 0.25 * second, rel=1e-6)


def test_equal_experts_are_one_mlp():
    """Where all experts are alike the routes do not matter: the shares sum to one."""
    x_TD, routes = tokens(11)
    up, down = (
        ExpertWeights(layer.weight_XOI[:1].expand(NUM_EXPERTS, -1, -1), None) for layer in layers()
    )
    u_TI, g_TI = F.linear(x_TD, up.weight_XOI[0]).chunk(2, -1)
    expected_TD = F.linear(F.gelu(u_TI) * (g_TI + 1), down.weight_XOI[0])
    out_TD = ops.experts(x_TD, routes, up, down, capturable=False)
    torch.testing.assert_close(out_TD, expected_TD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("e4m3", [False, True])
def test_a_row_decides_its_own_bits(e4m3):
    """On the CPU a row's bits do not depend on other rows, its index or their number."""
    x_TD, routes = tokens(32)
    up, down = map(quantised, layers()) if e4m3 else layers()
    whole_TD = ops.experts(x_TD, routes, up, down, capturable=True)
    for rows in ([0], [5, 0, 9], list(range(7)), list(range(31, -1, -1)), [3] * 20 + [4]):
        some = Routes(routes.expert_TK[rows], routes.share_TK[rows])
        out = ops.experts(x_TD[rows], some, up, down, capturable=False)
        assert torch.equal(out, whole_TD[rows])


@pytest.fixture
def three_threads():
    """A number that cuts tensors at odd places."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("inner", [INNER, 1024])
def test_the_gate_rounds_alike_wherever_a_row_stands(three_threads, inner):
    """Neither the number of rows nor the threads that share them change a row's bits."""
    z_TI = torch.randn(64, 2 * inner, generator=torch.Generator().manual_seed(0))
    whole_TI = reference.gate(z_TI)
    for count in (1, 2, 7, 8, 24, 40):
        assert torch.equal(reference.gate(z_TI[:count].clone()), whole_TI[:count])


def test_a_broken_row_stays_alone():
    """A row that is not finite leaves the others as they are."""
    x_TD, routes = tokens(12)
    up, down = layers()
    whole_TD = ops.experts(x_TD, routes, up, down, capturable=False)
    x_TD[4] = math.nan
    out_TD = ops.experts(x_TD, routes, up, down, capturable=False)
    assert out_TD[4].isnan().all()
    others = torch.arange(12) != 4
    assert torch.equal(out_TD[others], whole_TD[others])


@pytest.mark.parametrize("e4m3", [False, True])
def test_a_captured_step_reads_nothing(e4m3):
    """Tensors without data are enough off the CPU, so nothing depends on them on the host."""
    x_TD, routes = tokens(5)
    up, down = map(quantised, layers()) if e4m3 else layers()
    routes = Routes(routes.expert_TK.to("meta"), routes.share_TK.to("meta"))
    up, down = (
        ExpertWeights(
            layer.weight_XOI.to("meta"),
            None if layer.scale_XO is None else layer.scale_XO.to("meta"),
        )
        for layer in (up, down)
    )
    x_TD = x_TD.to("meta")
    assert ops.experts(x_TD, routes, up, down, capturable=True).shape == (5, DIM)
    if not e4m3:
        assert grouped.experts(x_TD, routes, up, down).shape == (5, DIM)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ops.experts(x_TD, routes, up, down, capturable=False)


def test_shares_are_those_of_the_chosen():
    """The best logits are taken first, then the softmax over them alone."""
    logits_TX = torch.tensor([[0.0, 2.0, -1.0, 1.0], [3.0, 3.5, 9.0, -9.0]])
    routes = ops.route(logits_TX, 2)
    assert routes.expert_TK.tolist() == [[1, 3], [2, 1]]
    for share_K, gap in zip(routes.share_TK.tolist(), (1.0, 5.5), strict=True):
        first = 1 / (1 + math.exp(-gap))
        assert share_K == pytest.approx([first, 1 - first])
