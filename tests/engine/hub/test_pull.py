"""`legato pull` against a hub on loopback, and what is served of it."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, file_download
from legato_engine.device.host import GpuDevice
from legato_engine.errors import InvalidField
from legato_engine.hub import download, listing, store
from legato_engine.hub.store import INDEX, MODELS, Published, RepositoryFiles
from legato_engine.models import registry

from tests.clients.python.face import until
from tests.engine.hub.fake_hub import COMMIT, FakeHub
from tests.engine.models import hub_folder
from tests.engine.models import test_decoders as llama

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
CHUNK = 100_000  # bytes that the library writes at a time
REPOSITORY = "maker/tiny"


def tiny(revision: str = COMMIT, **sha256: str) -> Published:
    """A model with its tokenizer in another repository."""
    files = ("config.json", "model.safetensors", INDEX, "LICENSE*")
    tokenizer = RepositoryFiles("maker/words", COMMIT, ("tokenizer.json",))
    weights = RepositoryFiles(
        REPOSITORY,
        revision,
        files,
        {"model.safetensors": sha} if (sha := sha256.get("sha")) else {},
    )
    return Published("tiny", "llama", (weights, tokenizer), "Apache-2.0", bf16_bytes=len(WEIGHTS))


@pytest.fixture
def hub(monkeypatch):
    """A hub with the two repositories."""
    monkeypatch.setattr(file_download, "time", types.SimpleNamespace(sleep=lambda _: None))
    with FakeHub() as fake:
        fake.files[REPOSITORY] = {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "LICENSE.md": b"Apache",
            "tokenizer.json": b"of another model",
            "model.py": b"import os",
        }
        fake.files["maker/words"] = {"tokenizer.json": b"[]"}
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        template = f"{fake.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield fake


def pulled(folder: Path, model: Published | None = None) -> store.Manifest:
    return download.pull(model or tiny(), folder, lambda _: None)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_wanted_is_fetched_and_written_down(hub, tmp_path):
    """No code, no file that the catalogue does not name; each with its origin and hash."""
    manifest = pulled(tmp_path)
    assert names(tmp_path) == {
        "config.json", "model.safetensors", "LICENSE.md", "tokenizer.json", "legato.json",
    }  # fmt: skip
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert (tmp_path / "tokenizer.json").read_bytes() == b"[]"
    assert manifest == store.read_manifest(tmp_path)
    stored = {each.name: each for each in manifest.files}
    assert stored["model.safetensors"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert manifest.origins == (f"{REPOSITORY}@{COMMIT}", f"maker/words@{COMMIT}")


def test_a_second_pull_fetches_nothing_but_checks(hub, tmp_path):
    """What is right stays; what was changed on the disk is removed and said."""
    pulled(tmp_path)
    hub.requests.clear()
    pulled(tmp_path)
    assert not hub.ranges("model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS[::-1])
    with pytest.raises(download.ContentMismatch, match=r"model.safetensors of maker/tiny"):
        pulled(tmp_path)
    pulled(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_hash(hub, tmp_path, name):
    """Other bytes of the same size, in LFS or in git, are not kept."""
    hub.wrong.add(name)
    with pytest.raises(download.ContentMismatch, match=name):
        pulled(tmp_path)
    assert name not in names(tmp_path)
    assert store.read_manifest(tmp_path) is None
    hub.wrong.clear()
    pulled(tmp_path)


def test_the_catalogue_is_believed_before_the_hub(hub, tmp_path):
    """A hub that is consistent in itself cannot replace what is pinned."""
    pulled(tmp_path / "right", tiny(sha=hashlib.sha256(WEIGHTS).hexdigest()))
    with pytest.raises(download.ContentMismatch):
        pulled(tmp_path / "wrong", tiny(sha="0" * 64))
    hub.commit = "f" * 40
    with pytest.raises(download.ContentMismatch, match="asked for"):
        pulled(tmp_path / "other")
    branch = pulled(tmp_path / "branch", tiny(revision="main").__class__(
        "tiny", "llama", (RepositoryFiles(REPOSITORY, "main", ("config.json",)),), "", 1
    ))  # fmt: skip
    assert branch.origins == (f"{REPOSITORY}@{hub.commit}",)


def test_a_broken_download_goes_on_at_once(hub, tmp_path):
    """The connection is made again, from the byte where it ended."""
    hub.cuts = [300_000]
    pulled(tmp_path)
    assert hub.ranges("model.safetensors") == ["", "bytes=300000-"]
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_that_breaks_off_again_and_again(hub, tmp_path):
    """The pull ends with an error, and the next one goes on with what was kept."""
    hub.cuts = [300_000, *[0] * 20]
    with pytest.raises(download.HubUnreachable, match="resumes"):
        pulled(tmp_path)
    assert store.read_manifest(tmp_path) is None
    hub.cuts = []
    hub.requests.clear()
    pulled(tmp_path)
    assert hub.ranges("model.safetensors") == ["bytes=300000-"]
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_shards_are_those_that_the_index_names(hub, tmp_path):
    """Older shards in the same repository stay where they are."""
    files = hub.files[REPOSITORY]
    del files["model.safetensors"]
    files["modelv2-1.safetensors"], files["modelv2-2.safetensors"] = b"a", b"b"
    files["model-1.safetensors"] = b"old"
    shards = {"x": "modelv2-1.safetensors", "y": "modelv2-2.safetensors"}
    files[INDEX] = json.dumps({"weight_map": shards}).encode()
    pulled(tmp_path)
    assert {name for name in names(tmp_path) if name.endswith(".safetensors")} == {*shards.values()}


def test_no_more_bytes_than_declared_are_written(hub, tmp_path):
    """A hub that sends more than it declares fills no disk, and leaves nothing."""
    hub.declared["model.safetensors"] = {"size": 1000}
    largest = 0

    def watch(line):
        nonlocal largest
        largest = max([largest, *(path.stat().st_size for path in tmp_path.iterdir())])

    with pytest.raises(download.ContentMismatch, match=r"longer than the 1000 bytes"):
        download.pull(tiny(), tmp_path, watch)
    assert largest <= 1000
    assert "legato.json" not in names(tmp_path)
    assert not list(tmp_path.glob("*.part"))
    hub.declared.clear()
    assert pulled(tmp_path).files


def test_a_part_that_is_no_beginning_is_discarded(hub, tmp_path):
    """One that is longer than its file, whatever left it there."""
    part = tmp_path / f"model.safetensors.{hashlib.sha256(WEIGHTS).hexdigest()[:16]}.part"
    part.write_bytes(WEIGHTS + b"more")
    assert pulled(tmp_path).files
    assert hub.ranges("model.safetensors") == [""]
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "content",
    [
        {"weight_map": {"a": "legato.json"}},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/model.safetensors"}},
        {"weight_map": {"a": ".safetensors"}},
        {"weight_map": {"a": ["model.safetensors"]}},
        {"weight_map": ["model.safetensors"]},
        {"weight_map": None},
        [],
        "[" * 100_000,
        '{"weight_map": {"a": ' + '{"b": ' * 100_000,
        '{"odd": ' + "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_an_odd_index_is_no_index(hub, tmp_path, content):
    """It names weights beside it, and nothing else: not the manifest, no other folder."""
    files = hub.files[REPOSITORY]
    files["legato.json"] = b"{}"
    del files["model.safetensors"]
    files[INDEX] = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    with pytest.raises(download.ContentMismatch, match=r"no index of shards|no file of weights"):
        pulled(tmp_path)
    assert "legato.json" not in names(tmp_path)


@pytest.mark.parametrize(
    "declared",
    [
        {"size": -1},
        {"size": None},
        {"size": "many"},
        {"size": 1 << 80},
        {"lfs": {"sha256": "../../../../tmp/x", "size": 1, "pointerSize": 1}},
        {"lfs": None, "blobId": "../../../../x"},
        {"lfs": None, "blobId": None},
        {"lfs": None, "blobId": {}},
        {"lfs": [1]},
    ],
)
def test_odd_records_of_a_file(hub, tmp_path, declared):
    """A record becomes part of a path only in the form that it must have."""
    hub.declared["model.safetensors"] = declared
    with pytest.raises((download.ContentMismatch, download.DiskFull)):
        pulled(tmp_path / "models" / "tiny")
    assert {path.name for path in tmp_path.rglob("*")} <= {"models", "tiny"}


@pytest.mark.parametrize(
    "answer",
    [b"", b"no json", b"[]", b"null", b"7", b"[" * 100_000, b'{"id": 1, "siblings": 7}', b"\xff"],
)
def test_odd_answers_of_a_hub(hub, tmp_path, capsys, monkeypatch, answer):
    """The command says it in one sentence, without a traceback."""
    hub.answer = answer or b" "
    monkeypatch.setitem(MODELS, "smollm2-135m", tiny())
    assert download.main(["smollm2-135m", "--models", str(tmp_path)]) == download.FAILED
    said = capsys.readouterr().err
    assert "legato: error: " in said
    assert "Traceback" not in said


def test_a_commit_must_be_one(hub, tmp_path):
    """A branch leads to a commit, which is written down."""
    hub.commit = "../../x"
    with pytest.raises(download.ContentMismatch, match="asked for main"):
        pulled(tmp_path, tiny("main"))


def test_no_such_repository(hub, tmp_path):
    """Nothing is left that looks like a model."""
    del hub.files[REPOSITORY]
    with pytest.raises(download.NotPublished):
        pulled(tmp_path)
    assert store.read_manifest(tmp_path) is None


def test_no_network(monkeypatch, tmp_path, capsys):
    """The error names the endpoint, and the exit code is that of an unavailable server."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(MODELS, "smollm2-135m", tiny())
    assert download.main(["smollm2-135m", "--models", str(tmp_path)]) == download.UNREACHABLE
    shown = capsys.readouterr()
    assert "http://127.0.0.1:1 does not answer" in shown.err
    assert "licence: Apache-2.0" in shown.out


