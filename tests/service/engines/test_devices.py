"""The devices that an operator names."""

import os

import pytest
from legato_engine.config import EngineConfig
from legato_engine.errors import InvalidField
from legato_service import arguments
from legato_service.engines.devices import engine_configs, parse_devices


def test_names_of_devices():
    """GPUs by number, and the CPU as often as one likes."""
    assert parse_devices("cuda:0,cuda:1") == ("cuda:0", "cuda:1")
    assert parse_devices("cpu,cpu") == ("cpu", "cpu")
    assert parse_devices("cuda,cuda:3") == ("cuda:0", "cuda:3")
    assert parse_devices("all", count=lambda: 3) == ("cuda:0", "cuda:1", "cuda:2")


@pytest.mark.parametrize("text", ["gpu0", "cuda:", "cuda:-1", "cuda:0,", "cuda:0,cuda:0", "auto"])
def test_what_is_no_device_is_refused(text):
    """The field is named."""
    with pytest.raises(InvalidField) as raised:
        parse_devices(text)
    assert raised.value.metadata["field"] == "devices"


def test_all_without_a_gpu_is_refused():
    """A server that should use GPUs does not fall back to the CPU."""
    with pytest.raises(InvalidField, match="no CUDA GPU"):
        parse_devices("all", count=lambda: 0)


def test_each_engine_has_its_device():
    """Engines on the CPU share its cores, unless the operator divided them."""
    cores = len(os.sched_getaffinity(0))
    config = EngineConfig(max_running=3)
    assert engine_configs(config, ()) == (config,)
    one, other = engine_configs(config, ("cpu", "cpu"))
    assert one == other == EngineConfig(max_running=3, device="cpu", threads=max(1, cores // 2))
    assert [each.threads for each in engine_configs(EngineConfig(threads=5), ("cpu", "cpu"))] == [
        5,
        5,
    ]
    gpus = engine_configs(config, ("cuda:0", "cuda:1"))
    assert [(each.device, each.threads) for each in gpus] == [("cuda:0", 0), ("cuda:1", 0)]


def test_the_options(capsys):
    """Both forms together are an error."""
    assert arguments.parse(["--devices", "cpu,cpu"]).devices == "cpu,cpu"
    assert arguments.parse([]).affinity
    assert not arguments.parse(["--affinity", "off"]).affinity
    with pytest.raises(SystemExit):
        arguments.parse(["--devices", "cpu,cpu", "--device", "cpu"])
    assert "not allowed with" in capsys.readouterr().err
