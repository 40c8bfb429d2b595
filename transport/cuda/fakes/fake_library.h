// Finds and loads a fake of a library that the daemon loads at run time, and gives tests the
// functions that the fake exports for them. Private to fake_cuda.h and fake_nccl.h.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_LIBRARY_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_LIBRARY_H_

#include <dlfcn.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <string>

namespace refitd {

class FakeLibrary {
 public:
  FakeLibrary(const FakeLibrary&) = delete;
  FakeLibrary& operator=(const FakeLibrary&) = delete;

 protected:
  explicit FakeLibrary(const std::string& path)
      : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    INFO(path);
    REQUIRE(library_ != nullptr);
  }
  ~FakeLibrary() { dlclose(library_); }

  // The fakes lie in transport/cuda/fakes below some folder above this binary, under `bazel test`
  // and by hand.
  static std::string PathOf(const std::string& name) {
    const std::filesystem::path fake = std::filesystem::path("transport/cuda/fakes") / name;
    std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    while (!exists(folder / fake) && folder.has_relative_path()) folder = folder.parent_path();
    return folder / fake;
  }

  template <typename Function>
  void Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
    INFO(name);
    REQUIRE(*function != nullptr);
  }

 private:
  void* const library_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_LIBRARY_H_
