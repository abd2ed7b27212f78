"""Two models on one server: with one prefix, as a fleet has it that nobody has configured."""

from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing import redis_servers
from kvtide.testing.tier_drive import DrivenTier
from tests.tiers.redis_place import PROGRAMS, driven, part_names
from tests.tiers.two_models import check_apart


@pytest.mark.parametrize("program", PROGRAMS)
def test_another_model_neither_finds_nor_harms_anything(tmp_path: Path, program: str) -> None:
    with (
        redis_servers.running(program, tmp_path / "server") as server,
        driven(server.port) as here,
        driven(server.port) as there,
    ):

        def damage(_: DrivenTier, record: Record) -> None:
            server.ask(b"SETRANGE", part_names(server, record)[0], b"5000", b"damaged")

        check_apart(here, there, lambda _: None, damage)
