"""The playground as a person uses it, in Chromium."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path

import pytest

from tests.browser.conftest import playground
from tests.e2e.server import Server, until

SAMPLES = Path(str(importlib.resources.files("legato_tiny") / "samples"))
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
AXE = Path(__file__).parents[2] / ".tools/axe/package/axe.min.js"
TABS = ("ask", "chat", "session", "timeline")
NARROW = {"width": 360, "height": 740}

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def expect(locator):
    from playwright.sync_api import expect as playwright_expect

    return playwright_expect(locator)


def ask(page, *tasks):
    """Replace the tasks by these and ask them; each is (skill, text)."""
    while page.locator(".task").count():
        page.locator(".task .icon").first.click()
    for skill, text in tasks:
        page.click("#add")
        row = page.locator(".task").last
        row.get_by_label("Skill").select_option(skill)
        if skill == "caption":
            row.get_by_label("Length").select_option(text)
        else:
            row.locator(".inputs > input").first.fill(text)
    page.click("#questions button[type=submit]")
    return page.locator(".answer")


def choose(page, name):
    """Choose a file of the user's own, which no sample of the page is named like."""
    image = {
        "name": f"own-{name}",
        "mimeType": "image/jpeg",
        "buffer": (SAMPLES / name).read_bytes(),
    }
    page.set_input_files("#file", image)
    expect(page.locator("#picture-state")).to_contain_text(re.compile(f"own-{name}.*uploaded"))


def boxes(page):
    """Left, top, right and bottom of each box that is drawn, in fractions."""
    shapes = page.locator(".overlay rect.box").all()
    found = [
        [float(shape.get_attribute(key)) for key in ("x", "y", "width", "height")]
        for shape in shapes
    ]
    return [[x, y, x + width, y + height] for x, y, width, height in found]


def test_a_image_s_objects_are_drawn_where_they_are(site, open_page):
    """Several tasks at once on an uploaded file, each with its times and its layer."""
    page = open_page(site)
    choose(page, "scene.jpg")
    answers = ask(
        page, ("detect", "dog"), ("point", "balloon"), ("segment", "tree"), ("caption", "short")
    )
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(4)
    (box,), (truth,) = boxes(page), TRUTH["scene.jpg"]["dog"]
    assert box == pytest.approx(truth, abs=0.05)
    expect(page.locator(".overlay .point")).to_have_count(1)
    assert page.locator(".overlay path.outline").get_attribute("d").rstrip().lower().endswith("z")
    expect(answers.nth(3).locator(".words")).to_contain_text("balloon")
    for index in range(4):
        expect(answers.nth(index).locator(".times")).to_contain_text("first message")
        expect(answers.nth(index).locator(".times")).to_contain_text("total")


def test_boxes_and_words_appear_while_they_are_decoded(slow_site, open_page):
    """Before the answer is complete, and the image may be one that comes with the page."""
    page = open_page(slow_site)
    page.get_by_label("Sample: fruit").click()
    expect(page.locator("#picture-state")).to_contain_text(re.compile("fruit.*uploaded"))
    page.get_by_text("Model and sampling").click()
    page.fill("#max-tokens", "200")
    ask(page, ("caption", "long"))
    expect(page.locator('.answer[aria-busy="true"] .words')).to_contain_text("nobody looked at")
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(1)
    expect(page.locator(".answer .status")).to_have_text("stopped at max tokens")


def test_unsure_objects_are_left_out_and_the_surest_comes_first(slow_site, open_page):
    """As the fields beside the task say; the code says it too, and tokens are listed on demand."""
    page = open_page(slow_site)
    choose(page, "scene.jpg")
    page.get_by_text("Model and sampling").click()
    page.get_by_label("Top logprobs, 0 to 20").fill("2")
    page.locator(".task .icon").last.click()
    row = page.locator(".task").last
    row.get_by_text("Options").click()
    row.get_by_label("Min confidence").fill("0.5")
    row.get_by_label("Sort by confidence").check()
    page.click("#questions button[type=submit]")
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(1)
    sure = [
        text.split()[-1] for text in page.locator(".found li > span:first-child").all_inner_texts()
    ]
    assert sure == ["94%", "75%"]
    expect(page.locator(".overlay .label")).to_have_count(2)
    page.locator(".tokens summary").click()
    expect(page.locator(".tokens tbody tr")).to_have_count(2)
    expect(page.locator(".tokens")).to_contain_text("100.0%")
    page.get_by_role("button", name="Code: Detect dog").click()
    shown = page.locator("#code pre")
    expect(shown).to_contain_text('min_confidence=0.5, order="confidence"')
    expect(shown).to_contain_text("top_logprobs=2")


