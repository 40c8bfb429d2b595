#include "client/python.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "client/dlpack.h"
#include "client/watch.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

// Tensors up to this size are copied with the interpreter lock held; letting it go and taking it
// again costs more.
constexpr int64_t kMostBytesLocked = 256 << 10;
constexpr int kFastCall = 0x80;           // METH_FASTCALL
constexpr int64_t kPrefetchDistance = 8;  // how many entries ahead of the current one

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
  void* (*bool_from)(long);     // NOLINT(google-runtime-int): Python's own type
  void* (*integer_from)(long);  // NOLINT(google-runtime-int)
  int (*is_true)(void*);
  long long (*integer)(void*);  // NOLINT(google-runtime-int)
  void* (*pointer)(void*);
  const char* (*utf8)(void*, intptr_t*);
  void* (*type_of)(void*);
  void* (*call)(void*, ...);
  void* (*new_capsule)(void*, const char*, void (*)(void*));
  void* (*capsule_pointer)(void*, const char*);
  void* (*new_function)(MethodDef*, void*, void*);
  void* (*dict_get)(void* dict, void* key);  // a borrowed reference
  intptr_t (*dict_size)(void* dict);
  int (*dict_next)(void* dict, intptr_t* position, void** key, void** value);  // borrowed too
  void* (*save_thread)();         // lets the interpreter lock go
  void (*restore_thread)(void*);  // takes it again
  int (*check_signals)();         // runs handlers; not 0: one of them raised
  void (*fetch_error)(void** type, void** value, void** trace);
  void (*restore_error)(void* type, void* value, void* trace);  // takes the references
};

// PyDict_WatchCallback: called before a dict changes.
using DictCallback = int(int event, void* dict, void* key, void* value);

// Functions of Python 3.12 and later; null in others.
struct DictWatching {
  int (*add)(DictCallback*) = nullptr;  // returns the watcher's number, or -1
  int (*watch)(int watcher, void* dict) = nullptr;
  int held = -1;        // the watcher of dicts of which all entries count
  int attributes = -1;  // of dicts of modules' attributes
  bool tried = false;
};

struct State {
  bool ready = false;
  PythonFunctions py{};
  refit_python tensors{};
  std::vector<void*> types;  // plain tensors' types
  DictWatching watching;
  int64_t changes = 0;  // of dicts that are watched
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
  REFITD_RETURN_IF_ERROR(Find("PyLong_FromLong", &py.integer_from));
  REFITD_RETURN_IF_ERROR(Find("PyObject_IsTrue", &py.is_true));
  REFITD_RETURN_IF_ERROR(Find("PyLong_AsLongLong", &py.integer));
  REFITD_RETURN_IF_ERROR(Find("PyLong_AsVoidPtr", &py.pointer));
  REFITD_RETURN_IF_ERROR(Find("PyUnicode_AsUTF8AndSize", &py.utf8));
  REFITD_RETURN_IF_ERROR(Find("PyObject_Type", &py.type_of));
  REFITD_RETURN_IF_ERROR(Find("PyObject_CallFunctionObjArgs", &py.call));
  REFITD_RETURN_IF_ERROR(Find("PyCapsule_New", &py.new_capsule));
  REFITD_RETURN_IF_ERROR(Find("PyCapsule_GetPointer", &py.capsule_pointer));
  REFITD_RETURN_IF_ERROR(Find("PyCFunction_NewEx", &py.new_function));
  REFITD_RETURN_IF_ERROR(Find("PyDict_GetItemWithError", &py.dict_get));
  REFITD_RETURN_IF_ERROR(Find("PyDict_Size", &py.dict_size));
  REFITD_RETURN_IF_ERROR(Find("PyDict_Next", &py.dict_next));
  REFITD_RETURN_IF_ERROR(Find("PyEval_SaveThread", &py.save_thread));
  REFITD_RETURN_IF_ERROR(Find("PyEval_RestoreThread", &py.restore_thread));
  REFITD_RETURN_IF_ERROR(Find("PyErr_CheckSignals", &py.check_signals));
  REFITD_RETURN_IF_ERROR(Find("PyErr_Fetch", &py.fetch_error));
  REFITD_RETURN_IF_ERROR(Find("PyErr_Restore", &py.restore_error));
  return py;
}

