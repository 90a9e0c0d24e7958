"""The Helm chart: rendered, validated, and a server with the rendered arguments."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from legato_service import lifecycle, probe
from legato_service.lifecycle import LAST_WRITES

from tests.deploy.manifests import CHART, DEPLOY, EXAMPLES, ROOT, go_module, render, rendered, tool
from tests.e2e.server import ENVIRONMENT, until
from tests.service.access.credentials import Authority, Token, replace, write

pytestmark = pytest.mark.deploy


VERSIONS = ("1.27", "1.32", "1.37")  # the oldest that the chart allows, and the newest
INFERENCE = "legato.v1.InferenceService"
OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
OPERATOR_CRDS = "example/prometheus-operator-crd/monitoring.coreos.com"
DEFINITIONS = (  # of custom resources: Go modules and their files
    ("sigs.k8s.io/gateway-api@v1.6.0", "config/crd/standard/gateway.networking.k8s.io_grpcroutes"),
    (
        "github.com/envoyproxy/gateway@v1.9.1",
        "charts/gateway-crds-helm/templates/generated/gateway.envoyproxy.io_backendtrafficpolicies",
    ),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.6.0",
        "config/crd/bases/inference.networking.k8s.io_inferencepools",
    ),
    ("github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases/keda.sh_scaledobjects"),
    (OPERATOR, f"{OPERATOR_CRDS}_servicemonitors"),
    (OPERATOR, f"{OPERATOR_CRDS}_prometheusrules"),
)
CUSTOM = {
    "GRPCRoute",
    "BackendTrafficPolicy",
    "InferencePool",
    "ServiceMonitor",
    "PrometheusRule",
    "ScaledObject",
}
BASE = {"insecure": True}


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_renders_and_lints(example):
    """Each example, without an error or a warning."""
    release = rendered(example)
    assert not release.error
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= release.kinds
    assert not release.lint["errors"]
    assert all(each["severity"] <= 1 for each in release.lint["messages"])


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_manifests(version):
    """Strictly, so that a field of a wrong name or place is an error."""
    documents = [each for example in EXAMPLES for each in rendered(example).documents]
    reply = tool("kubernetes", documents=documents, version=version)
    assert reply["problems"] == []
    assert {documents[index]["kind"] for index in reply["custom"]} == CUSTOM


def test_the_validation_finds_a_wrong_field():
    """It would have told."""
    wrong = yaml.safe_load(yaml.safe_dump(rendered("default").one("Deployment")))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    (problem,) = tool("kubernetes", documents=[wrong], version=VERSIONS[-1])["problems"]
    assert "terminationGracePeriod" in problem


def test_custom_resources_fit_their_definitions():
    """Those of Gateway API and its extension, Envoy Gateway, KEDA and Prometheus's operator.

    None has an unknown field.
    """
    crds = [str(go_module(module) / f"{file}.yaml") for module, file in DEFINITIONS]
    documents = [each for each in rendered("all").documents if each["kind"] in CUSTOM]
    assert {each["kind"] for each in documents} == CUSTOM
    assert tool("custom", documents=documents, crds=crds)["problems"] == []
    route = {**rendered("all").one("GRPCRoute")}
    route["spec"] = {**route["spec"], "hostname": "legato.example"}
    (problem,) = tool("custom", documents=[route], crds=crds)["problems"]
    assert "hostname" in problem


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_pod_has_the_least_rights(example):
    """A user that is not root, a read-only root, no capability, no token of the cluster."""
    pod, container = rendered(example).pod, rendered(example).container
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for context in (pod["securityContext"], container["securityContext"]):
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 10001)
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_the_server_writes_is_a_volume(example):
    """Each mount has its volume, and the read-only root leaves none out."""
    volumes = {each["name"]: each for each in rendered(example).pod["volumes"]}
    mounts = {
        each["mountPath"]: each["name"] for each in rendered(example).container["volumeMounts"]
    }
    assert set(mounts.values()) == set(volumes)
    assert {"/tmp", "/dev/shm", "/var/cache/legato"} <= set(mounts)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_probes_ask_for_the_right_services():
    """Liveness is the process; a hung or loading engine is not ready, and no reason to restart."""
    container = rendered("default").container
    (health,) = [each["containerPort"] for each in container["ports"] if each["name"] == "health"]
    assert f"--health-listen=0.0.0.0:{health}" in container["args"]
    probes = {
        name: container[f"{name}Probe"]["grpc"] for name in ("startup", "readiness", "liveness")
    }
    assert all(each["port"] == health for each in probes.values())
    assert probes["readiness"]["service"] == INFERENCE
    assert "service" not in probes["startup"]
    assert "service" not in probes["liveness"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_kubelet_waits_for_the_whole_drain(example):
    """Delay and grace as the server has them, then what it may take to exit with its watchdog."""
    args = rendered(example).container["args"]
    delay, grace = (
        float(each.partition("=")[2])
        for option in ("--drain-delay=", "--drain-grace=")
        for each in args
        if each.startswith(option)
    )
    exits = LAST_WRITES + lifecycle.TIMEOUT + 2
    assert rendered(example).pod["terminationGracePeriodSeconds"] >= delay + grace + exits
    assert delay > 0


def test_secrets_are_files():
    """Their names are in volumes that only the server's group reads, and in no argument."""
    release = rendered("gpu")
    secrets = [each["secret"] for each in release.pod["volumes"] if "secret" in each]
    assert {each["secretName"] for each in secrets} == {"legato-tls", "legato-tokens"}
    assert all(each["defaultMode"] == 0o440 for each in secrets)
    assert "--tokens=/etc/legato/tokens/tokens.toml" in release.container["args"]
    assert "--insecure" not in release.container["args"]


