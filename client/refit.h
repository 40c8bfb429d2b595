/* refit.h: a C interface to refitd's client: trainers push weights, engines receive them.
 *
 * Plain C11. Link with -lrefit; only refit_* symbols are exported. The C++ headers trainer.h and
 * engine.h describe the same conversation in more words; client/examples has runnable programs.
 *
 * A trainer rank attaches once (refit_trainer_attach) and shares memory (refit_trainer_new_region).
 * For every version it pushes: refit_trainer_begin, which returns when every engine has stopped
 * reading its weights; refit_update_push for each bucket; refit_update_commit, which returns when
 * every engine has the version; refit_update_free. Or it registers its shards once
 * (refit_trainer_register), and a version is one call: refit_trainer_refit.
 *
 * An engine rank attaches once (refit_engine_attach), registers its parameters
 * (refit_engine_register) unless it takes loader delivery, and then answers events for as long as
 * it serves. It calls refit_engine_next, and does what the event's kind asks for:
 *
 * - STAGED (only if asked for): prepare what can be while serving, then call
 *   refit_engine_processed.
 * - PREPARE: pause, synchronise the device, then call refit_engine_ready.
 * - PART (loader delivery only): load the views, then call refit_engine_ack.
 * - COMMITTED: resume on the new version.
 * - ABORTED: resume on the old version, unless `dirty`: then stay paused until a COMMITTED.
 *
 * Calls block until they are answered, but not for ever. A call of an update blocks for at most
 * what remains of the update, registering for at most a minute, attaching for at most wait_ms, each
 * with call_margin_ms on top; refit_engine_next blocks for at most its timeout. With reattach_ms,
 * waiting for the next lease may double the time of begin, refit and register.
 *
 * Errors. Functions return a refit_status whose numbers are gRPC's. On an error
 * refit_last_error() says what failed, where, and who was waited for; the text stays until the next
 * call of this library on the same thread. A failed call leaves its results as they were. A null
 * handle or argument gives REFIT_INVALID_ARGUMENT, never a crash.
 *
 * Structures that may grow begin with `struct_size`: initialise them with the REFIT_..._INIT macro,
 * which sets it and leaves every other field 0 ("the default"); in C++, value-initialise and set
 * it. An older, smaller structure is taken as if its missing fields were 0. A newer, larger
 * structure is taken only if the fields that this library does not know are 0.
 *
 * Each handle is freed by exactly one call of the function named with it, which does nothing for
 * NULL. Regions, slots and updates may be freed before or after the trainer or engine that they
 * came from, in any order; but a region on a GPU must be freed first if its memory is freed too
 * (see "regions" below).
 *
 * Threads. A refit_trainer and a refit_engine may be used from any threads at once, but only one
 * thread should answer the events of an engine. A refit_update, a refit_slot and a refit_region are
 * used by one thread at a time. A caller must not free a handle while another thread uses it.
 * Callbacks run on a thread of the library. Do not fork a process that holds handles and go on to
 * use them in the child.
 *
 * Units: `bytes` are bytes, `count`, `start`, dims and strides are elements, `_ms` milliseconds.
 */
#ifndef REFITD_CLIENT_REFIT_H_
#define REFITD_CLIENT_REFIT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum refit_status {
  REFIT_OK = 0,
  REFIT_CANCELLED = 1,
  REFIT_UNKNOWN = 2,
  REFIT_INVALID_ARGUMENT = 3,
  REFIT_DEADLINE_EXCEEDED = 4,
  REFIT_NOT_FOUND = 5,
  REFIT_ALREADY_EXISTS = 6,
  REFIT_PERMISSION_DENIED = 7,
  REFIT_RESOURCE_EXHAUSTED = 8,
  REFIT_FAILED_PRECONDITION = 9,
  REFIT_ABORTED = 10,
  REFIT_OUT_OF_RANGE = 11,
  REFIT_UNIMPLEMENTED = 12,
  REFIT_INTERNAL = 13,
  REFIT_UNAVAILABLE = 14,
  REFIT_DATA_LOSS = 15,
  REFIT_UNAUTHENTICATED = 16
} refit_status;

/* This library's version, such as "0.2.0". The string is static. */
const char* refit_version(void);
/* The message of this thread's last call that returned a status; "" if that call succeeded. Never
 * NULL. */
const char* refit_last_error(void);

/* Who is held to have caused a failure, or was waited for. */
enum {
  REFIT_ROLE_UNKNOWN = 0,
  REFIT_ROLE_TRAINER = 1,
  REFIT_ROLE_ENGINE = 2, /* an engine rank; without a rank: a whole instance */
  REFIT_ROLE_DAEMON = 3,
  REFIT_ROLE_OPERATOR = 4 /* somebody who called the daemon's service for operators */
};
typedef struct refit_suspect {
  int32_t role; /* one of REFIT_ROLE_* */
  int32_t rank; /* -1: none, or not known */
  int64_t pid;  /* on the daemon's machine; 0: not known */
  /* The daemon's id, else its address; of a member, the daemon that it is attached to. "": not
   * known. */
  const char* daemon;
  const char* instance; /* an engine's, else "" */
} refit_suspect;

/* What is known of weights in engines' memory: of one rank, or, in a failure, of all engines that
 * the update would have written. */
enum {
  REFIT_WEIGHTS_UNKNOWN = 0, /* an outcome did not come (the rank counts as dirty), or the failure
                                is not of an update's end */
  REFIT_WEIGHTS_CLEAN = 1,   /* every engine holds its version, or what was loaded */
  REFIT_WEIGHTS_DIRTY = 2,   /* an engine was written in part, or attached as dirty: it holds no
                                version until the next commit */
  REFIT_WEIGHTS_PAUSED = 3   /* of one rank: prepare came; not resumed yet */
};

/* What is known of a failure, as data: programs decide by this and by the status, never by the
 * text, which is for people, holds what members said, and may be cut. */
