// support-bundle: what somebody who helps wants to see first, in one file.
#include <fcntl.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <string_view>

#include "client/target.h"
#include "daemon/config.h"
#include "daemon/process/version.h"
#include "daemon/refitctl/command.h"
#include "daemon/refitctl/format.h"
#include "daemon/refitctl/scrape.h"
#include "daemon/refitctl/tar.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd::refitctl {
namespace {

constexpr char kWhatIsInIt[] =
    "In it:\n"
    "  versions.txt       refitctl and the kernel\n"
    "  status.json        daemon, groups, instances, links, NCCL\n"
    "  members.json       the attached ranks\n"
    "  statistics-N.json  the last update of the group that is Nth in status.json, from 0\n"
    "  config.textproto   every setting of --config; of TLS the files' names alone\n"
    "  metrics.txt        a scrape of --metrics\n"
    "  missing.txt        what could not be had, and why\n"
    "Names of groups, hosts, users and files are in it. Keys, certificates, tokens, weights, logs\n"
    "and the environment are not.";

constexpr char kDefaultConfig[] = "/etc/refitd/refitd.textproto";

struct BundleOptions {
  std::string file;
  std::string config = kDefaultConfig;
  std::string metrics;
};

int64_t SecondsSince1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string Versions() {
  utsname kernel{};
  uname(&kernel);
  return fmt::format("refitctl {}\n{}\n{} {} {}\n", kVersion, BuildInfo(), kernel.sysname,
                     kernel.release, kernel.machine);
}

absl::StatusOr<std::string> ConfigText(const std::string& path) {
  REFITD_ASSIGN_OR_RETURN(const Invocation loaded, LoadConfig({"--config", path}, {}));
  return FormatConfig(loaded.config);
}

// The certificates are for the scrape alone, as for a call: they are not put into the bundle.
absl::StatusOr<std::string> MetricsText(const GlobalOptions& global, const std::string& address) {
  REFITD_ASSIGN_OR_RETURN(const client::Target target, client::TargetOf(ConnectOf(global)));
  std::shared_ptr<const Certificates> own;
  if (!target.tls.empty()) {
    REFITD_ASSIGN_OR_RETURN(own, LoadCertificates(target.tls));
  }
  return Scrape(address, own, global.timeout);
}

class Bundle {
 public:
  Bundle(const GlobalOptions& global, const BundleOptions& options)
      : global_(global), options_(options), client_(global), tar_(SecondsSince1970()) {}

  std::string Make() {
    tar_.Add("versions.txt", Versions());
    AddAnswers();
    Add("config.textproto", ConfigText(options_.config));
    if (options_.metrics.empty()) {
      Lacks("metrics.txt", "--metrics names no address");
    } else {
      Add("metrics.txt", MetricsText(global_, options_.metrics));
    }
    tar_.Add("missing.txt", missing_);
    return std::move(tar_).Finish();
  }
  const std::string& missing() const { return missing_; }

 private:
  void AddAnswers() {
    const auto status = client_.Call(&Rpcs::GetStatus);
    AddMessage("status.json", status);
    if (!status.ok()) return;
    AddMessage("members.json", client_.Call(&Rpcs::ListMembers));
    int number = 0;
    for (const auto& group : status->groups()) {
      AddMessage(fmt::format("statistics-{}.json", number++),
                 client_.Call(&Rpcs::GetUpdateStatistics, group.name()));
    }
  }
  template <typename Message>
  void AddMessage(const std::string& name, const absl::StatusOr<Message>& answer) {
    if (!answer.ok()) return Lacks(name, refitd::Message(answer.status()));
    tar_.Add(name, ToJson(*answer, /*pretty=*/true));
  }
  void Add(const std::string& name, const absl::StatusOr<std::string>& text) {
    if (!text.ok()) return Lacks(name, Message(text.status()));
    tar_.Add(name, *text);
  }
  void Lacks(const std::string& name, const std::string& why) {
    missing_ += fmt::format("{}: {}\n", name, why);
  }

  const GlobalOptions& global_;
  const BundleOptions& options_;
  const OperatorClient client_;
  Tar tar_;
  std::string missing_;
};

// Makes the file, which nobody else may read, and never replaces one.
absl::Status WriteNew(const std::string& path, std::string_view content) {
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) return ErrnoError(errno, path);
  while (!content.empty()) {
    const ssize_t written = write(file.get(), content.data(), content.size());
    if (written < 0) return ErrnoError(errno, path);
    content.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

int RunBundle(const GlobalOptions& global, BundleOptions options) {
  std::signal(SIGPIPE, SIG_IGN);  // of the scrape
  if (options.file.empty()) {
    options.file = fmt::format("refitd-support-{}.tar", SecondsSince1970());
  }
  Bundle bundle(global, options);
  const std::string archive = bundle.Make();
  const absl::Status written = WriteNew(options.file, archive);
  if (!written.ok()) {
    Fail(written);
    return kExitFailed;  // whatever its code: the daemon is not at fault
  }
  Print(fmt::format("{}: {}\n", options.file, HumanBytes(static_cast<int64_t>(archive.size()))));
  if (!bundle.missing().empty()) Print("not in it:\n" + bundle.missing());
  return kExitOk;
}

}  // namespace

Command AddSupportBundle(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "support-bundle", "Write one .tar with what somebody who helps wants to see first", kLook);
  sub.Explain(kWhatIsInIt);
  auto options = std::make_shared<BundleOptions>();
  sub.Add("-f,--file", &options->file,
          "The file to make (default: refitd-support-SECONDS.tar in this folder)");
  sub.Add("--config", &options->config, "The daemon's configuration file");
  sub.Add("--metrics", &options->metrics,
          "IP:PORT of the daemon's metrics.listen; over TLS where --tls-certificate is given");
  return {sub, [&global, options] { return RunBundle(global, *options); }};
}

}  // namespace refitd::refitctl
