"""Both ends of the sockets between service and engine, in one process."""

import asyncio
import os

import pytest
from legato_engine.messages import Abort, Loading
from legato_engine.transport import CommandReceiver, ReportSender, ServiceLink


def loading(index, size=1):
    """A report that can be told from others."""
    return Loading(stage="x" * size, fraction=float(index))


async def arrived(reports, count):
    """Wait until so many reports came."""
    while len(reports) < count:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


async def all_sent(sender):
    """Flush until everything left, while the loop reads."""
    while not sender.flush():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


async def test_commands_from_before_the_engine_came():
    """Commands sent to an engine that is not there yet reach it, in order."""
    link = ServiceLink(lambda report: None)
    sent = [Abort(request_id=f"r{i}") for i in range(3)]
    for command in sent[:2]:
        link.send(command)
    wake = os.eventfd(0)
    commands = CommandReceiver(link.endpoint, wake)
    await asyncio.sleep(0.01)
    link.send(sent[2])
    received: list[object] = []
    while len(received) < 3:
        await asyncio.sleep(0)  # the link sends at the end of the turn
        commands.wait(1000)
        received += commands.receive()
    assert received == sent
    commands.close()
    link.close()
    os.close(wake)


async def test_a_backlog_of_commands_leaves_when_there_is_room():
    """Commands that the socket did not take follow once the engine reads again."""
    link = ServiceLink(lambda report: None)
    wake = os.eventfd(0)
    commands = CommandReceiver(link.endpoint, wake)
    await asyncio.sleep(0.01)
    sent = [Abort(request_id=str(i) * 50_000) for i in range(10)]
    for command in sent:
        link.send(command)
    received: list[object] = []
    while len(received) < len(sent):
        received += commands.receive()
        await asyncio.sleep(0)
    assert received == sent
    commands.close()
    link.close()
    os.close(wake)


async def test_a_backlog_of_reports_leaves_in_order():
    """A sender never blocks; what the socket did not take follows with later flushes."""
    reports: list[object] = []
    link = ServiceLink(reports.append)
    sender = ReportSender(link.endpoint)
    sent = [loading(i, size=100_000) for i in range(20)]
    for report in sent:
        sender.send(report)
    assert not sender.flush()
    await all_sent(sender)
    await arrived(reports, len(sent))
    assert reports == sent
    sender.close(0)
    link.close()


async def test_posted_reports_leave_with_the_flush():
    """What is posted is told with the next flush and not before."""
    reports: list[object] = []
    link = ServiceLink(reports.append)
    sender = ReportSender(link.endpoint)
    sender.post(loading(0))
    await asyncio.sleep(0.01)
    assert reports == []
    sender.send(loading(1))
    await arrived(reports, 2)
    assert reports == [loading(0), loading(1)]
    sender.close(0)
    link.close()


async def test_closing_delivers_what_has_arrived():
    """The last words of an engine that is gone are heard, also of a connection not yet accepted."""
    reports: list[object] = []
    link = ServiceLink(reports.append)
    sender = ReportSender(link.endpoint)
    sender.send(loading(1))
    sender.close(0)
    link.close()
    assert reports == [loading(1)]
    with pytest.raises(FileNotFoundError):
        ReportSender(link.endpoint)


async def test_room_for_unsent_reports_wakes_the_engine():
    """An idle engine with unsent reports is woken once the service has read some."""
    reports: list[object] = []
    link = ServiceLink(reports.append)
    wake = os.eventfd(0)
    commands = CommandReceiver(link.endpoint, wake)
    sender = ReportSender(link.endpoint)
    count = 0
    while sender.flush():
        sender.post(loading(count, size=10_000))
        count += 1
    waiting = asyncio.create_task(asyncio.to_thread(commands.wait, None, sender))
    await waiting  # the loop reads meanwhile, which makes the room
    await all_sent(sender)
    await arrived(reports, count)
    assert reports == [loading(i, size=10_000) for i in range(count)]
    commands.close()
    sender.close(0)
    link.close()
    os.close(wake)


async def test_a_service_that_is_gone_does_not_spin_the_engine():
    """After the service closed, receiving gives nothing and waiting waits."""
    link = ServiceLink(lambda report: None)
    wake = os.eventfd(0)
    commands = CommandReceiver(link.endpoint, wake)
    sender = ReportSender(link.endpoint)
    await asyncio.sleep(0.01)
    link.close()
    assert commands.receive() == []
    os.eventfd_write(wake, 1)
    commands.wait(None)  # only the descriptor is left to wake it
    assert commands.receive() == []
    sender.send(loading(0))
    assert sender.flush()
    commands.close()
    sender.close(0)
    os.close(wake)
