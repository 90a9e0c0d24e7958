"""`legato info`, and `legato status` and `legato metrics` for operators of the server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from legato_client._errors import Unavailable
from legato_client._types.server import ModelInfo, model_document
from legato_client._version import version
from legato_client.cli import arguments, forward
from legato_client.cli.settings import PREFIX, CommandError
from legato_client.cli.terminal import Terminal


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="show this machine, and a server's version, models and limits",
        description="Show what this machine can run, and the version, models and limits of the "
        "server.",
        example="legato info --server gpu-box:50051",
    )
    arguments.add_server_options(parser)
    parser.set_defaults(run=run)
    parser = commands.add_parser(
        "status",
        help="show the load of the server and of each engine",
        description="Show the load of the server and of each engine. For operators of the server.",
        example="legato status --server gpu-box:50051 --json",
    )
    arguments.add_server_options(parser)
    parser.set_defaults(run=run_status)
    parser = commands.add_parser(
        "metrics",
        help="print the server's metrics, as Prometheus reads them",
        description="Print the server's metrics, as Prometheus reads them. For operators of the "
        "server.",
        example="legato metrics --match legato_frames",
    )
    arguments.add_server_options(parser)
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="print only lines with this text"
    )
    parser.set_defaults(run=run_metrics)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Show this machine, then the server; the exit code tells whether the server answered."""
    machine = _machine()
    _show_machine(machine, terminal)
    security = arguments.security_of(args)
    try:
        with arguments.connect(args) as client:
            server, models = client.server_info(), client.models()
    except Unavailable:
        terminal.document({"machine": machine, "server": None})
        raise
    terminal.heading(f"server: {server.name} {server.version} at {args.server}")
    terminal.line(f"connection: {security.describe()}")
    terminal.line(
        f"contract revision {server.contract_revision}, "
        f"capabilities: {', '.join(server.capabilities) or 'none'}"
    )
    terminal.table(
        ("model", "tasks", "context", "confidence"),
        [
            (m.name, ", ".join(m.tasks), f"{m.max_context_tokens} tokens", _confidence(m))
            for m in models
        ],
    )
    limits = dataclasses.asdict(server.limits)
    rows = [(name.replace("_", " "), _quantity(name, value)) for name, value in limits.items()]
    terminal.table(("limit", "value"), rows)
    terminal.document(
        {
            "machine": machine,
            "server": dataclasses.asdict(server),
            "connection": security.summary(),
            "models": [model_document(model) for model in models],
        }
    )


def _quantity(name: str, value: Any) -> str:
    """Format a limit with its unit, which its name tells."""
    if name.endswith("_bytes"):
        return f"{value / 2**20:g} MiB"
    if "deadline" in name or "ttl" in name or "interval" in name or "age" in name.split("_"):
        return f"{value:g} s"
    return str(value)


def _machine() -> dict[str, Any]:
    """Describe this machine, in a process of its own that asks the installed engine."""
    settings_in_force = {
        name: "(hidden)" if name == f"{PREFIX}TOKEN" else value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIX)
    }
    about: dict[str, Any] = {"client": version(), "settings": settings_in_force}
    try:
        forward.require_engine("info")
    except CommandError as error:
        return {**about, "engine": None, "reason": str(error)}
    command = [sys.executable, "-m", "legato_engine.kernels.machine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {**about, "engine": None, "reason": f"the engine cannot describe it: {reason}"}
    return {**about, "engine": json.loads(done.stdout), "reason": ""}


def _show_machine(machine: dict[str, Any], terminal: Terminal) -> None:
    terminal.heading(f"this machine: client {machine['client']}")
    named = ", ".join(f"{name}={value}" for name, value in machine["settings"].items())
    terminal.line(f"settings from variables: {named or 'none'}")
    engine = machine["engine"]
    if engine is None:
        terminal.line(f"engine: none, {machine['reason']}")
        terminal.line()
        return
    versions = (f"{name} {value or 'none'}" for name, value in engine["versions"].items())
    terminal.line(f"versions: {', '.join(versions)}")
    cpu = engine["cpu"]
    kernels = f"Legato's, {cpu['instructions']}" if cpu["instructions"] else "torch's, because "
    terminal.line(
        f"CPU: {cpu['name']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 2**30:.1f} GiB free; "
        f"kernels: {kernels}{cpu['reason']}"
    )
    for gpu in engine["gpus"]:
        terminal.line(
            f"{gpu['device']}: {gpu['name']}, compute capability {gpu['capability']}, "
            f"{gpu['memory_bytes'] / 2**30:.0f} GiB, driver {engine['driver'] or 'unknown'}"
        )
        rows = [(name, f"no: {why}" if why else "yes") for name, why in gpu["kernels"].items()]
        terminal.table(("kernels", "run here"), rows)
    if engine["no_gpu"]:
        terminal.line(f"GPU: none found, {engine['no_gpu']}")
    models = [f"{each['model']} ({each['bytes'] / 1e9:.2f} GB)" for each in engine["models"]]
    terminal.line(f"pulled models in {engine['models_folder']}: {', '.join(models) or 'none'}")
    terminal.line()


def _confidence(model: ModelInfo) -> str:
    confidence = model.confidence
    if confidence is None:
        return "none"
    if not confidence.calibrated_tasks:
        return "uncalibrated"
    return f"calibrated: {', '.join(confidence.calibrated_tasks)} ({confidence.fitted_on})"


def run_status(args: argparse.Namespace, terminal: Terminal) -> None:
    with arguments.connect(args, as_operator=True) as client:
        load = client.load()
    terminal.heading(f"{args.server}: {load.engine_state}, {load.sessions} sessions")
    terminal.table(
        ("engine", "device", "state", "running", "waiting", "wait", "KV cache", "restarts"),
        [
            (
                str(number),
                each.device,
                each.state,
                str(each.running),
                str(each.waiting),
                "-" if each.estimated_wait is None else f"{each.estimated_wait:.3g} s",
                f"{each.kv_used_ratio:.0%}",
                str(each.restarts),
            )
            for number, each in enumerate(load.engines)
        ],
    )
    terminal.document({"load": dataclasses.asdict(load)})


def run_metrics(args: argparse.Namespace, terminal: Terminal) -> None:
    with arguments.connect(args, as_operator=True) as client:
        text = client.metrics()
    lines = [line for line in text.splitlines() if args.match in line]
    terminal.write("".join(f"{line}\n" for line in lines))
    terminal.document({"metrics": lines})
