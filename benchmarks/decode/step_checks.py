"""Checks of a decode step: kernels against torch in float32, a row alone against a batch.

Shape legend: B tokens, D text width, V vocabulary, N bins; L layers, K experts that a token chose,
X experts, T tokens of a layer's choice.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping

import torch
from legato_engine.kernels import ops, pages
from legato_engine.kernels.parameters import Routes
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.paged_attention import DecodeBatch, KVCache

from benchmarks.decode.step_bench import DEVICE, KV_SCALE, PAGE, Bench


def check(bench: Bench, exact: MoondreamModel, batch: int) -> dict[str, float]:
    """Return relative errors of the kernels and of torch in bf16, against `exact` in float32."""
    inputs = bench.inputs(batch).part(slice(0, batch))
    hidden_BD, logits_BV = bench.empty(batch)
    bench.kernels.forward(inputs, hidden_BD, logits_BV)
    ours = _written(bench.kv, inputs)
    table_RM = inputs.page_table_RM[:, : bench.position // PAGE + 1]
    where = DecodeBatch(inputs.position_B, table_RM[inputs.row_B])
    x_BD = bench.model.embed(inputs.token_R[inputs.source_B], inputs.payload_R2[inputs.source_B])
    wide = KVCache(*(_numbers_of(bench.kv, cache) for cache in _caches(bench.kv)))
    with _same_experts(bench):
        exact_BD = exact.decode(x_BD.float(), where, wide)
        plain_BD = bench.model.decode(x_BD, where, bench.kv)
    theirs = _written(bench.kv, inputs)
    exact_BV = exact.logits(exact_BD)
    return {
        "hidden": _error(hidden_BD, exact_BD),
        "hidden_torch": _error(plain_BD, exact_BD),
        "logits": _error(logits_BV, exact_BV),
        "logits_torch": _error(bench.model.logits(plain_BD), exact_BV),
        "keys": _error(ours[0], theirs[0]),
        "values": _error(ours[1], theirs[1]),
        "rows_that_differ_alone": _differing(bench, inputs, logits_BV),
        **_check_bins(bench, plain_BD),
    }


@contextlib.contextmanager
def _same_experts(bench: Bench) -> Iterator[None]:
    """Have torch use the experts of the kernels' last step, because near ties fall either way."""
    route, experts_LBK = ops.route, bench.kernels.expert_LBK
    if experts_LBK is None or bench.config.text.moe is None:
        yield
        return
    layers = itertools.cycle(experts_LBK[bench.config.text.moe.first_layer :].long())

    def same(logits_TX: torch.Tensor, num_active: int) -> Routes:
        expert_TK = next(layers)[: len(logits_TX)]
        best_TK = logits_TX.gather(1, expert_TK).float()
        return Routes(expert_TK, best_TK.softmax(-1).to(logits_TX.dtype))

    ops.route = same
    try:
        yield
    finally:
        ops.route = route


def _differing(bench: Bench, inputs: StepInputs, logits_BV: torch.Tensor) -> float:
    """Count the rows whose bits differ between alone and in the batch."""
    hidden_BD, again_BV = bench.empty(len(logits_BV))
    for at in range(len(logits_BV)):
        one = slice(at, at + 1)
        bench.kernels.forward(inputs.part(one), hidden_BD[one], again_BV[one])
    return float((again_BV != logits_BV).any(-1).sum())


def _check_bins(bench: Bench, hidden_BD: torch.Tensor) -> dict[str, float]:
    """Return relative errors of the bins; a batch of one has the coordinate's only."""
    tokens, exact = bench.config.tokens, copy.deepcopy(bench.network.region).float()
    errors = {}
    normed_BD = hidden_BD.float() if exact.ln is None else exact.ln(hidden_BD.float())
    for name, token, decoder in (
        ("coord_bins", tokens.coord, exact.coord_decoder),
        ("size_bins", tokens.size, exact.size_decoder),
    ):
        token_B = torch.full((len(hidden_BD),), token, device=DEVICE)
        bins_BN = bench.kernels.bins(token_B, hidden_BD)[token == tokens.size]
        errors[name] = _error(bins_BN, decoder(normed_BD))
    return errors


def bad(errors: Mapping[str, float]) -> bool:
    """Say whether a check failed."""
    worse = not errors["hidden"] <= 1.5 * errors["hidden_torch"] + 1e-3
    bins = not max(errors["coord_bins"], errors["size_bins"]) < 0.02
    return worse or bins or errors["rows_that_differ_alone"] > 0


def _written(kv: KVCache, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values at the tokens' own positions, all layers."""
    page_B = inputs.page_table_RM[inputs.row_B, inputs.position_B // PAGE]
    at = (slice(None), page_B, slice(None), inputs.position_B % PAGE)
    keys, values = (
        _numbers_of(kv, pages.indexable(cache)[at].view(cache.dtype)) for cache in _caches(kv)
    )
    return keys, values


def _caches(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_LNHSE, kv.v_LNHSE


def _numbers_of(kv: KVCache, cache: torch.Tensor) -> torch.Tensor:
    """Return stored values as float32 in one unit."""
    return cache.float() if kv.scale_L2 is None else cache.float() * KV_SCALE


def _error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    error: float = ((ours.double() - truth.double()).norm() / truth.double().norm()).item()
    return error
