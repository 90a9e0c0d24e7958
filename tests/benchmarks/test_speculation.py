"""The benchmark of speculation, from its options to its figures."""

import json
import random
import xml.etree.ElementTree as ET
from statistics import fmean

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.errors import InvalidField
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.proposer import UNKNOWN
from legato_engine.types import PromptToken

from benchmarks import speculation
from benchmarks.record import ALLOW_DIRTY
from benchmarks.speculation import report
from benchmarks.speculation.oracle import FOLDER, SOURCE, OracleProposer, known_history
from benchmarks.speculation.report import Line, Panel, write_svg
from benchmarks.speculation.run import Run, interval
from benchmarks.speculation.workloads import (
    PROFILES,
    REAL,
    Profile,
    at_once,
    rates_of,
    synthetic_requests,
)
from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import ARCHS, usages
from tests.engine.speculative.drafted import row_history

# ---------------------------------------------------------------- command

OPTIONS: tuple[str, ...] = ("--model", "random-tiny", "--device", "cpu", "--threads", "1")
OPTIONS += ("--length", "12", "--repeats", "1")


def figures(*options):
    """What a run with these options measures."""
    return speculation.measured(speculation.parse([*OPTIONS, *options]))


WORKLOADS = (REAL, "0.8", "0.4", "near the end")


def test_every_setting(monkeypatch):
    """Every setting is compared with plain decoding: the same tokens, its own figures."""
    monkeypatch.setattr(report, "sample_images", lambda assembly: [])
    profile = PROFILES["0.4"]
    monkeypatch.setattr(
        report,
        "real_requests",
        lambda assembly, _: synthetic_requests(assembly, profile, length=9, fewest=1),
    )
    options = ("--streams", "4", "--requests", "1", "--workloads", ",".join(WORKLOADS))
    rows = figures(*options)["rows"]
    settings = ("off", *report.SETTINGS)
    assert [(row["workload"], row["setting"]) for row in rows] == [
        (workload, setting) for workload in WORKLOADS for setting in settings
    ]
    assert all(row["identical"] for row in rows)
    for row in rows:
        assert min(row["tokens_per_second"], row["forward_ms"], row["tick_us"]) > 0
        assert row["gap_ms"]["p50"] <= row["gap_ms"]["p95"] <= row["gap_ms"]["p99"]
        is_plain = row["setting"] == "off"
        assert (row["tokens_per_verify"] == 1.0) == (is_plain or row["acceptance"] == 0.0)
        series = row["series"]["blocks"]
        assert is_plain == (not any(series)) == (not row["settled_blocks"])
        assert all(
            block <= 8 and 0 <= average <= 1 for line in series for _, block, average in line
        )
        assert max(use for _, use in row["series"]["kv_use"]) == row["kv_peak"] < 0.5
    right, wrong = (
        next(r for r in rows if (r["workload"], r["setting"]) == (rate, "fixed:8"))
        for rate in ("0.8", "0.4")
    )
    assert right["tokens_per_verify"] > wrong["tokens_per_verify"]
    assert right["num_steps"] < wrong["num_steps"]
    short = next(r for r in rows if (r["workload"], r["setting"]) == ("near the end", "fixed:8"))
    assert short["num_tokens"] < right["num_tokens"]
    assert short["mean_block_size"] < right["mean_block_size"]


def test_settings_under_pressure():
    """With too few pages requests preempt each other, and results stay the same."""
    options = ("--streams", "4", "--length", "48", "--settings", "fixed:8,seed")
    rows = figures(*options, "--workloads", "under pressure")["rows"]
    assert all(row["identical"] for row in rows)
    assert all(row["kv_peak"] > 0.85 and row["kv_hit_rate"] > 0.3 for row in rows)
    assert all(row["preemptions"] > 0 for row in rows)
    assert all(row["fragmentation"] > 0 for row in rows if row["setting"] != "off")


