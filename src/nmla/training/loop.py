"""The training loop: one for every model and every loss."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors import SafetensorError

from nmla.config import Recipe, TrainConfig
from nmla.data.corpus import Corpus
from nmla.decoding.translation import Translation
from nmla.decoding.translator import Translator
from nmla.errors import DataError, NmlaError, Stopped
from nmla.evaluation.score import aligned, mean_entropy, score
from nmla.files import locked, new_directory
from nmla.models.layers import set_dropout
from nmla.models.pretrained import build_model, load_model, save_model
from nmla.progress import progress_bar, say
from nmla.training.checkpoint import (
    Progress,
    average,
    keep_only,
    load_checkpoint,
    newest_sound,
    numbered,
    regular,
    save_checkpoint,
)
from nmla.training.feed import Examples, StepData, step_data
from nmla.training.log import Log, Meter
from nmla.training.machine import StopSignal, agreed, explained, on_one_process, start_fabric
from nmla.training.objective import DIVERGED, batch_loss
from nmla.training.run import begin_run, refuse_other_weights
from nmla.training.schedule import learning_rate

LOG_EVERY = 10  # steps
VALID_AT_ONCE = 512  # sentences that are translated before a signal is heard
OVERFLOWS = 50  # fp16 steps in a row without a finite gradient, while its scale is found, that are not yet an error


def train(recipe: Recipe, fabric: Fabric | None = None) -> Path:
    """Run the recipe's stages and return the directory of the final model."""
    fabric = fabric or start_fabric(recipe.machine)
    corpus, output = Corpus.load(Path(recipe.data.corpus)), Path(recipe.output)
    if recipe.finetune is not None and numbered(output / "finetune" / "checkpoints"):
        refuse_other_weights(output / "train", recipe.train, output / "finetune")
    with StopSignal() as stop:
        model = train_stage(recipe, recipe.train, corpus, output / "train", None, fabric, stop)
        if recipe.finetune is not None:
            model = train_stage(recipe, recipe.finetune, corpus, output / "finetune", model, fabric, stop)
    return model


def train_stage(
    recipe: Recipe,
    stage: TrainConfig,
    corpus: Corpus,
    output: Path,
    start: Path | None = None,
    fabric: Fabric | None = None,
    stop: StopSignal | None = None,
) -> Path:
    """Train one stage, from the weights in `start` or from random ones, and return the directory of its model.

    `output` gets recipe.yaml, start.json (which weights and corpus it began from), log.jsonl, checkpoints/, best/, and
    at the end model/. Called again, it goes on from the last checkpoint.
    """
    fabric = fabric or start_fabric(recipe.machine)
    own_recipe = replace(recipe, train=stage, finetune=None)
    examples = Examples.of(corpus, recipe.model, stage)
    saved = 0
    try:
        with ExitStack() as held:
            stop = stop or held.enter_context(StopSignal())

            def begin() -> None:
                held.enter_context(locked(output / "lock", output))
                begin_run(output, own_recipe, start, fabric.world_size)

            on_one_process(fabric, begin)
            if examples.why and fabric.is_global_zero:
                say(examples.why)
            run = _Run(own_recipe, corpus, output, fabric, examples, start)
            try:
                run.go_on(stop)
                on_one_process(fabric, run.write_final)
            finally:
                saved = run.saved
    except RuntimeError as error:
        if not (why := explained(error)):
            raise
        raise NmlaError(f"{output}: {why} ({str(error).splitlines()[0]}); it is saved up to step {saved}") from None
    except (OSError, SafetensorError) as error:
        raise NmlaError(
            f"{output}: what a training writes must be saved, but: {error}; mend that, and the same command goes on "
            f"from step {saved}"
        ) from None
    return output / "model"