typedef struct refit_failure {
  size_t struct_size;
  int32_t status;       /* a refit_status; REFIT_OK: there is no failure */
  int32_t weights_left; /* one of REFIT_WEIGHTS_* */
  const char* what;     /* refit_last_error() */
  const refit_suspect* suspects;
  int64_t suspects_named; /* entries of suspects, the likeliest first */
  int64_t suspect_count;  /* with those that are not named */
  const char* const* dirty_instances;
  int64_t dirty_named;    /* entries of dirty_instances */
  int64_t dirty_count;    /* with those that are not named */
  const char* tensor;     /* the first that the failure is about; "": none */
  const char* field;      /* the field or argument that was refused; "": none */
  int64_t version;        /* -1: none */
  int32_t may_be_retried; /* 1: what failed may pass, and the same call may succeed later */
} refit_failure;
#define REFIT_FAILURE_INIT \
  { .struct_size = sizeof(refit_failure) }
/* Tells the failure of this thread's last call that returned a status. Three calls that succeed
 * tell of a failure as well: refit_trainer_get_update of an update that was aborted,
 * refit_update_outcome and refit_trainer_outcome of an instance that was not committed, and
 * refit_engine_next that gave ABORTED. In the callback of refit_update_push_async it is the push's.
 * Pointers stay valid until the next other call on the same thread. Changes neither this failure
 * nor refit_last_error(). REFIT_INVALID_ARGUMENT: failure is NULL, or its struct_size is wrong. */
refit_status refit_last_failure(refit_failure* failure);
/* The name of a refit_status, such as "DEADLINE_EXCEEDED"; "UNKNOWN" for a number that is no
 * status. The string is static. */
const char* refit_status_name(int32_t status);

/* Element types. Values are stored as the framework stores them; nothing is converted. */
enum {
  REFIT_FLOAT64 = 1,
  REFIT_FLOAT32 = 2,
  REFIT_FLOAT16 = 3,
  REFIT_BFLOAT16 = 4,
  REFIT_FLOAT8_E4M3FN = 5,
  REFIT_FLOAT8_E5M2 = 6,
  REFIT_INT64 = 7,
  REFIT_INT32 = 8,
  REFIT_INT16 = 9,
  REFIT_INT8 = 10,
  REFIT_UINT8 = 11,
  REFIT_BOOL = 12
};

typedef struct refit_trainer refit_trainer;
typedef struct refit_update refit_update;
typedef struct refit_engine refit_engine;
typedef struct refit_region refit_region;
typedef struct refit_arena refit_arena;
typedef struct refit_slot refit_slot;

/* A named global tensor of unpadded shape, or elements [start, start + count) of it, row-major. */
typedef struct refit_tensor {
  const char* name;
  int32_t dtype;
  int32_t dim_count;   /* 0: a scalar */
  const int64_t* dims; /* dim_count elements */
  int64_t start;
  int64_t count; /* REFIT_WHOLE: all elements (start is then 0) */
} refit_tensor;

#define REFIT_WHOLE ((int64_t)-1)

/* ---- attaching ---- */

/* The contract of a group. The first member that brings a spec creates the group; later members
 * must bring an equal spec, or none. */
typedef struct refit_group_spec {
  size_t struct_size;
  int32_t trainer_ranks; /* 0: 1 */
  int32_t min_instances; /* 0: 1 */
  int64_t slot_bytes;    /* 0: the daemon's default */
  int32_t slots;         /* 0: the daemon's default */
  int32_t engine_only_count;
  /* Patterns of tensors' names: '*' stands for any characters, '?' for one. */
  const char* const* engine_only_tensors;
  /* Tensors that trainers may push or register though no engine wants them; patterns too. */
  int32_t unwanted_count;
  const char* const* unwanted_tensors;
  /* How far an instance's version may be behind the group's while the instance counts as ready: the
   * difference of the two numbers, 0 to 1,000,000,000. */
  int64_t max_lag;
  /* 1: bytes cross between daemons encrypted or not at all; such a group has no GPUs over several
   * daemons. REFIT_FAILED_PRECONDITION from attaching: a daemon of the group can't encrypt. */
  int32_t encrypted_data;
  /* How long after a commit instances with arenas keep the version before in their other side, for
   * refit_trainer_rollback(): the next update is not staged until then. 0 to 604,800. */
  int64_t hold_previous_seconds;
  /* How many seconds a daemon keeps the arenas of an engine rank whose lease has ended (restore of
   * refit_engine_options), to 86,400. 0: 600; below 0: not at all. */
  int32_t keep_seconds;
} refit_group_spec;
#define REFIT_GROUP_SPEC_INIT \
  { .struct_size = sizeof(refit_group_spec) }

typedef struct refit_connect_options {
  size_t struct_size;
  const char* socket; /* NULL: the environment's REFITD_SOCKET, else /run/refitd/refitd.sock */
  const char* group;
  const refit_group_spec* spec; /* NULL: wait for the group */
  /* How long attaching may wait: for the socket and, without a spec, for the group to be created;
   * with reattach_ms also for a daemon that is not there yet, or that goes away meanwhile. 0:
   * 10,000. */
  int64_t wait_ms;
  /* Added to an update's remaining time as the deadline of its calls. 0: 5,000. */
  int64_t call_margin_ms;
  const char* client; /* free text for status pages; NULL: none */
  /* "host:port" of the daemon that holds the group. NULL: the daemon at `socket`. It is one name,
   * which that daemon resolves anew whenever it joins the group. */
  const char* coordinator;
  /* Not 0: when the lease is lost because the daemon went away, the member attaches again, and
   * tries for this long to find a daemon at the socket. Regions and the registered layout stay.
   * Begin, refit and register of a trainer wait for the new lease, also if the old lease ends while
   * they run; the calls of an update that was already begun fail. (The first lease is tried for in
   * the same way, for wait_ms.) 0: the member does not attach again: after the lease's end all
   * calls fail and say why it ended. */
  int64_t reattach_ms;
  /* A daemon that answers nothing for this long, not even a ping, counts as lost. 0: 30,000;
   * -1: never; else at least 5,000. */
  int64_t silence_ms;
  /* Where this member's memory is: a GPU by UUID ("GPU-01234567-89ab-...", as nvidia-smi -L prints
   * it); NULL: host memory. REFIT_FAILED_PRECONDITION if the daemon does not serve that GPU. */
  const char* device;
  /* The name of the CUDA driver library, for dlopen(); NULL: "libcuda.so.1". Members on a GPU load
   * the driver to map slots: loader engines, and trainers that lease slots. */
  const char* cuda_library;
  /* "HOST:PORT" of the daemon, in place of `socket`; NULL: the socket. Over TCP nothing shares
   * memory: no regions and no slots, so trainers push inline bytes. */
  const char* address;
  /* For `address`: PEM files of this member's certificate (with the rest of its chain), of its key,
   * and of the roots that sign daemons' certificates; read for each lease anew. NULL: the
   * environment's REFITD_TLS_CERTIFICATE, REFITD_TLS_KEY, REFITD_TLS_ROOTS. */
  const char* tls_certificate;
  const char* tls_key;
  const char* tls_roots;
  /* The identity that the daemon must have: "spiffe://DOMAIN/PATH", the same with a last part of
   * "*" for all below, "dns:NAME" or "dns:*.DOMAIN". NULL: REFITD_TLS_SERVER, else its certificate
   * must be for the host of `address`. */
  const char* tls_server;
  int64_t insecure; /* 1: TCP without TLS is allowed */
} refit_connect_options;
#define REFIT_CONNECT_OPTIONS_INIT \
  { .struct_size = sizeof(refit_connect_options) }