def test_the_command_prints_its_tables(tmp_path, monkeypatch, capsys):
    """The record's tables go to the terminal too."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    options = ("--streams", "1", "--settings", "fixed:2", "--requests", "1", "--workloads", "0.6")
    assert speculation.main([*OPTIONS, *options]) == 0
    assert "Tokens are the same as without speculation." in capsys.readouterr().out


def test_an_unknown_workload_is_refused():
    """The error names the workload."""
    with pytest.raises(InvalidField, match=r"unknown workload '0\.5'"):
        figures("--streams", "1", "--settings", "fixed:2", "--workloads", "0.5")


def test_real_prompts(tmp_path):
    """Prompts of files are workloads by the files' names; answers end at the given length."""
    for name, prompts in {"talk": ["Hello?", "Why?"], "code": ["Write a loop."]}.items():
        (tmp_path / f"{name}.toml").write_text(f"prompts = {prompts}")
    options = ("--texts", str(tmp_path), "--settings", "fixed:2", "--streams", "2")
    rows = figures(*options, "--draft", "lookup")["rows"]
    names = [(row["workload"], row["setting"]) for row in rows]
    assert names == [(each, of) for each in ("code", "talk") for of in ("off", "fixed:2")]
    (row, _) = figures(*options, "--draft", "lookup", "--workloads", "code")["rows"]
    assert row["workload"] == "code"
    assert all(row["identical"] and 0 < row["num_tokens"] <= 24 for row in rows)


# ---------------------------------------------------------------- run
# Figures of a run of speculation: rates and their intervals.


def test_an_interval_holds_the_rate_nearly_always():
    """A known rate is in the interval of about 95 % of its samples."""
    draw = random.Random(0)
    held = 0
    for _ in range(1000):
        low, high = interval(sum(draw.random() < 0.4 for _ in range(200)), 200)
        held += low < 0.4 < high
    assert 930 < held < 970


@pytest.mark.parametrize(("accepted", "tried"), [(0, 0), (0, 5), (5, 5), (2, 5)])
def test_an_interval_is_of_shares(accepted, tried):
    """An interval is within 0 and 1 and has the observed share; without trials it is all of it."""
    low, high = interval(accepted, tried)
    assert 0.0 <= low <= (accepted / tried if tried else 0.0) <= high <= 1.0
    assert tried or (low, high) == (0.0, 1.0)


@pytest.fixture(scope="module")
def assembly():
    """A tiny model for two streams."""
    config = EngineConfig(
        model="random-tiny", device="cpu", threads=1, random_weights=True, max_running=2
    )
    made = assemble(config)
    yield made
    made.device.close()


def test_waves_follow_each_other(assembly):
    """A wave is submitted after the end of the one before, so that all of it decodes together."""
    profile = PROFILES["structured"]
    requests = synthetic_requests(assembly, profile, length=12, fewest=5)
    assert len(requests) == 6
    run = Run(assembly, requests, at_once(assembly, profile))
    figures = run.figures("structured", 2, "off", run)
    assert figures.num_steps == 3 * 12  # of a step more than a task expects its end
    assert figures.num_tried == 0
    assert figures.decode_tokens_per_second > figures.tokens_per_second


def test_a_lone_rate_has_a_sample_of_it(assembly):
    """Profiles with a rate have five times the requests, because rates are in fifths."""
    for name, count in {"0.4": 10, "0.6": 10, "0.8": 10, "structured": 2}.items():
        requests = synthetic_requests(assembly, PROFILES[name], length=12, fewest=2)
        assert len(requests) == count


def test_a_course_is_in_parts_of_the_answer(assembly):
    """Each rate holds for an equal part of it, after the prompt."""
    profile = Profile(((0.9, 0.1), 0.5))
    one, other = synthetic_requests(assembly, profile, length=10, fewest=2)
    first, second = rates_of(profile, [one, other])
    assert not isinstance(first, float)
    answer = first[one.prompt_length :]
    assert set(answer[:6]) == {0.9}
    assert set(answer[6:]) == {0.1}
    assert len(answer) >= 10
    assert second == 0.5


