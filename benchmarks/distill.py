"""How fast a teacher translates: by CTranslate2, as in `nmla distill`, and the same model in torch. Prints Markdown.

    python benchmarks/distill.py --teacher MODEL --source FILE [--count 500]

Without a model it trains a small one on the generated language, which takes a minute. All translate the same lines, in
batches of like length, on all cores. In torch there are two: the plain greedy decoder, which reads the whole sentence
again for each word, and one that remembers what attention has seen. Rivals take turns, and the best of the turns
counts; for each torch decoder also the best of several batch sizes.
"""

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import torch

from nmla.config import parse_recipe
from nmla.data.batching import pad
from nmla.data.prepare import prepare
from nmla.data.synthetic import ONE_MODE, generate
from nmla.decoding.ctranslate import longest_output
from nmla.decoding.teacher import Teacher
from nmla.models.autoregressive import AutoregressiveTransformer
from nmla.models.layers import Attention, sinusoidal_positions
from nmla.models.pretrained import load_model
from nmla.text.lines import read_lines
from nmla.text.tokenizer import BOS, EOS
from nmla.training.loop import train
from tables import header, row, verdict

CORES = len(os.sched_getaffinity(0))
TURNS = 3
BATCH_TOKENS = {"plain": (256, 1024), "remembering": (1024, 4096, 16384)}  # of sources, in torch
RECIPE = """
model: {family: autoregressive, d_model: 128, heads: 4, feed_forward: 512, encoder_layers: 3, decoder_layers: 3}
train: {loss: cross_entropy, steps: 200, learning_rate: 2.0e-3, warmup_steps: 50, max_tokens: 2048, dropout: 0.0}
"""


def small_teacher(directory: Path) -> tuple[Path, list[str]]:
    """A model of the generated language, and lines that it has not seen."""
    sentences = generate(ONE_MODE, 22_000, seed=1)
    files = directory / "source", directory / "target"
    for path, side in zip(files, ("source", "target"), strict=True):
        path.write_text("".join(f"{getattr(sentence, side)}\n" for sentence in sentences[2000:]))
    valid = directory / "valid.tsv"
    valid.write_text("".join(f"{sentence.source}\t{sentence.target}\n" for sentence in sentences[:20]))
    prepare(train=[files], valid=[(valid,)], output=directory / "corpus", vocab_size=280)
    model = train(parse_recipe(RECIPE, [f"data.corpus={directory / 'corpus'}", f"output={directory / 'run'}"]))
    return model, [sentence.source for sentence in sentences[:2000]]


Decoder = Callable[[AutoregressiveTransformer, torch.Tensor, torch.Tensor], tuple[list[list[int]], list[float]]]


@torch.inference_mode()
def plain_decode(
    model: AutoregressiveTransformer, source: torch.Tensor, lengths: torch.Tensor
) -> tuple[list[list[int]], list[float]]:
    """Greedy decoding as one writes it down: no memory, and nobody leaves before all have ended."""
    target = source.new_empty(len(source), 0)
    ended = torch.zeros(len(source), dtype=torch.bool)
    memory = model.encode(source, lengths)
    while not ended.all() and target.shape[1] < longest_output(source.shape[1]):
        before = torch.nn.functional.pad(target, (1, 0), value=BOS)
        token = model.decode(model.embed(before), None, memory)[:, -1].argmax(-1)
        target = torch.cat([target, token[:, None]], 1)
        ended |= token == EOS
    return [[*map(int, row[: (row == EOS).int().argmax()])] for row in target], []


class Seen(torch.nn.Module):
    """In the place of an attention's keys and values: those of all places so far."""

    def __init__(self, key_value: torch.nn.Module, own: bool) -> None:
        super().__init__()
        self.key_value, self.own = key_value, own
        self.states: torch.Tensor | None = None

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        if self.states is None or self.own:  # the encoder's states never change
            new = self.key_value(memory)
            self.states = new if self.states is None else torch.cat([self.states, new], 1)
        return self.states


@contextmanager
def remembering(model: AutoregressiveTransformer) -> Iterator[list[Seen]]:
    """Meanwhile its decoder sees all that it was given, and is given one word at a time."""
    attentions = [of for of in model.decoder.modules() if isinstance(of, Attention)]
    plain = [of.key_value for of in attentions]
    seen = [Seen(key_value, own=number % 2 == 0) for number, key_value in enumerate(plain)]
    for attention, of in zip(attentions, seen, strict=True):
        attention.key_value = of  # type: ignore[assignment]
    yield seen
    for attention, key_value in zip(attentions, plain, strict=True):
        attention.key_value = key_value


