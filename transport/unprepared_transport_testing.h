// A base for stand-ins of transports: preparing only keeps the transfer or job, and each replay
// submits a copy of it. So a stand-in implements the two functions Submit alone.
#ifndef REFITD_TRANSPORT_UNPREPARED_TRANSPORT_TESTING_H_
#define REFITD_TRANSPORT_UNPREPARED_TRANSPORT_TESTING_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace refitd {

class UnpreparedTransport : public Transport {
 public:
  absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) override {
    return std::make_shared<const KeptTransfer>(std::move(transfer));
  }
  void Replay(const std::shared_ptr<const PreparedTransfer>& prepared, Verification verification,
              std::string label, std::function<void(TransferResult)> done) override {
    Transfer transfer = static_cast<const KeptTransfer&>(*prepared).transfer;
    transfer.verification = verification;
    transfer.label = std::move(label);
    Submit(std::move(transfer), std::move(done));
  }
  std::shared_ptr<const PreparedReadback> Prepare(ReadbackJob job) override {
    return std::make_shared<const KeptReadback>(std::move(job));
  }
  void Replay(const std::shared_ptr<const PreparedReadback>& prepared,
              std::vector<uint64_t> expected, std::function<void(ReadbackResult)> done) override {
    ReadbackJob job = static_cast<const KeptReadback&>(*prepared).job;
    for (size_t i = 0; i < job.pieces.size(); ++i) job.pieces[i].expected = expected[i];
    Submit(std::move(job), std::move(done));
  }

 private:
  struct KeptTransfer : PreparedTransfer {
    explicit KeptTransfer(Transfer kept) : transfer(std::move(kept)) {}
    const Transfer transfer;
  };
  struct KeptReadback : PreparedReadback {
    explicit KeptReadback(ReadbackJob kept) : job(std::move(kept)) {}
    const ReadbackJob job;
  };
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_UNPREPARED_TRANSPORT_TESTING_H_
