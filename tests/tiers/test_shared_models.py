"""Two models in one shared directory."""

from pathlib import Path

from kvtide.core.records import Record
from kvtide.testing.tier_drive import DrivenTier
from tests.tiers.shared_place import driven, file_of, look, shared_of
from tests.tiers.two_models import check_apart


def test_another_model_neither_finds_nor_harms_anything(tmp_path: Path) -> None:
    def damage(node: DrivenTier, record: Record) -> None:
        with file_of(shared_of(node), record).open("r+b") as file:
            file.seek(5000)
            file.write(b"damaged")

    with driven(tmp_path / "kv") as here, driven(tmp_path / "kv") as there:
        check_apart(here, there, look, damage)
