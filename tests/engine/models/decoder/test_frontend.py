"""Questions that a text model takes, and requests that it refuses."""

from __future__ import annotations

import json

import pytest
from legato_engine.errors import InvalidField, PromptTooLong, TaskUnsupported
from legato_engine.models.registry import resolve
from legato_engine.types import (
    Box,
    CachedImage,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    SamplingParams,
    SegmentTask,
)

from tests.engine.models import hub_folder
from tests.engine.models.decoder.asking import prompt_of, task_of

IMAGE = CachedImage(image_id="any")


@pytest.mark.parametrize(
    ("spec", "skill"),
    [
        (CaptionTask(), "caption"),
        (DetectTask(object="cat"), "detect"),
        (PointTask(object="cat"), "point"),
        (SegmentTask(object="cat"), "segment"),
    ],
)
def test_skills_that_need_images_are_unsupported(phi_folder, spec, skill):
    """They are refused by name, with an image or without."""
    for image in (None, IMAGE):
        with pytest.raises(TaskUnsupported, match=f"no {skill} skill") as caught:
            task_of(phi_folder, spec, image=image)
        assert caught.value.metadata["task"] == skill


@pytest.mark.parametrize(
    ("spec", "image"),
    [
        (QueryTask(question="what is it?"), IMAGE),
        (QueryTask(question="?", spatial_refs=(Box(x_min=0, y_min=0, x_max=1, y_max=1),)), None),
        (QueryTask(question="why?", reasoning=True), None),
    ],
    ids=["image", "references", "reasoning"],
)
def test_questions_that_it_cannot_take_are_unsupported(phi_folder, spec, image):
    """An image, and spatial references in one, are not ignored."""
    with pytest.raises(TaskUnsupported):
        task_of(phi_folder, spec, image=image)


def test_a_prompt_that_is_too_long_names_the_limit(phi_folder):
    """The error names the limit, and the longest prompt that fits leaves one token."""
    room = 256 - len(prompt_of(phi_folder, "0")) + 1
    task = task_of(phi_folder, QueryTask(question="0" * room))
    assert (len(task.prompt), task.max_tokens) == (256, 1)
    with pytest.raises(PromptTooLong) as caught:
        task_of(phi_folder, QueryTask(question="0" * (room + 1)))
    assert caught.value.metadata == {"limit": "256", "actual": "257"}


def test_sampling_is_what_the_authors_say(folder):
    """Defaults are those of generation_config.json, and greedy without it."""
    sampling = task_of(folder, QueryTask(question="why?")).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, None)
    path = folder / "generation_config.json"
    hub_folder.change(path, do_sample=True, temperature=0.7, top_p=0.8, top_k=20)
    sampling = task_of(folder, QueryTask(question="why?")).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 20)
    hub_folder.change(path, temperature=None, top_k=None)
    sampling = task_of(folder, QueryTask(question="why?")).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.8, None)
    asked = SamplingParams(temperature=0.1, top_k=3, max_tokens=9)
    task = task_of(folder, QueryTask(question="why?"), sampling=asked)
    assert (task.sampling.temperature, task.sampling.top_p, task.sampling.top_k) == (0.1, 0.8, 3)
    assert task.max_tokens == 9


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", {"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ("generation_config.json", {"eos_token_id": [400]}, "the id 400"),
        (
            "generation_config.json",
            {"do_sample": True, "top_p": "much"},
            r"Expected `float`, got `str` - at `\$.top_p`",
        ),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is no text"),
        ("tokenizer_config.json", [], "is no JSON object"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder, file, content, message):
    """The error names the file or the field."""
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(InvalidField, match=message):
        resolve("phi", weights=str(folder))


def test_a_tokenizer_of_another_model_is_refused(folder):
    """Its ids would lie outside the embeddings."""
    other = hub_folder.byte_level_tokenizer()
    other.add_tokens([f"word {index}" for index in range(200)])
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(
        InvalidField, match=r"has the id 4\d\d, the model's vocabulary ends before 384"
    ):
        resolve("phi", weights=str(folder))
