"""On a GPU: adapters in the decode step's kernels and in captured launches."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.device.base import Stream
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda.adapters import MAX_DOT_RANK
from legato_engine.kernels.cuda.attention import MAX_TOKENS
from legato_engine.kernels.parameters import AdapterRows, LowRankStack
from legato_engine.layers.lora import AdapterBank, AdapterWeights
from legato_engine.models.base import Adapter, StepInputs
from legato_engine.models.moondream.decode_step import MoondreamStep
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.presets import moondream2_config, moondream3_config
from legato_engine.models.paged_attention import DecodeBatch, KVCache
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Sequence as RunningSequence
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    FinishReason,
    ImageProperties,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TaskOutput,
)
from PIL import Image

from tests.adapters import random_adapter, safetensors_file
from tests.fake_device import InlineStream
from tests.gpu import test_kernels
from tests.gpu.test_kernels import ROWS, TOKENS, World, chosen, decode_batch, error, read, written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# ---------------------------------------------------------------- adapter kernels
# On a GPU: adapters in the decode step's kernels, each token by its own slot.
#
# Shape legend as in `test_kernels`; S slots.

world = test_kernels.world  # all models
RANKS = (3, 8, 64, 512)  # of slots 1 to 4
SHARES = (1, 2, 8, 64)  # the same of one expert
MAX_RANKS = (MAX_DOT_RANK, 512)
"""Of banks: by dot products, and by tensor cores."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapted:
    """A world whose rows have adapters, and its kernels with a bank of them."""

    world: World
    bank: AdapterBank
    slot_R: torch.Tensor

    def forward(
        self, inputs: StepInputs, slot_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the kernels: hidden state and logits."""
        out = self.world.empty(len(inputs.row_B))
        self.world.kernels.forward(dataclasses.replace(inputs, adapter_slot_R=slot_R), *out)
        return out


def filled(world: World, model: MoondreamModel, max_rank: int) -> AdapterBank:
    """Fill slots of all ranks up to `max_rank` with changes as large as the model's maps."""
    moe = world.config.text.moe
    sizes = [(rank, share) for rank, share in zip(RANKS, SHARES, strict=True) if rank <= max_rank]
    bank = model.adapter_bank(len(sizes), max_rank)
    assert bank is not None
    stream: Stream = InlineStream()
    if world.device.type == "cuda":  # otherwise emulated
        torch.cuda.synchronize()
        stream = CudaDevice(0).compute  # from here on the current one
    generator = torch.Generator(world.device).manual_seed(5)

    def noise(like_LSRW: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
        shape = like_LSRW[:, 0, ..., :rank, :].shape
        made = torch.randn(shape, device=world.device, generator=generator) * scale
        return made.bfloat16().to(model.dtype)

    def weights(slots: Mapping[str, LowRankStack], rank: int) -> dict[str, LowRankStack]:
        return {
            name: LowRankStack(
                noise(stack.a_LSRI, rank, stack.a_LSRI.shape[-1] ** -0.5),
                noise(stack.b_LSRO, rank, 0.3 * rank**-0.5),
            )
            for name, stack in slots.items()
        }

    for slot, (rank, share) in enumerate(sizes, 1):
        if moe is None:
            bank.write(slot, AdapterWeights(weights(bank.weights.maps, rank)), stream)
            continue
        maps = weights(bank.weights.maps, share * moe.num_active)
        bank.write(slot, AdapterWeights(maps, weights(bank.weights.experts, share)), stream)
    return bank


@pytest.fixture(scope="module", params=MAX_RANKS)
def adapted(world: World, request: pytest.FixtureRequest) -> Adapted:
    """With slots of all ranks up to a bank's."""
    return with_adapters(world, request.param)


def with_adapters(world: World, max_rank: int) -> Adapted:
    """Neighbours share slots, or have none, or one each."""
    bank = filled(world, world.model, max_rank)
    kernels = MoondreamStep(world.config, world.network.text, world.network.region, world.kv, bank)
    generator = torch.Generator(world.device).manual_seed(6)
    slots = len(bank.rank_S)
    slot_R = torch.randint(0, slots, (ROWS,), device=world.device, generator=generator)
    rows = world.inputs().row_B
    slot_R[rows[:4]], slot_R[rows[4:8]] = slots - 1, 0
    return Adapted(dataclasses.replace(world, kernels=kernels), bank, slot_R)


def test_a_step_with_adapters_is_as_exact_as_torch(adapted: Adapted) -> None:
    """Against float32 the kernels err no more than 1.2 times what torch errs in bf16."""
    one_pass = slice(0, min(MAX_TOKENS, adapted.world.kernels.max_tokens))
    a_step_with_adapters_is_as_exact_as_torch(adapted, one_pass)


def a_step_with_adapters_is_as_exact_as_torch(adapted: Adapted, some: slice) -> None:
    """That of some tokens."""
    world = adapted.world
    inputs = world.inputs().part(some)
    slot_B = adapted.slot_R[inputs.row_B]
    x_BD, _ = world.empty(len(slot_B))
    world.kernels.embed(inputs, x_BD)
    before, where = world.snapshot(), decode_batch(inputs)
    hidden_BD, logits_BV = adapted.forward(inputs, adapted.slot_R)
    wide = KVCache(*read(before))
    again = KVCache(wide.k_LNHSE.clone(), wide.v_LNHSE.clone())
    max_rank = adapted.bank.max_rank
    rows = adapted.bank.rows(slot_B, max_rank)
    exact_rows = filled(world, world.exact, max_rank).rows(slot_B, max_rank)
    batch = DecodeBatch(where.positions_B, where.page_table_BM, exact_rows)
    with chosen(world):
        plain_BD = world.model.decode(x_BD, dataclasses.replace(where, adapters=rows), before)
        exact_BD = world.exact.decode(x_BD.float(), batch, wide)
    untouched_BD = world.exact.decode(x_BD.float(), where, again)
    assert error(hidden_BD, exact_BD) <= 1.2 * error(plain_BD, exact_BD)
    assert error(untouched_BD, exact_BD) > 10 * error(hidden_BD, exact_BD), "adapters matter"
    assert error(logits_BV, world.exact.logits(exact_BD)) < 0.05
    at = written(inputs)
    assert error(read(world.kv, at)[0], read(wide, at)[0]) < 0.05


def test_a_row_has_the_same_bits_whatever_adapters_are_beside_it(adapted: Adapted) -> None:
    """Alone, in any batch, and without an adapter as in a step without adapters."""
    a_row_has_the_same_bits_whatever_is_beside_it(adapted, (2, 3, 5, 8, 9, 16, 31, 32, TOKENS))


def a_row_has_the_same_bits_whatever_is_beside_it(adapted: Adapted, batches: Sequence[int]) -> None:
    """Among the first tokens, as many as the largest of these batches."""
    count = max(batches)
    inputs = adapted.world.inputs().part(slice(0, count))
    before = adapted.world.snapshot()
    alone = [adapted.forward(inputs.part(slice(i, i + 1)), adapted.slot_R) for i in range(count)]
    hidden_BD, logits_BV = (torch.cat(values) for values in zip(*alone, strict=True))
    assert not logits_BV.isnan().any()
    for batch in batches:
        for first in {0, 1, count - batch}:
            some = slice(first, min(first + batch, count))
            adapted.world.restore(before)
            hidden, logits = adapted.forward(inputs.part(some), adapted.slot_R)
            assert torch.equal(hidden, hidden_BD[some]), (batch, first)
            assert torch.equal(logits, logits_BV[some]), (batch, first)
    adapted.world.restore(before)
    _, plain_BV = adapted.forward(inputs, None)
    own_B = adapted.slot_R[inputs.row_B] != 0
    assert torch.equal(plain_BV[~own_B], logits_BV[~own_B])
    assert not torch.isclose(plain_BV[own_B], logits_BV[own_B]).all(-1).any()


# ---------------------------------------------------------------- adapters
# Adapters on a CUDA device: captured launches read the slots that rows name when they replay.

FILE_RANKS = {"": 0, "x": 8, "y": 64, "z": 16}
PRESETS = {"moondream2": moondream2_config, "moondream3": moondream3_config}


def test_a_captured_step_follows_the_slots() -> None:
    """Replays read the slots and the weights of the moment, as row by row in float64 would."""
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    a_SRI, b_SRO, x_TI, out_TO = noise(5, 16, 96), noise(5, 16, 160), noise(8, 96), noise(8, 160)
    a_SRI[0] = b_SRO[0] = 0
    slot_T = torch.zeros(8, dtype=torch.int64, device="cuda")
    rank_S = torch.full((5,), 16, device="cuda")
    rows = AdapterRows(slot_T, rank_S, 16)
    ops.add_low_rank(out_TO.clone(), x_TI, a_SRI, b_SRO, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result_TO = ops.add_low_rank(out_TO, x_TI, a_SRI, b_SRO, rows)
    for slots in ([0] * 8, [1, 2, 3, 4, 0, 1, 1, 2], [4] * 8):
        slot_T.copy_(torch.tensor(slots))
        a_SRI[1:] = noise(4, 16, 96)
        out, x, a, b = (each.double().cpu() for each in (out_TO, x_TI, a_SRI, b_SRO))
        graph.replay()
        expected = reference.add_low_rank_rows(out, x, a, b, slot_T.cpu(), rank_S.cpu())
        torch.testing.assert_close(result_TO.double().cpu(), expected, rtol=1e-4, atol=1e-2)


class Answers(SilentSink):
    """Keeps every request's result."""

    def __init__(self) -> None:
        self.results: dict[str, TaskOutput] = {}

    def done(self, sequence: RunningSequence, finish_reason: FinishReason) -> None:
        """Remember it."""
        self.results[sequence.request.request_id.caller_id] = sequence.task.result(finish_reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapters could lie; the tests hand them over themselves."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module", params=PRESETS)
def large(folder: Path, request: pytest.FixtureRequest) -> Iterator[Assembly]:
    """A model's shape with random weights, its kernels, and room for two adapters."""
    config = EngineConfig(
        model=request.param,
        random_weights=True,
        max_context=2048,
        num_pages=1024,
        device="cuda",
        max_running=4,
        adapters=str(folder),
        adapter_slots=2,
    )
    assembly = assemble(config)
    yield assembly
    assembly.device.close()
    del assembly
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def adapters(large: Assembly) -> dict[str, Adapter]:
    """Three of different ranks, read as a file would be."""
    text = PRESETS[large.config.model]().text
    made = {}
    for seed, (name, rank) in enumerate(FILE_RANKS.items()):
        if rank:
            data = safetensors_file(random_adapter(text, rank, seed))
            made[name] = large.model.read_adapter(data, name, large.config.max_adapter_rank)
    return made


def run(
    assembly: Assembly, adapters: dict[str, Adapter], names: list[str], depth: int
) -> dict[str, TaskOutput]:
    """A caption and a question for each name, together; nothing is held at the end."""
    sink = Answers()
    scheduler = assembly.scheduler(sink, pipeline_depth=depth)
    info = ImageProperties(image_id="grey", width=850, height=600, cache_hit=False)
    grey = assembly.frontend.prepare_image(Image.new("RGB", (850, 600), (90, 90, 90)), "grey", info)
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    for number, name in enumerate(names):
        asked = Request(
            request_id=RequestKey(f"{number}-caption"),
            task=CaptionSpec(),
            image=CachedImageRef(image_id="grey"),
            sampling=sampling,
        )
        scheduler.submit(make_sequence(assembly.frontend, asked, grey, adapters.get(name)))
        asked = Request(
            request_id=RequestKey(f"{number}-query"),
            task=QuerySpec(question="What?" * 20),
            sampling=sampling,
        )
        scheduler.submit(make_sequence(assembly.frontend, asked, None, adapters.get(name)))
    scheduler.drain()
    load = scheduler.load()
    assert (load.rows_used, load.pages_used, load.adapters_used) == (0, 0, 0)
    return sink.results


@pytest.mark.parametrize("depth", [1, 2])
def test_more_adapters_than_slots_all_answer(
    large: Assembly, adapters: dict[str, Adapter], depth: int
) -> None:
    """Mixed with rows of none, all are served, and each adapter says something of its own."""
    results = run(large, adapters, [*FILE_RANKS, *FILE_RANKS], depth)
    assert len(results) == 4 * len(FILE_RANKS)
    captions = {repr(results[f"{number}-caption"]) for number in range(len(FILE_RANKS))}
    assert len(captions) == len(FILE_RANKS)
