"""The hop's arithmetic."""

import pytest

from benchmarks.serve.hop import CLIENTS, compare


def asks(produced=1, **milliseconds):
    """Return ways that take the same time in every call."""
    ways = {"inside": milliseconds["inside"]}
    for client in CLIENTS:
        ways |= {f"{way} {client}": milliseconds[way] for way in ("through", "bare")}
    return {
        name: lambda kind, tokens, name=name, spent=spent: (
            spent,
            3 if name.startswith("bare") else produced,
        )
        for name, spent in ways.items()
    }


def test_the_hop_is_what_grpc_and_the_process_add():
    """The engine's own time is subtracted, and of the rest a bare server's is gRPC's."""
    row = compare(asks(inside=2.0, through=5.0, bare=1.0), "id", 1, calls=4, block=2)
    assert (row.picture, row.tokens, row.calls, row.in_process) == ("id", 1, 4, 2.0)
    for client in CLIENTS:
        assert (row.hop(client), row.ours(client)) == (3.0, 2.0)


def test_answers_of_different_lengths_are_not_compared():
    """A hop is computed for equal work only."""
    ways = asks(inside=2.0, through=5.0, bare=1.0)
    ways["inside"] = lambda kind, tokens: (2.0, 9)
    with pytest.raises(ValueError, match="different lengths"):
        compare(ways, "id", 1, calls=4, block=2)
