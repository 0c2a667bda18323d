"""Prefix beam search with a language model beside flashlight-text with KenLM, on a trained model's outputs. Markdown.

    python benchmarks/beam.py --model MODEL --source FILE --lm LM.arpa [--count 200]

Both search the same log-probabilities with the same ARPA file, beam and top-k, one thread each; ours then also two.
flashlight has no term for the logarithm of the length: its n best are ranked again by the whole objective. The mean
objective of what each finds, scored alike over all paths, tells which search is better. Last, a whole translation:
argmax alone, and with beam and language model, and what that adds to a d 512 network's argmax.
Needs `pip install flashlight-text`, which brings KenLM.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmla.config import ModelConfig
from nmla.data.batching import pad
from nmla.decoding.ctc_beam import BeamSearch
from nmla.decoding.ngram_lm import NgramLM
from nmla.decoding.translator import Translator
from nmla.losses import ctc_loss
from nmla.models.pretrained import build_model
from nmla.text.lines import read_lines
from nmla.text.tokenizer import BLANK, EOS
from tables import header, row, verdict

TURNS = 9  # of searches, and a third as many of whole translations
LN10 = math.log(10)


@torch.inference_mode()
def outputs(translator: Translator, lines: Sequence[str]) -> list[Tensor]:
    """The log-probabilities (T, V) of each line."""
    found = []
    for line in lines:
        logits, lengths, *_ = translator.model(*pad([[*translator.tokenizer.encode(line), EOS]]))
        found.append(logits[0, : lengths[0]].float().log_softmax(-1))
    return found


class Flashlight:
    """The peer: a lexicon-free decoder over the tokens, with KenLM."""

    def __init__(self, arpa: Path, translator: Translator, search: BeamSearch) -> None:
        from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions
        from flashlight.lib.text.decoder.kenlm import KenLM
        from flashlight.lib.text.dictionary import Dictionary

        tokenizer = translator.tokenizer
        pieces = Dictionary([tokenizer.piece(token) for token in range(tokenizer.vocab_size)])
        options = LexiconFreeDecoderOptions(
            beam_size=search.beam_size,
            beam_size_token=search.top_k,
            beam_threshold=1e9,
            lm_weight=search.alpha * LN10,  # KenLM's logarithms are of base 10
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        self.decoder = LexiconFreeDecoder(options, KenLM(str(arpa), pieces), -1, BLANK, [])

    def __call__(self, log_probs: Tensor) -> list[list[int]]:
        array = np.ascontiguousarray(log_probs.numpy(), dtype=np.float32)
        results = self.decoder.decode(array.ctypes.data, *array.shape)
        found = []
        for result in results:
            path = [token for token in result.tokens if token >= 0]
            merged = [token for i, token in enumerate(path) if i == 0 or token != path[i - 1]]
            found.append([token for token in merged if token != BLANK])
        return found


def objective(log_probs: Tensor, tokens: list[int], search: BeamSearch) -> float:
    lengths = torch.tensor([len(log_probs)]), torch.tensor([len(tokens)])
    target = torch.tensor([tokens], dtype=torch.long).view(1, -1)
    log_prob = -float(ctc_loss(log_probs[None].double(), target, *lengths, blank=BLANK))
    assert search.lm is not None
    return log_prob + search.alpha * search.lm.score(tokens) + search.beta * math.log(max(len(tokens), 1))


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure beam search.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--lm", type=Path, required=True, help="an ARPA file over the model's tokens")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--beta", type=float, default=1.0)
    args = parser.parse_args()
    translator = Translator.load(args.model)
    lines = [line for line in read_lines(args.source) if line.strip()][: args.count]
    lm = NgramLM.load(args.lm, translator.tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        lm.save(Path(directory) / "model.lm", translator.tokenizer)
        translator.lm = NgramLM.load(Path(directory) / "model.lm", translator.tokenizer)
        measure(translator, lines, args.lm, BeamSearch(20, 20, args.alpha, args.beta, translator.lm))


def measure(translator: Translator, lines: list[str], arpa: Path, search: BeamSearch) -> None:
    found = outputs(translator, lines)
    peer = Flashlight(arpa, translator, search)
    padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-30.0)
    lengths = [len(one) for one in found]

    def ours() -> list[list[int]]:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return [of.result()[0].tokens for of in search.begin(padded, lengths, threads, BLANK, "ctc", 1)]

    def theirs() -> list[list[list[int]]]:
        return [peer(one) for one in found]

    torch.set_num_threads(1)
    ours()  # compiled, or fetched from the cache
    best = {"ours, 1 thread": math.inf, "flashlight + KenLM, 1 thread": math.inf, "ours, 2 threads": math.inf}
    scaling = []
    for _ in range(TURNS):
        torch.set_num_threads(1)
        one, mine = seconds(ours)
        theirs_took, others = seconds(theirs)
        torch.set_num_threads(2)
        two, _ = seconds(ours)
        scaling.append(one / two)
        for name, taken in zip(best, (one, theirs_took, two), strict=True):
            best[name] = min(best[name], taken)
    of_ours = [objective(log_probs, tokens, search) for log_probs, tokens in zip(found, mine, strict=True)]
    of_theirs = [
        max(objective(log_probs, tokens, search) for tokens in of_one)
        for log_probs, of_one in zip(found, others, strict=True)
    ]
    mean_length, vocabulary = sum(lengths) / len(lengths), found[0].shape[1]
    settings = f"beam {search.beam_size}, top-k {search.top_k}, alpha {search.alpha:g}, beta {search.beta:g}"
    print(f"\n## Beam search: {len(lines)} lines, {mean_length:.0f} positions, V {vocabulary}, {settings}\n")
    header("search", "ms a sentence", "x flashlight", "mean objective")
    for name, taken in best.items():
        mean = sum(of_theirs if "flash" in name else of_ours) / len(lines)
        print(row(name, 1000 * taken / len(lines), best["flashlight + KenLM, 1 thread"] / taken, f"{mean:.4f}"))
    higher, lower = (
        sum(sign * (own - other) > 1e-4 for own, other in zip(of_ours, of_theirs, strict=True)) for sign in (1, -1)
    )
    print(f"\nOurs is higher in {higher} lines and lower in {lower}.")

    # Its weights do not matter for the time of a d 512 network; the search is that of the trained outputs above.
    large = build_model(ModelConfig(upsample=translator.model.config.upsample), translator.tokenizer.vocab_size)
    large_translator = Translator(large.eval(), translator.tokenizer)
    times = {"small": math.inf, "small, searched": math.inf, "large": math.inf}
    weights = {"beam_size": search.beam_size, "alpha": search.alpha, "beta": search.beta}
    for _ in range(TURNS // 3):
        for name, work in (
            ("small", lambda: translator.translate_batch(lines)),
            ("small, searched", lambda: translator.translate_batch(lines, **weights)),
            ("large", lambda: large_translator.translate_batch(lines)),
        ):
            times[name] = min(times[name], seconds(work)[0])
    added = times["small, searched"] - times["small"]
    per_line = {name: f"{1000 * taken / len(lines):.1f}" for name, taken in times.items()}
    width = translator.model.config.d_model
    print(
        f"\nText to text, 2 threads, ms a sentence: argmax with this model of d {width} {per_line['small']}, with beam"
    )
    print(f"and language model {per_line['small, searched']}; argmax with a d 512 network {per_line['large']}.")
    print("\n## The bars\n")
    header("what", "measured", "bar", "met")
    verdict("time, x flashlight's", best["ours, 1 thread"] / best["flashlight + KenLM, 1 thread"], 1)
    verdict("mean objective above flashlight's", (sum(of_ours) - sum(of_theirs)) / len(lines), 0, at_least=True)
    verdict("two threads, x one in the same turn, the median", median(scaling), 1.8, at_least=True)
    verdict("d 512, with beam and language model, x argmax alone", 1 + added / times["large"], 1.3)


if __name__ == "__main__":
    main()
