"""The engine with adapters, and the store of their files."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.adapters import AdapterStore
from legato_engine.core.assembly import assemble
from legato_engine.errors import AdapterNotFound, AdapterUnusable, InvalidField
from legato_engine.ipc.messages import Done, Failed, PrefillStarted
from legato_engine.kernels.parameters import LowRankStack
from legato_engine.layers.lora import AdapterWeights
from legato_engine.models.base import Adapter
from legato_engine.models.moondream.presets import tiny_random3_config, tiny_random_config
from legato_engine.types import CachedImageRef, CaptionSpec, DetectSpec, QuerySpec, RequestKey

from tests.adapters import published_file, random_adapter, safetensors_file
from tests.engine.core.world import CONFIG, World, png

TEXT = tiny_random_config().text
TEXTS = {"random-tiny": TEXT, "random-tiny3": tiny_random3_config().text}
NAMES = ("x", "y", "z")
TASKS = (DetectSpec(object="x"), CaptionSpec(), QuerySpec(question="what is it?"))


def adapter_of(name, text=TEXT):
    """Return one of three adapters of different ranks."""
    seed = NAMES.index(name)
    return random_adapter(text, (2, 16, 10)[seed], seed)


@pytest.fixture(scope="module")
def make_assembly(tmp_path_factory):
    """Makes models with three adapters of different ranks, one as published, and two slots."""
    made = []

    def make(model):
        folder, text = tmp_path_factory.mktemp("adapters"), TEXTS[model]
        for name in "xy":
            (folder / f"{name}.safetensors").write_bytes(safetensors_file(adapter_of(name, text)))
        (folder / "z.pt").write_bytes(published_file(adapter_of("z", text), text=text))
        changes = {"adapters": str(folder), "adapter_slots": 2, "max_adapter_rank": 16}
        config = msgspec.structs.replace(CONFIG, model=model, max_running=4, max_waiting=64)
        made.append(assemble(msgspec.structs.replace(config, **changes)))
        return made[-1]

    yield make
    for each in made:
        each.device.close()


@pytest.fixture(scope="module")
def assembly(make_assembly):
    """One model for all tests."""
    return make_assembly("random-tiny")


@pytest.fixture
def folder(assembly):
    """The folder of adapters."""
    return Path(assembly.config.adapters)


@pytest.fixture(scope="module", params=TEXTS)
def either(request, assembly, make_assembly):
    """The shared model, or one with experts."""
    return assembly if request.param == "random-tiny" else make_assembly(request.param)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2])
def depth(request):
    """Blocking and pipelined."""
    return request.param


@pytest.fixture
def world(assembly, depth):
    """An engine over the shared model; at its end no adapter slot is held."""
    made = World(assembly, pipeline_depth=depth)
    yield made
    made.close()


def result(world, name):
    """Return the result and finish reason of a request."""
    (end,) = world.run(name)
    assert isinstance(end, Done), end
    return end.result, end.finish_reason


def test_adapters_side_by_side_answer_as_alone(either, depth):
    """More adapters than slots, mixed with none, give the results that each gives alone."""
    world, data = World(either, pipeline_depth=depth), png()
    asked = [(task, name) for name in ("", *NAMES) for task in TASKS] * 2
    alone = {}
    for number, (task, name) in enumerate(asked[: len(asked) // 2]):
        request_id = f"alone-{number}"
        image = world.encoded(data)
        world.submit(request_id, task, image, adapter=name, cache_image=False)
        alone[type(task), name] = result(world, request_id)
    for number, (task, name) in enumerate(asked):
        world.submit(f"r-{number}", task, world.encoded(data), adapter=name)
    for number, (task, name) in enumerate(asked):
        assert result(world, f"r-{number}") == alone[type(task), name]
    assert len({repr(alone[CaptionSpec, name]) for name in ("", *NAMES)}) == 4, "all say the same"
    assert world.core.load().adapters_used == 0
    world.close()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_slots_answer_as_merged_weights(either, depth, seed):
    """Each skill gives the result of a model with merged weights, on every kind of launch."""
    world, name = World(either, pipeline_depth=depth), either.config.model
    config = msgspec.structs.replace(CONFIG, model=name, max_waiting=64, cpu_kernels="torch")
    merged = assemble(config)  # whose weights can be changed
    model: Any = merged.model
    tensors = adapter_of(NAMES[seed], TEXTS[name])
    for layer, block in enumerate(model._network.text.blocks):
        for part in ("fc1", "fc2"):
            a_RI, b_OR = tensors[layer, f"{part}.lora_a"], tensors[layer, f"{part}.lora_b"]
            getattr(block.mlp, part).weight += b_OR @ a_RI
    reference = World(merged)
    for number, task in enumerate((*TASKS, *TASKS)):
        for where, name in ((world, NAMES[seed]), (reference, "")):
            image = where.encoded(png(seed=30 + number))
            where.submit(f"r-{number}", task, image, adapter=name)
    for number in range(2 * len(TASKS)):
        ours, truth = result(world, f"r-{number}"), result(reference, f"r-{number}")
        (said, sure), (expected, expected_sure) = split(ours), split(truth)
        assert said == expected
        assert sure == pytest.approx(expected_sure, rel=1e-4)  # merged weights round otherwise
    world.close()
    reference.close()
    merged.device.close()


def split(outcome: object) -> tuple[str, list[float]]:
    """An outcome in words without its confidences, and those."""
    given = re.findall(r"confidence=([-+.e\d]+)", str(outcome))
    return re.sub(r"confidence=[-+.e\d]+", "", str(outcome)), [float(each) for each in given]


def test_a_prefix_is_shared_under_its_adapter_alone(world):
    """An image's prefix is computed once per adapter, and once without."""
    data, cached = png(seed=3), dict.fromkeys(("", *NAMES), False)
    for number, name in enumerate(("x", "x", "", "y", "", "x", "y")):
        world.submit(f"r-{number}", DetectSpec(object="x"), world.encoded(data), adapter=name)
        world.run(f"r-{number}")
        hit = world.of(f"r-{number}", PrefillStarted)[0].cached_tokens > 0
        assert hit == cached[name]
        cached[name] = True


