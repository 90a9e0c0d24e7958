"""Steps are timed over real tokens and contexts, and leave no state."""

import math

import pytest
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble, with_speculation
from legato_engine.runtime import calibration
from legato_engine.speculative.proposer import UNKNOWN


@pytest.fixture(scope="module")
def assembly():
    """A tiny model with three drafting rows."""
    config = EngineConfig(
        model="random-tiny", device="cpu", threads=1, random_weights=True, max_running=3
    )
    made = with_speculation(assemble(config), "budget")
    yield made
    made.device.close()


class Watching:
    """A backend that records what its steps feed."""

    def __init__(self, program, slot, scratch, stream):
        self._backend, self._slot, self._scratch, self._stream = program, slot, scratch, stream
        self.buckets = program.buckets
        self.fed = {}  # by bucket: row and position of each token, and how many rows were told

    def decode(self, slot, bucket, rank, num_rows):
        """Run it, and record rows and positions that the device has found."""
        self._backend.decode(slot, bucket, rank, num_rows)
        self._stream.record().wait()
        staged = self._slot.staged.device
        rows, positions = (staged[name][:bucket].tolist() for name in ("row", "position"))
        tokens = [each for each in zip(rows, positions, strict=True) if each[0] != self._scratch]
        self.fed.setdefault(bucket, (num_rows, tokens))

    def sample(self, slot, bucket, **options):
        """Run it."""
        self._backend.sample(slot, bucket, **options)


def test_every_token_of_a_step_is_fed(assembly, monkeypatch):
    """All rows feed the same number of tokens, at adjacent positions after the context."""
    monkeypatch.setattr(calibration, "_LONG_STEP_SECONDS", math.inf)  # however busy the machine is
    costs = assembly.runner.costs()
    drafts = assembly.runner._drafts
    stream = assembly.device.compute
    watching = Watching(costs._backend, costs._slot, drafts.scratch_row, stream)
    costs._backend = watching
    steps = costs.steps()
    assert tuple(bucket for bucket, _ in steps) == watching.buckets == tuple(watching.fed)
    seconds = [each for _, each in steps]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    most = 3 * (1 + drafts.max_block)
    for bucket, (num_rows, tokens) in watching.fed.items():
        assert num_rows == min(bucket, 3)
        assert len(tokens) == min(bucket, most)
        for row in range(num_rows):
            positions = [position for of, position in tokens if of == row]
            start = positions[0]
            assert start == costs._context > 100
            assert positions == list(range(start, start + len(positions)))


@pytest.mark.parametrize(
    ("weights", "position", "last"),
    [
        pytest.param(0.05, 0.05, 8, id="long, of its positions"),
        pytest.param(0.9, 0.1, 27, id="long, of the weights"),
        pytest.param(0.001, 0.001, 27, id="short"),
    ],
)
def test_steps_beyond_a_long_one_are_estimated(assembly, weights, position, last):
    """A start waits for no longer one, if that is as long as its positions make it."""
    costs, timed = assembly.runner.costs(), []
    buckets = costs._backend.buckets

    def seconds(bucket):
        timed.append(bucket)
        return weights + position * bucket

    costs._seconds = seconds
    steps = costs.steps()
    assert timed == [bucket for bucket in buckets if bucket <= last]
    for bucket, found in steps:
        assert found == pytest.approx(weights + position * bucket)
    assert tuple(bucket for bucket, _ in steps) == buckets


def test_nothing_is_left(assembly):
    """After the measurement no row has a position or tokens."""
    costs, drafts = assembly.runner.costs(), assembly.runner._drafts
    assert costs.propose() >= 0
    costs.steps()
    assert not drafts.position_R.any()
    assert drafts.limit_R.eq(-1).all()
    assert drafts.draft_RK.eq(UNKNOWN).all()
    assert drafts.tokens_RC.eq(UNKNOWN).all()
