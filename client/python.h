// Torch tensors as Python objects, read without a compiled extension of any Python version: by the
// table of functions that DLPack (1.2 and later) puts at the tensors' type, and by functions of
// Python's stable ABI, which are looked up in the process. Nothing of Python is linked, and nothing
// else of this library needs Python.
//
// All functions are called with the interpreter lock held, which also guards what this file keeps.
// An object is a PyObject*.
#ifndef REFITD_CLIENT_PYTHON_H_
#define REFITD_CLIENT_PYTHON_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "client/packer.h"
#include "client/refit_python.h"

namespace refitd::client {

// Sets how tensors are read, for the rest of the process. FAILED_PRECONDITION where this Python or
// this table is not known.
absl::Status UsePython(const refit_python& python);

// Names a type whose tensors have memory of their own.
void AddPlainType(void* type);

// Makes a built-in function push(name, tensor), which puts a tensor that the packer knows into the
// packer's bucket and tells whether it did. Returns a new reference, or null with an exception set.
void* MakePusher(std::shared_ptr<Packer> packer);

// Makes a built-in function call(cancel, a, b, c): calls `function` with three addresses, on
// Python's main thread, as refit_python_watched says. Returns a new reference, or null.
using WatchedFunction = refit_status(void*, void*, void*);
void* MakeWatched(WatchedFunction* function);

// Returns the index of the first tensor whose memory does not begin at its address, or that can't
// be read; `count` if there is none.
int64_t FirstMoved(void* const* tensors, const int64_t* addresses, int64_t count);

// Writes for each tensor a mark of its address, element type, shape and strides; 0 for a tensor
// that can't be read.
void Mark(void* const* tensors, uint64_t* marks, int64_t count);

// Returns the index of the first tensor that has another mark now, or can't be read; `count` if
// there is none.
int64_t FirstChanged(void* const* tensors, const uint64_t* marks, int64_t count);

// Returns the index of the first dict that has another value under its key, or none; `count` if
// there is none. Keys are texts.
int64_t FirstRebound(void* const* dicts, void* const* keys, void* const* values, int64_t count);

// Returns the index of the first dict that has other entries, or in another order; `count` if there
// is none. Dict i has sizes[i] entries; `entries` has keys and values of one dict after the other.
int64_t FirstAltered(void* const* dicts, const int64_t* sizes, void* const* entries, int64_t count);

// Makes Python tell of changes of the dicts: of all, or with `attributes` of the attributes by
// which a torch module names its tensors and modules. False: this Python does not tell.
bool WatchDicts(void* const* dicts, int64_t count, bool attributes);

// Grows before any dict that is watched changes.
int64_t DictChanges();

}  // namespace refitd::client

#endif  // REFITD_CLIENT_PYTHON_H_