/* ---- regions: memory of this process that the daemon has mapped ----
 * A region of host memory is made by refit_..._new_region(), or by refit_..._add_memfd() from a
 * memfd that exists already. A region on the GPU of refit_connect_options.device is made by
 * refit_..._add_cuda_block() or refit_..._add_cuda_vmm(). The caller keeps owning memory of a GPU,
 * and must keep it allocated as long as the region exists; if a registered layout names the region,
 * as long as the trainer or engine exists.
 * refit_region_free() waits until the daemon has closed the memory only if it is called before the
 * trainer or engine is freed, and if no registered layout names the region. In all other cases, and
 * after the lease ended, the daemon closes the memory at some later time, which this library can't
 * tell. To free memory of a GPU safely, register a layout without it, free its regions, then the
 * memory, and the trainer or engine last; otherwise keep the memory allocated to the end of the
 * process.
 *
 * These calls are not ordered with CUDA's streams: synchronise the streams that wrote the weights
 * before a push, refit or commit; an engine synchronises its device before refit_engine_ready(). */

enum { REFIT_CUDA_IPC_HANDLE_BYTES = 64 }; /* size of a cudaIpcMemHandle_t */

/* The region's memory, mapped by this library as long as the region exists; NULL for NULL and for a
 * region on a GPU. */
char* refit_region_data(const refit_region* region);
int64_t refit_region_bytes(const refit_region* region); /* 0 for NULL */
/* Frees the handle. An asynchronous push keeps the region itself alive until it ends. The last free
 * of a region on a GPU waits until the daemon has closed the memory, for up to call_margin_ms and
 * 30 s; this member's other calls go on meanwhile. Do not call this from a callback. */
void refit_region_free(refit_region* region);

/* ---- arenas: memory with two sides for an engine's weights ----
 * An engine reads its weights on the one side, at a constant address, and the daemon writes
 * versions into the other (refit_engine_add_arena()). Engines of this process may have an arena one
 * after the other. The memory stays until the arena and the regions that were made of it are freed.
 */

/* Where versions of a GPU's arena are written; an arena in host memory is the same with both. */
enum {
  REFIT_BACK_DEVICE = 0, /* on the GPU: a flip exchanges mappings, in milliseconds */
  REFIT_BACK_HOST = 1    /* in pinned host memory: a flip copies the version to the GPU over PCIe */
};

/* Makes an arena on connect->device, whose driver is connect->cuda_library; the other fields are
 * not read, and no daemon is asked. `back`: one of REFIT_BACK_*. Takes twice the bytes, on a GPU
 * rounded up; with REFIT_BACK_HOST once on the GPU and twice in host memory. */
refit_status refit_arena_new(const refit_connect_options* connect, int64_t bytes, int32_t back,
                             refit_arena** arena);
/* Where the weights are read (on a GPU an address of this process there). NULL for NULL. */
char* refit_arena_data(const refit_arena* arena);
int64_t refit_arena_bytes(const refit_arena* arena); /* of each side; 0 for NULL */
int32_t refit_arena_back(const refit_arena* arena);  /* one of REFIT_BACK_* */
/* The other side at another address, until refit_arena_unmap_back(): between PREPARE with `flip`
 * and refit_engine_ready() it holds the version that was staged, to be read by the thread that
 * calls refit_engine_ready(). An update that ends meanwhile leaves what it holds unknown. A GPU's
 * work on it must have ended before it is unmapped. REFIT_FAILED_PRECONDITION: it is mapped
 * already. */
refit_status refit_arena_map_back(const refit_arena* arena, char** data);
void refit_arena_unmap_back(const refit_arena* arena);
void refit_arena_free(refit_arena* arena);

/* One box of a tensor and where it lies. Lists have the tensor's dim_count entries. */
typedef struct refit_piece {
  int64_t tensor;         /* index into the tensors of the same call */
  const int64_t* offset;  /* NULL: 0s */
  const int64_t* extent;  /* NULL: all of the tensor */
  const int64_t* strides; /* elements; NULL: row-major without gaps */
  const refit_region* region;
  int64_t byte_offset; /* from the region's start to the box's first element */
} refit_piece;

/* The arithmetic of derived tensors and what they hold: refitd.v1.DerivedKind and DerivedRole say
 * what each means, bit for bit. */
enum {
  REFIT_DERIVED_CAST = 1,
  REFIT_DERIVED_FP8_BLOCK = 2,
  REFIT_DERIVED_FP8_BLOCK_RECIPROCAL = 3,
  REFIT_DERIVED_FP8_BLOCK_POW2 = 4,
  REFIT_DERIVED_FP8_CHANNEL = 5,
  REFIT_DERIVED_FP8_BLOCK_CUDA = 6,
  REFIT_DERIVED_FP8_BLOCK_INDUCTOR = 7,
  REFIT_DERIVED_MXFP8 = 8
};
enum { REFIT_DERIVED_VALUES = 1, REFIT_DERIVED_SCALES = 2 };

/* Says that refits compute a tensor of an engine from a tensor of the trainers. */
typedef struct refit_derivation {
  int64_t tensor;             /* index into the tensors of the same call */
  const refit_tensor* source; /* the trainers' tensor as a whole */
  int32_t kind;               /* REFIT_DERIVED_CAST, ... */
  int32_t role;               /* REFIT_DERIVED_VALUES or REFIT_DERIVED_SCALES */
} refit_derivation;

