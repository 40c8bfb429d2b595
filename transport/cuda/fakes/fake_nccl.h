// How tests get hold of the fake NCCL (fake_nccl.cc), and what they tell it.
//
// The fake moves bytes of the fake driver's devices, in the order of their streams: a collective
// runs when all of its devices do, and what is behind it waits. Its communicators are nonblocking:
// a rank's share of a group is in progress until somebody polled the rank twice, and only then on
// its stream: whoever issues on several threads may deadlock his devices, as with NCCL.
// It takes over NCCL's rules that it can check: all ranks in one group, equal sizes, windows over
// memory of cuMemCreate alone; what breaks them fails, or never ends, as with NCCL.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_H_

#include <string>

#include "transport/cuda/fakes/fake_library.h"
#include "transport/cuda/fakes/fake_nccl_counts.h"

namespace refitd {

// The fake, in its first state while this lives. A FakeCuda lives longer.
class FakeNccl : public FakeLibrary {
 public:
  FakeNccl() : FakeLibrary(Path()) {
    Find("FakeNcclReset", &reset_);
    Find("FakeNcclFailAt", &fail_at_);
    Find("FakeNcclFailGroup", &fail_group_);
    Find("FakeNcclStick", &stick_);
    Find("FakeNcclBlock", &block_);
    Find("FakeNcclSymmetric", &symmetric_);
    Find("FakeNcclCount", &count_);
    reset_();
  }
  ~FakeNccl() { reset_(); }

  // Its version is 22809, or what REFITD_FAKE_NCCL_VERSION says.
  static std::string Path() { return PathOf("libnccl_fake.so"); }

  // The nth call of this name from now (1: the next) returns this result, and does nothing.
  void FailAt(const char* call, int nth, int result) { fail_at_(call, nth, result); }
  // The nth group from now comes to this result, when it was polled.
  void FailGroup(int nth, int result) { fail_group_(nth, result); }
  // No group ends while `stuck`, none of ncclCommRevoke while `revokes`.
  void Stick(bool stuck, bool revokes = false) { stick_(stuck, revokes); }
  // The call that does not return until another one is named, or "".
  void Block(const char* call) { block_(call); }
  // Whether the devices' peers are of the kind that windows need; they are at first.
  void Symmetric(bool possible) { symmetric_(possible); }
  FakeNcclCounts Count() const {
    FakeNcclCounts counts;
    count_(&counts);
    return counts;
  }

 private:
  void (*reset_)() = nullptr;
  void (*fail_at_)(const char*, int, int) = nullptr;
  void (*fail_group_)(int, int) = nullptr;
  void (*stick_)(bool, bool) = nullptr;
  void (*block_)(const char*) = nullptr;
  void (*symmetric_)(bool) = nullptr;
  void (*count_)(FakeNcclCounts*) = nullptr;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_H_
