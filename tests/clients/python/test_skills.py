"""The table of skills, which is the contract's."""

from __future__ import annotations

import dataclasses

import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_client import (
    Box,
    Detection,
    DetectResult,
    DetectTask,
    Options,
    QueryResult,
    ResponseInfo,
    Sampling,
    SegmentTask,
)
from legato_client._grpc import channel
from legato_client._proto import requests, skills
from legato_service.convert import skills as service_skills

KINDS = [field.name for field in task_pb2.Task.DESCRIPTOR.oneofs_by_name["kind"].fields]
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
INFO = ResponseInfo("r", "m", "stop")


def test_both_tables_are_the_contract_s():
    """Each skill of the contract has a row in the client and in the service, and no other does."""
    assert set(skills.BY_NAME) == set(KINDS) == set(service_skills.BY_NAME)


@pytest.mark.parametrize("name", KINDS)
def test_a_skill_has_a_call_of_its_own(name):
    """Named after it, with the request and the response of its row."""
    skill = skills.BY_NAME[name]
    call = INFERENCE.methods_by_name[name.capitalize()]
    assert channel.OF_SKILLS[name].path == f"/{INFERENCE.full_name}/{call.name}"
    assert (
        call.input_type,
        call.output_type,
    ) == (skill.request.DESCRIPTOR, skill.response.DESCRIPTOR)
    assert skills.of(skill.make(skill.choices[0] if skill.choices else "cat", Sampling())) is skill


@pytest.mark.parametrize("name", KINDS)
def test_a_task_is_the_same_in_a_call_of_its_own_and_in_one_of_several(name):
    """Its fields have the same values in the request and in the contract's task."""
    skill = skills.BY_NAME[name]
    subject = skill.choices[-1] if skill.choices else "cat"
    task = skill.make(subject, Sampling(seed=7), max_objects=3, min_confidence=0.5)
    alone = requests.question(None, task, Options())
    among = getattr(requests.task_message(task), name)
    assert {field.name for field, _ in among.ListFields()} <= {
        field.name for field, _ in alone.ListFields()
    }
    for field, value in among.ListFields():
        assert getattr(alone, field.name) == value
    assert alone.sampling.seed == 7


def test_a_subject_that_a_skill_cannot_have_is_refused():
    """Nothing to look for, and a length that there is not."""
    with pytest.raises(ValueError, match="detect needs a text"):
        skills.DETECT.make(" ", Sampling())
    with pytest.raises(ValueError, match="a caption is one of short, normal, long"):
        skills.CAPTION.make("endless", Sampling())


def test_fields_that_a_task_lacks_are_left_out():
    """An outline has no most objects."""
    assert skills.SEGMENT.make("cat", Sampling(), max_objects=3) == SegmentTask("cat")
    assert skills.DETECT.make("cat", Sampling(), max_objects=3) == DetectTask("cat", 3)


def test_a_result_has_marks_or_text():
    """What lies in the image, or words; neither is a field of the result."""
    found = Detection(Box(0, 0, 1, 1), "cat")
    detected, answered = DetectResult((found,), INFO), QueryResult("two", None, INFO)
    assert (detected.marks, detected.text) == ((found,), "")
    assert (answered.marks, answered.text) == ((), "two")
    assert not {"marks", "text"} & set(dataclasses.asdict(detected))
