import json
import shutil
from dataclasses import replace

import pytest
import torch

from nmla.config import Decoding, ModelConfig
from nmla.data.corpus import Corpus
from nmla.decoding.lm_train import train_lm
from nmla.decoding.translator import Translator
from nmla.errors import DataError, UsageError
from nmla.models.pretrained import CARD, FAMILIES, FILES, build_model, load_model, save_model
from nmla.text.tokenizer import Tokenizer

SMALL = ModelConfig(d_model=32, heads=4, feed_forward=64, encoder_layers=1, decoder_layers=1)


@pytest.fixture(scope="module")
def tokenizer(digits):
    return Corpus.load(digits / "corpus").tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_model_loads_as_it_was(family, tokenizer, tmp_path):
    config = replace(SMALL, family=family, norm="post", positions="learned", upsample=2)
    model = build_model(config, tokenizer.vocab_size)
    save_model(model, tokenizer, tmp_path, {"loss": "some loss"})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    loaded, loaded_tokenizer = load_model(tmp_path)
    assert loaded.config == config
    assert type(loaded) is FAMILIES[family]
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert loaded_tokenizer.model == tokenizer.model
    assert "- loss: some loss" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("name", [name for name in FILES if name != CARD])
def test_whatever_is_damaged_is_told(name, tokenizer, tmp_path):
    save_model(build_model(SMALL, tokenizer.vocab_size), tokenizer, tmp_path)
    damaged = tmp_path / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"the model is damaged|must hold"):
        load_model(tmp_path)
    damaged.unlink()
    with pytest.raises(UsageError if name == "config.json" else DataError):
        load_model(tmp_path)


def test_no_model_is_told_apart(tmp_path):
    with pytest.raises(UsageError, match=r"must be a model directory, but holds no config\.json"):
        load_model(tmp_path)


def test_unknown_family_is_refused(tokenizer, tmp_path):
    save_model(build_model(SMALL, tokenizer.vocab_size), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "diffusion"}))
    with pytest.raises(DataError, match="damaged"):
        load_model(tmp_path)


def test_translator_saves_pushes_and_comes_back(copy_run, tmp_path, monkeypatch):
    translator = Translator.load(copy_run / "train" / "model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    translator.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").exists()
    assert Translator.from_pretrained(tmp_path / "mine").translate("1 2 3") == translator.translate("1 2 3")

    import huggingface_hub.hub_mixin

    pushed = {}

    class Hub:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **_):
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id, folder_path, **_):
            pushed[repo_id] = sorted(path.name for path in folder_path.iterdir())
            return "url"

    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Hub)
    translator.push_to_hub("me/model")
    assert pushed == {"me/model": sorted(FILES)}


def test_card_may_be_edited_and_is_kept(copy_run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(copy_run / "train" / "model", model)
    (model / "README.md").write_text("# Mine\n")
    Translator.load(model).save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "README.md").read_text() == "# Mine\n"
    (model / "README.md").unlink()
    assert Translator.load(model).card is None


def test_translator_is_saved_over_itself(copy_run, tmp_path):
    model, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(copy_run / "train" / "model", model)
    text.write_text("1 2 3\n4 5 6\n" * 20)
    tokenizer = Tokenizer.load(model / "tokenizer.model")
    train_lm([text], tokenizer, model / "language.lm", 2)
    translator = Translator.load(model)
    translator.decoding = Decoding(beam_size=2, alpha=0.3)
    before = translator.lm.score([6, 7])
    translator.save_pretrained(model)
    again = Translator.load(model)
    assert again.lm.score([6, 7]) == before != 0
    assert again.decoding == translator.decoding
    again.decoding, again.lm = Decoding(), None
    again.save_pretrained(model)
    assert Translator.load(model).decoding == Decoding()
    assert not (model / "language.lm").exists()


def test_from_pretrained_takes_what_load_takes(copy_run):
    model = copy_run / "train" / "model"
    with pytest.raises(UsageError, match="lm: must be a file, but does not exist"):
        Translator.from_pretrained(model, lm=model / "lm")
    with pytest.raises(UsageError, match="takes lm, teacher and how to download, but not beam_size"):
        Translator.from_pretrained(model, beam_size=4)


def test_files_are_as_private_as_others(copy_run):
    (copy_run / "made").write_text("")
    ours = {path.name: path.stat().st_mode for path in (copy_run / "train" / "model").iterdir()}
    assert set(ours.values()) == {(copy_run / "made").stat().st_mode}
