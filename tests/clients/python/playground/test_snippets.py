"""The programs that the page shows are programs that work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf import json_format
from legato.v1 import inference_pb2
from legato_client import (
    CaptionTask,
    DetectTask,
    Options,
    QueryTask,
)
from legato_client._proto import requests
from legato_client.web.playground.snippets import Connection, code
from legato_client.web.playground.tasks import read_task

from tests.clients.python.playground.questions import TASKS
from tests.service.harness import image_bytes

each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
SECURED = Connection(
    "h.example:443", encrypted=True, authorities=True, certificate=True, token=True
)


@each_task
def test_the_page_s_json_is_the_contract_s(task):
    """A task survives the way from the client's values to JSON and back."""
    message = requests.generate(None, task, Options()).task
    assert read_task(json_format.MessageToDict(message)) == task
    assert read_task(json_format.MessageToDict(message, preserving_proto_field_name=True)) == task


@each_task
def test_the_command_sends_the_request(task, tmp_path):
    """What the shell gives grpcurl is the request, byte for byte in each text."""
    (tmp_path / "street.jpg").write_bytes(image_bytes())
    options = Options(model="null")
    command = code(Connection("127.0.0.1:50051"), "street.jpg", task, options).grpcurl
    sent = run_shell(command, tmp_path)
    expected = requests.generate(None, task, options)
    expected.image.encoded.data = image_bytes()
    assert json_format.Parse(sent, inference_pb2.GenerateRequest()) == expected


def test_filters_orders_and_alternatives_are_in_the_programs():
    """In each language, as that language writes them."""
    task = DetectTask("cup", min_confidence=0.35, order="confidence")
    made = code(Connection("127.0.0.1:50051"), "street.jpg", task, Options(top_logprobs=3))
    assert 'DetectTask("cup", min_confidence=0.35, order="confidence")' in made.python
    assert "Options(top_logprobs=3)" in made.python
    assert "legato.WithMinConfidence(0.35), legato.WithOrder(legato.OrderConfidence)" in made.go
    assert "legato.WithAlternatives(3)" in made.go
    assert '"min_confidence": 0.35, "order": "OBJECT_ORDER_CONFIDENCE"' in made.grpcurl
    assert '"top_logprobs": 3' in made.grpcurl


def run_shell(command: str, folder: Path) -> str:
    """The standard input of the command's grpcurl."""
    script = f"grpcurl() {{ cat; }}\n{command}"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_command_of_a_question_without_a_image(tmp_path):
    """It has no image at all."""
    command = code(Connection("127.0.0.1:50051"), None, QueryTask("why?"), Options()).grpcurl
    assert json.loads(run_shell(command, tmp_path)) == {"task": {"query": {"question": "why?"}}}


@each_task
def test_the_go_program_has_the_texts_and_the_right_form(task):
    """As gofmt reads it, where there is one; its strings are those of the task."""
    program = code(Connection("127.0.0.1:50051"), "street.jpg", task, Options(model="m")).go
    assert 'legato.File("street.jpg")' in program
    texts = [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', program)]
    if isinstance(task, DetectTask):
        assert task.object in texts
    gofmt = shutil.which("gofmt")
    if gofmt:
        done = subprocess.run([gofmt], input=program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == program


def test_a_secured_server_is_reached_without_telling_a_secret():
    """Files have names to fill in, and the token stays in the environment."""
    made = code(SECURED, None, QueryTask("why?"), Options())
    assert 'ca="ca.pem", cert="client.pem", key="client-key.pem"' in made.python
    assert "LEGATO_TOKEN" in made.python
    assert 'legato.WithToken(os.Getenv("LEGATO_TOKEN"))' in made.go
    assert '-cacert ca.pem -cert client.pem -key client-key.pem -H "authorization: Bearer' in (
        made.grpcurl
    )
    plain = code(Connection("h:1", encrypted=True), None, QueryTask("why?"), Options())
    assert "tls=True" in plain.python
    assert "-plaintext" not in plain.grpcurl


@pytest.mark.parametrize("name", ["a b.jpg", "$(reboot).jpg", "-x.jpg", "../x.jpg", "é.jpg", ""])
def test_a_file_name_that_needs_quotes_is_replaced(name):
    """It would be another file's name in one language or the other."""
    made = code(Connection("h:1"), name, CaptionTask(), Options())
    assert "base64 -w0 image.jpg" in made.grpcurl
    assert '"image.jpg"' in made.python