/* Computes a box of a derived tensor in host memory, with the arithmetic of refits.
 * `derivation->tensor` must be 0. `source`: the whole source, row-major without gaps;
 * `result` gets the box, likewise. Both are aligned to their elements. `offset`, `extent`: as in
 * refit_piece. REFIT_INVALID_ARGUMENT: among others, the kind is REFIT_DERIVED_FP8_BLOCK_INDUCTOR.
 * REFIT_FAILED_PRECONDITION, with the source's name: an element has no result, and what `result`
 * holds then is not defined. */
refit_status refit_derive(const refit_tensor* tensor, const refit_derivation* derivation,
                          const void* source, const int64_t* offset, const int64_t* extent,
                          void* result);

/* ---- trainer ---- */

typedef struct refit_trainer_options {
  size_t struct_size;
  const refit_connect_options* connect;
  int32_t rank;
  int32_t world_size; /* 0: 1 */
} refit_trainer_options;
#define REFIT_TRAINER_OPTIONS_INIT \
  { .struct_size = sizeof(refit_trainer_options) }

refit_status refit_trainer_attach(const refit_trainer_options* options, refit_trainer** trainer);
/* Begins a new incarnation of a group, whose first version may be any number: the way on for a
 * trainer that goes on from an older version. Every instance is dirty until its next commit, and
 * the leases of trainers end. If there is no such group, it is made. `options` names daemon and
 * group, and has the group's spec. REFIT_PERMISSION_DENIED: the caller has not the role
 * OPERATOR_WRITE. REFIT_ALREADY_EXISTS: the group has another spec. REFIT_FAILED_PRECONDITION: an
 * update runs, or another daemon has the group (named). */
refit_status refit_replace_group(const refit_connect_options* options);
/* Detaches and frees; an open update is lost. */
void refit_trainer_free(refit_trainer* trainer);
/* REFIT_OK while attached; else why the lease ended, or why the member could not attach again. */
refit_status refit_trainer_health(const refit_trainer* trainer);
/* How often this trainer attached again after it lost its lease (reattach_ms); 0 for NULL. If the
 * number grew, the calls of the update that ran have failed; begin the next update. */
int32_t refit_trainer_reattachments(const refit_trainer* trainer);
/* The last committed version that the daemon reported. REFIT_NOT_FOUND: none. */
refit_status refit_trainer_group_version(const refit_trainer* trainer, int64_t* version);
/* Says what became of an update, for a caller that missed the commit's answer: *outcome is one of
 * REFIT_UPDATE_*. A restarted daemon knows no update of before its restart. */
enum {
  REFIT_UPDATE_UNKNOWN = 0,
  REFIT_UPDATE_RUNNING = 1,
  REFIT_UPDATE_COMMITTED = 2,
  REFIT_UPDATE_ABORTED = 3
};
refit_status refit_trainer_get_update(refit_trainer* trainer, int64_t version, int32_t* outcome);
/* Gives up the update to `version` while a call of another thread waits in it: refit_trainer_begin,
 * refit_trainer_refit, or a call of the update's handle. The waiting call then ends with
 * REFIT_ABORTED. This call takes a second at most. REFIT_FAILED_PRECONDITION: this rank has no such
 * update open. */
refit_status refit_trainer_abort(refit_trainer* trainer, int64_t version, const char* reason);
/* Puts the content of the version before the group's into place again, in the instances with arenas
 * that still hold it; the others then catch up from these. *version becomes the new number, the
 * group's plus one. One rank calls it. `undone`: the version that is rolled back; if the group has
 * another, the call is refused, and if it is rolled back already, *version is that rollback's
 * number; -1: whichever the group has. REFIT_FAILED_PRECONDITION: what is in the way is named. */
refit_status refit_trainer_rollback(refit_trainer* trainer, int64_t undone, int64_t* version);
/* Lets the next update be staged, though the version before is held. */
refit_status refit_trainer_release_previous(refit_trainer* trainer);
refit_status refit_trainer_new_region(refit_trainer* trainer, int64_t bytes, refit_region** region);
/* Makes a region of [0, bytes) of an existing memfd. The memfd must have been made with
 * MFD_ALLOW_SEALING, be at least `bytes` long, be open for reading and writing, and be sealed
 * against shrinking by fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK). The caller keeps owning the
 * descriptor and its own mappings of it. REFIT_INVALID_ARGUMENT: not a memfd, not sealed against
 * shrinking, of huge pages, or shorter than `bytes`; the message says which.
 * REFIT_PERMISSION_DENIED: not open for reading and writing. */
refit_status refit_trainer_add_memfd(refit_trainer* trainer, int descriptor, int64_t bytes,
                                     refit_region** region);
/* Makes a region of a block that this process allocated with cudaMalloc. `ipc_handle` is what
 * cudaIpcGetMemHandle gives for any address in the block; `bytes` is at most the block's size.
 * Offsets count from the block's base. */
refit_status refit_trainer_add_cuda_block(refit_trainer* trainer, const void* ipc_handle,
                                          int64_t bytes, refit_region** region);
/* Makes a region of `bytes` allocated with cuMemCreate (torch's expandable segments) and exported
 * as a POSIX descriptor. The caller keeps owning the descriptor. */
refit_status refit_trainer_add_cuda_vmm(refit_trainer* trainer, int descriptor, int64_t bytes,
                                        refit_region** region);
/* The same; `address`: of the memory in this process. By it the daemon recognises memory of which a
 * trainer and an engine of one process have different parts; otherwise it finds by digests, at the
 * first version, whether an engine's tensors overlap with a trainer's. */
refit_status refit_trainer_add_cuda_vmm_at(refit_trainer* trainer, int descriptor, int64_t bytes,
                                           uint64_t address, refit_region** region);

enum {
  REFIT_VERIFICATION_DEFAULT = 0,
  REFIT_VERIFICATION_OFF = 1,
  REFIT_VERIFICATION_TRANSFER = 2,
  REFIT_VERIFICATION_READBACK = 3
};

