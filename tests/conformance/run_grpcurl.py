"""The conformance list by grpcurl, which has to be on the PATH: see README.md for the arguments.

Run as `python -m tests.conformance.run_grpcurl`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpc

from tests.conformance.check import Case, Json, Step, fill, load

DESCRIPTORS = Path(__file__).parents[2] / "proto/gen/legato/v1/descriptor.binpb"
CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def run_case(address: str, case: Case, images: Path) -> list[Step]:
    """Return what was seen in each step."""
    seen: list[Step] = []
    for step in case["steps"]:
        seen.append(call(address, step, fill(step["send"], images, seen)))
    return seen


def call(address: str, step: Step, messages: list[Json]) -> Step:
    """Run grpcurl once, with reflection outside of the deadline of the step."""
    options = ["-plaintext", "-format-error", "-max-time", str(step.get("timeout", 60))]
    if "timeout" in step:
        options += ["-protoset", str(DESCRIPTORS)]
    for key, value in step.get("metadata", {}).items():
        options += ["-rpc-header", f"{key}: {value}"]
    done = subprocess.run(
        ["grpcurl", *options, "-d", "@", address, step["call"]],
        input="\n".join(json.dumps(message) for message in messages),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if done.returncode == 0:
        return {"code": "OK", "messages": documents(done.stdout), "details": []}
    if not done.stderr.startswith("{"):
        raise SystemExit(done.stderr)  # it did not get as far as a status
    status = json.loads(done.stderr)
    return {
        "code": CODES[status["code"]],
        "messages": documents(done.stdout),
        "details": status.get("details", []),
    }


def documents(text: str) -> list[Json]:
    """Split a text into JSON documents."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


def main(address: str, cases: str, images: str, *names: str) -> None:
    """Run the named cases."""
    for case in load(Path(cases)):
        if case["name"] in names:
            steps = run_case(address, case, Path(images))
            sys.stdout.write(json.dumps({"case": case["name"], "steps": steps}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
