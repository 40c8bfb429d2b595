#include "daemon/refitctl/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <limits>

#include "daemon/process/flag_text.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

constexpr char kProgram[] = "refitctl";

// Whether the value is a default, and not a stand-in for something else (see CommandApp::Add).
template <typename T>
bool IsDefault(const T& value) {
  return value > 0;
}
bool IsDefault(const std::string& value) { return !value.empty(); }
bool IsDefault(const std::vector<std::string>& value) { return !value.empty(); }

template <typename T>
std::string RangeText(T lowest, T highest) {
  if (highest == std::numeric_limits<T>::max()) return fmt::format("{} or more", lowest);
  return fmt::format("{} to {}", lowest, highest);
}

std::string CheckDuration(const std::string& text, const DurationLimits& limits) {
  const auto duration = ParseDuration(text, limits.bare);
  if (!duration.ok()) return Message(duration.status());
  if (*duration >= limits.lowest && *duration <= limits.highest) return "";
  return fmt::format("{} is not {} to {}", text, FormatDuration(limits.lowest),
                     FormatDuration(limits.highest));
}

std::vector<const CLI::App*> CommandsOf(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* sub) { return !sub->get_name().empty(); });
}

std::vector<std::string> NamesOf(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : CommandsOf(app)) names.push_back(command->get_name());
  return names;
}

// The options of this command and of those around it, which all may follow it.
std::vector<const CLI::Option*> OptionsOf(const CLI::App& app) {
  std::vector<const CLI::Option*> options;
  for (const CLI::App* at = &app; at != nullptr; at = at->get_parent()) {
    for (const CLI::Option* option : at->get_options()) {
      if (!option->nonpositional()) continue;
      if (at == &app || option != at->get_help_ptr()) options.push_back(option);
    }
  }
  return options;
}

std::vector<std::string> FlagsOf(const CLI::App& app) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : OptionsOf(app)) {
    for (const std::string& name : option->get_snames()) flags.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  return flags;
}

// "refitctl group delete": the command as it is called.
std::string PathOf(const CLI::App& app) {
  if (app.get_parent() == nullptr) return kProgram;
  return PathOf(*app.get_parent()) + " " + app.get_name();
}

const CLI::App& Innermost(const CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? app : Innermost(*parsed.back());
}

// Says that no command takes the word, and which name was likely meant.
std::string Unexpected(const CLI::App& command, std::string word) {
  const bool flag = word.starts_with("-");
  word = word.substr(0, flag ? word.find('=') : word.size());
  const std::vector<std::string> known = flag ? FlagsOf(command) : NamesOf(command);
  const std::string nearest = Nearest(word, known);
  std::string text = fmt::format("{} takes no {} '{}'", PathOf(command),
                                 flag ? "option" : (known.empty() ? "argument" : "command"), word);
  if (!nearest.empty()) text += fmt::format("; did you mean '{}'?", nearest);
  return text;
}

std::string WhatIsWrong(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = Innermost(app);
  const std::vector<std::string> unexpected = app.remaining(/*recurse=*/true);
  const std::string what =
      unexpected.empty() ? error.what() : Unexpected(command, unexpected.front());
  return fmt::format("{} ({} --help)", what, PathOf(command));
}

// ---- completion ----

void ForEachCommand(const CLI::App& app, const std::function<void(const CLI::App&)>& visit) {
  visit(app);
  for (const CLI::App* command : CommandsOf(app)) ForEachCommand(*command, visit);
}

// Returns a bash function that finds the command typed so far and offers its commands and options.
// Bash itself completes names of files.
std::string BashCompletion(const CLI::App& app) {
  std::string paths;
  std::string words;
  ForEachCommand(app, [&](const CLI::App& command) {
    const std::string path = PathOf(command);
    if (command.get_parent() != nullptr) paths += (paths.empty() ? "" : "|") + ("'" + path + "'");
    words += fmt::format("    '{}') words='{} {}' ;;\n", path, fmt::join(NamesOf(command), " "),
                         fmt::join(FlagsOf(command), " "));
  });
  return fmt::format(
      "_refitctl() {{\n"
      "  local path='{}' words='' i\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    case \"$path ${{COMP_WORDS[i]}}\" in {}) path=\"$path ${{COMP_WORDS[i]}}\" ;; esac\n"
      "  done\n"
      "  case \"$path\" in\n{}  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"${{COMP_WORDS[COMP_CWORD]}}\"))\n"
      "}}\n"
      "complete -o default -F _refitctl refitctl\n",
      kProgram, paths, words);
}

std::string FishQuoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "'";
}

