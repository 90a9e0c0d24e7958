"""DimOS's vision-language model interface, answered by a Legato server.

`LegatoVlModel()` takes the place of `MoondreamVlModel()` in skills and agents: the model runs in
its own process, on this machine or another, for all that ask it. DimOS must be installed.
"""

from __future__ import annotations

from typing import Any

from dimos.models.vl.base import VlModel, VlModelConfig
from dimos.msgs.sensor_msgs.Image import Image
from dimos.perception.detection.type.detection2d.bbox import Detection2DBBox
from dimos.perception.detection.type.detection2d.imageDetections2D import ImageDetections2D
from dimos.perception.detection.type.detection2d.point import Detection2DPoint
from legato_client import Client, QueryTask


class LegatoConfig(VlModelConfig):  # type: ignore[misc]  # DimOS is not installed here
    """The server's address; with `auto_resize`, images are made smaller before they are sent."""

    server: str = "127.0.0.1:50051"


class LegatoVlModel(VlModel):  # type: ignore[misc]  # as above
    """A model behind `legato serve`, with calibrated confidences."""

    config: LegatoConfig

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._client = Client(self.config.server)

    def query(self, image: Image, query: str, **_: object) -> str:
        return self._client.query(self._pixels(image), query).answer

    def query_multi(self, image: Image, queries: list[str], **_: object) -> list[str]:
        """Answer several questions about an image, which is encoded once."""
        tasks = [QueryTask(each, task_id=str(number)) for number, each in enumerate(queries)]
        if not tasks:
            return []
        outcomes = self._client.run_tasks(self._pixels(image), tasks)
        return [_result(each).answer for each in outcomes]

    def caption(self, image: Image) -> str:
        return self._client.caption(self._pixels(image)).caption

    def query_detections(self, image: Image, query: str, **more: Any) -> Any:
        found = self._client.detect(
            self._pixels(image), query, max_objects=more.get("max_objects")
        ).objects
        detections = ImageDetections2D(image)
        for number, each in enumerate(found):
            box = each.box
            detection = Detection2DBBox(
                bbox=(
                    box.x_min * image.width,
                    box.y_min * image.height,
                    box.x_max * image.width,
                    box.y_max * image.height,
                ),
                track_id=number,
                class_id=-1,
                confidence=1.0 if each.confidence is None else each.confidence,
                name=each.label,
                ts=image.ts,
                image=image,
            )
            if detection.is_valid():
                detections.detections.append(detection)
        return detections

    def query_points(self, image: Image, query: str, **more: Any) -> Any:
        found = self._client.point(
            self._pixels(image), query, max_objects=more.get("max_objects")
        ).points
        detections = ImageDetections2D(image)
        for number, each in enumerate(found):
            point = Detection2DPoint(
                x=each.point.x * image.width,
                y=each.point.y * image.height,
                name=each.label,
                ts=image.ts,
                image=image,
                track_id=number,
            )
            if point.is_valid():
                detections.detections.append(point)
        return detections

    def start(self) -> None:
        """Check that the server answers. Raises LegatoError."""
        self._client.models()

    def stop(self) -> None:
        self._client.close()

    def _pixels(self, image: Image) -> Any:
        prepared, _ = self._prepare_image(image)  # fractions of it are those of the whole
        return prepared.to_rgb().data


def _result(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
