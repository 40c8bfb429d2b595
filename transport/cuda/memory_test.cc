#include "transport/cuda/memory.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(REFITD_CUDA)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/aborts.h"
#include "transport/base/eventually_testing.h"
#include "transport/cuda/api.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/host/memory.h"
#endif

namespace refitd {
namespace {

using Catch::Matchers::Contains;

#if !defined(REFITD_CUDA)

TEST_CASE("where CUDA is not compiled in there is no device memory, and that is said") {
  const auto memory = CudaMemory::Create();
  REQUIRE(memory.status().code() == absl::StatusCode::kUnavailable);
  REQUIRE(memory.status().message() == "CUDA not compiled in");
}

#else

constexpr int64_t kMiB = int64_t{1} << 20;

std::shared_ptr<CudaMemory> MakeMemory() {
  auto memory = CudaMemory::Create(FakeCuda::Path());
  INFO(memory.status().ToString());
  REQUIRE(memory.ok());
  return *std::move(memory);
}

std::shared_ptr<const DeviceRegion> Open(CudaMemory* memory, int device,
                                         const std::string& handle) {
  auto region = memory->OpenBlock(device, handle);
  INFO(region.status().ToString());
  REQUIRE(region.ok());
  return *std::move(region);
}

// Checks that nothing is open but what the process keeps (contexts).
void CheckNothingOpen(const FakeCuda& fake) {
  const FakeCudaCounts counts = fake.Count();
  CHECK(counts.opened_handles == 0);
  CHECK(counts.imported == 0);
  CHECK(counts.created == 0);
  CHECK(counts.reserved == 0);
  CHECK(counts.mapped == 0);
  CHECK(counts.allocations == 0);
  CHECK(counts.host_registered == 0);
  CHECK(counts.streams == 0);
}

TEST_CASE("without a driver or a device there is no device memory, in the driver's words") {
  FakeCuda fake;
  auto memory = CudaMemory::Create("libcuda_missing.so.1");
  REQUIRE(memory.status().code() == absl::StatusCode::kUnavailable);
  REQUIRE_THAT(std::string(memory.status().message()), Contains("libcuda_missing.so.1"));
  fake.Fail("cuDeviceGetCount", 0);
  memory = CudaMemory::Create(FakeCuda::Path());
  REQUIRE(memory.status().code() == absl::StatusCode::kUnavailable);
  REQUIRE(memory.status().message() == "the driver shows no device");
}

TEST_CASE("devices are found by UUID, and an unknown one is answered with those there are") {
  const FakeCuda fake;
  const auto memory = MakeMemory();
  REQUIRE(memory->devices().size() == 2);
  REQUIRE(memory->DeviceOf(memory->devices()[1].uuid).value() == 1);
  const auto unknown = memory->DeviceOf("GPU-none");
  REQUIRE(unknown.status().code() == absl::StatusCode::kFailedPrecondition);
  REQUIRE_THAT(std::string(unknown.status().message()), Contains("GPU-none") &&
                                                            Contains(memory->devices()[0].uuid) &&
                                                            Contains(memory->devices()[1].uuid));
}

TEST_CASE("a context has no stack until NCCL needs one, and keeps it where the driver refuses") {
  FakeCuda fake;
  const bool refused = GENERATE(false, true);
  constexpr int kUnsupportedLimit = 215;
  if (refused) fake.FailAt("cuCtxSetLimit", 1, kUnsupportedLimit);
  const auto memory = *CudaMemory::Create(FakeCuda::Path(), {.own_contexts = true});
  CHECK(fake.Count().small_stacks == 0);
  std::string handle;
  fake.Export(0, kMiB, &handle);
  REQUIRE(memory->OpenBlock(0, handle).ok());
  CHECK(fake.Count().small_stacks == (refused ? 0 : 1));
  const std::shared_ptr<CudaContexts> contexts =
      dynamic_cast<const CudaContextsOwner&>(*memory).contexts();
  if (!refused) {
    constexpr int kOutOfMemory = 2;
    fake.FailAt("cuCtxSetLimit", 1, kOutOfMemory);
    CHECK_FALSE(contexts->GetWithStack(0).ok());
    CHECK(fake.Count().small_stacks == 1);
  }
  for (int call = 0; call < 2; ++call) {
    REQUIRE(contexts->GetWithStack(0).ok());
    CHECK(fake.Count().small_stacks == 0);
  }
  REQUIRE(contexts->GetWithStack(1).ok());
  CHECK(fake.Count().small_stacks == 0);
}

// A process with kernels of its own, such as torch's, shares its contexts with this code.
TEST_CASE("a context that others use keeps its stack") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  REQUIRE(memory->OpenBlock(0, handle).ok());
  REQUIRE(memory->MakePool(1, kMiB).ok());
  CHECK(fake.Count().small_stacks == 0);
}

TEST_CASE("a device that does not answer is no reason to refuse the others") {
  FakeCuda fake;
  fake.Fail("cuDeviceGetName", 100);
  const auto memory = MakeMemory();
  fake.Fail(nullptr, 0);
  REQUIRE(memory->devices().size() == 1);
  std::string handle;
  fake.Export(0, kMiB, &handle);
  REQUIRE(memory->OpenBlock(0, handle).ok());
  REQUIRE(memory->OpenBlock(1, handle).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("a legacy handle maps the whole block, with the driver's size") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  char* const exported = fake.Export(1, 3 * kMiB, &handle);
  std::strcpy(exported + kMiB, "of the other process");
  {
    const auto region = Open(memory.get(), 1, handle);
    REQUIRE(region->device() == 1);
    REQUIRE(region->bytes() == 3 * kMiB);
    REQUIRE(std::string(region->data() + kMiB) == "of the other process");
    REQUIRE(fake.Count().opened_handles == 1);
  }
  CheckNothingOpen(fake);
}

TEST_CASE("a handle that is open is not opened again, until its last holder let go") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  auto first = Open(memory.get(), 0, handle);
  auto second = Open(memory.get(), 0, handle);
  REQUIRE(first == second);
  REQUIRE(fake.Count().open_calls == 1);
  first.reset();
  REQUIRE(fake.Count().opened_handles == 1);
  second.reset();
  CheckNothingOpen(fake);
  const auto third = Open(memory.get(), 0, handle);
  REQUIRE(fake.Count().open_calls == 2);
}

TEST_CASE("a block that comes with two handles is found as long as either is open") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  std::string other = handle;
  other.back() ^= 1;
  auto first = Open(memory.get(), 0, handle);
  for (const bool second_stays : {false, true}) {
    auto second = Open(memory.get(), 0, other);
    REQUIRE(second != first);
    REQUIRE(second->data() == first->data());
    char* const data = first->data();
    (second_stays ? first : second).reset();
    const auto found = memory->Find(data, kMiB);
    REQUIRE(found != nullptr);
    CHECK(found->device() == 0);
  }
  CheckNothingOpen(fake);
}

