// The modes in which engine ranks take delivery, and what follows from each: one table, which the
// daemon, its groups, the clients in C++ and C, and refitctl read. A rank chooses its mode when it
// attaches.
//
// Pure; uses no message of the protocol.
#ifndef REFITD_PROTO_DELIVERY_H_
#define REFITD_PROTO_DELIVERY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace refitd {

// The numbers are those of refitd.v1.Delivery.
enum class DeliveryMode : uint8_t { kInPlace = 1, kLoader = 2 };

struct DeliveryTraits {
  DeliveryMode mode;
  std::string_view name;  // in status, flags and errors
  std::string_view how;   // for people
  // The rank takes part in updates only once it has registered a layout, and updates write to that.
  bool needs_layout;
  // The rank is handed the parts of buckets in slots, and acknowledges each.
  bool reads_slots;
  // The rank may declare the tensors that every update must bring.
  bool declares_manifest;
  // The rank may give its weights to other instances, and be given theirs.
  bool catch_ups;
};

// The modes in the order of their numbers, which begin at 1.
inline constexpr std::array kDeliveries = {
    DeliveryTraits{.mode = DeliveryMode::kInPlace,
                   .name = "in_place",
                   .how = "the daemon writes in place",
                   .needs_layout = true,
                   .reads_slots = false,
                   .declares_manifest = false,
                   .catch_ups = true},
    DeliveryTraits{.mode = DeliveryMode::kLoader,
                   .name = "loader",
                   .how = "through slots",
                   .needs_layout = false,
                   .reads_slots = true,
                   .declares_manifest = true,
                   .catch_ups = false},
};

namespace delivery_internal {
constexpr bool InOrder() {
  for (size_t i = 0; i < kDeliveries.size(); ++i) {
    if (static_cast<size_t>(kDeliveries[i].mode) != i + 1) return false;
  }
  return true;
}
static_assert(InOrder());
}  // namespace delivery_internal

// `mode` must be in the table.
constexpr const DeliveryTraits& TraitsOf(DeliveryMode mode) {
  return kDeliveries[static_cast<size_t>(mode) - 1];
}
constexpr bool NeedsLayout(DeliveryMode mode) { return TraitsOf(mode).needs_layout; }
constexpr bool ReadsSlots(DeliveryMode mode) { return TraitsOf(mode).reads_slots; }
constexpr bool DeclaresManifest(DeliveryMode mode) { return TraitsOf(mode).declares_manifest; }
constexpr bool CatchesUp(DeliveryMode mode) { return TraitsOf(mode).catch_ups; }
constexpr std::string_view Name(DeliveryMode mode) { return TraitsOf(mode).name; }

// Returns the mode with this number of refitd.v1.Delivery; nullopt: there is none.
constexpr std::optional<DeliveryMode> DeliveryOf(int64_t number) {
  if (number < 1 || number > static_cast<int64_t>(kDeliveries.size())) return std::nullopt;
  return static_cast<DeliveryMode>(number);
}
constexpr std::optional<DeliveryMode> DeliveryOf(std::string_view name) {
  for (const DeliveryTraits& traits : kDeliveries) {
    if (traits.name == name) return traits.mode;
  }
  return std::nullopt;
}

// Returns the names of the modes for which `has` holds, in order, for errors: "in_place and
// loader".
inline std::string DeliveriesWith(bool (*has)(DeliveryMode)) {
  std::string names;
  for (const DeliveryTraits& traits : kDeliveries) {
    if (!has(traits.mode)) continue;
    if (!names.empty()) names += " and ";
    names += traits.name;
  }
  return names;
}

}  // namespace refitd

#endif  // REFITD_PROTO_DELIVERY_H_
