"""The pages of docs/results come out of their records again, by the commands that their tables tell."""

import lzma
import re
import shlex
import shutil
from pathlib import Path

import pytest

from conftest import CORPORA
from nmla.cli import main

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "results").glob("*.json"))


def unpack(name: str) -> None:
    """Write text/tatoeba.train.en, for instance, as its corpus has it."""
    corpus, rest = name.removeprefix("text/").split(".", 1)
    with lzma.open(CORPORA / f"{corpus}-en-de" / f"{rest}.xz") as packed, Path(name).open("wb") as plain:
        shutil.copyfileobj(packed, plain)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
@pytest.mark.skipif(
    not all((CORPORA / f"{name}-en-de").is_dir() for name in ("multi30k", "tatoeba")),
    reason="needs the corpora in NMLA_CORPORA",
)
def test_page_comes_out_of_its_record(record, tmp_path, monkeypatch, capsys):
    table = f"recipes/tables/{record.stem}.yaml"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", "recipes")
    Path("text").mkdir()
    text = Path(table).read_text(encoding="utf-8")
    for name in sorted({*re.findall(r"text/[\w.]+\.(?:en|de)\b", text)}):
        unpack(name)
    prepares = re.findall(r"^#   nmla (prepare .*)$", text, flags=re.MULTILINE)
    assert prepares
    for prepare in prepares:
        assert main(shlex.split(prepare)) == 0
    assert main(["reproduce", table, "--so-far", "--record", str(record)]) == 0
    capsys.readouterr()
    for ending in ("md", "json", "svg"):
        assert (tmp_path / "runs/tables" / f"{record.stem}.{ending}").read_bytes() == record.with_suffix(
            f".{ending}"
        ).read_bytes(), f"{record.stem}.{ending} is not what its record gives"