def test_a_disk_that_is_too_small(hub, tmp_path, monkeypatch):
    """It is said before anything large is fetched."""
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(download.DiskFull, match=r"has 0\.00 GB left"):
        pulled(tmp_path)
    assert not hub.ranges("model.safetensors")


def test_a_disk_that_becomes_full(hub, tmp_path):
    """What was written stays for the next pull."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
        with pytest.raises(download.DiskFull, match="cannot write to"):
            pulled(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert store.read_manifest(tmp_path) is None
    hub.requests.clear()
    pulled(tmp_path)
    (asked,) = hub.ranges("model.safetensors")
    assert 0 < int(asked.removeprefix("bytes=").rstrip("-")) <= 500_000
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


PULL = f"""
import sys
from huggingface_hub import constants
from legato_engine.hub import download, store
from legato_engine.hub.store import Published, RepositoryFiles
constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}
store.MODELS["smollm2-135m"] = {tiny()!r}
sys.exit(download.main(["smollm2-135m", "--models", sys.argv[1]]))
"""


def test_a_pull_that_is_killed_is_resumed(hub, tmp_path):
    """A process of its own, with HF_ENDPOINT; SIGKILL in the middle of the weights."""
    hub.cuts, hub.stalls = [700_000], True
    command = [sys.executable, "-c", PULL, str(tmp_path)]
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        until(lambda: any(each.stat().st_size for each in tmp_path.glob("*/model*.part")))
        process.kill()
    hub.stalls = False
    hub.requests.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bytes are here already" in done.stdout
    assert "sizes and hashes checked" in done.stdout
    (asked,) = hub.ranges("model.safetensors")
    assert asked.startswith("bytes=")
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == WEIGHTS


def test_what_was_not_pulled_says_how(tmp_path):
    """Also a model of which a file was removed later."""
    with pytest.raises(InvalidField, match="`legato pull moondream2` fetches it"):
        store.find(str(tmp_path), "moondream2")


def test_a_file_that_is_gone(hub, tmp_path):
    """The server does not start on half a model."""
    pulled(tmp_path / "tiny")
    assert store.find(str(tmp_path), "tiny") == tmp_path / "tiny"
    (tmp_path / "tiny" / "tokenizer.json").write_bytes(b"[")
    with pytest.raises(InvalidField, match="not as it was pulled"):
        store.find(str(tmp_path), "tiny")


def test_models(hub, tmp_path, monkeypatch, capsys):
    """What is here, from where, and what fits; in a table and as JSON."""
    monkeypatch.setitem(MODELS, "smollm2-135m", tiny())
    assert download.main(["smollm2-135m", "--models", str(tmp_path)]) == 0
    monkeypatch.setattr(listing, "available_memory", lambda: 8_000_000_000)
    monkeypatch.setattr(listing, "gpu_places", lambda: [listing.Place("cuda:0", 16_000_000_000)])
    capsys.readouterr()
    assert listing.main(["--models", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = {row["model"]: row for row in said["models"]}
    assert rows["tiny"]["from"] == [f"{REPOSITORY}@{COMMIT}", f"maker/words@{COMMIT}"]
    assert rows["tiny"]["bytes_here"] == len(WEIGHTS) + len(b"{}" + b"Apache" + b"[]")
    assert rows["moondream2"]["fits"] == ["cuda:0"]
    assert not rows["moondream2"]["pulled"]
    assert rows["moondream3"]["fits"] == ["cuda:0 as int8"]
    assert rows["moondream3.1"]["fits"] == ["cuda:0"]
    monkeypatch.setattr(listing, "gpu_places", list)
    assert listing.main(["--models", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "nowhere" in table
    assert "3.85 GB" in table


@pytest.mark.parametrize(
    ("memory", "fits"),
    [("8", ["gpu"]), ("4", ["gpu as int8"]), ("2.6", ["gpu as int4"]), ("2.5", [])],
)
def test_a_board_that_is_not_here(memory, fits, tmp_path, capsys):
    """What fits is said for the memory that is given, in the largest form that does."""
    assert listing.main(["--models", str(tmp_path), "--memory", memory, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["memory"] == {"gpu": float(memory) * 1e9}
    assert {row["model"]: row["fits"] for row in said["models"]}["moondream2"] == fits


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-0.6B"])
def test_rounded_sizes_of_text_models_are_those_of_their_maps(name):
    """A tied head has a copy of 8 bits beside the embeddings, which stay in bf16."""
    import torch
    from legato_engine.kernels.map_codes import KINDS, format_of
    from legato_engine.models.decoder.model import DecoderNetwork

    from benchmarks.decode.text_step import MODELS as CONFIGS

    meta = torch.device("meta")
    with meta:
        network = DecoderNetwork(CONFIGS[name]).to(torch.bfloat16)
    layers = [m for m in network.layers.modules() if isinstance(m, torch.nn.Linear)]
    for kind, num_bytes in MODELS[name.lower()].rounded_bytes:
        own = format_of(KINDS[kind])
        maps = [(each.weight.shape, own) for each in layers]
        maps.append((network.embed_tokens.weight.shape, own.of_head))
        codes = [of.empty(shape, meta).tensors().values() for shape, of in maps]
        kept = sum(each.nbytes for each in network.parameters())
        kept -= sum(each.weight.nbytes for each in layers)
        assert num_bytes == kept + sum(each.nbytes for tensors in codes for each in tensors)


def test_an_integrated_gpu_has_the_hosts_free_memory(monkeypatch):
    """Its total is the host's, of which others have a part."""
    devices = [
        GpuDevice("cuda:0", "Orin", (8, 7), 8_000_000_000, is_integrated=True),
        GpuDevice("cuda:1", "A10", (8, 6), 24_000_000_000),
    ]
    monkeypatch.setattr(listing, "gpus", lambda: devices)
    monkeypatch.setattr(listing, "available_memory", lambda: 5_000_000_000)
    assert [each.num_bytes for each in listing.gpu_places()] == [5_000_000_000, 24_000_000_000]


