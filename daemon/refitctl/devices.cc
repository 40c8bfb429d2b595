#include "daemon/refitctl/devices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "daemon/refitctl/format.h"

namespace refitd::refitctl {
namespace {

std::string RenderCommunicator(const v1::CommunicatorStatus& communicator) {
  std::string text = fmt::format("communicator {} of {}", communicator.epoch(),
                                 fmt::join(communicator.gpu_uuids(), ", "));
  if (communicator.copy_engines()) text += ", by copy engines";
  if (communicator.windows() > 0) {
    text += fmt::format("; windows: {}, {} on each GPU", communicator.windows(),
                        HumanBytes(communicator.window_bytes()));
  }
  if (!communicator.error().empty()) text += "; " + communicator.error();
  return text;
}

std::string RenderEpoch(const v1::WireEpochStatus& epoch) {
  std::string text = epoch.group().empty()
                         ? std::string("epoch of no group")
                         : fmt::format("epoch {} of group {}", epoch.epoch(), epoch.group());
  text += fmt::format(": rank {} of {} daemons on {}, {}; {} sent, {} received", epoch.rank(),
                      epoch.ranks(), epoch.gpu_uuid(), epoch.state(),
                      HumanBytes(epoch.bytes_sent()), HumanBytes(epoch.bytes_received()));
  if (!epoch.error().empty()) text += "; " + epoch.error();
  return text;
}

}  // namespace

std::string RenderCollectives(const v1::TransportStatus& transport) {
  std::string text;
  for (const auto& each : transport.nccl().communicators()) {
    text += fmt::format("nccl       {}\n", RenderCommunicator(each));
  }
  for (const auto& each : transport.nccl().epochs()) {
    text += fmt::format("nccl       {}\n", RenderEpoch(each));
  }
  if (const int64_t abandoned = transport.nccl().abandoned_epochs(); abandoned > 0) {
    text += fmt::format("nccl       {} epochs never connected\n", abandoned);
  }
  return text;
}

}  // namespace refitd::refitctl
