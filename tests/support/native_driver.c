// A CUDA driver without a GPU, called by C++ and, through ctypes, by Python: it records launches.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096, MOST_BYTES = 1024, MOST_FUNCTIONS = 256 };

typedef struct {
  uint64_t function, stream, nanoseconds, context;
  uint32_t grid[3], block[3], smem, bytes, overlaps;
  unsigned char params[MOST_BYTES];
} launch;

launch fake_launches[MOST];
int fake_count, fake_encoded, fake_keeps = 1;
int fake_fails, fake_map_fails; // the status of every launch, and of every tensor map
int fake_delay;                 // microseconds that the next launch takes
static uint32_t sizes[MOST_FUNCTIONS];
static int functions = 0x100;
static __thread uintptr_t contexts[8] = {0xC0};
static __thread int depth;
static __thread uintptr_t stream = 77;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// A function whose parameters have so many bytes.
int fake_function(int bytes) {
  sizes[functions - 0x100] = bytes;
  return functions++;
}

void fake_reset(void) { fake_count = fake_encoded = 0; }
void fake_set_context(uintptr_t context) { contexts[depth] = context; }
int fake_depth(void) { return depth; }
void fake_set_stream(uintptr_t to) { stream = to; }
void *fake_stream(int device) { return (void *)(stream + device); }

int cuCtxGetCurrent(void **context) {
  *context = (void *)contexts[depth];
  return 0;
}

int cuCtxPushCurrent(void *context) {
  contexts[++depth] = (uintptr_t)context;
  return 0;
}

int cuCtxPopCurrent(void **context) {
  *context = (void *)contexts[depth--];
  return 0;
}

typedef struct { // CUlaunchAttribute
  int id;
  _Alignas(8) union {
    char pad[64];
    int allowed;
  } value;
} attribute;

typedef struct { // CUlaunchConfig
  unsigned grid[3], block[3], smem;
  void *stream;
  attribute *attributes;
  unsigned attribute_count;
} config;

int cuLaunchKernelEx(const config *c, void *function, void **params, void **extra) {
  struct timespec now;
  for (unsigned i = 0; i < c->attribute_count; ++i)
    if (c->attributes[i].id != 6 || c->attributes[i].value.allowed != 1) return 1;
  if (fake_fails || extra) return fake_fails ? fake_fails : 1;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int wait = __atomic_exchange_n(&fake_delay, 0, __ATOMIC_SEQ_CST);
  if (wait) usleep(wait);
  if (!fake_keeps) return 0;
  pthread_mutex_lock(&lock);
  if (fake_count < MOST) {
    launch *made = &fake_launches[fake_count++];
    uint32_t bytes = sizes[(uintptr_t)function - 0x100];
    *made = (launch){(uintptr_t)function, (uintptr_t)c->stream,
                     now.tv_sec * 1000000000ull + now.tv_nsec, contexts[depth],
                     {c->grid[0], c->grid[1], c->grid[2]},
                     {c->block[0], c->block[1], c->block[2]}, c->smem, bytes, c->attribute_count};
    memcpy(made->params, params[0], bytes);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

// The map holds its own arguments, the address first.
int cuTensorMapEncodeTiled(void *map, int dtype, uint32_t rank, void *address,
                           const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *steps, int interleave, int swizzle, int promotion,
                           int fill) {
  unsigned char *to = map;
  if (fake_map_fails || (uintptr_t)map % 64) return fake_map_fails ? fake_map_fails : 1;
  __atomic_add_fetch(&fake_encoded, 1, __ATOMIC_SEQ_CST);
  memset(to, 0, 128);
  memcpy(to, &address, 8);
  memcpy(to + 8, dims, 8 * rank);
  memcpy(to + 48, strides, 8 * (rank - 1));
  memcpy(to + 80, box, 4 * rank);
  for (uint32_t i = 0; i < rank; ++i) to[100 + i] = steps[i];
  to[105] = dtype, to[106] = rank, to[107] = interleave, to[108] = swizzle;
  to[109] = promotion, to[110] = fill;
  return 0;
}
