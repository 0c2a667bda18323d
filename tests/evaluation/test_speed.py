"""Speed, with rivals and a clock that are made up: nothing here depends on time."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

from nmla.config import Decoding, ModelConfig
from nmla.decoding.ctranslate import export
from nmla.decoding.lm_train import train_lm
from nmla.decoding.teacher import Teacher
from nmla.decoding.translator import save_decoding
from nmla.errors import DataError, UsageError
from nmla.evaluation import rivals
from nmla.evaluation import speed as module
from nmla.evaluation.report import COLOURS, DASHES, curves
from nmla.evaluation.rivals import load_systems
from nmla.evaluation.speed import TURNS, System, choose_sentences, measure_speed, timed
from nmla.evaluation.speed_report import picture, table
from nmla.models.pretrained import build_model, load_model, save_model


class World:
    """Systems that say how long they took, and what they were asked to do."""

    def __init__(self):
        self.calls = []

    def system(self, name, cost, **options):
        """It takes `cost(texts, batch size, threads)` seconds."""

        def seconds(calls, batch_size, threads):
            self.calls += [(name, threads, batch_size, list(texts)) for texts in calls]
            return [cost(texts, batch_size, threads) for texts in calls]

        return System(
            name, seconds, lengths=lambda texts: [len(text.split()) for text in texts], longest=100, **options
        )

    def timed(self, warm_ups):
        """The calls that were timed: they come after those that warm up."""
        return self.calls[warm_ups:]


@pytest.fixture
def world():
    return World()


def steady(seconds):
    return lambda texts, batch_size, threads: seconds * len(texts)


def sentences(*lengths):
    return [" ".join(["word"] * length) for length in lengths]


def figure(speed, system, batch_size=1, group="all", threads=1):
    [found] = [
        one
        for one in speed.figures
        if (one.system, one.batch_size, one.group, one.threads) == (system, batch_size, group, threads)
    ]
    return found


def test_rivals_take_turns_and_none_is_always_first(world):
    systems = [world.system(name, steady(1.0)) for name in "abc"]
    sources = sentences(1, 2)
    measure_speed(systems, sources, batch_sizes=[2, 1], threads=[2, 1], turns=4)
    one_turn = 2 * 3 * (2 + 1)  # threads, systems, calls: each sentence alone, then both
    timed = world.timed(len(world.calls) - 4 * one_turn)
    assert {call[0] for call in world.calls[: -4 * one_turn]} == {"a", "b", "c"}  # all are warm
    for turn, order in enumerate(("abc", "bca", "cab", "abc")):
        calls = timed[turn * one_turn : (turn + 1) * one_turn]
        assert calls == [
            call
            for threads in (1, 2)
            for batch in ([[sources[0]], [sources[1]]], [sources])
            for name in order
            for call in [(name, threads, len(texts), texts) for texts in batch]
        ]


def test_warm_up_is_not_timed(world):
    seen = set()

    def first_is_slow(texts, batch_size, threads):
        return 1.0 if (threads, batch_size) in seen else seen.add((threads, batch_size)) or 100.0

    speed = measure_speed([world.system("a", first_is_slow)], sentences(1, 2), batch_sizes=[1, 2], threads=[1, 2])
    assert {seconds for one in speed.figures for seconds in one.seconds} == {2.0, 1.0}


def test_ratios_are_those_of_a_turn(world):
    """A machine that gets slower from turn to turn changes times, but not ratios."""
    drift = {"base": iter([1, 1, 2, 4]), "rival": iter([1, 0.5, 1, 1])}  # the first is the warm-up
    systems = [world.system(name, lambda *_, name=name: next(drift[name])) for name in drift]
    speed = measure_speed(systems, sentences(3, 5), batch_sizes=[2], threads=[1], turns=3, baseline="base")
    rival = figure(speed, "rival", 2)
    assert rival.seconds == (0.5, 1.0, 1.0)
    assert rival.ratios == (2.0, 2.0, 4.0)
    assert figure(speed, "base", 2).ratios == (1.0, 1.0, 1.0)
    [record] = [one for one in json.loads(table(speed, "json"))["figures"] if one["system"] == "rival"]
    assert record["sentences_per_second"] == 4.0
    assert record["sentences_per_second_lowest"] == 2.0
    assert record["words_per_second"] == 16.0
    assert (record["speedup"], record["speedup_lowest"], record["speedup_highest"]) == (2.0, 2.0, 4.0)
    markdown = table(speed, "markdown")
    assert "| rival | 4 (2) |" in markdown
    assert "| rival | 16 (8) |" in markdown
    assert "| rival | 2 (2 to 4) |" in markdown


def test_latency_is_of_sentences(world):
    """Each takes as many milliseconds as it has words: 1 to 11."""
    system = world.system("a", lambda texts, *_: sum(len(text.split()) for text in texts) / 1000)
    speed = measure_speed([system], sentences(*range(11, 0, -1)), batch_sizes=[1], turns=2, threads=[1])
    one = figure(speed, "a")
    assert one.medians == pytest.approx((6.0, 6.0))
    assert one.ninetieths == pytest.approx((10.0, 10.0))
    assert one.seconds == pytest.approx((0.066, 0.066))
    assert "| a | 6 (6) | 10 (10) | 1 (1 to 1) |" in table(speed, "markdown")


def test_a_hiccup_is_no_speed_up(world):
    slow = sentences(4)[0]
    systems = [world.system("base", steady(1.0)), world.system("rival", lambda of, *_: 100.0 if of == [slow] else 1.0)]
    speed = measure_speed(systems, sentences(2, 3, 4), batch_sizes=[1], threads=[1], turns=1, baseline="base")
    assert sum(figure(speed, "rival").seconds) > 100
    assert figure(speed, "rival").ratios == (1.0,)


def test_groups_are_thirds_by_length(world):
    systems = [world.system("a", lambda texts, *_: sum(len(text.split()) for text in texts))]
    lengths = [9, 1, 5, 2, 8, 4, 7, 3, 6, 10]
    speed = measure_speed(systems, sentences(*lengths), batch_sizes=[1, 2, 3, 4], turns=1, threads=[1])
    assert speed.lengths == {"all": (1, 10), "short": (1, 3), "middle": (4, 6), "long": (7, 10)}
    for size in (1, 3):  # the smallest and the largest that a third fills
        short, middle, long = (figure(speed, "a", size, group) for group in ("short", "middle", "long"))
        assert [one.sentences for one in (short, middle, long)] == [3, 3, 4]
        assert [one.words for one in (short, middle, long)] == [6, 15, 34]
        assert [one.seconds for one in (short, middle, long)] == [(6,), (15,), (34,)]
    assert {one.batch_size for one in speed.figures if one.group != "all"} == {1, 3}
    assert "by source length, batches of 3, 1 thread" in table(speed, "markdown")


def test_few_sentences_have_no_groups(world, capsys):
    speed = measure_speed([world.system("a", steady(1))], sentences(1, 2), batch_sizes=[1, 8])
    assert {one.group for one in speed.figures} == {"all"}
    assert "batches of 8 are not full: there are 2 sentences" in capsys.readouterr().err


def test_who_is_only_measured_alone(world):
    systems = [world.system("a", steady(1)), world.system("a, default mode", steady(2), alone=True)]
    speed = measure_speed(systems, sentences(1, 2), batch_sizes=[1, 2], threads=[1])
    assert {one.batch_size for one in speed.figures if one.system == "a, default mode"} == {1}
    assert figure(speed, "a, default mode").ratios == (0.5,) * TURNS
    assert "default mode" not in "".join(ElementTree.fromstring(picture(speed)).itertext())
    speed = measure_speed(systems, sentences(1, 2), batch_sizes=[1, 2], threads=[1], baseline="a, default mode")
    assert figure(speed, "a", 2).ratios == ()
    assert "| a | 2 (2 to 2) | – |" in table(speed, "markdown")
    with pytest.raises(UsageError, match="batch sizes must hold 1, as a, default mode is measured one sentence"):
        measure_speed(systems, sentences(1, 2), batch_sizes=[2], threads=[1], baseline="a, default mode")


def test_baseline(world):
    systems = [world.system(name, steady(1), reference=name if name in "cd" else "") for name in "abcd"]
    settings = {"batch_sizes": [1], "turns": 1, "threads": [1]}
    assert measure_speed(systems, ["x"], **settings).baseline == "c"
    assert measure_speed(systems[:2], ["x"], **settings).baseline == "a"
    assert measure_speed(systems, ["x"], baseline="b", **settings).baseline == "b"
    with pytest.raises(UsageError, match="the baseline must be one of 'a', 'b', 'c', 'd', but is 'e'"):
        measure_speed(systems, ["x"], baseline="e", **settings)


def test_the_faster_form_of_the_baseline_counts_each_time(world):
    one = world.system("one", lambda of, size, threads: 2.0 if threads == 1 else 4.0, reference="teacher")
    other = world.system("other", lambda of, size, threads: 3.0, reference="teacher")
    systems = [world.system("rival", steady(1.0)), one, other]
    speed = measure_speed(systems, ["x"], batch_sizes=[1, 2], threads=[1, 2], turns=1)
    for name, ratios in (("rival", [2.0, 3.0]), ("one", [1.0, 0.75]), ("other", [2 / 3, 1.0])):
        assert [figure(speed, name, threads=n).ratios for n in (1, 2)] == [(ratio,) for ratio in ratios]
    assert "one or other, whichever is faster, in the same turn" in table(speed, "markdown")
    drawn = "".join(ElementTree.fromstring(picture(speed)).itertext())
    assert "whichever is faster = 1" in drawn
    assert "other" in drawn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"systems": ""}, "there must be at least one system to measure, but there is none"),
        ({"systems": "aa"}, "systems must have names of their own, but two are called 'a'"),
        ({"sources": []}, "there must be at least one sentence to translate, but there is none"),
        ({"batch_sizes": [1, 0]}, "batch sizes must be at least 1, but there is 0"),
        ({"batch_sizes": []}, "batch sizes must be at least one number, but there is none"),
        ({"threads": [0]}, "threads must be at least 1, but there is 0"),
        ({"turns": 0}, "turns must be at least 1, but there is 0"),
    ],
)
def test_wrong_input_is_told(world, change, message):
    settings = {"systems": "a", "sources": ["x"], "batch_sizes": [1], "threads": [1], "turns": 1, **change}
    systems = [world.system(name, steady(1)) for name in settings.pop("systems")]
    with pytest.raises((UsageError, DataError), match=message):
        measure_speed(systems, settings.pop("sources"), **settings)
    assert world.calls == []


def test_more_threads_than_cores_are_told(world, monkeypatch, capsys):
    monkeypatch.setattr(module, "cores", lambda: 1)
    speed = measure_speed([world.system("a", steady(1))], ["x"], batch_sizes=[1], threads=[1, 2])
    assert {one.threads for one in speed.figures} == {1, 2}
    assert capsys.readouterr().err == "2 threads are more than this machine's cores, 1: they wait for each other\n"


def test_calls_are_timed_one_by_one(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 8.0])
    monkeypatch.setattr(module.time, "perf_counter", now.__next__)
    told = []
    assert timed(lambda *call: told.append(call), [["a"], ["b", "c"]], 2, 3) == [1.0, 3.0]
    assert told == [(["a"], 2, 3), (["b", "c"], 2, 3)]


def test_sentences_come_from_all_parts_of_the_text(world, capsys):
    system = world.system("a", steady(1))
    lines = [str(i) for i in range(10)]
    assert choose_sentences(lines, 5, [system]) == ["0", "2", "4", "6", "8"]
    assert choose_sentences(["", *lines, " "], 100, [system]) == lines
    assert capsys.readouterr().err == ""
    assert choose_sentences(["1 2 3", "1", "2"], 2, [replace(system, longest=2)], "test.en") == ["1", "2"]
    assert capsys.readouterr().err == "test.en: lines left out, as they are too long for one of the systems: 1\n"
    with pytest.raises(
        DataError, match=r"test\.en: must hold at least one sentence that all systems can take, but holds"
    ):
        choose_sentences(["", " "], 5, [system], "test.en")


def test_forms(world):
    systems = [world.system("a|b", steady(1)), world.system("c", steady(2), alone=True)]
    speed = measure_speed(systems, sentences(1, 2, 3), batch_sizes=[1, 2])
    header, *rows = [line.split("\t") for line in table(speed, "tsv").splitlines()]
    assert len(rows) == len(speed.figures)
    assert {len(row) for row in rows} == {len(header)}
    record = dict(zip(header, rows[0], strict=True))
    assert (record["system"], record["sentences_per_second"], record["speedup"]) == ("a|b", "1", "1")
    found = json.loads(table(speed, "json"))
    assert found["machine"]["torch"] == torch.__version__
    assert found["figures"][0]["seconds"] == [3.0] * TURNS
    tables = [block for block in table(speed, "markdown").split("\n\n") if block.startswith("|")]
    for block in tables:
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1
    assert len(tables) == 2 * (1 + 3 + 2)  # for each number of threads: latency, by batch size, by length
    svg = ElementTree.fromstring(picture(speed))
    assert "a|b = 1" in "".join(svg.itertext())
    assert "speed-up, 2 threads" in "".join(svg.itertext())


def test_picture_of_many_systems():
    """No two look alike, and all names fit in."""
    names = [f"system number {i}" for i in range(len(DASHES) * len(COLOURS))]
    svg = ElementTree.fromstring(
        curves({"speed-up": {name: [(1, i), (400, 1)] for i, name in enumerate(names)}}, "x", [1, 400])
    )
    lines = svg.findall("{*}polyline")
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in lines}) == len(names)
    assert all(line.get("points").split()[0].startswith("44.0,") for line in lines)
    assert all(line.get("points").split()[1].startswith("274.0,") for line in lines)
    places = [(text.get("x"), text.get("y")) for text in svg.findall("{*}text")]
    assert len(set(places)) == len(places)
    assert max(float(y) for _, y in places) < float(svg.get("height"))
    assert len(set(COLOURS)) == len(COLOURS) == 8


@pytest.fixture(scope="module")
def models(digits, copy_run, tmp_path_factory):
    """A CTC model, one that is tuned for a search with its language model, and an autoregressive one, ours and not."""
    directory = tmp_path_factory.mktemp("models")
    plain = copy_run / "train" / "model"
    _, tokenizer = load_model(plain)
    shutil.copytree(plain, directory / "tuned")
    save_decoding(Decoding(beam_size=4, alpha=0.2, blank_penalty=0.5), directory / "tuned")
    train_lm([digits / "train.txt"], tokenizer, directory / "tuned" / "language.lm", order=2)
    sizes = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1}
    torch.manual_seed(1)
    model = build_model(ModelConfig(family="autoregressive", **sizes), tokenizer.vocab_size).eval()
    for name in ("teacher", "foreign"):
        (directory / name).mkdir()
    save_model(model, tokenizer, directory / "teacher")
    export(model, tokenizer, directory / "foreign")
    tokenizer.save(directory / "foreign" / "tokenizer.model")
    return {"plain": plain, **{name: directory / name for name in ("tuned", "teacher", "foreign")}}


def test_every_way_to_decode_is_a_system(models, digits):
    with load_systems(models, threads=[1]) as systems:
        lines = (digits / "valid.txt").read_text().splitlines()
        texts = choose_sentences(lines, 7, systems)
        assert [system.lengths(["1 2 3", ""]) for system in systems] == [[6, 0]] * len(systems)
        speed = measure_speed(systems, texts, batch_sizes=[1, 2], threads=[1], turns=1)
    ours = ["plain argmax", "tuned argmax", "tuned beam 4"]
    written = [
        f"{name} {search} {kind}"
        for name in ("teacher", "foreign")
        for kind in ("float32", "int8")
        for search in ("greedy", "beam 5")
    ]
    assert [system.name for system in systems] == [
        *(name + mode for name in ours for mode in ("", ", default mode")),
        *written,
    ]
    assert {system.name for system in systems if system.alone} == {f"{name}, default mode" for name in ours}
    assert {system.name: system.reference for system in systems if system.reference} == {
        f"{of} beam 5 {kind}": f"{of} beam 5" for of in ("teacher", "foreign") for kind in ("float32", "int8")
    }
    assert speed.baseline == "teacher beam 5 float32 or teacher beam 5 int8, whichever is faster"
    assert all(min(one.seconds) > 0 for one in speed.figures)


@pytest.fixture
def said(monkeypatch):
    """What systems of this process translated, in place of how long it took."""
    monkeypatch.setattr(rivals, "timed", lambda translate, *call: translate(*call))


def test_systems_translate_as_their_models_do(models, said):
    texts = ["1 2 3", "4", "5 6 7 8 9"]
    before = torch.get_num_threads()
    try:
        [plain, _] = rivals._parallel("plain", models["plain"], {})
        [*_, search, _] = rivals._parallel("tuned", models["tuned"], {})
        for system in (plain, search):
            assert [of.text for of in system.seconds(texts, 2, before + 1)] == texts
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    [(_, ours), (_, theirs)] = (
        rivals._sequential(name, models[name], [2], "float32") for name in ("teacher", "foreign")
    )
    assert ours.seconds(texts, 1, 2) == Teacher(models["teacher"]).translate(texts)
    assert ours.seconds(texts, 3, 2) == theirs.seconds(texts, 3, 2)


def test_search_that_is_asked_for(models):
    def ways(**search):
        _, found = rivals._ways("plain", models["plain"], **search)
        return {way: (of["beam_size"], of["alpha"]) for way, of in found.items()}

    assert ways() == {"argmax": (1, 0)}
    assert ways(beam_size=3) == {"argmax": (1, 0), "beam 3": (3, 0)}
    lm = models["tuned"] / "language.lm"
    assert ways(lm=lm) == {"argmax": (1, 0), "beam 20": (20, 0.3)}
    for search, message in (
        ({"lm": lm, "beam_size": 1}, "plain: a language model and weights are for a search, but beam_size is 1"),
        ({"alpha": 0.5}, "plain: a language model and weights are for a search, but beam_size is 1"),
        ({"beam_size": 3, "alpha": 0.5}, "alpha must be 0 without a language model, but is 0.5"),
        ({"beam_size": 0}, "beam_size must be a whole number of at least 1, but is 0"),
    ):
        with pytest.raises(UsageError, match=message):
            ways(**search)


def test_what_is_wrong_with_a_model_is_told(models, tmp_path):
    """Also when it is found in the model's own process."""
    damaged = shutil.copytree(models["plain"], tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    for directory, message in (
        (tmp_path / "nowhere", "must be a model directory"),
        (damaged, r"damaged: .*model\.safetensors"),
    ):
        with pytest.raises((UsageError, DataError), match=message), load_systems({"x": directory}):
            raise AssertionError
    nobody = load_systems({"x": models["teacher"]}, alpha=0.5)
    with (
        pytest.raises(UsageError, match="--alpha is for the search of ctc and sctc models, but no"),
        nobody,
    ):
        raise AssertionError


def test_picture_of_one_sentence_at_a_time_shows_points(world):
    systems = [world.system("a", steady(1.0)), world.system("b", steady(2.0))]
    alone = [replace(system, alone=True) for system in systems]
    speed = measure_speed(alone, sentences(1, 2), batch_sizes=[1, 2], threads=[1], turns=1)
    assert picture(speed).count("<circle") == 2


@pytest.mark.parametrize("name", ["speed", "rivals"])
def test_ctranslate2_keeps_its_threads_apart_from_those_of_torch(name):
    """Which it does only if it was imported first."""
    code = (
        f"import sys, nmla.evaluation.{name};print(*(name for name in sys.modules if name in ('ctranslate2', 'torch')))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "ctranslate2 torch\n"
