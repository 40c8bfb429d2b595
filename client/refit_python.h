/* refit_python.h: what the Python package needs of librefit.so beyond refit.h. It changes with any
 * release of the package, which carries its own librefit.so: C programs use refit.h alone.
 *
 * All functions but refit_packer_push() are called with Python's interpreter lock held
 * (ctypes.PyDLL), which guards what they share.
 */
#ifndef REFITD_CLIENT_REFIT_PYTHON_H_
#define REFITD_CLIENT_REFIT_PYTHON_H_

#include "client/refit.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- packing many tensors ---- */

/* A packer copies tensors one after the other into the memory of a bucket, and keeps the bucket's
 * lists. It knows tensors by numbers, since most are the same in every update. */
typedef struct refit_packer refit_packer;
/* Makes a packer without a bucket, which knows what `like` knows now and later; NULL: nothing. */
refit_status refit_packer_new(const refit_packer* like, refit_packer** packer);
void refit_packer_free(refit_packer* packer);
/* Makes a tensor known, in place of the tensor of this name, and tells its number, which the name
 * keeps. Start and count are ignored. */
refit_status refit_packer_learn(refit_packer* packer, const refit_tensor* tensor, int64_t* number);
/* Begins an empty bucket in `bytes` bytes at `data`, which is NULL where only the caller can copy
 * to the memory (on a GPU). A bucket that was begun before is dropped. */
refit_status refit_packer_begin(refit_packer* packer, void* data, int64_t bytes);
/* The number of tensors, or parts of tensors, in the bucket. */
int64_t refit_packer_count(const refit_packer* packer);
/* The bytes that are left in the bucket for a tensor. -1: there is no bucket or no such tensor, or
 * the bucket has the tensor already (a second part of it belongs into another bucket). */
int64_t refit_packer_room(const refit_packer* packer, int64_t number);
/* Reserves `bytes` of the room, which the caller copies to, and then adds elements [start, start +
 * count) of the tensor there. REFIT_RESOURCE_EXHAUSTED: the room is smaller. */
refit_status refit_packer_reserve(refit_packer* packer, int64_t number, int64_t bytes,
                                  int64_t* byte_offset);
refit_status refit_packer_add(refit_packer* packer, int64_t number, int64_t start, int64_t count,
                              int64_t byte_offset);
/* Ends the bucket: nothing is put into it any more. */
void refit_packer_end(refit_packer* packer);
/* Pushes the bucket that was ended last as refit_update_push_async() does. `slot`: the slot in
 * whose memory the packer's bucket was begun, which the push empties, whatever its status; NULL:
 * the bytes of that memory travel inside the call. It blocks as that function does, so call it
 * without the interpreter lock; until it returns only the pusher may use the packer.
 * REFIT_FAILED_PRECONDITION: the packer's bucket was not ended, or the slot was pushed before. */
refit_status refit_packer_push(const refit_packer* packer, refit_update* update, refit_slot* slot,
                               refit_done done, void* argument);

/* ---- calls of the main thread ---- */

/* Makes a built-in function call(cancel, a, b, c) of a function of this library at `function` that
 * takes three addresses and returns a status. The call does not hold the interpreter lock, and lets
 * signal handlers run while it waits for an answer. If a handler raises, cancel() is called again
 * and again, which should end the wait soon, for 5 s at most, and what the handler raised is raised
 * when the function has returned. The result is a new reference; NULL: Python is of no known kind,
 * or an exception is set. */
void* refit_python_watched(const void* function);

/* ---- tensors as Python objects ---- */

/* Objects are PyObject*. These functions use Python's stable ABI, which they look up in the
 * process: nothing of Python is linked. Interpreters without a lock are not supported. */
