"""Conversations: what reaches the engine, and which field is refused."""

import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_engine.types import QueryTask, Turn
from legato_service.convert import skills
from legato_service.convert.skills import MAX_MESSAGES, MAX_TEXT_BYTES, Conversation

from tests.grammar import replay
from tests.service.harness import image_message, refusal, running

SYSTEM, USER, ASSISTANT = (
    task_pb2.CHAT_ROLE_SYSTEM,
    task_pb2.CHAT_ROLE_USER,
    task_pb2.CHAT_ROLE_ASSISTANT,
)
SHOWN = task_pb2.ChatPart(image=task_pb2.ImagePart())


def said(role, *parts):
    """Return a message; strings are text."""
    wrapped = [task_pb2.ChatPart(text=each) if isinstance(each, str) else each for each in parts]
    return task_pb2.ChatMessage(role=role, parts=wrapped)


TALK = [
    said(SYSTEM, "Be short."),
    said(USER, SHOWN, "What", " is it?"),
    said(ASSISTANT, "A cup."),
    said(USER, "Of what colour?"),
]
TURNS = (Turn(question="What is it?", answer="A cup."),)


def field_of(failed):
    """Return the field of a refusal."""
    return failed.details["ErrorInfo"].metadata["field"]


async def test_a_conversation_reaches_the_engine():
    """Query and Generate pass on the system message, the earlier turns and the last question."""
    expected = QueryTask(
        question="Of what colour?",
        reasoning=True,
        system="Be short.",
        history=TURNS,
        shows_image=True,
    )
    task = task_pb2.Task(query=task_pb2.QueryTask(messages=TALK, reasoning=True))
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=TALK, reasoning=True)
        assert (await server.inference.Query(query)).answer
        request = inference_pb2.GenerateRequest(image=image_message(), task=task)
        await replay(server.inference.Generate(request))
        assert [each.task for each in server.engine.requests] == [expected, expected]


async def test_one_question_is_a_conversation():
    """A single user message equals the question alone."""
    async with running() as server:
        for request in ({"question": "Hi?"}, {"messages": [said(USER, "Hi?")]}):
            await server.inference.Query(inference_pb2.QueryRequest(**request))
        first, second = (each.task for each in server.engine.requests)
    assert first == second == QueryTask(question="Hi?")


async def test_messages_of_one_role_in_a_row_are_a_turn():
    """Their texts are joined by blank lines: clients leave out answers that are empty."""
    messages = [
        said(SYSTEM, "Be short."),
        said(SYSTEM, "Be kind."),
        said(USER, SHOWN),
        said(USER, "What", " is it?"),
        said(ASSISTANT, ""),
        said(ASSISTANT, "A cup."),
        said(USER, "Of what"),
        said(USER, "colour?"),
    ]
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=messages)
        assert (await server.inference.Query(query)).answer
        (asked,) = (each.task for each in server.engine.requests)
    assert asked == QueryTask(
        question="Of what\n\ncolour?",
        system="Be short.\n\nBe kind.",
        history=TURNS,
        shows_image=True,
    )


