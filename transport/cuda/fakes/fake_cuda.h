// The tests' handle to the fake driver (fake_driver.cc), by which they control it.
//
// The fake's "device" memory is host memory: a block of another process is a memfd, mapped once
// more for each open, so that using a mapping that was closed too early, or that belongs to another
// device, fails. Work on streams is queued, and done when an event or a stream is queried. Only
// events order work between streams: bytes that are reused before their copy ran, or read without
// waiting for their event, come out wrong.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_CUDA_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_CUDA_H_

#include <cstdint>
#include <string>

#include "transport/cuda/fakes/fake_driver.h"
#include "transport/cuda/fakes/fake_library.h"

namespace refitd {

// Resets the fake to its first state and controls it while this object lives. Only one may live at
// a time.
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
    Find("FakeCudaRun", &run_);
    Find("FakeCudaExport", &export_);
    Find("FakeCudaExportVmm", &export_vmm_);
    Find("FakeCudaForget", &forget_);
    Find("FakeCudaCorrupt", &corrupt_);
    reset_();
  }
  ~FakeCuda() { reset_(); }

  static std::string Path() { return PathOf("libcuda_fake.so"); }

  // Makes a probe's call always fail; a call about a device fails on device 1 only.
  void Fail(const char* call, int result) { fail_(call, result); }
  // Makes the nth call from now (1: the next) fail once; after a result that destroys a context all
  // calls fail. "kernel": the failure comes when a launch runs.
  void FailAt(const char* call, int nth, int result) { fail_at_(call, nth, result); }
  // Stops the streams of these devices (a bit mask).
  void Hold(unsigned devices) { hold_(devices); }
  // Makes this call not return until another call, or "", is named.
  void Block(const char* call) { block_(call); }
  // Sets the number of devices, 1 to 8; 2 at first. To be called before anything asks the driver.
  void Devices(int devices) { devices_(devices); }
  // Sets whether devices reach one another; they do at first.
  void Peers(bool reach) { peers_(reach); }
  // Makes the nth launch from now store one wrong bit.
  void Corrupt(int nth) { corrupt_(nth); }
  // Runs the work of streams as far as it can run now, and returns how much is left. What ran
  // before is visible to the caller.
  int RunStreams() const { return run_(); }
  FakeCudaCounts Count() const {
    FakeCudaCounts counts;
    count_(&counts);
    return counts;
  }
  // Acts as cudaMalloc of another process: returns the block's bytes, and the handle for importers.
  char* Export(int device, int64_t bytes, std::string* handle) {
    handle->assign(64, '\0');
    return export_(device, bytes, handle->data());
  }
  // Acts as cuMemCreate of another process; the caller owns the descriptor.
  char* ExportVmm(int device, int64_t bytes, int* fd) { return export_vmm_(device, bytes, fd); }
  // Acts as if that process died: the handle is refused from now on.
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
  int (*run_)() = nullptr;
  char* (*export_)(int, int64_t, char*) = nullptr;
  char* (*export_vmm_)(int, int64_t, int*) = nullptr;
  void (*forget_)(char*) = nullptr;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_CUDA_H_
