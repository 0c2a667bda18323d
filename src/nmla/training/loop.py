"""The training loop: one for every model and every loss."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors import SafetensorError

from nmla.config import Recipe, TrainConfig
from nmla.data.corpus import Corpus
from nmla.decoding.translator import Translator
from nmla.errors import NmlaError, Stopped, UsageError
from nmla.evaluation.score import mean_entropy, score
from nmla.files import new_directory
from nmla.models.layers import set_dropout
from nmla.models.pretrained import build_model, load_model, save_model
from nmla.models.transformer import Transformer
from nmla.progress import progress_bar, say
from nmla.training.checkpoint import Progress, average, keep_only, load_checkpoint, numbered, save_checkpoint
from nmla.training.feed import Examples, StepData, step_data
from nmla.training.log import Log, Meter
from nmla.training.machine import StopSignal, agreed, explained, start_fabric
from nmla.training.objective import DIVERGED, batch_loss
from nmla.training.run import begin_run
from nmla.training.schedule import learning_rate

LOG_EVERY = 10  # steps
OVERFLOWS = 50  # fp16 steps in a row without a finite gradient, while its scale is found, that are not yet an error


def train(recipe: Recipe, fabric: Fabric | None = None) -> Path:
    """Run the recipe's stages and return the directory of the final model."""
    fabric = fabric or start_fabric(recipe.machine)
    corpus = Corpus.load(Path(recipe.data.corpus))
    model = train_stage(recipe, recipe.train, corpus, Path(recipe.output) / "train", fabric=fabric)
    if recipe.finetune is not None:
        model = train_stage(recipe, recipe.finetune, corpus, Path(recipe.output) / "finetune", model, fabric)
    return model


def train_stage(
    recipe: Recipe,
    stage: TrainConfig,
    corpus: Corpus,
    output: Path,
    start: Path | None = None,
    fabric: Fabric | None = None,
) -> Path:
    """Train one stage, from the weights in `start` or from random ones, and return the directory of its model.

    `output` gets recipe.yaml, start.txt (which weights it began from), log.jsonl, checkpoints/, best/, and at the end
    model/. Called again, it goes on from the last checkpoint.
    """
    fabric = fabric or start_fabric(recipe.machine)
    examples = Examples.of(corpus, recipe.model, stage)
    refused: NmlaError | None = None
    if fabric.is_global_zero:
        try:
            begin_run(output, replace(recipe, train=stage, finetune=None), start)
        except NmlaError as error:
            refused = error
        if examples.why:
            say(examples.why)
    if refused := fabric.broadcast(refused):  # all processes stop, none is left waiting
        raise refused
    torch.manual_seed(recipe.seed)
    model = load_model(start)[0] if start else build_model(recipe.model, corpus.tokenizer.vocab_size)
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
    if progress.step > stage.steps:
        raise UsageError(f"{output}: steps must be at least {progress.step}, which it has done, but is {stage.steps}")
    run = _Run(recipe, stage, corpus, output, fabric, examples, model, optimizer)
    try:
        run.go_on(progress)
        if fabric.is_global_zero:
            run.write_final()
        fabric.barrier()
    except RuntimeError as error:
        if not (why := explained(error)):
            raise
        raise NmlaError(f"{output}: {why} ({str(error).splitlines()[0]}); saved up to step {run.saved}") from None
    return output / "model"


