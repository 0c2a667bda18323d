"""The examples of docs/losses.md run, and show what the text says they show."""

import doctest
import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "losses.md"


def test_examples():
    failed, tried = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert tried
    assert not failed


def test_acoustic_model():
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    after_ctc, after_ngram = names["f1"]
    assert after_ctc > 0.3
    assert after_ngram > after_ctc + 0.05
