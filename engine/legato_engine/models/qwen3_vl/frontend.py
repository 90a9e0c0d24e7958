"""The frontend of Qwen3-VL: images in prompts, and its tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from legato_engine.errors import InvalidField, PromptTooLong, TaskUnsupported
from legato_engine.models.decoder.frontend import Shown, TextFrontend, TextSetup
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.qwen3_vl.config import Qwen3VLConfig
from legato_engine.models.qwen3_vl.processor import (
    PatchedImage,
    Pixels,
    grid_of,
    joined,
    patched,
)
from legato_engine.models.qwen3_vl.tasks import (
    BOXES,
    POINTS,
    CaptionTextTask,
    ObjectTask,
    VisualTextTask,
)
from legato_engine.models.text import Detokenizer, SamplingDefaults, max_objects
from legato_engine.sequence import ImageSpan, VisualInputs, VisualPrompt
from legato_engine.types import (
    SKILL_OF_TASK,
    CaptionLength,
    CaptionSpec,
    DetectSpec,
    ImagePlace,
    ImageProperties,
    PointSpec,
    PromptToken,
    QuerySpec,
    Request,
    TaskSpec,
)

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"

_MAX_IMAGES = 32
_HASH_BITS = 52  # which a payload's float keeps
_CAPTIONS = {
    CaptionLength.SHORT: "Describe this image in one sentence.",
    CaptionLength.NORMAL: "Describe this image.",
    CaptionLength.LONG: "Describe this image in detail.",
}


class Qwen3VLFrontend(TextFrontend):
    """A thread-safe `ModelFrontend` with images in prompts."""

    max_images = _MAX_IMAGES
    places_images = True
    tasks = ("query", "caption", "detect", "point")
    notice = "boxes and points have no confidences, and there are no outlines"

    def __init__(self, setup: TextSetup) -> None:
        super().__init__(setup)
        config = setup.config
        assert isinstance(config, Qwen3VLConfig), "a configuration of another family"
        self._config = config
        self._image_tokens = {config.image_token, config.video_token}
        largest = config.max_image_tokens * config.vision.side**2
        self._vision = dataclasses.replace(
            config.vision,
            max_pixels=largest,
            min_pixels=min(config.vision.min_pixels, largest),
        )

    def check(self) -> None:
        super().check()
        shown = Shown(0, 0, [{"type": "image"}] * 2)
        self._encode(QuerySpec(question="?"), [shown], 2, "weights")

    def prepare_image(
        self, image_rgb: Image.Image | Pixels, key: str, info: ImageProperties
    ) -> PreparedImage:
        """Resize and cut PIL RGB or pixels [H, W, 3]."""
        if isinstance(image_rgb, np.ndarray):
            image_rgb = Image.fromarray(image_rgb)
        pixels = patched(image_rgb, self._vision)
        return PreparedImage(key=key, pixels=pixels, info=info, num_bytes=pixels.num_bytes)

    def check_images(self, task: TaskSpec, sizes: Sequence[tuple[int, int]]) -> None:
        grids = [grid_of(height, width, self._vision) for width, height in sizes]
        groups = _groups(_places(task, len(grids)), grids)
        count = sum(math.prod(grids[group[0]]) for group in groups) // self._vision.merge**2
        if count >= (limit := self._config.max_context):
            problem = f"the images take {count} positions, the context has {limit}"
            raise PromptTooLong(problem, limit=limit, actual=count)

    def make_task(self, request: Request, images: Sequence[PreparedImage] = ()) -> VisualTextTask:
        task = request.task
        match task:
            case QuerySpec():
                return self._query(request, task, images)
            case CaptionSpec():
                _require_one(request)
                question = QuerySpec(question=_CAPTIONS[task.length])
                prompt, visual = self._prompt(question, images)
                setup = self._task_setup(request, prompt, self._setup.sampling)
                return CaptionTextTask(setup, self._answer(request), visual)
            case DetectSpec() | PointSpec():
                return self._listing(request, task, images)
        skill = SKILL_OF_TASK[type(task)]
        raise TaskUnsupported(f"this model has no {skill} skill", task=skill)

    def _query(
        self, request: Request, task: QuerySpec, images: Sequence[PreparedImage]
    ) -> VisualTextTask:
        if task.spatial_refs:
            raise TaskUnsupported("this model takes no points and boxes in questions", task="query")
        if task.reasoning:
            raise TaskUnsupported("this model has no query with reasoning", task="query")
        if task.shows_image:
            _require_one(request)
        if task.shows_image and not task.question.strip() and not task.history:
            task = msgspec.structs.replace(task, question=_CAPTIONS[CaptionLength.NORMAL])
        prompt, visual = self._prompt(task, images)
        if not prompt:
            raise InvalidField("the question is empty", field="question")
        setup = self._task_setup(request, prompt, self._setup.sampling, task.response_format)
        return VisualTextTask(setup, self._answer(request), visual)

    def _listing(
        self, request: Request, task: DetectSpec | PointSpec, images: Sequence[PreparedImage]
    ) -> VisualTextTask:
        _require_one(request)
        if isinstance(task, PointSpec) and task.spatial_refs:
            raise TaskUnsupported("this model takes no points and boxes in questions", task="point")
        label = task.object.strip()
        if not label:
            raise InvalidField("object is empty", field="object")
        listing = BOXES if isinstance(task, DetectSpec) else POINTS
        limit = max_objects(task.max_objects, listing.default_max_objects)
        needed = listing.num_tokens(self._setup.tokenizer.encode, label, limit)
        prompt, visual = self._prompt(QuerySpec(question=listing.question(label)), images)
        defaults = SamplingDefaults(max_tokens=needed)
        setup = self._task_setup(request, prompt, defaults, listing.format(label))
        answer = Detokenizer(self._setup.tokenizer)
        return ObjectTask(setup, answer, visual, label, limit, listing.output)

    def _prompt(
        self, task: QuerySpec, images: Sequence[PreparedImage]
    ) -> tuple[tuple[PromptToken, ...], VisualInputs | None]:
        """Encode the conversation with its images, by default all before the first question."""
        shown, visuals = _shown(_places(task, len(images)), images)
        ids = self._encode(task, shown, len(visuals), "images")
        if not visuals:
            return tuple(map(PromptToken, ids)), None
        return _placed(ids, visuals, self._config)

    def _encode(
        self, task: QuerySpec, shown: Sequence[Shown], count: int, field: str
    ) -> tuple[int, ...]:
        """Encode a conversation in which a token stands for each image or pair of frames."""
        ids = self._setup.prompter.encode(task, shown)
        found = sum(token_id in self._image_tokens for token_id in ids)
        if found != count:
            problem = f"the chat template and the tokenizer show {found} of {count} images"
            raise InvalidField(problem, field=field)
        return ids


def _require_one(request: Request) -> None:
    if request.image is None:
        raise InvalidField("this task needs an image", field="image")


# ---------------------------------------------------------------- places of images


def _places(task: TaskSpec, count: int) -> Sequence[ImagePlace]:
    """Return the places of the images, by default all before the first question."""
    places = task.places if isinstance(task, QuerySpec) else ()
    return (places or (ImagePlace(),) * count)[:count]


def _groups(places: Sequence[ImagePlace], grids: Sequence[tuple[int, int]]) -> list[range]:
    """Pair a clip's adjacent frames of one size, and leave other images alone."""
    groups = list[range]()
    while (start := groups[-1].stop if groups else 0) < len(grids):
        stop = start + 1
        if stop < len(grids) and grids[start] == grids[stop]:
            place, later = places[start], places[stop]
            times = place.time is not None and later.time is not None
            stop += times and (place.turn, place.offset) == (later.turn, later.offset)
        groups.append(range(start, stop))
    return groups


