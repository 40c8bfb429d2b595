"""Versions of tokens, in the answers of vLLM's OpenAI server and as a metric.

vLLM labels every token with the version that its engine had when it made the token (`CompletionOutput.weight_versions`, since the
versions whose `finish_weight_update` takes one), but its OpenAI routes leave that out. Here each choice gets a field
`refitd_version`: [{"version": 7, "start": 0, "end": 12}, ...], where `start` and `end` count the choice's tokens, and version null is
the checkpoint's. In a stream the choice's last chunk has it. The counter `refitd_generated_tokens_total` counts by version.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")
# Answers whose spans are kept until they are sent; an answer that a client gave up never takes its spans.
MAX_ANSWERS = 4096
# Labels that the counter keeps. With one more, the label that was counted first is removed.
MAX_VERSIONS = 16


class TokenVersions:
    """The versions of the tokens that one engine client yields, whose outputs this object watches. For the event loop's thread."""

    def __init__(self, engine: Any) -> None:
        from prometheus_client import Counter

        self._answers: OrderedDict[str, tuple[int, dict[int, list[dict[str, Any]]]]] = OrderedDict()
        self._counter = Counter("refitd_generated_tokens", "Tokens of finished answers, by version of the weights", ["version"])
        self._labels: list[str] = []
        generate = engine.generate

        async def watched(prompt: Any, sampling_params: Any, request_id: str, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
            outputs = generate(prompt, sampling_params, request_id, *arguments, **options)
            try:
                async for output in outputs:
                    self._note(request_id, sampling_params, output)
                    yield output
            finally:
                await outputs.aclose()

        engine.generate = watched

    def _note(self, request_id: str, sampling_params: Any, output: Any) -> None:
        for completion in output.outputs:
            spans = getattr(completion, "weight_versions", None)
            if spans is None:
                continue
            told = [{"version": _number(span.version), "start": span.start, "end": span.end} for span in spans]
            _, choices = self._answers.setdefault(request_id, (int(getattr(sampling_params, "n", 1) or 1), {}))
            choices[completion.index] = told
            for span in told:
                self._count(str(span["version"]), span["end"] - span["start"])
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _count(self, label: str, tokens: int) -> None:
        if label not in self._labels:
            self._labels.append(label)
            while len(self._labels) > MAX_VERSIONS:
                self._counter.remove(self._labels.pop(0))
        self._counter.labels(label).inc(tokens)

    def add_to(self, body: bytes) -> bytes:
        """The body of an answer, or of a chunk of one, with the spans of the choices that have ended."""
        try:
            answer = json.loads(body)
            name, choices = answer["id"], answer["choices"]
        except (ValueError, TypeError, KeyError):
            return body
        added = False
        for choice in choices:
            if choice.get("finish_reason") is not None:
                spans = self._take(name, choice.get("index", 0))
                if spans is not None:
                    choice["refitd_version"], added = spans, True
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() if added else body

    def _take(self, name: str, index: int) -> list[dict[str, Any]] | None:
        """vLLM's request ids are the answer's, or that with the number of one of several prompts behind."""
        found = self._answers.get(name)
        key, of = name, index
        if found is None:
            first = self._answers.get(f"{name}-0")
            n = first[0] if first is not None else 1
            key, of = f"{name}-{index // n}", index % n
            found = self._answers.get(key)
        return None if found is None else found[1].get(of)


def _number(label: str) -> int | None:
    return int(label) if label.isdigit() else None


class AddTokenVersions:
    """ASGI middleware. `versions_of`: None until the engine is there."""

    def __init__(self, app: Any, versions_of: Any) -> None:
        self._app = app
        self._versions_of = versions_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self._versions_of() if scope["type"] == "http" and scope["path"] in PATHS else None
        if found is None:
            await self._app(scope, receive, send)
            return
        versions: TokenVersions = found
        held: list[Any] = []  # the start of an answer whose length changes, and its body until now

        async def send_with_versions(message: Any) -> None:
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message.get("headers", []) if name.lower() == b"content-type"]
                if kinds and kinds[0].startswith(b"application/json"):
                    held[:] = [message, b""]
                    return
            elif message["type"] == "http.response.body":
                if held:
                    held[1] += message.get("body", b"")
                    if message.get("more_body"):
                        return
                    body = versions.add_to(held[1])
                    headers = [(name, value) for name, value in held[0].get("headers", []) if name.lower() != b"content-length"]
                    await send({**held[0], "headers": [*headers, (b"content-length", str(len(body)).encode())]})
                    message = {"type": "http.response.body", "body": body}
                elif message.get("body"):
                    message = {**message, "body": _stream(message["body"], versions)}
            await send(message)

        await self._app(scope, receive, send_with_versions)


def _stream(part: bytes, versions: TokenVersions) -> bytes:
    """A part of a stream; vLLM sends whole events."""
    if b'"finish_reason":"' not in part:
        return part
    events = part.split(b"\n\n")
    return b"\n\n".join(b"data: " + versions.add_to(event[6:]) if event.startswith(b"data: {") else event for event in events)
