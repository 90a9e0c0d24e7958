"""Adapter files are read strictly, and adapter slots compute what merged weights would."""

from __future__ import annotations

import io
import resource
import zipfile

import msgspec
import pytest
import torch
from legato_engine.errors import AdapterUnusable
from legato_engine.layers.lora import AdapterBank, BankSizes
from legato_engine.models.moondream.adapters import parse_adapter
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import DecodeBatch, PrefillSpan

from tests.adapters import (
    own_names,
    published_file,
    random_adapter,
    safetensors_file,
    torch_file,
)
from tests.engine.models.paged_session import AdaptedSession, PagedSession, walk
from tests.fake_device import InlineStream

CPU = torch.device("cpu")
MAX_RANK = 16


def parse(data, config, max_rank=MAX_RANK, dtype=torch.float32):
    """Parse a file."""
    return parse_adapter(data, config, max_rank, dtype)


def merged(config, tensors, seed=0):
    """A model with the adapter merged into its weights."""
    network = random_weights(config, seed, CPU, torch.float32)
    for layer, block in enumerate(network.text.blocks):
        for name in ("fc1", "fc2"):
            a_RI, b_OR = tensors[layer, f"{name}.lora_a"], tensors[layer, f"{name}.lora_b"]
            getattr(block.mlp, name).weight += b_OR @ a_RI  # of every expert, where there are some
    return MoondreamModel(config, network)


def bank_of(model, *adapters, num_slots=4):
    """A bank with these adapters from slot 1 on."""
    bank = model.adapter_bank(num_slots, MAX_RANK)
    for slot, data in enumerate(adapters, start=1):
        bank.write(slot, model.read_adapter(data, "", MAX_RANK).weights, InlineStream())
    return bank


@pytest.fixture(params=["tiny_config", "tiny3_config"])
def config(request):
    """Either kind: MLPs in every layer, or experts after the first."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("rank", [2, 6, 8, 16])
@pytest.mark.parametrize("with_image", [False, True])
def test_slots_compute_what_merged_weights_do(
    config, make_model, frontend, prepare, rank, with_image
):
    """Prefill and decode have the logits of a model with the adapter in its weights."""
    model, _ = make_model(config)
    image = prepare(frontend, 60, 50) if with_image else None
    tensors = random_adapter(config.text, rank, seed=rank)
    session = AdaptedSession(model, bank_of(model, safetensors_file(tensors)), [1])
    ours_SV = walk(session, [0], image)[0]
    plain_SV = walk(PagedSession(model, num_rows=1), [0], image)[0]
    truth_SV = walk(PagedSession(merged(config, tensors), num_rows=1), [0], image)[0]
    scale = truth_SV.abs().max()
    assert (ours_SV - truth_SV).abs().max() < 2e-5 * scale
    assert (plain_SV - truth_SV).abs().max() > 0.1 * scale, "the adapter changes nothing"


def test_a_row_decides_its_own_bits(config, make_model, frontend, prepare):
    """A row's bits do not depend on the adapters of other rows."""
    model, _ = make_model(config)
    image = prepare(frontend, 60, 50)
    files = [safetensors_file(random_adapter(config.text, rank, seed=rank)) for rank in (2, 16, 6)]
    slots = [1, 0, 2, 3, 2, 1, 0, 3, 1, 2]
    bank = bank_of(model, *files)
    together = walk(AdaptedSession(model, bank, slots, seed=1), range(len(slots)), image)
    for row, slot in enumerate(slots):
        alone = walk(AdaptedSession(model, bank, [slot], seed=2), [0], image)[0]
        assert torch.equal(together[row], alone)
    plain = walk(PagedSession(model, num_rows=1), [0], image)[0]
    assert torch.equal(together[1], plain)