/* The way in which pushed buckets reach engines on several GPUs of a daemon. */
enum {
  REFIT_BROADCAST_AUTO = 0,   /* the daemon picks, bucket by bucket */
  REFIT_BROADCAST_DIRECT = 1, /* the trainer's GPU stores into every engine's memory */
  /* The next three move bytes through staging slots on each GPU. They are refused with
   * REFIT_FAILED_PRECONDITION unless trainer and engines are on GPUs of one daemon, and with
   * REFIT_UNIMPLEMENTED if the daemon can't move bytes in this way. */
  REFIT_BROADCAST_CHAIN = 2,
  REFIT_BROADCAST_SYMMETRIC = 3,
  REFIT_BROADCAST_NCCL = 4
};

typedef struct refit_begin_options {
  size_t struct_size;
  int64_t version;
  int64_t duration_ms; /* of the whole update; 0: the daemon's default */
  int32_t verification;
  int32_t evict_late;   /* not 0: evict late or failing instances instead of aborting */
  int64_t tensor_count; /* of all ranks together; 0: unknown, the commit may name it */
  int64_t total_bytes;  /* of all ranks together, for progress; 0: unknown */
  int32_t broadcast;    /* the same on every rank that begins */
  /* Not 0: the registered layout has no part in this update, and the rank ends the update by
   * commit. */
  int32_t without_layout;
  /* Text for people, such as "step 1200", shown in the update's status and in the daemon's log. At
   * most 256 bytes of UTF-8 without control characters. If several ranks give a text, the update
   * keeps the first that is neither NULL nor empty. */
  const char* note;
  /* Not 0: when this update has committed, the next one is not staged before
   * refit_trainer_release_previous() or refit_trainer_rollback(). That of one rank is enough. */
  int32_t hold;
} refit_begin_options;
#define REFIT_BEGIN_OPTIONS_INIT \
  { .struct_size = sizeof(refit_begin_options) }

/* Opens or joins the update; REFIT_OK when every engine rank is ready. Waits for the other trainer
 * ranks to begin and for the group's instances to be complete, for duration_ms at most.
 * REFIT_ALREADY_EXISTS: this rank has already begun this update, and its handle is not freed: go on
 * with that handle. */
refit_status refit_trainer_begin(refit_trainer* trainer, const refit_begin_options* options,
                                 refit_update** update);
/* Aborts the update that the handle was made for, unless it was committed, and frees the handle. A
 * later update to the same version is not touched. When this returns, the callbacks of asynchronous
 * pushes have run, unless clean-up took longer than its limit. */
void refit_update_free(refit_update* update);

/* The number of instances that take part; 0 for NULL. */
int32_t refit_update_instances(const refit_update* update);
int32_t refit_update_leasable_slots(const refit_update* update); /* slots at a time; 0 for NULL */

/* Leases a staging slot to pack one bucket into. wait_ms is how long to wait for a free slot; 0:
 * what remains of the update. */
refit_status refit_update_lease_slot(refit_update* update, int64_t wait_ms, refit_slot** slot);
/* The slot's memory; NULL once pushed. On a GPU it is an address of the kind of refit_view.data. */
char* refit_slot_data(const refit_slot* slot);
int64_t refit_slot_bytes(const refit_slot* slot); /* 0 once pushed */
/* Gives the slot back unless it was pushed; frees the handle. */
void refit_slot_free(refit_slot* slot);

/* What one push hands over. The bytes come from exactly one source: region, slot, or chunks. They
 * must be complete when the call is made. */
typedef struct refit_bucket {
  size_t struct_size;
  const refit_tensor* tensors;
  int64_t tensor_count;
  int32_t packed; /* not 0: one contiguous buffer; a bucket in a slot must be */
  int32_t chunk_count;
  /* Packed: where each of the tensor_count tensors begins, in bytes from the buffer's start, a
   * multiple of the tensor's element size; NULL: the tensors lie back to back. The buffer may be
   * longer than where the last tensor ends. */
  const int64_t* byte_offsets;
  const refit_region* region;
  /* In bytes from the region's start. Packed: one offset (NULL: 0), a multiple of the element size
   * of every tensor, or of the first tensor's if the tensors lie back to back. Else tensor_count
   * offsets, each a multiple of its tensor's element size. */
  const int64_t* region_offsets;
  /* The push empties the handle, whatever its status; the handle must still be freed. If the
   * tensors lie back to back in the slot, each must fall on a multiple of its element size. */
  refit_slot* slot;
  /* Inline bytes, copied in the call: one chunk if packed, else one chunk for each tensor. */
  const void* const* chunks;
  const int64_t* chunk_bytes; /* chunk_count of them */
} refit_bucket;
#define REFIT_BUCKET_INIT \
  { .struct_size = sizeof(refit_bucket) }

/* Hands the bucket over and waits until its source is no longer read; its region is then the
 * caller's alone again. */
refit_status refit_update_push(refit_update* update, const refit_bucket* bucket);
/* Pushes without waiting; blocks only while the daemon's limit of unanswered buckets is reached.
 * `done` (may be NULL) runs once, on a thread of the library, and must not use the update; its
 * `message` is valid only during that call. `bucket` and what it points to may be freed when the
 * function returns, except the source. The returned status tells of bad arguments only; other
 * errors go to `done` and to commit. The bucket's region stays known to the daemon, even if its
 * handle is freed, until one of these calls after `done` ran: the next push, flush, commit, refit
 * or refit_update_free(). The first of these waits as refit_region_free() does, and memory of a GPU
 * may be freed after it. */
typedef void (*refit_done)(void* argument, refit_status status, const char* message);
refit_status refit_update_push_async(refit_update* update, const refit_bucket* bucket,
                                     refit_done done, void* argument);
/* Waits until every asynchronous push was answered; returns the first error of any of them. */
refit_status refit_update_flush(refit_update* update);

typedef struct refit_commit_result {
  size_t struct_size;
  int64_t version;
  int64_t bytes;  /* tensor data that all ranks pushed or refitted */
  double seconds; /* first begin to decision, by the daemon's clock */
  /* Instances that took part; refit_update_outcome() tells the outcome of each. 0: the update
   * committed, but the lease ended before the answer with the instances came (only
   * refit_trainer_refit(), with reattach_ms). */
  int32_t instances;
  int32_t committed; /* instances that committed */
  /* Bytes of tensor data that all ranks pushed, by REFIT_BROADCAST_...; what a refit moved is not
   * counted. */
  int64_t pushed_bytes[5];
  /* Tensors that came and were written nowhere, because no engine wants them or their memory is
   * another tensor's (tied weights), and their bytes. refit_update_left_out() tells their names. */
  int64_t left_out_tensors;
  int64_t left_out_bytes;
} refit_commit_result;
#define REFIT_COMMIT_RESULT_INIT \
  { .struct_size = sizeof(refit_commit_result) }

