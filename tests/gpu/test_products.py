"""On Hopper: products with a sum in their epilogue are what float64 gives, wherever they lie.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops
from legato_engine.kernels.cuda import products

CUDA = torch.device("cuda", 0)
SIZES = [(6561, 1152, 1152), (6561, 4304, 1152), (730, 10240, 2048), (129, 64, 96)]
ROUNDED = 0.0025  # of a result's root mean square: roundings to bf16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="made for Hopper",
    ),
]


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def drawn(*shape: int, gain: float = 1.0) -> torch.Tensor:
    """Normal values in bf16."""
    return (torch.randn(*shape, device=CUDA) * gain).bfloat16()


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the truth."""
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("count", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_product_is_exact_but_for_one_rounding(count, inputs, outputs, adds):
    """With a bias, and a sum or none, among other columns that stay as they were."""
    x_TI = drawn(count, inputs + 16)[:, :inputs]
    weight_OI, bias_O = drawn(outputs, inputs, gain=inputs**-0.5), drawn(outputs)
    add_TO = drawn(count, outputs) if adds else None
    wide_TW = torch.full((count, outputs + 256), 7.0, device=CUDA, dtype=torch.bfloat16)
    out_TO = wide_TW[:, 128 : 128 + outputs]
    assert products.can_multiply(x_TI, weight_OI, bias_O, out_TO)
    products.multiply(x_TI, weight_OI, bias_O, out_TO, add_TO=add_TO)
    exact_TO = x_TI.double() @ weight_OI.double().t() + bias_O.double()
    if add_TO is not None:
        exact_TO += add_TO.double()
    assert error(out_TO, exact_TO) < ROUNDED
    others_TW = torch.cat([wide_TW[:, :128], wide_TW[:, 128 + outputs :]], dim=1)
    assert torch.equal(others_TW, torch.full_like(others_TW, 7.0))


def test_a_sum_lies_where_its_first_term_was():
    """One term, of several leading dimensions; with few rows two terms, and none is touched."""
    weight_OI, bias_O = drawn(1152, 4304, gain=0.015), drawn(1152)
    for tokens, terms in ((729, 1), (3, 2)):
        x_2TI, to_2TO = drawn(2, tokens, 4304), drawn(2, tokens, 1152)
        exact = x_2TI.double() @ weight_OI.double().t() + bias_O.double() + to_2TO.double()
        out, more = ops.linear_onto(to_2TO, x_2TI, weight_OI, bias_O)
        assert out.data_ptr() == to_2TO.data_ptr()
        assert (more is None) == (terms == 1)
        assert error(out.double() + (0 if more is None else more.double()), exact) < ROUNDED


def test_rows_depend_on_no_other():
    """A row has the same bits behind neighbours without a number."""
    x_TI, weight_OI, bias_O = drawn(6561, 1152), drawn(1152, 1152, gain=0.03), drawn(1152)
    to_TO = drawn(6561, 1152)
    whole_TO, _ = ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)
    x_TI[1::2] = torch.nan
    half_TO, _ = ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)
    assert torch.equal(half_TO[::2], whole_TO[::2])
    assert bool(half_TO[1::2].isnan().all())


def test_a_captured_product_reads_its_operands_anew():
    """A replay over other values gives what a call gives."""
    x_TI, weight_OI, bias_O = drawn(729, 1152), drawn(1152, 1152, gain=0.03), drawn(1152)
    to_TO, out_TO = drawn(729, 1152), drawn(729, 1152)
    device = CudaDevice(0)

    def work() -> None:
        out_TO.copy_(ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)[0])

    replay = device.capture(work)
    for _ in range(2):
        for operand in (x_TI, to_TO, bias_O):
            operand.copy_(torch.randn(operand.shape))
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        expected_TO, _ = ops.linear_onto(to_TO.clone(), x_TI, weight_OI, bias_O)
        assert torch.equal(out_TO, expected_TO)
    device.close()
