"""A language that a tiny model learns in seconds: copy the digits."""

import os

# Before torch is loaded, and for all processes that tests start: on matrices this small a second thread only waits.
os.environ["OMP_NUM_THREADS"] = "1"

import random
from pathlib import Path

import pytest

from nmla.config import Recipe, parse_recipe
from nmla.data.prepare import prepare

# Real text, which is no part of the project; tests that want it are skipped where there is none.
CORPORA = Path(os.environ.get("NMLA_CORPORA", Path(__file__).parents[2] / "shared" / "data"))

COPY_RECIPE = """
model: {d_model: 64, heads: 2, feed_forward: 128, encoder_layers: 1, decoder_layers: 1, upsample: 3}
train: {steps: 200, learning_rate: 3.0e-3, warmup_steps: 50, max_tokens: 1024, dropout: 0.0, validate_every: 200}
finetune: {loss: ngram, steps: 20, learning_rate: 3.0e-4, warmup_steps: 10, max_tokens: 1024, validate_every: 20}
"""


def write_digits(path: Path, count: int, seed: int) -> Path:
    rng = random.Random(seed)
    lines = (" ".join(rng.choices("0123456789", k=rng.randint(2, 8))) for _ in range(count))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.txt and valid.txt, and a corpus in which source and target are the same."""
    directory = tmp_path_factory.mktemp("digits")
    train = write_digits(directory / "train.txt", 2000, seed=1)
    valid = write_digits(directory / "valid.txt", 100, seed=2)
    digits_corpus(train, valid, directory / "corpus")
    return directory


def digits_corpus(train: Path, valid: Path, output: Path, vocab_size: int = 16) -> None:
    prepare(train=[(train, train)], valid=[(valid, valid)], output=output, vocab_size=vocab_size)


def copy_recipe(digits: Path, output: Path, *overrides: str) -> Recipe:
    return parse_recipe(COPY_RECIPE, [f"data.corpus={digits / 'corpus'}", f"output={output}", *overrides])


@pytest.fixture(scope="session")
def copy_run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of both stages of a training that learns to copy digits."""
    from nmla.training.loop import train

    output = tmp_path_factory.mktemp("copy")
    train(copy_recipe(digits, output))
    return output