class _Run:
    """One stage while it runs."""

    def __init__(
        self,
        recipe: Recipe,
        stage: TrainConfig,
        corpus: Corpus,
        output: Path,
        fabric: Fabric,
        examples: Examples,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.recipe, self.stage, self.corpus, self.output = recipe, stage, corpus, output
        self.fabric, self.examples, self.model = fabric, examples, model
        network: Any = torch.compile(model) if recipe.machine.compile else model
        self.network, self.optimizer = fabric.setup(network, optimizer)
        self.progress = Progress()
        self.saved = 0  # the step of the last checkpoint
        self.overflows = 0
        self.scaler = getattr(fabric.strategy.precision, "scaler", None)  # of the loss, in fp16

    def go_on(self, progress: Progress) -> None:
        """Take the steps that are left, to the last or until too many validations brought no gain."""
        self.progress, self.saved = progress, progress.step
        if self.scaler is not None and progress.scale:
            self.scaler.load_state_dict(progress.scale)
        fabric, stage = self.fabric, self.stage
        data = step_data(self.examples, stage, self.recipe.seed, progress.place, fabric.global_rank, fabric.world_size)
        log = Log(self.output, progress.step, self.recipe.machine.tensorboard, enabled=fabric.is_global_zero)
        began = time.perf_counter() - progress.seconds
        meter = Meter()
        with progress_bar(enabled=fabric.is_global_zero) as bar, log, StopSignal() as stop:
            task = bar.add_task(self.output.name, total=stage.steps, completed=progress.step)
            while self.progress.step < stage.steps and not given_up(self.progress, stage):
                step = self.progress.step + 1
                taken = next(data)
                loss, norm = self._step(step, taken)
                meter.add(loss, taken.totals.tokens)
                seconds = time.perf_counter() - began
                self.progress = replace(self.progress, step=step, place=taken.after, seconds=seconds)

                stopping = agreed(stop.number, fabric)
                last = step == stage.steps
                checkpoint = last or stopping or step % stage.checkpoint_every == 0
                if checkpoint or step % LOG_EVERY == 0:  # with a checkpoint, so that a resumed run logs the same
                    values = meter.read(fabric)
                    log.write("train", step, seconds, **values, gradient_norm=norm, lr=learning_rate(step, stage))
                    bar.update(task, description=self._line(values["loss"], norm, values["words_per_second"]))
                if last or step % stage.validate_every == 0:
                    self._validate(log, began)
                    meter.pause()
                if checkpoint or given_up(self.progress, stage):
                    self._save()
                bar.update(task, completed=step)
                if stopping and not last:
                    where = f"{self.output}: stopped and saved at step {step}; the same command goes on from there"
                    raise Stopped(stopping, where)
        if given_up(self.progress, stage) and fabric.is_global_zero:
            say(f"{self.output.name}: stopped, as {stage.patience} validations brought no higher BLEU")

    def _step(self, step: int, taken: StepData) -> tuple[float, float]:
        """One optimizer step; returns its loss and the norm of its gradient."""
        fabric, stage = self.fabric, self.stage
        self.network.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, stage)
        loss = 0.0
        for i, (place, batch) in enumerate(taken.batches):
            # Each batch draws random numbers of its own: they depend neither on where a run was stopped nor on how many
            # devices share it.
            torch.manual_seed(place.seed(self.recipe.seed))
            with fabric.no_backward_sync(self.network, enabled=i + 1 < len(taken.batches)):
                part = batch_loss(
                    self.network, self.recipe.model, batch.to(fabric.device), stage, taken.totals, step / stage.steps
                )
                # Gradients are averaged over devices, but the totals are already those of all devices.
                fabric.backward(part * fabric.world_size)
            loss += part.item()
        norm = fabric.clip_gradients(self.network, self.optimizer, max_norm=stage.clip_norm, error_if_nonfinite=False)
        assert norm is not None
        self.overflows = 0 if norm.isfinite() else self.overflows + 1
        if self.overflows > (OVERFLOWS if self.recipe.machine.precision == "fp16" else 0):
            raise NmlaError(f"step {step}: the gradient must be finite, but its norm is {norm}; {DIVERGED}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def _line(self, loss: float, norm: float, rate: float) -> str:
        skipped = f", {self.examples.skipped} pairs skipped" if self.examples.skipped else ""
        return f"{self.output.name}: loss {loss:.3f}, gradient {norm:.2f}, {rate:,.0f} words/s{skipped}"

    def _validate(self, log: Log, began: float) -> None:
        """Translate the validation set, on one device while the others wait; keep the model if it is a good one."""
        step, bleu = self.progress.step, 0.0
        if self.fabric.is_global_zero:
            valid = validate(Translator(self.model, self.corpus.tokenizer), self.corpus)
            bleu = valid["bleu"]
            log.write("valid", step, time.perf_counter() - began, **valid)
            say(
                f"{self.output.name} step {step}: valid BLEU {bleu:.1f}, chrF {valid['chrf']:.1f}, "
                f"length ratio {valid['length_ratio']:.2f}, entropy {valid['entropy']:.2f}"
            )
        bleu = self.fabric.broadcast(bleu)
        self.progress = replace(self.progress, scores=(*self.progress.scores, (step, bleu)))
        if self.fabric.is_global_zero:
            best = best_steps(self.progress)[: self.stage.keep_best]
            if step in best:
                self._write_model(self.output / "best" / f"{step:09d}", step)
            keep_only(self.output / "best", best)

    def _save(self) -> None:
        if self.fabric.is_global_zero:
            progress = replace(self.progress, scale=self.scaler.state_dict() if self.scaler else {})
            try:
                save_checkpoint(
                    self.output / "checkpoints", self.model, self.optimizer, progress, keep=self.stage.keep_last
                )
            except (OSError, SafetensorError) as error:
                raise NmlaError(
                    f"{self.output / 'checkpoints'}: step {progress.step} must be saved, but: {error}; "
                    f"mend that, and the same command goes on from step {self.saved}"
                ) from None
        self.saved = self.progress.step

    def write_final(self) -> None:
        """Write model/: the last weights, the best, or an average, as the recipe says."""
        step = self.progress.step
        if self.stage.final == "best":
            step = best_steps(self.progress)[0]
            self.model = load_model(self.output / "best" / f"{step:09d}")[0]
        elif self.stage.final == "average":
            kept = numbered(self.output / "checkpoints")
            say(f"{self.output.name}: the model is the average of the checkpoints {', '.join(p.name for p in kept)}")
            self.model.load_state_dict(average(kept))
        self._write_model(self.output / "model", step)

    def _write_model(self, directory: Path, step: int) -> None:
        about = {
            "loss": self.stage.loss,
            "steps": str(step),
            "training pairs": f"{len(self.examples.target):,}",
            "seed": str(self.recipe.seed),
        }
        scores = dict(self.progress.scores)
        if step in scores and (directory.parent.name == "best" or self.stage.final != "average"):
            about["validation BLEU"] = f"{scores[step]:.2f}"
        with new_directory(directory) as aside:
            save_model(self.model, self.corpus.tokenizer, aside, about)


def best_steps(progress: Progress) -> list[int]:
    """The steps of all validations, best first; of equals the earlier."""
    return [step for step, _ in sorted(progress.scores, key=lambda of: (-of[1], of[0]))]


def given_up(progress: Progress, stage: TrainConfig) -> bool:
    """Whether the last `patience` validations all brought no gain."""
    if not stage.patience or not progress.scores:
        return False
    best = best_steps(progress)[0]
    return sum(step > best for step, _ in progress.scores) >= stage.patience


def validate(translator: Translator, corpus: Corpus) -> dict[str, float]:
    """Translate the validation set as a user would, and score it."""
    translator.model.eval()
    translations = translator.translate_batch(corpus.valid_source)
    most = max(map(len, corpus.valid_targets))
    references = [[of_line[r] if r < len(of_line) else None for of_line in corpus.valid_targets] for r in range(most)]
    scores = score([t.text for t in translations], references)
    return {
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "length_ratio": scores.length_ratio,
        "entropy": mean_entropy(translations),
    }