def test_a_slot_is_written_over_whole(config, make_model):
    """A slot keeps nothing of an earlier adapter, even of a higher rank."""
    model, _ = make_model(config)
    small = safetensors_file(random_adapter(config.text, 4, seed=1))
    large = safetensors_file(random_adapter(config.text, 16, seed=2))
    fresh, used = bank_of(model, small), bank_of(model, large)
    used.write(1, model.read_adapter(small, "", MAX_RANK).weights, InlineStream())
    for ours, theirs in zip(used.weights.tensors, fresh.weights.tensors, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(used.rank_S, fresh.rank_S)
    assert torch.equal(used.expert_rank_S, fresh.expert_rank_S)


def test_both_formats_hold_the_same(config):
    """A published checkpoint and our own file of one adapter give the same weights."""
    tensors = random_adapter(config.text, 4)
    ours = parse(safetensors_file(tensors, config.name), config)
    for prefix in ("", "a.b.", "model.lora_0."):
        theirs = parse(published_file(tensors, prefix, config.text), config)
        for one, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert torch.equal(one, other)
    with torch.inference_mode(mode=False):
        parameters = {place: torch.nn.Parameter(each.clone()) for place, each in tensors.items()}
    assert not any(
        each.requires_grad
        for each in parse(published_file(parameters, text=config.text), config).tensors
    )


def test_layers_may_be_left_out(tiny_config, make_model):
    """A layer that a file omits is unchanged."""
    tensors = random_adapter(tiny_config.text, 4)
    last = {place: each for place, each in tensors.items() if place[0] == 1}
    model, _ = make_model(tiny_config)
    zeros = {p: each if p[0] == 1 else torch.zeros_like(each) for p, each in tensors.items()}
    ours = walk(AdaptedSession(model, bank_of(model, safetensors_file(last)), [1]), [0], None)[0]
    theirs = walk(AdaptedSession(model, bank_of(model, safetensors_file(zeros)), [1]), [0], None)[0]
    assert torch.equal(ours, theirs)


def changed(tensors, place, tensor):
    """The adapter with one tensor replaced, or dropped."""
    rest = {each: value for each, value in tensors.items() if each != place}
    return rest if tensor is None else {**rest, place: tensor}


A, B = (0, "fc1.lora_a"), (1, "fc2.lora_b")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: b"", "neither safetensors nor a torch checkpoint"),
        (lambda t: b"\x08\0\0\0\0\0\0\0{broken}", "neither safetensors nor a torch checkpoint"),
        (lambda t: safetensors_file(t)[:500], "neither safetensors nor a torch checkpoint"),
        (lambda t: published_file(t)[:900], "the torch checkpoint cannot be read"),
        (lambda t: safetensors_file({}), "no tensors"),
        (lambda t: safetensors_file(t, "moondream9"), "for the model moondream9, not random-tiny"),
        (
            lambda t: safetensors_file({**own_names(t), "x.lora_a": t[A].clone()}),
            "x.lora_a: not a tensor",
        ),
        (lambda t: safetensors_file(changed(t, A, None)), "layer 0: fc1.lora_a missing"),
        (lambda t: safetensors_file(changed(t, A, t[A][:, :5])), "shape [4, 5], expected [4, 64]"),
        (
            lambda t: safetensors_file(changed(t, B, t[B][:, :3])),
            "layer 1 fc2.lora_b: shape [64, 3]",
        ),
        (lambda t: safetensors_file({(7, p): v for (_, p), v in t.items()}), "has 2 layers"),
        (lambda t: safetensors_file(changed(t, B, t[B].to(torch.int32))), "floating-point"),
        (lambda t: safetensors_file(changed(t, B, t[B] * torch.inf)), "not finite"),
        (lambda t: safetensors_file(changed(t, A, t[A][0])), "tells its rank"),
        (lambda t: torch_file([1, 2]), "no lora_state_dict"),
        (lambda t: torch_file({"lora_state_dict": {"dense.0.up_a": 3}}), "named tensors only"),
        (lambda t: torch_file({"lora_state_dict": {"attn.0.up_a": t[A]}}), "attn.0.up_a: not a"),
        (
            lambda t: torch_file({"lora_state_dict": {"m.moe.0.up_a": t[A][None]}}),
            "m.moe.0.up_a: it adapts experts",
        ),
        (
            lambda t: torch_file(
                {"lora_state_dict": {"a.dense.0.up_a": t[A], "dense.0.up_a": t[A]}}
            ),
            "given twice",
        ),
    ],
)
def test_what_is_no_adapter_of_the_model_is_told(tiny_config, make, says):
    """A malformed file, or another model's, is refused with the reason."""
    with pytest.raises(AdapterUnusable) as caught:
        parse(make(random_adapter(tiny_config.text, 4)), tiny_config)
    assert says in caught.value.message


def test_a_folder_of_peft_is_refused(tiny_model):
    """Moondream's fine-tunes are files."""
    with pytest.raises(AdapterUnusable, match=r"takes NAME\.safetensors and NAME\.pt"):
        tiny_model.read_adapter(b"", "", MAX_RANK, b"{}")


def zipped(*opcodes):
    """A torch checkpoint of these opcodes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"".join(opcodes) + b".")
        archive.writestr("a/version", "3")
    return data.getvalue()


HUGE = b"cbuiltins\nbytearray\n(J\x00\x10\x5e\x5ftR"  # 1.6 GB of zeros
CALL = b"cposix\nsystem\n(U\x04trueltR"
EXPANDED = {"lora_state_dict": {"dense.0.up_a": torch.zeros(1).expand(1 << 33)}}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zipped(HUGE), "takes more than 128 MiB"),
        (lambda: torch_file(EXPANDED), "takes more than 128 MiB"),
        (lambda: zipped(CALL), "cannot be read: UnpicklingError"),
        (lambda: zipped(b"(" * 50_000 + b"t" * 50_000), "no lora_state_dict"),
        (lambda: zipped(b"r\xff\xff\xff\xff"), "cannot be read"),
    ],
)
def test_a_hostile_checkpoint_harms_no_engine(tiny_config, make, says):
    """What it allocates or crashes is a process of its own, within limits."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(AdapterUnusable, match=says):
        parse(make(), tiny_config)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"__metadata__":null}', "no tensors"),
        (b'{"__metadata__":{"model":7}}', "neither safetensors"),
        (b'{"__metadata__":[]}', "neither safetensors"),
        (b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}", "neither safetensors"),
        (b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', "neither safetensors"),
        (b"{}" + b" " * (1 << 20), "at most 1048576"),
    ],
)
def test_an_odd_header_is_told(tiny_config, header, says):
    """It is the file's fault, whatever its parsers raise."""
    data = len(header).to_bytes(8, "little") + header
    with pytest.raises(AdapterUnusable, match=says):
        parse(data, tiny_config)


