#include "daemon/refitctl/format.h"

#include <catch2/catch.hpp>

namespace refitd {
namespace {

TEST_CASE("sizes are shown in the largest binary unit that keeps them above one") {
  CHECK(HumanBytes(0) == "0 B");
  CHECK(HumanBytes(1023) == "1023 B");
  CHECK(HumanBytes(1024) == "1.00 KiB");
  CHECK(HumanBytes(1192099840) == "1.11 GiB");
  CHECK(HumanBytes((int64_t{1} << 30) - 1) == "1.00 GiB");
  CHECK(HumanRate(2.5 * 1024 * 1024) == "2.50 MiB/s");
}

TEST_CASE("times are shown with two units at most") {
  CHECK(HumanSeconds(0.0852) == "85 ms");
  CHECK(HumanSeconds(0.9996) == "1.00 s");
  CHECK(HumanSeconds(4.2) == "4.20 s");
  CHECK(HumanSeconds(125) == "2m05s");
  CHECK(HumanSeconds(3 * 3600 + 7 * 60 + 1) == "3h07m");
}

TEST_CASE("table columns are as wide as their widest cell and lines end without blanks") {
  Table table({"NAME", "BYTES", "NOTE"}, {false, true, false});
  table.Add({"a", "1", ""});
  table.Add({"longer", "12345678", "x"});
  CHECK(table.ToString() ==
        "NAME       BYTES  NOTE\n"
        "a              1\n"
        "longer  12345678  x\n");
}

TEST_CASE("texts of members and names of a hostile index reached the terminal raw") {
  Table table({"CLIENT"});
  table.Add({"a\x1b[2J\n\xe2\x80\xae"});
  CHECK(table.ToString() == "CLIENT\na\\u001b[2J\\n\\u202e\n");
  CHECK(EscapedLines("one\ntwo\r\x07\n") == "one\ntwo\\r\\u0007\n");
  CHECK(EscapedLines("").empty());
  LiveBlock block(40);
  const std::string drawn = block.Redraw({"x\x1b]0;t\x07"}, {"y\x1b[1F"});
  CHECK(drawn == "\x1b[Jx\\u001b]0;t\\u0007\ny\\u001b[1F\n");
}

TEST_CASE("a bar is empty at zero, full only at one, and never longer than its width") {
  CHECK(Bar(0, 4) == "[    ]");
  CHECK(Bar(0.5, 4) == "[=>  ]");
  CHECK(Bar(0.999, 4) == "[==> ]");
  CHECK(Bar(1, 4) == "[====]");
  CHECK(Bar(7, 4) == "[====]");
  CHECK(Bar(-1, 4) == "[    ]");
}

TEST_CASE("an untold total gives no fraction and no time left") {
  CHECK_FALSE(Fraction(5, 0).has_value());
  ProgressMeter meter;
  meter.Add(0, 0);
  meter.Add(1, 100);
  CHECK_FALSE(meter.SecondsLeft(0).has_value());
}

TEST_CASE("the rate is that of the last seconds, not of the whole update") {
  ProgressMeter meter;
  CHECK(meter.bytes_per_second() == 0);
  for (int i = 0; i <= 10; ++i) meter.Add(i, i * 1000);
  CHECK(meter.bytes_per_second() == Approx(1000));
  for (int i = 11; i <= 20; ++i) meter.Add(i, 10'000 + (i - 10) * 10);
  CHECK(meter.bytes_per_second() == Approx(10));
  CHECK(meter.SecondsLeft(10'200).value() == Approx(10));
}

TEST_CASE("a stalled update has no time left to tell") {
  ProgressMeter meter;
  for (int i = 0; i <= 10; ++i) meter.Add(i, 500);
  CHECK_FALSE(meter.SecondsLeft(1000).has_value());
}

TEST_CASE("a progress line has percentage, sizes, rate and time left, and no 100% before the end") {
  ProgressMeter meter;
  meter.Add(0, 0);
  meter.Add(1, 1 << 20);
  const std::string line = ProgressLine("policy v2", 1 << 20, 4 << 20, meter);
  CHECK(line ==
        "policy v2 [=====>                  ]  25%  1.00 MiB of 4.00 MiB  1.00 MiB/s  3.00 s left");
  CHECK(ProgressLine("x", 4 << 20, 4 << 20, meter) ==
        "x [========================] 100%  4.00 MiB of 4.00 MiB");
  CHECK(ProgressLine("x", 9'999, 10'000, ProgressMeter()).find("100%") == std::string::npos);
}

TEST_CASE("a live block goes back over the lines that it showed and keeps finished ones") {
  LiveBlock block(20);
  CHECK(block.Redraw({}, {"one", "two"}) == "\x1b[Jone\ntwo\n");
  CHECK(block.Redraw({"one done"}, {"two"}) == "\x1b[2F\x1b[Jone done\ntwo\n");
  CHECK(block.Redraw({}, {std::string(50, 'x')}) == "\x1b[1F\x1b[J" + std::string(19, 'x') + "\n");
  std::string umlauts;
  for (int i = 0; i < 20; ++i) umlauts += "\u00fc";
  CHECK(block.Redraw({}, {umlauts}) == "\x1b[1F\x1b[J" + umlauts.substr(0, size_t{19} * 2) + "\n");
}

TEST_CASE("a full screen begins at the first row, and is cut to the terminal") {
  CHECK(FullScreen("abc\ndefgh\nx\n", {.columns = 5, .rows = 3}) ==
        "\x1b[Habc\x1b[K\ndefg\x1b[K\n\x1b[J");
  CHECK(FullScreen("\x1b[2J\n", {}) == "\x1b[H\\u001b[2J\x1b[K\n\x1b[J");
}

}  // namespace
}  // namespace refitd
