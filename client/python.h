// Torch tensors as Python objects, read without a compiled extension of any Python version: by the
// table of functions that DLPack (1.2 and later) puts at the tensors' type, and by functions of
// Python's stable ABI, which are looked up in the process. Nothing of Python is linked, and nothing
// else of this library needs Python.
//
// python.cc also defines the functions refit_python_* of refit_python.h, except those that call the
// functions below. All are called with the interpreter lock held, which also guards what python.cc
// keeps. An object is a PyObject*.
#ifndef REFITD_CLIENT_PYTHON_H_
#define REFITD_CLIENT_PYTHON_H_

#include <memory>

#include "absl/status/status.h"
#include "client/packer.h"
#include "client/refit_python.h"

namespace refitd::client {

// Sets how tensors are read, for the rest of the process. FAILED_PRECONDITION where this Python or
// this table is not known.
absl::Status UsePython(const refit_python& python);

// Makes a built-in function push(name, tensor), which puts a tensor that the packer knows into the
// packer's bucket and tells whether it did. Returns a new reference, or null with an exception set.
void* MakePusher(std::shared_ptr<Packer> packer);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_PYTHON_H_