@torch.inference_mode()
def remembering_decode(
    model: AutoregressiveTransformer, source: torch.Tensor, lengths: torch.Tensor
) -> tuple[list[list[int]], list[float]]:
    """Greedy decoding in which each word is read once, and who has ended leaves the batch."""
    memory = model.encode(source, lengths)
    most = longest_output(source.shape[1])
    table = model.decoder_positions
    places = sinusoidal_positions(most, model.config.d_model, memory.states) if table is None else table.weight[:most]
    outputs: list[list[int]] = [[] for _ in source]
    scores = torch.zeros(len(source), dtype=torch.float64)
    rows = torch.arange(len(source))  # that have not ended
    tokens = torch.full_like(rows, BOS)
    with remembering(model) as seen:
        for place in places:
            x = model.embed(tokens[:, None]) + place
            for layer in model.decoder:
                x = layer(x, None, memory.states, memory.keep)
            logits = torch.nn.functional.linear(model.decoder_norm(x[:, 0]), model.embedding.weight)
            best, tokens = logits.log_softmax(-1).max(-1)
            scores[rows] += best
            going = tokens != EOS
            for index, token in zip(rows[going].tolist(), tokens[going].tolist(), strict=True):
                outputs[index].append(token)
            if not going.all():
                rows, tokens = rows[going], tokens[going]
                memory = memory._replace(states=memory.states[going], keep=memory.keep[going])
                for of in seen:
                    of.states = None if of.states is None else of.states[going]
            if not len(rows):
                break
    return outputs, scores.tolist()


def by_torch(
    model: AutoregressiveTransformer, sources: list[list[int]], most: int, decode: Decoder = remembering_decode
) -> dict[int, tuple[list[int], float]]:
    """Translations and scores, in batches of at most `most` source tokens."""
    done: dict[int, tuple[list[int], float]] = {}
    rows: list[int] = []

    def flush() -> None:
        outputs, scores = decode(model, *pad([sources[row] for row in rows]))
        done.update(zip(rows, zip_longest(outputs, scores, fillvalue=0.0), strict=True))
        rows.clear()

    for index in sorted(range(len(sources)), key=lambda index: len(sources[index])):
        if rows and len(sources[index]) * (len(rows) + 1) > most:
            flush()
        rows.append(index)
    flush()
    return done


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast a teacher translates.")
    parser.add_argument("--teacher", type=Path, help="an autoregressive model directory")
    parser.add_argument("--source", type=Path, help="lines to translate")
    parser.add_argument("--count", type=int, help="how many of them (default: all)")
    args = parser.parse_args()
    if (args.teacher is None) != (args.source is None):
        parser.error("--teacher and --source must be given together")
    torch.set_num_threads(CORES)
    with tempfile.TemporaryDirectory() as directory:
        if args.teacher is None:
            path, lines = small_teacher(Path(directory))
        else:
            path, lines = args.teacher, [line for line in read_lines(args.source) if line.strip()]
        measure(path, lines[: args.count])


def measure(path: Path, lines: list[str]) -> None:
    model, tokenizer = load_model(path)
    assert isinstance(model, AutoregressiveTransformer)
    model.eval()
    ids = [[*tokenizer.encode(line), EOS] for line in lines]
    teachers = {kind: Teacher(path, compute_type=kind, workers=CORES) for kind in ("float32", "int8")}
    tokens = [teachers["float32"].source_tokens(line) for line in lines]
    rivals: dict[str, Callable[[], object]] = {}
    for name, decode in (("plain", plain_decode), ("remembering", remembering_decode)):
        for most in BATCH_TOKENS[name]:
            work = functools.partial(by_torch, model, ids, most, decode)
            rivals[f"torch, greedy, {name}, batches of {most} tokens"] = work
    for kind, teacher in teachers.items():
        for beam_size in (1, 5):
            name = f"CTranslate2, {kind}, {'greedy' if beam_size == 1 else f'beam {beam_size}'}"
            rivals[name] = functools.partial(teacher.write, tokens, beam_size)
    best = dict.fromkeys(rivals, float("inf"))
    for _ in range(TURNS):
        for name, work in rivals.items():
            best[name] = min(best[name], seconds(work))
    plain, remembering = (
        min(taken for name, taken in best.items() if kind in name) for kind in ("plain", "remembering")
    )

    config = model.config
    words = sum(map(len, ids)) / len(ids)
    print(
        f"\n## A teacher's translations: d {config.d_model}, {config.encoder_layers} + {config.decoder_layers} layers, "
        f"V {tokenizer.vocab_size}, {len(lines)} lines of {words:.1f} tokens, {CORES} cores\n"
    )
    header("decoder", "s", "sentences/s", "x plain torch", "x remembering torch")
    for name, taken in best.items():
        print(row(name, taken, f"{len(lines) / taken:.0f}", plain / taken, remembering / taken))

    expected = by_torch(model, ids, 1024)
    written = teachers["float32"].write(tokens, 1)
    outputs = [[tokenizer.id(token) for token in of.tokens] for of in written]
    same = [output == expected[i][0] for i, output in enumerate(outputs)]
    off = max(abs(of.score - expected[i][1]) for i, of in enumerate(written) if same[i])
    print("\n## The bars\n")
    header("what", "measured", "bar", "met")
    verdict("greedy, float32, x plain torch", plain / best["CTranslate2, float32, greedy"], 5, at_least=True)
    verdict("% of greedy translations as torch's", 100 * sum(same) / len(same), 99.5, at_least=True)
    print(row("largest difference of their scores", f"{off:.1e}", "<= 1e-03", "yes" if off <= 1e-3 else "NO"))


if __name__ == "__main__":
    main()