def test_under_pressure_all_are_there_at_once(assembly):
    """Twice as many requests as streams are submitted at once."""
    profile = PROFILES["under pressure"]
    assert at_once(assembly, profile) == 4
    assert len(synthetic_requests(assembly, profile, length=12, fewest=5)) == 8


# ---------------------------------------------------------------- record
# The record of the speculation benchmark, from a run of the smallest model.

MODEL = ("--model", "random-tiny", "--device", "cpu", "--threads", "1", "--repeats", "1")


def test_a_record_has_tables_plots_and_series(tmp_path, monkeypatch, capsys):
    """The record has tables, plots and series, and the plots show the policies' choices."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    options = ("--streams", "2", "--length", "24", "--settings", "fixed:2,seed", "--requests", "1")
    assert speculation.main([*MODEL, *options, "--workloads", "0.8,under pressure"]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    plots = {f"speculation_{kind}.svg" for kind in ("blocks", "acceptance", "pressure", "latency")}
    assert names == {"speculation.json", "speculation_series.json", *plots}
    record = json.loads((tmp_path / "speculation.json").read_text())
    assert all(f"({plot})" in "".join(record["tables"]) for plot in plots)
    rows = record["figures"]["rows"]
    assert [row["setting"] for row in rows] == ["off", "fixed:2", "seed"] * 2
    series = json.loads((tmp_path / "speculation_series.json").read_text())
    assert len(series) == len(rows)
    chosen = [block for line in series[2]["blocks"] for _, block, _ in line]
    assert len(chosen) > 0
    assert max(chosen) > 2
    assert "0.8: seed" in (tmp_path / "speculation_blocks.svg").read_text()


# ---------------------------------------------------------------- plots
# Charts of records: what is drawn is what was measured.

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path, panels, columns=2):
    """The picture's tree."""
    write_svg(tmp_path / "a.svg", panels, columns=columns)
    return ET.parse(tmp_path / "a.svg").getroot()


def test_points_lie_where_the_axes_say(tmp_path):
    """Between the first and the last tick a value has its share of the way."""
    line = Line("a", [(0.0, 0.0), (10.0, 40.0), (20.0, 80.0)])
    root = drawn(tmp_path, [Panel("t", "x", "y", [line])])
    (shape,) = (p.get("d") for p in root.iter(f"{SVG}path") if p.get("fill") == "none")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, p.split())) for p in shape[1:].split("L"))
    assert (x1 - x0, y1 - y0) == pytest.approx(((x2 - x0) / 2, (y2 - y0) / 2), abs=0.1)
    assert x0 < x2
    assert y2 < y0  # up is less in an image
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"t", "x", "y", "0", "20", "80", "a"} <= set(words)


def test_steps_hold_their_value(tmp_path):
    """A line of steps goes along before it goes up."""
    line = Line("a", [(0.0, 1.0), (1.0, 2.0)], steps=True)
    root = drawn(tmp_path, [Panel("t", "x", "y", [line])])
    (shape,) = (p.get("d") for p in root.iter(f"{SVG}path") if p.get("fill") == "none")
    assert shape.index("H") < shape.index("V")


def test_labels_share_a_colour_over_panels(tmp_path):
    """One legend serves all panels; names are text, whatever is in them."""
    lines = [Line("a & <b>", [(0.0, 1.0)]), Line("c", [(0.0, 0.0)])]
    root = drawn(tmp_path, [Panel("one", "x", "y", lines), Panel("two", "x", "y", lines[::-1])])
    first, second, third, fourth = (
        p.get("stroke") for p in root.iter(f"{SVG}path") if p.get("fill") == "none"
    )
    assert (first, second) == (fourth, third)
    assert first != second
    assert [text.text for text in root.iter(f"{SVG}text")].count("a & <b>") == 1


def test_nothing_measured_is_drawn_empty(tmp_path):
    """A panel without points has its axes all the same."""
    root = drawn(tmp_path, [Panel("t", "x", "y", [Line("a", [])])])
    assert [p for p in root.iter(f"{SVG}path") if p.get("fill") == "none"] == []