// Finds Python's functions, once.
absl::Status UseFunctions() {
  State& state = Global();
  if (state.py.restore_error != nullptr) return absl::OkStatus();
  REFITD_ASSIGN_OR_RETURN(state.py, FindFunctions());
  return absl::OkStatus();
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

// Whether a plain tensor's storage has `nbytes` bytes from the tensor's first element on: sharded
// training frees the memory of gathered parameters between uses, and leaves the shape.
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
  const PackedTensor* known = &packer->known()->At(number);
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

// The exception that is set, kept apart.
class Exception {
 public:
  ~Exception() { Drop(); }
  bool kept() const { return type_ != nullptr; }
  // Takes the exception that is set, in place of the one before.
  void Keep() {
    Drop();
    Global().py.fetch_error(&type_, &value_, &trace_);
  }
  // Sets the exception again.
  void Restore() {
    Global().py.restore_error(std::exchange(type_, nullptr), std::exchange(value_, nullptr),
                              std::exchange(trace_, nullptr));
  }

 private:
  void Drop() {
    for (void** part : {&type_, &value_, &trace_}) {
      if (*part != nullptr) Global().py.dec_ref(std::exchange(*part, nullptr));
    }
  }
  void* type_ = nullptr;
  void* value_ = nullptr;
  void* trace_ = nullptr;
};

using WatchedFunction = refit_status(void*, void*, void*);

// A call of this library by Python's main thread. The call holds no interpreter lock; signal
// handlers run while it waits. After a handler raised, the call is cancelled again and again,
// because there may be nothing to cancel yet, and given up after kCancelled.
class Interruptible {
 public:
  explicit Interruptible(void* cancel) : cancel_(cancel) {}

  int32_t Call(WatchedFunction* function, void* const* arguments) {
    thread_ = Global().py.save_thread();
    int32_t status = 0;
    {
      const Watch watch([this] { return Look(); });
      status = function(arguments[0], arguments[1], arguments[2]);
    }
    Global().py.restore_thread(thread_);
    return status;
  }
  Exception& raised() { return raised_; }

 private:
  static constexpr std::chrono::seconds kCancelled{5};

  bool Look() {
    const PythonFunctions& py = Global().py;
    py.restore_thread(thread_);
    const bool go_on = raised_.kept() || py.check_signals() != 0 ? Cancel() : true;
    thread_ = py.save_thread();
    return go_on;
  }

  bool Cancel() {
    const PythonFunctions& py = Global().py;
    const auto now = std::chrono::steady_clock::now();
    if (!raised_.kept()) {
      raised_.Keep();
      give_up_ = now + kCancelled;
    }
    void* answer = py.call(cancel_, nullptr);
    if (answer == nullptr) {  // interrupted once more
      raised_.Keep();
      return false;
    }
    py.dec_ref(answer);
    return now < give_up_;
  }

  void* const cancel_;
  void* thread_ = nullptr;
  Exception raised_;
  std::chrono::steady_clock::time_point give_up_;
};

constexpr char kFunction[] = "refitd.function";

void* CallWatched(void* self, void* const* arguments, intptr_t count) {
  const PythonFunctions& py = Global().py;
  auto* function = reinterpret_cast<WatchedFunction*>(py.capsule_pointer(self, kFunction));
  if (function == nullptr || count != 4) return py.integer_from(REFIT_INTERNAL);
  void* pointers[3] = {};
  for (int i = 0; i < 3; ++i) pointers[i] = py.pointer(arguments[1 + i]);
  Interruptible call(arguments[0]);
  const int32_t status = call.Call(function, pointers);
  if (!call.raised().kept()) return py.integer_from(status);
  call.raised().Restore();
  return nullptr;
}

MethodDef watched_method = {"call", &CallWatched, kFastCall, nullptr};

// Asks the processor for the two lines of memory at `address`, which will be read soon. Any address
// will do, because nothing is read at it.
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

// Finds where the tensor's memory begins; false where the tensor does not show it.
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

// Puts two numbers into a mark, so that marks of different sequences of numbers differ.
uint64_t Mix(uint64_t mark, int64_t first, int64_t second) {
  mark ^= static_cast<uint64_t>(first) * 0xD6E8FEB86659FD93u +
          static_cast<uint64_t>(second) * 0xA0761D6478BD642Fu;
  mark *= 0x9E3779B97F4A7C15u;
  return mark ^ (mark >> 29);
}

// The mark of a tensor's address, element type, shape and strides.
uint64_t MarkFrom(int64_t address, int64_t type, int64_t dim_count, const int64_t* sizes,
                  const int64_t* strides) {
  uint64_t mark = Mix(1, address, type << 8 | dim_count);
  for (int64_t d = 0; d < dim_count; ++d) mark = Mix(mark, sizes[d], strides[d]);
  return mark | 1;
}

uint64_t MarkByFunctions(const refit_python& tensors, void* tensor) {
  void* handle = static_cast<char*>(tensor) + tensors.implementation_at;
  void* address = nullptr;
  int32_t type = 0;
  int64_t dim_count = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  const bool seen =
      tensors.get_address(handle, &address) == 0 && tensors.get_dtype(handle, &type) == 0 &&
      tensors.get_dim(handle, &dim_count) == 0 && tensors.get_sizes(handle, &sizes) == 0 &&
      tensors.get_strides(handle, &strides) == 0;
  return seen ? MarkFrom(reinterpret_cast<intptr_t>(address), type, dim_count, sizes, strides) : 0;
}

uint64_t MarkByTable(void* tensor) {
  DlpackTensor shown;
  if (!Show(tensor, &shown) || shown.strides == nullptr) return 0;
  return MarkFrom(reinterpret_cast<intptr_t>(shown.data) + static_cast<int64_t>(shown.byte_offset),
                  shown.type.code << 8 | shown.type.bits, shown.dim_count, shown.shape,
                  shown.strides);
}

// 0: the tensor can't be read.
uint64_t MarkOf(void* tensor) {
  const refit_python& tensors = Global().tensors;
  const bool by_functions = tensors.implementation_at > 0 && tensors.get_address != nullptr &&
                            tensors.get_dtype != nullptr;
  return by_functions ? MarkByFunctions(tensors, tensor) : MarkByTable(tensor);
}

// Walks ahead of a reader of many dicts, which lie scattered. A dict has pointers to its keys and
// values; where it has something else there, the processor is asked for memory in vain.
void ReadDictAhead(const void* dict) {
  constexpr int64_t kKeysAt = 32;  // in CPython 3.10 to 3.14; a dict object has 48 bytes or more
  constexpr int64_t kValuesAt = 40;
  Prefetch(PointerAt(dict, kKeysAt));
  if (const void* values = PointerAt(dict, kValuesAt); values != nullptr) Prefetch(values);
}

// Whether the dict has these entries, keys and values, in this order.
bool HasEntries(void* dict, void* const* entries, int64_t size) {
  const PythonFunctions& py = Global().py;
  if (size == 0) return py.dict_size(dict) == 0;
  intptr_t position = 0;
  void* key = nullptr;
  void* value = nullptr;
  for (int64_t e = 0; e < size; ++e) {
    if (py.dict_next(dict, &position, &key, &value) == 0 || key != entries[2 * e] ||
        value != entries[2 * e + 1]) {
      return false;
    }
  }
  return py.dict_next(dict, &position, &key, &value) == 0;
}

int NoteChange(int /*event*/, void* /*dict*/, void* /*key*/, void* /*value*/) {
  ++Global().changes;
  return 0;
}

// A module's attributes change often, as by train() and eval(); those that name tensors do not.
int NoteAttributeChange(int /*event*/, void* /*dict*/, void* key, void* /*value*/) {
  intptr_t length = 0;
  const char* text = key == nullptr ? nullptr : Global().py.utf8(key, &length);
  if (key != nullptr && text == nullptr) Failed();
  const std::string_view name(text == nullptr ? "" : text, static_cast<size_t>(length));
  if (text == nullptr || name == "_parameters" || name == "_buffers" || name == "_modules") {
    ++Global().changes;
  }
  return 0;
}

bool WatchesDicts() {
  State& state = Global();
  DictWatching& watching = state.watching;
  if (!std::exchange(watching.tried, true) && Find("PyDict_AddWatcher", &watching.add).ok() &&
      Find("PyDict_Watch", &watching.watch).ok()) {
    watching.held = watching.add(&NoteChange);
    watching.attributes = watching.add(&NoteAttributeChange);
    if (watching.held < 0 || watching.attributes < 0) Failed();  // others have all watchers
  }
  return watching.held >= 0 && watching.attributes >= 0;
}

}  // namespace