def _shown(
    places: Sequence[ImagePlace], images: Sequence[PreparedImage]
) -> tuple[list[Shown], list[PreparedImage]]:
    """Return parts of messages, and what stands in them: images and pairs of frames.

    A frame without another one of its size stands for both of a pair.
    """
    shown, visuals = list[Shown](), list[PreparedImage]()
    for group in _groups(places, [each.pixels.grid for each in images]):
        place, image, parts = places[group[0]], images[group[0]], [{"type": "image"}]
        times = [time for at in group if (time := places[at].time) is not None]
        if times:
            second = images[group[-1]]
            pixels, key = joined(image.pixels, second.pixels), f"{image.key} {second.key}"
            image = PreparedImage(key, pixels, image.info, pixels.num_bytes)
            told = f"<{sum(times) / len(times):.1f} seconds>"
            parts = [{"type": "text", "text": told}, {"type": "video"}]
        shown.append(Shown(place.turn, place.offset, parts))
        visuals.append(image)
    return shown, visuals


def _placed(
    ids: Sequence[int], images: Sequence[PreparedImage], config: Qwen3VLConfig
) -> tuple[tuple[PromptToken, ...], VisualInputs]:
    """Replace the token that stands for an image by as many as the image has.

    Their payload names its content. Rotations count text by one in all dimensions, and an image by
    its longer side, with rows and columns in dimensions of their own.
    """
    merge = config.vision.merge
    prompt: list[PromptToken] = []
    spans, rope, following = list[ImageSpan](), list[npt.NDArray[np.int64]](), 0
    for token_id in ids:
        if token_id not in (config.image_token, config.video_token):
            prompt.append(PromptToken(token_id))
            rope.append(np.full((3, 1), following))
            following += 1
            continue
        image = images[len(spans)]
        patches: PatchedImage = image.pixels
        rows, columns = patches.rows // merge, patches.columns // merge
        spans.append(ImageSpan(len(prompt), rows * columns, len(spans)))
        prompt += [PromptToken(token_id, _payload(image.key))] * (rows * columns)
        rope.append(np.indices((1, rows, columns)).reshape(3, -1) + following)
        following += max(rows, columns)
    rope_3P = np.concatenate(rope, axis=1)
    num_pieces = len(config.vision.stages)
    visual = VisualPrompt(tuple(spans), rope_3P, following - len(prompt), num_pieces)
    return tuple(prompt), VisualInputs(visual, images)


def _payload(key: str) -> tuple[float, float]:
    """Return what distinguishes the tokens of an image from those of another one."""
    digest = int.from_bytes(hashlib.sha256(key.encode()).digest())
    low, high = (digest >> shift & (1 << _HASH_BITS) - 1 for shift in (0, _HASH_BITS))
    return float(low), float(high)
