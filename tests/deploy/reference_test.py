"""The pages in docs/reference are what the source and the programs say; the parts of tools/reference.py that read them."""

import json
import os
import re
import sys
import unittest

# The pages are made of any file, so the test finds the tree by the real place of one page.
TREE = os.path.dirname(os.path.dirname(os.path.realpath("docs/quickstart.md")))
BINARIES = [os.path.realpath("daemon/refitd"), os.path.realpath("daemon/refitctl/refitctl")]
sys.path.insert(0, os.path.join(TREE, "tools"))
# The chart decides these settings by values of its own.
OF_THE_CHART = r"(listen|tls|rule|metrics)\..*|allowed_[ug]ids|rules_file|daemon_id|peers\.(listen|identity|interface)|data\.port"

import reference  # noqa: E402
import reference_api  # noqa: E402


class PagesTest(unittest.TestCase):
    def test_settings_metrics_and_log_lines_are_those_of_the_source(self):
        for path, make in reference.COMMITTED.items():
            with self.subTest(page=path):
                self.assertEqual(reference.read(path), make())

    def test_commands_are_the_programs_help(self):
        self.assertEqual(reference.read("docs/reference/commands.md"), reference.commands_page(*BINARIES),
                         "run: bazel build //daemon:refitd //daemon/refitctl && "
                         "tools/reference.py --commands bazel-bin/daemon/refitd bazel-bin/daemon/refitctl/refitctl")

    def test_every_setting_says_what_it_is_and_has_a_flag(self):
        flags = reference.flags_of(reference.read(reference.CONFIG_CC))
        for name, _, settings in reference.settings_of(reference.read(reference.CONFIG_PROTO)):
            for setting in settings:
                with self.subTest(setting=setting.path):
                    self.assertTrue(setting.what or setting.values)
                    self.assertEqual(setting.path in flags, name != "rule")

    def test_the_chart_takes_every_setting(self):
        """The schema of its values knows the settings of daemon/config.proto, less those that the chart decides."""
        values = json.loads(reference.read("deploy/helm/refitd/values.schema.json"))["definitions"]["settings"]

        def names(properties, prefix):
            for name, each in properties.items():
                yield from names(each["properties"], prefix + name + ".") if "properties" in each else [prefix + name]

        settings = {s.path for _, _, group in reference.settings_of(reference.read(reference.CONFIG_PROTO)) for s in group}
        self.assertEqual(set(names(values["properties"], "")), {path for path in settings if not re.fullmatch(OF_THE_CHART, path)})

    def test_every_metric_says_what_it_is(self):
        metrics = reference.metrics_of(reference.read(reference.METRICS_CC))
        self.assertIn("refitd_updates_total", [metric.name for metric in metrics])
        self.assertEqual([metric.name for metric in metrics if not metric.what], [])

    def test_names_of_every_interface_are_on_the_sites_pages(self):
        pages = reference_api.pages()
        for page, names in {"python": ("refitd.Trainer.refit", "refitd.EngineLoop"), "c": ("refit_trainer_attach", "refit_event"),
                            "cpp": ("Trainer", "Engine", "ConnectOptions"), "messages": ("Trainer", "PeerHeader", "GroupSpec")}.items():
            for name in names:
                with self.subTest(page=page, name=name):
                    self.assertRegex(pages[f"docs/reference/{page}.md"], rf"(?m)^####? {name}$")


class ReaderTest(unittest.TestCase):
    PROTO = """
message RefitdConfig {
  // Sizes of things.
  message Limits {
    // How long a call
    // may take.
    optional int64 call_ms = 1 [default = 5000];
    optional string file = 2;  // A path. Empty: stderr.
  }
  optional Limits limits = 1;
  repeated uint32 ids = 2;
}
"""

    def test_a_settings_comment_stands_above_it_or_behind_it(self):
        (_, _, general), (name, what, limits) = reference.settings_of(self.PROTO)
        self.assertEqual([setting.path for setting in general], ["ids"])
        self.assertEqual((name, what), ("limits", "Sizes of things."))
        self.assertEqual([(s.path, s.what) for s in limits],
                         [("limits.call_ms", "How long a call may take."), ("limits.file", "A path. Empty: stderr.")])
        self.assertEqual([reference.default_of(setting) for setting in limits], ["`5000` (5 s)", "stderr"])

    def test_what_a_check_accepts_is_read_from_the_check(self):
        ranges = reference.Ranges('Setting{"slot-bytes", "a.slot_bytes", "of a slot", kLeast},\nSetting{"any", "a.none", "anything"},\n'
                                  'CheckRange("a.wait_ms", a.wait_ms(), 1, kMaxLimitMs);',
                                  "inline constexpr int64_t kLeast = 64 << 10;\ninline constexpr int64_t kMaxLimitMs = 24 * 3'600'000;\n")
        self.assertEqual([ranges.text("a.slot_bytes"), ranges.text("a.wait_ms"), ranges.text("a.none")],
                         ["64 KiB or more", "1 ms to 24 h", ""])

    def test_a_note_about_a_line_that_is_gone_or_has_another_level_is_found(self):
        lines = reference.log_lines_of('LogWarning("{}: lost after {} s", name, seconds); out.Log(LogLine::kInfo, fmt::format("made {}", x));', "a.cc")
        self.assertEqual([(line.level, line.text) for line in lines], [("warning", "…: lost after … s"), ("info", "group …: made …")])
        listed = [("NODE: lost after N s", "warning", ""), ("NODE: lost after N s", "error", ""), ("NODE: found after N s", "warning", "")]
        self.assertEqual(reference.stale_notes(listed, lines, []),
                         ["NODE: lost after N s: the level is warning", "no source logs: NODE: found after N s"])

    def test_a_record_that_is_not_whole_is_found(self):
        record = {"kind": "engine", "name": "vLLM", "version": "1", "device": "CPU", "ranks": "", "ran": "", "result": "passed", "evidence": "engines.md"}
        self.assertEqual(reference.wrong_records([record]), [])
        self.assertEqual(reference.wrong_records([{**record, "result": "fine", "machine": "a"}]), ["vLLM 1: what is machine?", "vLLM 1: result: fine"])

    def test_labels_of_a_metric_are_found_through_variables(self):
        code = 'void Metrics::Show() {\n  const Label name{"group", group.name()};\n' \
               '  families->Gauge("refitd_slots", "Slots by state.", {name, {"state", state}}, count);\n}'
        (metric,) = reference.metrics_of(code)
        self.assertEqual((metric.name, metric.kind, metric.labels, metric.what), ("refitd_slots", "gauge", ["group", "state"], "Slots by state."))


if __name__ == "__main__":
    unittest.main()
