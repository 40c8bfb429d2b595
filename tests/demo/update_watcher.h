// Watches a group's updates through the daemon's Operator service, as any tool can.
//
// The callback runs on the watcher's own thread, which ends with the object.
#ifndef REFITD_TESTS_DEMO_UPDATE_WATCHER_H_
#define REFITD_TESTS_DEMO_UPDATE_WATCHER_H_

#include <functional>
#include <string>
#include <thread>

#include "daemon/refitctl/operator_client.h"

namespace refitd::demo {

class UpdateWatcher {
 public:
  UpdateWatcher(const refitctl::OperatorClient& client, const std::string& group,
                std::function<void(const v1::UpdateStatus&)> on_update) {
    v1::WatchUpdatesRequest request;
    request.set_group(group);
    request.set_interval_ms(
        20);  // the service's finest interval, since the kill follows from what is seen here
    reader_ = client.stub().WatchUpdates(&context_, request);
    thread_ = std::thread([this, on_update = std::move(on_update)] {
      v1::UpdateStatus update;
      while (reader_->Read(&update)) on_update(update);
      reader_->Finish();
    });
  }
  ~UpdateWatcher() {
    context_.TryCancel();
    thread_.join();
  }
  UpdateWatcher(const UpdateWatcher&) = delete;
  UpdateWatcher& operator=(const UpdateWatcher&) = delete;

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::UpdateStatus>> reader_;
  std::thread thread_;
};

}  // namespace refitd::demo

#endif  // REFITD_TESTS_DEMO_UPDATE_WATCHER_H_