def test_a_text_model_is_asked_questions_only(slow_site, open_page):
    """The page offers no image and no skill that the server's model lacks."""

    def of_text(route):
        facts = route.fetch().json()
        facts["models"][0]["tasks"] = ["query"]
        route.fulfill(json=facts)

    page = open_page(slow_site)
    page.route("**/playground/server", of_text)
    page.reload()
    expect(page.locator(".task")).to_have_count(1)
    expect(page.get_by_label("Question")).to_have_value("Why is the sky blue?")
    expect(page.locator("#panel-ask .look")).to_be_hidden()
    page.click("#add")
    expect(page.get_by_label("Skill").last).to_have_value("query")
    assert not page.get_by_label("Skill").last.locator("option[value=detect]").is_enabled()
    page.click("#questions button[type=submit]")
    expect(page.locator(".answer .words").first).to_contain_text("nobody")


@pytest.mark.parametrize("first", ["ask", "session"])
def test_a_text_model_has_no_session(slow_site, open_page, first):
    """The tab says so before a start, whichever of the two the page has first."""

    def of_text(route):
        facts = route.fetch().json()
        facts["models"][0]["tasks"] = ["query"]
        route.fulfill(json=facts)

    page = open_page(slow_site)
    page.route("**/playground/server", of_text)
    page.goto(f"{page.url.partition('#')[0]}#{first}")
    page.reload()
    page.wait_for_selector('#server[data-state="up"]')
    page.click("#tab-session")
    expect(session_state(page)).to_contain_text("cannot detect objects in images")
    expect(page.locator("#panel-session button[type=submit]")).to_be_disabled()


def test_labels_stay_within_the_image(site, open_page):
    """Also those of what is near its right edge, on a phone."""
    page = open_page(site)
    page.set_viewport_size(NARROW)
    choose(page, "scene.jpg")
    ask(page, ("detect", "bicycle"), ("point", "bicycle"))
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(2)
    frame = page.locator("#stage .overlay").bounding_box()
    for label in page.locator("#stage .label").all():
        of = label.bounding_box()
        assert frame["x"] - 1 <= of["x"]
        assert of["x"] + of["width"] <= frame["x"] + frame["width"] + 1


def test_stop_cancels_the_work_on_the_server(slow_site, slow, open_page):
    """It holds nothing soon after."""
    page = open_page(slow_site)
    page.get_by_text("Model and sampling").click()
    page.fill("#max-tokens", "7000")
    ask(page, ("query", "why?"), ("query", "how?"))
    expect(page.locator(".answer .words").first).to_contain_text("nobody")
    until(lambda: slow.holds(running=2, waiting=0))
    page.locator(".answer").first.get_by_role("button", name="Stop").click()
    until(lambda: slow.holds(running=1, waiting=0))
    page.click("#stop")
    expect(page.locator(".answer .status")).to_have_text(["stopped", "stopped"])
    until(lambda: slow.holds(running=0, waiting=0))


@pytest.mark.parametrize(
    ("skill", "label", "value", "said"),
    [
        ("detect", "Object", "", "Detect: name an object, such as dog."),
        ("query", "Question", " ", "Query: type a question."),
        ("detect", "Max objects", "0", "Max objects must be a whole number, 1 or more, not “0”."),
        (
            "detect",
            "Min confidence",
            "much",
            "Min confidence must be a number from 0 to 1, not “much”.",
        ),
        ("point", "Region", "1 2 3", "Region must be 2 or 4 numbers from 0 to 1, not “1 2 3”."),
    ],
)
def test_a_mistake_is_said_once_in_words_before_anything_is_asked(
    site, open_page, skill, label, value, said
):
    """Its field has the focus."""
    page = open_page(site)
    choose(page, "scene.jpg")
    while page.locator(".task").count():
        page.locator(".task .icon").first.click()
    page.click("#add")
    row = page.locator(".task")
    row.get_by_label("Skill").select_option(skill)
    row.get_by_text("Options").click()
    row.get_by_label(label, exact=True).fill(value)
    page.click("#questions button[type=submit]")
    expect(page.get_by_role("alert")).to_have_text(said)
    expect(row.get_by_label(label, exact=True)).to_be_focused()
    expect(page.locator(".answer")).to_have_count(0)
    row.get_by_label(label, exact=True).fill("dog" if label == "Object" else "")
    if label != "Question":
        page.click("#questions button[type=submit]")
        expect(page.locator('.answer[aria-busy="false"]')).to_have_count(1)
        expect(page.get_by_role("alert")).to_have_count(0)