TEST_CASE("a region is opened once for each device that works on it, and closed for all") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  auto region = Open(memory.get(), 0, handle);
  REQUIRE(region->On(0).value() == region->data());
  char* const on_one = region->On(1).value();
  REQUIRE(on_one != region->data());
  REQUIRE(region->On(1).value() == on_one);
  REQUIRE(fake.Count().open_calls == 2);
  region->data()[5] = 'x';
  REQUIRE(on_one[5] == 'x');
  // Find knows the region only by the address on the region's own device.
  REQUIRE(memory->Find(on_one, 1) == nullptr);
  region.reset();
  CheckNothingOpen(fake);
}

TEST_CASE("a device that can't reach the memory is told so, and may ask again") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  const auto region = Open(memory.get(), 0, handle);
  fake.Peers(false);
  absl::StatusOr<char*> on_one = region->On(1);
  REQUIRE(on_one.status().code() == absl::StatusCode::kUnavailable);
  REQUIRE_THAT(std::string(on_one.status().message()),
               Contains("device 1 can't reach memory of device 0"));
  REQUIRE(region->On(7).status().code() == absl::StatusCode::kUnavailable);
  fake.Peers(true);
  fake.FailAt("cuIpcOpenMemHandle", 1, 1);
  REQUIRE(region->On(1).status().code() == absl::StatusCode::kUnavailable);
  REQUIRE(region->On(1).ok());
}

