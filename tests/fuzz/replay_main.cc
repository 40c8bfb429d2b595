// The main function of fuzz targets built without libFuzzer: runs a target over the files below the
// given folders, and over prefixes of each file.
// usage: TARGET PREFIXES FOLDER...    PREFIXES: number for each file, evenly spread
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/one_thread.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// The files below the folder. The folder is closed again, so that targets may count descriptors.
std::vector<std::filesystem::path> FilesBelow(const char* folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  return files;
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int argc, char** argv) {
  const bool one_thread = refitd::TakeOneThread(&argc, argv);
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s PREFIXES FOLDER...\n", argv[0]);
    return 2;
  }
  const size_t prefixes = std::max<size_t>(std::strtoul(argv[1], nullptr, 10), 1);
  int files = 0;
  for (int i = 2; i < argc; ++i) {
    for (const auto& path : FilesBelow(argv[i])) {
      const std::string bytes = ReadFile(path);
      // Printed first, so that a crash shows the file.
      std::printf("%s: %zu bytes\n", path.c_str(), bytes.size());
      std::fflush(stdout);
      const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
      const size_t step = bytes.size() / prefixes + 1;
      for (size_t size = 0; size < bytes.size(); size += step) LLVMFuzzerTestOneInput(data, size);
      LLVMFuzzerTestOneInput(data, bytes.size());
      ++files;
    }
  }
  if (files == 0) std::fprintf(stderr, "no corpus: name a folder with files\n");
  return refitd::OneThread(one_thread, files > 0 ? 0 : 1);
}
