"""Time and memory of the losses, forward and backward from logits, beside what they replace. Prints Markdown.

    python benchmarks/losses.py

Rivals take turns, and the best of the turns counts, so that a busy moment of the machine hits all of them. Peak memory
is a process's high-water mark above its level with the inputs in place, a process for each measurement (Linux).
"""

import argparse
import functools
import multiprocessing
import pathlib
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from nmla.losses import (
    ctc_loss_with_logits,
    expected_ngram_counts,
    fused_ngram_matching_loss,
    ngram_matching_loss_with_logits,
)
from tables import header, row, verdict

SHAPES = [(32, 30, 90, 8000), (4, 60, 180, 32000), (2, 120, 360, 32000)]
LONGER = [(4, 30, 180, 8000), (4, 30, 360, 8000), (4, 30, 720, 8000)]
TURNS = 4
BLANK = 0
WIDTH = 512
HEAD_BATCHES = (8, 64)

Shape = tuple[int, int, int, int]
Arguments = tuple[Tensor, ...]


def targets(shape: Shape) -> Arguments:
    batch, length, positions, vocabulary = shape
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(1, vocabulary, (batch, length), generator=generator),
        torch.full((batch,), positions),
        torch.full((batch,), length),
    )


def torch_ctc(logits: Tensor, *arguments: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1).transpose(0, 1)
    return torch.nn.functional.ctc_loss(log_probs, *arguments, blank=BLANK, reduction="none")