absl::Status UsePython(const refit_python& python) {
  State& state = Global();
  if (state.ready) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(UseFunctions());
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
      return InvalidField("tensors", "a method of the tensors is NULL");
    }
    state.py.inc_ref(method);  // for good
  }
  state.ready = true;
  return absl::OkStatus();
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

extern "C" {

void refit_python_add_type(void* type) {
  State& state = Global();
  if (!state.ready ||
      std::find(state.types.begin(), state.types.end(), type) != state.types.end()) {
    return;
  }
  state.types.push_back(type);
  state.py.inc_ref(type);  // for good
}

void* refit_python_watched(const void* function) {
  if (!UseFunctions().ok()) return nullptr;
  const PythonFunctions& py = Global().py;
  void* capsule = py.new_capsule(const_cast<void*>(function), kFunction, nullptr);
  if (capsule == nullptr) return nullptr;
  void* made = py.new_function(&watched_method, capsule, nullptr);
  py.dec_ref(capsule);  // the function keeps it
  return made;
}

int64_t refit_python_first_moved(void* const* tensors, const int64_t* addresses, int64_t count) {
  if (!Global().ready) return 0;
  for (int64_t i = 0; i < count; ++i) {
    ReadAhead(tensors, i, count);
    int64_t address = 0;
    if (!AddressOf(tensors[i], &address) || address != addresses[i]) return i;
  }
  return count;
}

void refit_python_marks(void* const* tensors, uint64_t* marks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) marks[i] = Global().ready ? MarkOf(tensors[i]) : 0;
}

