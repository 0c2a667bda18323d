"""How fast a training step is: beside torch's bare matrix products, NMLA beside CTC, its feed, and beside its peers.

    python benchmarks/training.py                 # all of it, some minutes
    python benchmarks/training.py --only feeding

Prints Markdown. Rivals take turns, and the best of the turns counts, so that a busy moment of the machine hits all of
them; before that, a step on a tiny batch sets up what is set up once. Every step is what the training loop takes:
loss, backward, clipping, fused AdamW. Peak memory is a process's high-water mark above its level before it had a model,
over one such step, a process for each measurement (Linux): weights, gradients, optimizer and all that the step makes.

JoeyNMT takes part where it can be imported. It pins a protobuf of years ago, which training does not need, so:

    pip install --no-deps joeynmt==2.3.0
    pip install importlib-metadata matplotlib numpy packaging pyyaml sentencepiece subword-nmt tensorboard
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import multiprocessing
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from nmla.config import MachineConfig, ModelConfig, TrainConfig
from nmla.data.batching import Batch, collate
from nmla.data.corpus import Corpus
from nmla.data.prepare import prepare
from nmla.data.synthetic import HEADLINE, generate
from nmla.models.layers import length_mask, set_dropout, sinusoidal_positions
from nmla.models.pretrained import build_model
from nmla.text.tokenizer import BLANK, BOS, EOS, PAD, UNK
from nmla.training.feed import Examples, Place, step_data
from nmla.training.machine import start_fabric
from nmla.training.objective import Totals, batch_loss
from tables import header, row

DROPOUT, SMOOTHING, CLIP_NORM = 0.1, 0.1, 1.0
LENGTH = 25  # tokens of a sentence
LENGTHS = (15, 25, 40)  # where several batches are taken
PAIRS = 200_000  # of the corpus that is fed
SQUARE = 2048  # of the matrices that show what torch can do
TINY = 60  # output positions


@dataclass(frozen=True)
class Size:
    title: str
    vocabulary: int
    model: ModelConfig


BASE = Size("d 512, 6 + 6 layers, V 32000", 32000, ModelConfig())
SMALL = Size(
    "d 128, 3 + 3 layers, V 4000",
    4000,
    ModelConfig(d_model=128, heads=4, feed_forward=512, encoder_layers=3, decoder_layers=3),
)
CTC, NMLA, OURS, TORCH, JOEY = "CTC", "NMLA, n = 2", "autoregressive", "torch.nn.Transformer", "JoeyNMT"
STAGES = {
    CTC: TrainConfig(steps=1, loss="ctc", dropout=DROPOUT),
    NMLA: TrainConfig(steps=1, loss="ngram", ngram=2, dropout=DROPOUT),
    OURS: TrainConfig(steps=1, loss="cross_entropy", label_smoothing=SMOOTHING, dropout=DROPOUT),
}


def random_batch(size: Size, positions: int, length: int = LENGTH, seed: int = 1) -> Batch:
    """Sentences of about `length` tokens that a CTC model gives `positions` in all, of like length as in training."""
    generator = torch.Generator().manual_seed(seed)

    def sentences(lengths: Tensor) -> list[list[int]]:
        return [torch.randint(BLANK + 1, size.vocabulary, (n,), generator=generator).tolist() for n in lengths.tolist()]

    count = max(positions // ((length + 1) * size.model.upsample), 1)
    sources = sentences(torch.randint(length - 1, length + 1, (count,), generator=generator))
    targets = sentences(torch.randint(length * 4 // 5, length * 6 // 5 + 1, (count,), generator=generator))
    return collate(sources, [[target] for target in targets])


def words(batch: Batch) -> int:
    return int(batch.target_lengths.sum())


# What is trained: ours, and the peers in the same frame.


@dataclass(frozen=True)
class Trainee:
    network: Any
    optimizer: Any
    loss: Callable[[Any, Batch], Tensor]

    def step(self, batch: Batch) -> None:
        """What the loop does between two batches."""
        self.network.train()
        torch.manual_seed(1)
        fabric().backward(self.loss(self.network, batch))
        norm = fabric().clip_gradients(self.network, self.optimizer, max_norm=CLIP_NORM, error_if_nonfinite=False)
        assert norm is not None
        assert norm.isfinite()
        self.optimizer.step()
        self.optimizer.zero_grad()


@functools.cache
def fabric() -> Fabric:
    return start_fabric(MachineConfig(accelerator="cpu"))


def in_frame(model: nn.Module, loss: Callable[[Any, Batch], Tensor]) -> Trainee:
    """With the loop's optimizer; it learns next to nothing, so that many steps on one batch lead nowhere."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-7, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, fused=True)
    return Trainee(*fabric().setup(model, optimizer), loss)


