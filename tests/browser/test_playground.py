"""The playground as a person uses it, in Chromium."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest

from tests.e2e.server import until

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
    page.set_input_files("#file", SAMPLES / name)
    expect(page.locator("#picture-state")).to_contain_text("held by the server")


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
    expect(page.locator("#picture-state")).to_contain_text("held by the server")
    page.click(".more summary")
    page.fill("#max-tokens", "200")
    ask(page, ("caption", "long"))
    expect(page.locator('.answer[aria-busy="true"] .words')).to_contain_text("nobody looked at")
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(1)
    expect(page.locator(".answer .status")).to_have_text("cut at the most tokens")


def test_unsure_objects_are_left_out_and_the_surest_comes_first(slow_site, open_page):
    """As the fields beside the task say; the code says it too, and tokens are listed on demand."""
    page = open_page(slow_site)
    choose(page, "scene.jpg")
    page.click(".more summary")
    page.get_by_label("Alternatives to each token").fill("2")
    page.locator(".task .icon").last.click()
    page.locator(".task .icon").last.click()
    row = page.locator(".task").last
    row.get_by_label("Least confidence, 0 to 1").fill("0.5")
    row.get_by_label("surest first").check()
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
    page.keyboard.press("Escape")
    row.get_by_label("Least confidence, 0 to 1").fill("much")
    page.click("#questions button[type=submit]")
    expect(page.locator(".answer .failure")).to_contain_text("min_confidence")


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
    told = page.locator("#panel-session .look .help")
    expect(told).to_contain_text("cannot detect objects in pictures")
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
    page.click(".more summary")
    page.fill("#max-tokens", "7000")
    ask(page, ("query", "why?"), ("query", "how?"))
    expect(page.locator(".answer .words").first).to_contain_text("nobody")
    until(lambda: slow.holds(running=2, waiting=0))
    page.locator(".answer").first.get_by_role("button", name="Stop").click()
    until(lambda: slow.holds(running=1, waiting=0))
    page.click("#stop")
    expect(page.locator(".answer .status")).to_have_text(["stopped", "stopped"])
    until(lambda: slow.holds(running=0, waiting=0))


def test_an_error_is_shown_in_words_with_its_field(site, open_page):
    """Also one of a file that is no image; what was chosen before stays."""
    page = open_page(site)
    choose(page, "scene.jpg")
    ask(page, ("detect", ""))
    failure = page.locator(".answer .failure")
    expect(failure).to_contain_text("INVALID_FIELD")
    expect(failure.locator("code").first).to_contain_text("object")
    expect(failure).to_contain_text("Change the named field and ask again.")
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
    place = page.get_by_label("Place, two or four numbers from 0 to 1")
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


def test_a_session_answers_frames(site, open_page):
    """Of the bundled scene, with ages, counts and boxes; then of a webcam; then it stops."""
    page = open_page(site)
    page.click("#tab-session")
    start = page.locator("#panel-session button[type=submit]")
    page.get_by_label("Oldest frame answered, seconds").fill("")
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
        expect(page.locator("#panel-session .look .help")).to_have_text("stopped")


def test_a_session_follows_objects(slow_site, open_page):
    """Labels name their tracks, the same from frame to frame, unless that is switched off."""
    page = open_page(slow_site)
    page.click("#tab-session")
    page.get_by_label("Oldest frame answered, seconds").fill("")
    page.get_by_label("Detect, separated by commas").fill("dog")
    page.locator("#panel-session").get_by_label("Least confidence, 0 to 1").fill("0.9")
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
    page.get_by_label("follow objects from frame to frame").uncheck()
    start.click()
    expect(label.first).to_contain_text("dog 94%")
    stop.click()


def test_the_timeline_lives(site, open_page):
    """Its stream is open, and launches come."""
    page = open_page(site)
    choose(page, "scene.jpg")
    page.click("#tab-timeline")
    expect(page.locator("#panel-timeline canvas")).to_be_visible()
    expect(page.locator("#panel-timeline")).to_contain_text("live")


def test_everything_is_done_with_the_keyboard_alone(site, open_page):
    """A sample, a question, its code, another tab."""
    page = open_page(site)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the page's content")).to_be_focused()
    tab_to(page, page.get_by_label("Sample: fruit"))
    page.keyboard.press("Enter")
    expect(page.locator("#picture-state")).to_contain_text("held by the server")
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


@pytest.mark.parametrize("tab", TABS)
def test_a_phone_needs_no_sideways_scrolling(site, open_page, tab):
    """At 360 pixels."""
    page = open_page(f"{site}#{tab}", viewport=NARROW)
    expect(page.locator(f"#panel-{tab}")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


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
    ask(page, ("detect", "dog"), ("detect", ""), ("caption", "short"))
    expect(page.locator('.answer[aria-busy="false"]')).to_have_count(3)
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert faults(page) == [], tab
    page.click("#tab-ask")
    page.locator(".answer").first.get_by_role("button", name="Code").click()
    expect(page.locator("#code pre")).to_be_visible()
    assert faults(page) == []


def faults(page):
    """Each rule that is broken, with the elements that break it."""
    page.wait_for_timeout(400)  # a colour is judged after it has appeared
    found = page.evaluate("axe.run()")["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
