// A CUDA driver without a GPU: it records what the C sources of an export ask of it. Device memory
// is memory of the process.
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 64, MOST_BYTES = 4096 };

typedef struct {
  char name[256], path[1024];
  unsigned grid[3], block[3], smem, allowed_smem;
  uint64_t stream, overlaps;
  unsigned char params[MOST_BYTES];
} launch;

typedef struct {
  int dtype, rank, swizzle, promotion;
  uint64_t address, sizes[5], strides[4];
  uint32_t box[5], steps[5];
} map;

typedef struct {
  char name[256];
  const char *path;
  unsigned smem;
} function;

launch fake_launches[MOST];
map fake_maps[MOST];
int fake_launch_count, fake_map_count, fake_version = 13000, fake_major = 8, fake_minor, fake_sms = 108;
int fake_open_modules;
int fake_fails; // the status of the next launch
static char paths[MOST][1024];
static function functions[MOST];
static int path_count, function_count;
static struct {
  char path[1024];
  size_t bytes;
} sizes[256];
static int size_count;

// The bytes of the parameters of the kernel in a file, which a launch does not pass.
void fake_expect(const char *path, size_t bytes) {
  snprintf(sizes[size_count].path, sizeof sizes[0].path, "%s", path);
  sizes[size_count++].bytes = bytes;
}

void fake_reset(void) { fake_launch_count = fake_map_count = size_count = 0; }

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
  *version = fake_version;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute kind, CUdevice device) {
  (void)device;
  *value = kind == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? fake_major
      : kind == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR    ? fake_minor
                                                                : fake_sms;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  fclose(file);
  snprintf(paths[path_count], sizeof paths[0], "%s", path);
  *module = (CUmodule)paths[path_count++];
  ++fake_open_modules;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  (void)module;
  --fake_open_modules;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
  functions[function_count].path = (const char *)module;
  snprintf(functions[function_count].name, sizeof functions[0].name, "%s", name);
  *found = (CUfunction)&functions[function_count++];
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction of, CUfunction_attribute kind, int value) {
  if (kind == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) ((function *)of)->smem = (unsigned)value;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  (void)stream;
  uint32_t *at = (uint32_t *)(uintptr_t)to;
  for (size_t i = 0; i < count; ++i) at[i] = value;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchKernelEx(
    const CUlaunchConfig *c, CUfunction of, void **params, void **extra) {
  (void)extra;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
        c->attrs[i].value.programmaticStreamSerializationAllowed != 1)
      return CUDA_ERROR_INVALID_VALUE;
  if (fake_fails) return (CUresult)fake_fails;
  launch *made = &fake_launches[fake_launch_count++];
  memset(made, 0, sizeof *made);
  strcpy(made->name, ((function *)of)->name);
  strcpy(made->path, ((function *)of)->path);
  made->grid[0] = c->gridDimX, made->grid[1] = c->gridDimY, made->grid[2] = c->gridDimZ;
  made->block[0] = c->blockDimX, made->block[1] = c->blockDimY, made->block[2] = c->blockDimZ;
  made->smem = c->sharedMemBytes;
  made->allowed_smem = ((function *)of)->smem;
  made->stream = (uint64_t)(uintptr_t)c->hStream;
  made->overlaps = c->numAttrs;
  for (int i = 0; i < size_count; ++i)
    if (!strcmp(sizes[i].path, made->path)) memcpy(made->params, params[0], sizes[i].bytes);
  return CUDA_SUCCESS;
}

// Writes the number of the map, counted from 1, in place of its 128 bytes.
static CUresult CUDAAPI encode(CUtensorMap *to, CUtensorMapDataType dtype, cuuint32_t rank,
    void *address, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if ((uintptr_t)to % 64 || (int)interleave || (int)fill) return CUDA_ERROR_INVALID_VALUE;
  map *made = &fake_maps[fake_map_count++];
  memset(made, 0, sizeof *made);
  made->dtype = (int)dtype, made->rank = (int)rank, made->swizzle = (int)swizzle;
  made->promotion = (int)promotion;
  made->address = (uint64_t)(uintptr_t)address;
  memcpy(made->sizes, dims, rank * sizeof *dims);
  memcpy(made->strides, strides, (rank - 1) * sizeof *strides);
  memcpy(made->box, box, rank * sizeof *box);
  memcpy(made->steps, steps, rank * sizeof *steps);
  memset(to, 0, sizeof *to);
  memcpy(to, &fake_map_count, sizeof fake_map_count);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **found, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *status) {
  (void)flags, (void)status;
  CUresult (*function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
      const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) = encode;
  *found = NULL;
  if (!strcmp(symbol, "cuTensorMapEncodeTiled") && version <= fake_version)
    memcpy(found, &function, sizeof function);
  return CUDA_SUCCESS;
}