TEST_CASE("handles that the driver refuses are refused, and leave nothing open") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  char* const exported = fake.Export(0, kMiB, &handle);
  const auto code = [&](int device, std::string_view bytes) {
    return memory->OpenBlock(device, bytes).status().code();
  };
  CHECK(code(0, "short") == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, handle + "x") == absl::StatusCode::kInvalidArgument);
  CHECK(code(2, handle) == absl::StatusCode::kInvalidArgument);
  CHECK(code(-1, handle) == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, std::string(64, '\xff')) == absl::StatusCode::kFailedPrecondition);
  // The handle is opened as if it were of another device.
  const auto other = memory->OpenBlock(1, handle).status();
  CHECK(other.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(other.message()), Contains("device 0, not on device 1"));
  for (const char* call : {"cuPointerGetAttribute", "cuMemGetAddressRange"}) {
    fake.FailAt(call, 1, 1);
    CHECK(code(0, handle) == absl::StatusCode::kFailedPrecondition);
  }
  fake.FailAt("cuIpcOpenMemHandle", 1, 2);
  CHECK(code(0, handle) == absl::StatusCode::kResourceExhausted);
  fake.Forget(exported);
  CHECK(code(0, handle) == absl::StatusCode::kFailedPrecondition);
  CheckNothingOpen(fake);
}

TEST_CASE("VMM memory has one address for all devices that reach it") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  int fd = -1;
  char* const exported = fake.ExportVmm(1, 4 * kMiB, &fd);
  auto region = memory->ImportDescriptor(1, UniqueFd(fd), 4 * kMiB);
  INFO(region.status().ToString());
  REQUIRE(region.ok());
  REQUIRE((*region)->device() == 1);
  REQUIRE((*region)->bytes() == 4 * kMiB);
  REQUIRE((*region)->On(0).value() == (*region)->data());
  REQUIRE((*region)->On(1).value() == (*region)->data());
  exported[77] = 'y';
  REQUIRE((*region)->data()[77] == 'y');
  REQUIRE(memory->Find((*region)->data() + 77, 1) == *region);
  region->reset();
  CheckNothingOpen(fake);
}

TEST_CASE("VMM memory is for those devices only that the driver sees as peers") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  fake.Peers(false);
  int fd = -1;
  fake.ExportVmm(0, 2 * kMiB, &fd);
  const auto region = memory->ImportDescriptor(0, UniqueFd(fd), 2 * kMiB);
  REQUIRE(region.ok());
  REQUIRE((*region)->On(0).ok());
  REQUIRE((*region)->On(1).status().code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("VMM memory that is not what was said is refused, and leaves nothing open") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  const auto import = [&](int device, int64_t bytes) {
    int fd = -1;
    fake.ExportVmm(0, 4 * kMiB, &fd);
    return memory->ImportDescriptor(device, UniqueFd(fd), bytes).status().code();
  };
  CHECK(import(1, 4 * kMiB) == absl::StatusCode::kFailedPrecondition);
  CHECK(import(2, 4 * kMiB) == absl::StatusCode::kInvalidArgument);
  for (const int64_t bytes :
       {int64_t{0}, int64_t{-1}, 2 * kMiB, 6 * kMiB, 4 * kMiB - 1, INT64_MAX}) {
    INFO(bytes);
    CHECK(import(0, bytes) == absl::StatusCode::kInvalidArgument);
  }
  CHECK(memory->ImportDescriptor(0, UniqueFd(dup(0)), 2 * kMiB).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  CHECK(memory->ImportDescriptor(0, UniqueFd(), 2 * kMiB).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  for (const char* call :
       {"cuMemGetAllocationPropertiesFromHandle", "cuMemGetAllocationGranularity",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    INFO(call);
    fake.FailAt(call, 1, 801);
    CHECK(import(0, 4 * kMiB) != absl::StatusCode::kOk);
    CheckNothingOpen(fake);
  }
  CHECK(import(0, 4 * kMiB) == absl::StatusCode::kOk);
}

std::shared_ptr<const DeviceRegion> Import(CudaMemory* memory, const DevicePool& pool) {
  auto region = memory->ImportDescriptor(
      pool.region->device(), UniqueFd(dup(pool.descriptor.get())), pool.region->bytes());
  INFO(region.status());
  REQUIRE(region.ok());
  return *std::move(region);
}

TEST_CASE("a pool is this process's memory, found as a region, and others import it") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  {
    auto pool = memory->MakePool(1, 3 * kMiB);
    INFO(pool.status());
    REQUIRE(pool.ok());
    REQUIRE(pool->region->device() == 1);
    REQUIRE(pool->region->bytes() == 4 * kMiB);
    REQUIRE(pool->region->On(0).value() == pool->region->data());
    REQUIRE(memory->Find(pool->region->data() + 4 * kMiB - 1, 1) == pool->region);
    const std::string_view bytes(pool->region->data(), 4 * kMiB);
    REQUIRE(bytes.find_first_not_of('\0') == std::string_view::npos);
    REQUIRE((fcntl(pool->descriptor.get(), F_GETFD) & FD_CLOEXEC) != 0);
    REQUIRE(fake.Count().created == 1);

    const auto other = MakeMemory();
    auto imported = Import(other.get(), *pool);
    REQUIRE(imported->data() != pool->region->data());
    pool->region->data()[4 * kMiB - 1] = 'p';
    REQUIRE(imported->data()[4 * kMiB - 1] == 'p');
    // The import outlives the mapping of the process that made the pool.
    pool->region.reset();
    REQUIRE(fake.Count().created == 0);
    REQUIRE(imported->data()[4 * kMiB - 1] == 'p');
  }
  CheckNothingOpen(fake);
}

TEST_CASE("a pool of no size, of no device, or that the driver refuses leaves nothing open") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, int64_t{90} << 30, INT64_MAX}) {
    INFO(bytes);
    CHECK(memory->MakePool(0, bytes).status().code() == absl::StatusCode::kInvalidArgument);
  }
  CHECK(memory->MakePool(2, kMiB).status().code() == absl::StatusCode::kInvalidArgument);
  fake.FailAt("cuMemCreate", 1, 2);
  const absl::Status full = memory->MakePool(0, kMiB).status();
  CHECK(full.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(std::string(full.message()),
             Contains("1048576 bytes of device 0") && Contains("out of memory"));
  for (const char* call : {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve",
                           "cuMemMap", "cuMemSetAccess", "cuStreamCreate", "cuMemsetD8Async",
                           "cuStreamQuery", "cuMemExportToShareableHandle"}) {
    INFO(call);
    fake.FailAt(call, 1, 801);
    CHECK(!memory->MakePool(0, kMiB).ok());
    CheckNothingOpen(fake);
  }
  CHECK(memory->MakePool(0, kMiB).ok());
}

