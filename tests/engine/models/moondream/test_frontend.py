"""Requests to tasks: refusals, defaults and budgets."""

from __future__ import annotations

import msgspec
import pytest
from legato_engine.errors import InvalidField, PromptTooLong, TaskUnsupported
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.presets import legato_tiny_config, moondream2_config
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.types import (
    SKILLS,
    BlobRef,
    CaptionTask,
    DetectTask,
    EncodedImage,
    Point,
    PointTask,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    SegmentTask,
    Turn,
)

IMAGE = EncodedImage(blob=BlobRef(name="b", size=1), mime_type="image/png")
SPECS = [
    QueryTask(question="why"),
    CaptionTask(),
    DetectTask(object="cup"),
    PointTask(object="cup"),
    SegmentTask(object="cup"),
]

KEY = RequestKey("r")


def request(task, image=IMAGE, key=KEY, **sampling):
    """A request for a task."""
    return Request(
        request_id=key,
        task=task,
        image=image,
        sampling=SamplingParams(**sampling),
    )


def field_of(frontend, bad):
    """The field that the refusal names."""
    with pytest.raises(InvalidField) as caught:
        frontend.make_task(bad)
    return caught.value.metadata["field"]


@pytest.mark.parametrize(
    "task", [*SPECS[1:], QueryTask(question="?", spatial_refs=(Point(x=0, y=0),))]
)
def test_spatial_skills_and_captions_need_an_image(frontend, task):
    """The error names the image."""
    assert field_of(frontend, request(task, image=None)) == "image"


def test_a_conversation_needs_the_image_that_it_shows(frontend):
    """A message that shows an image needs one; a conversation alone does not."""
    turn = Turn(question="a", answer="b")
    assert field_of(frontend, request(QueryTask(question="?", shows_image=True), None)) == "image"
    chat = frontend.make_task(request(QueryTask(question="?", history=(turn,)), None))
    alone = frontend.make_task(request(QueryTask(question="?"), None))
    assert len(chat.prompt) == 2 * len(alone.prompt) + 1
    assert chat.max_tokens == alone.max_tokens - len(alone.prompt) - 1


def test_a_question_needs_no_image(frontend):
    """A query without image follows BOS, and may use the positions that an image would take."""
    with_image = frontend.make_task(request(SPECS[0]))
    without = frontend.make_task(request(SPECS[0], image=None))
    assert frontend.prefix_length(False) == 1
    assert without.prompt == with_image.prompt
    assert without.max_tokens - with_image.max_tokens == frontend.prefix_length(True) - 1


@pytest.mark.parametrize("task", SPECS)
def test_sampling_is_resolved(frontend, task):
    """All fields but top_k are set, and requested values stay."""
    sampling = frontend.make_task(request(task)).sampling
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    assert [name for name, value in fields.items() if value is None] == ["top_k"]
    asked = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "max_tokens": 9,
        "seed": 11,
        "stop": ("x",),
    }
    sampling = frontend.make_task(request(task, **asked)).sampling
    assert msgspec.structs.asdict(sampling) == asked


def test_the_seed_follows_the_request_id(frontend):
    """A retried request samples the same through any process, another one differently."""
    ids = (RequestKey("a"), RequestKey("a", worker=3), RequestKey("b"))
    seeds = [frontend.make_task(request(SPECS[0], key=i)).sampling.seed for i in ids]
    assert seeds[0] == seeds[1] != seeds[2]


def test_moondream2_samples_text_and_not_coordinates():
    """Text has the model's own temperature; spatial skills are greedy."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer())
    text = frontend.make_task(request(SPECS[0])).sampling
    assert (text.temperature, text.top_p) == (0.5, 0.3)
    assert frontend.make_task(request(SPECS[2])).sampling.temperature == 0.0
    assert frontend.tasks == ("query", "caption", "detect", "point", "reasoning")


def test_reasoning_is_a_task_where_there_is_a_template(tiny_config):
    """Beside the skills that have one; a model without it says so."""
    templates = msgspec.structs.replace(tiny_config.templates, query_reasoning=None)
    plain = msgspec.structs.replace(tiny_config, templates=templates)
    tasks = [MoondreamFrontend(each, StandInTokenizer()).tasks for each in (tiny_config, plain)]
    assert tasks == [(*SKILLS, "reasoning"), SKILLS]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("a", "")}, "stop"),
    ],
)
def test_sampling_out_of_range_is_named(frontend, sampling, field):
    """The error names the field."""
    assert field_of(frontend, request(SPECS[0], **sampling)) == field


@pytest.mark.parametrize(
    "task", [DetectTask(object="c", max_objects=0), PointTask(object="c", max_objects=-1)]
)
def test_max_objects_is_positive(frontend, task):
    """A bound below 1 is refused."""
    assert field_of(frontend, request(task)) == "max_objects"


def test_budgets_of_spatial_skills():
    """Three tokens a box, two a point, and EOS; 50 boxes and 150 points by default."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer())
    assert frontend.make_task(request(DetectTask(object="c"))).max_tokens == 151
    assert frontend.make_task(request(PointTask(object="c"))).max_tokens == 301
    assert frontend.make_task(request(DetectTask(object="c", max_objects=4))).max_tokens == 13
    assert frontend.make_task(request(DetectTask(object="c"), max_tokens=5)).max_tokens == 5


@pytest.mark.parametrize("asked", [None, 5000])
def test_max_tokens_is_cut_to_the_context(frontend, tiny_config, asked):
    """Every token but the last needs a position of the context."""
    task = frontend.make_task(request(SPECS[0], max_tokens=asked))
    used = frontend.prefix_length(True) + len(task.prompt) + task.max_tokens - 1
    assert used == tiny_config.text.max_context


def test_a_prompt_that_leaves_no_room_is_refused(frontend, tiny_config):
    """The error has the limit and the actual length; one position less fits."""
    room = tiny_config.text.max_context - frontend.prefix_length(True) - 5
    task = frontend.make_task(request(QueryTask(question="x" * room)))
    assert task.max_tokens == 1
    with pytest.raises(PromptTooLong) as caught:
        frontend.make_task(request(QueryTask(question="x" * (room + 1))))
    limit = tiny_config.text.max_context
    assert caught.value.metadata == {"limit": str(limit), "actual": str(limit + 1)}


def test_reasoning_needs_its_template(frontend):
    """A model without reasoning template refuses it."""
    config = legato_tiny_config()
    templates = msgspec.structs.replace(config.templates, query_reasoning=None)
    plain = MoondreamFrontend(
        msgspec.structs.replace(config, templates=templates), StandInTokenizer()
    )
    with pytest.raises(TaskUnsupported, match="reasoning"):
        plain.make_task(request(QueryTask(question="?", reasoning=True)))


def test_a_prepared_image_says_what_it_weighs(prepare, frontend):
    """`num_bytes` is the size of the pixels, and the key is the given one."""
    image = prepare(frontend, 150, 150)
    assert image.num_bytes == image.pixels.pixels_NHWC.nbytes == 5 * 56 * 56 * 3
    assert image.key == "150x150:0"