def test_what_fails_alike_is_shown_once_in_words(site, open_page):
    """The server's names and messages are folded away."""
    page = open_page(site)
    choose(page, "scene.jpg")
    page.get_by_text("Model and sampling").click()
    page.fill("#adapter", "absent")
    ask(page, ("detect", "dog"), ("detect", "cat"), ("point", "dog"))
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(3)
    failure = page.locator(".answer .failure")
    expect(failure).to_have_count(1)
    expect(failure).to_contain_text("Leave the adapter empty, or name one that this server has.")
    expect(failure.locator("code")).to_be_hidden()
    failure.get_by_text("Details").click()
    expect(failure.locator("code")).to_contain_text("ADAPTER_NOT_FOUND")
    expect(page.locator(".answer .status").nth(2)).to_have_text("failed for the same reason")


def test_a_file_that_is_no_image_is_refused(site, open_page):
    """What was chosen before stays."""
    page = open_page(site)
    choose(page, "scene.jpg")
    text = {"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"}
    page.set_input_files("#file", text)
    expect(page.locator("#picture-state .failure")).to_contain_text("cannot show notes.png")
    expect(page.locator(".frame img")).to_be_visible()


def test_a_click_and_a_drag_name_a_place(site, open_page):
    """In the task that takes one."""
    page = open_page(site)
    choose(page, "scene.jpg")
    ask(page, ("query", "What is this?"))
    frame = page.locator("#stage .frame")
    size = frame.bounding_box()
    frame.click(position={"x": size["width"] / 4, "y": size["height"] / 2})
    place = page.get_by_label("Region")
    assert [float(n) for n in place.input_value().split()] == pytest.approx([0.25, 0.5], abs=0.01)
    page.mouse.move(size["x"] + 10, size["y"] + 10)
    page.mouse.down()
    page.mouse.move(size["x"] + 210, size["y"] + 110)
    page.mouse.up()
    assert len(place.input_value().split()) == 4


def test_a_conversation_goes_on(site, open_page):
    """About the image; the words before are part of the next question."""
    page = open_page(site, viewport=NARROW)
    choose(page, "scene.jpg")
    page.click("#tab-chat")
    for number, question in enumerate(
        ("How many apples are there?", "What colour is the balloon?"), 1
    ):
        page.get_by_label("Message").fill(question)
        page.keyboard.press("Enter")
        expect(page.locator(".said .times")).to_have_count(number)
    page.get_by_role("button", name="Code").click()
    expect(page.locator("#code pre")).to_contain_text("How many apples")
    expect(page.locator("#code pre")).to_contain_text("What colour")


def test_a_conversation_shows_each_new_image(slow_site, open_page):
    """At the message after which the image changed; the programs name the files."""
    page = open_page(slow_site, viewport=NARROW)
    said = page.locator(".message.user")
    for number, name in enumerate(("scene.jpg", "scene.jpg", "fruit.jpg"), 1):
        page.click("#tab-ask")
        if number != 2:
            choose(page, name)
        page.click("#tab-chat")
        page.get_by_label("Message").fill("What is it?")
        page.keyboard.press("Enter")
        expect(page.locator(".said .times")).to_have_count(number)
        expect(said.nth(number - 1).locator("img")).to_have_count(0 if number == 2 else 1)
    page.get_by_role("button", name="Code").click()
    expect(page.locator("#code pre")).to_contain_text('Path("own-fruit.jpg"), "What is it?"')
    page.get_by_role("button", name="Go").click()
    shown = 'legato.WithImages(legato.File("own-scene.jpg"), legato.File("own-fruit.jpg"))'
    expect(page.locator("#code pre")).to_contain_text(shown)