// A side as another process maps it.
std::shared_ptr<const DeviceRegion> Import(CudaMemory* memory, SidesIn in, const TwoSided& two,
                                           bool back) {
  auto imported = in == SidesIn::kHost ? memory->PinHost(1, *two.Share(back), two.bytes())
                                       : memory->ImportDescriptor(1, *two.Share(back), two.bytes());
  INFO(imported.status());
  REQUIRE(imported.ok());
  return *std::move(imported);
}

TEST_CASE("a flip shows at one address what importers wrote to the other side") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  const SidesIn in = GENERATE(SidesIn::kDevice, SidesIn::kHost);
  {
    auto made = memory->MakeTwoSided(1, kMiB + 1, in);
    REQUIRE(made.ok());
    TwoSided& two = **made;
    CHECK(two.bytes() == 2 * kMiB);
    std::memset(two.data(), 1, static_cast<size_t>(two.bytes()));
    REQUIRE(two.CopyToBack().ok());
    std::array<std::shared_ptr<const DeviceRegion>, 2> sides;
    for (const bool back : {false, true}) {
      sides[back ? 1 : 0] = Import(memory.get(), in, two, back);
      CHECK(sides[back ? 1 : 0]->data()[0] == 1);
    }
    const char* const data = two.data();
    for (int round = 2; round < 6; ++round) {
      std::memset(sides[static_cast<size_t>(round + 1) % 2]->data(), round,
                  static_cast<size_t>(two.bytes()));
      CHECK(two.data()[kMiB] == round - 1);
      REQUIRE(two.Flip().ok());
      CHECK(two.data() == data);
      CHECK(two.data()[kMiB] == round);
    }
  }
  CheckNothingOpen(fake);
}

