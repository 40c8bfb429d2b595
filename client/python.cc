#include "client/python.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "client/dlpack.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

// Tensors up to this size are copied with the interpreter lock held; letting it go and taking it
// again costs more.
constexpr int64_t kMostBytesLocked = 256 << 10;
constexpr int kFastCall = 0x80;  // METH_FASTCALL

// PyMethodDef, of the stable ABI.
struct MethodDef {
  const char* name;
  void* (*function)(void* self, void* const* arguments, intptr_t count);
  int flags;
  const char* doc;
};

// Functions of Python's stable ABI (3.10 and later).
struct PythonFunctions {
  void (*inc_ref)(void*);
  void (*dec_ref)(void*);
  void (*clear_error)();
  void* (*bool_from)(long);  // NOLINT(google-runtime-int): Python's own type
  int (*is_true)(void*);
  long long (*integer)(void*);  // NOLINT(google-runtime-int)
  const char* (*utf8)(void*, intptr_t*);
  void* (*type_of)(void*);
  void* (*call)(void*, ...);
  void* (*new_capsule)(void*, const char*, void (*)(void*));
  void* (*capsule_pointer)(void*, const char*);
  void* (*new_function)(MethodDef*, void*, void*);
};

struct State {
  bool ready = false;
  PythonFunctions py{};
  refit_python tensors{};
  std::vector<void*> types;  // plain tensors' types
};

State& Global() {
  static State state;
  return state;
}

template <typename Function>
absl::Status Find(const char* name, Function* function) {
  void* found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "Python's function {} is not there", name);
  }
  *function = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

absl::StatusOr<PythonFunctions> FindFunctions() {
  PythonFunctions py{};
  REFITD_RETURN_IF_ERROR(Find("Py_IncRef", &py.inc_ref));
  REFITD_RETURN_IF_ERROR(Find("Py_DecRef", &py.dec_ref));
  REFITD_RETURN_IF_ERROR(Find("PyErr_Clear", &py.clear_error));
  REFITD_RETURN_IF_ERROR(Find("PyBool_FromLong", &py.bool_from));
  REFITD_RETURN_IF_ERROR(Find("PyObject_IsTrue", &py.is_true));
  REFITD_RETURN_IF_ERROR(Find("PyLong_AsLongLong", &py.integer));
  REFITD_RETURN_IF_ERROR(Find("PyUnicode_AsUTF8AndSize", &py.utf8));
  REFITD_RETURN_IF_ERROR(Find("PyObject_Type", &py.type_of));
  REFITD_RETURN_IF_ERROR(Find("PyObject_CallFunctionObjArgs", &py.call));
  REFITD_RETURN_IF_ERROR(Find("PyCapsule_New", &py.new_capsule));
  REFITD_RETURN_IF_ERROR(Find("PyCapsule_GetPointer", &py.capsule_pointer));
  REFITD_RETURN_IF_ERROR(Find("PyCFunction_NewEx", &py.new_function));
  return py;
}

bool Failed() {
  Global().py.clear_error();
  return false;
}

// Calls a method of `object`, and returns the result as a number; nullopt if the call fails.
std::optional<int64_t> Ask(void* method, void* object) {
  const PythonFunctions& py = Global().py;
  void* answer = py.call(method, object, nullptr);
  if (answer == nullptr) {
    Failed();
    return std::nullopt;
  }
  const int64_t number = py.integer(answer);  // takes a bool as well
  py.dec_ref(answer);
  if (number == -1) Failed();  // no method that is asked has such a result
  return number == -1 ? std::nullopt : std::optional<int64_t>(number);
}

// Finds the size of the storage in bytes and the tensor's first element in the storage, by torch's
// own C functions, which take the address of the at::Tensor in the object.
bool AskStorage(void* tensor, int64_t* bytes, int64_t* start) {
  const refit_python& tensors = Global().tensors;
  void* handle = static_cast<char*>(tensor) + tensors.implementation_at;
  return tensors.get_storage_bytes(handle, bytes) == 0 &&
         tensors.get_storage_offset(handle, start) == 0;
}

