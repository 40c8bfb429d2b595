#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include "tests/one_thread.h"

int main(int argc, char** argv) {
  const bool one_thread = refitd::TakeOneThread(&argc, argv);
  return refitd::OneThread(one_thread, Catch::Session().run(argc, argv));
}