TEST_CASE("the other side is read at an address of its own, of which nothing stays") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  const SidesIn in = GENERATE(SidesIn::kDevice, SidesIn::kHost);
  {
    const auto made = *memory->MakeTwoSided(1, kMiB, in);
    TwoSided& two = *made;
    std::memset(Import(memory.get(), in, two, /*back=*/true)->data(), 3, kMiB);
    const auto mapped = two.MapBack();
    REQUIRE(mapped.ok());
    CHECK((*mapped)[kMiB - 1] == 3);
    CHECK(two.data()[kMiB - 1] != 3);
    CHECK(absl::IsFailedPrecondition(two.MapBack().status()));
    CHECK(absl::IsFailedPrecondition(two.CopyToBack()));
    two.UnmapBack();
    REQUIRE(two.Flip().ok());
    CHECK(two.data()[kMiB - 1] == 3);
    fake.FailAt(in == SidesIn::kHost ? "cuMemHostGetDevicePointer" : "cuMemMap", 1, 801);
    CHECK_FALSE(two.MapBack().ok());
    REQUIRE(two.MapBack().ok());  // until the memory's end
  }
  CheckNothingOpen(fake);
}

TEST_CASE("a flip that the driver refuses leaves the side that was mapped") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  const std::string call = GENERATE("cuMemUnmap", "cuMemMap", "cuMemSetAccess");
  {
    auto made = memory->MakeTwoSided(0, kMiB, SidesIn::kDevice);
    REQUIRE(made.ok());
    TwoSided& two = **made;
    std::memset(two.data(), 1, kMiB);
    fake.FailAt(call.c_str(), 1, 801);
    const absl::Status refused = two.Flip();
    INFO(call);
    CHECK_FALSE(refused.ok());
    CHECK_FALSE(absl::IsDataLoss(refused));
    CHECK(two.data()[0] == 1);
    REQUIRE(two.Flip().ok());
    CHECK(two.data()[0] != 1);
  }
  CheckNothingOpen(fake);
}

TEST_CASE("two-sided memory is opened by its descriptors, to be read until writes are allowed") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  {
    auto made = memory->MakeTwoSided(1, kMiB, SidesIn::kDevice);
    REQUIRE(made.ok());
    std::memset((*made)->data(), 1, static_cast<size_t>((*made)->bytes()));
    REQUIRE((*made)->Flip().ok());
    std::memset((*made)->data(), 2, static_cast<size_t>((*made)->bytes()));
    const int64_t bytes = (*made)->bytes();
    SharedSides sides{*(*made)->Share(false), *(*made)->Share(true), bytes};
    made->reset();  // the descriptors hold the memory
    auto opened = memory->OpenTwoSided(1, std::move(sides));
    INFO(opened.status());
    REQUIRE(opened.ok());
    TwoSided& two = **opened;
    CHECK(two.bytes() == bytes);
    CHECK(two.data()[bytes - 1] == 2);
    CHECK(EndsBy(SIGSEGV, [&two] { two.data()[0] = 'x'; }));
    REQUIRE(two.CopyToBack().ok());
    REQUIRE(two.AllowWrites().ok());
    two.data()[0] = 'x';
    REQUIRE(two.Flip().ok());
    CHECK(two.data()[0] == 2);
    CHECK(two.data()[bytes - 1] == 2);
    two.data()[0] = 'y';
    // The sides can be shared again, as the next daemon needs it.
    const auto again = memory->OpenTwoSided(1, {*two.Share(false), *two.Share(true), bytes});
    INFO(again.status());
    REQUIRE(again.ok());
    CHECK((*again)->data()[0] == 'y');
  }
  CheckNothingOpen(fake);
}

TEST_CASE("sides that can't be opened are named, and leave nothing behind") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  {
    const auto made = *memory->MakeTwoSided(1, kMiB, SidesIn::kDevice);
    const auto sides = [&](int64_t bytes) {
      return SharedSides{*made->Share(false), *made->Share(true), bytes};
    };
    for (const char* call :
         {"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
      INFO(call);
      fake.FailAt(call, 1, 801);
      CHECK_FALSE(memory->OpenTwoSided(1, sides(made->bytes())).ok());
    }
    fake.FailAt("", 0, 0);
    CHECK(absl::IsFailedPrecondition(memory->OpenTwoSided(0, sides(made->bytes())).status()));
    CHECK(absl::IsInvalidArgument(memory->OpenTwoSided(1, sides(kMiB + 1)).status()));
    CHECK(absl::IsInvalidArgument(memory->OpenTwoSided(7, sides(kMiB)).status()));
    CHECK_FALSE(memory->OpenTwoSided(1, {UniqueFd(), *made->Share(true), made->bytes()}).ok());
    CHECK(memory->OpenTwoSided(1, sides(made->bytes())).ok());
  }
  CheckNothingOpen(fake);
}