MOE_A, MOE_B = (1, "fc1.lora_a"), (2, "fc2.lora_b")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: {**t, MOE_A: t[MOE_A][:, :1]}, "layer 1 fc1.lora_a: shape [6, 1, 64]"),
        (lambda t: {**t, MOE_A: t[MOE_A][:5]}, "expected [6, 2, 64] for rank 4"),
        (lambda t: {**t, MOE_B: t[MOE_B][:, 0]}, "layer 2 fc2.lora_b: shape [6, 2]"),
        (lambda t: changed(t, MOE_B, None), "layer 2: fc2.lora_b missing"),
        (lambda t: {**t, MOE_B: t[MOE_B] * torch.nan}, "fc2.lora_b: not finite"),
        (lambda t: {place: t[place][0] for place in t if place[0]}, "tells its rank"),
        (
            lambda t: {**t, MOE_A: t[A].clone()},
            "[4, 64], expected [6, 2, 64]",
        ),
        (lambda t: {(place[0] + 3, place[1]): t[place] for place in t if place[0]}, "has 3 layers"),
    ],
)
def test_what_is_no_adapter_of_experts_is_told(tiny3_config, make, says):
    """Experts' tensors are checked like an MLP's."""
    with pytest.raises(AdapterUnusable) as caught:
        parse(safetensors_file(make(random_adapter(tiny3_config.text, 4))), tiny3_config)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dense.1.up_a", "dense.1.up_a: this model has 1 layers with an MLP"),
        ("moe.2.up_a", "moe.2.up_a: this model has 2 with experts"),
    ],
)
def test_published_layers_are_counted_by_kind(tiny3_config, name, says):
    """`dense` and `moe` are counted separately."""
    with pytest.raises(AdapterUnusable) as caught:
        parse(torch_file({"lora_state_dict": {name: torch.zeros(2, 2)}}), tiny3_config)
    assert says in caught.value.message


def test_a_rank_is_shared_evenly(tiny3_config):
    """Active experts have equal parts of the rank, which no MLP need state."""
    experts = {p: each for p, each in random_adapter(tiny3_config.text, 6).items() if p[0]}
    assert parse(safetensors_file(experts), tiny3_config).rank == 6
    dense = {p: each for p, each in random_adapter(tiny3_config.text, 5).items() if not p[0]}
    with pytest.raises(AdapterUnusable, match="its rank is 5, no multiple of the 2 experts"):
        parse(safetensors_file(dense), tiny3_config)


class Bomb:
    """Would run code when unpickled."""

    def __reduce__(self):
        return (print, ("boom",))


def test_a_checkpoint_runs_no_code(tiny_config, capsys):
    """A pickle's call is never made."""
    with pytest.raises(AdapterUnusable):
        parse(torch_file({"lora_state_dict": Bomb()}), tiny_config)
    assert "boom" not in capsys.readouterr().out


def test_ranks_have_a_limit(tiny_config):
    """The highest rank passes; one more is refused with limit and actual rank."""
    parse(safetensors_file(random_adapter(tiny_config.text, MAX_RANK)), tiny_config)
    with pytest.raises(AdapterUnusable) as caught:
        parse(safetensors_file(random_adapter(tiny_config.text, MAX_RANK + 1)), tiny_config)
    assert caught.value.metadata == {"limit": "16", "actual": "17"}


def test_another_size_of_model_is_refused(tiny_config, mid_config):
    """The error of an adapter for a wider model names the sizes."""
    named = msgspec.structs.replace(mid_config, name=tiny_config.name)
    data = safetensors_file(random_adapter(named.text, 4))
    with pytest.raises(AdapterUnusable, match=r"shape \[4, 128\], expected \[4, 64\]"):
        parse(data, tiny_config)


@pytest.mark.parametrize(
    ("most", "ranks"), [(4, (4,)), (8, (8,)), (64, (8, 16, 32, 64)), (48, (8, 16, 32, 48))]
)
def test_ranks_are_captured_doubling(most, ranks):
    """A launch runs at less than twice the rank of its adapters, or at the least rank."""
    like = torch.zeros(1)
    bank = AdapterBank(BankSizes(1, {"fc1": (2, 2)}), num_slots=1, max_rank=most, like=like)
    assert bank.ranks == ranks
    assert [bank.bucket(0), bank.bucket(1), bank.bucket(most)] == [0, ranks[0], most]


def test_without_adapters_nothing_is_asked(tiny_model):
    """A batch and a span have no adapters by default."""
    positions, pages = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    assert DecodeBatch(positions, pages).adapters is None
    assert PrefillSpan(0, pages[0], bidirectional=False).adapters is None
