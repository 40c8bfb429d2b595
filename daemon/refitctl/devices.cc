#include "daemon/refitctl/devices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "daemon/refitctl/format.h"

namespace refitd::refitctl {
namespace {

std::string RenderCommunicator(const v1::CommunicatorStatus& communicator) {
  std::string text = fmt::format("communicator {} of {}", communicator.number(),
                                 fmt::join(communicator.gpu_uuids(), ", "));
  if (communicator.copy_engines()) text += ", by copy engines";
  if (communicator.windows() > 0) {
    text += fmt::format("; windows: {}, {} on each GPU", communicator.windows(),
                        HumanBytes(communicator.window_bytes()));
  }
  if (!communicator.error().empty()) text += "; " + communicator.error();
  return text;
}

std::string RenderCommunicator(const v1::WireCommunicatorStatus& communicator) {
  std::string text =
      communicator.group().empty()
          ? std::string("communicator of no group")
          : fmt::format("communicator {} of group {}", communicator.number(), communicator.group());
  text += fmt::format(": rank {} of {} daemons, {}", communicator.rank(), communicator.ranks(),
                      communicator.state());
  for (const v1::WireRail& rail : communicator.rails()) {
    text += fmt::format("; {}: {} sent, {} received", rail.gpu_uuid(),
                        HumanBytes(rail.bytes_sent()), HumanBytes(rail.bytes_received()));
  }
  if (!communicator.error().empty()) text += "; " + communicator.error();
  return text;
}

}  // namespace

std::string RenderCollectives(const v1::TransportStatus& transport) {
  std::string text;
  for (const auto& each : transport.nccl().communicators()) {
    text += fmt::format("nccl       {}\n", RenderCommunicator(each));
  }
  for (const auto& each : transport.nccl().wire_communicators()) {
    text += fmt::format("nccl       {}\n", RenderCommunicator(each));
  }
  if (const int64_t abandoned = transport.nccl().abandoned_communicators(); abandoned > 0) {
    text += fmt::format("nccl       {} communicators never connected\n", abandoned);
  }
  return text;
}

}  // namespace refitd::refitctl