def test_a_gpu_is_a_limit():
    """With the rest of the limits kept."""
    limits = rendered("gpu").container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 1
    assert limits["memory"]


def test_services_name_their_protocol():
    """HTTP/2 in plain text where the server has no TLS, so that gateways speak it."""
    for example, expected in (("default", "kubernetes.io/h2c"), ("gpu", None)):
        for name in ("demo-legato", "-headless"):
            port = rendered(example).one("Service", name)["spec"]["ports"][0]
            assert port.get("appProtocol") == expected
    assert rendered("all").one("Service", "-headless")["spec"]["clusterIP"] == "None"


def test_the_route_carries_no_admin_service():
    """All other services, and health."""
    (rule,) = rendered("all").one("GRPCRoute")["spec"]["rules"]
    services = {match["method"]["service"] for match in rule["matches"]}
    public = {f"legato.v1.{name}Service" for name in ("Inference", "Session", "Image", "Server")}
    assert services == public | {"inference.GRPCInferenceService", "grpc.health.v1.Health"}


def test_a_pool_has_the_pods_of_the_release():
    """By the labels of the service, at the port of gRPC, in plain HTTP/2; only if asked for."""
    release = rendered("all")
    pool, service = release.one("InferencePool")["spec"], release.one("Service", "demo-legato")
    assert pool["selector"]["matchLabels"] == service["spec"]["selector"]
    ports = {each["containerPort"]: each["name"] for each in release.container["ports"]}
    assert [ports[each["number"]] for each in pool["targetPorts"]] == ["grpc"]
    assert pool["appProtocol"] == "kubernetes.io/h2c"
    assert pool["endpointPickerRef"]["name"] == "legato-picker"
    assert ports[9464] == "metrics", "docs/kubernetes.md tells the picker to scrape this port"
    assert "InferencePool" not in rendered("default").kinds


def test_the_scaled_object_replaces_replicas():
    """It scales this Deployment by the wait that the engine estimates."""
    release = rendered("all")
    scaled = release.one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == release.one("Deployment")["metadata"]["name"]
    assert "replicas" not in release.one("Deployment")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == (
        'sum(legato_engine_estimated_wait_seconds{namespace="vision",service="demo-legato-headless"})'
    )


def test_rules_and_dashboard_are_those_of_the_repository():
    """Word for word, braces of Prometheus included."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    assert rendered("all").one("PrometheusRule")["spec"] == rules
    dashboard = rendered("all").one("ConfigMap", "-dashboard")["data"]["legato.json"]
    assert dashboard.strip() == (DEPLOY / "grafana" / "legato.json").read_text().strip()
    assert all(path.is_symlink() for path in (CHART / "files").iterdir())


def test_selectors_find_the_pods():
    """Those of services, budget, policy and monitor."""
    release = rendered("all")
    labels = release.one("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    headless = release.one("Service", "-headless")
    selectors = [
        release.one("Deployment")["spec"]["selector"]["matchLabels"],
        release.one("Service", "demo-legato")["spec"]["selector"],
        headless["spec"]["selector"],
        release.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        release.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(each and each.items() <= labels for each in selectors)
    monitored = release.one("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= headless["metadata"]["labels"].items()


def test_only_neighbours_may_call_by_default():
    """Other namespaces and the way out are opened by values; a gateway's proxies come with it."""
    policy = rendered("default").one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"][0]["from"] == [{"podSelector": {}}]
    assert policy["egress"] == []
    with_gateway = rendered("all").one("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert [each.get("namespaceSelector") for each in with_gateway] == [None, {}]


KUBE_SCORE = ROOT / ".tools" / "bin" / "kube-score"
NOT_OURS = {
    "container-image-pull-policy": "a tag or a digest names one image",
    "deployment-has-host-podantiaffinity": "topologySpreadConstraints, where nodes are many",
}


@pytest.mark.slow
@pytest.mark.skipif(not KUBE_SCORE.exists(), reason="no kube-score: make image-check, with go")
@pytest.mark.parametrize("example", EXAMPLES)
def test_kube_score_finds_nothing_critical(example):
    """Nor has a pod a limit of CPU, which would throttle the service beside the engine."""
    ignored = [f"--ignore-test={name}" for name in NOT_OURS]
    done = subprocess.run(
        [str(KUBE_SCORE), "score", "--ignore-container-cpu-limit", *ignored, "-o", "ci", "-"],
        input="\n---\n".join(map(json.dumps, rendered(example).documents)),
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "CRITICAL" in line]
    assert "[OK]" in done.stdout


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "insecure: true"),
    ({"tls": {"secretName": "a"}}, "insecure: true"),
    ({"tls": {"clientCA": True}, **BASE}, "tls.clientCA needs"),
    ({"terminationGracePeriodSeconds": 69, **BASE}, "is 69, but .* need 70"),
    ({"drain": {"marginSeconds": 5}, **BASE}, "marginSeconds"),
    ({"model": {"name": "moondream2", "weights": "a"}, **BASE}, "needs model.volume"),
    ({"model": {"weights": "../a"}, **BASE}, "weights"),
    ({"gateway": {"enabled": True}, **BASE}, "gateway.parentRefs"),
    ({"inferencePool": {"enabled": True}, **BASE}, "inferencePool.endpointPicker.name"),
    (
        {
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
            "metrics": {"enabled": False},
            **BASE,
        },
        "metrics.enabled: the endpoint picker",
    ),
    (
        {"inferencePool": {"enabled": True, "endpointPicker": {"name": "p", "port": 0}}, **BASE},
        "port",
    ),
    ({"autoscaling": {"enabled": True}, **BASE}, "autoscaling.prometheus"),
    ({"metrics": {"enabled": False}, "serviceMonitor": {"enabled": True}, **BASE}, "metrics"),
    ({"replica": 2, **BASE}, "replica"),
    ({"extraArgs": ["max-running"], **BASE}, "extraArgs"),
]


