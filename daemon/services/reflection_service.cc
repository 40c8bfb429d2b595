#include "daemon/services/reflection_service.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>

#include "daemon/services/common.h"

namespace refitd {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using grpc::reflection::v1alpha::ServerReflectionRequest;
using grpc::reflection::v1alpha::ServerReflectionResponse;

constexpr size_t kMaxShownName = 256;  // of an unknown name, in its error

void NotFound(const std::string& what, const std::string& name,
              ServerReflectionResponse* response) {
  response->mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
  response->mutable_error_response()->set_error_message(
      fmt::format("no {} '{}'", what, Shorten(name, kMaxShownName)));
}

// Adds the file and those that it imports, each once.
void AddFile(const FileDescriptor* file, std::set<const FileDescriptor*>* seen,
             ServerReflectionResponse* response) {
  if (!seen->insert(file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  response->mutable_file_descriptor_response()->add_file_descriptor_proto(
      proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), seen, response);
}

void Answer(const FileDescriptor* file, const std::string& what, const std::string& name,
            ServerReflectionResponse* response) {
  if (file == nullptr) return NotFound(what, name, response);
  std::set<const FileDescriptor*> seen;
  AddFile(file, &seen, response);
}

// One caller's stream: a request is read, answered, and then the next. Deletes itself.
class Reflector final
    : public grpc::ServerBidiReactor<ServerReflectionRequest, ServerReflectionResponse> {
 public:
  Reflector(const absl::Status& admitted, const std::vector<std::string>& services)
      : services_(services) {
    if (admitted.ok()) {
      StartRead(&request_);
    } else {
      Finish(ToGrpc(admitted));
    }
  }
  void OnReadDone(bool ok) noexcept override {
    if (!ok) return Finish(grpc::Status::OK);
    response_ = Reflect(request_, services_);
    StartWrite(&response_);
  }
  void OnWriteDone(bool ok) noexcept override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&request_);
  }
  void OnDone() noexcept override { delete this; }

 private:
  const std::vector<std::string>& services_;
  ServerReflectionRequest request_;
  ServerReflectionResponse response_;
};

}  // namespace

ServerReflectionResponse Reflect(const ServerReflectionRequest& request,
                                 const std::vector<std::string>& services) {
  ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  const DescriptorPool* const pool = DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kFileByFilename:
      Answer(pool->FindFileByName(request.file_by_filename()), "file", request.file_by_filename(),
             &response);
      break;
    case ServerReflectionRequest::kFileContainingSymbol:
      Answer(pool->FindFileContainingSymbol(request.file_containing_symbol()), "symbol",
             request.file_containing_symbol(), &response);
      break;
    case ServerReflectionRequest::kFileContainingExtension: {
      const auto& asked = request.file_containing_extension();
      const auto* type = pool->FindMessageTypeByName(asked.containing_type());
      const FieldDescriptor* extension =
          type == nullptr ? nullptr : pool->FindExtensionByNumber(type, asked.extension_number());
      Answer(extension == nullptr ? nullptr : extension->file(), "extension of",
             asked.containing_type(), &response);
      break;
    }
    case ServerReflectionRequest::kAllExtensionNumbersOfType: {
      const std::string& name = request.all_extension_numbers_of_type();
      const auto* type = pool->FindMessageTypeByName(name);
      if (type == nullptr) {
        NotFound("type", name, &response);
        break;
      }
      std::vector<const FieldDescriptor*> extensions;
      pool->FindAllExtensions(type, &extensions);
      auto* numbers = response.mutable_all_extension_numbers_response();
      numbers->set_base_type_name(name);
      for (const FieldDescriptor* each : extensions) numbers->add_extension_number(each->number());
      break;
    }
    case ServerReflectionRequest::kListServices:
      for (const std::string& name : services) {
        response.mutable_list_services_response()->add_service()->set_name(name);
      }
      break;
    default:
      response.mutable_error_response()->set_error_code(grpc::StatusCode::INVALID_ARGUMENT);
      response.mutable_error_response()->set_error_message("message_request: nothing is asked");
  }
  return response;
}

grpc::ServerBidiReactor<ServerReflectionRequest, ServerReflectionResponse>*
ReflectionService::ServerReflectionInfo(grpc::CallbackServerContext* context) noexcept {
  return new Reflector(authorizer_->Admit(*context, {Rpc::kReflectionInfo}).status(), services_);
}

}  // namespace refitd
