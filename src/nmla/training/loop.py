"""The training loop: one for every model and every loss."""

import hashlib
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
from nmla.data.corpus import TOKENIZER, Corpus, IntArray, shortest_paths
from nmla.decoding.translator import Translator
from nmla.errors import DataError, NmlaError, UsageError
from nmla.evaluation.score import mean_entropy, score
from nmla.files import new_directory, write_text
from nmla.models.ctc import CTCTransformer
from nmla.models.layers import set_dropout
from nmla.models.pretrained import WEIGHTS, load_model, save_model
from nmla.progress import progress_bar, say
from nmla.training.checkpoint import (
    Progress,
    checkpoints,
    load_checkpoint,
    remove_incomplete,
    save_checkpoint,
)
from nmla.training.objective import DIVERGED, loss_sum, weight
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

    `output` gets recipe.yaml, start.txt (which weights it began from), log.jsonl, checkpoints/, and at the end model/.
    Called again, it goes on from the last checkpoint.
    """
    own_recipe = replace(recipe, train=stage, finetune=None)
    began_from = hashlib.sha256((start / WEIGHTS).read_bytes()).hexdigest() if start else "random weights"
    _refuse_another_run(output, own_recipe, began_from)
    usable = _usable(corpus, recipe, stage)
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
    remove_incomplete(output / "checkpoints")
    progress = load_checkpoint(output / "checkpoints", model, optimizer)
    if progress.step > stage.steps:
        raise UsageError(f"{output}: steps must be at least {progress.step}, which it has done, but is {stage.steps}")
    write_text(output / "recipe.yaml", recipe_yaml(own_recipe))
    write_text(output / "start.txt", f"{began_from}\n")
    network, optimizer = fabric.setup(model, optimizer)
    translator = Translator(model, corpus.tokenizer)
    batches = _batches(corpus, usable, recipe, stage, progress)
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
            norm = fabric.clip_gradients(network, optimizer, max_norm=stage.clip_norm, error_if_nonfinite=False)
            assert norm is not None
            if not norm.isfinite():
                raise NmlaError(f"step {step}: the gradient must be finite, but its norm is {norm}; {DIVERGED}")
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
    scores = score([t.text for t in translations], [[targets[0] for targets in corpus.valid_targets]])
    return {
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "length_ratio": scores.length_ratio,
        "entropy": mean_entropy(translations),
    }


def _usable(corpus: Corpus, recipe: Recipe, stage: TrainConfig) -> IntArray:
    """The pairs that can be trained on: the target fits into the output, and the output into a batch."""
    positions = _positions(corpus, recipe)
    targets = corpus.train_target
    too_short = shortest_paths(targets) > positions
    too_long = positions > stage.max_tokens
    usable = np.flatnonzero(~too_short & ~too_long & (targets.lengths > 0))
    if not len(usable):
        raise DataError("at least one target must fit into upsample x source length positions, but none does")
    if len(usable) < len(positions):
        say(
            f"{len(positions) - len(usable)} of {len(positions)} pairs are skipped: {too_short.sum()} targets need "
            f"more positions, {too_long.sum()} outputs are longer than max_tokens"
        )
    return usable


def _positions(corpus: Corpus, recipe: Recipe) -> IntArray:
    """Output positions of each pair; a source has one token more than the corpus holds, EOS."""
    return (corpus.train_source.lengths + 1) * recipe.model.upsample


def _batches(
    corpus: Corpus, usable: IntArray, recipe: Recipe, stage: TrainConfig, progress: Progress
) -> Iterator[tuple[Batch, Progress]]:
    """Batches without end from where `progress` stands, each with where the run stands after it."""
    positions = _positions(corpus, recipe)[usable]
    for epoch in itertools.count(progress.epoch):
        order = epoch_batches(positions, stage.max_tokens, recipe.seed, epoch)
        for i in range(progress.batch if epoch == progress.epoch else 0, len(order)):
            batch = collate(corpus.train_source, corpus.train_target, usable[order[i]])
            yield batch, Progress(epoch=epoch, batch=i + 1)


def _refuse_another_run(output: Path, recipe: Recipe, began_from: str) -> None:
    """Refuse to go on with a run that other settings or other weights began.

    More steps are no other run, nor is a run that was moved, and one without a checkpoint is nothing to go on with.
    """
    if not checkpoints(output / "checkpoints"):
        return
    old, new = (_flat(asdict(r)) for r in (load_recipe(output / "recipe.yaml"), recipe))
    changed = [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in old | new
        if old.get(key) != new.get(key) and key not in ("output", "train.steps")
    ]
    if changed:
        raise UsageError(
            f"{output}: a run must keep its settings, but {', '.join(changed)}; "
            "choose another output, or remove this one"
        )
    if (output / "start.txt").read_text(encoding="utf-8").strip() != began_from:
        raise UsageError(f"{output}: began from other weights than there are now; remove it to train this stage anew")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class _Log:
    """JSON lines, one a record; when a run goes on, what came after its checkpoint is dropped and written again."""

    def __init__(self, path: Path, step: int) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        kept = [line for line in text.split("\n")[:-1] if json.loads(line)["step"] <= step]  # a kill may cut the last
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, seconds: float, **values: float) -> None:
        record = {"event": event, "step": step, "seconds": round(seconds, 3), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
