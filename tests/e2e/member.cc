// A member in a process of its own, for tests that kill and stop it.
//
//   member trainer|engine SOCKET [group=G] [rank=R] [world=W] [trainers=T] [instances=I]
//          [slot_bytes=B] [slots=S] [instance=NAME] [delivery=in_place|loader] [uid=U]
//          [token=HEX] [coordinator=HOST:PORT] [auto=1] [catch_up=1]
//          [matrices=M rows=N columns=K]
//
// Reads commands from stdin, one a line, and answers each with one line: "ok ..." or "error CODE
// MESSAGE". The model is MixedModel(), or PlainModel(M, N, K); its bytes are BytesOf(version).
//
// Both roles:
//   attach                  says hello and waits for Welcome; an engine also makes memory and
//                           registers it
//   alive                   answers whether its lease is live
//   token                   answers its lease's token, in hexadecimal
//   fork                    forks a child that keeps every descriptor and waits to be killed;
//                           answers "ok PID"
// Trainers:
//   begin V                 waits until buckets may be pushed
//   begin_as HEX V          as begin, with a token that another user got
//   push V [SEQ [FIRST N]]  pushes N tensors from FIRST on (default: all) as one bucket, from its
//                           own region
//   commit V BUCKETS        commits
//   register                registers its columns of every tensor, in a region of their own
//   refit V                 fills them with version V and refits; answers "ok NAME=committed
//                           NAME=REASON..."
//   end                     waits for the end of its lease and answers how it ended
// Engines:
//   prepare                 waits for Prepare and does not answer it
//   ready V                 answers Ready
//   part                    waits for the next loader part; answers "ok VERSION PART"
//   ack V PART              acknowledges the part
//   outcome                 answers "ok committed V" or "ok aborted V clean|dirty REASON"
//   check V                 answers whether its memory holds exactly version V (0: untouched)
// An engine with auto=1 answers Prepare and acknowledges parts by itself, and also has:
//   hold ready|ack          keeps these answers back from the next event on
//   release                 sends the answers that were kept back
//   await prepare|part V    waits for that event
//   believe V               waits for an outcome of version V or later; answers the state of its
//                           weights: "ok good VERSION", "ok dirty" or "ok unknown", each with "
//                           gone" if its lease ended; "error 15 ..." if good weights do not have
//                           that version's bytes
// Ends with its stdin, or with its parent.
#include <fmt/format.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "tests/e2e/model.h"
#include "tests/e2e/raw_client.h"

namespace refitd::e2e {
namespace {

// How long a child of "fork" lives at most if a test forgets it.
constexpr unsigned kChildSeconds = 90;

std::string ToHex(const std::string& bytes) {
  std::string hex;
  for (const char c : bytes) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return hex;
}

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

std::string Answer(const grpc::Status& status, const std::string& more = "") {
  if (status.ok()) return "ok " + more;
  return fmt::format("error {} {}", static_cast<int>(status.error_code()), status.error_message());
}

class Settings {
 public:
  Settings(int argc, char** argv) {
    for (int i = 3; i < argc; ++i) {
      const std::string arg = argv[i];
      const size_t equals = arg.find('=');
      values_[arg.substr(0, equals)] = arg.substr(equals + 1);
    }
  }
  std::string Text(const std::string& key, const std::string& otherwise) const {
    const auto it = values_.find(key);
    return it == values_.end() ? otherwise : it->second;
  }
  int Number(const std::string& key, int otherwise) const {
    const auto it = values_.find(key);
    return it == values_.end() ? otherwise : std::stoi(it->second);
  }
  v1::GroupSpec GroupSpec() const {
    return Spec(Number("trainers", 1), Number("instances", 1), Number("slot_bytes", 65'536),
                Number("slots", 4));
  }
  Model TheModel() const {
    const int matrices = Number("matrices", 0);
    return matrices == 0 ? MixedModel()
                         : PlainModel(matrices, Number("rows", 64), Number("columns", 64));
  }

 private:
  std::map<std::string, std::string> values_;
};

using Commands = std::map<std::string, std::function<std::string(std::istringstream&)>>;

class TrainerMember {
 public:
  TrainerMember(std::string socket, const Settings& settings)
      : socket_(std::move(socket)), settings_(settings) {}

