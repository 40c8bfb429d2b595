// How tests get hold of the fake driver (fake_driver.cc), and what they tell it.
//
// The fake's "device" memory is host memory: a block of another process is a memfd, mapped once
// more for each open, so that a mapping that was closed too early or that belongs to another device
// is found out. Work on streams is queued and done when somebody queries an event or a stream;
// between streams there is no order but that of events: bytes that are reused before their copy
// ran, or read before what should have been waited for, come out wrong.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_CUDA_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_CUDA_H_

#include <cstdint>
#include <string>

#include "transport/cuda/fakes/fake_driver.h"
#include "transport/cuda/fakes/fake_library.h"

namespace refitd {

// The fake, in its first state while this lives, alone.
class FakeCuda : public FakeLibrary {
 public:
  FakeCuda() : FakeLibrary(Path()) {
    Find("FakeCudaFail", &fail_);
    Find("FakeCudaFailAt", &fail_at_);
    Find("FakeCudaReset", &reset_);
    Find("FakeCudaHold", &hold_);
    Find("FakeCudaBlock", &block_);
    Find("FakeCudaPeers", &peers_);
    Find("FakeCudaDevices", &devices_);
    Find("FakeCudaCount", &count_);
    Find("FakeCudaExport", &export_);
    Find("FakeCudaExportVmm", &export_vmm_);
    Find("FakeCudaForget", &forget_);
    Find("FakeCudaCorrupt", &corrupt_);
    reset_();
  }
  ~FakeCuda() { reset_(); }

  static std::string Path() { return PathOf("libcuda_fake.so"); }

  // A probe's call that always fails; about a device, on device 1 only.
  void Fail(const char* call, int result) { fail_(call, result); }
  // The nth call from now (1: the next) fails, once; results that cost a context go on for all
  // calls. "kernel": when a launch runs.
  void FailAt(const char* call, int nth, int result) { fail_at_(call, nth, result); }
  // Devices (bit mask) whose streams stand still.
  void Hold(unsigned devices) { hold_(devices); }
  // The call that does not return until another one is named, or "".
  void Block(const char* call) { block_(call); }
  // 1 to 8; 2 at first. Before anything asks the driver.
  void Devices(int devices) { devices_(devices); }
  // Whether devices reach one another; they do at first.
  void Peers(bool reach) { peers_(reach); }
  // The nth launch from now leaves one wrong bit in what it stored.
  void Corrupt(int nth) { corrupt_(nth); }
  FakeCudaCounts Count() const {
    FakeCudaCounts counts;
    count_(&counts);
    return counts;
  }
  // Another process's cudaMalloc: its bytes, and the handle for importers.
  char* Export(int device, int64_t bytes, std::string* handle) {
    handle->assign(64, '\0');
    return export_(device, bytes, handle->data());
  }
  // Another process's cuMemCreate, with a descriptor that is the caller's.
  char* ExportVmm(int device, int64_t bytes, int* fd) { return export_vmm_(device, bytes, fd); }
  // Its process died: the handle is refused from now on.
  void Forget(char* exported) { forget_(exported); }

 private:
  void (*fail_)(const char*, int) = nullptr;
  void (*fail_at_)(const char*, int, int) = nullptr;
  void (*reset_)() = nullptr;
  void (*hold_)(unsigned) = nullptr;
  void (*block_)(const char*) = nullptr;
  void (*peers_)(bool) = nullptr;
  void (*devices_)(int) = nullptr;
  void (*corrupt_)(int) = nullptr;
  void (*count_)(FakeCudaCounts*) = nullptr;
  char* (*export_)(int, int64_t, char*) = nullptr;
  char* (*export_vmm_)(int, int64_t, int*) = nullptr;
  void (*forget_)(char*) = nullptr;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_CUDA_H_