def test_an_answer_has_the_format_that_was_chosen(site, open_page):
    """The server's complaint about a format is shown at its field until that is changed."""
    page = open_page(site)
    choose(page, "scene.jpg")
    ask(page, ("query", "Which?"))
    row = page.locator(".task")
    row.locator("summary").click()
    row.get_by_label("Answer format").select_option("regex")
    row.get_by_role("textbox", name="regex").fill("(cat")
    page.click("#questions button[type=submit]")
    expect(row.get_by_role("alert")).to_contain_text('invalid regex "(cat"')
    expect(row.get_by_role("textbox", name="regex")).to_have_attribute("aria-invalid", "true")
    row.get_by_label("Answer format").select_option("choices")
    expect(row.get_by_role("alert")).to_be_hidden()
    row.get_by_role("textbox", name="choices").fill("cat\ndog\n")
    page.click("#questions button[type=submit]")
    expect(page.locator(".answer .words")).to_have_text(re.compile("^(cat|dog)$"))
    page.get_by_role("button", name="Code: Query Which?").click()
    expect(page.locator("#code pre")).to_contain_text('ResponseFormat(choices=("cat", "dog"))')


def test_a_session_answers_frames(site, open_page):
    """Of the bundled scene, with ages, counts and boxes; then of a webcam; then it stops."""
    page = open_page(site)
    page.click("#tab-session")
    start = page.locator("#panel-session button[type=submit]")
    page.get_by_label("Max frame age, seconds").fill("")
    for clip in ("scene", "camera"):
        page.locator("#panel-session select").first.select_option(clip)
        start.click()
        figure = page.locator('[data-figure="answered"] dd')
        expect(figure).not_to_have_text("–")
        expect(figure).not_to_have_text("0")
        expect(page.locator('[data-figure="age"] dd')).to_contain_text("s")
        expect(page.locator('[data-figure="credits"] dd')).not_to_have_text("–")
        if clip == "scene":
            page.wait_for_selector("#panel-session rect.box", state="attached")
        page.locator("#panel-session").get_by_role("button", name="Stop").click()
        expect(session_state(page)).to_contain_text("Stopped.")
        assert_all_frames_have_an_outcome(page)


def test_a_session_follows_objects(slow_site, open_page):
    """Labels name their tracks, the same from frame to frame, unless that is switched off."""
    page = open_page(slow_site)
    page.click("#tab-session")
    page.get_by_label("Max frame age, seconds").fill("")
    page.get_by_label("Objects, separated by commas").fill("dog")
    page.locator("#panel-session").get_by_label("Min confidence").fill("0.9")
    start = page.locator("#panel-session button[type=submit]")
    label = page.locator("#panel-session .overlay .label")
    start.click()
    expect(label.first).to_contain_text("dog #1 94%")
    figure = page.locator('[data-figure="answered"] dd')
    page.wait_for_function("number => Number(number.textContent) > 5", arg=figure.element_handle())
    expect(label.first).to_contain_text("dog #1 94%")
    expect(label).to_have_count(1)
    stop = page.locator("#panel-session").get_by_role("button", name="Stop")
    stop.click()
    expect(session_state(page)).to_contain_text("Stopped.")
    page.get_by_label("Track objects").uncheck()
    start.click()
    expect(label.first).to_contain_text("dog 94%")
    stop.click()


def start_session(page, objects="dog"):
    """Start one of the tab that is shown; an answer may be old on a busy machine."""
    page.get_by_label("Max frame age, seconds").fill("")
    page.get_by_label("Objects, separated by commas").fill(objects)
    page.locator("#panel-session button[type=submit]").click()


def session_state(page):
    return page.locator("#panel-session .look [role=status]")


def assert_all_frames_have_an_outcome(page):
    """What the sentence after Stop counts is all that was captured, and nothing is in flight."""
    taken, *outcomes = map(int, re.findall(r"\d+", session_state(page).inner_text()))
    assert taken == sum(outcomes) > 0
    expect(page.locator('[data-figure="open"] dd')).to_have_text("0")


def test_boxes_of_a_session_move_on_between_answers(site, open_page):
    """They are where objects are now; where one was measured is drawn faintly and stays."""
    page = open_page(f"{site}#session")
    start_session(page)
    page.wait_for_selector("#panel-session rect.now", state="attached")
    page.wait_for_selector("#panel-session rect.faint", state="attached")
    page.wait_for_function(
        """() => {
          const places = (kind) => [...document.querySelectorAll(`#panel-session rect.${kind}`)]
            .map((each) => each.getAttribute("x")).join();
          const [measured, now] = [places("faint"), places("now")];
          if (window.measured === measured && window.now !== now) return true;
          [window.measured, window.now] = [measured, now];
          return false;
        }""",
        polling=5,
    )
    expect(page.locator("#panel-session .legend")).to_contain_text("where each object is now")


