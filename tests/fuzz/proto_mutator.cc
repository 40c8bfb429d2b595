#include "tests/fuzz/proto_mutator.h"

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <string>
#include <vector>

// libFuzzer's function; absent if a test replays a corpus.
extern "C" __attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t* data, size_t size,
                                                         size_t max_size);

namespace refitd {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kMaxDepth = 8;           // of nested messages
constexpr size_t kMaxTextBytes = 256;  // of a mutated string or bytes field
constexpr int kMaxElements = 64;       // of a mutated repeated field

// Numbers near limits and overflows.
constexpr std::array<int64_t, 22> kNumbers = {0,
                                              1,
                                              2,
                                              3,
                                              4,
                                              7,
                                              8,
                                              9,
                                              16,
                                              64,
                                              128,
                                              512,
                                              4096,
                                              65'536,
                                              -1,
                                              -8,
                                              int64_t{1} << 31,
                                              int64_t{1} << 44,
                                              int64_t{1} << 48,
                                              int64_t{1} << 62,
                                              std::numeric_limits<int64_t>::max(),
                                              std::numeric_limits<int64_t>::min()};
constexpr std::array<const char*, 8> kTexts = {"", "a", "b", "w", "g", "host", "a.b_c-1", "\n"};

struct Site {
  Message* message;
  const FieldDescriptor* field;
};

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  void Mutate(Message* root) {
    std::vector<Site> sites;
    Collect(root, 0, &sites);
    if (sites.empty()) return;
    const Site site = sites[Below(sites.size())];
    if (site.field->is_repeated()) {
      MutateRepeated(site.message, site.field);
    } else {
      MutateSingular(site.message, site.field);
    }
  }

