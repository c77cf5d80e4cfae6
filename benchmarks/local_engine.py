"""Measures the embedded engine: tokens a second by number of streams, alone and beside training.

    python benchmarks/local_engine.py --model DIR [--streams 1,8,16,24] [--threads 1] [--train]

Prompts are random ids of mixed lengths (nothing is shared between them), every reply has the same
length, the adapter is on. Prefill is left out: the clock runs from the moment all streams have
their first token. `--train` lets a second thread of the same process run forward and backward of
the LoRA model all the while, as the embedded host does.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from functools import partial

import torch

from openclaw_rl.local.engine import Chunk, EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.sampling import GenerateRequest, SamplingParams


def measure(
    core: EngineCore, streams: int, prompt: int, new: int, policy: bool
) -> dict[str, float]:
    """Decode tokens of all streams together, a second and a second of the engine thread's CPU
    time (with one thread: the speed on a core of its own), and seconds until all had their first
    token."""
    lock, done = threading.Lock(), threading.Event()
    counts: dict[int, int] = {}
    marks: dict[str, float] = {}
    left = streams

    def deliver(stream: int, chunk: Chunk) -> None:
        nonlocal left
        with lock:
            now = time.perf_counter()
            counts[stream] = counts.get(stream, 0) + len(chunk.tokens)
            left -= chunk.finish is not None
            if len(counts) == streams and "all" not in marks:
                marks["all"] = now
                marks["cpu"] = time.thread_time()  # it is the engine thread that delivers
                marks["tokens"] = sum(counts.values())
            if left == 0:
                marks["end"] = now
                marks["cpu"] = time.thread_time() - marks["cpu"]
                done.set()

    draw = random.Random(streams)
    vocab = core.model.vocab_size
    begin = time.perf_counter()
    for i in range(streams):
        size = prompt // 2 + draw.randrange(prompt)
        ids = [draw.randrange(vocab) for _ in range(size)]
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        request = GenerateRequest(input_ids=tuple(ids), sampling_params=params)
        core.submit(request, partial(deliver, i), policy=policy)
    done.wait()
    made = sum(counts.values()) - marks["tokens"]
    return {
        "tokens_per_second": made / (marks["end"] - marks["all"]),
        "tokens_per_cpu_second": made / marks["cpu"],
        "seconds_to_all_first": marks["all"] - begin,
    }


class Training:
    """Forward and backward of the LoRA model in a thread, until stopped."""

    def __init__(self, model: LoadedModel, threads: int, tokens: int = 512) -> None:
        self.net = model.trainer_model()
        self.net.gradient_checkpointing_enable()
        self.net.train()
        self.threads, self.tokens, self.vocab = threads, tokens, model.vocab_size
        self.steps = 0
        self.seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self.threads)
        while not self._stop.is_set():
            begin = time.perf_counter()
            ids = torch.randint(self.vocab, (1, self.tokens))
            self.net(input_ids=ids, labels=ids).loss.backward()
            self.net.zero_grad()
            self.steps += 1
            self.seconds += time.perf_counter() - begin

    def stop(self) -> float:
        """Trained tokens a second."""
        self._stop.set()
        self._thread.join()
        return self.steps * self.tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", default="1,8,16,24")
    parser.add_argument("--prompt", type=int, default=200, help="mean prompt tokens")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--base", action="store_true", help="without the adapter")
    parser.add_argument("--train", action="store_true", help="train in a second thread meanwhile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = LoadedModel.load(args.model, device=args.device, lora=LoraSpec())
    training = Training(model, args.threads) if args.train else None
    core = EngineCore(model, threads=args.threads, seed=0).start()
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(training.net if training else model.trainer_model())
    core.publish(1, state).result()
    measure(core, 2, args.prompt, 4, not args.base)  # warm up
    for streams in map(int, args.streams.split(",")):
        got = measure(core, streams, args.prompt, args.new, not args.base)
        print(
            f"{streams:3d} streams  {got['tokens_per_second']:7.1f} tokens/s  "
            f"{got['tokens_per_cpu_second']:7.1f} tokens/CPU-s  "
            f"all had their first token after {got['seconds_to_all_first']:.2f} s",
            flush=True,
        )
    if training:
        print(f"meanwhile trained {training.stop():.1f} tokens/s", flush=True)
    core.stop()


if __name__ == "__main__":
    main()
