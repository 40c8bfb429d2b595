/* A trainer of one rank in C that installs VERSIONS versions, one after the other.
 *
 *   trainer_example_c SOCKET GROUP VERSIONS [INSTANCES]
 *
 * It does what trainer_example.cc does, but packs its weights into a leased slot where the daemon
 * has one to lease, and else pushes them from a region. */
#include <stdio.h>
#include <stdlib.h>

#include "client/examples/values.h"
#include "client/refit.h"

static int failed(const char* what, refit_status status) {
  fprintf(stderr, "trainer_example_c: %s: %s: %s\n", what, refit_status_name(status),
          refit_last_error());
  return 1;
}

static void fill(int64_t version, char* weights) {
  for (int i = 0; i < kTensors; ++i) example_fill(version, i, weights + example_offset(i));
}

static refit_status push(refit_update* update, refit_region* region, int64_t version) {
  refit_tensor tensors[kTensors];
  int64_t offsets[kTensors];
  for (int i = 0; i < kTensors; ++i) {
    const refit_tensor tensor = {
        kModel[i].name, kModel[i].dtype, kModel[i].dim_count, kModel[i].dims, 0, REFIT_WHOLE};
    tensors[i] = tensor;
    offsets[i] = example_offset(i);
  }
  refit_bucket bucket = REFIT_BUCKET_INIT;
  bucket.tensors = tensors;
  bucket.tensor_count = kTensors;
  bucket.packed = 1;
  bucket.byte_offsets = offsets;
  refit_slot* slot = NULL;
  if (refit_update_leasable_slots(update) > 0) {
    const refit_status status = refit_update_lease_slot(update, 0, &slot);
    if (status != REFIT_OK) return status;
  }
  if (refit_slot_bytes(slot) >= example_offset(kTensors)) {
    fill(version, refit_slot_data(slot));
    bucket.slot = slot;
  } else {
    fill(version, refit_region_data(region));
    bucket.region = region;
  }
  const refit_status status = refit_update_push(update, &bucket);
  refit_slot_free(slot);
  return status;
}

static int install(refit_trainer* trainer, refit_region* region, int64_t version) {
  refit_begin_options begin = REFIT_BEGIN_OPTIONS_INIT;
  begin.version = version;
  begin.duration_ms = 30000;
  begin.tensor_count = kTensors;
  refit_update* update = NULL;
  refit_status status = refit_trainer_begin(trainer, &begin, &update);
  if (status != REFIT_OK) return failed("begin", status);
  status = push(update, region, version);
  refit_commit_result result = REFIT_COMMIT_RESULT_INIT;
  if (status == REFIT_OK) status = refit_update_commit(update, 0, &result);
  const int code = status == REFIT_OK ? 0 : failed("update", status);
  refit_update_free(update); /* aborts what was not committed */
  if (code != 0) return code;
  printf("version %lld: %d of %d instances, %lld bytes, %.3f ms\n", (long long)version,
         (int)result.committed, (int)result.instances, (long long)result.bytes,
         result.seconds * 1e3);
  return result.committed == result.instances ? 0 : 1;
}

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) {
    fprintf(stderr, "usage: trainer_example_c SOCKET GROUP VERSIONS [INSTANCES]\n");
    return 2;
  }
  refit_group_spec spec = REFIT_GROUP_SPEC_INIT;
  spec.min_instances = argc == 5 ? atoi(argv[4]) : 1;
  refit_connect_options connect = REFIT_CONNECT_OPTIONS_INIT;
  connect.socket = argv[1];
  connect.group = argv[2];
  connect.spec = &spec;
  connect.client = "trainer_example_c";
  refit_trainer_options options = REFIT_TRAINER_OPTIONS_INIT;
  options.connect = &connect;
  refit_trainer* trainer = NULL;
  refit_status status = refit_trainer_attach(&options, &trainer);
  if (status != REFIT_OK) return failed("attach", status);

  refit_region* region = NULL;
  status = refit_trainer_new_region(trainer, example_offset(kTensors), &region);
  int code = status == REFIT_OK ? 0 : failed("region", status);
  int64_t version = 0;
  (void)refit_trainer_group_version(trainer, &version); /* stays 0 where there is none */
  const int versions = atoi(argv[3]);
  for (int i = 0; i < versions && code == 0; ++i) code = install(trainer, region, ++version);
  refit_region_free(region);
  refit_trainer_free(trainer);
  return code;
}