def test_a_file_that_appears_is_found(world, folder):
    """A name is unknown before its file exists, and found afterwards."""
    world.submit("before", QuerySpec(question="?"), adapter="late")
    world.run("before")
    assert type(world.error("before")).__name__ == "AdapterNotFound"
    path = folder / "late.safetensors"
    path.write_bytes(safetensors_file(random_adapter(TEXT, 4, seed=9)))
    world.submit("after", QuerySpec(question="?"), adapter="late")
    world.submit("plain", QuerySpec(question="?"))
    assert result(world, "after") != result(world, "plain")
    path.unlink()


def test_a_replaced_file_is_for_later_requests(world, folder):
    """A request that started with the old content finishes with it; the next has the new."""
    path = folder / "changing.safetensors"
    task, data = CaptionSpec(), png(seed=4)
    answers = {}
    for seed in (20, 21):
        path.write_bytes(safetensors_file(random_adapter(TEXT, 6, seed)))
        world.submit(f"alone-{seed}", task, world.encoded(data), adapter="changing")
        answers[seed] = result(world, f"alone-{seed}")
    assert answers[20] != answers[21]
    path.write_bytes(safetensors_file(random_adapter(TEXT, 6, 20)))
    world.submit("old", task, world.encoded(data), adapter="changing")
    while not world.of("old", PrefillStarted):
        world.core.step()
    path.write_bytes(safetensors_file(random_adapter(TEXT, 6, 21)))
    world.submit("new", task, world.encoded(data), adapter="changing")
    assert result(world, "new") == answers[21]
    assert result(world, "old") == answers[20]
    path.unlink()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"nonsense", "neither safetensors"),
        (safetensors_file(random_adapter(TEXT, 17)), "rank is 17"),
        (safetensors_file(random_adapter(TEXT, 4), "moondream2"), "for the model moondream2"),
    ],
)
def test_a_bad_file_fails_only_its_request(world, folder, data, says):
    """A malformed adapter fails only its own request, with the reason."""
    (folder / "bad.safetensors").write_bytes(data)
    image = world.encoded(png(seed=5))
    world.submit("good", DetectSpec(object="x"), image, adapter="x")
    world.submit("bad", DetectSpec(object="x"), world.encoded(png(seed=6)), adapter="bad")
    world.submit("other", QuerySpec(question="?"))
    good, bad, other = world.run("good", "bad", "other")
    assert isinstance(good, Done)
    assert isinstance(other, Done)
    assert isinstance(bad, Failed)
    error = world.error("bad")
    assert type(error).__name__ == "AdapterUnusable"
    assert says in error.message
    (folder / "bad.safetensors").unlink()


