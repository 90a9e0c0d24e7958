"""Asks about every picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent import futures

from legato_client._client import Client
from legato_client._errors import LegatoError
from legato_client._values.tasks import Options, Task
from legato_client.batch import lines
from legato_client.batch.asking import PATIENCE, Asking, is_of_the_picture
from legato_client.batch.output import Output
from legato_client.batch.sources import Picture


class Run:
    """Asks about pictures, `parallel` at a time, and appends their lines to `output`.

    What is wrong with a picture is its line. What any other picture would meet too ends the run:
    those that were asked by then still get their lines, the rest is left to a later run.
    """

    def __init__(
        self,
        client: Client,
        tasks: Mapping[str, Task],
        options: Options,
        output: Output,
        *,
        parallel: int,
        patience: float = PATIENCE,
    ) -> None:
        self._client = client
        self._names = tuple(tasks)
        self._asking = Asking(client, tuple(tasks.values()), options, patience)
        self._output = output
        self._parallel = parallel

    def perform(self, pictures: Iterable[Picture], tell: Callable[[], None]) -> None:
        """Ask about those that the output lacks; `tell` is called after each, by any thread.

        Raises:
            LegatoError: the server refuses, whatever the picture.
            OSError: the output cannot be written, or `pictures` not read.
        """
        pool = futures.ThreadPoolExecutor(self._parallel, "legato-run")
        running: set[futures.Future[None]] = set()
        try:
            for picture in pictures:
                if picture.key in self._output.done:
                    continue
                running.add(pool.submit(self._ask_and_tell, picture, tell))
                if len(running) > self._parallel:  # one is ready when a thread is
                    done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                    _raise_first(done)
            _raise_first(futures.as_completed(running))
        except KeyboardInterrupt:
            self._client.close()  # ends the calls
            raise
        finally:
            self._asking.end()
            pool.shutdown(cancel_futures=True)

    def _ask_and_tell(self, picture: Picture, tell: Callable[[], None]) -> None:
        if not self._asking.has_ended:
            self._output.append(self._line(picture))
            tell()

    def _line(self, picture: Picture) -> lines.Line:
        try:
            image = picture.read()
        except (OSError, ValueError) as error:
            return lines.unreadable(picture, error)
        try:
            outcomes = self._asking.ask(image)
        except LegatoError as error:
            if not is_of_the_picture(error):
                raise
            return lines.failed(picture, error)
        return lines.answered(picture, self._names, outcomes)


def _raise_first(done: Iterable[futures.Future[None]]) -> None:
    for each in done:
        each.result()
