#include "client/events.h"

#include <optional>
#include <variant>

#include "client/bucket.h"
#include "proto/failure.h"

namespace refitd::client {
namespace {

// ---- each event as a structure of the C interface ----

void ShowOne(const Nothing&, std::vector<refit_view>*, refit_event*) {}

void ShowOne(const Staged& staged, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_STAGED;
  shown->version = staged.version.value();
  shown->update_id = staged.update.value();
  shown->remaining_ms = staged.remaining.count();
  shown->content = staged.content.value_or(staged.version).value();
}

void ShowOne(const Prepare& prepare, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_PREPARE;
  shown->version = prepare.version.value();
  shown->update_id = prepare.update.value();
  shown->remaining_ms = prepare.remaining.count();
  shown->tensor_count = prepare.tensor_count;
  shown->flip = prepare.flip ? 1 : 0;
  shown->content = prepare.content.value_or(prepare.version).value();
}

void ShowOne(const Part& part, std::vector<refit_view>* views, refit_event* shown) {
  Show(part, views, shown);
}

void ShowOne(const Committed& committed, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_COMMITTED;
  shown->version = committed.version.value();
  shown->incarnation = committed.incarnation;
  shown->owner = committed.owner.c_str();
  shown->digest = committed.digest;
  shown->content = committed.content.value_or(committed.version).value();
}

void ShowOne(const Aborted& aborted, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_ABORTED;
  shown->version = aborted.version.value();
  shown->dirty = aborted.dirty ? 1 : 0;
  shown->reason = aborted.reason.c_str();
}

void ShowOne(const Draining&, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_DRAINING;
}

void ShowOne(const Lost& lost, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_LOST;
  shown->reason = lost.reason.c_str();
  shown->weights = static_cast<int32_t>(lost.weights);
}

void ShowOne(const Reattached& again, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_REATTACHED;
  shown->version = again.held_version.value_or(Version(-1)).value();
  shown->weights = static_cast<int32_t>(again.weights);
}

template <typename Message>
std::optional<Version> ContentOf(const Message& message) {
  if (!message.has_content_version()) return std::nullopt;
  return Version(message.content_version());
}

}  // namespace

Event DecodeEvent(const v1::EngineEvent& event) {
  if (event.has_staged()) {
    const v1::Staged& staged = event.staged();
    return Staged{Version(staged.version()), UpdateId(staged.update_id()),
                  std::chrono::milliseconds(staged.remaining_ms()), ContentOf(staged)};
  }
  if (event.has_prepare()) {
    const v1::Prepare& prepare = event.prepare();
    return Prepare{Version(prepare.version()),
                   UpdateId(prepare.update_id()),
                   std::chrono::milliseconds(prepare.remaining_ms()),
                   prepare.tensor_count(),
                   prepare.flip(),
                   ContentOf(prepare)};
  }
  if (event.has_committed()) {
    return Committed{Version(event.committed().version()), event.committed().incarnation(),
                     event.committed().owner(), event.committed().digest(),
                     ContentOf(event.committed())};
  }
  if (event.has_aborted()) {
    const v1::Aborted& aborted = event.aborted();
    return Aborted{Version(aborted.version()), aborted.reason(), aborted.dirty(),
                   FailureFromProto(aborted.failure()).value_or(Failure())};
  }
  if (event.has_draining()) return Draining{};
  return Nothing{};
}

refit_event Show(const Event& event, std::vector<refit_view>* views) {
  refit_event shown{};
  shown.reason = "";
  shown.owner = "";
  std::visit([&](const auto& kind) { ShowOne(kind, views, &shown); }, event);
  return shown;
}

}  // namespace refitd::client