  Commands commands() {
    return {
        {"attach", [this](auto&) { return Attach(); }},
        {"begin", [this](auto& in) { return Answer(trainer_->Begin(Read(in)).status); }},
        {"push", [this](auto& in) { return Push(in); }},
        {"register", [this](auto&) { return Register(); }},
        {"refit", [this](auto& in) { return Refit(Read(in)); }},
        {"commit",
         [this](auto& in) {
           const int64_t version = Read(in);
           return Answer(trainer_->Commit(version, Read(in)).status);
         }},
        {"begin_as", [this](auto& in) { return BeginAs(in); }},
        {"alive",
         [this](auto&) {
           return std::string(trainer_->events().ended() ? "error 14 the stream ended" : "ok");
         }},
        {"end",
         [this](auto&) {
           const auto end = trainer_->events().WaitEnd();
           return end.has_value() ? Answer(*end) : "error 4 the stream goes on";
         }},
        {"token", [this](auto&) { return "ok " + ToHex(trainer_->welcome().lease().token()); }},
    };
  }

 private:
  static int64_t Read(std::istringstream& in, int64_t otherwise = 0) {
    int64_t value = 0;
    return in >> value ? value : otherwise;
  }

  std::string Attach() {
    v1::TrainerHello hello =
        RawTrainer::Hello(settings_.Text("group", "g"), settings_.GroupSpec(),
                          settings_.Number("rank", 0), settings_.Number("trainers", 1));
    hello.set_coordinator(settings_.Text("coordinator", ""));
    trainer_ = std::make_unique<RawTrainer>(ConnectTo(socket_), hello);
    const grpc::Status status = trainer_->attached();
    if (!status.ok()) return Answer(status);
    memory_ = trainer_->NewMemory(ModelBytes(model_) + 64 * static_cast<int64_t>(model_.size()));
    return memory_.region_id != 0 ? "ok" : "error 0 the region was refused";
  }

  std::string Push(std::istringstream& in) {
    const int64_t version = Read(in);
    const int64_t seq = Read(in);
    const int64_t first = Read(in);
    std::vector<int> indices(static_cast<size_t>(Read(in, static_cast<int64_t>(model_.size()))));
    std::iota(indices.begin(), indices.end(), static_cast<int>(first));
    v1::Bucket bucket = Describe(model_, seq, indices);
    const std::vector<std::string> bytes = BytesOf(model_, version);
    int64_t at = 0;
    for (size_t t = 0; t < model_.size(); ++t) {
      if (static_cast<int64_t>(t) >= first && t < static_cast<size_t>(first) + indices.size()) {
        v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
        ref->set_region_id(memory_.region_id);
        ref->set_byte_offset(at);
      }
      std::copy(bytes[t].begin(), bytes[t].end(), memory_.data() + at);
      at += (static_cast<int64_t>(bytes[t].size()) + 63) / 64 * 64;
    }
    return Answer(trainer_->Push(version, std::move(bucket)).status);
  }

  std::string Register() {
    const uint64_t before = held_.layout.binding_generation;
    held_ = HoldSlice(model_, 1, settings_.Number("rank", 0), settings_.Number("trainers", 1));
    shards_ = trainer_->NewMemory(held_.region_bytes);
    if (shards_.region_id == 0) return "error 0 the region was refused";
    for (Piece& piece : held_.layout.pieces) piece.region = RegionId(shards_.region_id);
    held_.layout.binding_generation = before + 1;
    return Answer(trainer_->Register(held_.layout).status);
  }

