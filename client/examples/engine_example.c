/* An engine of one rank in C that takes VERSIONS versions and checks each in its own memory.
 *
 *   engine_example_c SOCKET GROUP INSTANCE VERSIONS [staged]
 *
 * It does what engine_example.cc does. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/examples/values.h"
#include "client/refit.h"

static int failed(const char* what, refit_status status) {
  fprintf(stderr, "engine_example_c: %s: %s: %s\n", what, refit_status_name(status),
          refit_last_error());
  return 1;
}

static refit_status register_model(refit_engine* engine, refit_region* region) {
  refit_tensor tensors[kTensors];
  refit_piece pieces[kTensors];
  for (int i = 0; i < kTensors; ++i) {
    const refit_tensor tensor = {
        kModel[i].name, kModel[i].dtype, kModel[i].dim_count, kModel[i].dims, 0, REFIT_WHOLE};
    const refit_piece piece = {i, NULL, NULL, NULL, region, example_offset(i)};
    tensors[i] = tensor;
    pieces[i] = piece;
  }
  return refit_engine_register(engine, tensors, kTensors, pieces, kTensors, NULL, 0);
}

/* Copies the elements of a view, possibly a part of a tensor, to where they belong. */
static void load(const refit_view* view, char* weights) {
  for (int i = 0; i < kTensors; ++i) {
    if (strcmp(view->tensor.name, kModel[i].name) != 0) continue;
    const int64_t size = kModel[i].element_bytes;
    memcpy(weights + example_offset(i) + view->tensor.start * size, view->data,
           (size_t)(view->tensor.count * size));
  }
}

/* Returns 1 if a version was committed and is right, 0 for other events, -1 on an error. */
static int handle(refit_engine* engine, const refit_event* event, char* weights) {
  refit_status status = REFIT_OK;
  switch (event->kind) {
    case REFIT_EVENT_PREPARE:
      status = refit_engine_ready(engine, event->version, -1);
      break;
    case REFIT_EVENT_PART:
      for (int64_t i = 0; i < event->view_count; ++i) load(&event->views[i], weights);
      status = refit_engine_ack(engine, event->update_id, event->part);
      break;
    case REFIT_EVENT_COMMITTED:
      return example_check(event->version, weights) ? 1 : -1;
    case REFIT_EVENT_ABORTED:
      fprintf(stderr, "version %lld aborted%s: %s\n", (long long)event->version,
              event->dirty ? ", dirty" : "", event->reason);
      break;
    case REFIT_EVENT_NOTHING:
      fprintf(stderr, "engine_example_c: no event came\n");
      return -1;
    default:
      break;
  }
  if (status == REFIT_OK) return 0;
  failed("answer", status);
  return -1;
}

static int serve(refit_engine* engine, char* weights, int versions) {
  for (int committed = 0; committed < versions;) {
    refit_event event = REFIT_EVENT_INIT;
    const refit_status status = refit_engine_next(engine, 60000, &event);
    /* The lease ended. A program that goes on serving this memory attaches anew, with `dirty`
     * unless refit_engine_weights() is REFIT_WEIGHTS_CLEAN; or it sets reattach_ms, which does
     * that.
     */
    if (status != REFIT_OK) return failed("next", status);
    const int result = handle(engine, &event, weights);
    if (result < 0) return 1;
    committed += result;
  }
  return 0;
}

static int run(refit_engine* engine, int versions, int staged) {
  if (staged) {
    char* weights = malloc((size_t)example_offset(kTensors));
    const int code = weights == NULL ? 1 : serve(engine, weights, versions);
    free(weights);
    return code;
  }
  refit_region* region = NULL;
  refit_status status = refit_engine_new_region(engine, example_offset(kTensors), &region);
  if (status == REFIT_OK) status = register_model(engine, region);
  const int code = status == REFIT_OK ? serve(engine, refit_region_data(region), versions)
                                      : failed("register", status);
  refit_region_free(region);
  return code;
}

int main(int argc, char** argv) {
  if (argc < 5 || argc > 6) {
    fprintf(stderr, "usage: engine_example_c SOCKET GROUP INSTANCE VERSIONS [staged]\n");
    return 2;
  }
  const int staged = argc == 6 && strcmp(argv[5], "loader") == 0;
  refit_connect_options connect = REFIT_CONNECT_OPTIONS_INIT;
  connect.socket = argv[1];
  connect.group = argv[2];
  connect.client = "engine_example_c";
  refit_engine_options options = REFIT_ENGINE_OPTIONS_INIT;
  options.connect = &connect;
  options.instance = argv[3];
  options.delivery = staged ? REFIT_DELIVERY_LOADER : REFIT_DELIVERY_IN_PLACE;
  refit_engine* engine = NULL;
  const refit_status status = refit_engine_attach(&options, &engine);
  if (status != REFIT_OK) return failed("attach", status);
  const int code = run(engine, atoi(argv[4]), staged);
  refit_engine_free(engine);
  return code;
}
