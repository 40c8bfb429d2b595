// Runs a fuzz target over the files of the folders given, and over every prefix of each: what a
// build without libFuzzer has instead of its main.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
      std::printf("%s: %zu bytes\n", entry.path().c_str(), bytes.size());
      for (size_t size = 0; size <= bytes.size(); ++size) {
        LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), size);
      }
      ++files;
    }
  }
  if (files == 0) std::fprintf(stderr, "no corpus: name a folder with files\n");
  return files > 0 ? 0 : 1;
}