  std::string Refit(int64_t version) {
    const std::string image = ExpectedImage(EmptyImage(held_.region_bytes), held_.layout, model_,
                                            BytesOf(model_, version));
    image.copy(shards_.data(), image.size());
    const auto refitted = trainer_->Refit(version, held_.layout.binding_generation);
    std::string instances;
    for (const v1::InstanceResult& instance : refitted.response.instances()) {
      instances += fmt::format("{}={} ", instance.instance(),
                               instance.committed() ? "committed" : instance.reason());
    }
    return Answer(refitted.status, instances);
  }

  std::string BeginAs(std::istringstream& in) {
    std::string token;
    in >> token;
    RawTrainer stranger(ConnectTo(socket_), RawTrainer::Hello("strangers", Spec()));
    if (const grpc::Status status = stranger.attached(); !status.ok()) return Answer(status);
    v1::BeginRequest request;
    *request.mutable_lease() = stranger.welcome().lease();
    request.mutable_lease()->set_token(FromHex(token));
    request.set_version(Read(in));
    return Answer(stranger.Begin(request).status);
  }

  const std::string socket_;
  const Settings& settings_;
  const Model model_ = settings_.TheModel();
  std::unique_ptr<RawTrainer> trainer_;
  SharedMemory memory_;
  Held held_;  // the registered layout
  SharedMemory shards_;
};

class EngineMember {
 public:
  EngineMember(std::string socket, const Settings& settings)
      : socket_(std::move(socket)), settings_(settings) {}

  Commands commands() {
    return {
        {"attach", [this](auto&) { return Attach(); }},
        {"prepare",
         [this](auto&) {
           const auto prepare = engine().events().WaitFor(v1::EngineEvent::kPrepare);
           return prepare.has_value() ? fmt::format("ok {}", prepare->prepare().version())
                                      : "error 4 no Prepare";
         }},
        {"ready",
         [this](auto& in) {
           int64_t version = 0;
           in >> version;
           return std::string(engine().Ready(version) ? "ok" : "error 14 the stream ended");
         }},
        {"part",
         [this](auto&) {
           const auto part = engine().events().WaitFor(v1::EngineEvent::kBucket);
           return part.has_value()
                      ? fmt::format("ok {} {}", part->bucket().version(), part->bucket().part())
                      : "error 4 no part";
         }},
        {"ack",
         [this](auto& in) {
           int64_t version = 0;
           int64_t part = 0;
           in >> version >> part;
           return std::string(engine().Ack(version, part) ? "ok" : "error 14 the stream ended");
         }},
        {"outcome", [this](auto&) { return Outcome(); }},
        {"check", [this](auto& in) { return Check(in); }},
        {"alive",
         [this](auto&) {
           return std::string(engine().events().ended() ? "error 14 the stream ended" : "ok");
         }},
        {"hold",
         [this](auto& in) {
           std::string what;
           in >> what;
           engine().Hold(what == "ready", what == "ack");
           return std::string("ok");
         }},
        {"release",
         [this](auto&) {
           engine().Release();
           return std::string("ok");
         }},
        {"await", [this](auto& in) { return Await(in); }},
        {"believe", [this](auto& in) { return Believe(in); }},
        {"token", [this](auto&) { return "ok " + ToHex(engine().welcome().lease().token()); }},
    };
  }

 private:
  RawEngine& engine() { return holder_ != nullptr ? holder_->engine() : *loaded_; }

  std::string Attach() {
    const bool loader = settings_.Text("delivery", "in_place") == "loader";
    const int rank = settings_.Number("rank", 0);
    const int world = settings_.Number("world", 1);
    v1::EngineHello hello = RawEngine::Hello(
        settings_.Text("group", "g"), settings_.Text("instance", "i"), rank, world,
        loader ? v1::DELIVERY_LOADER : v1::DELIVERY_IN_PLACE, settings_.GroupSpec());
    hello.set_coordinator(settings_.Text("coordinator", ""));
    hello.set_catch_up(settings_.Number("catch_up", 0) != 0);
    const bool by_itself = settings_.Number("auto", 0) != 0;
    const EngineOptions by_hand{.auto_ready = by_itself, .auto_ack = by_itself};
    if (loader) {
      *hello.mutable_manifest() = ManifestOf(model_);
      loaded_ = std::make_unique<RawEngine>(ConnectTo(socket_), hello, by_hand);
      return Answer(loaded_->attached());
    }
    try {
      holder_ = std::make_unique<Holder>(
          ConnectTo(socket_), hello,
          world == 1 ? HoldWhole(model_) : HoldSlice(model_, 0, rank, world), by_hand);
    } catch (const std::runtime_error& error) {
      return fmt::format("error 2 {}", error.what());
    }
    return "ok";
  }