def test_a_session_outlives_its_server(open_page, tmp_path):
    """It says what it waits for, goes on with the next one, and accounts for all frames."""
    options = ("--model", "null", "--null-step-ms", "20")
    with Server(tmp_path, *options) as first, playground(first.address) as url:
        page = open_page(f"{url}#session")
        start_session(page)
        answered = page.locator('[data-figure="answered"] dd')
        expect(answered).to_have_text(re.compile("[1-9]"))
        first.process.kill()
        expect(session_state(page)).to_contain_text("Reconnecting: the server does not answer")
        expect(page.locator("#server")).to_have_attribute("data-state", "down")
        before = int(answered.inner_text())
        (tmp_path / "next").mkdir()
        with Server(tmp_path / "next", *options, "--listen", first.address):
            page.wait_for_function(
                f"number => Number(number.textContent) > {before + 3}",
                arg=answered.element_handle(),
            )
            expect(page.locator("#panel-session .label").first).to_contain_text(re.compile("#2-"))
            page.locator("#panel-session").get_by_role("button", name="Stop").click()
            expect(session_state(page)).to_contain_text("Stopped.")
            assert_all_frames_have_an_outcome(page)
        page.close()


def test_the_chart_of_ages_has_axes(site, open_page):
    """Its ends are written beside it, and the line lies within them."""
    page = open_page(f"{site}#session")
    start_session(page)
    page.wait_for_function("() => document.querySelector('.chart .line').getAttribute('points')")
    marks = page.locator(".plot .marks span").all_inner_texts()
    top, middle, bottom = (float(mark.split()[0]) for mark in marks)
    assert (bottom, middle) == (0, top / 2)
    expect(page.locator(".plot .times")).to_contain_text("30 s ago")
    points = page.locator(".chart .line").get_attribute("points")
    heights = [float(each.split(",")[1]) for each in points.split()]
    assert all(0 <= each < 100 for each in heights)


def test_the_timeline_lives(site, open_page):
    """It says what to do while nothing has run, and shows launches once something does."""
    page = open_page(f"{site}#timeline")
    panel = page.locator("#panel-timeline")
    expect(panel).to_contain_text("live")
    expect(panel).to_contain_text("Nothing has run since this tab was opened.")
    page.get_by_role("button", name="Run a sample request").click()
    expect(panel.locator("canvas")).to_be_visible()
    expect(panel.locator(".timeline-figures")).to_contain_text("2, pipelined")
    expect(panel.locator(".timeline-figures")).to_contain_text("gain, observed")


def test_the_first_screen_has_an_image_and_an_answer(site, open_page):
    """Without a click, about the first sample; other tabs ask nothing."""
    page = open_page(site)
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(2)
    (box,), (truth,) = boxes(page), TRUTH["scene.jpg"]["dog"]
    assert box == pytest.approx(truth, abs=0.05)
    image = page.locator("#stage img").bounding_box()
    answer = page.locator(".answer").last.bounding_box()
    assert image["x"] + image["width"] < answer["x"]
    assert answer["y"] + answer["height"] < 720, "the answers lie below the first screen"
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site}#timeline")
    page.reload()
    page.wait_for_selector('#server[data-state="up"]')
    expect(page.locator("#panel-timeline")).to_contain_text("live")
    assert not [url for url in asked if "generate" in url or "pictures" in url]


def test_the_model_s_limits_are_told(site, slow_site, open_page):
    """Of a model that has any."""
    expect(open_page(site).locator("#notice")).to_contain_text("drawings only")
    expect(open_page(slow_site).locator("#notice")).to_be_hidden()


