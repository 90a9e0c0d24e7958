"""`legato info`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from legato_client._types.server import ModelInfo, model_document
from legato_client.cli import arguments
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


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    security = arguments.security_of(args)
    with arguments.connect(args) as client:
        server, models = client.server_info(), client.models()
    terminal.heading(f"{server.name} {server.version} at {args.server}")
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
    terminal.table(("limit", "value"), [(name, str(value)) for name, value in limits.items()])
    terminal.document(
        {
            "server": dataclasses.asdict(server),
            "connection": security.summary(),
            "models": [model_document(model) for model in models],
        }
    )


def _confidence(model: ModelInfo) -> str:
    confidence = model.confidence
    if confidence is None:
        return "none"
    if not confidence.calibrated_tasks:
        return "uncalibrated"
    return f"calibrated: {', '.join(confidence.calibrated_tasks)} ({confidence.fitted_on})"
