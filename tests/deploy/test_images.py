"""The Containerfile, the locks of the images and the compose file."""

import re
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.deploy.containerfile import FILE, copied, environment, image, last
from tests.deploy.manifests import DEPLOY, ROOT, TOOLS, go_module, tool

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
