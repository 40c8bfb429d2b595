"""Two vLLM servers on this machine, a trainer that sends versions, and a client of each server, whose tokens change while they stream.

usage: tools/demo --vllm [--versions N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import models
from refitd import testing
from server import Server
from support import CALL_SECONDS, CheckpointTrainer

TOKENS = 160
PAUSE_SECONDS = 1.0  # between two versions


def stream(server: Server, prompt: str) -> tuple[list[str], list[float], list[dict[str, Any]]]:
    """Texts of the tokens of one completion, their times, and the versions of the tokens."""
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", body, {"content-type": "application/json"})
    texts, times = [], []
    spans: list[dict[str, Any]] = []
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choice = json.loads(line[len(b"data: ") :])["choices"][0]
                texts.append(choice["text"])
                times.append(time.monotonic())
                spans = choice.get("refitd_version", spans)
    return texts, times, spans


def client(name: str, server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        texts, times, spans = stream(server, "Tell me a story")
        gaps = [later - earlier for earlier, later in zip(times, times[1:])]
        for span in spans:
            part = "".join(texts[span["start"] : span["end"]])[:24]
            gap = max(gaps[max(0, span["start"] - 1) : span["end"] - 1], default=0.0)
            which = f"version {span['version']}  tokens {span['start']:3}-{span['end']:3}"
            print(f"{name}  {which}  longest gap {1e3 * gap:5.0f} ms  {part!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--versions", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="refitd-demo-") as name, testing.daemon() as daemon:
        folder = Path(name)
        checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2, 3)]
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        print("starting two servers with random weights, which they never serve", flush=True)
        with Server(checkpoints[0], folder / "0.log", daemon.socket) as first, Server(
            checkpoints[0], folder / "1.log", daemon.socket, REFITD_INSTANCE="vllm-1"
        ) as second:
            for server in (first, second):
                server.up()
                server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            stop = threading.Event()
            clients: list[threading.Thread] = []
            for version in range(1, arguments.versions + 1):
                result = trainer.send(version, checkpoints[version % 3])
                committed = sum(instance.committed for instance in result.instances)
                print(f"trainer  refit({version}) on {committed} servers in {1e3 * result.seconds:.0f} ms", flush=True)
                if not clients:
                    clients = [threading.Thread(target=client, args=(f"vllm-{i}", s, stop)) for i, s in enumerate((first, second))]
                    for thread in clients:
                        thread.start()
                time.sleep(PAUSE_SECONDS)
            stop.set()
            for thread in clients:
                thread.join(CALL_SECONDS)
        trainer.close()


if __name__ == "__main__":
    main()
