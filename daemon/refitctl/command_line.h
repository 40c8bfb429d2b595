// The command line of refitctl, as its commands declare it; CLI11 parses it.
//
// CLI11 is a library of templates, which takes more time to compile than any command here.
// command_line.cc alone includes it.
//
// Declaring something twice, or under a name that CLI11 does not take, throws, so that the first
// run of a command shows it. Used by one thread.
#ifndef REFITD_DAEMON_REFITCTL_COMMAND_LINE_H_
#define REFITD_DAEMON_REFITCTL_COMMAND_LINE_H_

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
  template <typename T>  // int, int64_t, uint64_t, double
  Option InRange(T lowest, T highest);
  Option OneOf(const std::vector<std::string>& allowed);
  // The value may have a unit of bytes: 64MiB, 64MB.
  Option AsSize();
  // The option is allowed only together with the other option.
  Option Needs(const Option& other);

 private:
  CLI::Option* option_;
};

// A command, or the program itself. Valid as long as the command line.
class CommandApp {
 public:
  explicit CommandApp(CLI::App* app) : app_(app) {}

  CommandApp AddCommand(const std::string& name, const std::string& help);
  // One of the commands of this command must be given.
  void RequireCommand();
  // `names`: "-o,--output", or "NAME" for a value by its place. `value` keeps its value if the
  // option is not given, and must outlive parsing. Several values: the option may be repeated.
  template <typename T>  // std::string, std::vector<std::string>, int, int64_t, uint64_t, double
  Option Add(const std::string& names, T* value, const std::string& help);
  // "--verify,!--no-verify": the second name means false.
  Option AddFlag(const std::string& names, bool* value, const std::string& help);

  // ---- after parsing ----
  bool parsed() const;
  bool given(const std::string& option) const;

 private:
  CLI::App* app_;
};

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
  // kHelped: the help or the version was asked for, and is printed. kWrong: what is wrong is
  // printed on stderr.
  Outcome Parse(int argc, char** argv);

 private:
  const std::unique_ptr<CLI::App> app_;
};

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_COMMAND_LINE_H_
