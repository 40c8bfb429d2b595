"""The daemon's page in headless Chromium, against two real daemons, of which one coordinates and the other joined.

tests/page/test runs it. The tests compare what the page contains: texts, geometry, colours, focus. The pictures are for people.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from itertools import pairwise

import grpc
from browser import Browser
from daemon import CHILD_SECONDS, Daemon
from refitd.v1 import operator_pb2, operator_pb2_grpc
from stub_trainer import SECONDS, StubTrainer

BIN = "bazel-bin"
BROWSER = os.environ["BROWSER"]
PICTURES = os.environ["PICTURES"]

# What an operator may write into a reason: markup, and a mark that turns the direction of writing around.
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1> \u202etxt.exe"
SHOWN = HOSTILE.replace("\u202e", "\\u{202e}")
# The tab's own view of one group, as a hostile daemon would send it.
HOSTILE_STATUS = {"daemon_id": HOSTILE, "serving": True, "groups": [{
    "name": HOSTILE, "owner": HOSTILE, "state": HOSTILE, "version": "1", "coordinator": HOSTILE,
    "instances": [{"name": HOSTILE, "state": HOSTILE, "reason": HOSTILE}],
    "nodes": [{"daemon_id": HOSTILE, "state": HOSTILE, "address": HOSTILE, "data_seconds": 1, "sends": [{"daemon_id": HOSTILE, "bytes": "1"}]}]}]}
HOSTILE_UPDATE = {"group": HOSTILE, "update_id": "1", "version": "1", "state": "aborted", "reason": HOSTILE, "note": HOSTILE,
                  "failure": {"suspects": [{"role": HOSTILE, "instance": HOSTILE}], "dirty_instances": [HOSTILE]}}

CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  const worst = [];
  for (const e of document.querySelectorAll('h1, h2, h3, p, td, caption, li, summary, header *, .row *')) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    worst.push([(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 40)]);
  }
  return worst.sort((x, y) => x[0] - y[0])[0];
})()"""


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=CHILD_SECONDS).stdout


class Paged(Daemon):
    """A daemon with a page in the clear on loopback: `page` is its address."""

    def __init__(self, name, *flags, address="127.0.0.1:0"):
        page = ("--metrics-listen", address, "--metrics-page")
        super().__init__("--daemon-id", name, "--insecure", "--cuda-enabled", "false", *page, *flags, binary=BIN + "/daemon/refitd")
        self.page = None

    def __enter__(self):
        super().__enter__()
        self.page = "http://%s/" % self.listener("metrics")
        return self

    def listener(self, kind):
        with self.channel() as channel:
            status = operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
        return next(name for found, _, name in (each.partition(":") for each in status.listeners) if found == kind)