/* Waits for every push of this rank, then commits. REFIT_OK: every rank of every instance listed as
 * committed holds the version. `tensor_count`: as in refit_begin_options, for a caller that learns
 * it only by pushing; 0: unknown. `result` may be NULL. */
refit_status refit_update_commit(refit_update* update, int64_t tensor_count,
                                 refit_commit_result* result);
/* Tells the outcome of instance `index` after a successful commit or refit. Strings live as long as
 * the update. REFIT_OUT_OF_RANGE: no such instance. */
refit_status refit_update_outcome(const refit_update* update, int32_t index, const char** instance,
                                  int32_t* committed, const char** reason);
/* Tells the name of the tensor `index` of those that were left out, sorted: of the first 64. The
 * string lives as long as the update. REFIT_OUT_OF_RANGE: no such name. */
refit_status refit_update_left_out(const refit_update* update, int32_t index, const char** name);
refit_status refit_update_abort(refit_update* update, const char* reason);
/* After a call that failed because the update is over, and after refit_update_abort(): the error
 * that other calls of the lost update get, REFIT_ABORTED, which says whether weights of engines are
 * dirty. REFIT_FAILED_PRECONDITION: the update may not be over. */
refit_status refit_update_lost(refit_update* update);

/* ---- trainer: shards that stay where they are ---- */

/* Registers the shards of this rank for refits, in place of those registered before. A call without
 * a piece registers no shards: a rank without shards ends its updates by commit. Not allowed during
 * an update of this rank. `pushed`: indices of tensors that are pushed in buckets instead, in any
 * order. The pieces' regions must stay until shards are registered anew or the trainer is freed. */
refit_status refit_trainer_register(refit_trainer* trainer, const refit_tensor* tensors,
                                    int64_t tensor_count, const refit_piece* pieces,
                                    int64_t piece_count, const int64_t* pushed,
                                    int64_t pushed_count);

typedef struct refit_refit_options {
  size_t struct_size;
  int64_t version;
  int64_t duration_ms; /* of the whole update; 0: the daemon's default */
  int32_t verification;
  int32_t evict_late; /* not 0: evict late or failing instances instead of aborting */
  int32_t hold;       /* as in refit_begin_options */
} refit_refit_options;
#define REFIT_REFIT_OPTIONS_INIT \
  { .struct_size = sizeof(refit_refit_options) }

/* Begins an update, moves the registered shards by the moves compiled from all layouts, and
 * commits, in one call that every trainer rank makes. The shards must hold the version when it is
 * called, and are no longer read when it returns. REFIT_OK means what it means for
 * refit_update_commit(). `result` may be NULL. */
refit_status refit_trainer_refit(refit_trainer* trainer, const refit_refit_options* options,
                                 refit_commit_result* result);
/* Does what refit_update_outcome() does, for the trainer's last successful refit. Strings live
 * until the trainer's next refit; call this on the thread that made the refit. */
refit_status refit_trainer_outcome(const refit_trainer* trainer, int32_t index,
                                   const char** instance, int32_t* committed, const char** reason);
/* Does what refit_update_left_out() does, for the trainer's last successful refit. */
refit_status refit_trainer_left_out(const refit_trainer* trainer, int32_t index, const char** name);
/* Refits within an update that was begun, in place of commit: waits for the pushes of the tensors
 * registered as pushed, then moves all other tensors. */
refit_status refit_update_refit(refit_update* update, refit_commit_result* result);

/* ---- engine ---- */

enum { REFIT_DELIVERY_IN_PLACE = 0, REFIT_DELIVERY_LOADER = 1 };
/* Whether a rank takes part in catch-ups (refit_engine_options.catch-up). */
enum { REFIT_CATCH_UP_DEFAULT = 0, REFIT_CATCH_UP_NEVER = 1 };

typedef struct refit_engine_options {
  size_t struct_size;
  const refit_connect_options* connect;
  const char* instance;
  int32_t rank;
  int32_t world_size; /* 0: 1 */
  int32_t delivery;
  /* Not 0 (loader delivery): the tensors of `manifest` must arrive in every update. */
  int32_t has_manifest;
  const refit_tensor* manifest; /* start and count are ignored */
  int64_t manifest_count;
  /* Not 0: this memory holds held_version, complete and verified, from an earlier lease. */
  int32_t has_held_version;
  int64_t held_version;
  /* Not 0: the memory may hold no whole version, because an update of an earlier lease failed there
   * or its outcome never came. IF YOU DON'T KNOW WHETHER THE WEIGHTS ARE WHOLE, SAY DIRTY: the
   * daemon forgets a rank with its lease, and a new engine knows nothing of a freed engine. So
   * attach anew with has_held_version if refit_engine_version() of the freed engine gave a version,
   * and with dirty unless its refit_engine_weights() was REFIT_WEIGHTS_CLEAN. The rank stays dirty
   * until a commit. Not with has_held_version (REFIT_INVALID_ARGUMENT). */
  int32_t dirty;
  /* With held_version: the refit_event.incarnation that came with that version; 0: not known. */
  uint64_t held_origin;
  /* REFIT_CATCH_UP_DEFAULT: with in-place delivery the rank takes part in catch-ups. If its
   * instance lacks the group's version, it gets that version from clean instances, by PREPARE and
   * its outcome as in any update; so keep asking for events. If its instance holds the version, its
   * registered memory is read at any time and given to others: from COMMITTED to the next ready,
   * the end of the lease or the next registration, that memory must be the rank's weights,
   * unchanged. Choose REFIT_CATCH_UP_NEVER if that memory may change, or if events are not asked
   * for between updates. Callers that were compiled before this field existed take no part. */
  int32_t catch_up;
  /* The refit_event.owner that came with the last version that was committed into this memory, also
   * if it is dirty since; NULL: not known. A group that is made again belongs to that owner; a
   * group that another identity owns refuses the rank (REFIT_PERMISSION_DENIED). */
  const char* held_owner;
  /* Whose weights the rank takes: "uid:N", "spiffe://DOMAIN/PATH", "spiffe://DOMAIN/PATH/..." with
   * a star for its last element, "dns:NAME" or "dns:*.DOMAIN". A group that another identity owns
   * refuses the rank (REFIT_PERMISSION_DENIED). NULL: any owner's. */
  const char* trainer_identity;
  /* With held_version: the refit_event.digest that came with that version; 0: not known. Without
   * REFIT_CATCH_UP_NEVER the daemon compares the registered memory with it; a difference means that
   * no version is held. */
  uint64_t held_digest;
  /* Not 0 (in-place delivery): the daemon keeps this rank's arenas for a while when the rank dies
   * or detaches (keep_seconds of refit_group_spec), and the rank takes up those that it keeps of
   * this rank's last lease (refit_engine_take_kept()), which are given up when the rank attaches
   * without this. REFIT_PERMISSION_DENIED: they are kept for another user. Not with
   * has_held_version or dirty (REFIT_INVALID_ARGUMENT). */
  int32_t restore;
  /* With held_version, if the refit_event.content that came with it was another version: that. */
  int32_t has_held_content;
  int64_t held_content;
  /* Not 0 (in-place delivery over arenas): STAGED comes when a version is staged, before PREPARE.
   */
  int32_t wants_staged;
} refit_engine_options;
#define REFIT_ENGINE_OPTIONS_INIT \
  { .struct_size = sizeof(refit_engine_options) }