TEST_CASE("sides in host memory are read and written by all devices, and take the GPU's once") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  {
    const auto made = *memory->MakeTwoSided(1, kMiB, SidesIn::kHost);
    CHECK(fake.Count().allocations == 1);
    CHECK(fake.Count().host_registered == 2);
    CHECK(fake.Count().created == 0);
    const auto side = Import(memory.get(), SidesIn::kHost, *made, /*back=*/true);
    CHECK(side->device() == 1);
    CHECK(side->On(0).value() == side->data());
    CHECK(memory->Find(side->data() + 5, 8) == side);
    CHECK(fake.Count().host_registered == 3);
    const UniqueFd open(memfd_create("unsealed", MFD_CLOEXEC));
    CHECK(absl::IsInvalidArgument(memory->PinHost(1, open, kMiB).status()));
    CHECK(absl::IsInvalidArgument(memory->PinHost(1, *made->Share(true), 64 * kMiB).status()));
    CHECK(absl::IsInvalidArgument(memory->PinHost(7, *made->Share(true), kMiB).status()));
  }
  CheckNothingOpen(fake);
}

TEST_CASE(
    "a flip from host memory that fails leaves the side that was shown, or says that none is") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  const auto made = *memory->MakeTwoSided(0, kMiB, SidesIn::kHost);
  TwoSided& two = *made;
  std::memset(two.data(), 1, kMiB);
  REQUIRE(two.CopyToBack().ok());
  std::memset(Import(memory.get(), SidesIn::kHost, two, /*back=*/true)->data(), 2, kMiB);
  const bool lost = GENERATE(false, true);
  const char* const call = GENERATE("cuStreamCreate", "cuMemcpyHtoDAsync", "cuStreamSynchronize");
  fake.FailAt(call, 1, lost ? 700 : 801);  // all calls fail after an illegal address
  const absl::Status refused = two.Flip();
  INFO(call << ": " << refused);
  CHECK(refused.ok() == false);
  CHECK(absl::IsDataLoss(refused) == lost);
  // Both sides are as they were: the next process of the rank finds the version before.
  SharedSides sides{*two.Share(false), *two.Share(true), two.bytes(), SidesIn::kHost};
  const auto front = HostRegion::Map(sides.front, kMiB, Access::kReadOnly, false);
  const auto back = HostRegion::Map(sides.back, kMiB, Access::kReadOnly, false);
  CHECK((*front)->data()[kMiB - 1] == 1);
  CHECK((*back)->data()[kMiB - 1] == 2);
  if (lost) return;
  CHECK(two.data()[kMiB - 1] == 1);
  REQUIRE(two.Flip().ok());
  CHECK(two.data()[kMiB - 1] == 2);
  const auto next = *memory->OpenTwoSided(0, std::move(sides));
  CHECK(next->data()[kMiB - 1] == 1);
  REQUIRE(next->Flip().ok());
  CHECK(next->data()[kMiB - 1] == 2);
}

