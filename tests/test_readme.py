"""The README's Python runs as it stands, in a directory where the demo has run."""

import re
import shutil
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_runs(block, copy_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(copy_run / "finetune" / "model", "runs/demo/nmla/model")
    exec(compile(block, str(README), "exec"), {})
    assert bool(capsys.readouterr().out) == ("print(" in block)


def test_there_is_python_to_run():
    assert len(BLOCKS) >= 2


def test_tree_names_every_file():
    """The tree in the README has a line for each source file, and none for a file that is gone."""
    root = README.parent
    text = README.read_text(encoding="utf-8")
    for path in (root / "src" / "nmla").rglob("*.py"):
        if path.name != "__init__.py":
            assert f"{path.name} " in text, f"{path.relative_to(root)} is not in the README's tree"
    tree = re.search(r"```text\nsrc/nmla/\n(.*?)```", text, flags=re.DOTALL)[1]
    for name in re.findall(r"^\s+(\w+\.py) ", tree, flags=re.MULTILINE):
        assert list((root / "src" / "nmla").rglob(name)), f"{name} is in the README's tree, but gone"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (README.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted((README.parent / "docs" / "results").glob("*.md")), ids=lambda page: page.stem)
def test_results_are_those_of_their_pages(page):
    """A page is what `nmla reproduce` writes, and RESULTS.md shows tables of it as they are."""
    whole = page.read_text(encoding="utf-8")
    assert f"nmla reproduce recipes/tables/{page.stem}.yaml" in whole
    results = (README.parent / "RESULTS.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", results, flags=re.MULTILINE):
        if f"(docs/results/{page.name})" in section:
            for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
                assert table in whole