def test_the_catalogue():
    """Commits and hashes have their length; every name is one of `--model`."""
    from legato_engine.config import MODELS as SERVED

    for name, model in MODELS.items():
        assert name == model.name
        assert name in SERVED
        for source in model.sources:
            assert len(source.revision) == 40 or source.revision == "main"
            assert all(len(sha256) == 64 for sha256 in source.sha256.values())
            assert set(source.sha256) <= set(source.files)
    assert set(store.pull_parser().parse_args(["moondream2"]).model) <= set("moondream2")


# ---------------------------------------------------------------- what is served


def test_a_pulled_model_is_served_without_a_network(hub, tmp_path, monkeypatch):
    """`--model NAME` alone finds and loads it; no socket is connected."""
    hub_folder.write(tmp_path / "made", llama.config())
    for path in (tmp_path / "made").iterdir():
        hub.files[REPOSITORY][path.name] = path.read_bytes()
    catalogued = MODELS["smollm2-135m"].sources[0]
    source = RepositoryFiles(REPOSITORY, COMMIT, catalogued.files)
    model = Published("smollm2-135m", "llama", (source,), "", 1)
    pulled(tmp_path / "models" / model.name, model)

    def connect(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    bundle = registry.resolve(model.name, models=str(tmp_path / "models"))
    assert bundle.load(torch.device("cpu"), torch.float32).num_parameters > 0
    with pytest.raises(InvalidField, match=r"legato pull qwen3-0\.6b"):
        registry.resolve("qwen3-0.6b", models=str(tmp_path / "models"))
