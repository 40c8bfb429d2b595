// The tests' handle to the fake NCCL (fake_nccl.cc), by which they control it.
//
// The fake moves bytes of the fake driver's devices, in the order of their streams: a collective
// runs when all of its devices have come to it, and later work waits. Its communicators are
// nonblocking: a rank's share of a group is put on its stream only after the rank was polled twice,
// so issuing from several threads may deadlock the devices, as with NCCL. It checks some of NCCL's
// rules: all ranks in one group, equal sizes, windows only over memory of cuMemCreate. Calls that
// break them fail, or never end, as with NCCL.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_H_

#include <string>

#include "transport/cuda/fakes/fake_library.h"
#include "transport/cuda/fakes/fake_nccl_counts.h"

namespace refitd {

// Resets the fake to its first state and controls it while this object lives. A FakeCuda must live
// longer.
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

  // The fake's library. Its version is 22809, or the number in REFITD_FAKE_NCCL_VERSION.
  static std::string Path() { return PathOf("libnccl_fake.so"); }

  // Makes the nth call of this name from now (1: the next) return this result, and do nothing.
  void FailAt(const char* call, int nth, int result) { fail_at_(call, nth, result); }
  // Makes the nth group from now end with this result when it is polled.
  void FailGroup(int nth, int result) { fail_group_(nth, result); }
  // While `stuck`, no group ends; while `revokes`, groups of ncclCommRevoke do not end either.
  void Stick(bool stuck, bool revokes = false) { stick_(stuck, revokes); }
  // Makes this call not return until another call, or "", is named.
  void Block(const char* call) { block_(call); }
  // Sets whether the devices are connected as windows need; they are at first.
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
