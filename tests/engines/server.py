"""vLLM's OpenAI server as a process, with the plugin of refitd, and a client that keeps it busy."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import CALL_SECONDS, ENVIRONMENT, GROUP, START_SECONDS, VLLM_GPU_OPTIONS, VLLM_ON_GPU, Tokens, die_with_parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`vllm serve MODEL` with the driver of refitd; ends with the test."""

    def __init__(self, model: Path, log: Path, daemon_socket: str, *arguments: str, **environment: str | None) -> None:
        """`environment`: variables, in place of those that are set here; None: not set."""
        self.log = log
        self.port = free_port()
        self._command = [*self.command(model), *arguments]
        given: dict[str, str | None] = {
            **os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "refitd", "REFITD_GROUP": GROUP, "REFITD_INSTANCE": "vllm-0",
            "REFITD_SOCKET": daemon_socket, **environment,
        }  # fmt: skip
        self._environment = {name: value for name, value in given.items() if value is not None}
        self.start()

    def command(self, model: Path) -> list[str]:
        return [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8",
            "--load-format", "refitd", "--weight-transfer-config", '{"backend": "refitd"}', *self.device_options(),
        ]  # fmt: skip

    @staticmethod
    def device_options() -> list[str]:
        if not VLLM_ON_GPU:
            return ["--enforce-eager"]
        options: Any = ((f"--{name.replace('_', '-')}", value) for name, value in VLLM_GPU_OPTIONS.items())
        return ["--enable-sleep-mode", *(part for name, value in options for part in (name, json.dumps(value)))]

    def start(self) -> None:
        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(
                self._command, stdout=file, stderr=file, env=self._environment, start_new_session=True, stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def get(self, path: str) -> tuple[int, Any, Any]:
        """Status, body and headers; status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                body = answer.read()
                return answer.status, json.loads(body) if body else None, answer.headers
        except urllib.error.HTTPError as error:
            body = error.read()
            return error.code, json.loads(body) if body else None, error.headers
        except OSError:
            return 0, None, {}

    def until(self, holds: Callable[[], bool], what: str, seconds: float = CALL_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            self.check_runs()
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s: {self.get('/refitd/status')}"
            time.sleep(0.05)

    def check_runs(self) -> None:
        assert self.process.poll() is None, f"the server ended: {self.log.read_text(errors='replace')[-3000:]}"

    def up(self) -> Server:
        self.until(lambda: self.get("/refitd/status")[0] == 200, "the server answers", START_SECONDS)
        return self

    def post(self, path: str, body: Any = None) -> int:
        """The status. `body`: of the request, as JSON; None: it has none."""
        data, headers = (b"", {}) if body is None else (json.dumps(body).encode(), {"content-type": "application/json"})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def collective_rpc(self, method: str) -> list[Any]:
        """Calls the method of each rank's worker, and returns the results, which are dicts. It is a route of vLLM's development mode."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/collective_rpc", json.dumps({"method": method}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return list(json.loads(answer.read())["results"])

    def tokens_by_version(self) -> dict[int, int]:
        """The counter of generated tokens, from the server's metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = (re.fullmatch(r'refitd_generated_tokens_total\{version="(\d+)"\} (\S+)', line) for line in lines)
        return {int(match[1]): int(float(match[2])) for match in found if match}

    def tokens_by_engine(self) -> dict[str, int]:
        """vLLM's counter of generated tokens, by data-parallel rank."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = (re.fullmatch(r'vllm:generation_tokens_total\{.*engine="(\d+)".*\} (\S+)', line) for line in lines)
        return {match[1]: int(float(match[2])) for match in found if match}

    def counter(self, name: str) -> int:
        """One of vLLM's counters, over all its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, f"the server has no counter {name}"
        return sum(int(float(value)) for value in found)

    def complete(self, prompt: str, tokens: int = 8) -> tuple[str, int]:
        """Text, and the version when the answer began. Raises OSError for any other status than 200."""
        choice, version = self.choice(prompt, tokens)
        return choice["text"], version

    def answer(self, prompt: str, tokens: int = 8) -> tuple[list[Any], int]:
        """What support.Tokens has for one prompt, and the version when the answer began."""
        choice, version = self.choice(prompt, tokens, return_token_ids=True, **({"logprobs": 2} if VLLM_ON_GPU else {}))
        if not VLLM_ON_GPU:
            return choice["token_ids"], version
        found = choice["logprobs"]
        leads = [max(top.values()) - min(top.values()) for top in found["top_logprobs"]]
        return [list(step) for step in zip(choice["token_ids"], found["token_logprobs"], leads)], version

    def check_answer(self, prompt: str, expected: Tokens, version: int) -> None:
        """The server answers as an engine with these weights does, and tells the version."""
        answer, told = self.answer(prompt)
        assert told == version and expected.include([answer]), (answer, told, version)

    def choice(self, prompt: str, tokens: int = 8, **more: Any) -> tuple[dict[str, Any], int]:
        """Does what complete() does, and returns all that the server tells of the one choice. `more`: further fields of the request."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            choice: dict[str, Any] = json.loads(answer.read())["choices"][0]
            return choice, int(answer.headers.get("x-refitd-version", "-1"))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and body of the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def stream(self, prompt: str, tokens: int) -> tuple[list[float], list[dict[str, Any]]]:
        """Seconds between the tokens of one completion, and the versions of its tokens."""
        body = json.dumps(
            {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"content-type": "application/json"}
        )
        times: list[float] = []
        spans: list[dict[str, Any]] = []
        ended = False
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    assert b"error" not in line, line
                    times.append(time.monotonic())
                    spans = json.loads(line[len(b"data: ") :])["choices"][0].get("refitd_version", spans)
        assert ended, "the stream ended early"
        return [later - earlier for earlier, later in zip(times, times[1:])], spans

    def core(self) -> int:
        """The process that has the model."""
        for line in subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True).stdout.splitlines():
            pid, group, name = line.split(None, 2)
            if group == str(self.process.pid) and "EngineCore" in name:
                return int(pid)
        raise AssertionError("no process of the server's is named EngineCore")

    def gives_no_token(self, prompt: str, seconds: float) -> bool:
        """Whether a completion brings no token within the time; it is given up then."""
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                answer.read()
        except (OSError, http.client.HTTPException):
            return True
        return False

    def kill_when_it_answers_nothing(self, prompt: str) -> None:
        """For a server that lost its worker: it ends by itself, or fails every request."""
        deadline = time.monotonic() + CALL_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "the server still answers"
            try:
                self.complete(prompt)
            except (OSError, http.client.HTTPException):
                break
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class SglangServer(Server):
    """SGLang's server, likewise."""

    def command(self, model: Path) -> list[str]:
        return [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "bfloat16", "--device", "cpu", "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch", "--disable-cuda-graph", "--max-total-tokens", "4096", "--context-length", "512",
            "--load-format", "dummy",
        ]  # fmt: skip

    def spans(self, prompt: str, tokens: int) -> list[list[Any]]:
        """Versions of the tokens of one answer, as [version, first, end]."""
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"text": prompt, "sampling_params": how}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            found = json.loads(answer.read())["meta_info"]["weight_versions"]
        return [[int(span["version"]), span["start"], span["end"]] for span in found]


class Load:
    """Clients that stream completions, one after the other, until `stop`."""

    def __init__(self, server: Server, clients: int = 3, tokens: int = 24) -> None:
        self.gaps: list[float] = []
        self.spans: list[list[dict[str, Any]]] = []  # of each completion
        self.completions = 0
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(server, i, tokens), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, server: Server, number: int, tokens: int) -> None:
        while not self._stop.is_set():
            try:
                gaps, spans = server.stream(f"client {number} says " * 3, tokens)
                self.gaps += gaps
                self.spans.append(spans)
                self.completions += 1
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_SECONDS)
            assert not thread.is_alive(), "a completion does not end"


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