std::string FishCompletion(const CLI::App& app) {
  std::string script;
  ForEachCommand(app, [&](const CLI::App& command) {
    const bool root = command.get_parent() == nullptr;
    const std::string here =
        root ? "__fish_use_subcommand" : "__fish_seen_subcommand_from " + command.get_name();
    for (const CLI::App* sub : CommandsOf(command)) {
      script += fmt::format("complete -c {} -n {} -a {} -d {}\n", kProgram, FishQuoted(here),
                            sub->get_name(), FishQuoted(sub->get_description()));
    }
    const std::string when = root ? "" : fmt::format(" -n {}", FishQuoted(here));
    for (const CLI::Option* option : command.get_options()) {
      if (!option->nonpositional()) continue;
      script += fmt::format("complete -c {}{}", kProgram, when);
      for (const std::string& name : option->get_snames()) script += " -s " + name;
      for (const std::string& name : option->get_lnames()) script += " -l " + name;
      if (option->get_items_expected_max() > 0) script += " -r";
      script += fmt::format(" -d {}\n", FishQuoted(option->get_description()));
    }
  });
  return script;
}

}  // namespace

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
  CLI::Range range(lowest, highest);
  option_->check(range.description(RangeText(lowest, highest)));
  return *this;
}
template Option Option::InRange(int, int);
template Option Option::InRange(int64_t, int64_t);
template Option Option::InRange(uint64_t, uint64_t);

Option Option::OneOf(const std::vector<std::string>& allowed) {
  option_->check(CLI::IsMember(allowed));
  return *this;
}

Option Option::AsSize() {
  CLI::AsSizeValue size(/*kb_is_1000=*/false);
  option_->transform(size.description("such as 64MiB"));
  option_->type_name("SIZE");
  return *this;
}

Option Option::Needs(const Option& other) {
  option_->needs(other.option_);
  return *this;
}

CommandApp CommandApp::AddCommand(const std::string& name, const std::string& help,
                                  const std::string& group) {
  CLI::App* const command = app_->add_subcommand(name, help);
  command->option_defaults()->group("Options");  // not the heading that was begun last here
  if (!group.empty()) command->group(group);
  return CommandApp(command);
}

void CommandApp::Explain(const std::string& lines) {
  app_->footer(lines + "\n\n" + app_->get_footer());
}

void CommandApp::RequireCommand() { app_->require_subcommand(1); }

void CommandApp::BeginGroup(const std::string& heading) { app_->option_defaults()->group(heading); }

template <typename T>
Option CommandApp::Add(const std::string& names, T* value, const std::string& help) {
  CLI::Option* const option = app_->add_option(names, *value, help);
  if (IsDefault(*value)) option->capture_default_str();
  return Option(option);
}
template Option CommandApp::Add(const std::string&, std::string*, const std::string&);
template Option CommandApp::Add(const std::string&, std::vector<std::string>*, const std::string&);
template Option CommandApp::Add(const std::string&, int*, const std::string&);
template Option CommandApp::Add(const std::string&, int64_t*, const std::string&);
template Option CommandApp::Add(const std::string&, uint64_t*, const std::string&);

Option CommandApp::Add(const std::string& names, std::chrono::milliseconds* value,
                       const std::string& help, const DurationLimits& limits) {
  CLI::Option* const option = app_->add_option_function<std::string>(
      names,
      // The check below has seen the text.
      [value, limits](const std::string& text) { *value = *ParseDuration(text, limits.bare); },
      help);
  option->check([limits](const std::string& text) { return CheckDuration(text, limits); });
  option->type_name("DURATION");
  if (value->count() > 0) option->default_str(FormatDuration(*value));
  return Option(option);
}

Option CommandApp::AddFlag(const std::string& names, bool* value, const std::string& help) {
  return Option(app_->add_flag(names, *value, help));
}

bool CommandApp::parsed() const { return app_->parsed(); }

bool CommandApp::given(const std::string& option) const { return app_->count(option) > 0; }

CommandLine::CommandLine(const std::string& description, const std::string& footer,
                         const std::string& version)
    : app_(std::make_unique<CLI::App>(description, kProgram)) {
  app_->footer(footer);
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->fallthrough();  // the program's own options may also follow the command
}

CommandLine::~CommandLine() = default;

CommandApp CommandLine::app() const { return CommandApp(app_.get()); }

CommandLine::Outcome CommandLine::Parse(int argc, char** argv, std::string* wrong) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 treats help and version as errors of code 0.
    if (error.get_exit_code() == 0) {
      app_->exit(error);
      return Outcome::kHelped;
    }
    *wrong = WhatIsWrong(*app_, error);
    return Outcome::kWrong;
  }
  return Outcome::kParsed;
}

std::string CommandLine::Completion(const std::string& shell) const {
  if (shell == "fish") return FishCompletion(*app_);
  const std::string script = BashCompletion(*app_);
  if (shell != "zsh") return script;
  return "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" +
         script;
}

}  // namespace refitd::refitctl
