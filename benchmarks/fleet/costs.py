"""What an engine's work costs, from records of one H200 with Moondream 2's shape.

The simulated engine has the null engine's form, a step that adds a token to every running request,
with the durations of these records. The time on the way and the host's time for a call are fitted
to whole requests (`FITTED`, and the second of these with photographs); all others were measured
apart from them, so that whole requests can check the model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from benchmarks.records import Records

ROWS = 32  # sequences that run at once, `--max-running 32`, and tokens of a pass
MAX_WAITING = 256  # the default of `--max-waiting`
SHARED_PASSES, SHARED_PROMPTS, SHARED_IMAGES = 4, 4, 4  # of a launch
CROWD = 16  # waiting requests from which images share a launch
SHORT_ANSWER = 8  # tokens; beside longer answers no images share a launch
QUESTION_TOKENS = 19  # of the measured questions, with their template
IMAGE_GIB = 46 * 3 / 1024  # 730 positions: 46 pages of 3 MiB
KV_FRACTION = 0.6  # the default of `--kv-memory-fraction`
FIXED_GIB = 3.6 + 2.7 + 0.8 + 0.2 + 0.4  # docs/architecture.md#memory
GPU_GIB = 139  # an H200
KERNELS = "h200/kernels"

FITTED = (("cached", 1), ("cached", 64))  # workload and callers in the record `h200/e2e`
_MS = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds of one engine's work; `steps[n]` is a decode step of n rows.

    `image` is the vision tower and the image's positions, `prompt_token` each computed token of a
    prompt beyond its first, `decode_image` the host's decoding of a file, done in parallel.
    `host_call` is what a call takes of the service and engine process, one after another.
    """

    steps: tuple[float, ...]
    image: float
    prompt_token: float
    decode_image: float
    transit_in: float
    transit_out: float
    host_call: float
    num_pictures: int = int(KV_FRACTION * (GPU_GIB - FIXED_GIB) / IMAGE_GIB)
    question_tokens: int = QUESTION_TOKENS
    known_question_tokens: int = QUESTION_TOKENS

    @property
    def pass_base(self) -> float:
        """Seconds of a pass over the weights before its rows."""
        return 2 * self.steps[1] - self.steps[2]

    def launch(self, rows: int, prompts: int, prompt_tokens: int, images: int) -> float:
        """Seconds of a launch; `rows` counts the prompts, too."""
        tokens = rows - prompts + prompt_tokens
        more_passes = max(0, math.ceil(tokens / ROWS) - 1)
        prompt = (prompt_tokens - prompts) * self.prompt_token
        return images * self.image + self.steps[rows] + more_passes * self.pass_base + prompt

    def request(self, tokens: int, *, new_image: bool) -> float:
        """Seconds of the device that a request of `tokens` adds to a busy engine."""
        rows = ROWS // 2
        decode = tokens * self.steps[rows] / rows
        return decode + (self.image + self.steps[1] if new_image else 0.0)


def measured(records: Records, jpeg_bytes: float = 45_470) -> EngineCosts:
    """Read the parameters from the records; `jpeg_bytes` is the size of a request's image."""
    kernels, lone = records.figures(KERNELS), records.figures("h200/lone")["median_ms"]
    prompt_token = (kernels["moondream2 1x19"]["step"] - kernels["moondream2 1x1"]["step"]) / 18
    question = kernels["moondream2 1x19"]["step"]
    steps = _steps(records)
    alone, crowded = (records.row("h200/e2e", **_cell(*cell)) for cell in FITTED)
    lone_device = steps[1] * 3 + 3 * prompt_token * _MS
    transit = alone["p50"] * _MS - lone_device - 1 / crowded["per_second"]
    return EngineCosts(
        steps=steps,
        image=(lone["prefill"] - question) * _MS,
        prompt_token=prompt_token * _MS,
        decode_image=lone["picture"] * _MS,
        transit_in=transit / 2,
        transit_out=transit / 2,
        host_call=host_call(records, jpeg_bytes),
    )


def host_call(records: Records, jpeg_bytes: float) -> float:
    """Seconds between answers of one service and engine process, for known images of a size.

    A line through charts and photographs, 64 callers each.
    """
    small, large = records.figures("h200/e2e"), records.figures("h200/e2e_photos")
    first, second = (
        1.0 / records.row(name, **_cell(*FITTED[1]))["per_second"]
        for name in ("h200/e2e", "h200/e2e_photos")
    )
    slope = (second - first) / (large["jpeg_bytes"] - small["jpeg_bytes"])
    seconds: float = first + slope * (jpeg_bytes - small["jpeg_bytes"])
    return seconds


def _cell(workload: str, callers: int) -> dict[str, object]:
    return {"workload": workload, "callers": callers, "tokens": 3}


def _steps(records: Records) -> tuple[float, ...]:
    """Decode steps by rows, between the measured 1, 8 and 32 on straight lines."""
    known = [
        (row["streams"], row["pipelined"]["period"] * _MS)
        for row in records.rows("h200/decode")
        if row["task"] == "query"
    ]
    steps = [0.0]
    for (low, first), (high, last) in itertools.pairwise(known):
        slope = (last - first) / (high - low)
        steps += [first + slope * (rows - low) for rows in range(max(low, len(steps)), high + 1)]
    return tuple(steps)
