#include "daemon/refitctl/command_line.h"

#include <CLI/CLI.hpp>

namespace refitd::refitctl {

Option Option::Required() {
  option_->required();
  return *this;
}

Option Option::FromEnvironment(const std::string& variable) {
  option_->envname(variable);
  return *this;
}

template <typename T>
Option Option::InRange(T lowest, T highest) {
  option_->check(CLI::Range(lowest, highest));
  return *this;
}
template Option Option::InRange(int, int);
template Option Option::InRange(int64_t, int64_t);
template Option Option::InRange(uint64_t, uint64_t);
template Option Option::InRange(double, double);

Option Option::OneOf(const std::vector<std::string>& allowed) {
  option_->check(CLI::IsMember(allowed));
  return *this;
}

Option Option::AsSize() {
  option_->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  return *this;
}

Option Option::Needs(const Option& other) {
  option_->needs(other.option_);
  return *this;
}

CommandApp CommandApp::AddCommand(const std::string& name, const std::string& help) {
  return CommandApp(app_->add_subcommand(name, help));
}

void CommandApp::RequireCommand() { app_->require_subcommand(1); }

template <typename T>
Option CommandApp::Add(const std::string& names, T* value, const std::string& help) {
  return Option(app_->add_option(names, *value, help));
}
template Option CommandApp::Add(const std::string&, std::string*, const std::string&);
template Option CommandApp::Add(const std::string&, std::vector<std::string>*, const std::string&);
template Option CommandApp::Add(const std::string&, int*, const std::string&);
template Option CommandApp::Add(const std::string&, int64_t*, const std::string&);
template Option CommandApp::Add(const std::string&, uint64_t*, const std::string&);
template Option CommandApp::Add(const std::string&, double*, const std::string&);

Option CommandApp::AddFlag(const std::string& names, bool* value, const std::string& help) {
  return Option(app_->add_flag(names, *value, help));
}

bool CommandApp::parsed() const { return app_->parsed(); }

bool CommandApp::given(const std::string& option) const { return app_->count(option) > 0; }

CommandLine::CommandLine(const std::string& description, const std::string& footer,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(description)) {
  app_->footer(footer);
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->fallthrough();  // the program's own options may also follow the command
}

CommandLine::~CommandLine() = default;

CommandApp CommandLine::app() const { return CommandApp(app_.get()); }

CommandLine::Outcome CommandLine::Parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 treats help and version as errors of code 0.
    return app_->exit(error) == 0 ? Outcome::kHelped : Outcome::kWrong;
  }
  return Outcome::kParsed;
}

}  // namespace refitd::refitctl