refit_status refit_engine_attach(const refit_engine_options* options, refit_engine** engine);
/* Detaches and frees. What the engine knew of the weights is lost: if another engine will serve the
 * same memory, ask refit_engine_weights() and refit_engine_version() first (see
 * refit_engine_options.dirty). */
void refit_engine_free(refit_engine* engine);
refit_status refit_engine_new_region(refit_engine* engine, int64_t bytes, refit_region** region);
/* Does what refit_trainer_add_memfd() does. */
refit_status refit_engine_add_memfd(refit_engine* engine, int descriptor, int64_t bytes,
                                    refit_region** region);
/* These do what refit_trainer_add_cuda_block() and refit_trainer_add_cuda_vmm() do. */
refit_status refit_engine_add_cuda_block(refit_engine* engine, const void* ipc_handle,
                                         int64_t bytes, refit_region** region);
refit_status refit_engine_add_cuda_vmm(refit_engine* engine, int descriptor, int64_t bytes,
                                       refit_region** region);
refit_status refit_engine_add_cuda_vmm_at(refit_engine* engine, int descriptor, int64_t bytes,
                                          uint64_t address, refit_region** region);

/* Makes a region of an arena on the engine's device. If all pieces that are registered lie in
 * arenas, versions are written to the other sides while the rank serves, and PREPARE comes with
 * `flip`: refit_engine_ready() then exchanges the sides. What no piece names is copied to the other
 * sides when parameters are registered, and must not be written afterwards.
 * REFIT_FAILED_PRECONDITION: another engine has the arena, until its region and the engine are
 * freed. */
refit_status refit_engine_add_arena(refit_engine* engine, const refit_arena* arena,
                                    refit_region** region);

/* With `restore`: the arena of that number, from 0, of those that the daemon keeps of this rank's
 * last lease, in the order in which they were added to that engine. It is read-only until the
 * first refit_engine_register(), for which the daemon compares layout and memory with what was
 * committed. REFIT_OK: refit_engine_version() has a value, and the next event is COMMITTED of that
 * version. REFIT_DATA_LOSS: they differ; the memory may be written now, what it holds has no
 * meaning, and the rank is to register once it has loaded its weights. All pieces must lie in these
 * arenas, at the places of before; bytes that no piece names are not compared. REFIT_NOT_FOUND: the
 * daemon keeps fewer. REFIT_FAILED_PRECONDITION: parameters are registered already. */
refit_status refit_engine_take_kept(refit_engine* engine, int32_t index, refit_arena** arena);

/* Registers the parameters of this rank (in-place delivery). Not allowed during an update. If two
 * tensors share their memory (tied weights), give both the same pieces: trainers may push or refit
 * either or both, the memory is written once, and values that differ are refused. Trainers may also
 * send a tensor that is in `tensors` without any piece; nothing is written for it. The pieces'
 * regions must stay until parameters are registered anew or the engine is freed. `derivations`
 * ascend by tensor; an engine that registers values registers their scales too. */
refit_status refit_engine_register(refit_engine* engine, const refit_tensor* tensors,
                                   int64_t tensor_count, const refit_piece* pieces,
                                   int64_t piece_count, const refit_derivation* derivations,
                                   int64_t derivation_count);

enum {
  REFIT_EVENT_NOTHING = 0,   /* the timeout passed */
  REFIT_EVENT_PREPARE = 1,   /* stop reading the weights, then refit_engine_ready() */
  REFIT_EVENT_PART = 2,      /* staged: load the views, then refit_engine_ack() */
  REFIT_EVENT_COMMITTED = 3, /* resume on `version` */
  REFIT_EVENT_ABORTED = 4,   /* resume on what was there, unless `dirty` */
  REFIT_EVENT_DRAINING = 5,  /* the daemon opens no new update */
  /* With reattach_ms only. The daemon went away: resume if `weights` is REFIT_WEIGHTS_CLEAN, use no
   * views any more, and go on calling refit_engine_next(). Answers to events of the lost lease are
   * dropped. */
  REFIT_EVENT_LOST = 6,
  REFIT_EVENT_REATTACHED = 7, /* `version` is what this rank holds; -1: no whole version */
  /* With wants_staged only. The version lies in the arenas' other sides, complete and verified, and
   * stays there until the outcome: prepare what can be while serving, then
   * refit_engine_processed(). PREPARE follows, also if that was not called in time; or ABORTED,
   * after which nothing that was made of the version may be used. */
  REFIT_EVENT_STAGED = 8
};

/* A tensor, or its elements [start, start + count), in a mapped slot. It lies at a multiple of its
 * element size; no greater alignment is promised, because a trainer that leases a slot puts tensors
 * where it likes. */
