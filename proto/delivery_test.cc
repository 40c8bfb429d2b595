#include "proto/delivery.h"

#include <catch2/catch.hpp>
#include <cctype>
#include <string>

#include "refitd/v1/types.pb.h"

namespace refitd {
namespace {

TEST_CASE("The table has every delivery mode of the protocol, by its number and name") {
  CHECK(v1::Delivery_MAX == static_cast<int>(kDeliveries.size()));
  for (const DeliveryTraits& traits : kDeliveries) {
    const int number = static_cast<int>(traits.mode);
    std::string name = "DELIVERY_" + std::string(traits.name);
    for (char& c : name) c = static_cast<char>(std::toupper(c));
    CHECK(v1::Delivery_Name(static_cast<v1::Delivery>(number)) == name);
    CHECK(DeliveryOf(number) == traits.mode);
    CHECK(DeliveryOf(traits.name) == traits.mode);
    CHECK(Name(traits.mode) == traits.name);
  }
}

TEST_CASE("No other number or name is a delivery mode") {
  for (const int64_t number :
       {int64_t{-1}, int64_t{0}, int64_t{v1::Delivery_MAX} + 1, int64_t{257}, int64_t{1} << 32}) {
    CHECK(DeliveryOf(number) == std::nullopt);
  }
  for (const char* name : {"", "Staged", "stage", "unspecified"}) {
    CHECK(DeliveryOf(std::string_view(name)) == std::nullopt);
  }
}

TEST_CASE("A rank gets its bytes in its layout, or else in slots, or in both") {
  for (const DeliveryTraits& traits : kDeliveries) {
    INFO(traits.name);
    CHECK((traits.needs_layout || traits.reads_slots));
    // A catch-up reads and writes registered memory.
    if (traits.catch_ups) CHECK(traits.needs_layout);
    // A manifest names tensors that arrive in slots.
    if (traits.declares_manifest) CHECK(traits.reads_slots);
  }
}

TEST_CASE("Errors name the modes that have a property") {
  CHECK(DeliveriesWith(CatchesUp) == "in_place");
  CHECK(DeliveriesWith(DeclaresManifest) == "loader");
  CHECK(DeliveriesWith([](DeliveryMode) { return true; }) == "in_place and loader");
}

}  // namespace
}  // namespace refitd