typedef struct refit_python {
  size_t struct_size;
  const void* exchange; /* the table of the capsule "dlpack_exchange_api" of the tensors' type */
  /* Methods of the type, which are called with the tensor, or the tensor's storage. */
  void* is_negated;     /* whether the elements are the negation of what memory has */
  void* storage;        /* the object of the tensor's storage */
  void* storage_bytes;  /* of a storage: its bytes */
  void* storage_offset; /* elements from the storage's begin to the tensor's first */
  /* Two byte offsets, by which tensors are read ahead: that of the pointer to the implementation
   * in the tensor's object, and that of the pointer to the storage in the implementation. 0: not
   * known. */
  int64_t implementation_at;
  int64_t storage_at;
  /* With implementation_at: functions that take the place of that pointer, tell the storage's
   * bytes, the tensor's first element in the storage, and the address of that element, and return 0
   * (torch's aoti_torch_get_storage_size, aoti_torch_get_storage_offset, aoti_torch_get_data_ptr).
   * NULL: the methods and the table are used, which takes longer. */
  int32_t (*get_storage_bytes)(void* implementation, int64_t* bytes);
  int32_t (*get_storage_offset)(void* implementation, int64_t* offset);
  int32_t (*get_address)(void* implementation, void** address);
  /* The same for the element type's number, the number of dimensions, and the lists of sizes and
   * strides, which stay the tensor's (aoti_torch_get_dtype, aoti_torch_get_dim,
   * aoti_torch_get_sizes, aoti_torch_get_strides). All four or NULL. */
  int32_t (*get_dtype)(void* implementation, int32_t* dtype);
  int32_t (*get_dim)(void* implementation, int64_t* dim_count);
  int32_t (*get_sizes)(void* implementation, int64_t** sizes);
  int32_t (*get_strides)(void* implementation, int64_t** strides);
} refit_python;
#define REFIT_PYTHON_INIT \
  { .struct_size = sizeof(refit_python) }

/* Sets how tensors are read, once a process. REFIT_FAILED_PRECONDITION: Python or the table is of
 * no known kind, and the functions below do nothing. */
refit_status refit_python_use(const refit_python* python);
/* Names a type (PyTypeObject*) whose tensors have memory of their own, unlike other subclasses. */
void refit_python_add_type(void* type);
/* Makes a built-in function push(name, tensor) of the packer. It copies the tensor into the bucket
 * and returns True if the tensor is of one of these types, is the known tensor of that name, and is
 * whole, contiguous and on the host; else it returns False and has done nothing. The result is a
 * new reference, which keeps the packer; NULL: refit_python_use() was not successful, or a Python
 * exception is set. */
void* refit_python_pusher(const refit_packer* packer);
/* The four functions refit_python_first_...() return the index of the first of `count` objects that
 * is another than before; `count`: there is none. Before refit_python_use() was successful they
 * look at nothing and return 0, so that the caller compares by itself, as after a difference. */
/* Looks for a tensor, an object of the type or its subclasses, whose memory does not begin at its
 * address. */
int64_t refit_python_first_moved(void* const* tensors, const int64_t* addresses, int64_t count);
/* Writes for each of `count` tensors a mark of its address, element type, shape and strides; 0: the
 * tensor can't be read, or refit_python_use() was not successful. */
void refit_python_marks(void* const* tensors, uint64_t* marks, int64_t count);
/* Looks for a tensor that has another mark now, or can't be read. */
int64_t refit_python_first_changed(void* const* tensors, const uint64_t* marks, int64_t count);
/* Looks for a dict that has another value, or none, under its key, a text. */
int64_t refit_python_first_rebound(void* const* dicts, void* const* keys, void* const* values,
                                   int64_t count);
/* Looks for a dict that has other entries than before, or has them in another order. Dict i had
 * sizes[i] entries; `entries` has the key and the value of each, of one dict after the other. */
int64_t refit_python_first_altered(void* const* dicts, const int64_t* sizes, void* const* entries,
                                   int64_t count);
/* Makes Python (3.12 or later) tell of changes of these dicts, so that they need not be compared:
 * of all changes, or with `attributes` not 0 of those of the attributes _parameters, _buffers and
 * _modules. Returns 1; 0: this Python does not tell. */
int32_t refit_python_watch_dicts(void* const* dicts, int64_t count, int32_t attributes);
/* Returns a number that grows before any dict that is watched changes. */
int64_t refit_python_dict_changes(void);

#ifdef __cplusplus
}
#endif

#endif /* REFITD_CLIENT_REFIT_PYTHON_H_ */
