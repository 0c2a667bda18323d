"""The training loop: one for every model and every loss."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from nmla.config import Recipe, TrainConfig, load_recipe, recipe_yaml
from nmla.data.batching import Batch, collate, epoch_batches
from nmla.data.corpus import TOKENIZER, Corpus, shortest_paths
from nmla.decoding.translator import Translator
from nmla.errors import DataError, UsageError
from nmla.evaluation.score import mean_entropy, score
from nmla.files import new_directory, write_text
from nmla.models.ctc import CTCTransformer
from nmla.models.layers import set_dropout
from nmla.models.pretrained import load_model, save_model
from nmla.progress import progress_bar, say
from nmla.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from nmla.training.objective import loss_sum, weight
from nmla.training.schedule import learning_rate

LOG_EVERY = 10  # steps


def train(recipe: Recipe) -> Path:
    """Run the recipe's stages and return the directory of the final model."""
    corpus = Corpus.load(Path(recipe.data.corpus))
    model = train_stage(recipe, recipe.train, corpus, Path(recipe.output) / "train")
    if recipe.finetune is not None:
        model = train_stage(recipe, recipe.finetune, corpus, Path(recipe.output) / "finetune", start=model)
    return model


def train_stage(recipe: Recipe, stage: TrainConfig, corpus: Corpus, output: Path, start: Path | None = None) -> Path:
    """Train one stage, from the weights in `start` or from random ones, and return the directory of its model.

    `output` gets log.jsonl, checkpoints/, and at the end model/. Called again, it goes on from the last checkpoint.
    """
    _claim(output, replace(recipe, train=stage, finetune=None))
    fabric = Fabric(devices=1)
    torch.manual_seed(recipe.seed)
    model = load_model(start) if start else CTCTransformer(recipe.model, corpus.tokenizer.vocab_size)
    set_dropout(model, stage.dropout)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        stage.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-8,
        weight_decay=stage.weight_decay,
        fused=True,
    )
    progress = load_checkpoint(output / "checkpoints", model, optimizer)
    network, optimizer = fabric.setup(model, optimizer)
    translator = Translator(model, corpus.tokenizer)
    batches = _batches(corpus, recipe, stage, progress)
    log = _Log(output / "log.jsonl", progress.step)
    began = time.perf_counter() - progress.seconds
    losses: list[float] = []

    with progress_bar() as bar, log:
        task = bar.add_task(output.name, total=stage.steps, completed=progress.step)
        for step in range(progress.step + 1, stage.steps + 1):
            network.train()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, stage)
            taken = list(itertools.islice(batches, stage.accumulate))
            total = sum(weight(batch, stage) for batch, _ in taken)
            loss = 0.0
            for batch, _ in taken:
                part = loss_sum(network, batch.to(fabric.device), stage) / total
                fabric.backward(part)
                loss += part.item()
            norm = fabric.clip_gradients(network, optimizer, max_norm=stage.clip_norm)
            assert norm is not None
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            seconds = time.perf_counter() - began
            progress = replace(taken[-1][1], step=step, seconds=seconds)

            last, checkpoint = step == stage.steps, step % stage.checkpoint_every == 0
            if step % LOG_EVERY == 0 or checkpoint or last:  # with a checkpoint, so that a resumed run logs the same
                mean = float(np.mean(losses))
                losses.clear()
                log.write("train", step, seconds, loss=mean, lr=learning_rate(step, stage), gradient_norm=norm.item())
                bar.update(task, description=f"{output.name}, loss {mean:.3f}")
            if step % stage.validate_every == 0 or last:
                valid = validate(translator, corpus)
                log.write("valid", step, time.perf_counter() - began, **valid)
                bar.console.print(
                    f"{output.name} step {step}: valid BLEU {valid['bleu']:.1f}, chrF {valid['chrf']:.1f}, "
                    f"length ratio {valid['length_ratio']:.2f}, entropy {valid['entropy']:.2f}",
                    highlight=False,
                    soft_wrap=True,
                )
            if checkpoint or last:
                save_checkpoint(output / "checkpoints", model, optimizer, progress)
            bar.update(task, completed=step)

    with new_directory(output / "model") as directory:
        save_model(model, directory)
        corpus.tokenizer.save(directory / TOKENIZER)
    return output / "model"


def validate(translator: Translator, corpus: Corpus) -> dict[str, float]:
    """Translate the validation set as a user would, and score it."""
    translator.model.eval()
    translations = translator.translate_batch(corpus.valid_source)
    scores = score([t.text for t in translations], [corpus.valid_target])
    return {
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "length_ratio": scores.length_ratio,
        "entropy": mean_entropy(translations),
    }


def _batches(
    corpus: Corpus, recipe: Recipe, stage: TrainConfig, progress: Progress
) -> Iterator[tuple[Batch, Progress]]:
    """Batches without end from where `progress` stands, each with where the run stands after it."""
    positions = (corpus.train_source.lengths + 1) * recipe.model.upsample  # one more for EOS
    usable = np.flatnonzero(shortest_paths(corpus.train_target) <= positions)
    if len(usable) < len(positions):
        say(f"{len(positions) - len(usable)} of {len(positions)} pairs are skipped: their targets need more positions")
    if not len(usable):
        raise DataError("at least one target must fit into upsample x source length positions, but none does")
    for epoch in itertools.count(progress.epoch):
        order = epoch_batches(positions[usable], stage.max_tokens, recipe.seed, epoch)
        for i in range(progress.batch if epoch == progress.epoch else 0, len(order)):
            batch = collate(corpus.train_source, corpus.train_target, usable[order[i]])
            yield batch, Progress(epoch=epoch, batch=i + 1)


def _claim(output: Path, recipe: Recipe) -> None:
    """Note the recipe in `output`; refuse to go on with a run that other settings began.

    More steps are no other run, nor is a run that was moved.
    """
    path = output / "recipe.yaml"
    if path.exists():
        was = load_recipe(path)
        old, new = (_flat(asdict(r)) for r in (was, recipe))
        changed = [f"{key} {old.get(key)} -> {new.get(key)}" for key in old | new if old.get(key) != new.get(key)]
        changed = [change for change in changed if not change.startswith(("output ", "train.steps "))]
        if changed:
            raise UsageError(
                f"{output}: a run must keep its settings, but {', '.join(changed)}; "
                "choose another output, or remove this one"
            )
    write_text(path, recipe_yaml(recipe))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class _Log:
    """JSON lines, one a record; when a run goes on, what came after its checkpoint is dropped and written again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        write_text(path, "".join(line for line in kept if json.loads(line)["step"] <= step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, seconds: float, **values: float) -> None:
        record = {"event": event, "step": step, "seconds": round(seconds, 3), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
