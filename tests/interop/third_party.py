"""Calls of other people's clients, each a case whose outcome is printed as JSON.

Run by the Python that has the client: `python third_party.py CLIENT URL MODEL IMAGE FOLDER`, with
an address for a client of gRPC. It imports nothing of Legato. An outcome is what the case returns,
or the status and the parameter of the error that the client raises.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import queue
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Case = Callable[[], Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
QUESTION = "What is in the picture?"


class Failed(Exception):
    """A command that failed; its text names the HTTP status."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        status = re.search(r"Error code: (\d+)", text)
        self.status_code = int(status[1]) if status else None


class Refused(Exception):
    """A call that ended with this gRPC status."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status_code = status


def data_url(image: str) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(Path(image).read_bytes()).decode()


def shown(image: str) -> list[dict[str, Any]]:
    """A user's message with an image."""
    return [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
    ]


def input_shown(image: str) -> list[dict[str, Any]]:
    """The same as input of a response."""
    return [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": data_url(image), "detail": "auto"},
    ]


def openai_cases(url: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """OpenAI's own package, which has more endpoints than `legato http`."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)

    def ask(content: Any = "hello", **more: Any) -> Any:
        messages: Any = content if _is_talk(content) else [{"role": "user", "content": content}]
        return client.chat.completions.create(model=model, messages=messages, **more)

    def text(reply: Any) -> str:
        return str(reply.choices[0].message.content)

    def streamed() -> list[Any]:
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return [said, chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens > 0]

    async def parallel() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as asynchronous:
            asked: Any = [{"role": "user", "content": "hello"}]
            create = asynchronous.chat.completions.create
            replies = await asyncio.gather(
                *(create(model=model, messages=asked, temperature=0) for _ in range(4))
            )
        return [text(reply) for reply in replies]

    def respond(**more: Any) -> Any:
        return client.responses.create(model=model, **{"input": "hello", **more})

    def streamed_response() -> list[Any]:
        *events, last = respond(stream=True)
        said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert last.response.output_text == said
        return [said, last.response.status, last.response.usage.output_tokens > 0]

    talk = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "again"},
    ]
    seen = [{"role": "user", "content": input_shown(image)}]
    remote = [{"type": "image_url", "image_url": {"url": "https://a.example/a.jpg"}}]
    return {
        "models": lambda: [each.id for each in client.models.list()],
        "answer": lambda: text(ask()),
        "stream": streamed,
        "async": lambda: asyncio.run(parallel()),
        "image": lambda: text(ask(shown(image))),
        "image alone": lambda: text(ask(shown(image)[1:])),
        "conversation": lambda: text(ask(talk)),
        "logprobs": lambda: "".join(
            bytes(each.bytes).decode()
            for each in ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        ),
        "sampling": lambda: text(
            ask(temperature=0, top_p=0, seed=-1, stop=["zzz"], max_completion_tokens=9, n=1)
        ),
        "raw response": lambda: (
            client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": "hello"}]
            ).status_code
        ),
        "tools": lambda: text(ask(tools=[TOOL])),
        "structured output": lambda: text(ask(response_format=FORMAT)),
        "n": lambda: text(ask(n=2)),
        "penalties": lambda: text(ask(frequency_penalty=0.5)),
        "URL of an image": lambda: text(ask(remote)),
        "response": lambda: respond().output_text,
        "streamed response": streamed_response,
        "response about an image": lambda: respond(input=seen).output_text,
        "continued response": lambda: (
            respond(
                input=[*seen, *respond(input=seen).output, {"role": "user", "content": "again"}]
            ).output_text
        ),
        "tools of a response": lambda: respond(tools=[{"type": "web_search"}]),
        "structured response": lambda: (
            respond(text={"format": {"type": "json_object"}}).output_text
        ),
        "stored response": lambda: respond(previous_response_id="resp_1"),
        "completions": lambda: client.completions.create(model=model, prompt="hello").choices,
        "embeddings": lambda: client.embeddings.create(model=model, input="hello").data,
    }


def moondream_cases(url: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """Moondream's own package."""
    import moondream
    from PIL import Image

    client = moondream.vl(endpoint=f"{url}/v1", model=model)
    picture = Image.open(image)
    talk = [{"role": "user", "content": "hello"}]
    return {
        "caption": lambda: client.caption(picture)["caption"],
        "streamed caption": lambda: "".join(client.caption(picture, stream=True)["caption"]),
        "query": lambda: client.query(picture, QUESTION)["answer"],
        "question without image": lambda: client.query(question="hello")["answer"],
        "detect": lambda: client.detect(picture, "bus")["objects"],
        "point": lambda: client.point(picture, "bus")["points"],
        "segment": lambda: client.segment(picture, "bus")["path"],
        "encoded image": lambda: client.caption(client.encode_image(picture))["caption"],
        "settings": lambda: client.caption(picture, settings={"temperature": 0, "top_p": 0})[
            "caption"
        ],
        "conversation": lambda: client.chat(talk)["message"]["content"],
    }


def langchain_cases(url: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """ChatOpenAI of langchain-openai."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, max_retries=0)
    # legato-tiny was trained on no JSON: only some seeds end an object before the token limit.
    brief = chat.model_copy(update={"temperature": 1.0, "seed": 1})
    talk = [
        SystemMessage("be brief"),
        HumanMessage("hello"),
        AIMessage(""),
        HumanMessage("again"),
    ]
    return {
        "answer": lambda: chat.invoke("hello").content,
        "stream": lambda: "".join(str(each.content) for each in chat.stream("hello")),
        "batch": lambda: [each.content for each in chat.batch(["hello", "hello"])],
        "async": lambda: asyncio.run(chat.ainvoke("hello")).content,
        "usage": lambda: chat.invoke("hello").usage_metadata["output_tokens"] > 0,
        "image": lambda: chat.invoke([HumanMessage(shown(image))]).content,
        "conversation": lambda: chat.invoke(talk).content,
        "logprobs": lambda: (
            len(chat.bind(logprobs=True).invoke("hello").response_metadata["logprobs"]["content"])
            > 0
        ),
        "tools": lambda: chat.bind_tools([TOOL]).invoke("hello").content,
        "structured output": lambda: chat.with_structured_output(
            {"title": "count", **SCHEMA}
        ).invoke("hello"),
        "JSON mode": lambda: brief.with_structured_output(None, method="json_mode").invoke("hello"),
        "responses API": lambda: (
            ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, use_responses_api=True)
            .invoke("hello")
            .text
        ),
        "embeddings": lambda: OpenAIEmbeddings(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, check_embedding_ctx_length=False
        ).embed_query("hello"),
    }


def litellm_cases(url: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """The function `completion` of litellm with the provider `openai`."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is downloaded
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False

    def ask(content: Any = "hello", **more: Any) -> Any:
        messages = content if _is_talk(content) else [{"role": "user", "content": content}]
        return litellm.completion(
            model=f"openai/{model}",
            api_base=f"{url}/v1",
            api_key="unused",
            messages=messages,
            max_retries=0,
            **more,
        )

    def text(reply: Any) -> Any:
        return reply.choices[0].message.content

    async def asynchronous() -> Any:
        reply = await litellm.acompletion(
            model=f"openai/{model}",
            api_base=f"{url}/v1",
            api_key="unused",
            messages=[{"role": "user", "content": "hello"}],
        )
        return text(reply)

    def streamed() -> str:
        chunks = ask(stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "again"},
    ]
    return {
        "answer": lambda: text(ask()),
        "stream": streamed,
        "async": lambda: asyncio.run(asynchronous()),
        "usage": lambda: ask().usage.completion_tokens > 0,
        "image": lambda: text(ask(shown(image))),
        "conversation": lambda: text(ask(talk)),
        "sampling": lambda: text(ask(temperature=0, top_p=0, seed=-1, stop=["zzz"], max_tokens=9)),
        "top_k": lambda: text(ask(top_k=-1)),
        "tools": lambda: text(ask(tools=[TOOL])),
        "structured output": lambda: text(ask(response_format=FORMAT)),
        "responses": lambda: (
            litellm.responses(
                model=f"openai/{model}", api_base=f"{url}/v1", api_key="unused", input="hello"
            )
            .output[-1]
            .content[0]
            .text
        ),
        "embeddings": lambda: litellm.embedding(
            model=f"openai/{model}", api_base=f"{url}/v1", api_key="unused", input=["hello"]
        ),
    }


def llm_cases(url: str, model: str, image: str, folder: str) -> dict[str, Case]:
    """The command `llm`, with a model in its extra-openai-models.yaml."""
    settings: dict[str, Any] = {"model_id": "legato", "model_name": model, "api_base": f"{url}/v1"}
    settings |= {"api_key_name": "legato", "vision": True, "supports_schema": True}
    entries = [settings, {**settings, "model_id": "legato-tools", "supports_tools": True}]
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(entries))
    Path(folder, "keys.json").write_text(json.dumps({"legato": "unused"}))
    environment = {**os.environ, "LLM_USER_PATH": folder}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Failed(done.stderr.strip())
        return done.stdout.strip()

    def ask(*words: str) -> str:
        return run("-m", "legato", *words)

    return {
        "answer": lambda: ask("--no-stream", "hello"),
        "stream": lambda: ask("hello"),
        "system": lambda: ask("-s", "be brief", "hello"),
        "image": lambda: ask(QUESTION, "-a", image),
        "conversation": lambda: [ask("hello"), ask("-c", "again")][1],
        "options": lambda: ask("-o", "temperature", "0", "-o", "seed", "1", "hello"),
        "JSON mode": lambda: ask("-o", "json_object", "1", "hello"),
        "schema": lambda: ask("--schema", json.dumps(SCHEMA), "hello"),
        "tools": lambda: run("-m", "legato-tools", "-T", "llm_version", "hello"),
    }


