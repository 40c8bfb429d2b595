#include "daemon/services/member_events.h"

#include <string>
#include <type_traits>
#include <variant>

#include "daemon/checks/bucket_message.h"
#include "daemon/link/member_actions.h"
#include "daemon/process/version.h"
#include "proto/convert.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

void Fill(const WelcomeNews& news, v1::Welcome* welcome) {
  welcome->mutable_lease()->set_token(news.token);
  welcome->mutable_lease()->set_incarnation(news.incarnation);
  welcome->mutable_lease()->set_protocol(static_cast<v1::ProtocolVersion>(news.protocol));
  welcome->set_member_id(news.member.value());
  welcome->set_descriptor_socket(news.descriptor_socket);
  welcome->mutable_limits()->set_inline_bytes(news.inline_bytes);
  welcome->mutable_limits()->set_outstanding_buckets(news.outstanding_buckets);
  welcome->mutable_limits()->set_default_duration_ms(ToMillis(news.default_duration));
  welcome->mutable_limits()->set_max_duration_ms(ToMillis(news.max_duration));
  welcome->mutable_limits()->set_message_bytes(news.message_bytes);
  welcome->set_slot_bytes(news.slot_bytes);
  welcome->set_slots(news.slots);
  if (news.version.has_value()) welcome->set_group_version(news.version->value());
  if (news.content.has_value()) welcome->set_content_version(news.content->value());
  welcome->set_daemon_version(std::string(kVersion));
  if (!news.kept.has_value()) return;
  v1::KeptArenas* const kept = welcome->mutable_kept();
  kept->set_version(news.kept->content.version.value());
  kept->set_incarnation(news.kept->content.origin);
  kept->set_owner(news.kept->content.owner);
  kept->set_digest(news.kept->content.digest);
  for (const int64_t bytes : news.kept->region_bytes) kept->add_region_bytes(bytes);
}

void Fill(const SendPrepare& news, v1::Prepare* prepare) {
  prepare->set_version(news.version.value());
  prepare->set_update_id(news.update.value());
  prepare->set_remaining_ms(ToMillis(news.remaining));
  prepare->set_tensor_count(news.tensor_count);
}

void Fill(const PartNews& news, v1::BucketReady* bucket) {
  const SendPart& part = news.part;
  bucket->set_version(part.version.value());
  bucket->set_update_id(part.update.value());
  bucket->set_part(part.part.value());
  bucket->set_slot(part.slot.slot.value());
  bucket->set_slot_byte_offset(int64_t{part.slot.slot.value()} * news.slot_bytes);
  WriteBucket(*part.content, bucket);
}

// Makes the event of each kind of news.
template <typename Event>
struct EventMaker {
  static constexpr bool kEngine = std::is_same_v<Event, v1::EngineEvent>;
  Event event;

  void operator()(const WelcomeNews& news) { Fill(news, event.mutable_welcome()); }
  void operator()(const SendPrepare& news) {
    if constexpr (kEngine) Fill(news, event.mutable_prepare());
    REFITD_CHECK(kEngine);
  }
  void operator()(const PartNews& news) {
    if constexpr (kEngine) Fill(news, event.mutable_bucket());
    REFITD_CHECK(kEngine);
  }
  template <typename Action>
  requires kIsOneOf<Action, MemberAction>
  void operator()(const Action& action) { event = EventOf<Event>(action); }
};

}  // namespace

template <typename Event>
Event MemberEventOf(const MemberNews& news) {
  EventMaker<Event> maker;
  std::visit(maker, news);
  return std::move(maker.event);
}
template v1::EngineEvent MemberEventOf(const MemberNews& news);
template v1::TrainerEvent MemberEventOf(const MemberNews& news);

}  // namespace refitd
