"""Diagrams of the documents: processes, a session, the pipeline, the errors of a call."""

from __future__ import annotations

from benchmarks.publish.charts import BLUE, FAINT, GREEN, GREY, ORANGE, RED, VIOLET, Canvas


def draw() -> dict[str, str]:
    """Return the SVG of each diagram by its name."""
    return {
        "processes": processes(),
        "session": session(),
        "pipeline": pipeline(),
        "errors": errors(),
    }


def processes() -> str:
    """Clients, service processes and the engine process, and what passes between them."""
    canvas = Canvas(860, 330, "Processes of Legato")
    for index, (name, note) in enumerate(
        (("Python client", "or legato CLI"), ("Go client", ""), ("robot", "session of frames"))
    ):
        canvas.box((16, 40 + 84 * index), (130, 60), [name, *([note] if note else [])], GREEN)
        canvas.arrow([(146, 70 + 84 * index), (236, 150)])
    canvas.text((170, 76), "gRPC", size=11.5)
    canvas.frame((240, 20), (210, 290), "service process, 1 to N")
    canvas.box((256, 54), (178, 54), ["RPC middleware", "ids, deadlines, errors"], BLUE)
    canvas.box((256, 122), (178, 54), ["servicer, sessions", "protobuf to core types"], BLUE)
    canvas.box((256, 190), (178, 54), ["engine client", "Submit, Abort; restart"], BLUE)
    canvas.text((345, 286), "never imports torch", size=11.5, anchor="middle", color=FAINT)
    canvas.frame((600, 20), (244, 290), "engine process, 1 per device")
    canvas.box((616, 54), (212, 44), ["preprocessor threads", "decode, hash images"], ORANGE)
    canvas.box((616, 108), (212, 44), ["scheduler", "plans, two launches"], ORANGE)
    canvas.box((616, 162), (212, 44), ["runtime, models, kernels", "device streams"], ORANGE)
    canvas.box((616, 216), (212, 44), ["KV cache", "pages, prefix tree"], ORANGE)
    canvas.text((722, 286), "knows no gRPC", size=11.5, anchor="middle", color=FAINT)
    canvas.arrow([(450, 206), (600, 140)], "")
    canvas.text((525, 148), "local socket", size=11.5, anchor="middle")
    canvas.arrow([(600, 180), (450, 232)])
    canvas.text((525, 250), "outputs, heartbeats", size=11.5, anchor="middle")
    canvas.box((476, 46), (98, 44), ["/dev/shm", "image bytes"], GREY)
    canvas.arrow([(450, 78), (476, 72)])
    canvas.arrow([(574, 70), (616, 74)])
    return canvas.finished()


def session() -> str:
    """Frames, credits and drops of a session over time."""
    canvas = Canvas(860, 400, "A session: frames, credits, drops")
    camera, server, engine = 120, 430, 720
    for x, name in ((camera, "robot"), (server, "session"), (engine, "engine")):
        canvas.box((x - 60, 14), (120, 30), [name], GREY)
        canvas.line([(x, 44), (x, 384)], FAINT, dashed=True)
    steps = (
        (70, camera, server, "open: tasks, policy, max_frame_age"),
        (96, server, camera, "opened: frame_credits 2"),
        (126, camera, server, "frame 1"),
        (140, server, engine, "its tasks, one image"),
        (160, server, camera, "accepted 1: frame_credits 2"),
        (190, camera, server, "frame 2 (waits: frame 1 runs)"),
        (216, camera, server, "frame 3 (newer)"),
        (240, server, camera, "dropped 2: SUPERSEDED by 3"),
        (268, engine, server, "results of frame 1"),
        (284, server, camera, "results of frame 1"),
        (302, server, engine, "frame 3"),
        (328, engine, server, "results of frame 3"),
        (350, server, camera, "results of 3, or dropped: TOO_OLD"),
    )
    for y, start, end, words in steps:
        inset = 4 if end > start else -4
        canvas.arrow([(start, y), (end - inset, y)], words)
    canvas.text((16, 392), "Every frame ends in its results or in one FrameDropped.", color=FAINT)
    return canvas.finished()


def pipeline() -> str:
    """Two launches in flight beside the blocking loop."""
    canvas = Canvas(860, 340, "Two launches in flight and the blocking loop")
    left, step, prepare = 130, 150, 50
    canvas.text((16, 26), "blocking loop (--pipeline-depth 1)", bold=True)
    canvas.text((16, 62), "host")
    canvas.text((16, 96), "device")
    x = float(left)
    for index in range(3):
        canvas.bar((x, 48), (prepare, 22), ORANGE, f"plan {index + 1}")
        canvas.bar((x + prepare, 82), (step, 22), BLUE, f"step {index + 1}")
        canvas.bar((x + prepare + step, 48), (30, 22), GREEN, "read")
        x += prepare + step + 30
        canvas.bar((x - 30, 82), (30 + prepare * (index < 2), 22), RED, "idle")
    canvas.text((16, 156), "two launches in flight", bold=True)
    for row, words in enumerate(("host", "slot 1", "slot 2")):
        canvas.text((16, 194 + 34 * row), words)
    canvas.bar((left, 180), (prepare, 22), ORANGE, "plan 1")
    x = left + prepare
    for index in range(4):
        slot = index % 2
        later = 34 * (index > 0)
        canvas.bar((x + later + 4, 180), (prepare, 22), ORANGE, f"plan {index + 2}")
        canvas.bar((x, 214 + 34 * slot), (step, 22), BLUE, f"step {index + 1}")
        if index:
            canvas.bar((x + 4, 180), (30, 22), GREEN, f"c {index}")
        x += step
    canvas.text(
        (16, 306), "While step 1 runs, the host plans step 2 and enqueues its forward pass."
    )
    canvas.text(
        (16, 326),
        "The commit of step 1 (c 1) comes before step 2 is sampled, and frees slot 1 for step 3.",
    )
    return canvas.finished()


def errors() -> str:
    """Draw a client's reactions to failed calls."""
    canvas = Canvas(860, 420, "What to do with a failed call")
    rows = (
        ("UNAVAILABLE", "starting, lost, draining", "retry here or elsewhere (clients do)", GREEN),
        ("RESOURCE_EXHAUSTED", "queue full, quota", "wait retry_after seconds, then retry", GREEN),
        ("DEADLINE_EXCEEDED", "too slow for the deadline", "allow more time, or send less", ORANGE),
        ("ABORTED", "slow reader, torn frame", "read faster, or send it again", ORANGE),
        ("NOT_FOUND", "image, model, adapter", "upload the image again, fix the name", ORANGE),
        ("INVALID_ARGUMENT", "field, image, prompt", "change the request; never retry", RED),
        ("FAILED_PRECONDITION", "task or shared memory", "use another model, or send bytes", RED),
        ("INTERNAL", "a defect", "report it with the request id", VIOLET),
    )
    canvas.box((16, 180), (130, 56), ["call failed", "gRPC status"], GREY)
    for index, (status, when, action, color) in enumerate(rows):
        y = 16 + 50 * index
        canvas.line([(146, 208), (176, 208), (176, y + 20), (196, y + 20)])
        canvas.box((196, y), (290, 40), [status, when], color)
        canvas.arrow([(486, y + 20), (524, y + 20)])
        canvas.box((526, y), (318, 40), [action], color)
    return canvas.finished()
