"""One engine beside several."""

from benchmarks.serve.devices import servers


def test_the_servers_differ_in_their_engines_only():
    """The same model and service processes; one without affinity."""
    one, several, without = servers("cuda:1,cuda:3", 2, ["--model", "null"]).values()
    common = ["--processes", "2", "--model", "null"]
    assert one == ["--device", "cuda:1", *common]
    assert several == ["--devices", "cuda:1,cuda:3", *common]
    assert without == ["--devices", "cuda:1,cuda:3", "--affinity", "off", *common]