def ours(config: ModelConfig, stage: TrainConfig) -> Callable[[Any, Batch], Tensor]:
    def loss(network: nn.Module, batch: Batch) -> Tensor:
        return batch_loss(network, config, batch, stage, Totals(words(batch), len(batch.source)), 0.0)

    return loss


def our_model(name: str, size: Size) -> tuple[nn.Module, Callable[[Any, Batch], Tensor]]:
    config = replace(size.model, family="autoregressive" if name == OURS else "ctc")
    model = build_model(config, size.vocabulary)
    set_dropout(model, DROPOUT)
    return model, ours(config, STAGES[name])


def shifted(batch: Batch) -> tuple[Tensor, Tensor]:
    """What a decoder is given, and what it should write: targets after BOS, and before EOS."""
    given = F.pad(batch.target, (1, 0), value=BOS)
    return given, F.pad(batch.target, (0, 1), value=PAD).scatter(1, batch.target_lengths[:, None], EOS)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it lacks of a translation model: one embedding, and positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        config = size.model
        self.embedding = nn.Embedding(size.vocabulary, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.dropout = nn.Dropout(DROPOUT)
        sizes = (config.d_model, config.heads, config.encoder_layers, config.decoder_layers, config.feed_forward)
        with warnings.catch_warnings(action="ignore"):  # of what it could do without gradients
            self.body = nn.Transformer(*sizes, DROPOUT, batch_first=True, norm_first=True)
        # Dropout only where ours has it, for it to do the same work: not of attention, nor within the feed-forward.
        for layer in [*self.body.encoder.layers, *self.body.decoder.layers]:
            layer.dropout.p = layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0

    def forward(self, source: Tensor, source_lengths: Tensor, given: Tensor) -> Tensor:
        padding = ~length_mask(source_lengths, source.shape[1])
        states = self.body(
            self._embed(source),
            self._embed(given),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(given.shape[1]),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.linear(states, self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return self.dropout(x + sinusoidal_positions(x.shape[1], x.shape[2], like=x))


def torch_model(size: Size) -> tuple[nn.Module, Callable[[Any, Batch], Tensor]]:
    def loss(network: nn.Module, batch: Batch) -> Tensor:
        given, wanted = shifted(batch)
        logits = network(batch.source, batch.source_lengths, given)
        total = F.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING, reduction="sum"
        )
        return total / words(batch)

    return TorchTransformer(size), loss


def joey_model(size: Size) -> tuple[nn.Module, Callable[[Any, Batch], Tensor]]:
    from joeynmt.model import build_model as build_joey
    from joeynmt.vocabulary import Vocabulary

    logging.disable(logging.INFO)
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "sep_token": None}
    ids = {"unk_id": 0, "pad_id": 1, "bos_id": BOS, "eos_id": EOS, "sep_id": None}
    vocabulary = Vocabulary([], SimpleNamespace(**names, **ids, lang_tags=[]))
    # Adding tokens takes it time that is quadratic in their number; and its specials have another order than ours.
    for i in range(len(vocabulary), size.vocabulary):
        vocabulary._itos.append(str(i))
        vocabulary._stoi[str(i)] = i
    vocabulary.pad_index, vocabulary.unk_index = PAD, UNK
    config = size.model
    common = {
        "type": "transformer",
        "embeddings": {"embedding_dim": config.d_model, "scale": True, "dropout": DROPOUT},
        "hidden_size": config.d_model,
        "ff_size": config.feed_forward,
        "num_heads": config.heads,
        "dropout": DROPOUT,
        "layer_norm": "pre",
    }
    settings = {
        "tied_embeddings": True,
        "tied_softmax": True,
        "encoder": {**common, "num_layers": config.encoder_layers},
        "decoder": {**common, "num_layers": config.decoder_layers},
    }
    model = build_joey(settings, vocabulary, vocabulary)
    model.loss_function = ("crossentropy", SMOOTHING)
    for module in model.modules():  # dropout as in TorchTransformer
        if type(module).__name__ == "MultiHeadedAttention":
            module.dropout.p = 0.0
        if type(module).__name__ == "PositionwiseFeedForward":
            first, _ = (part for part in module.pwff_layer if isinstance(part, nn.Dropout))
            first.p = 0.0

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        given, wanted = shifted(batch)
        total, *_ = network(
            return_type="loss",
            src=batch.source,
            src_mask=length_mask(batch.source_lengths, batch.source.shape[1])[:, None],
            src_length=batch.source_lengths,
            trg_input=given,
            trg=wanted,
            trg_mask=length_mask(batch.target_lengths + 1, given.shape[1])[:, None],
        )
        return total / words(batch)

    return model, loss


def model_of(name: str, size: Size) -> tuple[nn.Module, Callable[[Any, Batch], Tensor]]:
    if name == TORCH:
        return torch_model(size)
    return joey_model(size) if name == JOEY else our_model(name, size)


def trainees(names: Iterable[str], size: Size) -> dict[str, Trainee]:
    """Ready to go, the first step done. CTC and NMLA share a model, as pretraining and fine-tuning do."""
    found: dict[str, Trainee] = {}
    for name in names:
        if name == NMLA and CTC in found:
            found[name] = replace(found[CTC], loss=ours(size.model, STAGES[NMLA]))
        else:
            found[name] = in_frame(*model_of(name, size))
        found[name].step(random_batch(size, TINY, length=8))
    return found


def peers() -> list[str]:
    return [OURS, TORCH, *([JOEY] if importlib.util.find_spec("joeynmt") else [])]


# How it is measured.


def best_seconds(actions: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(turns):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def cores() -> int:
    return len(os.sched_getaffinity(0))


def each_thread_count() -> Iterator[int]:
    """One thread, then all cores, of which the rest of a section goes on with."""
    for threads in sorted({1, cores()}):
        torch.set_num_threads(threads)
        yield threads


def status_mebibytes(field: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


def peak_in_this_process(name: str, size: Size, positions: int) -> float:
    torch.set_num_threads(cores())
    if name == JOEY:
        importlib.import_module("joeynmt.model")
    fabric()
    before = status_mebibytes("VmRSS")
    trainee = trainees([name], size)[name]
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark falls to the present
    trainee.step(random_batch(size, positions))
    return status_mebibytes("VmHWM") - before


def peak(name: str, size: Size, positions: int) -> float:
    # Forked before this process has any threads, so that torch need not be imported again.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(peak_in_this_process, (name, size, positions))


Peaks = dict[tuple[str, Size], float]
Bar = tuple[str, float, str, bool]


def in_threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


# 1. The rate of a step beside that of torch's matrix products.


def products(config: ModelConfig, vocabulary: int, batch: Batch) -> list[tuple[int, int, int, int]]:
    """(how many, rows, inner, outer) of the products with a weight that a model's forward pass makes.

    Rows count padding, which is multiplied too. Left out are attention's own products, queries with keys and weights
    with values, some 1 % at these lengths, and all that is no product: so a rate is never too high.
    """
    sentences, source = batch.source.shape
    own = batch.target.shape[1] + 1 if config.family == "autoregressive" else source * config.upsample
    source_rows, rows = sentences * source, sentences * own
    width, inner = config.d_model, config.feed_forward
    found = []
    for layers, n, attentions in ((config.encoder_layers, source_rows, 1), (config.decoder_layers, rows, 2)):
        found += [
            (2 * attentions * layers, n, width, width),  # queries and outputs
            (layers, n, width, 2 * width),  # keys and values of what attends to itself
            (layers, n, width, inner),
            (layers, n, inner, width),
        ]
    found.append((config.decoder_layers, source_rows, width, 2 * width))  # keys and values of the encoder's states
    found.append((1, rows, width, vocabulary))
    return found


def flops(config: ModelConfig, vocabulary: int, batch: Batch) -> int:
    """A multiplication and an addition each, forward, and backward for the gradients of input and weight."""
    return sum(3 * 2 * n * rows * inner * outer for n, rows, inner, outer in products(config, vocabulary, batch))


def check_flops() -> None:
    """The formula says what torch itself counts, on a model small enough to count at once."""
    sizes = {"d_model": 8, "heads": 2, "feed_forward": 24, "encoder_layers": 2, "decoder_layers": 3}
    for name, family in ((CTC, "ctc"), (NMLA, "ctc"), (OURS, "autoregressive")):
        size = Size("", 50, ModelConfig(family=family, **sizes))
        model, loss = our_model(name, size)
        batch = random_batch(size, TINY, length=8)
        with FlopCounterMode(display=False) as counter:
            loss(model, batch).backward()
        ops = counter.get_flop_counts()["Global"]
        counted = sum(ops.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
        assert counted == flops(size.model, size.vocabulary, batch), (name, ops)


def product_actions(shapes: Iterable[tuple[int, int, int]]) -> dict[str, Callable[[], object]]:
    """For each (rows, inner, outer) what a layer multiplies: forward, and backward for its input and its weight."""

    def action(rows: int, inner: int, outer: int) -> Callable[[], object]:
        x, weight, grad = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
        return lambda: (x @ weight.t(), grad @ weight, grad.t() @ x)

    return {str(shape): action(*shape) for shape in shapes}


def rate_section(positions: int, turns: int, peaks: Peaks) -> list[Bar]:
    check_flops()
    batch = random_batch(BASE, positions)
    names = (CTC, NMLA, OURS)
    configs = {name: replace(BASE.model, family="autoregressive" if name == OURS else "ctc") for name in names}
    work = {name: flops(config, BASE.vocabulary, batch) for name, config in configs.items()}
    needed = products(configs[CTC], BASE.vocabulary, batch)
    counts: dict[str, int] = {}
    for n, *shape in needed:
        counts[str(tuple(shape))] = counts.get(str(tuple(shape)), 0) + n
    running = trainees(names, BASE)
    bars: list[Bar] = []
    print(f"\n## The rate of a training step, {BASE.title}, {len(batch.source)} sentences\n")
    print("Counted are products with weights, forward and backward; not attention's own, nor anything else.")
    for threads in each_thread_count():
        one = torch.randn(SQUARE, SQUARE)
        alone = product_actions({tuple(shape) for _, *shape in needed})
        actions = {f"square {i}": lambda one=one: one @ one for i in range(3)}
        actions |= {name: functools.partial(trainee.step, batch) for name, trainee in running.items()}
        times = best_seconds(actions | alone, turns)
        square = 2 * SQUARE**3 / min(times[f"square {i}"] for i in range(3)) / 1e9
        shaped = work[CTC] / sum(counts[shape] * times[shape] for shape in alone) / 1e9
        print(f"\n{in_threads(threads)}:\n")
        header("what", "s", "TFLOP", "GFLOP/s", "x torch, square", "x torch, the model's shapes", "words/s", "peak MiB")
        print(row(f"torch, {SQUARE} x {SQUARE} products", "", "", f"{square:.1f}", 1.0, square / shaped, "", ""))
        print(row("torch, products of the model's shapes", "", "", f"{shaped:.1f}", shaped / square, 1.0, "", ""))
        for name in names:
            rate = work[name] / times[name] / 1e9
            cells = (times[name], work[name] / 1e12, f"{rate:.1f}", rate / square, rate / shaped)
            print(row(name, *cells, f"{words(batch) / times[name]:.0f}", f"{peaks[name, BASE]:.0f}"))
            bars.append(
                (f"{name}, {in_threads(threads)}: rate, x torch's", rate / square, ">= 0.6", rate >= 0.6 * square)
            )
    return bars


# 2. Fine-tuning beside pretraining.


def words_section(positions: int, turns: int, peaks: Peaks) -> list[Bar]:
    bars: list[Bar] = []
    print(f"\n## NMLA beside CTC: sentences of {', '.join(map(str, LENGTHS))} tokens, {in_threads(cores())}\n")
    print(f"Batches of {positions // 2} positions; peak memory is that of a batch of {positions}.\n")
    header("model", "CTC words/s", "NMLA words/s", "NMLA x CTC", "CTC peak MiB", "NMLA peak MiB")
    torch.set_num_threads(cores())
    for size in (BASE, SMALL):
        running = trainees((CTC, NMLA), size)
        batches = [random_batch(size, positions // 2, length, seed=length) for length in LENGTHS]
        actions = {
            f"{name} {i}": functools.partial(trainee.step, batch)
            for i, batch in enumerate(batches)
            for name, trainee in running.items()
        }
        times = best_seconds(actions, turns)
        total = sum(map(words, batches))
        rate = {name: total / sum(times[f"{name} {i}"] for i in range(len(batches))) for name in running}
        ratio = rate[NMLA] / rate[CTC]
        memory = (f"{peaks[name, size]:.0f}" for name in (CTC, NMLA))
        print(row(size.title, f"{rate[CTC]:.0f}", f"{rate[NMLA]:.0f}", ratio, *memory))
        bars.append((f"NMLA words/s, x CTC, {size.title}", ratio, ">= 1", ratio >= 1))
    return bars


# 3. Feeding.


def make_corpus(directory: pathlib.Path, pairs: int) -> Corpus:
    """Generated sentences, one to five on a line, which makes about 25 tokens on average."""
    sentences = generate(HEADLINE, pairs, seed=1)
    paths = {}
    for side in ("source", "target"):
        texts = [getattr(sentence, side) for sentence in sentences]
        lines = [" ".join(texts[(i + 7919 * j) % pairs] for j in range(1 + i % 5)) for i in range(pairs)]
        for split, chosen in (("train", lines), ("valid", lines[:10])):
            paths[split, side] = directory / f"{split}.{side}.txt"
            paths[split, side].write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    train, valid = ((paths[split, "source"], paths[split, "target"]) for split in ("train", "valid"))
    prepare(train=[train], valid=[valid], output=directory / "corpus", vocab_size=300)
    return Corpus.load(directory / "corpus")


def feeding_section(positions: int, turns: int, peaks: Peaks) -> list[Bar]:
    del peaks  # batches are small
    bars: list[Bar] = []
    stage = replace(STAGES[CTC], max_tokens=positions)
    torch.set_num_threads(cores())
    print(f"\n## Feeding, {PAIRS} pairs, batches of {positions} positions, {in_threads(cores())} for the step\n")
    with tempfile.TemporaryDirectory() as directory:
        corpus = make_corpus(pathlib.Path(directory), PAIRS)
        header("model", "batches an epoch", "ms a batch, with the epoch's sorting", "ms a step", "share, %")
        for size in (BASE, SMALL):
            examples = Examples.of(corpus, size.model, stage)
            batches, seconds = 0, float("inf")
            for turn in range(turns):
                start = time.perf_counter()
                data = step_data(examples, stage, turn + 1, Place())
                # To the first batch of the second epoch, and so with its sorting too.
                batches = sum(1 for _ in itertools.takewhile(lambda taken: taken.batches[0][0].epoch == 0, data))
                seconds = min(seconds, (time.perf_counter() - start) / batches)
            trainee = trainees([CTC], size)[CTC]
            some = [taken.batches[0][1] for taken in itertools.islice(step_data(examples, stage, 1, Place()), 2)]
            times = best_seconds({str(i): functools.partial(trainee.step, b) for i, b in enumerate(some)}, turns)
            step = sum(times.values()) / len(times)
            print(row(size.title, batches, 1000 * seconds, f"{1000 * step:.0f}", f"{100 * seconds / step:.3f}"))
            bars.append((f"feeding, % of a step, {size.title}", 100 * seconds / step, "< 2", seconds < 0.02 * step))
    return bars


# 4. Peers.


def peers_section(positions: int, turns: int, peaks: Peaks) -> list[Bar]:
    bars: list[Bar] = []
    print("\n## The autoregressive step beside its peers\n")
    print("All on the same batch, with the same optimizer, pre-norm, tied matrices, label smoothing and dropout.")
    if JOEY in peers():
        print(f"JoeyNMT is {importlib.metadata.version('joeynmt')}.")
    else:
        print("JoeyNMT cannot be imported; the head of this script says how to install it.")
    for size in (BASE, SMALL):
        batch = random_batch(size, positions)
        running = trainees(peers(), size)
        for threads in each_thread_count():
            actions = {name: functools.partial(trainee.step, batch) for name, trainee in running.items()}
            times = best_seconds(actions, turns if size is BASE else 5 * turns)
            print(f"\n{size.title}, {len(batch.source)} sentences, {in_threads(threads)}:\n")
            header("model", "s", "words/s", "ours x theirs", "peak MiB", "ours x theirs")
            for name in running:
                ratio, memory = times[name] / times[OURS], peaks[OURS, size] / peaks[name, size]
                rate = f"{words(batch) / times[name]:.0f}"
                print(
                    row("ours" if name == OURS else name, times[name], rate, ratio, f"{peaks[name, size]:.0f}", memory)
                )
                if name != OURS:
                    text = f"words/s, x {name}, {size.title}, {in_threads(threads)}"
                    bars.append((text, ratio, ">= 1", ratio >= 1))
    return bars


SECTIONS: dict[str, tuple[Callable[[int, int, Peaks], list[Bar]], Callable[[], list[tuple[str, Size]]]]] = {
    "rate": (rate_section, lambda: [(name, BASE) for name in (CTC, NMLA, OURS)]),
    "words": (words_section, lambda: [(name, size) for size in (BASE, SMALL) for name in (CTC, NMLA)]),
    "feeding": (feeding_section, list),
    "peers": (peers_section, lambda: [(name, size) for size in (BASE, SMALL) for name in peers()]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a training step.")
    parser.add_argument("--only", choices=SECTIONS, help="one section alone")
    parser.add_argument("--positions", type=int, default=4096, help="output positions of a CTC model in a batch")
    parser.add_argument("--turns", type=int, default=2, help="of which the best counts")
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(SECTIONS)
    # Memory first: see peak.
    wanted = dict.fromkeys(key for name in chosen for key in SECTIONS[name][1]())
    peaks = {(name, size): peak(name, size, options.positions) for name, size in wanted}
    bars = [bar for name in chosen for bar in SECTIONS[name][0](options.positions, options.turns, peaks)]
    print("\n## The bars\n")
    header("what", "measured", "bar", "met")
    for text, value, bar, met in bars:
        print(row(text, value, bar, "yes" if met else "NO"))


if __name__ == "__main__":
    main()