# ---------------------------------------------------------------- oracle
# The oracle proposer has the quality that it is given, and recognises its rows.

CPU = torch.device("cpu")
PROMPT = (PromptToken(3), PromptToken(4))


def test_a_history_is_prefix_prompt_and_tokens():
    """A history is laid out as on the device: nothing for the prefix, then ids by position."""
    assert known_history(3, PROMPT, [8, 9]) == [UNKNOWN, UNKNOWN, UNKNOWN, 3, 4, 8, 9]


def test_rows_are_recognised_by_what_they_hold():
    """A row goes on as the history that begins like it, or not at all."""
    known = [known_history(1, PROMPT, [5, 6, 7]), known_history(1, PROMPT, [5, 8, 9, 10])]
    proposer = OracleProposer(known, CPU, rates=[1.0], vocab_size=100)
    tokens_RC = torch.tensor(
        [
            [UNKNOWN, 3, 4, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN],
            [UNKNOWN, 3, 4, 5, 8, UNKNOWN, UNKNOWN, UNKNOWN],
            [UNKNOWN, 3, 4, 6, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN],
        ]
    )
    draft_RK = torch.zeros(3, 3, dtype=torch.int64)
    proposer.propose(row_history(tokens_RC, torch.tensor([3, 4, 3])), draft_RK)
    assert draft_RK.tolist() == [[6, 7, UNKNOWN], [9, 10, UNKNOWN], [UNKNOWN] * 3]


def verifies(proposer, known, block):
    """Return tokens accepted, tokens tried and verifies.

    Every verify proposes as many as there are left, up to `block`.
    """
    accepted = tried = count = 0
    for tokens, said in zip(known, proposer.tables[1].tolist(), strict=False):
        newest = len(PROMPT)
        while newest + 1 < len(tokens):
            places = range(newest + 1, min(newest + 1 + block, len(tokens)))
            stood = (*(said[at] == tokens[at] for at in places), False).index(False)
            accepted, tried = accepted + stood, tried + stood + (stood < len(places))
            newest, count = newest + stood + 1, count + 1
    return accepted, tried, count


def answers(count, length):
    """So many known histories that begin differently."""
    return [[1000 + nth, *known_history(0, PROMPT, [7] * length)[1:]] for nth in range(count)]


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_tokens_that_are_tried_are_right_as_often_as_asked(rate, block):
    """Of the tokens tried, up to the first wrong one, the share accepted is the rate.

    It depends neither on the block size nor on the position after a wrong token.
    """
    known = answers(1, 6000)
    proposer = OracleProposer(known, CPU, rates=[rate], vocab_size=2000)
    accepted, tried, _ = verifies(proposer, known, block)
    low, high = interval(accepted, tried)
    assert tried > 2500
    assert low < rate < high
    assert high - low < 0.05


