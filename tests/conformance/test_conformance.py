"""Python, Go, Node, grpcurl and C++ run one list of cases against one server."""

from __future__ import annotations

import copy
import importlib.resources
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from legato.v1 import server_pb2, server_pb2_grpc

from tests.conformance import programs
from tests.conformance.check import Case, Step, check, load
from tests.e2e.server import Server

PICTURES = importlib.resources.files("legato_tiny") / "samples"
CASES = [case["name"] for case in load()]
OTHER_MODEL = "random-tiny-vl"
OTHER_CASES = [case["name"] for case in load(model=OTHER_MODEL)]

# Building a program on a machine that has nothing yet takes longer than a test may.
pytestmark = pytest.mark.timeout(2 * programs.PATIENCE)


@dataclass(frozen=True)
class Run:
    """A program's run of its own copy of the list."""

    program: str
    cases: dict[str, Case]
    seen: dict[str, list[Step]]


@pytest.fixture(scope="module")
def capabilities(server: Server) -> set[str]:
    """Return the server's capabilities."""
    return capabilities_of(server)


def capabilities_of(server: Server) -> set[str]:
    with grpc.insecure_channel(server.address) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        return set(stub.GetServerInfo(server_pb2.GetServerInfoRequest()).capabilities)


# C++ compiles for minutes on a fresh machine: `make cpp` and `make test-slow` run it.
PROGRAMS = [
    pytest.param(name, marks=pytest.mark.slow) if name == "cpp" else name for name in programs.NAMES
]


@pytest.fixture(scope="module", params=PROGRAMS)
def run(
    request: pytest.FixtureRequest,
    server: Server,
    capabilities: set[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Run all cases that the program and the server support."""
    folder = tmp_path_factory.mktemp(request.param)
    return run_list(request.param, server, capabilities, folder, load(run=folder.name))


def run_list(
    program: str, server: Server, capabilities: set[str], folder: Path, listed: list[Case]
) -> Run:
    """Run those of the listed cases that the program and the server support."""
    try:
        command = programs.command(program, folder)
    except programs.Missing as error:
        pytest.skip(str(error))
    cases = {case["name"]: case for case in listed}
    possible = [
        name
        for name, case in cases.items()
        if program not in case.get("except", {}) and case.get("needs", "") in {"", *capabilities}
    ]
    path = folder / "cases.json"
    path.write_text(json.dumps(listed))
    try:
        output = programs.run(*command, server.address, str(path), str(PICTURES), *possible)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["case"] for line in lines] == possible
    return Run(program, cases, {line["case"]: line["steps"] for line in lines})


@pytest.mark.parametrize("name", CASES)
def test_case(run, name):
    """Every program sees of every case what the list expects."""
    case = run.cases[name]
    if run.program in case.get("except", {}):
        pytest.skip(f"{run.program}: {case['except'][run.program]}")
    if name not in run.seen:
        pytest.skip(f"the server lacks the capability {case['needs']}")
    check(case, run.seen[name])


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run the cases of any model against one that writes its boxes and points as text."""
    folder = tmp_path_factory.mktemp("other")
    with Server(folder, "--model", OTHER_MODEL) as running:
        listed = load(run=folder.name, model=OTHER_MODEL)
        yield run_list("python", running, capabilities_of(running), folder, listed)
        running.settle()


@pytest.mark.parametrize("name", OTHER_CASES)
def test_case_of_any_model(other_run, name):
    """A model of another family is seen as the list expects."""
    check(other_run.cases[name], other_run.seen[name])


def test_nothing_is_left_out(capabilities):
    """This server supports all cases of the list."""
    assert {case["needs"] for case in load() if "needs" in case} <= capabilities


def test_names_are_unique():
    """A name identifies one case."""
    assert len(CASES) == len(set(CASES))


def lost_event(steps: list[Step]) -> None:
    """Remove a message of a stream."""
    del steps[0]["messages"][1]


def lost_end(steps: list[Step]) -> None:
    """Cut a stream short."""
    steps[0]["messages"].pop()


def other_code(steps: list[Step]) -> None:
    """Change the status."""
    steps[0]["code"] = "UNKNOWN"


def other_text(steps: list[Step]) -> None:
    """Change the text of the deltas."""
    steps[0]["messages"][1]["text"]["text"] += "!"


def no_details(steps: list[Step]) -> None:
    """Remove the details of the error."""
    steps[0]["details"] = []


def box_outside(steps: list[Step]) -> None:
    """Move a box out of the image."""
    steps[0]["messages"][0]["objects"][0]["box"]["xMax"] = 1.5


def other_stamp(steps: list[Step]) -> None:
    """Change the stamp."""
    steps[0]["messages"][-1]["info"]["stamp"]["sequence"] = "7"


def told_again(steps: list[Step]) -> None:
    """Tell a text of the stream before once more."""
    steps[1]["messages"].insert(1, steps[0]["messages"][1])


def lost_words(steps: list[Step]) -> None:
    """Remove the first text after the resumption."""
    del steps[1]["messages"][1]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("checkpoints_of_text", told_again),
        ("checkpoints_of_text", lost_words),
        ("generate_text", lost_event),
        ("generate_text", lost_end),
        ("generate_text", other_text),
        ("generate_text", other_code),
        ("bad_field", no_details),
        ("detect", box_outside),
        ("detect", other_stamp),
    ],
)
def test_what_differs_is_found(run, name, damage):
    """A slightly wrong response fails the check."""
    steps = copy.deepcopy(run.seen[name])
    damage(steps)
    with pytest.raises(AssertionError):
        check(run.cases[name], steps)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of legato-tiny, which must hold nothing at the end."""
    with Server(tmp_path_factory.mktemp("conformance")) as running:
        yield running
        running.settle()
