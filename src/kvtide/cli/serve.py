"""`kvtide serve`: a node in the foreground.

It logs to standard error, which belongs to somebody else: a terminal that was stopped, a pipe that
nobody reads. So a thread writes, and what it cannot write waits in a bounded queue, then is
dropped; the node's loop never waits for it, nor does its end for longer than a second.
"""

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import time
from collections.abc import Iterator

import click

from kvtide.node.build import Way
from kvtide.node.main import LOG_FORMAT, NodeRunning, become_node

LINES_WAITING_MAX = 1_000
"""Of what nobody reads; later ones are dropped."""
FLUSH_S_MAX = 1.0
"""How long the end waits for somebody to read what is left."""
POLL_S = 0.01


class _Lines(logging.handlers.QueueHandler):
    """Hands lines to the thread that writes them."""

    def enqueue(self, record: logging.LogRecord) -> None:
        """Without waiting."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Write what kvtide logs, and at the end what is left, if somebody takes it."""
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(LINES_WAITING_MAX)
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(logging.Formatter(LOG_FORMAT))
    lines = _Lines(waiting)
    logging.handlers.QueueListener(waiting, writer).start()
    logger = logging.getLogger("kvtide")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        until_s = time.monotonic() + FLUSH_S_MAX
        while waiting.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(POLL_S)


@click.command()
def command() -> None:
    """Run a node here, until Ctrl-C or SIGTERM.

    For service managers and containers; without it, the first engine starts a node by itself. It
    logs to standard error, where it listens, too, and stays when no engine is there, unless
    linger_s is set.
    """
    with _logging_to_stderr():
        try:
            code = become_node(Way.FOREGROUND)
        except NodeRunning as error:
            raise NodeRunning(
                f"{error}: `kvtide status` shows it, `kvtide stop` ends it"
            ) from None
    os._exit(code)  # as in kvtide.node.main: nothing that hangs may hold up the end