@pytest.mark.parametrize("block", [1, 2, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_twenty_answers_are_a_sample_of_the_rate(rate, block):
    """On average over samples of twenty short answers the accepted fraction is the rate.

    In all but one sample of twenty it is the rate within 0.01.
    """
    known = answers(20, 110)
    shares = []
    for seed in range(8):
        proposer = OracleProposer(known, CPU, rates=[rate], vocab_size=2000, seed=seed)
        accepted, tried, _ = verifies(proposer, known, block)
        shares.append(accepted / tried)
    assert fmean((share - rate) ** 2 for share in shares) < 0.007**2
    assert fmean(shares) == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_a_verify_commits_what_theory_says(rate, block):
    """A block of g at a rate of a gives `(1 - a ** (g + 1)) / (1 - a)` tokens a verify.

    Luck that is shared evenly changes no expectation.
    """
    known = answers(20, 2000)
    proposer = OracleProposer(known, CPU, rates=[rate], vocab_size=2000)
    accepted, _, count = verifies(proposer, known, block)
    theory = (1 - rate ** (block + 1)) / (1 - rate)
    assert (accepted + count) / count == pytest.approx(theory, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8, 1.0])
def test_tokens_are_right_as_often_as_asked(rate):
    """Over many places the share of right tokens is the rate, whatever block asks for them."""
    known = known_history(0, PROMPT, list(range(2000)))
    proposer = OracleProposer([known], CPU, rates=[rate], vocab_size=2000)
    tokens_RC = torch.tensor([known])
    said: dict[int, set[int]] = {}
    for newest in range(2, len(known) - 8, 3):
        draft_RK = torch.zeros(1, 8, dtype=torch.int64)
        row_RC = tokens_RC.clone()
        row_RC[:, newest + 1 :] = UNKNOWN
        proposer.propose(row_history(row_RC, torch.tensor([newest])), draft_RK)
        for place, token in enumerate(draft_RK[0].tolist(), start=newest + 1):
            said.setdefault(place, set()).add(token)
    assert all(len(tokens) == 1 for tokens in said.values()), "a place is said in two ways"
    right = sum(known[place] in tokens for place, tokens in said.items()) / len(said)
    assert right == pytest.approx(rate, abs=0.03)


def test_a_rate_may_change_with_the_position():
    """The last one given holds for the rest."""
    known = [answers(1, 1000)[0], answers(1, 1000)[0]]
    rates: list[float | list[float]] = [[1.0] * 100 + [0.0] * 200 + [0.5], 1.0]
    proposer = OracleProposer(known, CPU, rates=rates, vocab_size=2000)
    (first, second), tokens = proposer.tables[1][:2].tolist(), known[0]
    assert first[1:100] == tokens[1:100]
    assert not any(
        said == token for said, token in zip(first[100:300], tokens[100:300], strict=True)
    )
    late = [said == token for said, token in zip(first[300:1000], tokens[300:1000], strict=True)]
    assert fmean(late) == pytest.approx(0.5, abs=0.05)
    assert second[1:1000] == tokens[1:1000]


def test_sequences_share_luck_evenly():
    """At each place the fraction of right tokens is the rate, give or take one sequence.

    Whether a token is right says nothing of the next one of its sequence.
    """
    proposer = OracleProposer(answers(24, 500), CPU, rates=[0.4], vocab_size=2000)
    known_NC, said_NC = (table[:-1, :502].clone() for table in proposer.tables)
    right_NC = (known_NC == said_NC)[:, len(PROMPT) :].double()
    counts_C = right_NC.sum(0)
    assert set(counts_C.tolist()) == {9.0, 10.0}
    assert right_NC.mean().item() == pytest.approx(0.4, abs=0.003)
    centred_NC = right_NC - 0.4
    together = (centred_NC[:, 1:] * centred_NC[:, :-1]).mean().item()
    assert together == pytest.approx(0.0, abs=0.01)
    assert right_NC.mean(1).std().item() > 0.015


def test_another_run_can_be_known():
    """What it knows is exchanged in place; of those before nothing is left."""
    first, second = known_history(0, PROMPT, [5, 6, 7, 8]), known_history(0, PROMPT, [5, 9])
    proposer = OracleProposer([first], CPU, rates=[1.0], vocab_size=100, capacity=(2, 8))
    tokens_RC = torch.tensor([[3, 4, 5, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]])
    said = []
    for known in ([first], [second], [second, first]):
        proposer.know(known, rates=[1.0])
        draft_RK = torch.zeros(1, 3, dtype=torch.int64)
        proposer.propose(row_history(tokens_RC, torch.tensor([2])), draft_RK)
        said.append(draft_RK[0].tolist())
    assert said == [[6, 7, 8], [9, UNKNOWN, UNKNOWN], [9, UNKNOWN, UNKNOWN]]


# ---------------------------------------------------------------- oracle source
# The oracle's launch compiles, and stays in registers.


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles(arch):
    """From the benchmark's folder, with the kernels' headers."""
    assert usages(compile_source(SOURCE, {}, arch, folder=FOLDER))["oracle"].stack == 0