TEST_CASE("two-sided memory that can't be made leaves nothing behind") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  for (const char* call : {"cuMemHostRegister", "cuMemAlloc"}) {
    INFO(call);
    fake.FailAt(call, 1, 801);
    CHECK_FALSE(memory->MakeTwoSided(0, kMiB, SidesIn::kHost).ok());
    CheckNothingOpen(fake);
  }
  {
    const auto made = *memory->MakeTwoSided(0, kMiB, SidesIn::kHost);
    const int registered = fake.Count().host_registered;
    for (const char* call : {"cuMemHostRegister", "cuMemAlloc", "cuMemcpyHtoDAsync"}) {
      INFO(call);
      fake.FailAt(call, 1, 801);
      CHECK_FALSE(memory
                      ->OpenTwoSided(0, {*made->Share(false), *made->Share(true), made->bytes(),
                                         SidesIn::kHost})
                      .ok());
      CHECK(fake.Count().host_registered == registered);
      CHECK(fake.Count().allocations == 1);
    }
  }
  for (const char* call : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    INFO(call);
    const int at = GENERATE(1, 2);
    fake.FailAt(call, at, 801);
    const bool made = memory->MakeTwoSided(0, kMiB, SidesIn::kDevice).ok();
    CHECK((!made || at == 2));
    fake.FailAt(call, 0, 0);
    CheckNothingOpen(fake);
  }
  CHECK(memory->MakeTwoSided(7, kMiB, SidesIn::kDevice).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(memory->MakeTwoSided(0, 0, SidesIn::kDevice).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(memory->MakeTwoSided(0, int64_t{1} << 50, SidesIn::kDevice).status().code() ==
        absl::StatusCode::kInvalidArgument);
}

TEST_CASE("a device that hung as it zeroed a pool held its maker for ever") {
  FakeCuda fake;
  std::vector<absl::Status> told;
  CudaMemoryOptions options;
  options.limit = std::chrono::milliseconds(200);
  options.lost = [&told](const absl::Status& why) { told.push_back(why); };
  const auto memory = CudaMemory::Create(FakeCuda::Path(), options).value();
  fake.Hold(1U << 1);
  CHECK(memory->MakePool(0, kMiB).ok());
  const absl::Status hung = memory->MakePool(1, kMiB).status();
  CHECK(absl::IsDeadlineExceeded(hung));
  CHECK_THAT(std::string(hung.message()), Contains("device 1 did not end its work within 200 ms"));
  REQUIRE(told.size() == 1);
  CHECK_THAT(std::string(told[0].message()), Contains("device 1 did not end its work"));
  // The device may still write the memory.
  CHECK(fake.Count().mapped == 1);
  CHECK(fake.Count().streams == 1);
  // The next caller does not wait that long again, and the loss has been reported already.
  for (const int device : {0, 1}) {
    CHECK_THAT(std::string(memory->MakePool(device, kMiB).status().message()),
               Contains("lost the use of its GPUs"));
  }
  CHECK(fake.Count().created == 1);
  CHECK(told.size() == 1);
}

TEST_CASE("a call that opens, makes or closes device memory and hangs is told") {
  FakeCuda fake;
  constexpr std::chrono::milliseconds kLimit{200};
  std::atomic<bool> told = false;
  absl::Status lost;
  const auto memory =
      *CudaMemory::Create(FakeCuda::Path(), {.limit = kLimit, .lost = [&](const absl::Status& why) {
                                               lost = why;
                                               told = true;
                                             }});
  std::string handle;
  fake.Export(0, kMiB, &handle);
  int exported = -1;
  fake.ExportVmm(0, 2 * kMiB, &exported);
  const UniqueFd fd(exported);
  const auto import = [&] { return memory->ImportDescriptor(0, Duplicate(fd.get()), 2 * kMiB); };
  using Held = std::shared_ptr<const void>;
  struct Case {
    const char* call;
    std::function<Held()> before;  // null: nothing
    std::function<void(Held)> during;
    const char* what;  // the call's name in messages
  };
  const auto let_go = [](Held held) { held.reset(); };
  const Case hanging = GENERATE_REF(values<Case>({
      {"cuIpcOpenMemHandle", nullptr, [&](const auto&) { (void)memory->OpenBlock(0, handle); },
       "opening a CUDA IPC handle"},
      {"cuPointerGetAttribute", nullptr, [&](const auto&) { (void)memory->OpenBlock(0, handle); },
       "asking for the size of a block"},
      {"cuIpcCloseMemHandle", [&] { return Open(memory.get(), 0, handle); }, let_go,
       "closing a CUDA IPC handle"},
      {"cuMemImportFromShareableHandle", nullptr, [&](const auto&) { (void)import(); },
       "mapping imported memory of cuMemCreate"},
      {"cuMemSetAccess", nullptr, [&](const auto&) { (void)import(); },
       "mapping imported memory of cuMemCreate"},
      {"cuMemUnmap", [&] { return *import(); }, let_go, "unmapping memory of cuMemCreate"},
      {"cuMemCreate", nullptr, [&](const auto&) { (void)memory->MakePool(0, kMiB); },
       "making a pool"},
      {"cuMemExportToShareableHandle", nullptr,
       [&](const auto&) { (void)memory->MakePool(0, kMiB); }, "making a pool"},
      {"cuMemAlloc", nullptr, [&](const auto&) { (void)memory->MakeBuffer(0, kMiB); },
       "making a buffer"},
      {"cuMemFree", [&] { return Held(*memory->MakeBuffer(0, kMiB)); }, let_go, "freeing a buffer"},
  }));
  INFO(hanging.call);
  Held held = hanging.before == nullptr ? nullptr : hanging.before();
  fake.Block(hanging.call);
  std::thread thread([&] { hanging.during(std::move(held)); });
  CHECK(Eventually([&] { return told.load(); }));
  CHECK(fake.Count().blocked_calls == 1);
  fake.Block("");
  thread.join();
  CHECK(lost.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(lost.message()), Contains("device 0 (" + memory->devices()[0].uuid) &&
                                              Contains(hanging.what) &&
                                              Contains("did not return within 200 ms"));
}

TEST_CASE("a buffer is written when Store returns, and is nobody's region") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  auto pool = memory->MakePool(1, kMiB);
  REQUIRE(pool.ok());
  std::strcpy(pool->region->data() + 100, "staged");
  {
    auto buffer = memory->MakeBuffer(1, 64);
    INFO(buffer.status());
    REQUIRE(buffer.ok());
    REQUIRE((*buffer)->bytes() == 64);
    CHECK((*buffer)->Store(57, pool->region->data() + 100, 7).ok());
    CHECK(std::string((*buffer)->data() + 57) == "staged");
    CHECK((*buffer)->Store(64, pool->region->data(), 0).ok());
    for (const auto& [offset, bytes] : {std::pair<int64_t, int64_t>{58, 7}, {-1, 1}, {0, -1}}) {
      CHECK(absl::IsInvalidArgument((*buffer)->Store(offset, pool->region->data(), bytes)));
    }
    CHECK(memory->Find((*buffer)->data(), 1) == nullptr);
    CHECK(fake.Count().allocations == 1);
    fake.FailAt("cuMemcpyDtoDAsync", 1, 1);
    CHECK(!(*buffer)->Store(0, pool->region->data(), 1).ok());
  }
  for (const char* call : {"cuMemAlloc", "cuStreamCreate"}) {
    fake.FailAt(call, 1, 2);
    CHECK(absl::IsResourceExhausted(memory->MakeBuffer(1, 64).status()));
  }
  CHECK(absl::IsInvalidArgument(memory->MakeBuffer(1, 0).status()));
  CHECK(fake.Count().allocations == 0);
  CHECK(fake.Count().streams == 0);
}