// Finds the same by methods of Python.
bool AskStorageByMethods(void* tensor, int64_t* bytes, int64_t* start) {
  const State& state = Global();
  void* storage = state.py.call(state.tensors.storage, tensor, nullptr);
  if (storage == nullptr) return Failed();
  const std::optional<int64_t> found = Ask(state.tensors.storage_bytes, storage);
  state.py.dec_ref(storage);
  const std::optional<int64_t> first = Ask(state.tensors.storage_offset, tensor);
  *bytes = found.value_or(0);
  *start = first.value_or(0);
  return found.has_value() && first.has_value();
}

// Whether a plain tensor's storage has all bytes of `known`: sharded training frees the memory of
// gathered parameters between uses, and leaves the shape.
bool HasMemory(void* tensor, int64_t nbytes, int64_t itemsize) {
  const refit_python& tensors = Global().tensors;
  const bool by_functions = tensors.implementation_at > 0 && tensors.get_storage_bytes != nullptr &&
                            tensors.get_storage_offset != nullptr;
  int64_t bytes = 0;
  int64_t start = 0;
  return (by_functions ? AskStorage(tensor, &bytes, &start)
                       : AskStorageByMethods(tensor, &bytes, &start)) &&
         bytes >= nbytes + start * itemsize;
}

// Whether an object's type was added as one of plain tensors: others may be tensors without memory
// of their own, or no tensors.
bool IsPlain(void* object) {
  const State& state = Global();
  void* type = state.py.type_of(object);
  state.py.dec_ref(type);  // the object keeps it
  return std::find(state.types.begin(), state.types.end(), type) != state.types.end();
}

bool Show(void* object, DlpackTensor* shown) {
  const auto* table = static_cast<const DlpackExchange*>(Global().tensors.exchange);
  return table->show(object, shown) == 0 || Failed();
}

// Puts a tensor into the packer's bucket if it is the tensor that the packer knows by this name. If
// it is not, nothing changes and the result is false: the caller then looks at the tensor more
// closely.
bool PutTensor(Packer* packer, void* name, void* tensor) {
  const State& state = Global();
  intptr_t length = 0;
  const char* text = state.py.utf8(name, &length);
  if (text == nullptr) return Failed();
  const int64_t number = packer->known()->Find({text, static_cast<size_t>(length)});
  if (number < 0) return false;
  const KnownTensor* known = &packer->known()->At(number);
  const int64_t bytes = known->bytes;
  DlpackTensor shown;
  if (bytes > kMostBytesLocked || bytes > packer->RoomFor(number) || !IsPlain(tensor) ||
      !Show(tensor, &shown) || !known->Matches(shown) ||
      !HasMemory(tensor, bytes, ElementBytes(known->spec.dtype)) ||
      Ask(state.tensors.is_negated, tensor) != 0) {
    return false;
  }
  // Methods may run a finalizer, which may run anything, so check that the packer still knows the
  // tensor.
  if (&packer->known()->At(number) != known || known->bytes != bytes) return false;
  return packer->Put(number, static_cast<const char*>(shown.data) + shown.byte_offset);
}

constexpr char kCapsule[] = "refitd.packer";

void FreeCapsule(void* capsule) {
  delete static_cast<std::shared_ptr<Packer>*>(Global().py.capsule_pointer(capsule, kCapsule));
}

void* Push(void* self, void* const* arguments, intptr_t count) {
  const PythonFunctions& py = Global().py;
  bool put = false;
  auto* packer = static_cast<std::shared_ptr<Packer>*>(py.capsule_pointer(self, kCapsule));
  if (packer == nullptr) return nullptr;
  try {
    put = count == 2 && PutTensor(packer->get(), arguments[0], arguments[1]);
  } catch (const std::exception&) {
    put = false;  // out of memory, as the caller's other way will tell
  }
  return py.bool_from(put ? 1 : 0);
}

MethodDef push_method = {"push", &Push, kFastCall, nullptr};