def dense_matching(logits: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """The paper's 2-gram loss under CTC from its Equations 14 and 15: the outer product over both positions.

    For sentences without padding whose 2-grams are all different, which is all that the rivals are given here.
    """
    probs = logits.log_softmax(-1).exp()
    positions = probs.shape[1]
    first, second = targets[:, :-1], targets[:, 1:]
    first_BTG = probs.gather(2, first[:, None].expand(-1, positions, -1))
    second_BTG = probs.gather(2, second[:, None].expand(-1, positions, -1))
    # A[i, j]: all positions between i and j are blank.
    blanks_BT = probs[:, :, BLANK].log().cumsum(1)
    gaps_BTT = torch.roll(blanks_BT, 1, 1)[:, None, :] - blanks_BT[:, :, None]
    later_TT = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    gaps_BTT = gaps_BTT.masked_fill(~later_TT, -torch.inf).exp()
    counts_BG = (first_BTG[:, :, None] * gaps_BTT[..., None] * second_BTG[:, None]).sum((1, 2))
    repeats_BG = (first_BTG[:, :-1] * second_BTG[:, 1:]).sum(1)
    counts_BG = counts_BG - repeats_BG * (first == second)
    is_word_V = torch.arange(probs.shape[-1]) != BLANK
    length_B = (probs * is_word_V).sum((1, 2)) - (probs[:, 1:] * probs[:, :-1] * is_word_V).sum((1, 2))
    return -2 * counts_BG.clamp(max=1).sum(1) / (target_lengths - 1 + length_B - 1)


def ours(n: int) -> Callable[..., Tensor]:
    return functools.partial(ngram_matching_loss_with_logits, blank=BLANK, n=n)


RIVALS: dict[str, Callable[..., Tensor]] = {
    "log_softmax alone": lambda logits, *_: logits.log_softmax(-1),
    "log_softmax + torch CTC": torch_ctc,
    "dense 2-gram (Equations 14, 15)": dense_matching,
    "ours, n = 1": ours(1),
    "ours, n = 2": ours(2),
    "ours, n = 3": ours(3),
    "ours, n = 4": ours(4),
    "our CTC": functools.partial(ctc_loss_with_logits, blank=BLANK),
    "our SCTC": functools.partial(ctc_loss_with_logits, blank=BLANK, collapse="sctc"),
}
CTC, DENSE, SCTC = "log_softmax + torch CTC", "dense 2-gram (Equations 14, 15)", "our SCTC"


def unfused(hidden: Tensor, weight: Tensor, bias: Tensor, *arguments: Tensor) -> Tensor:
    return ngram_matching_loss_with_logits(linear(hidden, weight, bias), *arguments, blank=BLANK)


HEADS: dict[str, Callable[..., Tensor]] = {
    "unfused head": unfused,
    "fused head": functools.partial(fused_ngram_matching_loss, blank=BLANK),
}


def logits_of(shape: Shape) -> list[Tensor]:
    batch, _, positions, vocabulary = shape
    return [torch.randn(batch, positions, vocabulary).requires_grad_()]


def head_of(shape: Shape) -> list[Tensor]:
    batch, _, positions, vocabulary = shape
    weight = torch.randn(vocabulary, WIDTH) / WIDTH**0.5
    return [t.requires_grad_() for t in (torch.randn(batch, positions, WIDTH), weight, torch.zeros(vocabulary))]


def run(loss: Callable[..., Tensor], inputs: list[Tensor], arguments: Arguments) -> None:
    for tensor in inputs:
        tensor.grad = None
    output = loss(*inputs, *arguments)
    output.backward(torch.ones(()).expand_as(output))


def milliseconds(actions: dict[str, Callable[[], None]]) -> dict[str, float]:
    best = dict.fromkeys(actions, float("inf"))
    for turn in range(TURNS + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if turn:  # the first warms up
                best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def timed(rivals: dict[str, Callable[..., Tensor]], inputs: list[Tensor], shape: Shape) -> dict[str, float]:
    arguments = targets(shape)
    return milliseconds({name: functools.partial(run, loss, inputs, arguments) for name, loss in rivals.items()})


def status_mebibytes(field: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


def peak_in_this_process(name: str, shape: Shape) -> tuple[float, float]:
    """MiB above the inputs, and of that the gradients, which any rival must return."""
    torch.set_num_threads(1)
    make, loss = (head_of, HEADS[name]) if name in HEADS else (logits_of, RIVALS[name])
    small = (2, 3, 8, 50)
    run(loss, make(small), targets(small))  # what is set up once should not count
    inputs, arguments = make(shape), targets(shape)
    before = status_mebibytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark falls to the present
    run(loss, inputs, arguments)
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in inputs) / 2**20
    return status_mebibytes("VmHWM") - before, gradients


def peak(name: str, shape: Shape) -> tuple[float, float]:
    # Forked before this process has any threads, so that torch need not be imported again.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(peak_in_this_process, (name, shape))


def check_dense() -> None:
    """The rival computes the same loss, so that the comparison is fair."""
    shape = (2, 5, 40, 30)
    (logits,), arguments = logits_of(shape), targets(shape)
    torch.testing.assert_close(dense_matching(logits, *arguments), ours(2)(logits, *arguments, exact_total=False))


def shape_table(shape: Shape, peaks: dict[str, float]) -> tuple[dict[str, float], float]:
    """Times on one thread, and the size of the logits in MiB."""
    batch, length, positions, vocabulary = shape
    inputs, times = logits_of(shape), {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times[threads] = timed(RIVALS, inputs, shape)
    size = inputs[0].numel() * 4 / 2**20
    print(f"\n## B = {batch}, T = {length}, T_a = {positions}, V = {vocabulary}: logits of {size:.0f} MiB\n")
    titles = [f"{t} thread{'s' * (t > 1)}: {column}" for t in (1, 2) for column in ("ms", "x torch CTC")]
    header("loss", *titles, "peak MiB", "x logits")
    for name in RIVALS:
        cells = [cell for t in (1, 2) for cell in (f"{times[t][name]:.0f}", times[t][name] / times[t][CTC])]
        print(row(name, *cells, f"{peaks[name]:.0f}", peaks[name] / size))
    torch.set_num_threads(1)
    return times[1], size


def short_output_table(shape: Shape) -> None:
    print("\n## Where outputs of fewer than n - 1 tokens are likely, one thread\n")
    print("For n > 2 the exact total then needs a recurrence over the vocabulary.\n")
    inputs = logits_of(shape)
    inputs[0].data[..., BLANK] += 14
    losses = {f"ours, n = {n}": ours(n) for n in (2, 3, 4)}
    losses |= {f"{name}, paper's total": functools.partial(loss, exact_total=False) for name, loss in losses.items()}
    header("loss", "ms")
    for name, value in timed(losses, inputs, shape).items():
        print(row(name, f"{value:.0f}"))


def longer_table() -> None:
    print("\n## Growing T_a, one thread, milliseconds\n")
    some = [CTC, DENSE, "ours, n = 2", "ours, n = 4"]
    header("B, T, T_a, V", *some)
    for shape in LONGER:
        times = timed({name: RIVALS[name] for name in some}, logits_of(shape), shape)
        print(row(", ".join(map(str, shape)), *(f"{times[name]:.0f}" for name in some)))


def counts_table() -> float:
    """How much longer a position takes at the largest T_a than at the smallest, for the worst n."""
    print("\n## Expected counts alone, one thread: microseconds per n-gram and position\n")
    lengths, batch, grams = [90, 180, 360, 720, 1440], 8, 30
    count = functools.partial(expected_ngram_counts, blank=BLANK)
    header("n", *(f"T_a = {positions}" for positions in lengths))
    growth = []
    for n in (1, 2, 3, 4):
        ngrams, actions = torch.randint(1, 64, (batch, grams, n)), {}
        for positions in lengths:
            log_probs = torch.randn(batch, positions, 64).log_softmax(-1).requires_grad_()
            arguments = (ngrams, torch.full((batch,), positions))
            actions[str(positions)] = functools.partial(run, count, [log_probs], arguments)
        times = milliseconds(actions)
        each = [1000 * times[str(positions)] / (batch * grams * positions) for positions in lengths]
        growth.append(each[-1] / each[0])
        print(row(n, *(f"{value:.4f}" for value in each)))
    return max(growth)


def head_table(shape: Shape, peaks: dict[tuple[str, int], tuple[float, float]]) -> tuple[float, float]:
    """The fused head's time against the unfused one's, and its memory at the largest batch against the smallest."""
    print(f"\n## The head: states of width {WIDTH} to loss and gradients, n = 2, one thread\n")
    times = timed(HEADS, head_of(shape), shape)
    titles = [f"peak MiB, B = {batch}: {column}" for batch in HEAD_BATCHES for column in ("in all", "but gradients")]
    header("head", f"ms, B = {shape[0]}", *titles)
    for name in HEADS:
        cells = [peaks[name, b][0] - gradients for b in HEAD_BATCHES for gradients in (0.0, peaks[name, b][1])]
        print(row(name, f"{times[name]:.0f}", *(f"{cell:.0f}" for cell in cells)))
    small, large = (peaks["fused head", b][0] - peaks["fused head", b][1] for b in HEAD_BATCHES)
    return times["fused head"] / times["unfused head"], large / small


def main() -> None:
    argparse.ArgumentParser(description="Measure time and memory of the losses.").parse_args()
    shape = SHAPES[0]
    # Memory first: see peak.
    peaks = {each: {name: peak(name, each)[0] for name in RIVALS} for each in SHAPES}
    head_peaks = {(name, batch): peak(name, (batch, *shape[1:])) for name in HEADS for batch in HEAD_BATCHES}
    check_dense()
    results = [shape_table(each, peaks[each]) for each in SHAPES]
    short_output_table(shape)
    longer_table()
    growth = counts_table()
    head_time, head_memory = head_table(shape, head_peaks)

    times, size = results[0]
    most_memory = max(peaks[shape][f"ours, n = {n}"] for n in (1, 2, 3, 4))
    print(f"\n## The bars, at {shape} on one thread\n")
    header("what", "measured", "bar", "met")
    verdict("n = 2, x torch CTC", times["ours, n = 2"] / times[CTC], 0.5)
    verdict("n = 4, x torch CTC", times["ours, n = 4"] / times[CTC], 0.7)
    verdict("n = 2, times faster than dense", times[DENSE] / times["ours, n = 2"], 5, at_least=True)
    verdict("SCTC, x torch CTC", times[SCTC] / times[CTC], 1.5)
    verdict("extra peak memory, x logits", most_memory / size, 1.2)
    verdict("fused head: time, x unfused", head_time, 1.1)
    verdict(f"fused head: peak memory but gradients, B = {HEAD_BATCHES[1]} x {HEAD_BATCHES[0]}", head_memory, 1.1)
    verdict("time per n-gram and position, T_a = 1440 x 90", growth, 1.25)


if __name__ == "__main__":
    main()