  void Cross(Message* to, const Message& from) {
    const Descriptor* type = to->GetDescriptor();
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* field = type->field(i);
      if (Chance(2)) continue;
      if (field->is_repeated()) {
        Splice(to, from, field);
      } else if (from.GetReflection()->HasField(from, field)) {
        CopySingular(to, from, field);
      }
    }
  }

  size_t Below(size_t limit) { return random_() % limit; }
  bool Chance(size_t one_in) { return Below(one_in) == 0; }

 private:
  // Collects the places to mutate. Fields that are set weigh more than those that are not.
  void Collect(Message* message, int depth, std::vector<Site>* sites) {
    const Reflection* reflection = message->GetReflection();
    const Descriptor* type = message->GetDescriptor();
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* field = type->field(i);
      const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
      if (is_message && depth >= kMaxDepth) continue;
      if (field->is_repeated()) {
        const int size = reflection->FieldSize(*message, field);
        const int weight = std::clamp(size, 1, 4);
        for (int w = 0; w < weight; ++w) sites->push_back({message, field});
        if (!is_message) continue;
        for (int k = 0; k < size; ++k) {
          Collect(reflection->MutableRepeatedMessage(message, field, k), depth + 1, sites);
        }
        continue;
      }
      const bool there = reflection->HasField(*message, field);
      if (!there && !Chance(4)) continue;
      sites->push_back({message, field});
      if (is_message && there) {
        Collect(reflection->MutableMessage(message, field), depth + 1, sites);
      }
    }
  }

  void MutateSingular(Message* message, const FieldDescriptor* field) {
    const Reflection* reflection = message->GetReflection();
    const bool there = reflection->HasField(*message, field);
    if (there && Chance(8)) {
      reflection->ClearField(message, field);
      return;
    }
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Mutate(reflection->MutableMessage(message, field));
        return;
      case FieldDescriptor::CPPTYPE_STRING:
        reflection->SetString(message, field, Text(reflection->GetString(*message, field), field));
        return;
      case FieldDescriptor::CPPTYPE_BOOL:
        reflection->SetBool(message, field, !reflection->GetBool(*message, field));
        return;
      case FieldDescriptor::CPPTYPE_ENUM:
        reflection->SetEnum(message, field, EnumValue(field));
        return;
      case FieldDescriptor::CPPTYPE_INT32:
        reflection->SetInt32(message, field, Number(reflection->GetInt32(*message, field)));
        return;
      case FieldDescriptor::CPPTYPE_UINT32:
        reflection->SetUInt32(message, field, Number(reflection->GetUInt32(*message, field)));
        return;
      case FieldDescriptor::CPPTYPE_INT64:
        reflection->SetInt64(message, field, Number(reflection->GetInt64(*message, field)));
        return;
      case FieldDescriptor::CPPTYPE_UINT64:
        reflection->SetUInt64(message, field, Number(reflection->GetUInt64(*message, field)));
        return;
      default:
        return;  // no input has floating point fields
    }
  }

  void MutateRepeated(Message* message, const FieldDescriptor* field) {
    const Reflection* reflection = message->GetReflection();
    const int size = reflection->FieldSize(*message, field);
    if (size == 0 || (size < kMaxElements && Chance(4))) {
      AddElement(message, field);
      return;
    }
    const int i = static_cast<int>(Below(size));
    switch (Below(5)) {
      case 0:  // remove element i
        for (int k = i; k + 1 < size; ++k) reflection->SwapElements(message, field, k, k + 1);
        reflection->RemoveLast(message, field);
        return;
      case 1:
        reflection->SwapElements(message, field, i, static_cast<int>(Below(size)));
        return;
      case 2:  // double element i
        if (size >= kMaxElements) return;
        CopyElement(message, *message, field, i);
        for (int k = size; k > i + 1; --k) reflection->SwapElements(message, field, k, k - 1);
        return;
      default:
        MutateElement(message, field, i);
    }
  }

  void MutateElement(Message* message, const FieldDescriptor* field, int i) {
    const Reflection* r = message->GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Mutate(r->MutableRepeatedMessage(message, field, i));
        return;
      case FieldDescriptor::CPPTYPE_STRING:
        r->SetRepeatedString(message, field, i,
                             Text(r->GetRepeatedString(*message, field, i), field));
        return;
      case FieldDescriptor::CPPTYPE_BOOL:
        r->SetRepeatedBool(message, field, i, !r->GetRepeatedBool(*message, field, i));
        return;
      case FieldDescriptor::CPPTYPE_ENUM:
        r->SetRepeatedEnum(message, field, i, EnumValue(field));
        return;
      case FieldDescriptor::CPPTYPE_INT32:
        r->SetRepeatedInt32(message, field, i, Number(r->GetRepeatedInt32(*message, field, i)));
        return;
      case FieldDescriptor::CPPTYPE_UINT32:
        r->SetRepeatedUInt32(message, field, i, Number(r->GetRepeatedUInt32(*message, field, i)));
        return;
      case FieldDescriptor::CPPTYPE_INT64:
        r->SetRepeatedInt64(message, field, i, Number(r->GetRepeatedInt64(*message, field, i)));
        return;
      case FieldDescriptor::CPPTYPE_UINT64:
        r->SetRepeatedUInt64(message, field, i, Number(r->GetRepeatedUInt64(*message, field, i)));
        return;
      default:
        return;
    }
  }

  void AddElement(Message* message, const FieldDescriptor* field) {
    const Reflection* r = message->GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        Message* added = r->AddMessage(message, field);
        for (size_t n = Below(4); n > 0; --n) Mutate(added);
        return;
      }
      case FieldDescriptor::CPPTYPE_STRING:
        r->AddString(message, field, "");
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        r->AddBool(message, field, false);
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        r->AddEnum(message, field, field->default_value_enum());
        break;
      case FieldDescriptor::CPPTYPE_INT32:
        r->AddInt32(message, field, 0);
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        r->AddUInt32(message, field, 0);
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        r->AddInt64(message, field, 0);
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        r->AddUInt64(message, field, 0);
        break;
      default:
        return;
    }
    MutateElement(message, field, r->FieldSize(*message, field) - 1);
  }

  // Appends element i of `from`.
  static void CopyElement(Message* to, const Message& from, const FieldDescriptor* field, int i) {
    const Reflection* r = to->GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        // Copied first, since `from` may be `to`, whose elements move when one is added.
        const Message& element = from.GetReflection()->GetRepeatedMessage(from, field, i);
        Message* copy = element.New();
        copy->CopyFrom(element);
        r->AddAllocatedMessage(to, field, copy);
        return;
      }
      case FieldDescriptor::CPPTYPE_STRING:
        r->AddString(to, field, r->GetRepeatedString(from, field, i));
        return;
      case FieldDescriptor::CPPTYPE_BOOL:
        r->AddBool(to, field, r->GetRepeatedBool(from, field, i));
        return;
      case FieldDescriptor::CPPTYPE_ENUM:
        r->AddEnumValue(to, field, r->GetRepeatedEnumValue(from, field, i));
        return;
      case FieldDescriptor::CPPTYPE_INT32:
        r->AddInt32(to, field, r->GetRepeatedInt32(from, field, i));
        return;
      case FieldDescriptor::CPPTYPE_UINT32:
        r->AddUInt32(to, field, r->GetRepeatedUInt32(from, field, i));
        return;
      case FieldDescriptor::CPPTYPE_INT64:
        r->AddInt64(to, field, r->GetRepeatedInt64(from, field, i));
        return;
      case FieldDescriptor::CPPTYPE_UINT64:
        r->AddUInt64(to, field, r->GetRepeatedUInt64(from, field, i));
        return;
      default:
        return;
    }
  }

  // Keeps the first elements of `to` and appends the last of `from`.
  void Splice(Message* to, const Message& from, const FieldDescriptor* field) {
    const Reflection* r = to->GetReflection();
    const int theirs = r->FieldSize(from, field);
    const int keep = static_cast<int>(Below(r->FieldSize(*to, field) + 1));
    while (r->FieldSize(*to, field) > keep) r->RemoveLast(to, field);
    for (int i = static_cast<int>(Below(theirs + 1)); i < theirs; ++i) {
      if (r->FieldSize(*to, field) >= kMaxElements) return;
      CopyElement(to, from, field, i);
    }
  }

  // Crosses messages field by field; copies any other field.
  void CopySingular(Message* to, const Message& from, const FieldDescriptor* field) {
    const Reflection* r = to->GetReflection();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Cross(r->MutableMessage(to, field), r->GetMessage(from, field));
      return;
    }
    Message* other = from.New();
    other->CopyFrom(from);
    r->SwapFields(to, other, {field});
    delete other;
  }

  const google::protobuf::EnumValueDescriptor* EnumValue(const FieldDescriptor* field) {
    const auto* type = field->enum_type();
    return type->value(static_cast<int>(Below(type->value_count())));
  }

  template <typename T>
  T Number(T value) {
    const auto bits = static_cast<uint64_t>(value);
    uint64_t made = 0;
    switch (Below(8)) {
      case 0:
        made = bits + 1;
        break;
      case 1:
        made = bits - 1;
        break;
      case 2:
        made = bits * 2;
        break;
      case 3:
        made = bits ^ (uint64_t{1} << Below(64));
        break;
      case 4:
        made = Below(16);
        break;
      case 5:
        made = bits + Below(64) * 8 - 256;
        break;
      default:
        made = static_cast<uint64_t>(kNumbers[Below(kNumbers.size())]);
    }
    return static_cast<T>(made);
  }

  std::string Text(std::string text, const FieldDescriptor* field) {
    if (Chance(3)) {
      text = kTexts[Below(kTexts.size())];
    } else if (LLVMFuzzerMutate != nullptr) {
      const size_t size = std::min(text.size(), kMaxTextBytes);
      text.resize(kMaxTextBytes);
      auto* bytes = reinterpret_cast<uint8_t*>(text.data());
      text.resize(LLVMFuzzerMutate(bytes, size, kMaxTextBytes));
    }
    if (field->type() == FieldDescriptor::TYPE_STRING) {  // must be UTF-8
      for (char& c : text) c = static_cast<char>(c & 0x7f);
    }
    return text;
  }

  std::minstd_rand random_;
};

