"""What a scrape says."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Scrape:
    """Parsed metrics."""

    def __init__(self, text: str, *, openmetrics: bool = False) -> None:
        parse: Any = parse_openmetrics if openmetrics else text_string_to_metric_families
        self.families = list(parse(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Names of all samples."""
        return {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples with this name and these labels."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)


async def get(address: str, path: str = "/metrics", accept: str = "", method: str = "GET") -> bytes:
    """The whole response of the HTTP listener."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\n\r\n"
    writer.write(head.encode())
    try:
        return await reader.read()
    finally:
        writer.close()


async def scrape(address: str, accept: str = "") -> Scrape:
    """Scrape over HTTP."""
    response = await get(address, accept=accept)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    return Scrape(body.decode(), openmetrics="openmetrics" in accept)