class PageTest(unittest.TestCase):
    """One browser and two daemons for all tests; each test opens the page anew."""

    checkpoint: str
    browser: Browser
    a: Paged
    b: Paged
    version: int
    channel: grpc.Channel
    trainer: StubTrainer

    @classmethod
    def setUpClass(cls):
        cls.checkpoint = tempfile.mkdtemp(prefix="refitd-page-")
        cls.addClassCleanup(shutil.rmtree, cls.checkpoint, ignore_errors=True)
        run(BIN + "/tests/workloads/make_checkpoint", "--model", "tiny", "--out", cls.checkpoint + "/model")
        cls.browser = cls.enterClassContext(Browser(BROWSER))
        cls.a = cls.enterClassContext(Paged("node-a", "--listen-tcp", "127.0.0.1:0"))
        cls.b = cls.enterClassContext(Paged("node-b"))
        cls.version = 0
        cls.engine(cls.a, "near")
        cls.engine(cls.b, "far", "--coordinator", cls.a.listener("tcp"))
        for _ in range(12):
            cls.push()
        cls.attach_to_reward()
        cls.fail_an_update(1, "its rewards collapsed")
        cls.picture_for_the_pages()
        cls.fail_an_update(2, HOSTILE)

    @classmethod
    def engine(cls, daemon, name, *more):
        child = subprocess.Popen([BIN + "/daemon/refitctl/refitctl", "--socket", daemon.socket, "engine", "--group", "policy", "--instance",
                                  name, "--checkpoint", cls.checkpoint + "/model", *more], stdout=subprocess.DEVNULL)
        cls.addClassCleanup(child.wait, CHILD_SECONDS)
        cls.addClassCleanup(child.kill)

    @classmethod
    def push(cls):
        cls.version += 1
        run(BIN + "/daemon/refitctl/refitctl", "--socket", cls.a.socket, "push", cls.checkpoint + "/model", "--group", "policy", "--create",
            "--wait-instances", "2", "--version", str(cls.version))

    @classmethod
    def attach_to_reward(cls):
        engine = subprocess.Popen([BIN + "/client/examples/engine_example", cls.a.socket, "reward", "judge", "1"], stderr=subprocess.DEVNULL)
        cls.addClassCleanup(engine.wait, CHILD_SECONDS)
        cls.addClassCleanup(engine.kill)
        cls.channel = cls.enterClassContext(cls.a.channel())
        cls.trainer = StubTrainer(cls.channel, "reward", instances=1)

    @classmethod
    def fail_an_update(cls, version, reason):
        cls.trainer.begin(version)
        abort = operator_pb2.AbortUpdateRequest(group="reward", reason=reason)
        operator_pb2_grpc.OperatorStub(cls.channel).AbortUpdate(abort, timeout=SECONDS)

    @classmethod
    def picture_for_the_pages(cls):
        """docs/figures/page.png is this one."""
        cls.browser.look(1000, 700, "light")
        cls.browser.open(cls.a.page)
        cls.browser.wait("document.querySelectorAll('#bars button').length === 13 && document.querySelectorAll('#facts').length")
        cls.browser.picture(os.path.join(PICTURES, "page.png"))

    def setUp(self):
        self.browser.look(1280, 900, "light")

    def open(self, daemon=None):
        self.browser.open((daemon or self.a).page)
        self.browser.wait("document.querySelector('#live')?.textContent === '● live'")

    def texts(self, selector):
        return self.browser.ask("[...document.querySelectorAll(%s)].map((e) => e.innerText)" % json.dumps(selector))

    def rows(self, caption):
        """The cells of the table whose caption begins so."""
        return self.browser.ask("""(() => { const table = [...document.querySelectorAll('table')]
            .find((t) => t.caption.textContent.startsWith(%s));
            return [...table?.tBodies[0].rows ?? []].map((r) => [...r.cells].map((c) => c.textContent)); })()""" % json.dumps(caption))

    def picture(self, name):
        self.browser.picture(os.path.join(PICTURES, name + ".png"))

    def test_the_coordinator_shows_instances_versions_daemons_and_links(self):
        self.open()
        rows = {row[0]: row[1:5] for row in self.rows("Instances of policy")}
        self.assertEqual(rows, {name: ["● clean", str(self.version), "0", "1 of 1"] for name in ("near", "far")})
        daemons = {row[0]: row[1] for row in self.rows("Daemons of policy")}
        self.assertEqual(daemons, {"node-a": "● self", "node-b": "● joined"})
        (link,) = self.rows("Links of policy")
        self.assertEqual(link[0], "node-a → node-b")
        self.assertRegex(link[1], r"^10\.\d MiB$")
        self.assertRegex(link[2], r"^[\d.]+ [MG]iB/s$")
        self.assertEqual(self.texts("article h3"), ["policy", "reward"])
        self.assertIn("● version %d, 2 of 2 instances ready" % self.version, self.texts("article .row span"))
        self.assertEqual(self.browser.complaints, [])
        self.picture("coordinator")

    def test_a_joined_daemon_shows_its_coordinator_and_says_where_updates_are(self):
        self.open(self.b)
        self.assertEqual(self.rows("Instances of policy")[0][0], "far")
        self.assertIn("lives at " + self.a.listener("tcp"), self.texts("article > p")[0])
        self.assertNotIn("committed", self.texts("article > p")[0], "a joined daemon does not count updates")
        self.assertFalse(self.browser.ask("document.querySelector('#bars').checkVisibility()"))
        self.assertIn("the coordinator does", self.texts("#detail")[0])
        self.assertEqual(self.browser.complaints, [])
        self.picture("joined")

    def test_updates_are_bars_of_phases_as_long_as_they_took(self):
        self.open()
        bars = self.browser.ask("""[...document.querySelectorAll('#bars button')].map((b) => ({
            label: b.ariaLabel, mark: b.querySelector('b').textContent, height: b.querySelector('.bar').clientHeight,
            phases: [...b.querySelectorAll('.bar span')].map((s) => [s.dataset.phase, s.getBoundingClientRect().height])}))""")
        self.assertGreaterEqual(len(bars), 14)
        committed = [bar for bar in bars if bar["label"].startswith("policy")]
        for bar in committed:
            self.assertRegex(bar["label"], r"^policy version \d+: committed, [\d.]+ m?s, 10\.\d MiB · ")
            self.assertIn("settling", dict(bar["phases"]))  # in which a compiled refit moves its bytes
            self.assertAlmostEqual(sum(height for _, height in bar["phases"]), bar["height"], delta=1.5)
        tallest = max(committed, key=lambda bar: bar["height"])
        self.assertGreater(tallest["height"], 100)
        aborted = [bar for bar in bars if bar["label"].startswith("reward")]
        self.assertTrue(all(bar["mark"].startswith("✕") for bar in aborted), aborted)

        self.browser.ask("document.querySelector('#as-table summary').click()")
        self.browser.wait("document.querySelectorAll('#table tbody tr').length === %d" % len(bars))
        self.assertIn("transfer ", self.rows("Last updates")[-1][2])

    def test_the_last_failure_is_shown_with_its_reason_as_text(self):
        self.open()
        self.assertIn("✕ reward version 2: aborted", self.texts("#failure-what")[0])
        self.assertIn(SHOWN, self.texts("#failure-why")[0])
        self.assertIn("suspects: operator", self.texts("#failure-more")[0])
        self.assertEqual(self.browser.ask("[document.scripts.length, document.images.length, window.pwned ?? 0]"), [1, 0, 0])

    def test_the_page_follows_what_happens_without_being_loaded_again(self):
        self.open()
        before = self.browser.ask("document.querySelectorAll('#bars button').length")
        self.browser.ask("window.still = true")
        self.push()
        self.browser.wait("document.querySelectorAll('#bars button').length === %d" % (before + 1))
        self.browser.wait("document.querySelector('article .row span').textContent.startsWith('● version %d,')" % self.version)
        self.assertTrue(self.browser.ask("window.still"))
        loaded = {address.removeprefix(self.a.page) for address in self.browser.requests}
        self.assertEqual(loaded - {"data:,"}, {"", "events"})

    def test_names_and_texts_of_others_are_shown_and_never_run(self):
        """The stream is a hostile daemon's, since a real one refuses such names of groups."""
        events = "".join("id: 1\nevent: %s\ndata: %s\n\n" % each for each in (
            ("update", json.dumps(HOSTILE_UPDATE)), ("status", json.dumps(HOSTILE_STATUS))))
        self.browser.call("Fetch.enable", patterns=[{"urlPattern": "*/events"}])
        self.browser.on_request = lambda request: self.browser.answer(request, events, "text/event-stream")
        try:
            self.browser.open(self.a.page)
            self.browser.wait("document.querySelector('article h3')?.textContent.includes('pwned')")
            for selector in ("#daemon", "article h3", "#failure-why", "article td", "#detail"):
                self.assertIn(SHOWN, self.texts(selector)[0], selector)
            counts = "[document.scripts.length, document.images.length, document.querySelectorAll('[onerror]').length, window.pwned ?? 0]"
            self.assertEqual(self.browser.ask(counts), [1, 0, 0, 0])
            self.assertIn(SHOWN, self.browser.ask("document.title"))
            self.picture("hostile")
        finally:
            self.browser.on_request = None
            self.browser.call("Fetch.disable")

    def test_the_policy_stops_what_would_get_in_all_the_same(self):
        self.open()
        with self.assertRaisesRegex(RuntimeError, "TrustedHTML"):
            self.browser.ask("document.body.innerHTML = '<b>markup</b>'")
        with self.assertRaisesRegex(RuntimeError, "TrustedScript|unsafe-eval|EvalError"):
            self.browser.ask("new Function('window.pwned = 1')()")
        self.browser.ask("""(() => { const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image);
            fetch('http://127.0.0.1:9/').catch(() => { window.refused = true; }); })()""")
        self.browser.wait("window.refused")
        self.browser.wait("document.images[0].complete && document.images[0].naturalWidth === 0")
        stopped = " ".join(self.browser.complaints)
        self.assertIn("img-src", stopped)
        self.assertIn("connect-src", stopped)

    def test_without_a_mouse(self):
        self.open()
        self.browser.press("Tab")
        self.assertEqual(self.browser.ask("document.activeElement.textContent"), "Skip to the groups")
        stop = """document.activeElement.closest('.skip, body') !== document.body || document.activeElement === document.body ? ''
            : document.activeElement.closest('#bars')?.id ?? (document.activeElement.ariaLabel || document.activeElement.textContent)"""
        seen = []
        while len(seen) < 20:
            self.browser.press("Tab")
            at = self.browser.ask(stop)
            if not at:
                break
            seen.append(at)
        self.assertEqual(seen[0], "bars")
        self.assertEqual(seen.count("bars"), 1, "the bars are one stop")
        self.assertIn("Instances of policy", seen)

        self.browser.ask("document.querySelector('#bars [tabindex=\"0\"]').focus()")
        labels = self.browser.ask("[...document.querySelectorAll('#bars button')].map((b) => b.ariaLabel)")
        for key, at in (("Home", 0), ("ArrowRight", 1), ("End", len(labels) - 1), ("ArrowLeft", len(labels) - 2)):
            self.browser.press(key)
            self.assertEqual(self.browser.ask("document.activeElement.ariaLabel"), labels[at], key)
            self.assertEqual(self.texts("#detail")[0].split(" · ")[0], labels[at].split(" · ")[0], key)
        self.assertNotEqual(self.browser.ask("getComputedStyle(document.activeElement).outlineStyle"), "none")
        # The statuses that come do not take the focus away.
        uptime = self.texts("#facts")[0]
        self.browser.wait("document.querySelector('#facts').innerText !== %s" % json.dumps(uptime))
        self.assertEqual(self.browser.ask("document.activeElement.ariaLabel"), labels[-2])

    def test_light_and_dark_can_be_read(self):
        grounds = []
        for scheme in ("light", "dark"):
            self.browser.look(1280, 900, scheme)
            self.open()
            ratio, text = self.browser.ask(CONTRAST)
            self.assertGreaterEqual(ratio, 4.5, "%s: %s" % (scheme, text))
            grounds.append(self.browser.ask("getComputedStyle(document.body).backgroundColor"))
            self.picture(scheme)
        self.assertEqual([int(re.search(r"\d+", ground).group()) > 128 for ground in grounds], [True, False])

    def test_on_a_phone(self):
        self.browser.look(360, 740, "dark")
        self.open()
        self.assertEqual(self.browser.ask("document.scrollingElement.scrollWidth"), 360)
        outside = """[...document.querySelectorAll('article *')].filter((e) => e.checkVisibility() && e.tagName !== 'THEAD' && !e.closest('thead')
            && e.getBoundingClientRect().right > 361).map((e) => e.textContent.slice(0, 40))"""
        self.assertEqual(self.browser.ask(outside), [])
        label = "getComputedStyle(document.querySelector('article td:nth-child(3)'), '::before').content"
        self.assertIn("Version", self.browser.ask(label) + self.browser.ask("document.querySelector('article td:nth-child(3)').dataset.label"))
        self.assertEqual(self.browser.ask("document.querySelector('article tbody tr').role"), "row")
        sizes = self.browser.ask("[...document.querySelectorAll('article td, p')].map((e) => parseFloat(getComputedStyle(e).fontSize))")
        self.assertGreaterEqual(min(sizes), 12)
        self.picture("phone")

    def test_nothing_is_told_by_colour_alone(self):
        self.open()
        swatches = "[...document.querySelectorAll('.legend i')].map((e) => getComputedStyle(e).backgroundImage)"
        patterns = self.browser.ask(swatches)
        self.assertEqual(len(patterns), 6)
        # Neighbours in a bar differ in pattern, not in colour alone.
        self.assertTrue(all(one != other for one, other in pairwise(patterns)), patterns)
        marked = self.browser.ask("[...document.querySelectorAll('[data-tone]')].filter((e) => e.textContent).map((e) => e.textContent)")
        for text in marked:
            self.assertRegex(text, r"^[●◐✕↑]", "a mark comes with the colour")

    def test_a_daemon_that_is_gone_is_told_and_comes_back_by_itself(self):
        with Paged("node-c") as daemon:
            self.open(daemon)
            address = daemon.page.removeprefix("http://").rstrip("/")
        self.browser.wait("document.querySelector('#live').textContent.startsWith('✕ not connected; what is shown is of')")
        self.assertTrue(self.browser.ask("document.body.hasAttribute('data-stale')"))
        with Paged("node-c", address=address):
            self.browser.wait("document.querySelector('#live').textContent === '● live'")
            self.assertFalse(self.browser.ask("document.body.hasAttribute('data-stale')"))


if __name__ == "__main__":
    unittest.main()
