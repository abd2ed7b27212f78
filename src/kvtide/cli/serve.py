"""`kvtide serve`: a node in the foreground."""

import logging
import os
import sys

import click

from kvtide.node.main import Way, become_node


@click.command(short_help="Run a node here, until Ctrl-C.")
def command() -> None:
    """Run a node here, until Ctrl-C (or SIGTERM).

    For service managers and containers; without it, the first engine starts a node by itself. It
    logs to standard error, its first line says where it listens, and it stays when no engine is
    there, unless linger_s is set.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("kvtide")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        code = become_node(Way.FOREGROUND)
    except BaseException:
        logger.removeHandler(handler)
        raise
    logging.shutdown()
    os._exit(code)  # as in kvtide.node.main: nothing that hangs may hold up the end
