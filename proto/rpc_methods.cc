// Prints the methods of all services of a descriptor set as a header of macro calls:
//   REFITD_RPC_METHOD("refitd.v1.Trainer/Attach")
// usage: rpc_methods DESCRIPTOR_SET > HEADER
#include <google/protobuf/descriptor.pb.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace {

void PrintMethods(const google::protobuf::FileDescriptorProto& file) {
  for (const auto& service : file.service()) {
    for (const auto& method : service.method()) {
      const std::string name = file.package() + "." + service.name() + "/" + method.name();
      std::printf("REFITD_RPC_METHOD(\"%s\")\n", name.c_str());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DESCRIPTOR_SET > HEADER\n", argv[0]);
    return 2;
  }
  std::ifstream in(argv[1], std::ios::binary);
  google::protobuf::FileDescriptorSet set;
  if (!set.ParseFromIstream(&in)) {
    std::fprintf(stderr, "%s: no descriptor set\n", argv[1]);
    return 1;
  }
  std::printf(
      "// Made by proto/rpc_methods.cc: the methods of all services that the daemon serves.\n");
  for (const auto& file : set.file()) PrintMethods(file);
  return 0;
}
