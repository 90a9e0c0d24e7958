"""The Containerfile, the image locks, the compose file, the dashboard and the alert rules."""

import importlib.util
import json
import re
import subprocess
import tomllib

import promql_parser
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.deploy.manifests import (
    DASHBOARD,
    DEPLOY,
    FILE,
    ROOT,
    TOOLS,
    copied,
    dashboard,
    environment,
    expressions,
    go_module,
    image,
    last,
    panels,
    rules,
    selectors,
    tool,
)

# ---------------------------------------------------------------- images
# The Containerfile, the locks of the images and the compose file.

TARGETS = ("null", "cpu", "cuda")
LOCKS = DEPLOY / "image" / "locks"
COMPOSE = DEPLOY / "compose.yaml"
COMPOSE_GO = "github.com/compose-spec/compose-go/v2@v2.9.0"
WITHOUT = {
    "null": {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "cuda-bindings",
        "huggingface-hub",
    }
}
WITHOUT["cpu"] = {"torch", "cuda-bindings"}  # the build for CPUs is installed by itself


def locked(name):
    """Versions by package, and the text of each with its hashes."""
    blocks = re.split(r"^(?=[a-z])", (LOCKS / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    return {block.partition("==")[0]: block for block in blocks}


def version(block):
    return Version(block.partition("==")[2].split()[0])


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_and_without_a_shell(target):
    """A numeric user, the exec form, folders that a read-only root needs."""
    assert last(target, "USER").arguments == "10001:10001"
    assert last(target, "ENTRYPOINT").words == ["/opt/legato/bin/python", "-m", "legato_service"]
    assert all(word.startswith("--") or ":" in word for word in last(target, "CMD").words)
    assert environment(target)["LEGATO_KERNEL_CACHE"].startswith("/var/cache/legato/")
    assert environment(target)["HOME"] == "/tmp"
    assert not [step for step in image(target) if step.instruction == "HEALTHCHECK"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_not_built_upon_its_build(target):
    """Its own steps install and compile nothing, and it gets the environment only."""
    steps = image(target)
    runs = [step.arguments for step in steps if step.instruction == "RUN"]
    assert all(run.startswith("install -d ") for run in runs)
    copies = [step.arguments for step in steps if step.instruction == "COPY"]
    assert copies == [f"--from=build-{target} /opt/legato /opt/legato"]


def test_what_the_build_copies_is_in_the_context():
    """Each source exists, and the ignore file names each."""
    ignore = FILE.with_name(f"{FILE.name}.dockerignore").read_text().splitlines()
    assert "*" in ignore
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    assert let_in == {str(path) for path in copied()}
    assert all((ROOT / path).exists() for path in copied())


@pytest.mark.parametrize("name", [*TARGETS, "build"])
def test_every_package_of_a_lock_has_hashes(name):
    assert locked(name)
    for package, block in locked(name).items():
        assert block.count("--hash=sha256:") >= 1, package
        assert re.match(r"[a-z0-9.-]+==\S+ \\\n", block), package


@pytest.mark.parametrize("target", TARGETS)
def test_a_lock_is_what_the_project_asks_for(target):
    """`make image-lock` was run since the project's requirements changed."""
    client, server = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in (".", "service")
    )
    needed = (
        client["dependencies"] + client["optional-dependencies"]["cli"] + server["dependencies"]
    )
    wanted = [Requirement(each) for each in needed]
    packages = locked(target)
    for requirement in wanted:
        if requirement.name.startswith("legato"):
            continue
        if requirement.name in WITHOUT.get(target, ()):
            assert requirement.name not in packages
        else:
            assert version(packages[requirement.name]) in requirement.specifier, requirement


def test_only_the_image_for_gpus_has_what_drives_them():
    """The images differ in nothing else, and agree on every version."""
    everything = {name: version(block) for name, block in locked("cuda").items()}
    gpu = {name for name in everything if name.startswith(("nvidia-", "cuda-", "triton", "torch"))}
    assert len(gpu) > 10
    assert {name: version(block) for name, block in locked("cpu").items()} == {
        name: each for name, each in everything.items() if name not in gpu
    }
    null = {name: version(block) for name, block in locked("null").items()}
    assert null.items() < everything.items()
    assert not gpu & null.keys()


def test_the_composed_server_has_the_least_rights():
    """As in the chart; its ports are published on loopback, because it has no TLS."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    server = services["legato"]
    assert server["read_only"] is True
    assert server["user"] == "10001:10001"
    assert server["shm_size"]
    assert any(each.startswith("kernels:/var/cache/legato") for each in server["volumes"])
    assert server["healthcheck"]["test"][:4] == [
        "CMD", "/opt/legato/bin/python", "-m", "legato_service.probe",
    ]  # fmt: skip
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]


def test_the_files_that_the_compose_file_mounts_exist():
    """Rules, scrape configuration and dashboard."""
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        for source in (each.partition(":")[0] for each in service["volumes"]):
            assert not source.startswith("./") or (DEPLOY / source).exists(), source
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/rules.yml"]
    assert (DEPLOY / "prometheus" / "rules.yml").exists()


@pytest.mark.deploy
def test_hadolint_has_nothing_to_say():
    done = subprocess.run(
        [str(TOOLS / "hadolint"), str(FILE)], stdout=subprocess.PIPE, check=False, text=True
    )
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.deploy
def test_the_compose_file_fits_its_specification(tmp_path):
    """And a field that the specification lacks would be told."""
    schema = go_module(COMPOSE_GO) / "schema" / "compose-spec.json"
    assert tool("schema", document=str(COMPOSE), schema=str(schema))["problems"] == []
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    assert tool("schema", document=str(wrong), schema=str(schema))["problems"]


# ---------------------------------------------------------------- expressions
# The dashboard and the alert rules, without a server.

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def test_every_expression_is_promql():
    """Prometheus' own grammar accepts it, and it reads something."""
    for name, expression in expressions().items():
        promql_parser.parse(expression)
        assert list(selectors(expression)), name


def test_a_selector_within_a_function_is_found():
    """The walk below reads every selector, not only those on top."""
    found = selectors("sum(rate(a_total{x='1'}[5m])) / b and on (instance) c == 1")
    assert [each.name for each in found] == ["a_total", "b", "c"]


def test_the_dashboard_is_what_its_program_writes():
    """A change belongs into make_dashboard.py."""
    path = DEPLOY / "grafana" / "make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert json.loads(DASHBOARD.read_text()) == made.dashboard()


def test_panels_have_places_of_their_own():
    """No two panels that are shown together overlap, and ids are unique."""
    shown = dashboard()["panels"]
    groups = [shown, *(panel["panels"] for panel in shown if panel["type"] == "row")]
    ids = [panel["id"] for group in groups for panel in group]
    assert len(set(ids)) == len(ids)
    for group in groups:
        taken: set[tuple[int, int]] = set()
        for panel in group:
            place = panel["gridPos"]
            cells = {
                (place["x"] + x, place["y"] + y)
                for x in range(place["w"])
                for y in range(place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= 24
            taken |= cells


def test_key_figures_come_first_sessions_second_and_the_rest_is_collapsed():
    """The first screen says whether it is up, how fast, how fresh, and what it drops."""
    rows = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert [row["title"] for row in rows][:2] == ["Overview", "Sessions"]
    assert [row["collapsed"] for row in rows] == [False, False] + [True] * (len(rows) - 2)
    figures = panels("Overview")
    wanted = ["Up", "Request P95", "Frame age P95", "Frames dropped"]
    assert [panel["title"] for panel in figures][:4] == wanted
    assert {panel["type"] for panel in figures} == {"stat"}
    assert len({panel["gridPos"]["y"] for panel in figures}) == 1
    for panel in figures:
        assert len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) >= 2, panel["title"]


def test_every_panel_says_what_it_shows_and_in_which_unit():
    """A description is a sentence; a rate is not a bare number."""
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        rates = all(re.match(r"sum.*\(rate\(", each["expr"]) for each in panel["targets"])
        if rates:
            assert panel["fieldConfig"]["defaults"]["unit"] != "short", panel["title"]


@pytest.mark.parametrize(
    ("alert", "title"),
    [
        ("LegatoQueueWait", "Queue"),
        ("LegatoQueueWait", "Queue P95"),
        ("LegatoEngineSilent", "Heartbeat age"),
        ("LegatoEventLoopLag", "Event loop lag"),
    ],
)
def test_a_panel_is_red_from_where_its_alert_fires(alert, title):
    """The dashboard and the rules have one limit for one metric."""
    (panel,) = (each for each in panels() if each["title"] == title)
    limit = float(re.findall(r"> ([0-9.]+)", ALERTS[alert]["expr"])[0])
    last = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
    assert last == {"color": "red", "value": limit}
    read = {each.name for target in panel["targets"] for each in selectors(_plain(target["expr"]))}
    assert read & {each.name for each in selectors(ALERTS[alert]["expr"])}


def _plain(expression):
    return expression.replace("$__rate_interval", "5m").replace("$instance", ".*")


@pytest.mark.parametrize(
    "method",
    [
        "legato.v1.InferenceService/Query",
        "legato.v1.InferenceService/Generate",
        "inference.GRPCInferenceService/ModelInfer",
    ],
)
def test_rejections_are_compared_with_all_calls_that_can_be_rejected(method):
    """The gate admits the calls of both services."""
    (calls,) = (
        each for each in selectors(ALERTS["LegatoRejections"]["expr"]) if "rpcs" in str(each.name)
    )
    ((name, pattern),) = re.findall(
        r"(\w+)=~\"([^\"]+)", ALERTS["LegatoRejections"]["expr"].split(calls.name)[1]
    )
    assert name == "method"
    assert re.fullmatch(pattern, method)


def test_an_alert_says_what_is_wrong_and_how_bad():
    """Every alert has a severity and a summary that names the server."""
    assert len(ALERTS) == sum("alert" in rule for rule in rules()) > 10
    for rule in ALERTS.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_links_to_its_entry_in_the_runbook(name):
    """The link's page exists and has the anchor, with something to do after it."""
    url = ALERTS[name]["annotations"]["runbook_url"]
    page, _, anchor = url.partition("/blob/main/")[2].partition("#")
    (entry,) = (
        line for line in (ROOT / page).read_text().splitlines() if f'<a id="{anchor}">' in line
    )
    assert f"`{name}`" in entry
    assert all(len(cell.split()) > 2 for cell in entry.strip("| ").split(" | ")[1:])
