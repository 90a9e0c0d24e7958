"""`legato calibrate`, and the options that confidences have."""

from __future__ import annotations

import json

import pytest
from grpc import StatusCode
from legato.v1 import geometry_pb2, inference_pb2, task_pb2
from legato_client.calibration import scored
from legato_client.calibration.fit import Fit

from tests.clients.python.fake_server import failure, retry_info

IMAGES = 30


@pytest.fixture
def folder(tmp_path):
    """Images of one cat each, a dog in the last."""
    box = [20, 20, 60, 60]
    document = {
        "images": [
            {"id": n, "file_name": "a.png", "width": 100, "height": 100} for n in range(IMAGES)
        ],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 1, "bbox": box} for n in range(IMAGES)
        ]
        + [{"id": IMAGES, "image_id": IMAGES - 1, "category_id": 2, "bbox": box}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(document))
    (tmp_path / "a.png").write_bytes(b"pixels that the scripted server does not look at")
    return tmp_path


def answers(shift, *, in_place=True):
    """For each image a sure cat, in its place if `in_place`, and an unsure dog elsewhere."""
    for _ in range(IMAGES):
        response = inference_pb2.RunTasksResponse()
        for sure in (0.9, 0.6):
            left = 0.2 if in_place and sure == 0.9 else 0.2 + shift
            box = geometry_pb2.Box(x_min=left, y_min=0.2, x_max=left + 0.6, y_max=0.8)
            found = geometry_pb2.DetectedObject(box=box, label="?")
            response.results.add(detect=task_pb2.DetectResult(objects=[found]))
            tokens = response.tokens.add().tokens
            for share in (sure, 1.0, 1.0):
                certainty = inference_pb2.TokenCertainty(existence=share, concentration=1.0)
                tokens.add(token_id=5, certainty=certainty)
            tokens.add(token_id=0)
        yield response


def test_a_fit_is_written(legato, folder, server):
    """The file is what the engine reads; each category of an image was asked for once."""
    server.script["RunTasks"].extend(answers(0.5))
    output = folder / "confidence.json"
    code, out, _ = legato(
        "calibrate", str(folder), "--skills", "detect", "--output", str(output), "--name", "cats",
        "--parallel", "1", "--json",
    )  # fmt: skip
    assert code == 0
    written = json.loads(output.read_text())
    assert written["fitted_on"] == f"cats, {IMAGES} images"
    fitted = Fit(**written["skills"]["detect"])
    assert fitted(0.9) > 0.9 > fitted(0.6)
    (row,) = json.loads(out)["skills"]
    assert (row["objects"], row["right"]) == (2 * IMAGES, IMAGES)
    asked = server.last("RunTasks")
    assert {task.detect.object for task in asked.tasks} == {"cat", "dog"}
    assert asked.options.top_logprobs == 0
    assert asked.options.HasField("top_logprobs")


@pytest.mark.parametrize("helps", [True, False])
def test_only_a_fit_that_helps_elsewhere_is_written(legato, folder, server, helps):
    """What `--test` shows decides; the objects of both folders are kept as they were found."""
    server.script["RunTasks"].extend([*answers(0.5, in_place=helps), *answers(0.5)])
    output, kept = folder / "confidence.json", folder / "objects.jsonl"
    code, out, err = legato(
        "calibrate", str(folder), "--test", str(folder), "--skills", "detect", "--output",
        str(output), "--objects", str(kept), "--parallel", "1", "--json",
    )  # fmt: skip
    assert code == (0 if helps else 1)
    assert output.exists() is helps
    if helps:
        (row,) = json.loads(out)["skills"]
        assert row["written"]
        assert row["ece_after"] + 2 * row["gain_error"] < row["ece_before"]
    else:
        assert "no fit betters the confidences" in err
    found = {name: scored.read(kept, name) for name in ("fit", "test")}
    assert [len(some) for some in found.values()] == [2 * IMAGES, 2 * IMAGES]
    assert sum(each.right for each in found["test"]) == IMAGES
    sure = found["fit"][0]
    assert [near for _, near in sure.certainties] == [1.0] * 3
    assert sure.score == pytest.approx(0.9)


def test_a_full_queue_is_asked_again(legato, folder, server):
    """Tasks that were refused for it are asked once more, and only those."""
    first, *rest = answers(0.5)
    late = inference_pb2.RunTasksResponse(results=first.results[1:], tokens=first.tokens[1:])
    refusal = failure(StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(0.001)).status()
    first.results[1].error.CopyFrom(refusal)
    del first.tokens[1].tokens[:]
    server.script["RunTasks"].extend([first, late, *rest])
    output = folder / "confidence.json"
    code, *_ = legato(
        "calibrate", str(folder), "--skills", "detect", "--output", str(output), "--parallel", "1"
    )
    assert code == 0
    assert server.count("RunTasks") == IMAGES + 1
    assert Fit(**json.loads(output.read_text())["skills"]["detect"])(0.9) > 0.9


def test_too_few_objects(legato, folder, server):
    """A fit of a handful of objects is refused with what to do; no file is written."""
    empty = inference_pb2.RunTasksResponse(
        results=[task_pb2.TaskResult(detect=task_pb2.DetectResult())] * 2
    )
    server.script["RunTasks"].extend([empty] * IMAGES)
    output = folder / "confidence.json"
    code, _, err = legato(
        "calibrate", str(folder), "--skills", "detect", "--output", str(output)
    )  # fmt: skip
    assert code == 1
    assert "0 objects were found by detect; a fit needs 50" in err
    assert not output.exists()


@pytest.mark.parametrize("broken", ["labels", "picture"])
def test_what_cannot_be_read(legato, folder, server, broken):
    """A missing file is named."""
    gone = folder / ("annotations.json" if broken == "labels" else "a.png")
    gone.unlink()
    code, _, err = legato("calibrate", str(folder), "--output", str(folder / "out.json"))
    assert code != 0
    assert gone.name in err


def test_failures_of_the_server(legato, folder, server):
    """They end the command with their own exit code."""
    lost = failure(StatusCode.UNAVAILABLE, "ENGINE_LOST")
    server.script["RunTasks"].extend([lost] * IMAGES)
    assert legato("calibrate", str(folder), "--output", str(folder / "out.json"))[0] == 4


def test_servers_without_certainties(legato, folder):
    """Objects of which nothing is told cannot be calibrated, and the command says so."""
    code, _, err = legato("calibrate", str(folder), "--output", str(folder / "out.json"))
    assert code == 1
    assert "older than this client" in err


@pytest.mark.parametrize("command", ["detect", "point"])
def test_filter_and_order_are_sent(legato, image, server, command):
    """And nothing is sent where nothing was asked for."""
    assert legato(command, image, "cat", "--min-confidence", "0.5", "--order", "confidence")[0] == 0
    task = getattr(server.last("Generate").task, command)
    assert (task.min_confidence, task.order) == (0.5, task_pb2.OBJECT_ORDER_CONFIDENCE)
    assert legato(command, image, "cat")[0] == 0
    task = getattr(server.last("Generate").task, command)
    assert not task.HasField("min_confidence")
    assert task.order == task_pb2.OBJECT_ORDER_UNSPECIFIED
    assert legato(command, image, "cat", "--min-confidence", "1.5")[0] == 2
