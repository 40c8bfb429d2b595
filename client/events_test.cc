#include "client/events.h"

#include <catch2/catch.hpp>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "client/bucket.h"

namespace refitd::client {
namespace {

constexpr int64_t kSlotBytes = 64;

v1::BucketReady Ready() {
  v1::BucketReady ready;
  ready.set_version(3);
  ready.set_part(5);
  ready.set_slot(1);
  ready.set_slot_byte_offset(kSlotBytes);
  ready.add_names("w");
  ready.add_dtypes(v1::DTYPE_FLOAT32);
  ready.add_shapes()->add_dims(100);
  ready.add_starts(90);
  ready.add_sizes(10);
  ready.add_byte_offsets(24);
  return ready;
}

TEST_CASE("a part's views point into its slot of the pool") {
  const std::vector<char> pool(2 * kSlotBytes);
  const auto part = DecodePart(Ready(), pool, kSlotBytes);
  REQUIRE(part.ok());
  CHECK(part->version == Version(3));
  CHECK(part->part == PartSeq(5));
  REQUIRE(part->tensors.size() == 1);
  CHECK(part->tensors[0].tensor == TensorSpec{"w", DType::kFloat32, {100}});
  CHECK(part->tensors[0].start == 90);
  CHECK(part->tensors[0].count == 10);
  CHECK(part->tensors[0].data == pool.data() + kSlotBytes + 24);
}

refit_event Shown(const Event& event) {
  std::vector<refit_view> views;
  return Show(event, &views);
}

TEST_CASE("events keep their fields from the message to the C structure") {
  v1::EngineEvent staged;
  staged.mutable_staged()->set_version(4);
  staged.mutable_staged()->set_remaining_ms(50);
  CHECK(Shown(DecodeEvent(staged)).kind == REFIT_EVENT_STAGED);
  CHECK(Shown(DecodeEvent(staged)).version == 4);
  CHECK(Shown(DecodeEvent(staged)).remaining_ms == 50);
  CHECK(Shown(DecodeEvent(staged)).content == 4);
  staged.mutable_staged()->set_content_version(1);
  CHECK(Shown(DecodeEvent(staged)).content == 1);

  v1::EngineEvent message;
  message.mutable_prepare()->set_version(3);
  message.mutable_prepare()->set_remaining_ms(40);
  message.mutable_prepare()->set_tensor_count(5);
  refit_event shown = Shown(DecodeEvent(message));
  CHECK(shown.kind == REFIT_EVENT_PREPARE);
  CHECK(shown.version == 3);
  CHECK(shown.remaining_ms == 40);
  CHECK(shown.tensor_count == 5);

  message.mutable_committed()->set_version(4);
  message.mutable_committed()->set_incarnation(77);
  shown = Shown(DecodeEvent(message));
  CHECK(shown.kind == REFIT_EVENT_COMMITTED);
  CHECK(shown.version == 4);
  CHECK(shown.incarnation == 77);

  message.mutable_aborted()->set_version(5);
  message.mutable_aborted()->set_reason("why");
  message.mutable_aborted()->set_dirty(true);
  const Event aborted = DecodeEvent(message);
  shown = Shown(aborted);
  CHECK(shown.kind == REFIT_EVENT_ABORTED);
  CHECK(shown.version == 5);
  CHECK(std::string(shown.reason) == "why");
  CHECK(shown.dirty == 1);

  message.mutable_draining();
  shown = Shown(DecodeEvent(message));
  CHECK(shown.kind == REFIT_EVENT_DRAINING);
  CHECK(std::string(shown.reason).empty());
}

TEST_CASE("a message of a kind that this client does not know is no event") {
  v1::EngineEvent message;
  CHECK(std::holds_alternative<Nothing>(DecodeEvent(message)));
  message.mutable_welcome();
  CHECK(std::holds_alternative<Nothing>(DecodeEvent(message)));
}

TEST_CASE("what the client itself tells has a C structure too") {
  const Event lost = Lost{"gone", Weights::kUnknown};
  refit_event shown = Shown(lost);
  CHECK(shown.kind == REFIT_EVENT_LOST);
  CHECK(std::string(shown.reason) == "gone");
  CHECK(shown.weights == REFIT_WEIGHTS_UNKNOWN);
  shown = Shown(Reattached{Weights::kClean, Version(6)});
  CHECK(shown.kind == REFIT_EVENT_REATTACHED);
  CHECK(shown.version == 6);
  CHECK(Shown(Reattached{Weights::kDirty, std::nullopt}).version == -1);
  CHECK(Shown(Nothing{}).kind == REFIT_EVENT_NOTHING);
}

TEST_CASE("a part's views are shown as they are") {
  const std::vector<char> pool(2 * kSlotBytes);
  const Event part = *DecodePart(Ready(), pool, kSlotBytes);
  std::vector<refit_view> views;
  const refit_event shown = Show(part, &views);
  CHECK(shown.kind == REFIT_EVENT_PART);
  CHECK(shown.version == 3);
  CHECK(shown.part == 5);
  REQUIRE(shown.view_count == 1);
  const refit_view& view = shown.views[0];
  CHECK(std::string(view.tensor.name) == "w");
  CHECK(view.tensor.dtype == REFIT_FLOAT32);
  REQUIRE(view.tensor.dim_count == 1);
  CHECK(view.tensor.dims[0] == 100);
  CHECK(view.tensor.start == 90);
  CHECK(view.tensor.count == 10);
  CHECK(view.data == pool.data() + kSlotBytes + 24);
}

TEST_CASE("a message that disagrees with itself or the pool gives no view") {
  const std::vector<char> pool(2 * kSlotBytes);
  const std::vector<std::function<void(v1::BucketReady*)>> damages = {
      [](v1::BucketReady* r) { r->add_names("more"); },
      [](v1::BucketReady* r) { r->clear_byte_offsets(); },
      [](v1::BucketReady* r) { r->set_slot_byte_offset(kSlotBytes + 1); },
      [](v1::BucketReady* r) { r->set_slot_byte_offset(-1); },
      [](v1::BucketReady* r) { r->set_slot_byte_offset(INT64_MAX); },
      [](v1::BucketReady* r) { r->set_byte_offsets(0, 25); },
      [](v1::BucketReady* r) { r->set_byte_offsets(0, -4); },
      [](v1::BucketReady* r) { r->set_starts(0, 91); },
      [](v1::BucketReady* r) { r->set_starts(0, -1); },
      [](v1::BucketReady* r) { r->set_sizes(0, INT64_MAX); },
      [](v1::BucketReady* r) { r->set_dtypes(0, static_cast<v1::DType>(99)); },
      [](v1::BucketReady* r) { r->mutable_shapes(0)->set_dims(0, -5); },
      [](v1::BucketReady* r) { r->set_names(0, ""); },
  };
  for (size_t i = 0; i < damages.size(); ++i) {
    INFO("damage " << i);
    v1::BucketReady ready = Ready();
    damages[i](&ready);
    CHECK_FALSE(DecodePart(ready, pool, kSlotBytes).ok());
  }
}

}  // namespace
}  // namespace refitd::client
