import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nmla.distillation.distill as module
from conftest import copy_recipe, write_digits
from nmla.config import ModelConfig
from nmla.data.corpus import Corpus, TokenStore
from nmla.data.prepare import prepare
from nmla.decoding.ctranslate import Written, export
from nmla.decoding.teacher import Format, Teacher
from nmla.decoding.translator import Translator
from nmla.distillation.distill import distill
from nmla.errors import DataError, UsageError
from nmla.files import new_directory
from nmla.models.pretrained import build_model, load_model, save_model
from nmla.text.tokenizer import BLANK, EOS
from nmla.training.loop import train

SIZES = {"d_model": 32, "heads": 2, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(scope="module")
def corpus(digits):
    return digits / "corpus"


@pytest.fixture(scope="module")
def few(corpus, tmp_path_factory):
    """A corpus of few sentences, with the same vocabulary."""
    directory = tmp_path_factory.mktemp("few")
    train, valid = ([(write_digits(directory / f"{n}.txt", n, seed=n),) * 2] for n in (250, 5))
    prepare(train=train, valid=valid, output=directory / "corpus", tokenizer=corpus)
    return directory / "corpus"


@pytest.fixture(scope="module")
def teacher(digits, tmp_path_factory):
    """An autoregressive model that has learned to copy digits."""
    output = tmp_path_factory.mktemp("teacher")
    settings = ("train.loss=cross_entropy", "train.steps=500", "train.learning_rate=2e-3", "finetune=null")
    return train(copy_recipe(digits, output, "model.family=autoregressive", *settings))


def untrained(corpus, directory, **config):
    """A model as it is drawn."""
    torch.manual_seed(1)
    tokenizer = Corpus.load(corpus).tokenizer
    model = build_model(ModelConfig(**({"family": "autoregressive"} | SIZES | config)), tokenizer.vocab_size)
    with new_directory(directory) as aside:
        save_model(model, tokenizer, aside)
    return directory


def shaken(teacher, directory):
    """A model that knows a little less than its teacher."""
    torch.manual_seed(1)
    model, tokenizer = load_model(teacher)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std(correction=0) * torch.randn_like(parameter)
    with new_directory(directory) as aside:
        save_model(model, tokenizer, aside)
    return directory


def targets(corpus):
    """The words of each source, and of its references."""
    data = Corpus.load(corpus)

    def decode(ids):
        return " ".join(data.tokenizer.decode(ids).split())

    return [
        (decode(data.train_source[i].tolist()), [decode(data.train_target[j].tolist()) for j in range(first, end)])
        for i, (first, end) in enumerate(zip(data.references[:-1], data.references[1:], strict=True))
    ]


def origins(corpus):
    manifest = json.loads((corpus / "manifest.json").read_text())
    codes = np.concatenate([np.load(corpus / f"{name}.origins.npy") for name in manifest["shards"]])
    return [manifest["origins"][code] for code in codes.tolist()]


def test_targets_are_the_teachers_translations(corpus, teacher, tmp_path):
    counts = distill(corpus=corpus, teachers=[teacher], output=tmp_path / "out", threads=2)
    sources = [source for source, _ in targets(corpus)]
    expected = [of.text for of in Translator.load(teacher).translate_batch(sources, beam_size=5)]
    found = targets(tmp_path / "out")
    assert [source for source, _ in found] == sources
    assert [references for _, references in found] == [[" ".join(text.split())] for text in expected]
    assert set(origins(tmp_path / "out")) == {f"teacher 1: {teacher}"}
    assert counts["train_pairs"] == counts["train_taught"] == len(sources)
    assert not any(count for name, count in counts.items() if "kept" in name)
    assert Corpus.load(tmp_path / "out").valid_targets == Corpus.load(corpus).valid_targets
    assert distill(corpus=corpus, teachers=[teacher], output=tmp_path / "out") == counts  # it is there
    with pytest.raises(UsageError, match="must not exist yet"):
        distill(corpus=corpus, teachers=[teacher], output=tmp_path / "out", beam_size=4)
    assert not (tmp_path / ".out.distilled").exists()


def test_a_student_can_be_trained_on_it(corpus, teacher, tmp_path):
    distill(corpus=corpus, teachers=[teacher], output=tmp_path / "corpus")
    model = train(copy_recipe(tmp_path, tmp_path / "run", "train.steps=3", "finetune=null"))
    assert Translator.load(model).translate("1 2 3") is not None


def test_several_teachers_give_several_references(corpus, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_SOURCES", 300)
    teachers = [teacher, shaken(teacher, tmp_path / "other"), teacher]
    counts = distill(corpus=corpus, teachers=teachers, output=tmp_path / "out", beam_size=1)
    found = targets(tmp_path / "out")
    originals = [references[0] for _, references in targets(corpus)]
    came_from = origins(tmp_path / "out")
    assert [len(references) for _, references in found] == [3] * len(originals)
    assert [references[0] for _, references in found] == [references[2] for _, references in found]
    kept = [name.startswith("the original") for name in came_from]
    assert any(references[0] != references[1] for _, references in found)
    for k in range(3):
        for (_, references), original, was_kept in zip(found, originals, kept[k::3], strict=True):
            assert references[k] == original or not was_kept
    assert counts["train_pairs"] == 3 * len(originals)
    assert counts["train_taught"] == kept.count(False)
    assert sum(count for name, count in counts.items() if "kept" in name) == kept.count(True)


def test_what_a_teacher_cannot_do_keeps_its_target(corpus, teacher, tmp_path, monkeypatch):
    answers = {0: Written([], -1.0, True), 1: Written(["▁1"] * 40, -1.0, False), 2: Written(["<blank>"], -1.0, True)}
    write = Teacher.write

    def odd(self, sources, beam_size):
        written = write(self, sources, beam_size)
        return [answers.get(i, of) for i, of in enumerate(written)]

    monkeypatch.setattr(Teacher, "write", odd)
    monkeypatch.setattr(module, "PART_SOURCES", 10**6)
    counts = distill(corpus=corpus, teachers=[teacher], output=tmp_path / "out", beam_size=1)
    assert targets(tmp_path / "out")[:3] == targets(corpus)[:3]
    assert [name.split("teacher ")[1] for name in origins(tmp_path / "out")[:3]] == [
        "wrote nothing",
        "did not end",
        "wrote nothing",
    ]
    assert (counts["train_kept_empty"], counts["train_kept_runaway"], counts["train_kept_long"]) == (2, 1, 0)


def test_sources_too_long_for_learned_positions_keep_their_target(corpus, tmp_path):
    model = untrained(corpus, tmp_path / "short", positions="learned", max_positions=52)  # 6 tokens
    counts = distill(corpus=corpus, teachers=[model], output=tmp_path / "out", beam_size=1)
    lengths = Corpus.load(corpus).train_source.lengths
    assert counts["train_kept_long"] == (lengths > 6).sum() > 0


def test_each_teacher_keeps_another_of_several_references(corpus, tmp_path):
    data = Corpus.load(corpus)
    two = Corpus(
        data.tokenizer,
        TokenStore.of([[7, 8]], data.tokenizer.vocab_size),
        TokenStore.of([[7], [8]], data.tokenizer.vocab_size),
        np.array([0, 2]),
        [],
        [],
    )
    work = module._Distillation(two, [], tmp_path, tmp_path / "out", 1, "float32", None, 1)
    assert [work._original(0, k).tolist() for k in range(3)] == [[7], [8], [7]]


def test_processes_share_the_work(few, teacher, tmp_path, monkeypatch):
    """Three at once make the same corpus as one, and each ends when it is there."""
    teachers = [teacher, shaken(teacher, tmp_path / "shaken")]
    monkeypatch.setattr(module, "PART_SOURCES", 10)
    settings = {"corpus": few, "teachers": teachers, "beam_size": 2, "threads": 1}
    alone = distill(**settings, output=tmp_path / "alone")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        counts = pool.starmap(_distill_small_parts, [({**settings, "output": tmp_path / "shared"},)] * 3)
    assert counts == [alone] * 3
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes()
    assert not (tmp_path / ".shared.distilled").exists()


def _distill_small_parts(settings):
    module.PART_SOURCES = 10
    return distill(**settings)


def test_killed_distillation_ends_as_if_it_had_not_been(few, teacher, tmp_path):
    """SIGKILL at more than twenty moments: no line is lost, none is there twice."""
    teachers = [teacher, shaken(teacher, tmp_path / "shaken")]
    script = Path(__file__).with_name("kill_trials.py")
    done = subprocess.run(
        [sys.executable, script, few, tmp_path / "out", *teachers],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(script.parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    assert result["killed"] >= 20


def test_other_settings_do_not_undo_what_was_done(corpus, tmp_path, monkeypatch):
    """They are refused, and by the same command it goes on."""
    given = {"corpus": corpus, "teachers": [untrained(corpus, tmp_path / "model")], "output": tmp_path / "out"}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "_assemble", stop)
        with pytest.raises(KeyboardInterrupt):
            distill(**given, beam_size=1)
    before = sorted((tmp_path / ".out.distilled" / "parts").iterdir())
    with pytest.raises(
        UsageError, match=r"\.out\.distilled: must have been begun like this, but was with other settings"
    ):
        distill(**given, beam_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(module, "PART_SOURCES", 7)
        with pytest.raises(UsageError, match="was with other part_sources"):
            distill(**given, beam_size=1)
    assert sorted((tmp_path / ".out.distilled" / "parts").iterdir()) == before
    distill(**given, beam_size=1)
    assert len(Corpus.load(tmp_path / "out").train_source) == len(Corpus.load(corpus).train_source)


def test_a_corpus_that_is_whole_outlives_versions(few, teacher, tmp_path, monkeypatch):
    counts = distill(corpus=few, teachers=[teacher], output=tmp_path / "out", beam_size=1)
    monkeypatch.setattr(module, "__version__", "99.0")
    assert distill(corpus=few, teachers=[teacher], output=tmp_path / "out", beam_size=1) == counts
    with pytest.raises(UsageError, match="must not exist yet"):
        distill(corpus=few, teachers=[teacher], output=tmp_path / "out", beam_size=2)


def test_a_damaged_second_teacher_is_found_first(few, teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError):
        distill(corpus=few, teachers=[teacher, tmp_path / "damaged"], output=tmp_path / "out", beam_size=1)
    assert not [*tmp_path.glob(".out.distilled/parts/*.npz")]


def test_refuses_what_cannot_be(corpus, teacher, copy_run, tmp_path):
    def refuse(match, kind=UsageError, **settings):
        given = {"corpus": corpus, "teachers": [teacher], "output": tmp_path / "out"} | settings
        with pytest.raises(kind, match=match):
            distill(**given)
        assert not (tmp_path / "out").exists()

    with pytest.raises(UsageError, match="must not exist yet"):
        distill(corpus=corpus, teachers=[teacher], output=corpus)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.bin").write_bytes(b"no model")
    refuse("there must be at least one teacher", teachers=[])
    refuse("beam_size must be from 1 to 10000, but is 0", beam_size=0)
    refuse("threads must be from 1 to 10000, but is 0", threads=0)
    refuse("a teacher must be a model directory, but there is none here", teachers=[tmp_path / "none"])
    refuse("holds neither model.safetensors nor model.bin", teachers=[tmp_path / "nothing"])
    refuse("must have its sentencepiece models beside it", teachers=[tmp_path / "bare"])
    refuse("must be an autoregressive model, but is ctc", teachers=[copy_run / "train" / "model"])
    refuse("must have no prefix or suffix", form=Format(target_prefix=["de"]))
    refuse("must be an autoregressive model, but is ctc", teachers=[teacher, copy_run / "train" / "model"])
    assert not (tmp_path / ".out.distilled").exists()  # all are looked at before the first begins
    refuse("must be a corpus", corpus=tmp_path)
    shutil.copy(teacher / "tokenizer.model", tmp_path / "bare" / "sentencepiece.model")
    refuse("cannot be loaded", DataError, teachers=[tmp_path / "bare"])
    (tmp_path / "bare" / "sentencepiece.model").write_bytes(b"no model")
    refuse("the sentencepiece model cannot be read", DataError, teachers=[tmp_path / "bare"])


@pytest.fixture(scope="module")
def foreign(teacher, tmp_path_factory):
    """The teacher as others would give it to us: a CTranslate2 model with a sentencepiece model for each language."""
    directory = tmp_path_factory.mktemp("foreign")
    model, tokenizer = load_model(teacher)
    export(model, tokenizer, directory)
    for name in ("source.spm", "target.spm"):
        tokenizer.save(directory / name)
    return directory


def test_any_ctranslate2_model_can_teach(corpus, teacher, foreign, tmp_path):
    for name, model in (("ours", teacher), ("theirs", foreign)):
        distill(corpus=corpus, teachers=[model], output=tmp_path / name)
    assert targets(tmp_path / "theirs") == targets(tmp_path / "ours")


def test_a_table_of_positions_that_is_too_short_costs_only_its_sentences(corpus, tmp_path):
    """Nobody knows how long the sentences are that a model of others can take, before it is asked."""
    _, tokenizer = load_model(untrained(corpus, tmp_path / "ours", positions="learned", max_positions=24))
    model = load_model(tmp_path / "ours")[0]
    (tmp_path / "theirs").mkdir()
    export(model, tokenizer, tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs" / "sentencepiece.model")
    counts = distill(corpus=corpus, teachers=[tmp_path / "theirs"], output=tmp_path / "out", beam_size=1)
    kept = sum(counts[f"train_kept_{why}"] for why in module.KEPT)
    assert counts["train_pairs"] == counts["train_taught"] + kept
    assert counts["train_kept_long"] > 0


def test_a_mistyped_language_is_refused(foreign):
    for form in (Format(target_prefix=["deu_Lat"]), Format(source_prefix=["deu_Lat"])):
        with pytest.raises(UsageError, match=r"'deu_Lat' must be in the model's .* vocabulary, but is not"):
            Teacher(foreign, form=form)


def test_work_left_by_a_kill_at_the_very_end_goes(few, teacher, tmp_path):
    counts = distill(corpus=few, teachers=[teacher], output=tmp_path / "out", beam_size=1)
    (tmp_path / ".out.distilled" / "parts").mkdir(parents=True)
    assert distill(corpus=few, teachers=[teacher], output=tmp_path / "out", beam_size=1) == counts
    assert not (tmp_path / ".out.distilled").exists()


def test_one_sentencepiece_model_may_serve_both_languages(foreign, tmp_path):
    shutil.copytree(foreign, tmp_path / "joint")
    (tmp_path / "joint" / "source.spm").rename(tmp_path / "joint" / "sentencepiece.bpe.model")
    texts = ["1 2 3", "4 5"]
    assert Teacher(tmp_path / "joint").translate(texts) == Teacher(foreign).translate(texts) == texts


def test_prefixes_and_suffixes_go_around_a_sentence(foreign):
    texts = ["1 2 3", "4 5"]
    source = ["▁", "1", "▁", "2", "▁", "3"]
    plainly, prefixed = (Teacher(foreign, form=Format(target_prefix=p)).write([source])[0] for p in ((), ("▁",)))
    assert prefixed.tokens == plainly.tokens[1:] == source[1:]
    without_end = Teacher(foreign, form=Format(source_suffix=[]))
    with_two_ends = Teacher(foreign, form=Format(source_prefix=["</s>"], source_suffix=["</s>"]))
    plain = Teacher(foreign)
    candidates = [[text] for text in texts]
    scores = [of.score(texts, candidates) for of in (plain, without_end, with_two_ends)]
    assert scores[0] == Teacher(foreign, form=Format(source_suffix=["</s>"])).score(texts, candidates)
    assert scores[0] != scores[1] != scores[2]


def test_teacher_finds_the_best_of_several(teacher):
    model, tokenizer = load_model(teacher)
    texts = ["1 2 3", "4 5 6 7"]
    candidates = [["1 2", "1 2 3", "3 2 1"], ["4 5 6 7", "4 5 6 6", "", "9"]]
    scores = Teacher(teacher).score(texts, candidates)
    assert [len(of_text) for of_text in scores] == [3, 4]
    assert [max(range(len(of)), key=of.__getitem__) for of in scores] == [1, 0]
    source, target = tokenizer.encode("1 2 3"), tokenizer.encode("3 2 1")
    with torch.no_grad():
        ids = [torch.tensor([x]) for x in ([*source, EOS], target)]
        log_probs = model(ids[0], torch.tensor([len(source) + 1]), ids[1], torch.tensor([3])).logits[0].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor([*target, EOS])[:, None]).mean().item()
    assert scores[0][2] == pytest.approx(expected, abs=1e-3)


def test_a_forced_prefix_is_no_merit_of_a_candidate(foreign):
    """Its score is the mean of the log-probabilities of its own tokens and its end."""
    texts, candidates = ["1 2 3"], [["2 3", "2 3 4 5 6"]]
    forced = Teacher(foreign, form=Format(target_prefix=["▁", "1"]))
    translator = forced._translator
    source = [*forced.source_tokens(texts[0]), "</s>"]
    for score, candidate in zip(*forced.score(texts, candidates), candidates[0], strict=True):
        own = forced.target_tokens(candidate)
        (whole,), (prefix_and_end,) = (
            translator._model.score_batch([source], [["▁", "1", *of]], max_input_length=0) for of in (own, [])
        )
        assert whole.log_probs[:2] == pytest.approx(prefix_and_end.log_probs[:2], abs=1e-5)
        assert score == pytest.approx(sum(whole.log_probs[2:]) / (len(own) + 1), abs=1e-6)


def test_int8_teaches_too(corpus, teacher, tmp_path):
    distill(corpus=corpus, teachers=[teacher], output=tmp_path / "out", compute_type="int8")
    found = [references[0] for _, references in targets(tmp_path / "out")]
    expected = [source for source, _ in targets(corpus)]
    assert sum(one == other for one, other in zip(found, expected, strict=True)) > 0.8 * len(found)
    assert BLANK not in np.concatenate([tokens for tokens, _ in Corpus.load(tmp_path / "out").train_target.shards])


def test_who_comes_as_the_work_is_removed_finds_it_done(tmp_path, monkeypatch):
    """Another finishes between the first look and the lock: all that is left is the corpus."""
    work, output = tmp_path / ".corpus.distilled", tmp_path / "corpus"
    opened = Path.open

    def removed_meanwhile(path, *args, **options):
        if path == work / "lock":
            shutil.rmtree(work)
            output.mkdir()
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", removed_meanwhile)
    with pytest.raises(module._Done), module._joined(work, "{}", output):
        pytest.fail("there is nothing left to do")


def test_split_text_is_taught_in_its_own_vocabulary_alone(teacher, tmp_path):
    files = (write_digits(tmp_path / "text", 20, seed=1),) * 2
    prepare(train=[files], valid=[files], output=tmp_path / "corpus", pretokenised=True)
    with pytest.raises(UsageError, match="a corpus that came split already must have its vocabulary, but has another"):
        distill(corpus=tmp_path / "corpus", teachers=[teacher], output=tmp_path / "out")


def test_plain_text_is_not_taught_by_who_wants_it_split(corpus, tmp_path):
    files = (write_digits(tmp_path / "text", 20, seed=1),) * 2
    prepare(train=[files], valid=[files], output=tmp_path / "split", pretokenised=True)
    model = untrained(tmp_path / "split", tmp_path / "model")
    with pytest.raises(UsageError, match="a corpus of plain text must take that, but wants it split"):
        distill(corpus=corpus, teachers=[model], output=tmp_path / "out")
