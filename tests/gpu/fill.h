// The machine code of fill.cu, made by nvcc when the project is built.
#ifndef REFITD_TESTS_GPU_FILL_H_
#define REFITD_TESTS_GPU_FILL_H_

#include <string_view>

namespace refitd {

// A fat binary for cuModuleLoadData; empty: built without nvcc.
std::string_view FillImage();

}  // namespace refitd

#endif  // REFITD_TESTS_GPU_FILL_H_
