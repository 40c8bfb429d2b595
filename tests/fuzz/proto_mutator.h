// Fuzzing of inputs that are protocol buffers: mutations keep the structure, so that fuzzing gets
// past the parser.
//
// A target defines `void FuzzOne(const MESSAGE&)` and ends with REFITD_PROTO_FUZZ_TARGET(MESSAGE).
// Its input is the serialised message, so that a corpus can be written as text. Deterministic: the
// same input and seed give the same mutation.
#ifndef REFITD_TESTS_FUZZ_PROTO_MUTATOR_H_
#define REFITD_TESTS_FUZZ_PROTO_MUTATOR_H_

#include <google/protobuf/message.h>

#include <cstddef>
#include <cstdint>

namespace refitd {

// These functions do the work of LLVMFuzzerCustomMutator and LLVMFuzzerCustomCrossOver; `scratch`
// and `other` are empty messages of the target's type.
size_t MutateProto(uint8_t* data, size_t size, size_t max_size, unsigned seed,
                   google::protobuf::Message* scratch);
size_t CrossProtos(const uint8_t* data1, size_t size1, const uint8_t* data2, size_t size2,
                   uint8_t* out, size_t max_size, unsigned seed, google::protobuf::Message* scratch,
                   google::protobuf::Message* other);

}  // namespace refitd

#define REFITD_PROTO_FUZZ_TARGET(MESSAGE)                                                          \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {                        \
    MESSAGE message;                                                                               \
    if (message.ParseFromArray(data, static_cast<int>(size))) refitd::FuzzOne(message);            \
    return 0;                                                                                      \
  }                                                                                                \
  extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,           \
                                            unsigned seed) {                                       \
    MESSAGE scratch;                                                                               \
    return refitd::MutateProto(data, size, max_size, seed, &scratch);                              \
  }                                                                                                \
  extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* data1, size_t size1,                  \
                                              const uint8_t* data2, size_t size2, uint8_t* out,    \
                                              size_t max_size, unsigned seed) {                    \
    MESSAGE scratch;                                                                               \
    MESSAGE other;                                                                                 \
    return refitd::CrossProtos(data1, size1, data2, size2, out, max_size, seed, &scratch, &other); \
  }

#endif  // REFITD_TESTS_FUZZ_PROTO_MUTATOR_H_