def test_everything_is_done_with_the_keyboard_alone(site, open_page):
    """A sample, a question, its code, another tab."""
    page = open_page(site)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the page's content")).to_be_focused()
    tab_to(page, page.get_by_label("Sample: fruit"))
    page.keyboard.press("Enter")
    expect(page.locator("#picture-state")).to_contain_text(re.compile("fruit.*uploaded"))
    page.keyboard.press("Control+Enter")
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(2)
    assert len(boxes(page)) == 3
    code = page.get_by_role("button", name="Code: Detect strawberry")
    tab_to(page, code)
    page.keyboard.press("Enter")
    expect(page.locator("#code pre")).to_contain_text('DetectTask("strawberry")')
    page.keyboard.press("Escape")
    expect(page.locator("#code")).not_to_be_visible()
    expect(code).to_be_focused()
    page.locator("#tab-ask").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-chat")).to_be_focused()
    expect(page.locator("#panel-chat")).to_be_visible()
    page.keyboard.press("End")
    expect(page.locator("#panel-timeline")).to_be_visible()


def tab_to(page, locator):
    for _ in range(60):
        if locator.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError("the keyboard does not reach it")


CUT_OFF = """
const cut = [];
for (const each of document.querySelectorAll("main *, header *")) {
  const box = each.getBoundingClientRect(), style = getComputedStyle(each);
  if (!box.width || each.closest(".hidden, .skip, .overlay, option, svg")) continue;
  const isOut = box.right > innerWidth + 1 || box.left < -1;
  const isOver = each.scrollWidth > each.clientWidth + 1;
  const isClipped = ["hidden", "clip"].includes(style.overflowX) && isOver;
  if ((isOut && !each.closest(".wide")) || isClipped) cut.push(each.outerHTML.slice(0, 120));
}
return cut;
"""


@pytest.mark.parametrize("width", [360, 390])
@pytest.mark.parametrize("tab", TABS)
def test_nothing_is_cut_off_on_a_phone(site, open_page, tab, width):
    """With answers, a running session or a timeline, and with the options unfolded."""
    page = open_page(f"{site}#{tab}", viewport={"width": width, "height": 844})
    if tab == "ask":
        expect(page.locator('.answer[aria-busy="false"]')).to_have_count(2)
        for summary in page.locator("#panel-ask summary").all():
            summary.click()
    elif tab == "chat":
        page.get_by_label("Message").fill("Why?")
        page.keyboard.press("Enter")
        expect(page.locator(".said .times")).to_have_count(1)
    elif tab == "session":
        start_session(page)
        page.wait_for_selector("#panel-session rect.now", state="attached")
    else:
        page.get_by_role("button", name="Run a sample request").click()
        expect(page.locator("#panel-timeline canvas")).to_be_visible()
        page.get_by_text("What these figures mean").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(f"() => {{{CUT_OFF}}}") == []


def test_the_theme_is_chosen_and_kept(site, open_page):
    """Over the system's, and after a reload."""
    page = open_page(site, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme-name")).to_have_text("dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.locator("#theme-name")).to_have_text("dark")
    assert page.evaluate(ground) == dark


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core of npm: make test-web")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(site, open_page, scheme):
    """On each tab, with answers, and in the dialog; axe is let in past the page's policies."""
    page = open_page(site, color_scheme=scheme, bypass_csp=True)
    page.add_script_tag(path=AXE)
    choose(page, "scene.jpg")
    ask(page, ("detect", "dog"), ("detect", "cat"), ("caption", "short"))
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(3)
    for summary in page.locator("#panel-ask summary").all():
        summary.click()
    assert faults(page) == []
    page.fill("#adapter", "absent")
    page.click("#questions button[type=submit]")
    expect(page.locator(".answer .failure")).to_have_count(1)
    page.fill("#seed", "none")
    page.click("#questions button[type=submit]")
    expect(page.locator("#problem")).to_be_visible()
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert faults(page) == [], tab
    page.get_by_role("button", name="Run a sample request").click()
    expect(page.locator("#panel-timeline canvas")).to_be_visible()
    page.get_by_text("What these figures mean").click()
    assert faults(page) == []
    page.click("#tab-session")
    start_session(page)
    page.wait_for_selector("#panel-session rect.now", state="attached")
    assert faults(page) == []
    page.locator("#panel-session").get_by_role("button", name="Stop").click()
    page.click("#tab-ask")
    page.locator(".answer").first.get_by_role("button", name="Code").click()
    expect(page.locator("#code pre")).to_be_visible()
    assert faults(page) == []


def faults(page):
    """Each rule that is broken, with the elements that break it."""
    page.wait_for_timeout(400)  # a colour is judged after it has appeared
    found = page.evaluate("axe.run()")["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
