"""Where a training runs: devices, processes, machines, and the signals that stop it."""

import atexit
import ctypes
import gc
import os
import platform
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from safetensors import SafetensorError

from nmla.config import PRECISIONS, MachineConfig
from nmla.errors import NmlaError, UsageError
from nmla.progress import say

T = TypeVar("T")


def start_fabric(machine: MachineConfig) -> Fabric:
    """Start the processes that the recipe asks for, or join those that torchrun or SLURM has started."""
    devices, nodes = processes(machine)
    if machine.precision == "fp16" and (machine.accelerator == "cpu" or not torch.cuda.is_available()):
        raise UsageError("machine.precision fp16 must run on a GPU, but there is none; use bf16 or float32")
    try:
        fabric = Fabric(
            accelerator=machine.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy="ddp" if devices * nodes > 1 else "auto",
            precision=PRECISIONS[machine.precision],  # type: ignore[arg-type]
        )
        fabric.launch()
        if fabric.world_size > 1:
            atexit.register(leave)
        if fabric.device.type == "cpu":
            reuse_memory()
            if machine.precision == "bf16" and not has_bf16() and fabric.is_global_zero:
                say("machine.precision bf16: this CPU has no such arithmetic, so float32 would be faster")
    except (ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"machine: must suit this machine, but: {' '.join(str(error).split())}") from None
    return fabric


def leave() -> None:
    """End the threads that connect the processes: one that lets go of a tensor while Python shuts down aborts all."""
    gc.collect()  # a network that was shared keeps them alive
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def has_bf16() -> bool:
    """Whether this CPU multiplies in bf16, as far as torch can tell: it can of those that may lack it, x86's."""
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return platform.machine() not in ("x86_64", "AMD64") or any(ask is None or ask() for ask in asked)


def reuse_memory() -> None:
    """Keep memory that was freed for what comes next: to give it back to the system and ask for it anew, step by step,
    costs a small model a fifth of its time on a CPU."""
    no_mapping, never_trim = (-4, 0), (-1, -1)  # M_MMAP_MAX, M_TRIM_THRESHOLD of glibc's malloc.h
    try:
        for setting in (no_mapping, never_trim):
            ctypes.CDLL("libc.so.6").mallopt(*setting)
    except (OSError, AttributeError):
        pass  # another system, with a way of its own


def processes(machine: MachineConfig) -> tuple[int, int]:
    """Processes on each machine, and machines."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        local = int(env["LOCAL_WORLD_SIZE"])
        return local, int(env["WORLD_SIZE"]) // local
    if "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        nodes = int(env.get("SLURM_NNODES", "1"))
        return int(env["SLURM_NTASKS"]) // nodes, nodes
    return machine.devices, machine.nodes


def on_one_process(fabric: Fabric, work: Callable[[], T]) -> T:
    """Do on one process what all wait for; what goes wrong there stops them all, and is told once."""
    if fabric.world_size == 1:
        return work()
    result: Any = None
    error: Any = None
    if fabric.is_global_zero:
        try:
            result = work()
        except SafetensorError as failure:
            error = OSError(str(failure))
        except (NmlaError, OSError) as failure:
            error = failure
    result, error = fabric.broadcast((result, error))
    if error is not None:
        error.told = not fabric.is_global_zero
        raise error
    outcome: T = result
    return outcome


def explained(error: RuntimeError) -> str:
    """What the user can do about an error of torch's, or nothing."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "a batch must fit into memory, but does not; lower max_tokens and raise accumulate in its place"
    if any(word in text for word in ("closed by peer", "Connection", "Broken pipe", "Timed out", "NCCL", "gloo")):
        return "a worker of this training has died or cannot be reached; the same command goes on"
    return ""


def agreed(number: int, fabric: Fabric) -> int:
    """The signal that any process has received, or 0: all must stop after the same step."""
    if fabric.world_size == 1:
        return number
    received: Any = fabric.all_reduce(torch.tensor(number, device=fabric.device), reduce_op="max")
    return int(received)


class StopSignal:
    """Takes the first Ctrl-C or SIGTERM as a wish to save and stop after the current step, a second as an order."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # only there may signals be handled
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