def test_a_failed_adapter_does_not_wait_for_its_image(assembly, depth):
    """A request fails with the first of its parts, and its image is cancelled."""
    world = World(assembly, pipeline_depth=depth, preprocess_threads=1)
    blocked = world.encoded(png(seed=7, size=(900, 900)))
    world.submit("busy", DetectSpec(object="x"), blocked)
    world.submit("r", DetectSpec(object="x"), world.encoded(png(seed=8)), adapter="none")
    world.run("r")
    assert type(world.error("r")).__name__ == "AdapterNotFound"
    world.run("busy")
    world.close()


def test_aborts_and_stops_while_an_adapter_is_read(world):
    """A request whose adapter is being read can be aborted and stopped; no slot stays held."""
    for number in range(6):
        world.submit(f"r-{number}", CaptionSpec(), world.encoded(png(seed=9)), adapter="x")
    world.core.abort(RequestKey("r-0"))
    world.core.stop(RequestKey("r-1"))
    for _ in range(5):
        world.core.step()
    world.core.abort(RequestKey("r-2"))
    world.core.stop(RequestKey("r-3"))
    world.run("r-1", "r-3", "r-4", "r-5")
    assert not world.of("r-0")


def test_a_named_image_with_an_adapter(world):
    """A request with a cached image still waits for its adapter."""
    world.submit("a", CaptionSpec(), world.encoded(png(seed=10)))
    (done,) = world.run("a")
    named = CachedImageRef(image_id=done.image.image_id)
    world.submit("b", CaptionSpec(), named, adapter="y")
    world.submit("c", CaptionSpec(), world.encoded(png(seed=10)), adapter="y")
    assert result(world, "b") == result(world, "c")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"adapters": "/nowhere"}, "adapters"),
        ({"adapter_slots": 0}, "adapter_slots"),
        ({"max_adapter_rank": 0}, "max_adapter_rank"),
        ({"max_adapter_rank": 513}, "max_adapter_rank"),
    ],
)
def test_settings_that_make_no_sense(changes, field):
    """A missing folder and numbers out of range are refused at start, by name."""
    with pytest.raises(InvalidField) as caught:
        assemble(EngineConfig(model="random-tiny", device="cpu", threads=1, **changes))
    assert caught.value.metadata["field"] == field


def test_adapters_with_a_slot_are_read_once(assembly, monkeypatch):
    """With the smallest cache, adapters used in turn stay in memory."""
    config = msgspec.structs.replace(assembly.config, adapter_cache_bytes=1)
    world, reads = World(dataclasses.replace(assembly, config=config)), []
    read = assembly.model.read_adapter

    def counted(data, key, *limits):
        reads.append(key)
        return read(data, key, *limits)

    monkeypatch.setattr(assembly.model, "read_adapter", counted)
    for number, name in enumerate("xyxyxy"):
        world.submit(f"r-{number}", QuerySpec(question="?"), adapter=name)
        world.run(f"r-{number}")
    assert len(reads) == 2
    world.close()


def test_without_a_folder_there_is_no_bank(assembly):
    """Only an engine with adapters announces them and allocates their slots."""
    assert assembly.info.adapters
    plain = assemble(CONFIG)
    assert (plain.bank, plain.info.adapters) == (None, False)
    plain.device.close()


# ---------------------------------------------------------------- files by name

MAX_VALUES = 100


class Reader:
    """Returns a file's bytes as an adapter; `gate` delays reads."""

    def __init__(self):
        self.keys = []
        self.threads = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, data, key, settings):
        """Count the read."""
        self.settings = settings
        assert self.gate.wait(10)
        self.keys.append(key)
        self.threads.add(threading.current_thread())
        if data == b"bad":
            raise AdapterUnusable("no adapter")
        none = torch.zeros(0)
        return Adapter(key, 8, AdapterWeights({"fc1": LowRankStack(none, none)}), len(data))


@pytest.fixture
def reader():
    """A reader whose gate is set."""
    return Reader()


@pytest.fixture
def store(reader, tmp_path):
    """A store over two folders with a cache of ten bytes."""
    folders = (tmp_path / "given", tmp_path / "shipped")
    for folder in folders:
        folder.mkdir()
    made = AdapterStore(reader, folders, max_values=MAX_VALUES, cache_bytes=10)
    yield made
    reader.gate.set()
    made.close()


def get(store, name):
    """Return the adapter."""
    return store.start(name).result(10)