TEST_CASE("regions are found by any range inside them, and by no other") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::vector<std::shared_ptr<const DeviceRegion>> regions;
  for (int i = 0; i < 5; ++i) {
    std::string handle;
    fake.Export(i % 2, (i + 1) * kMiB, &handle);
    regions.push_back(Open(memory.get(), i % 2, handle));
  }
  for (const auto& region : regions) {
    const char* const data = region->data();
    const int64_t bytes = region->bytes();
    CHECK(memory->Find(data, bytes) == region);
    CHECK(memory->Find(data + bytes - 1, 1) == region);
    CHECK(memory->Find(data + 100, 0) == region);
    CHECK(memory->Find(data, bytes + 1) == nullptr);
    CHECK(memory->Find(data + 1, bytes) == nullptr);
    CHECK(memory->Find(data + 1, INT64_MAX) == nullptr);
    CHECK(memory->Find(data, -1) == nullptr);
  }
  const char on_stack = 0;
  CHECK(memory->Find(&on_stack, 1) == nullptr);
  CHECK(memory->Find(nullptr, 0) == nullptr);
  const char* const gone = regions[2]->data();
  regions[2].reset();
  CHECK(memory->Find(gone, 1) == nullptr);
}

TEST_CASE("regions may outlive the memory that opened them") {
  FakeCuda fake;
  auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  auto region = Open(memory.get(), 0, handle);
  memory.reset();
  REQUIRE(region->On(1).ok());
  region.reset();
  CheckNothingOpen(fake);
}

TEST_CASE("threads that open, find and close the same memory leave nothing open") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        const auto region = memory->OpenBlock(0, handle);
        if (!region.ok() || !(*region)->On(1).ok()) {
          ++wrong;
          continue;
        }
        const auto found = memory->Find((*region)->data() + round, 1);
        if (found != *region) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CheckNothingOpen(fake);
}

TEST_CASE("a lost context is told from a refused handle") {
  FakeCuda fake;
  const auto memory = MakeMemory();
  std::string handle;
  fake.Export(0, kMiB, &handle);
  fake.FailAt("cuIpcOpenMemHandle", 1, 700);
  const auto lost = memory->OpenBlock(0, handle).status();
  CHECK(lost.code() == absl::StatusCode::kInternal);
  CHECK_THAT(std::string(lost.message()),
             Contains("cuIpcOpenMemHandle: an illegal memory access was encountered (error 700)"));
}

#endif

}  // namespace
}  // namespace refitd
