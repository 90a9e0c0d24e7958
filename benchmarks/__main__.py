"""`python -m benchmarks [--dirty] NAME [options]`; without a name, those that any machine can run.

A benchmark starts only in a clean tree, because its record names a commit; with `--dirty` the
record says `dirty` if files are changed.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NamedTuple

from benchmarks import record


class Benchmark(NamedTuple):
    """A command: its module below `benchmarks`, and the question that it answers."""

    module: str
    question: str


EVERYWHERE = ("decode", "rpc", "tick")  # short on a CPU too
QUESTIONS = {
    "Decode: what does a token cost, and where does its time go?": {
        "decode": Benchmark("decode.step", "How long is a step, and what does pipelining gain?"),
        "kernels": Benchmark("decode.kernels", "Are the step's kernels right, and how fast?"),
        "loops": Benchmark("decode.loops", "What do many steps in one launch gain?"),
        "parts": Benchmark(
            "decode.parts", "Does chunked prefill keep other requests' tokens coming?"
        ),
        "prompts": Benchmark(
            "decode.prompts", "How long does a long prompt take to its first token?"
        ),
        "tick": Benchmark("decode.tick", "How much of the host does a step of the scheduler take?"),
        "timeline": Benchmark("decode.timeline", "What does the live timeline cost a step?"),
        "memory": Benchmark("decode.memory", "How much GPU memory does a pipeline slot take?"),
        "kv": Benchmark(
            "decode.kv", "What do cached prefixes save, and what do swapped pages cost?"
        ),
        "adapters": Benchmark("decode.adapters", "What do adapters add to a step?"),
        "confidence": Benchmark(
            "decode.confidence", "What do confidences add to a step, between two trees?"
        ),
        "portable": Benchmark(
            "decode.portable", "How long is a step by GPU generation and weight format?"
        ),
        "text_step": Benchmark(
            "decode.text_step", "How long is a text model's step beside transformers'?"
        ),
    },
    "Megakernel: is it right, and how fast?": {
        "megakernel": Benchmark(
            "megakernel.command", "Does it equal plain torch, and how long is its step?"
        ),
    },
    "Serve: what does a request cost through gRPC?": {
        "e2e": Benchmark("serve.e2e", "How long do requests take with 1 to 64 callers?"),
        "rpc": Benchmark("serve.rpc", "How long do Detects take, alone and from many callers?"),
        "lone": Benchmark("serve.lone", "Where does the time of a lone request go?"),
        "hop": Benchmark("serve.hop", "What do gRPC and the process boundary add to a request?"),
        "paths": Benchmark(
            "serve.paths", "Do whole servers with loops and without, or another option, differ?"
        ),
        "devices": Benchmark("serve.devices", "How much faster are several engines of one host?"),
        "serve": Benchmark(
            "serve.cost", "What does the service cost beside a bare grpc.aio server?"
        ),
        "beside": Benchmark("serve.beside", "Does the service of another checkout cost less?"),
        "access": Benchmark("serve.access", "What do credentials and TLS add to a call?"),
        "telemetry": Benchmark("serve.telemetry", "What do metrics and traces add to a call?"),
        "mesh": Benchmark("serve.mesh", "What does Envoy add to a call?"),
        "start": Benchmark(
            "serve.start", "How long does a start take, and what does an idle server hold?"
        ),
    },
    "Image: what does an image cost?": {
        "image": Benchmark("image.stages", "How long do decoding, tiling and encoding take?"),
        "intake": Benchmark(
            "image.intake", "Which way of an image into the server is the fastest?"
        ),
        "fp8": Benchmark("image.fp8", "How fast and how exact is the vision tower in fp8?"),
    },
    "Speculation: what do draft tokens gain?": {
        "speculation": Benchmark("speculation", "Which block sizes and policies are the fastest?"),
        "drafting_paths": Benchmark(
            "speculation.drafting_paths", "Do drafting steps gain from loops?"
        ),
    },
    "Peers: who else is how fast, and do answers agree?": {
        "peers": Benchmark(
            "peers", "How long is a step of torch, transformers, vLLM and Moondream's?"
        ),
        "reference": Benchmark(
            "reference", "Are tokens and boxes those of Moondream's open reference?"
        ),
        "lift": Benchmark("lift", "How exact are boxes, outlines and points in 3D?"),
        "robot": Benchmark("robot", "How well does a robot know where moving things are?"),
        "tracking": Benchmark("tracking", "How good are the tracks beside other trackers'?"),
    },
    "CPU: how does Legato run without a GPU?": {
        "cpu_peers": Benchmark(
            "cpu.peers", "How fast is a text model beside transformers and llama.cpp?"
        ),
        "rounding": Benchmark("cpu.rounding", "What do weights of 8 and 4 bits cost in accuracy?"),
    },
}
TOOLS = {  # write no record
    "detect_files": Benchmark("detect_files", "How many source files does one Detect enter?"),
    "pack": Benchmark("record", "Name the commit for a copy of the tree without git."),
    "publish": Benchmark("publish", "Write the documents' tables and charts; check their figures."),
    "sizing": Benchmark("publish.sizing", "How many GPUs and cores do so many cameras need?"),
    "summary": Benchmark("publish.summary", "Write the few figures of a run that are compared."),
}
BENCHMARKS = {name: each for group in QUESTIONS.values() for name, each in group.items()}
WITHOUT_RECORD = ("megakernel", "timeline")


def main() -> int:
    """Run the named benchmark or tool; without a name, all benchmarks that run everywhere."""
    arguments = sys.argv[1:]
    if "--dirty" in arguments[:1]:
        os.environ[record.ALLOW_DIRTY] = "1"
        del arguments[0]
    name, *options = arguments or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name in TOOLS:
        return run(name, options)
    if name and name not in BENCHMARKS:
        print(f"unknown benchmark {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    if name not in WITHOUT_RECORD and not {"-h", "--help"} & set(options):
        try:
            record.recordable()  # before hours of measuring rather than after them
        except record.DirtyTreeError as error:
            print(error, file=sys.stderr)
            return 1
    return run(name, options) if name else max(run(each, []) for each in EVERYWHERE)


def usage() -> str:
    """Return the question that each benchmark answers."""
    lines = ["usage: python -m benchmarks [--dirty] NAME [options], NAME --help for its options"]
    lines.append(f"without NAME: {', '.join(EVERYWHERE)}")
    for question, group in {**QUESTIONS, "Tools": TOOLS}.items():
        lines += ["", question]
        lines += [f"  {name:15} {each.question}" for name, each in group.items()]
    return "\n".join(lines)


def run(name: str, options: list[str]) -> int:
    """Import one benchmark only, because load processes import this module without torch."""
    module = (BENCHMARKS | TOOLS)[name].module
    status: int | None = importlib.import_module(f"benchmarks.{module}").main(options)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
