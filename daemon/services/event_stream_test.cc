#include <catch2/catch.hpp>
#include <functional>
#include <optional>
#include <vector>

#include "daemon/services/common.h"

namespace refitd {
namespace {

// Stands in for gRPC: records the operations that were begun.
struct Reactor {
  void StartWrite(const v1::EngineEvent* event) {
    writes.push_back(event->committed().version());
    if (on_write) on_write();
  }
  void Finish(const grpc::Status& status) {
    ++finishes;
    end = status;
  }
  void GiveUp() { ++give_ups; }

  std::vector<int64_t> writes;
  int finishes = 0;
  int give_ups = 0;
  std::optional<grpc::Status> end;
  std::function<void()> on_write;
};
using Stream = EventStream<v1::EngineEvent, Reactor>;
using Writes = std::vector<int64_t>;

v1::EngineEvent Committed(int64_t version) {
  v1::EngineEvent event;
  event.mutable_committed()->set_version(version);
  return event;
}

struct Fixture {
  Reactor reactor;
  Stream stream{&reactor};
};

TEST_CASE_METHOD(Fixture, "Queued events are written from Flush on, one at a time and in order") {
  stream.Queue(Committed(1));
  stream.Queue(Committed(2));
  CHECK(reactor.writes.empty());
  stream.Flush();
  stream.Flush();
  CHECK(reactor.writes == Writes{1});
  stream.Queue(Committed(3));
  stream.Written(true);
  CHECK(reactor.writes == Writes{1, 2});
  stream.Written(true);
  stream.Written(true);
  CHECK(reactor.writes == Writes{1, 2, 3});
  CHECK(reactor.finishes == 0);
}

TEST_CASE_METHOD(Fixture, "Send writes at once, behind what was queued") {
  stream.Queue(Committed(1));
  stream.Send(Committed(2));
  CHECK(reactor.writes == Writes{1});
  stream.Written(true);
  CHECK(reactor.writes == Writes{1, 2});
}

TEST_CASE_METHOD(Fixture, "The end comes last and once, after what was queued and never flushed") {
  stream.Queue(Committed(1));
  stream.Queue(Committed(2));
  stream.End(absl::AbortedError("over"));
  stream.End(absl::OkStatus());
  stream.Queue(Committed(3));
  stream.Flush();
  CHECK(reactor.finishes == 0);
  stream.Written(true);
  CHECK(reactor.finishes == 0);
  stream.Written(true);
  stream.Flush();
  CHECK(reactor.writes == Writes{1, 2});
  REQUIRE(reactor.finishes == 1);
  CHECK(reactor.end->error_message() == "over");
}

TEST_CASE_METHOD(Fixture, "An event can be queued and flushed while a write begins") {
  reactor.on_write = [this] {
    if (reactor.writes.size() > 1) return;
    stream.Queue(Committed(2));
    stream.Flush();
  };
  stream.Send(Committed(1));
  CHECK(reactor.writes == Writes{1});
  stream.Written(true);
  CHECK(reactor.writes == Writes{1, 2});
}

TEST_CASE_METHOD(Fixture, "A peer that reads nothing loses its stream: the write is cancelled") {
  stream.Send(Committed(1));
  for (size_t i = 0; i < Stream::kMaxQueued; ++i) stream.Queue(Committed(2));
  stream.Flush();
  CHECK(reactor.give_ups == 1);
  CHECK(reactor.finishes == 0);
  stream.Written(false);
  CHECK(reactor.writes == Writes{1});
  REQUIRE(reactor.finishes == 1);
  CHECK(reactor.end->error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_CASE_METHOD(Fixture, "After Detach nothing is begun") {
  stream.Queue(Committed(1));
  stream.Detach();
  stream.Flush();
  stream.Send(Committed(2));
  stream.End(absl::OkStatus());
  CHECK(reactor.writes.empty());
  CHECK(reactor.finishes == 0);
}

}  // namespace
}  // namespace refitd