  std::string Outcome() {
    const auto event =
        engine().events().WaitForAny({v1::EngineEvent::kCommitted, v1::EngineEvent::kAborted});
    if (!event.has_value()) return "error 4 no outcome";
    if (event->has_committed()) return fmt::format("ok committed {}", event->committed().version());
    return fmt::format("ok aborted {} {} {}", event->aborted().version(),
                       event->aborted().dirty() ? "dirty" : "clean", event->aborted().reason());
  }

  std::string Await(std::istringstream& in) {
    std::string what;
    int64_t version = 0;
    in >> what >> version;
    const bool came =
        what == "prepare" ? engine().AwaitPrepare(version) : engine().AwaitPart(version);
    return came ? "ok" : "error 4 no " + what;
  }

  std::string Believe(std::istringstream& in) {
    int64_t version = 0;
    in >> version;
    const Belief belief = engine().AwaitBelief(version);
    const std::string gone = belief.attached ? "" : " gone";
    if (belief.unknown) return "ok unknown" + gone;
    if (!belief.good) return "ok dirty" + gone;
    // Loader engines hold nothing before their first version.
    if (belief.version != 0 || loaded_ == nullptr) {
      const std::string difference = DifferenceFrom(belief.version);
      if (!difference.empty()) {
        return fmt::format("error 15 believes in version {}, but {}", belief.version, difference);
      }
    }
    return fmt::format("ok good {}{}", belief.version, gone);
  }

  std::string Check(std::istringstream& in) {
    int64_t version = 0;
    in >> version;
    const std::string difference = DifferenceFrom(version);
    return difference.empty() ? "ok" : "error 15 " + difference;
  }

  std::string DifferenceFrom(int64_t version) {
    const std::vector<std::string> bytes = BytesOf(model_, version);
    if (loaded_ != nullptr) return loaded_->LoadedDifference(model_, bytes);
    return version == 0 ? holder_->DifferenceFromEmpty() : holder_->Difference(model_, bytes);
  }

  const std::string socket_;
  const Settings& settings_;
  const Model model_ = settings_.TheModel();
  std::unique_ptr<Holder> holder_;
  std::unique_ptr<RawEngine> loaded_;
};

std::string Fork() {
  const pid_t child = fork();
  if (child < 0) return "error 8 fork";
  if (child == 0) {
    // Keeps the parent's open descriptors, and does nothing else.
    alarm(kChildSeconds);
    for (;;) pause();
  }
  return fmt::format("ok {}", child);
}

int Serve(const Commands& commands) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string name;
    in >> name;
    const auto command = commands.find(name);
    const std::string answer = name == "fork"              ? Fork()
                               : command == commands.end() ? "error 3 no such command: " + name
                                                           : command->second(in);
    std::printf("%s\n", answer.c_str());
    std::fflush(stdout);
  }
  return 0;
}

int Main(int argc, char** argv) {
  if (argc < 3) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const Settings settings(argc, argv);
  if (const int uid = settings.Number("uid", 0); uid != 0) {
    const auto id = static_cast<unsigned>(uid);
    if (setgroups(0, nullptr) != 0 || setgid(id) != 0 || setuid(id) != 0) return 3;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // changing users clears it
  }
  const std::string role = argv[1];
  if (role == "trainer") return Serve(TrainerMember(argv[2], settings).commands());
  if (role == "engine") return Serve(EngineMember(argv[2], settings).commands());
  return 2;
}

}  // namespace
}  // namespace refitd::e2e

int main(int argc, char** argv) { return refitd::e2e::Main(argc, argv); }
