#include "transport/host/two_sided.h"

#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/host/memory.h"

namespace refitd {
namespace {

#if !defined(MREMAP_DONTUNMAP)
#define MREMAP_DONTUNMAP 4
#endif

// Page tables are moved as a whole where both addresses are multiples of what a table covers.
constexpr size_t kTableBytes = size_t{1} << 30;

size_t RoundUp(size_t bytes) { return (bytes + kTableBytes - 1) / kTableBytes * kTableBytes; }

// Addresses that nothing else of the process uses: room for both sides, and for one on its way.
class Addresses {
 public:
  static constexpr size_t kRooms = 3;
  explicit Addresses(size_t bytes)
      : room_(RoundUp(bytes)),
        reserved_(kRooms * room_ + kTableBytes),
        begin_(mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                    0)) {}
  Addresses(Addresses&& other) noexcept
      : room_(other.room_),
        reserved_(other.reserved_),
        begin_(std::exchange(other.begin_, MAP_FAILED)) {}
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  ~Addresses() {
    if (valid()) REFITD_CHECK(munmap(begin_, reserved_) == 0);
  }
  bool valid() const { return begin_ != MAP_FAILED; }
  char* Room(size_t i) const {
    const auto address = reinterpret_cast<uintptr_t>(begin_);
    return static_cast<char*>(begin_) + (RoundUp(address) - address) + i * room_;
  }

 private:
  const size_t room_;
  const size_t reserved_;
  void* begin_;
};

constexpr int kWritable = PROT_READ | PROT_WRITE;

absl::Status MapAt(char* address, const UniqueFd& side, int64_t bytes, int protection = kWritable) {
  const auto size = static_cast<size_t>(bytes);
  void* const mapped = mmap(address, size, protection, MAP_SHARED | MAP_FIXED, side.get(), 0);
  if (mapped == MAP_FAILED) return ErrnoError(errno, "mapping two-sided memory");
  (void)madvise(mapped, size, MADV_DONTDUMP);  // as HostRegion does
  return absl::OkStatus();
}

class HostTwoSided final : public TwoSided {
 public:
  HostTwoSided(Addresses addresses, std::array<UniqueFd, 2> sides, int64_t bytes, bool writable)
      : TwoSided(addresses.Room(0), bytes),
        addresses_(std::move(addresses)),
        sides_(std::move(sides)),
        writable_(writable) {}

  absl::StatusOr<UniqueFd> Share(bool back) const override {
    UniqueFd shared = Duplicate(sides_[back ? 1 - front_ : front_].get());
    if (!shared.valid()) return ErrnoError(errno, "sharing a side");
    return shared;
  }
  absl::Status AllowWrites() override {
    if (writable_) return absl::OkStatus();
    if (mprotect(data(), size(), kWritable) != 0) {
      return ErrnoError(errno, "making two-sided memory writable");
    }
    writable_ = true;
    return absl::OkStatus();
  }
  absl::Status CopyToBack() override {
    REFITD_ASSIGN_OR_RETURN(char* const back, Back());
    std::memcpy(back, data(), size());
    return absl::OkStatus();
  }
  absl::StatusOr<char*> MapBack() override {
    if (back_used_) return Precondition("the other side is mapped already");
    absl::StatusOr<char*> mapped = Back();
    back_used_ = mapped.ok();
    return mapped;
  }
  void UnmapBack() override { back_used_ = false; }
  // Each step leaves a side mapped at data(). The last step only prepares the next call, and may
  // fail.
  absl::Status Flip() override {
    const bool moves = back_mapped_ && MoveTables(0, 2).ok() && MoveTables(1, 0).ok();
    if (!moves) REFITD_RETURN_IF_ERROR(MapAt(addresses_.Room(0), sides_[1 - front_], bytes()));
    front_ = 1 - front_;
    back_mapped_ = (moves && MoveTables(2, 1).ok()) ||
                   MapAt(addresses_.Room(1), sides_[1 - front_], bytes()).ok();
    return absl::OkStatus();
  }

 private:
  size_t size() const { return static_cast<size_t>(bytes()); }
  // The back, in Room(1).
  absl::StatusOr<char*> Back() {
    if (!back_mapped_) {
      REFITD_RETURN_IF_ERROR(MapAt(addresses_.Room(1), sides_[1 - front_], bytes()));
      back_mapped_ = true;
    }
    return addresses_.Room(1);
  }
  // Maps at `to` what is mapped at `from`, with its page tables; `from` stays mapped, without them.
  // Linux moves the tables of shared memory so from 5.13 on; before, a flip maps both sides anew,
  // and page faults follow.
  absl::Status MoveTables(size_t from, size_t to) const {
    const void* const moved =
        mremap(addresses_.Room(from), size(), size(),
               MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, addresses_.Room(to));
    return moved == MAP_FAILED ? ErrnoError(errno, "moving page tables") : absl::OkStatus();
  }

  const Addresses addresses_;
  const std::array<UniqueFd, 2> sides_;
  size_t front_ = 0;
  bool writable_;
  bool back_mapped_ = true;  // the back, in Room(1)
  bool back_used_ = false;   // from MapBack to UnmapBack
};

// Maps the front, read-only unless writable, and the back, always writable.
absl::StatusOr<std::unique_ptr<TwoSided>> Map(std::array<UniqueFd, 2> sides, int64_t bytes,
                                              bool writable) {
  Addresses addresses(static_cast<size_t>(bytes));
  if (!addresses.valid()) return ErrnoError(errno, "reserving addresses");
  REFITD_RETURN_IF_ERROR(
      MapAt(addresses.Room(0), sides[0], bytes, writable ? kWritable : PROT_READ));
  REFITD_RETURN_IF_ERROR(MapAt(addresses.Room(1), sides[1], bytes));
  return std::make_unique<HostTwoSided>(std::move(addresses), std::move(sides), bytes, writable);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TwoSided>> MakeHostTwoSided(int64_t bytes) {
  std::array<UniqueFd, 2> sides;
  for (UniqueFd& side : sides) {
    REFITD_ASSIGN_OR_RETURN(side, CreateSealedMemfd("refit-arena", bytes));
  }
  return Map(std::move(sides), bytes, /*writable=*/true);
}

absl::StatusOr<std::unique_ptr<TwoSided>> OpenHostTwoSided(SharedSides sides) {
  REFITD_RETURN_IF_ERROR(CheckSealedMemfd(sides.front, sides.bytes));
  REFITD_RETURN_IF_ERROR(CheckSealedMemfd(sides.back, sides.bytes));
  return Map({std::move(sides.front), std::move(sides.back)}, sides.bytes, /*writable=*/false);
}

}  // namespace refitd
