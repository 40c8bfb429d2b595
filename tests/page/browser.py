"""A headless Chromium, driven over the pipe of its DevTools protocol: no port, no driver, no package but the browser."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

SECONDS = 60  # the time for an answer or a condition; only what hangs reaches it
LOOK_SECONDS = 0.05  # the time between two looks at a condition


class Browser:
    """Context manager of one tab. It keeps what the tab requested and what it complained of."""

    def __init__(self, binary):
        self.binary = binary
        self.folder = tempfile.mkdtemp(prefix="refitd-page-")
        self.requests = []  # addresses
        self.complaints = []  # lines of the console, exceptions, violations of the page's policy
        self.on_request = None  # called with a request that Fetch.enable holds up
        self.number = 0
        self.session = None
        self.rest = b""

    def __enter__(self):
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        flags += ["--disable-background-networking", "--disable-component-update", "--user-data-dir=" + self.folder, "about:blank"]
        join = 'exec "$@" 3<&%d 4>&%d' % (commands, answers)
        self.process = subprocess.Popen(
            ["sh", "-c", join, "sh", self.binary, *flags], pass_fds=(commands, answers), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, HOME=self.folder))
        os.close(commands)
        os.close(answers)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        return self

    def __exit__(self, *unused):
        self.process.terminate()
        try:
            self.process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _post(self, method, **arguments):
        self.number += 1
        message = {"id": self.number, "method": method, "params": arguments}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        return self.number

    def _next(self, until):
        while b"\0" not in self.rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                raise TimeoutError("Chromium gives no answer within %d s" % SECONDS)
            got = os.read(self.answers, 1 << 20)
            if not got:
                raise EOFError("Chromium ended")
            self.rest += got
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _hear(self, event):
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(details["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.complaints.append(details["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.complaints.append(str(details["args"]))
        elif method == "Fetch.requestPaused" and self.on_request:
            self.on_request(details)

    def call(self, method, **arguments):
        """The result of a command of the protocol."""
        number = self._post(method, **arguments)
        until = time.monotonic() + SECONDS
        while True:
            message = self._next(until)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError("%s: %s" % (method, message["error"]["message"]))
                return message["result"]
            self._hear(message)

    def answer(self, request, body, content_type):
        """Answers a request that Fetch.enable holds up, in the server's place."""
        self._post("Fetch.fulfillRequest", requestId=request["requestId"], responseCode=200,
                   responseHeaders=[{"name": "Content-Type", "value": content_type}], body=base64.b64encode(body.encode()).decode())

    def open(self, address):
        self.call("Page.navigate", url="about:blank")  # ends what the page before still does
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=address)

    def ask(self, expression):
        """The value of an expression of JavaScript in the tab. The page's policy holds for it as well."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, allowUnsafeEvalBlockedByCSP=False)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", expression))
        return result["result"].get("value")

    def wait(self, expression):
        """Waits until the expression is true, and returns its value."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            value = self.ask(expression)
            if value:
                return value
            time.sleep(LOOK_SECONDS)
        raise AssertionError("not within %d s: %s; the page has:\n%s" % (SECONDS, expression, self.ask("document.body.innerText")))

    def press(self, key):
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def look(self, width, height, scheme):
        """A screen of that size, whose user prefers that scheme of colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path):
        """Writes the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
