"""The launches of a crash bundle, once more: `legato replay BUNDLE`.

Requests of the recorded shapes, with made-up contents, arrive at the same launches as before, in a
process of their own. Failpoints that were set are set again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.console import Console

from legato_engine import crash as bundles
from legato_engine import failpoints
from legato_engine.bench.command import model_config
from legato_engine.bench.options import replay_parser
from legato_engine.bench.workload import endless, fixed_length, noise
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.crash import Bundle, RequestShape
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Sequence as Scheduled
from legato_engine.types import (
    SKILL_OF_TASK,
    CachedImageRef,
    Request,
    RequestKey,
    SamplingParams,
    TaskSpec,
)

EXIT_CRASHED = 3
"""Exit code when the engine crashed again."""

_ENDED = "replayed "  # the last line of a replay that ran to its end
_KEPT = (
    "max_running",
    "pipeline_depth",
    "page_size",
    "crops_per_launch",
    "max_prefill_rows",
    "images_per_launch",
    "speculation",
)
"""Settings of the crashed engine that determine its launches."""

_FIELDS = {"question": "What is there?", "object": "cat", "max_objects": 1000}


def _task(kind: type[TaskSpec]) -> TaskSpec:
    fields = {name: value for name, value in _FIELDS.items() if name in kind.__struct_fields__}
    make: Callable[..., TaskSpec] = kind
    return make(**fields)


_TASKS = {skill: _task(kind) for kind, skill in SKILL_OF_TASK.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a bundle; return 0, `EXIT_CRASHED` if it crashed again, or 2 without a bundle."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = replay_parser().parse_args(words)
    try:
        bundle = bundles.load(arguments.bundle)
    except (OSError, ValueError) as error:
        print(f"{arguments.bundle} is no crash bundle: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if arguments.inside:
        _replay(bundle, _config(bundle, model_config(arguments)))
        return 0
    return _replay_in_process(bundle, words, failpoints_on=not arguments.no_failpoints)


def _replay_in_process(bundle: Bundle, words: list[str], *, failpoints_on: bool) -> int:
    console = Console(soft_wrap=True)
    console.print(_describe(bundle))
    environment = dict(os.environ)
    if failpoints_on and bundle.failpoints:
        environment[failpoints.VARIABLE] = bundle.failpoints
    command = [sys.executable, "-m", "legato_engine.bench.replay", *words, "--inside"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    last = done.stdout.splitlines()[-1:]
    if done.returncode == 0 and last and last[0].startswith(_ENDED):
        summary = json.loads(last[0].removeprefix(_ENDED))
        console.print(
            f"The replay ran to its end: {summary['launches']} launches of "
            f"{summary['requests']} requests. The crash did not happen again."
        )
        return 0
    console.print(f"The replay {_how(done.returncode)}: the crash happened again.")
    return EXIT_CRASHED


def _describe(bundle: Bundle) -> str:
    launched = f"{len(bundle.launches)} launches of {len(bundle.requests)} requests are recorded"
    unfinished = sum(not launch.committed for launch in bundle.launches)
    return (
        f"The engine {_how(bundle.death.exit_code)} after {bundle.death.uptime:.1f} s: {launched}, "
        f"{unfinished} launches and {len(bundle.in_flight)} requests were in flight."
    )


def _how(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"


def _config(bundle: Bundle, given: EngineConfig) -> EngineConfig:
    kept = {name: getattr(bundle.config, name) for name in _KEPT}
    if not kept["pipeline_depth"]:  # as many as were in flight: no bundle has the device's default
        in_flight = sum(not launch.committed for launch in bundle.launches)
        kept["pipeline_depth"] = min(max(in_flight, 1), 2)
    waiting = max(given.max_waiting, len(bundle.requests) + 1)
    return msgspec.structs.replace(given, max_waiting=waiting, **kept)


def _replay(bundle: Bundle, config: EngineConfig) -> None:
    assembly = assemble(config)
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=assembly.pipeline_depth)
    made = SyntheticRequests(assembly, bundle)
    waiting = set(made.shapes)
    for launch in bundle.launches:
        for row in launch.rows:
            if row.seq_id in waiting:
                waiting.remove(row.seq_id)
                scheduler.submit(made.sequence(row.seq_id))
        scheduler.step()
    for seq_id in sorted(waiting):
        if made.shapes[seq_id].in_flight:
            scheduler.submit(made.sequence(seq_id))
    scheduler.drain()
    summary = {"launches": scheduler.steps_committed, "requests": made.num_made}
    assembly.device.close()
    print(f"{_ENDED}{json.dumps(summary)}", flush=True)  # noqa: T201


class SyntheticRequests:
    """Requests of the recorded shapes, limited to the model's tasks and positions."""

    def __init__(self, assembly: Assembly, bundle: Bundle) -> None:
        self._assembly = assembly
        self._constraints = endless(assembly.frontend.constraints)
        self._lengths = _lengths(bundle)
        self._random = np.random.default_rng(0)
        self.shapes = {shape.seq_id: shape for shape in bundle.requests}
        self.num_made = 0

    def sequence(self, seq_id: int) -> Scheduled:
        frontend, shape = self._assembly.frontend, self.shapes[seq_id]
        task = shape.task if shape.task in frontend.tasks else "query"
        name = f"replay-{seq_id}"
        image, source = None, None
        if shape.width and frontend.max_images:
            image = noise(frontend, name, shape.width, shape.height, self._random)
            source = CachedImageRef(image_id=name)
        context = self._assembly.model.max_context
        length = max(1, min(self._lengths[seq_id], context // 2))
        request = Request(
            request_id=RequestKey(name),
            task=_TASKS[task],
            image=source,
            sampling=SamplingParams(temperature=0.0, max_tokens=length, seed=0),
            cache_image=False,
        )
        sequence = make_sequence(frontend, request, image)
        prompt = min(shape.prefix_length + shape.prompt_tokens, context - length - 2)
        sequence = fixed_length(sequence, length, prompt, self._constraints)
        sequence.seq_id = seq_id
        self.num_made += 1
        return sequence


def _lengths(bundle: Bundle) -> dict[int, int]:
    """Return the tokens that each request generated or could still generate."""
    rows = (row for launch in bundle.launches for row in launch.rows)
    ends = {row.seq_id: row.position + row.num_tokens for row in rows}
    return {shape.seq_id: _length(shape, ends.get(shape.seq_id)) for shape in bundle.requests}


def _length(shape: RequestShape, end: int | None) -> int:
    if shape.in_flight or end is None:
        return shape.max_tokens
    return end - shape.prefix_length - shape.prompt_tokens + 1


if __name__ == "__main__":
    sys.exit(main())
