// The command line of refitctl, as its commands declare it; CLI11 parses it.
//
// CLI11 is a library of templates, which takes more time to compile than any command here.
// command_line.cc alone includes it.
//
// Declaring something twice, or under a name that CLI11 does not take, throws, so that the first
// run of a command shows it. Used by one thread.
#ifndef REFITD_DAEMON_REFITCTL_COMMAND_LINE_H_
#define REFITD_DAEMON_REFITCTL_COMMAND_LINE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace refitd::refitctl {

// An option of a command. Each function changes the option and returns it. Valid as long as the
// command line.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option Required();
  // The environment variable that gives the value where the command line has none.
  Option FromEnvironment(const std::string& variable);
  // The value may be `lowest`, `highest`, or between the two. T is the type of the value.
  template <typename T>  // int, int64_t, uint64_t
  Option InRange(T lowest, T highest);
  Option OneOf(const std::vector<std::string>& allowed);
  // The value may have a unit of bytes: 64MiB, 64MB.
  Option AsSize();
  // The option is allowed only together with the other option.
  Option Needs(const Option& other);

 private:
  CLI::Option* option_;
};

inline constexpr std::chrono::milliseconds kMaxOptionDuration = std::chrono::hours(24);

// An option that is a duration takes values between these limits.
struct DurationLimits {
  std::chrono::milliseconds lowest{1};
  std::chrono::milliseconds highest = kMaxOptionDuration;
  std::chrono::milliseconds bare{1000};  // what a number without a unit counts
};

// A command, or the program itself. Valid as long as the command line.
class CommandApp {
 public:
  explicit CommandApp(CLI::App* app) : app_(app) {}

  // `group`: the heading of the help under which the command stands; empty: the usual one.
  CommandApp AddCommand(const std::string& name, const std::string& help,
                        const std::string& group = "");
  // Lines that the help of this command has at its end.
  void Explain(const std::string& lines);
  // One of the commands of this command must be given.
  void RequireCommand();
  // Options that are added from now on stand under this heading of the help.
  void BeginGroup(const std::string& heading);
  // `names`: "-o,--output", or "NAME" for a value by its place. `value` keeps its value if the
  // option is not given, and must outlive parsing. The help shows that value, unless it is empty or
  // not above 0: it then stands for a default that `help` describes. Several values: the option may
  // be repeated.
  template <typename T>  // std::string, std::vector<std::string>, int, int64_t, uint64_t
  Option Add(const std::string& names, T* value, const std::string& help);
  // A duration: "500ms", "30s", "2m", "1h".
  Option Add(const std::string& names, std::chrono::milliseconds* value, const std::string& help,
             const DurationLimits& limits = {});
  // "--verify,!--no-verify": the second name means false.
  Option AddFlag(const std::string& names, bool* value, const std::string& help);

  // ---- after parsing ----
  bool parsed() const;
  bool given(const std::string& option) const;

 private:
  CLI::App* app_;
};

inline const std::vector<std::string> kShells = {"bash", "zsh", "fish"};

class CommandLine {
 public:
  // `footer`: the last lines of the help. `version`: what --version prints.
  CommandLine(const std::string& description, const std::string& footer,
              const std::string& version);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  CommandApp app() const;
  enum class Outcome : uint8_t { kParsed, kHelped, kWrong };
  // kHelped: the help or the version was asked for, and is printed. kWrong: `wrong` says what is
  // wrong, and names what was likely meant.
  Outcome Parse(int argc, char** argv, std::string* wrong);

  // A script that makes a shell complete all commands and options. `shell`: one of kShells.
  std::string Completion(const std::string& shell) const;

 private:
  const std::unique_ptr<CLI::App> app_;
};

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_COMMAND_LINE_H_
