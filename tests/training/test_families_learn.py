"""Every model family learns the generated language: its sentences have one valid translation, told word by word."""

import pytest
import torch

from nmla.config import parse_recipe
from nmla.data.corpus import Corpus
from nmla.data.prepare import prepare
from nmla.data.synthetic import ONE_MODE, generate
from nmla.decoding.translator import Translator
from nmla.training.loop import train

RECIPE = """
model: {d_model: 64, heads: 4, feed_forward: 128, encoder_layers: 1, decoder_layers: 2, upsample: 2}
train: {learning_rate: 4.0e-3, warmup_steps: 50, max_tokens: 1024, dropout: 0.0}
"""
TRAIN, VALID, TEST = 4000, 20, 200


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """The directory of a corpus, and the sentences of a test set."""
    directory = tmp_path_factory.mktemp("language")
    sentences = generate(ONE_MODE, TRAIN + VALID + TEST, seed=1)
    for name, part in (("train", sentences[:TRAIN]), ("valid", sentences[TRAIN : TRAIN + VALID])):
        (directory / f"{name}.source").write_text("".join(f"{sentence.source}\n" for sentence in part))
        (directory / f"{name}.target").write_text("".join(f"{sentence.target}\n" for sentence in part))
    pairs = {name: [(directory / f"{name}.source", directory / f"{name}.target")] for name in ("train", "valid")}
    prepare(**pairs, output=directory / "corpus", vocab_size=280)
    return directory / "corpus", sentences[TRAIN + VALID :]


@pytest.mark.parametrize(
    ("family", "loss", "steps", "learned", "settings"),
    [
        ("autoregressive", "cross_entropy", 120, 0.95, ("train.label_smoothing=0.1",)),
        ("fixed_length", "cross_entropy", 120, 0.95, ()),
        ("fixed_length", "cross_entropy", 120, 0.95, ("train.glance_from=0.5", "train.glance_to=0.3")),
        ("ctc", "ctc", 200, 0.6, ()),
        ("ctc", "ctc", 250, 0.6, ("train.glance_from=0.5", "train.glance_to=0.3")),
        ("sctc", "sctc", 350, 0.4, ("model.upsample=1", "train.learning_rate=2e-3")),
    ],
)
def test_family_learns_the_generated_language(language, tmp_path, family, loss, steps, learned, settings):
    corpus, test = language
    recipe = parse_recipe(
        RECIPE,
        [
            f"data.corpus={corpus}",
            f"output={tmp_path}",
            f"model.family={family}",
            f"train.loss={loss}",
            f"train.steps={steps}",
            *settings,
        ],
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on matrices this small two are slower, and the figures would depend on their number
    try:
        translator = Translator.load(train(recipe))
    finally:
        torch.set_num_threads(threads)
    outputs = translator.translate_batch([sentence.source for sentence in test])
    right = sum(out.text in sentence.valid_targets() for out, sentence in zip(outputs, test, strict=True))
    assert right / len(test) >= learned
    assert Corpus.load(corpus).tokenizer.model == translator.tokenizer.model