typedef struct refit_view {
  refit_tensor tensor;
  /* Read-only, until the part is acknowledged. On a GPU, `data` is an address for kernels and
   * copies on that GPU; acknowledge the part when the work that reads the data has ended. */
  const char* data;
} refit_view;

/* The pointers in an event are valid until the next refit_engine_next() of the engine, except the
 * views' data, which has its own rule (refit_view). */
typedef struct refit_event {
  size_t struct_size;
  int32_t kind;
  int32_t dirty; /* ABORTED: the instance has no version until the next commit */
  int64_t version;
  /* PREPARE: what remains of the update; with `flip` until Ready is due. STAGED: until
   * refit_engine_processed() is due. */
  int64_t remaining_ms;
  int64_t tensor_count; /* PREPARE: tensors that the update brings; 0: unknown */
  /* STAGED, PREPARE: tells two updates to one version apart; the same for all of the group's
   * ranks. PART: by which it is acknowledged. */
  uint64_t update_id;
  int64_t part;       /* PART */
  int64_t view_count; /* PART */
  const refit_view* views;
  const char* reason; /* ABORTED, LOST; else "" */
  int32_t weights;    /* LOST, REATTACHED: one of REFIT_WEIGHTS_* */
  /* COMMITTED: the incarnation of the group in which `version` was committed; versions of two
   * incarnations can't be compared. An engine that comes back in another process tells both
   * (refit_engine_options). */
  uint64_t incarnation;
  const char* owner; /* COMMITTED: the identity that owns the group; else "" */
  /* COMMITTED: the digest of this rank's registered memory, which an engine brings back with the
   * version; 0: the update did not read that memory back. */
  uint64_t digest;
  int32_t flip; /* PREPARE: the version lies in the arenas' other sides, complete and verified */
  /* STAGED, PREPARE, COMMITTED: the version whose content it is; of a rollback another than
   * `version`. */
  int64_t content;
} refit_event;
#define REFIT_EVENT_INIT \
  { .struct_size = sizeof(refit_event) }

/* Gives the next event, or NOTHING after timeout_ms. An error means that the lease ended, with the
 * reason, and that no event is left; refit_engine_weights() then tells whether the weights are
 * whole. */
refit_status refit_engine_next(refit_engine* engine, int64_t timeout_ms, refit_event* event);
/* Answers to a STAGED, a PREPARE and a PART; what is staged is named by its event's update_id, and
 * a part by that and its part. REFIT_FAILED_PRECONDITION if no such answer is due:
 * refit_engine_processed() is not, once PREPARE has come. After an ABORTED, unacknowledged parts
 * must still be acknowledged, because their slots are in use until then. `stopped_us`: for how many
 * microseconds this rank has not read its weights, by which the daemon counts pauses; below 0:
 * since refit_engine_next() gave PREPARE. */
refit_status refit_engine_processed(refit_engine* engine, uint64_t update_id);
refit_status refit_engine_ready(refit_engine* engine, int64_t version, int64_t stopped_us);
refit_status refit_engine_ack(refit_engine* engine, uint64_t update_id, int64_t part);
/* Tells the daemon that this rank can't go on with the update. Parts not yet handed out are
 * dropped; parts already handed out must still be acknowledged. ABORTED follows. If the update was
 * committed before the failure reached the daemon, that ABORTED is dirty and comes to this rank
 * alone. */
refit_status refit_engine_fail(refit_engine* engine, int64_t version, const char* reason);

/* A hold keeps the memory behind the views of a part mapped, for callers that can't tell when the
 * last use of a view ends. The part must be acknowledged all the same, and after that the views may
 * show other bytes. */
typedef struct refit_hold refit_hold;
/* Makes a hold on the part that refit_engine_next() gave last; call it on the thread that called
 * refit_engine_next(). REFIT_FAILED_PRECONDITION: the engine's last event is no part. */
refit_status refit_engine_hold(const refit_engine* engine, refit_hold** hold);
/* May be called before or after the engine is freed, on any thread. */
void refit_hold_free(refit_hold* hold);

/* Parts joined: tensors larger than a slot come in several REFIT_EVENT_PARTs, which a joiner copies
 * into memory of its own, on the device that the parts are on; tensors that come whole are passed
 * on as they are. For every part:
 *
 * - refit_joiner_add(joiner, engine, &views, &count); load the `count` whole tensors of `views`;
 * - refit_engine_ack(engine, event.update_id, event.part);
 *
 * and refit_joiner_reset() on COMMITTED, ABORTED and LOST. One thread at a time, that of
 * refit_engine_next(). */
typedef struct refit_joiner refit_joiner;
refit_status refit_joiner_new(refit_joiner** joiner);
void refit_joiner_free(refit_joiner* joiner);
/* Adds the part that refit_engine_next() gave last. `views` are the whole tensors that it completes
 * (start 0, all elements), *view_count of them, maybe none: valid until the part is acknowledged
 * and, the joined ones, until the joiner's next add, reset or free. REFIT_FAILED_PRECONDITION: the
 * engine's last event is no part. REFIT_INVALID_ARGUMENT: the part overlaps or disagrees with those
 * before. REFIT_RESOURCE_EXHAUSTED: no memory to join in; refit_engine_fail() gives the update up.
 */
refit_status refit_joiner_add(refit_joiner* joiner, const refit_engine* engine,
                              const refit_view** views, int64_t* view_count);
/* Forgets unfinished tensors and frees the joined ones. */
void refit_joiner_reset(refit_joiner* joiner);
/* The number of tensors begun and not complete; 0 for NULL. */
int64_t refit_joiner_unfinished(const refit_joiner* joiner);

/* Returns one of REFIT_WEIGHTS_*; REFIT_WEIGHTS_UNKNOWN for NULL. */
int32_t refit_engine_weights(const refit_engine* engine);
/* How often this engine attached again after it lost its lease (reattach_ms); 0 for NULL. */
int32_t refit_engine_reattachments(const refit_engine* engine);
/* The version installed here. REFIT_NOT_FOUND: none, or the weights are not good. */
refit_status refit_engine_version(const refit_engine* engine, int64_t* version);

#ifdef __cplusplus
}
#endif

#endif /* REFITD_CLIENT_REFIT_H_ */