// Asks the processor for memory that will be read soon. Any address will do, because nothing is
// read at it.
void Prefetch(const void* address) {
  __builtin_prefetch(address);
  __builtin_prefetch(static_cast<const char*>(address) + 64);
}

const void* PointerAt(const void* base, int64_t offset) {
  return base == nullptr ? nullptr
                         : *reinterpret_cast<void* const*>(static_cast<const char*>(base) + offset);
}

// Walks ahead of a reader of many tensors. The tensors' objects lie scattered, and waiting for each
// of them would take ten times as long as reading them.
void ReadAhead(void* const* objects, int64_t index, int64_t count) {
  const refit_python& tensors = Global().tensors;
  // The object is asked for 12 tensors ahead, its implementation 8 ahead, and its storage 4 ahead,
  // because each is found only in the memory of the one before.
  if (index + 12 < count) Prefetch(objects[index + 12]);
  if (tensors.implementation_at <= 0) return;
  if (index + 8 < count) Prefetch(PointerAt(objects[index + 8], tensors.implementation_at));
  if (tensors.storage_at <= 0 || index + 4 >= count) return;
  const void* implementation = PointerAt(objects[index + 4], tensors.implementation_at);
  Prefetch(PointerAt(implementation, tensors.storage_at));
}

// Finds where the tensor's memory begins; false where that can't be told.
bool AddressOf(void* tensor, int64_t* address) {
  const refit_python& tensors = Global().tensors;
  if (tensors.implementation_at > 0 && tensors.get_address != nullptr) {
    void* found = nullptr;
    void* handle = static_cast<char*>(tensor) + tensors.implementation_at;
    if (tensors.get_address(handle, &found) != 0) return false;
    *address = reinterpret_cast<intptr_t>(found);
    return true;
  }
  DlpackTensor shown;
  if (!Show(tensor, &shown)) return false;
  *address = reinterpret_cast<intptr_t>(shown.data) + static_cast<int64_t>(shown.byte_offset);
  return true;
}

}  // namespace

absl::Status UsePython(const refit_python& python) {
  State& state = Global();
  if (state.ready) return absl::OkStatus();
  REFITD_ASSIGN_OR_RETURN(state.py, FindFunctions());
  const auto* table = static_cast<const DlpackExchange*>(python.exchange);
  while (table != nullptr && table->major != kDlpackMajor) table = table->previous;
  if (table == nullptr || table->minor < kDlpackFirstMinor || table->show == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "the tensors have no DLPack 1.2 table");
  }
  state.tensors = python;
  state.tensors.exchange = table;
  for (void* method :
       {python.is_negated, python.storage, python.storage_bytes, python.storage_offset}) {
    if (method == nullptr) {
      return Error(absl::StatusCode::kInvalidArgument, "a method of the tensors is NULL");
    }
    state.py.inc_ref(method);  // for good
  }
  state.ready = true;
  return absl::OkStatus();
}

void AddPlainType(void* type) {
  State& state = Global();
  if (!state.ready ||
      std::find(state.types.begin(), state.types.end(), type) != state.types.end()) {
    return;
  }
  state.types.push_back(type);
  state.py.inc_ref(type);  // for good
}

void* MakePusher(std::shared_ptr<Packer> packer) {
  const PythonFunctions& py = Global().py;
  if (!Global().ready) return nullptr;
  auto held = std::make_unique<std::shared_ptr<Packer>>(std::move(packer));
  void* capsule = py.new_capsule(held.get(), kCapsule, &FreeCapsule);
  if (capsule == nullptr) return nullptr;
  held.release();
  void* function = py.new_function(&push_method, capsule, nullptr);
  py.dec_ref(capsule);  // the function keeps it
  return function;
}

int64_t FirstMoved(void* const* tensors, const int64_t* addresses, int64_t count) {
  if (!Global().ready) return 0;
  for (int64_t i = 0; i < count; ++i) {
    ReadAhead(tensors, i, count);
    int64_t address = 0;
    if (!AddressOf(tensors[i], &address) || address != addresses[i]) return i;
  }
  return count;
}

}  // namespace refitd::client
