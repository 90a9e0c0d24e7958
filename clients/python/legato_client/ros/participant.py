"""Topics of ROS 2 in DDS: their names, and the promises of readers and writers."""

from __future__ import annotations

import re
from typing import TypeVar

from cyclonedds.core import Policy, Qos, WaitSet
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration

MessageT = TypeVar("MessageT", bound=IdlStruct)

_NAME = re.compile(r"(/[A-Za-z_][A-Za-z0-9_]*)+")
_DEPTH = 10  # messages that a late reader still gets, as in ROS 2 by default

SENSOR_DATA = Qos(
    Policy.Reliability.BestEffort, Policy.Durability.Volatile, Policy.History.KeepLast(1)
)
"""For reading images: writers may be reliable or not, and only the newest image counts."""
DEFAULT = Qos(
    Policy.Reliability.Reliable(duration(milliseconds=100)),
    Policy.Durability.Volatile,
    Policy.History.KeepLast(_DEPTH),
)
LATCHED = Qos(
    Policy.Reliability.Reliable(duration(milliseconds=100)),
    Policy.Durability.TransientLocal,
    Policy.History.KeepLast(1),
)
"""A late subscriber gets the last message too."""


def dds_name(topic: str) -> str:
    """The name in DDS of a topic; ValueError for one that ROS 2 would not take."""
    if not _NAME.fullmatch(topic):
        raise ValueError(f"a topic is /NAME or /NAME/NAME of letters, digits and _, not {topic!r}")
    return f"rt{topic}"


class Participant:
    """In one domain; the environment variable CYCLONEDDS_URI configures it."""

    def __init__(self, domain: int) -> None:
        """DDSException where there is no such domain or no network."""
        self._own = DomainParticipant(domain)

    def waiting(self) -> WaitSet:
        """Waits for what is attached to it."""
        return WaitSet(self._own)

    def reader(self, topic: str, kind: type[MessageT], qos: Qos) -> DataReader[MessageT]:
        return DataReader(self._own, Topic(self._own, dds_name(topic), kind), qos)

    def writer(self, topic: str, kind: type[MessageT], qos: Qos) -> DataWriter[MessageT]:
        return DataWriter(self._own, Topic(self._own, dds_name(topic), kind), qos)
