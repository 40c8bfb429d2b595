// Integers as bytes, the least significant byte first, in what is sent to other hosts. Thread-safe.
#ifndef REFITD_TRANSPORT_BASE_LITTLE_ENDIAN_H_
#define REFITD_TRANSPORT_BASE_LITTLE_ENDIAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace refitd {

template <typename T>
void AppendInt(T value, std::string* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out->push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

// Takes an integer off the front of `in`, which must have at least sizeof(T) bytes.
template <typename T>
T TakeInt(std::string_view* in) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(
        value | static_cast<T>(static_cast<T>(static_cast<uint8_t>((*in)[i])) << (8 * i)));
  }
  in->remove_prefix(sizeof(T));
  return value;
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_LITTLE_ENDIAN_H_