size_t Write(const Message& message, uint8_t* data, size_t max_size) {
  const size_t size = message.ByteSizeLong();
  if (size > max_size) return 0;
  message.SerializePartialToArray(data, static_cast<int>(max_size));
  return size;
}

}  // namespace

size_t MutateProto(uint8_t* data, size_t size, size_t max_size, unsigned seed, Message* scratch) {
  constexpr int kTries = 8;
  Mutator mutator(seed);
  if (mutator.Chance(64) && LLVMFuzzerMutate != nullptr) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  for (int i = 0; i < kTries; ++i) {
    scratch->Clear();
    // Keeps whatever could be parsed.
    [[maybe_unused]] const bool whole =
        scratch->ParsePartialFromArray(data, static_cast<int>(size));
    for (size_t n = mutator.Below(4) + 1; n > 0; --n) mutator.Mutate(scratch);
    if (const size_t made = Write(*scratch, data, max_size); made > 0) return made;
  }
  return size;
}

size_t CrossProtos(const uint8_t* data1, size_t size1, const uint8_t* data2, size_t size2,
                   uint8_t* out, size_t max_size, unsigned seed, Message* scratch, Message* other) {
  if (!scratch->ParsePartialFromArray(data1, static_cast<int>(size1)) ||
      !other->ParsePartialFromArray(data2, static_cast<int>(size2))) {
    return 0;
  }
  Mutator mutator(seed);
  mutator.Cross(scratch, *other);
  return Write(*scratch, out, max_size);
}

}  // namespace refitd
