// Runs an exported kernel, specs/causal.py, from C: a batch of random operands on the first GPU.
//
//   example FOLDER      the folder that flashgen export wrote
//
// It prints lse of the first four queries; that of the first is scale * q.k of the first key.
#include "causal.h"

#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 1, HEADS = 4, ROWS = 256 };

static void check_cuda(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return;
  const char *text = NULL;
  cuGetErrorString(result, &text);
  fprintf(stderr, "%s: %s\n", what, text ? text : "an error of the driver");
  exit(1);
}

static void check(causal_status status, const char *what, const causal_library *library) {
  if (status == CAUSAL_OK) return;
  fprintf(stderr, "%s: %s\n", what, causal_status_string(status));
  if (status == CAUSAL_ERROR_CUDA) check_cuda(causal_cuda_result(library), what);
  exit(1);
}

// A contiguous tensor [BATCH, HEADS, ROWS, dim] of 16-bit elements.
static causal_tensor tensor(int64_t dim) {
  causal_tensor made = {0, {BATCH, HEADS, ROWS, dim}, {HEADS * ROWS * dim, ROWS * dim, dim, 1}};
  check_cuda(cuMemAlloc(&made.data, (size_t)(BATCH * HEADS * ROWS * dim) * 2), "cuMemAlloc");
  return made;
}

// Fills a tensor with float16 numbers between 0.5 and 1.
static void fill(const causal_tensor *x) {
  const size_t count = (size_t)(BATCH * HEADS * ROWS * x->shape[3]);
  uint16_t *host = malloc(count * 2);
  if (!host) exit(1);
  for (size_t i = 0; i < count; ++i) host[i] = (uint16_t)(0x3800 + rand() % 0x400);
  check_cuda(cuMemcpyHtoD(x->data, host, count * 2), "cuMemcpyHtoD");
  free(host);
}

int main(int count, char **arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
    return 2;
  }
  CUdevice device;
  CUcontext context;
  CUstream stream;
  check_cuda(cuInit(0), "cuInit");
  check_cuda(cuDeviceGet(&device, 0), "cuDeviceGet");
  check_cuda(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check_cuda(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check_cuda(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");

  causal_library *library;
  check(causal_open(arguments[1], &library), "causal_open", NULL);

  causal_forward_arguments call;
  causal_forward_defaults(&call);
  call.q = tensor(CAUSAL_HEAD_DIM);
  call.k = tensor(CAUSAL_HEAD_DIM);
  call.v = tensor(CAUSAL_HEAD_DIM_V);
  call.out = tensor(CAUSAL_HEAD_DIM_V);
  check_cuda(cuMemAlloc(&call.lse, BATCH * HEADS * ROWS * sizeof(float)), "cuMemAlloc");
  fill(&call.q);
  fill(&call.k);
  fill(&call.v);

  size_t bytes = 0;
  CUdeviceptr workspace = 0;
  check(causal_forward_workspace(library, &call, &bytes), "causal_forward_workspace", library);
  if (bytes) check_cuda(cuMemAlloc(&workspace, bytes), "cuMemAlloc");
  check(causal_forward(library, &call, workspace, bytes, stream), "causal_forward", library);
  check_cuda(cuStreamSynchronize(stream), "cuStreamSynchronize");

  float lse[4];
  check_cuda(cuMemcpyDtoH(lse, call.lse, sizeof lse), "cuMemcpyDtoH");
  printf("lse %.4f %.4f %.4f %.4f\n", lse[0], lse[1], lse[2], lse[3]);
  causal_close(library);
  return 0;
}