class _Run:
    """One stage while it runs."""

    def __init__(
        self, recipe: Recipe, corpus: Corpus, output: Path, fabric: Fabric, examples: Examples, start: Path | None
    ) -> None:
        stage = recipe.train
        self.recipe, self.stage, self.corpus, self.output = recipe, stage, corpus, output
        self.fabric, self.examples = fabric, examples
        torch.manual_seed(recipe.seed)
        self.model = load_model(start)[0] if start else build_model(recipe.model, corpus.tokenizer.vocab_size)
        if recipe.machine.precision != "float64":
            self.model.float()
        set_dropout(self.model, stage.dropout)
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            stage.learning_rate,
            betas=(0.9, 0.98),
            eps=1e-8,
            weight_decay=stage.weight_decay,
            fused=True,
        )
        network: Any = torch.compile(self.model) if recipe.machine.compile else self.model
        self.network, self.optimizer = fabric.setup(network, optimizer)
        self.scaler = getattr(fabric.strategy.precision, "scaler", None)  # of the loss, in fp16
        self.overflows = 0
        self.progress = Progress()
        if path := on_one_process(fabric, lambda: newest_sound(output / "checkpoints")):
            self.progress = load_checkpoint(path, self.model, optimizer)
            if self.scaler is not None:
                self.scaler.load_state_dict(self.progress.scale)
        self.saved = self.progress.step  # of the last checkpoint

    def go_on(self, stop: StopSignal) -> None:
        """Take the steps that are left, to the last or until too many validations brought no gain."""
        fabric, stage, place = self.fabric, self.stage, self.progress.place
        data = step_data(self.examples, stage, self.recipe.seed, place, fabric.global_rank, fabric.world_size)
        log = Log(self.output, self.progress.step, self.recipe.machine.tensorboard, enabled=fabric.is_global_zero)
        began = time.perf_counter() - self.progress.seconds
        meter = Meter()
        with progress_bar(enabled=fabric.is_global_zero) as bar, log:
            task = bar.add_task(self.output.name, total=stage.steps, completed=self.progress.step)
            self._validate_if_due(log, began, stop)  # what a signal left no time for
            self._stop_if_asked(stop)
            while self.progress.step < stage.steps and not given_up(self.progress, stage):
                step = self.progress.step + 1
                taken = next(data)
                loss, norm = self._step(step, taken)
                meter.add(loss, taken.totals.tokens)
                seconds = time.perf_counter() - began
                self.progress = replace(self.progress, step=step, place=taken.after, seconds=seconds)

                on_schedule = step == stage.steps or step % stage.checkpoint_every == 0
                if on_schedule or step % LOG_EVERY == 0:  # with a checkpoint, so that a resumed run logs the same
                    values = meter.read(fabric)
                    log.write("train", step, seconds, **values, gradient_norm=norm, lr=learning_rate(step, stage))
                    bar.update(task, description=self._line(values["loss"], norm, values["words_per_second"]))
                self._stop_if_asked(stop)
                self._validate_if_due(log, began, stop)
                if on_schedule or given_up(self.progress, stage):
                    on_one_process(fabric, self._save)
                    self.saved = step
                bar.update(task, completed=step)
                self._stop_if_asked(stop)
                meter.pause()
        if given_up(self.progress, stage) and fabric.is_global_zero:
            say(f"{self.output.name}: stopped, as {stage.patience} validations brought no higher BLEU")

    def _stop_if_asked(self, stop: StopSignal) -> None:
        """Save at once, for there may be little time, and stop."""
        if number := agreed(stop.number, self.fabric):
            if self.saved < self.progress.step:
                on_one_process(self.fabric, self._save)
                self.saved = self.progress.step
            where = f"{self.output}: stopped and saved at step {self.saved}; the same command goes on from there"
            raise Stopped(number, where)

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
                    self.network,
                    self.recipe.model,
                    batch.to(fabric.device),
                    stage,
                    taken.totals,
                    (step - 1) / max(stage.steps - 1, 1),
                )
                # Gradients are averaged over devices, but the totals are already those of all devices.
                fabric.backward(part * fabric.world_size)
            loss += part.item()
        norm = fabric.clip_gradients(self.network, self.optimizer, max_norm=stage.clip_norm, error_if_nonfinite=False)
        assert norm is not None
        self.overflows = 0 if norm.isfinite() else self.overflows + 1
        if self.overflows > (0 if self.scaler is None else OVERFLOWS):
            raise NmlaError(f"step {step}: the gradient must be finite, but its norm is {norm}; {DIVERGED}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def _line(self, loss: float, norm: float, rate: float) -> str:
        skipped = f", {self.examples.skipped} pairs skipped" if self.examples.skipped else ""
        return f"{self.output.name}: loss {loss:.3f}, gradient {norm:.2f}, {rate:,.0f} words/s{skipped}"

    def _validate_if_due(self, log: Log, began: float, stop: StopSignal) -> None:
        """Translate the validation set, on one device while the others wait; keep the model if it is a good one.

        A signal ends it without a score: it is due again when the run goes on.
        """
        step = self.progress.step
        due = step > 0 and (step % self.stage.validate_every == 0 or step == self.stage.steps)
        if due and step not in dict(self.progress.scores):
            bleu = on_one_process(self.fabric, lambda: self._validate(log, began, stop))
            if bleu is None:
                return
            self.progress = replace(self.progress, scores=(*self.progress.scores, (step, bleu)))
            if step in self._best():
                on_one_process(self.fabric, lambda: self._write_model(self.output / "best" / f"{step:09d}", step))

    def _validate(self, log: Log, began: float, stop: StopSignal) -> float | None:
        valid = validate(Translator(self.model, self.corpus.tokenizer), self.corpus, stop)
        if valid is None:
            return None
        log.write("valid", self.progress.step, time.perf_counter() - began, **valid)
        say(
            f"{self.output.name} step {self.progress.step}: valid BLEU {valid['bleu']:.1f}, chrF {valid['chrf']:.1f}, "
            f"length ratio {valid['length_ratio']:.2f}, entropy {valid['entropy']:.2f}"
        )
        return valid["bleu"]

    def _best(self) -> list[int]:
        return best_steps(self.progress)[: self.stage.keep_best]

    def _save(self) -> None:
        progress = replace(self.progress, scale=self.scaler.state_dict() if self.scaler else {})
        save_checkpoint(
            self.output / "checkpoints",
            self.model,
            self.optimizer,
            progress,
            keep=self.stage.keep_last,
            every=self.stage.checkpoint_every,
        )
        # Only now: a run that goes on from an older checkpoint may judge the models anew.
        keep_only(self.output / "best", self._best())

    def write_final(self) -> None:
        """Write model/: the last weights, the best, or an average, as the recipe says."""
        step = self.progress.step
        if self.stage.final == "best":
            kept = [int(path.name) for path in numbered(self.output / "best")]
            step = next((best for best in best_steps(self.progress) if best in kept), 0)
            if not step:
                raise DataError(f"{self.output / 'best'}: must hold the best model, but holds none; take final=last")
            self.model = load_model(self.output / "best" / f"{step:09d}")[0]
        elif self.stage.final == "average":
            kept_last = regular(self.output / "checkpoints", step, self.stage.keep_last, self.stage.checkpoint_every)
            names = ", ".join(path.name for path in kept_last)
            say(f"{self.output.name}: the model is the average of the checkpoints {names}")
            self.model.load_state_dict(average(kept_last))
        if not self._is_in(self.output / "model"):  # with its tuned decoding, if it is
            self._write_model(self.output / "model", step)

    def _is_in(self, directory: Path) -> bool:
        """Whether a model's weights are those of this one."""
        try:
            weights = load_model(directory)[0].state_dict()
        except NmlaError:
            return False
        own = self.model.state_dict()
        return weights.keys() == own.keys() and all(torch.equal(weights[name], own[name].cpu()) for name in own)

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


def validate(translator: Translator, corpus: Corpus, stop: StopSignal | None = None) -> dict[str, float] | None:
    """Translate the validation set as a user would, and score it; nothing if a signal comes meanwhile."""
    translator.model.eval()
    translations: list[Translation] = []
    for start in range(0, len(corpus.valid_source), VALID_AT_ONCE):
        if stop is not None and stop.number:
            return None
        lines = corpus.valid_source[start : start + VALID_AT_ONCE]
        translations += translator.translate_batch(lines, return_scores=True, fast=True)
    scores = score([t.text for t in translations], aligned(corpus.valid_targets))
    return {
        "bleu": scores.bleu,
        "chrf": scores.chrf,
        "length_ratio": scores.length_ratio,
        "entropy": mean_entropy(translations),
    }