def test_a_file_is_found_once_it_exists(store, reader, tmp_path):
    """A file that appears later is found by the next request, and another thread reads it once."""
    with pytest.raises(AdapterNotFound) as caught:
        get(store, "cups@12")
    assert caught.value.metadata == {"resource": "cups@12"}
    (tmp_path / "given" / "cups@12.safetensors").write_bytes(b"one")
    assert get(store, "cups@12") is get(store, "cups@12")
    assert len(reader.keys) == 1
    assert threading.current_thread() not in reader.threads


def test_the_first_folder_wins(store, tmp_path):
    """A file in the operator's folder hides one of the same name in the model's."""
    (tmp_path / "shipped" / "a.safetensors").write_bytes(b"shipped")
    shipped = get(store, "a")
    (tmp_path / "given" / "a.pt").write_bytes(b"given")
    assert get(store, "a").key != shipped.key


def test_a_replaced_file_is_another_adapter(store, tmp_path):
    """New content under the same name has a new key; the same content has the same key."""
    path = tmp_path / "given" / "a.pt"
    path.write_bytes(b"one")
    first = get(store, "a")
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"two")
    fresh.replace(path)
    second = get(store, "a")
    assert first.key != second.key
    os.utime(path, ns=(1, 1))
    assert get(store, "a").key == second.key
    (tmp_path / "given" / "b.pt").write_bytes(b"two")
    assert get(store, "b").key == second.key, "two names of one content are one adapter"
    path.unlink()
    with pytest.raises(AdapterNotFound):
        get(store, "a")


def test_a_folder_is_an_adapter(store, reader, tmp_path):
    """It has both files of PEFT; new content of either is another adapter."""
    folder = tmp_path / "given" / "cups@2"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    with pytest.raises(AdapterNotFound):
        get(store, "cups@2")
    settings = folder / "adapter_config.json"
    settings.write_bytes(b"{}")
    first = get(store, "cups@2")
    assert (reader.settings, get(store, "cups@2")) == (b"{}", first)
    settings.write_bytes(b'{"r": 2}')
    assert get(store, "cups@2").key != first.key
    assert reader.settings == b'{"r": 2}'
    settings.write_bytes(bytes(4 * MAX_VALUES + 1024 * 1024 + 1))
    with pytest.raises(AdapterUnusable, match="larger than an adapter"):
        get(store, "cups@2")
    settings.write_bytes(b"{}")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterUnusable, match=r"adapter_model.safetensors is missing beside"):
        get(store, "cups@2")


def test_memory_is_bounded(store, reader, tmp_path):
    """Over `cache_bytes` the least recently used adapter is dropped and read again."""
    for name in "abc":
        (tmp_path / "given" / f"{name}.pt").write_bytes(name.encode() * 4)
    for name in "abacab":
        get(store, name)
    assert len(reader.keys) == 4, "c evicted b, not a"


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc/passwd", "x" * 200, "é"])
def test_names_cannot_leave_the_folder(store, tmp_path, name):
    """A name that is no file name is not found, wherever its path leads."""
    (tmp_path / "secret.pt").write_bytes(b"one")
    with pytest.raises(AdapterNotFound):
        get(store, name)


def test_bad_files_are_refused(store, tmp_path):
    """Broken, too large and irregular files are refused each time; others are still read."""
    folder = tmp_path / "given"
    (folder / "bad.pt").write_bytes(b"bad")
    (folder / "folder.pt").mkdir()
    os.mkfifo(folder / "pipe.pt")
    (folder / "large.pt").write_bytes(bytes(4 * MAX_VALUES + 1024 * 1024 + 1))
    for name in ("bad", "bad"):
        with pytest.raises(AdapterUnusable, match="no adapter"):
            get(store, name)
    for name in ("folder", "pipe"):
        with pytest.raises(AdapterNotFound):
            get(store, name)
    with pytest.raises(AdapterUnusable) as caught:
        get(store, "large")
    assert caught.value.metadata["limit"] == str(4 * MAX_VALUES + 1024 * 1024)
    (folder / "good.pt").write_bytes(b"good")
    assert get(store, "good").key


def test_concurrent_requests_share_a_read(store, reader, tmp_path):
    """Concurrent requests for one adapter share a read."""
    (tmp_path / "given" / "a.pt").write_bytes(b"one")
    reader.gate.clear()
    futures = [store.start("a") for _ in range(5)]
    reader.gate.set()
    assert len({id(future.result(10)) for future in futures}) == 1
    assert len(reader.keys) == 1