int64_t refit_python_first_changed(void* const* tensors, const uint64_t* marks, int64_t count) {
  if (!Global().ready) return 0;
  for (int64_t i = 0; i < count; ++i) {
    ReadAhead(tensors, i, count);
    if (const uint64_t mark = MarkOf(tensors[i]); mark == 0 || mark != marks[i]) return i;
  }
  return count;
}

int64_t refit_python_first_rebound(void* const* dicts, void* const* keys, void* const* values,
                                   int64_t count) {
  if (!Global().ready) return 0;
  const PythonFunctions& py = Global().py;
  for (int64_t i = 0; i < count; ++i) {
    if (i + 2 * kPrefetchDistance < count) Prefetch(dicts[i + 2 * kPrefetchDistance]);
    if (i + kPrefetchDistance < count) ReadDictAhead(dicts[i + kPrefetchDistance]);
    void* value = py.dict_get(dicts[i], keys[i]);
    if (value == nullptr) Failed();  // the key is missing, or can't be compared
    if (value != values[i]) return i;
  }
  return count;
}

int64_t refit_python_first_altered(void* const* dicts, const int64_t* sizes, void* const* entries,
                                   int64_t count) {
  if (!Global().ready) return 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + 2 * kPrefetchDistance < count) Prefetch(dicts[i + 2 * kPrefetchDistance]);
    // A dict without entries has neither keys nor values to read.
    if (i + kPrefetchDistance < count && sizes[i + kPrefetchDistance] > 0) {
      ReadDictAhead(dicts[i + kPrefetchDistance]);
    }
    if (!HasEntries(dicts[i], entries, sizes[i])) return i;
    entries += 2 * sizes[i];
  }
  return count;
}

int32_t refit_python_watch_dicts(void* const* dicts, int64_t count, int32_t attributes) {
  if (!Global().ready || !WatchesDicts()) return 0;
  const DictWatching& watching = Global().watching;
  const int watcher = attributes != 0 ? watching.attributes : watching.held;
  for (int64_t i = 0; i < count; ++i) {
    if (watching.watch(watcher, dicts[i]) != 0) return static_cast<int32_t>(Failed());  // 0
  }
  return 1;
}

int64_t refit_python_dict_changes(void) { return Global().changes; }

}  // extern "C"

}  // namespace refitd::client
