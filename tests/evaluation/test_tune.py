import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import nmla
from nmla.cli import main
from nmla.config import Decoding
from nmla.decoding.lm_train import train_lm
from nmla.decoding.ngram_lm import NgramLM
from nmla.errors import UsageError
from nmla.evaluation.tune import picture, tune


@pytest.fixture(scope="module")
def lines(digits):
    return (digits / "valid.txt").read_text().splitlines()[:30]


@pytest.fixture(scope="module")
def lm(digits, copy_run, tmp_path_factory):
    """A language model that has seen digits, as a file."""
    path = tmp_path_factory.mktemp("lm") / "digits.lm"
    train_lm([digits / "train.txt"], nmla.load(copy_run / "train" / "model").tokenizer, path, order=3)
    return path


def test_the_best_penalty_is_found(copy_run, lines):
    """Of a model that is right as it is, none."""
    translator = nmla.load(copy_run / "train" / "model")
    tried = tune(translator, lines, [lines], penalties=(-30.0, 0.0, 30.0))
    assert tried[0].decoding == Decoding()
    assert tried[0].scores.bleu == max(one.scores.bleu for one in tried)
    assert [one.scores.bleu for one in tried] == sorted((one.scores.bleu for one in tried), reverse=True)


def test_each_setting_is_what_it_is_alone(copy_run, lines, lm):
    translator = nmla.load(copy_run / "train" / "model")
    translator.lm = NgramLM.load(lm, translator.tokenizer)
    grid = [
        Decoding(),
        Decoding(blank_penalty=3.0),
        Decoding(beam_size=5, alpha=0.4, beta=1.0, blank_penalty=1.0),
        Decoding(beam_size=3),
        Decoding(),
    ]
    together = translator.translate_each(["", *lines], grid)
    for settings, texts in zip(grid, together, strict=True):
        translator.decoding = settings
        assert [of.text for of in translator.translate_batch(["", *lines])] == texts


def test_search_is_tuned_with_the_language_model(copy_run, lines, lm):
    translator = nmla.load(copy_run / "train" / "model")
    translator.lm = NgramLM.load(lm, translator.tokenizer)
    tried = tune(translator, lines, [lines], beam_size=4, penalties=(0.0, 1.0), alphas=(0.0, 0.3), betas=(0.0, 1.0))
    assert {one.decoding.alpha for one in tried} == {0.0, 0.3}
    assert {one.decoding.beam_size for one in tried} == {1, 4}
    svg = ElementTree.fromstring(picture(tried))
    assert "BLEU, no search" in "".join(svg.itertext())


def test_the_weight_of_the_length_goes_on_while_the_last_is_the_best(copy_run, lines):
    translator = nmla.load(copy_run / "train" / "model")
    tried = tune(translator, lines, [lines], beam_size=4, penalties=(0.0,), betas=(-30.0, -20.0))
    assert {one.decoding.beta for one in tried if one.decoding.beam_size > 1} == {-30.0, -20.0, 0.0, 40.0}
    assert tried[0].decoding.beta == 0
    ElementTree.fromstring(picture(tried))


def test_command_keeps_what_it_found(copy_run, digits, lm, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(copy_run / "train" / "model", model)
    (model / "decoding.json").write_text('{"blank_penalty": -30.0}')
    valid = digits / "valid.txt"
    command = ["tune", "--model", model, "--source", valid, "--reference", valid, "--beam-size", "4", "--lm", lm]
    done = subprocess.run([sys.executable, "-m", "nmla.cli", *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header, best, *_ = done.stdout.splitlines()
    assert header.startswith("beam_size\tblank_penalty\talpha\tbeta\tBLEU")
    settings = nmla.load(model).decoding
    assert f"{settings.beam_size}\t{settings.blank_penalty:g}\t{settings.alpha:g}\t{settings.beta:g}" in best
    assert settings.blank_penalty > -30
    assert (model / "language.lm").exists() == (settings.alpha > 0)


def test_texts_that_do_not_belong_together_tune_nothing(copy_run, digits, tmp_path, capsys):
    model = shutil.copytree(copy_run / "train" / "model", tmp_path / "model")
    (model / "decoding.json").write_text('{"blank_penalty": 1.5}')
    count = len((digits / "valid.txt").read_text().splitlines())
    (tmp_path / "other").write_text("zu lang\n" * count)
    files = ["--source", str(digits / "valid.txt"), "--reference", str(tmp_path / "other")]
    assert main(["tune", "--model", str(model), *files]) == 3
    assert "valid.txt: some setting must score above 0 BLEU against" in capsys.readouterr().err
    assert (model / "decoding.json").read_text() == '{"blank_penalty": 1.5}'


def test_language_model_that_would_do_nothing_is_refused(copy_run, digits, lm, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(copy_run / "train" / "model", model)
    (model / "decoding.json").write_text('{"beam_size": 4, "alpha": 0.3}')
    (model / "language.lm").write_bytes(lm.read_bytes())
    command = ["translate", "--model", model, digits / "valid.txt", "--lm", lm, "--beam-size", "1"]
    assert main([*map(str, command)]) == 2
    assert "--lm must come with a search and a weight above 0, but beam_size is 1" in capsys.readouterr().err


def test_beam_that_is_too_wide_is_refused_at_once(copy_run, lines):
    translator = nmla.load(copy_run / "train" / "model")
    with pytest.raises(UsageError, match="beam_size must be at most 10000, but is 20000"):
        tune(translator, None, [lines], beam_size=20000)


def test_only_ctc_models_are_tuned(copy_run, lines):
    translator = nmla.load(copy_run / "train" / "model")
    object.__setattr__(translator.model.config, "family", "fixed_length")
    with pytest.raises(UsageError, match="decoding is tuned for ctc and sctc models, but this is fixed_length"):
        tune(translator, lines, [lines])
