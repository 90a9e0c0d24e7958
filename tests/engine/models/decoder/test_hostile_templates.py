"""Chat templates from strangers: none reaches Python, and none holds up or ends the engine."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
import zoneinfo

import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.decoder.template_process import TemplateProcess, TemplateRefused

from tests.engine.models import hub_folder
from tests.engine.models.against_transformers import prompt_of

GOOD = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
LONG = "processor time"
LARGE = "MiB|processor time|ends the process|more than 4194304 characters"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}BODY{% endfor %}{{ ns.x }}"

ESCAPES = {
    "attributes": "{{ ''.__class__.__mro__ }}",
    "subscripts": "{{ ''['__class__']['__mro__'] }}",
    "the filter attr": "{{ (''|attr('__class__')).mro() }}",
    "globals of a function": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "globals of a class": "{{ cycler.__init__.__globals__.os }}",
    "a format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "the filter map": "{{ [messages]|map(attribute='__class__.__mro__')|list }}",
    "a frame": "{{ raise_exception.__code__.co_filename }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "another's message": "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
}
SLOW = {
    "nested loops": "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
    "a long operation": "{{ (7 ** 9999999) % 10 }}",
    "a long constant": "{{ 7 ** (7 ** 12) }}",
    "a search": "{{ ('a' * 200000).count('a' * 100000 ~ 'b') }}" * 2000,
}
LARGE_TEXTS = {
    "a product": "{{ ('a' * 10000000000)|length }}",
    "concatenation": DOUBLING.replace("START", "'a'").replace(
        "BODY", "{% set ns.x = ns.x ~ ns.x %}"
    ),
    "lists": DOUBLING.replace("START", "[1]").replace("BODY", "{% set ns.x = ns.x + ns.x %}"),
    "a format": "{{ '%0999999999d' % 1 }}",
    "padding": "{{ 'a'|center(9999999999) }}",
    "the whole text": "{{ 'a' * 5000000 }}",
    "many texts": "{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
}
BROKEN = {
    "a range": "{{ range(1000000000)|list }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a division": "{{ 1 / 0 }}",
    "a type": "{{ 1 + 'a' }}",
}


@pytest.fixture(scope="module")
def process():
    """One process for the templates of all tests."""
    made = TemplateProcess()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _works_afterwards(process):
    """Whatever a test rendered, the next template works."""
    yield
    assert process.render(GOOD, {"eos": "</s>"}, HELLO) == "<user>hello</s>"


def check_refused(process, template, match="."):
    """The template is refused with such a message."""
    with pytest.raises(TemplateRefused, match=match):
        process.render(template, {}, HELLO)


@pytest.mark.parametrize("name", ESCAPES)
def test_python_is_out_of_reach(process, name):
    """The sandbox refuses what leads to Python's internals, to files or to the messages."""
    check_refused(process, ESCAPES[name])


def test_templates_know_the_time(monkeypatch):
    """The worker can read no file of time zones, and again and again has the local time."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    zone = zoneinfo.ZoneInfo("Asia/Kathmandu")
    made = TemplateProcess()
    try:
        for _ in range(3):
            before = f"{datetime.datetime.now(zone):%d %H:%M}"
            said = made.render("{{ strftime_now('%d %H:%M') }}", {}, HELLO)
            assert said in (before, f"{datetime.datetime.now(zone):%d %H:%M}")
    finally:
        made.close()


@pytest.mark.parametrize("name", SLOW)
def test_time_is_bounded(process, name):
    """A template that never ends is stopped, also within one operation of C."""
    check_refused(process, SLOW[name], LONG + "|" + LARGE)


@pytest.mark.parametrize("name", LARGE_TEXTS)
def test_memory_and_output_are_bounded(process, name):
    """A text beyond the limits is refused."""
    check_refused(process, LARGE_TEXTS[name], LARGE)


@pytest.mark.parametrize("name", BROKEN)
def test_any_failure_is_the_templates(process, name):
    """Whatever a template raises, or however it ends its process, it is refused."""
    check_refused(process, BROKEN[name])


def test_a_hostile_folder_is_refused_at_load(folder):
    """The model is not served, and the error is about the weights."""
    for template in (SLOW["nested loops"], LARGE_TEXTS["a product"], BROKEN["recursion"]):
        hub_folder.change(folder / "tokenizer_config.json", chat_template=template)
        with pytest.raises(InvalidField, match="the chat template: ") as caught:
            prompt_of(folder, "why?")
        assert caught.value.metadata["field"] == "weights"


def test_a_template_that_waits_for_its_cue_harms_its_request_only(folder):
    """A question that sets it off is refused; others before and after are answered."""
    template = "{% if 'now' in messages[-1]['content'] %}" + SLOW["nested loops"]
    template += "{% endif %}{{ messages[-1]['content'] }}"
    hub_folder.change(folder / "tokenizer_config.json", chat_template=template)
    before = prompt_of(folder, "why?")
    with pytest.raises(InvalidField, match=LONG) as caught:
        prompt_of(folder, "now?")
    assert caught.value.metadata["field"] == "question"
    assert prompt_of(folder, "why?") == before


def test_a_message_cannot_be_a_template(process):
    """A caller's braces are text."""
    shown = process.render(GOOD, {}, [{"role": "user", "content": "{{ 7 * 7 }}"}])
    assert "{{ 7 * 7 }}" in shown


def test_a_start_does_not_wait():
    """The process loads its libraries while its owner goes on; the first template waits."""
    made = TemplateProcess()
    made.start()
    child = made._child
    assert not made._is_ready
    made.start()
    assert made._child is child
    assert made.render(GOOD, {"eos": "</s>"}, HELLO) == "<user>hello</s>"
    made.close()


def test_a_process_that_nothing_needed_ends():
    """A start of a model without a template leaves none; one that has rendered stays."""
    made = TemplateProcess()
    made.start()
    unused = made._child
    made.close_unused()
    assert unused is not None
    assert unused.returncode is not None
    assert made.render(GOOD, {"eos": "</s>"}, HELLO) == "<user>hello</s>"
    made.close_unused()
    used = made._child
    assert used is not None
    assert used.poll() is None
    made.close()


def test_a_killed_process_is_replaced(process):
    """The loss of either process costs at most one request."""
    process.render(GOOD, {}, HELLO)
    os.killpg(process._child.pid, signal.SIGKILL)
    process._child.wait()
    assert process.render(GOOD, {}, HELLO)


def test_the_processes_end_with_their_owner(child_python_path):
    """No process is left when the owner is killed."""
    program = (
        "import os, signal\n"
        "from legato_engine.models.decoder.template_process import templates\n"
        f"templates.render({GOOD!r}, {{}}, {HELLO!r})\n"
        "print(templates._child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    group, end = int(done.stdout), time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("its processes still run")