def tritonclient_cases(address: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """Triton's gRPC client, unchanged, before the Open Inference Protocol."""
    import numpy
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(address)
    picture = Path(image).read_bytes()
    detect = json.dumps({"detect": {"object": "bus"}}).encode()

    def tensor(name: str, data: bytes, shape: tuple[int, ...] = (1,)) -> Any:
        made = triton.InferInput(name, list(shape), "BYTES")
        elements = numpy.empty(shape, dtype=numpy.object_)
        elements.fill(data)
        made.set_data_from_numpy(elements)
        return made

    def infer(*tensors: Any, **more: Any) -> Any:
        try:
            return client.infer(more.pop("model", model), list(tensors), **more)
        except triton.InferenceServerException as error:
            raise Refused(error.status(), error.message()) from None

    def text(result: Any, name: str = "text") -> str:
        return str(result.as_numpy(name)[0].decode())

    def stream(*requests: Any, **more: Any) -> list[Any]:
        answers: queue.Queue[Any] = queue.Queue()
        with triton.InferenceServerClient(address) as streaming:
            streaming.start_stream(lambda result, error: answers.put((result, error)))
            for tensors in requests:
                streaming.async_stream_infer(model, list(tensors), **more)
            streaming.stop_stream()
        return list(answers.queue)

    def pieces() -> str:
        answers = stream([tensor("prompt", b"hello")], parameters={"stream": True})
        *said, last = [result for result, _ in answers]
        assert "".join(text(each) for each in said) == text(last)
        assert last.get_response().parameters["triton_final_response"].bool_param
        return text(last)

    def failing_stream() -> list[str]:
        """A request that fails, then one that does not."""
        (_, error), (result, _) = stream([tensor("image", picture)], [tensor("prompt", b"hello")])
        assert "expects either input 'task' or input 'prompt'" in error.message()
        return [text(result)]

    def boxes() -> list[Any]:
        result = infer(tensor("image", picture), tensor("task", detect), request_id="7")
        told = json.loads(text(result, "result"))["detect"].get("objects", [])
        assert result.get_response().id == "7"
        found = result.as_numpy("boxes")
        assert found.shape == (len(told), 4)
        assert found.dtype == numpy.float32
        return list(found.tolist())

    metadata = client.get_model_metadata
    return {
        "live": client.is_server_live,
        "ready": client.is_server_ready,
        "model ready": lambda: client.is_model_ready(model),
        "server metadata": lambda: [client.get_server_metadata().name],
        "model metadata": lambda: [each.name for each in metadata(model).inputs],
        "prompt": lambda: text(infer(tensor("prompt", b"hello"))),
        "prompt about an image": lambda: text(
            infer(tensor("image", picture), tensor("prompt", QUESTION.encode()))
        ),
        "boxes": boxes,
        "chosen outputs": lambda: text(
            infer(tensor("prompt", b"hello"), outputs=[triton.InferRequestedOutput("text")])
        ),
        "stream": lambda: [text(each) for each, _ in stream([tensor("prompt", b"hello")])],
        "pieces of text": pieces,
        "failure in a stream": failing_stream,
        "unknown input": lambda: infer(tensor("picture", picture)),
        "wrong shape": lambda: infer(tensor("prompt", b"hello", (1, 1))),
        "unknown output": lambda: infer(
            tensor("prompt", b"hello"), outputs=[triton.InferRequestedOutput("mask")]
        ),
        "unknown model": lambda: infer(tensor("prompt", b"hello"), model="none"),
        "sequences": lambda: infer(tensor("prompt", b"hello"), sequence_id=5),
    }


def home_assistant_cases(url: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """Requests of the integration `openai_conversation` in Home Assistant 2026.11.

    It makes its client from a key alone, so the address is in the environment. The token limit
    and the temperature are settings of the integration, by default 3,000 and 1.
    """
    os.environ["OPENAI_BASE_URL"] = f"{url}/v1"
    import openai
    from openai.types import responses as types

    recorded = {
        "model": model,
        "max_output_tokens": 256,
        "safety_identifier": "01KB5A3VX0K5Q4T0Y0E8W7N2ZM",
        "prompt_cache_key": "01KB5A1HJ2S6ZC6D6YJ2F2N3WV",
        "service_tier": "auto",
        "store": False,
        "stream": True,
        "top_p": 1.0,
        "temperature": 0.0,
        "prompt_cache_retention": "24h",
    }
    system = {"type": "message", "role": "developer", "content": "You are a voice assistant."}
    hello = {"type": "message", "role": "user", "content": "hello"}
    answer = {"type": "message", "role": "assistant", "content": "Hi."}
    camera = {"type": "message", "role": "user", "content": input_shown(image)}
    tool = {
        "type": "function",
        "name": "HassTurnOn",
        "description": "Turns on a device.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        "strict": False,
    }
    form = {"type": "json_schema", "name": "count", "schema": SCHEMA, "strict": True}

    async def run(asked: list[Any], **more: Any) -> str:
        async with openai.AsyncOpenAI(api_key="unused", max_retries=0) as client:
            said = ""
            stream = await client.responses.create(**{**recorded, **more}, input=asked)
            async for event in stream:
                if isinstance(event, types.ResponseTextDeltaEvent):
                    said += event.delta
                elif isinstance(event, types.ResponseCompletedEvent):
                    assert event.response.usage, "Home Assistant shows what an answer used"
                    assert isinstance(event.response.output[0], types.ResponseOutputMessage)
                    return said
        raise Failed("the stream ended without response.completed")

    def ask(*asked: Any, **more: Any) -> str:
        return asyncio.run(run([system, *asked], **more))

    async def set_up() -> list[str]:
        async with openai.AsyncOpenAI(api_key="unused") as client:
            return [each.id async for each in client.with_options(timeout=10.0).models.list()]

    return {
        "setup": lambda: asyncio.run(set_up()),
        "Assist": lambda: ask(hello),
        "continued conversation": lambda: ask(hello, answer, hello),
        "AI task": lambda: ask(hello),
        "AI task about a camera": lambda: ask(camera),
        "Assist with control of the house": lambda: ask(hello, tools=[tool]),
        "a limit of 3000 tokens": lambda: ask(hello, max_output_tokens=3000),
        "web search": lambda: ask(
            hello, tools=[{"type": "web_search", "search_context_size": "medium"}]
        ),
        "structured AI task": lambda: ask(camera, text={"format": form}),
    }


def frigate_cases(url: str, model: str, image: str, _folder: str) -> dict[str, Case]:
    """Requests of the provider `openai` of Frigate's generative AI, as of July 2026."""
    import openai

    client = openai.OpenAI(api_key="unused", base_url=f"{url}/v1", max_retries=0)
    thumbnail = {"type": "image_url", "image_url": {"url": data_url(image), "detail": "low"}}

    def send(*images: Any, images_first: bool = False, **more: Any) -> str:
        text = {"type": "text", "text": QUESTION}
        content = [*images, text] if images_first else [text, *images]
        messages: Any = [{"role": "user", "content": content}]
        result = client.chat.completions.create(model=model, messages=messages, timeout=60, **more)
        return str(result.choices[0].message.content).strip()

    def context_size() -> int:
        (found,) = [each for each in client.models.list().data if each.id == model]
        return int(found.max_model_len)  # type: ignore[attr-defined]  # as vLLM adds it

    return {
        "models": lambda: sorted(each.id for each in client.models.list().data),
        "context size": context_size,
        "object description": lambda: send(thumbnail),
        "object description of a release": lambda: send(thumbnail, images_first=True),
        "several thumbnails": lambda: send(thumbnail, thumbnail),
        "review description": lambda: send(thumbnail, response_format=FORMAT),
        "chat with tools": lambda: send(tools=[TOOL], tool_choice="auto"),
    }


CLIENTS: dict[str, Callable[[str, str, str, str], dict[str, Case]]] = {
    "openai": openai_cases,
    "moondream": moondream_cases,
    "langchain-openai": langchain_cases,
    "litellm": litellm_cases,
    "llm": llm_cases,
    "tritonclient": tritonclient_cases,
    "Home Assistant": home_assistant_cases,
    "Frigate": frigate_cases,
}


def _is_talk(content: Any) -> bool:
    return isinstance(content, list) and "role" in content[0]


def outcomes(cases: dict[str, Case]) -> Iterator[tuple[str, Any]]:
    for name, case in cases.items():
        try:
            yield name, {"result": case()}
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its outcome
            status, param = (getattr(error, key, None) for key in ("status_code", "param"))
            yield name, {"status": status, "param": param, "message": f"{error}"[:500]}


if __name__ == "__main__":
    client, *arguments = sys.argv[1:]
    json.dump(dict(outcomes(CLIENTS[client](*arguments))), sys.stdout)