def test_values_that_cannot_work_are_refused():
    """Before a pod is made for them, with the name of the value."""
    releases = render([values for values, _ in REFUSED])
    for (values, message), release in zip(REFUSED, releases, strict=True):
        assert not release.documents, values
        assert re.search(message, release.error), release.error


# ---------------------------------------------------------------- rendered server
# A real server with the arguments of the rendered chart, asked by the rendered probes.

OPEN = {"insecure": True}
PROTECTED = {
    "tls": {"secretName": "tls", "clientCA": True},
    "tokens": {"secretName": "tokens"},
}
DRAIN = {"delaySeconds": 2, "graceSeconds": 1}


class Pod:
    """The container of a manifest as a process; the folder holds its secrets."""

    def __init__(self, folder: Path, args: list[str]) -> None:
        self._log = folder / "server.log"
        mapped = [re.sub(r"=0\.0\.0\.0:[0-9]+$", "=127.0.0.1:0", each) for each in args]
        mapped = [each.replace("=/etc/legato", f"={folder}") for each in mapped]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "legato_service", *mapped],
                env={**ENVIRONMENT, "XDG_RUNTIME_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def event(self, name: str) -> dict[str, str]:
        """Wait for its log line of this name."""
        found: list[dict[str, str]] = []

        def seen() -> bool:
            assert self.process.poll() is None or found, self._log.read_text()
            lines = map(json.loads, self._log.read_bytes().splitlines())
            found.extend(each for each in lines if each.get("event") == name)
            return bool(found)

        until(seen)
        return found[0]


def secrets(folder: Path) -> None:
    """What the secrets of the chart mount."""
    authority = Authority()
    pair = authority.server()
    (folder / "tls").mkdir()
    for name, data in (("crt", pair.chain), ("key", pair.key)):
        replace(folder / "tls" / f"tls.{name}", data)
    replace(folder / "tls" / "ca.crt", authority.pem)
    (folder / "tokens").mkdir()
    write(folder / "tokens" / "tokens.toml", Token("one", ["infer"]))


@pytest.mark.parametrize("access", [OPEN, PROTECTED], ids=["open", "protected"])
def test_a_pod_starts_is_probed_and_ends_within_its_grace(tmp_path, access):
    """Ready by its probes, after SIGTERM not ready, and gone before the kubelet kills it."""
    (release,) = render([{**access, "model": {"name": "null"}, "drain": DRAIN}])
    container = release.container
    secrets(tmp_path)
    pod = Pod(tmp_path, container["args"])
    try:
        pod.event("ready")
        pod.event("metrics_listening")
        address = pod.event("health_listening")["address"]

        def probed(kind: str) -> int:
            service = container[f"{kind}Probe"]["grpc"].get("service", "")
            return probe.main(["--address", address, "--service", service, "--timeout", "20"])

        assert [probed(kind) for kind in ("startup", "readiness", "liveness")] == [0, 0, 0]
        pod.process.send_signal(signal.SIGTERM)
        pod.event("drain_delayed")
        assert probed("readiness") != 0
        assert pod.process.wait(release.pod["terminationGracePeriodSeconds"]) == 0
    finally:
        pod.process.kill()
        pod.process.wait()