@pytest.mark.parametrize("empty", [(), ("",), (" ", "\n")])
async def test_messages_that_may_be_empty(empty):
    """An empty answer and an empty system message are read, and an image without text."""
    messages = [said(SYSTEM, *empty), said(USER, SHOWN, *empty), said(ASSISTANT, *empty)]
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=[*messages, TALK[-1]])
        assert (await server.inference.Query(query)).answer
        (asked,) = (each.task for each in server.engine.requests)
    assert isinstance(asked, QueryTask)
    assert (asked.system.strip(), asked.question) == ("", "Of what colour?")
    assert [(turn.question.strip(), turn.answer.strip()) for turn in asked.history] == [("", "")]
    assert asked.shows_image


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([said(ASSISTANT, "a")], "messages[0].role"),
        ([said(0, "a")], "messages[0].role"),
        ([said(99, "a")], "messages[0].role"),
        ([said(USER, "a"), said(SYSTEM, "b"), said(USER, "c")], "messages[1].role"),
        ([said(SYSTEM, "a"), said(ASSISTANT, "b"), said(USER, "c")], "messages[1].role"),
        ([said(USER, "a"), said(USER, "b", SHOWN)], "messages[1].parts[1].image"),
        ([said(SYSTEM, "a")], "messages"),
        ([said(USER, "a"), said(ASSISTANT, "b")], "messages"),
        ([said(USER, " ")], "messages[0].parts"),
        ([said(USER)], "messages[0].parts"),
        ([said(USER, "a"), said(ASSISTANT, "b"), said(USER, "")], "messages[2].parts"),
        ([said(USER, "a", task_pb2.ChatPart())], "messages[0].parts[1]"),
        ([said(USER, "a", SHOWN)], "messages[0].parts[1].image"),
        ([said(USER, SHOWN, SHOWN, "a")], "messages[0].parts[1].image"),
        ([said(SYSTEM, SHOWN, "a"), said(USER, "b")], "messages[0].parts[0].image"),
        (
            [said(USER, "a"), said(ASSISTANT, "b"), said(USER, SHOWN, "c")],
            "messages[2].parts[0].image",
        ),
        ([said(USER, "a"), said(ASSISTANT, "b")] * 128 + [said(USER, "c")], "messages"),
    ],
)
async def test_what_makes_no_conversation(messages, field):
    """Wrong order, empty messages and misplaced images are refused by field."""
    async with running() as server:
        query = inference_pb2.QueryRequest(image=image_message(), messages=messages)
        failed = await refusal(server.inference.Query(query))
        task = task_pb2.Task(query=task_pb2.QueryTask(messages=messages))
        request = inference_pb2.GenerateRequest(image=image_message(), task=task)
        streamed = await refusal(replay(server.inference.Generate(request)))
        assert not server.engine.requests
    assert (failed.code.name, failed.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert field_of(failed) == field
    assert field_of(streamed) == f"task.query.{field}"


async def test_messages_stand_in_place_of_the_question():
    """Both together are refused, and so is a reference to an absent image."""
    both = inference_pb2.QueryRequest(question="a", messages=[said(USER, "b")])
    absent = inference_pb2.QueryRequest(messages=[said(USER, SHOWN, "b")])
    async with running() as server:
        fields = []
        for request in (both, absent):
            failed = await refusal(server.inference.Query(request))
            fields.append((failed.reason, field_of(failed)))
    assert fields == [("INVALID_FIELD", "question"), ("INVALID_FIELD", "image")]


async def test_texts_are_limited_in_bytes():
    """A question, and all messages together, have the documented length in UTF-8 and no more."""
    longest = "é" * (MAX_TEXT_BYTES // 2)
    talk = [said(USER, longest[2:]), said(ASSISTANT, "é"), said(USER, "é")]
    async with running() as server:
        await server.inference.Query(inference_pb2.QueryRequest(question=longest))
        await server.inference.Query(inference_pb2.QueryRequest(messages=talk))
        more = [*talk[:2], said(USER, "é?")]
        for field, request in (
            ("question", inference_pb2.QueryRequest(question=f"{longest}?")),
            ("messages", inference_pb2.QueryRequest(messages=more)),
        ):
            failed = await refusal(server.inference.Query(request))
            assert (failed.reason, field_of(failed)) == ("PROMPT_TOO_LONG", field)
            metadata = failed.details["ErrorInfo"].metadata
            assert metadata["limit"] == str(MAX_TEXT_BYTES) == str(1024 * 1024)
            assert metadata["actual"] == str(MAX_TEXT_BYTES + 1)


def test_the_longest_conversation():
    """As many messages as are allowed are read in order."""
    turns = [said(role, str(at)) for at, role in enumerate([USER, ASSISTANT] * (MAX_MESSAGES // 2))]
    read = skills.conversation([said(SYSTEM, "s"), *turns[:-1]], "messages")
    assert isinstance(read, Conversation)
    assert read.system == "s"
    assert read.question == str(MAX_MESSAGES - 2)
    pairs = [(str(at), str(at + 1)) for at in range(0, MAX_MESSAGES - 2, 2)]
    assert [(turn.question, turn.answer) for turn in read.history] == pairs
    assert not read.shows_image
